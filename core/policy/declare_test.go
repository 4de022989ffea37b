package policy_test

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/policy"
)

// TestUnreachable holds the warnings to the words that the specification
// quotes.
func TestUnreachable(t *testing.T) {
	p := &policy.Policy{
		Phase: policy.Run,
		Cap:   lists(t, []string{"corp.example.com", "debian.org"}, []string{"10.0.0.0/8"}),
		Hub:   &policy.HubEgress{Rules: []string{"wab", "wab-branches"}, Run: lists(t, nil, []string{"10.0.0.0/8:443"})},
		Job:   lists(t, []string{"pypi.org", "deb.debian.org", "example.com", "org"}, []string{"192.168.5.10/32", "10.1.0.0/16:80", "0.0.0.0/0"}),
		Services: []policy.Service{
			{VM: "db", Lists: lists(t, []string{"debian.org", "crates.io"}, nil)},
		},
	}
	p.Hub.Run.Names = []string{"org"}
	var got []string
	for _, r := range p.Unreachable() {
		got = append(got, r.Warning())
	}
	want := []string{
		"virtkit: warning: MICROVM_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress] allow_name, its lookups will be refused",
		"virtkit: warning: MICROVM_EGRESS_ALLOW_NAME example.com: outside the hub's egress rules (wab, wab-branches), its lookups will be refused",
		"virtkit: warning: MICROVM_EGRESS_ALLOW_IP 192.168.5.10/32: outside the node's [egress] allow_ip, reachable only as an address of a name it allows",
		"virtkit: warning: MICROVM_EGRESS_ALLOW_IP 192.168.5.10/32: outside the hub's egress rules (wab, wab-branches), reachable only as an address of a name it allows",
		"virtkit: warning: MICROVM_EGRESS_ALLOW_IP 10.1.0.0/16:80: outside the hub's egress rules (wab, wab-branches), reachable only as an address of a name it allows",
		"virtkit: warning: service db: MICROVM_EGRESS_ALLOW_NAME crates.io: outside the node's [egress] allow_name, its lookups will be refused",
		"virtkit: warning: service db: MICROVM_EGRESS_ALLOW_NAME crates.io: outside the hub's egress rules (wab, wab-branches), its lookups will be refused",
		"virtkit: warning: service db: MICROVM_EGRESS_ALLOW_NAME crates.io: outside the job's MICROVM_EGRESS_ALLOW_NAME, its lookups will be refused",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	r := p.Unreachable()[0]
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"variable":"MICROVM_EGRESS_ALLOW_NAME","entry":"pypi.org","dimension":"allow_name","phase":"run","layer":"node_cap","reason":"unreachable"}`; string(b) != want {
		t.Errorf("in a report: %s, want %s", b, want)
	}
}

func TestUnreachableElsewhere(t *testing.T) {
	one := func(p policy.Policy) string {
		t.Helper()
		l := p.Unreachable()
		if len(l) != 1 {
			t.Fatalf("%+v has %d unreachable entries", p, len(l))
		}
		return l[0].Warning()
	}
	cap := lists(t, nil, []string{"10.0.0.0/8"})
	for _, c := range []struct {
		p    policy.Policy
		want string
	}{
		{policy.Policy{Phase: policy.Build, Cap: policy.Lists{Names: []string{"debian.org"}}, Job: policy.Lists{Names: []string{"pypi.org"}}},
			"virtkit: warning: MICROVM_BUILD_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress.build] allow_name, its lookups will be refused"},
		{policy.Policy{Phase: policy.Run, Cap: cap, Job: lists(t, nil, []string{"192.0.2.0/24"})},
			"virtkit: warning: MICROVM_EGRESS_ALLOW_IP 192.0.2.0/24: outside the node's [egress] allow_ip, nothing of it is reachable"},
		{policy.Policy{Phase: policy.Run, Cap: cap, Job: policy.Lists{Names: []string{"pypi.org"}}, DryRun: true},
			"virtkit: warning: MICROVM_EGRESS_ALLOW_NAME pypi.org: outside the node's [egress] allow_name, which only reports (dry-run): once enforced, its lookups will be refused"},
		{policy.Policy{Phase: policy.Run, Hub: &policy.HubEgress{Rules: []string{"wab"}, Run: cap}, Job: policy.Lists{Names: []string{"pypi.org"}}, DryRun: true},
			"virtkit: warning: MICROVM_EGRESS_ALLOW_NAME pypi.org: outside the hub's egress rules (wab), its lookups will be refused"},
		{policy.Policy{Phase: policy.Run, Cap: cap, Job: policy.Lists{Names: []string{"pypi.org"}}, Flags: true},
			"virtkit: warning: --allow-name pypi.org: outside the node's [egress] allow_name, its lookups will be refused"},
	} {
		if got := one(c.p); got != c.want {
			t.Errorf("got\n%s\nwant\n%s", got, c.want)
		}
	}
	free := policy.Policy{Phase: policy.Run, Job: policy.Lists{Names: []string{"pypi.org"}}}
	if l := free.Unreachable(); l != nil {
		t.Errorf("under no cap: %v", l)
	}
}

func TestDryRunOn(t *testing.T) {
	vars := func(v string) func(string) (string, bool) {
		return func(k string) (string, bool) { return v, k == policy.DryRunVariable }
	}
	cap := policy.Lists{IPs: []policy.IPRule{}}
	for _, c := range []struct {
		what       string
		configured bool
		cap        policy.Lists
		value      string
		on, warned bool
	}{
		{"the job asks, the node has no list", false, policy.Lists{}, "1", true, false},
		{"the job asks, the node has one", false, cap, "yes", false, true},
		{"the node says so", true, cap, "", true, false},
		{"the job asks off, the node on", true, cap, "0", true, false},
		{"nobody asks", false, cap, "", false, false},
	} {
		on, warning, err := policy.DryRunOn(c.configured, c.cap, vars(c.value))
		if err != nil || on != c.on || (warning != "") != c.warned {
			t.Errorf("%s: %v, %q, %v", c.what, on, warning, err)
		}
	}
	if on, _, err := policy.DryRunOn(false, policy.Lists{}, vars("perhaps")); err == nil || on {
		t.Errorf("perhaps: %v, %v", on, err)
	}
	if on, err := policy.AuditOn(policy.Build, false, func(k string) (string, bool) { return "on", k == "MICROVM_BUILD_EGRESS_AUDIT" }); !on || err != nil {
		t.Errorf("AuditOn = %v, %v", on, err)
	}
	if on, err := policy.AuditOn(policy.Run, true, vars("")); !on || err != nil {
		t.Errorf("AuditOn of the configuration = %v, %v", on, err)
	}
}

func TestHubEgress(t *testing.T) {
	var h policy.HubEgress
	if err := json.Unmarshal([]byte(`{"rules":["wab"],"run":{"names":["Corp.example.com"],"ips":["10.10.140.49"]},"build":{},"dry_run":[{"rule":"r","run":{"names":[]},"build":{}}]}`), &h); err != nil {
		t.Fatal(err)
	}
	if err := h.Check(); err != nil || !h.Restricts(policy.Run) || h.Restricts(policy.Build) || h.Run.Names[0] != "corp.example.com" || !h.DryRun[0].Run.Restricted() {
		t.Errorf("%+v: %v", h, err)
	}
	if err := h.CheckMode("tap"); fault.KindOf(err) != fault.Denied || !strings.Contains(err.Error(), "(wab)") {
		t.Errorf("under tap: %v", err)
	}
	if err := h.CheckMode("switch"); err != nil {
		t.Errorf("under switch: %v", err)
	}
	if err := h.CheckWindowsBuild(); err != nil {
		t.Errorf("a build phase left unrestricted: %v", err)
	}
	h.DryRun[0].Build = policy.Lists{Names: []string{}}
	if err := h.CheckWindowsBuild(); err != nil {
		t.Errorf("a dry-run rule refuses a build: %v", err)
	}
	h.Build = policy.Lists{Names: []string{}}
	if err := h.CheckWindowsBuild(); fault.KindOf(err) != fault.Denied {
		t.Errorf("a restricted build: %v", err)
	}
	h.Build.Names = make([]string, 257)
	if err := h.Check(); err == nil {
		t.Error("257 entries pass")
	}
	h.Build.Names, h.Rules = nil, make([]string, 32)
	if err := h.Check(); err == nil || !strings.Contains(err.Error(), "33 rules") {
		t.Errorf("33 rules: %v", err)
	}
	for _, bad := range []string{`{"rules":["r"],"run":{"names":[]}}`, `{"build":{}}`, `{"run":{},"build":{},"dry_run":[{"rule":"r","run":{}}]}`, `{"run":null,"build":{}}`} {
		var h policy.HubEgress
		if err := json.Unmarshal([]byte(bad), &h); err == nil {
			t.Errorf("%s is taken as %+v", bad, h)
		}
	}
	var none *policy.HubEgress
	if none.Check() != nil || none.CheckMode("tap") != nil || none.CheckWindowsBuild() != nil || none.Restricts(policy.Run) {
		t.Error("no hub restricts")
	}
}

func TestFingerprint(t *testing.T) {
	base := func() *policy.Policy {
		return &policy.Policy{Phase: policy.Run, Cap: lists(t, []string{"a", "b"}, []string{"10.0.0.0/8", "10.0.0.0/9"}),
			Services: []policy.Service{{VM: "x", Lists: lists(t, []string{}, nil)}, {VM: "y", Lists: lists(t, []string{"a"}, nil)}}}
	}
	want := base().Fingerprint()
	if !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(want) {
		t.Fatalf("%q is not 16 hexadecimal digits", want)
	}
	same := base()
	same.Cap = lists(t, []string{"b", "a", "b"}, []string{"10.0.0.0/9", "10.0.0.0/8"})
	same.Services[0], same.Services[1] = same.Services[1], same.Services[0]
	same.Hub = &policy.HubEgress{Rules: []string{"open"}, DryRun: []policy.HubDryRule{{Rule: "r", Run: lists(t, []string{}, nil)}}}
	if got := same.Fingerprint(); got != want {
		t.Errorf("order, repetition, a hub that restricts nothing: %s, want %s", got, want)
	}
	seen := map[string]string{want: "base"}
	for what, change := range map[string]func(*policy.Policy){
		"a name less":     func(p *policy.Policy) { p.Cap.Names = p.Cap.Names[:1] },
		"an ip less":      func(p *policy.Policy) { p.Cap.IPs = p.Cap.IPs[:1] },
		"ips none":        func(p *policy.Policy) { p.Cap.IPs = nil },
		"the job's":       func(p *policy.Policy) { p.Job, p.Cap = p.Cap, policy.Lists{} },
		"the hub's":       func(p *policy.Policy) { p.Hub, p.Cap = &policy.HubEgress{Run: p.Cap}, policy.Lists{} },
		"job as well":     func(p *policy.Policy) { p.Job = p.Cap },
		"a service gone":  func(p *policy.Policy) { p.Services = p.Services[:1] },
		"a service other": func(p *policy.Policy) { p.Services[0].VM = "z" },
	} {
		p := base()
		change(p)
		got := p.Fingerprint()
		if other, dup := seen[got]; dup || got == "" {
			t.Errorf("%s: %q, as %s", what, got, other)
		}
		seen[got] = what
	}
	dry := base()
	dry.DryRun = true
	if got := dry.Fingerprint(); got != "" {
		t.Errorf("under dry-run nothing is enforced, yet it is policy %s", got)
	}
	// Kept in files: the value must never change for the same policy.
	p := &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"debian.org"}}}
	if got := p.Fingerprint(); got != goldenFingerprint {
		t.Errorf("the fingerprint of a known policy became %s", got)
	}
}

func TestReportCap(t *testing.T) {
	a := policy.ReportCap(lists(t, []string{"b", "a", "b"}, []string{"10.0.0.0/8:9", "10.0.0.0/8"}), false)
	b := policy.ReportCap(lists(t, []string{"a", "b"}, []string{"10.0.0.0/8", "10.0.0.0/8:9"}), false)
	ja, _ := json.Marshal(a)
	jb, _ := json.Marshal(b)
	if string(ja) != string(jb) {
		t.Errorf("%s and %s are the same cap", ja, jb)
	}
	if c := policy.ReportCap(*a.Lists, true); c.Fingerprint == a.Fingerprint {
		t.Error("dry-run does not change the fingerprint")
	}
	if c := policy.ReportCap(policy.Lists{}, false); c.Fingerprint == "" || c.Lists.Restricted() {
		t.Errorf("no cap: %+v", c)
	}
	run := policy.Lists{Names: []string{"a"}}
	for mode, want := range map[string]string{
		"switch": `{"names":["a"]}`, "none": `{"names":[],"ips":[]}`, "tap": `{}`, "pool": `{}`,
	} {
		c := policy.ReportCaps(mode, run, true, run)
		if got, _ := json.Marshal(c.Run.Lists); string(got) != want || c.Run.DryRun != (mode == "switch") || c.Build.DryRun || c.Build.Lists.Names[0] != "a" {
			t.Errorf("under %s: %s, %+v", mode, got, c)
		}
	}
	big := policy.ReportCap(policy.Lists{Names: make([]string, 257)}, false)
	if !big.TooLarge || big.Lists != nil || big.Fingerprint == "" {
		t.Errorf("257 entries: %+v", big)
	}
}

const goldenFingerprint = "fc636b191d2c4877"

// FuzzHubEgress: whatever a hub sends is refused, or says for each phase what
// it says again when written.
func FuzzHubEgress(f *testing.F) {
	f.Add([]byte(`{"rules":["wab"],"run":{"names":["a.b"],"ips":["10.0.0.0/8:1"]},"build":{},"dry_run":[{"rule":"r","run":{"ips":[]},"build":{}}]}`))
	f.Add([]byte(`{"run":{},"build":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h policy.HubEgress
		if json.Unmarshal(b, &h) != nil || h.Check() != nil {
			return
		}
		out, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		var again policy.HubEgress
		if err := json.Unmarshal(out, &again); err != nil {
			t.Fatalf("%s reads as %s, which does not read: %v", b, out, err)
		}
		for _, p := range []policy.Phase{policy.Run, policy.Build} {
			one := &policy.Policy{Phase: p, Hub: &h}
			two := &policy.Policy{Phase: p, Hub: &again}
			if one.Fingerprint() != two.Fingerprint() {
				t.Errorf("%s: phase %s changes through %s", b, p, out)
			}
			one.Stack("").Name("a.b")
			policy.LayerLines(one, two)
		}
	})
}

// A policy goes to the switch's process as JSON: nothing of it may be lost on
// the way, least of all the difference between an absent and an empty list.
func TestPolicyGoesThroughJSON(t *testing.T) {
	ip := func(s string) policy.IPRule {
		r, err := policy.ParseIP(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	want := policy.Policy{
		Phase: policy.Run, DryRun: true, Flags: true,
		Cap: policy.Lists{Names: []string{"debian.org"}},
		Job: policy.Lists{IPs: []policy.IPRule{}},
		Hub: &policy.HubEgress{Rules: []string{"wab"}, Run: policy.Lists{Names: []string{}, IPs: []policy.IPRule{ip("10.0.0.0/8:443")}},
			DryRun: []policy.HubDryRule{{Rule: "next", Build: policy.Lists{Names: []string{"a.example"}}}}},
		Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{}}}, {VM: "web"}},
	}
	b, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got policy.Policy
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("lost on the way: %s\n%s", d, b)
	}
	if want.Fingerprint() != got.Fingerprint() {
		t.Error("the fingerprint changed")
	}
}

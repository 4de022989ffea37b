package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/policy"
)

// flow is a TCP flow to an address and port.
func flow(at string) policy.Flow {
	return policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.MustParseAddrPort(at)}
}

func lists(t testing.TB, names []string, addrs []string) policy.Lists {
	t.Helper()
	var l policy.Lists
	if names != nil {
		l.Names = names
	}
	if addrs != nil {
		l.IPs = ips(t, addrs...)
	}
	return l
}

// TestSuffixes is public case S33, and S32's letter case and final dot of the
// question.
func TestSuffixes(t *testing.T) {
	s := (&policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"example.com"}}}).Stack("")
	for q, want := range map[string]bool{
		"example.com":            true,
		"example.com.":           true,
		"EXAMPLE.com.":           true,
		"eXaMpLe.CoM":            true,
		"a.example.com":          true,
		"a.b.example.com":        true,
		"_sip._tcp.example.com":  true,
		"evilexample.com":        false,
		"example.com.evil.test":  false,
		"com":                    false,
		"":                       false,
		".":                      false,
		`evil\.example.com`:      false, // one label "evil.example" under com
		`a\\.example.com`:        true,  // a label that ends with a backslash
		`example\.com`:           false,
		`example.com\.`:          false,
		"EXAMPLE.COM.corp.lan":   false, // a search suffix appended
		"7.2.0.192.in-addr.arpa": false,
		"example.ＣＯＭ":            false,
		"exampl\u212a.com":       false, // KELVIN SIGN folds to k only outside ASCII
	} {
		j := s.Name(q)
		if j.Allow != want {
			t.Errorf("Name(%q) = %+v, want %v", q, j, want)
		}
		if !want && (j.Layer != policy.LayerNodeCap || j.Reason != "outside the node's [egress] allow_name") {
			t.Errorf("Name(%q) = %+v", q, j)
		}
	}
}

func TestCanonicalName(t *testing.T) {
	for in, want := range map[string]string{
		"A.b.": "a.b", "a.b": "a.b", ".": "", "": "", `a\.`: `a\.`, `a\\.`: `a\\`, "a..": "a.", "É.X": "É.x",
	} {
		if got := policy.CanonicalName(in); got != want {
			t.Errorf("CanonicalName(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestAddresses(t *testing.T) {
	y := policy.NodeCap(policy.Run, lists(t, nil, []string{"10.0.0.0/8", "192.0.2.7:443", "192.0.2.7/32:8443", "198.51.100.0/24:53", "198.51.100.0/24"}))
	for at, want := range map[string]bool{
		"10.255.255.255:1": true, "11.0.0.0:1": false,
		"192.0.2.7:443": true, "192.0.2.7:8443": true, "192.0.2.7:80": false, "192.0.2.6:443": false,
		"192.0.2.7:0": false, "10.1.1.1:0": true, // an echo
		"198.51.100.1:53": true, "198.51.100.1:80": true, // a rule for every port wins over one for a port
		"[2001:db8::1]:443": false, "[::ffff:10.0.0.1]:443": true,
	} {
		if got := y.AllowsIP(netip.MustParseAddrPort(at)); got != want {
			t.Errorf("AllowsIP(%s) = %v", at, got)
		}
	}
	all := policy.NodeCap(policy.Run, lists(t, nil, []string{"0.0.0.0/0"}))
	if !all.AllowsIP(netip.MustParseAddrPort("203.0.113.1:1")) {
		t.Error("0.0.0.0/0 does not allow everything")
	}
}

// TestLayersInOrder: the first layer to refuse decides, and says where it is
// written.
func TestLayersInOrder(t *testing.T) {
	p := &policy.Policy{
		Phase:    policy.Run,
		Cap:      lists(t, []string{"a", "b", "c", "d"}, []string{"10.0.0.0/8"}),
		Hub:      &policy.HubEgress{Rules: []string{"wab", "wab-branches"}, Run: lists(t, []string{"b", "c", "d"}, []string{"10.0.0.0/9"})},
		Job:      lists(t, []string{"c", "d"}, []string{"10.0.0.0/10"}),
		Services: []policy.Service{{VM: "db", Lists: lists(t, []string{"d"}, []string{"10.0.0.0/11"})}},
	}
	s, job := p.Stack("db"), p.Stack("")
	type v struct {
		layer, reason string
	}
	for q, want := range map[string]v{
		"x.example": {policy.LayerNodeCap, "outside the node's [egress] allow_name"},
		"x.a":       {policy.LayerHub, "outside the hub's egress rules (wab, wab-branches)"},
		"x.b":       {policy.LayerJob, "outside the job's MICROVM_EGRESS_ALLOW_NAME"},
		"x.c":       {policy.LayerService, "outside service db's MICROVM_EGRESS_ALLOW_NAME"},
		"x.d":       {},
	} {
		j := s.Name(q)
		if got := (v{j.Layer, j.Reason}); got != want || j.Allow != (want == v{}) {
			t.Errorf("Name(%s) = %+v", q, j)
		}
	}
	for at, want := range map[string]v{
		"11.0.0.1:80":  {policy.LayerNodeCap, "outside the node's [egress] allow_ip"},
		"10.128.0.1:1": {policy.LayerHub, "outside the hub's egress rules (wab, wab-branches)"},
		"10.64.0.1:1":  {policy.LayerJob, "outside the job's MICROVM_EGRESS_ALLOW_IP"},
		"10.32.0.1:1":  {policy.LayerService, "outside service db's MICROVM_EGRESS_ALLOW_IP"},
		"10.0.0.1:1":   {},
	} {
		j := s.IP(flow(at), nil)
		if got := (v{j.Layer, j.Reason}); got != want || j.Allow != (want == v{}) {
			t.Errorf("IP(%s) = %+v", at, j)
		}
	}
	if !job.Name("x.c").Allow || !job.IP(flow("10.32.0.1:1"), nil).Allow {
		t.Error("the job is held to its service's lists")
	}
	if !p.Stack("cache").Name("x.c").Allow {
		t.Error("a service without lists of its own is not held to the job's alone")
	}
}

func TestOpenedAddresses(t *testing.T) {
	p := &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"ok.example"}}, Job: policy.Lists{IPs: ips(t, "10.0.0.0/8")}}
	// The job lists a range alone: its names resolve to nothing, and the cap
	// lists no range, so nothing is reachable.
	s := p.Stack("")
	if s.Name("ok.example").Allow || s.IP(flow("10.0.0.1:80"), nil).Allow {
		t.Error("a range outside the cap, and a name outside the job's lists, are reachable")
	}
	p.Job.Names = []string{"example"}
	s = p.Stack("")
	at := flow("10.0.0.1:443")
	if j := s.IP(at, []string{"ok.example"}); !j.Allow {
		t.Errorf("an opened address in the job's range: %+v", j)
	}
	if j := s.IP(flow("203.0.113.7:443"), []string{"ok.example"}); !j.Allow {
		t.Errorf("an opened address: %+v", j)
	}
	if j := s.IP(flow("203.0.113.7:443"), nil); j.Allow {
		t.Error("an address that is not open is reachable")
	}
	if j := s.IP(flow("203.0.113.7:443"), []string{"bad.example"}); j.Allow || j.Layer != policy.LayerNodeCap ||
		j.Reason != "outside the node's [egress] allow_ip, and no name it allows opened the address" {
		t.Errorf("opened by a name the cap refuses: %+v", j)
	}
	dns := flow("203.0.113.7:53")
	if j := s.IP(dns, []string{"ok.example"}); j.Allow || j.Reason != "outside the node's [egress] allow_ip: a name opens every port but 53" {
		t.Errorf("port 53 of an opened address: %+v", j)
	}
	dns.Proto = policy.UDP
	if s.IP(dns, []string{"ok.example"}).Allow {
		t.Error("UDP port 53 of an opened address is reachable")
	}
	echo := policy.Flow{Proto: policy.ICMP, Dst: netip.MustParseAddrPort("203.0.113.7:0")}
	if !s.IP(echo, []string{"ok.example"}).Allow || s.IP(echo, nil).Allow {
		t.Error("an echo follows other rules than a flow")
	}
	many := slices.Repeat([]string{"bad.example"}, 80)
	if s.IP(at, append(many, "ok.example")).Allow {
		t.Error("more than 64 names count")
	}
}

func TestNodeDryRun(t *testing.T) {
	p := &policy.Policy{
		Phase: policy.Run, DryRun: true,
		Cap:      policy.Lists{Names: []string{"cap.example", "both.example", "hubless.example"}},
		Job:      policy.Lists{Names: []string{"both.example", "hubless.example"}},
		Hub:      &policy.HubEgress{Rules: []string{"r"}, Run: policy.Lists{Names: []string{"cap.example", "both.example", "other.example"}}},
		Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{}}}},
	}
	s := p.Stack("")
	would := func(j policy.Judgement) string {
		if !j.Allow {
			return "blocked by " + j.Layer
		}
		var out []string
		for _, w := range j.Would {
			out = append(out, w.Layer+w.Rule)
		}
		return strings.Join(out, ",")
	}
	for q, want := range map[string]string{
		"both.example":    "",
		"cap.example":     policy.LayerJob,
		"other.example":   policy.LayerNodeCap,
		"hubless.example": "blocked by " + policy.LayerHub,
	} {
		if got := would(s.Name(q)); got != want {
			t.Errorf("Name(%s): %q, want %q", q, got, want)
		}
		if got := would(s.IP(flow("203.0.113.1:1"), []string{q})); got != want {
			t.Errorf("IP opened by %s: %q, want %q", q, got, want)
		}
	}
	if got := would(p.Stack("db").Name("both.example")); got != policy.LayerService {
		t.Errorf("a service's own lists under dry-run: %q", got)
	}
	if got := would(s.IP(flow("203.0.113.1:1"), nil)); got != "blocked by "+policy.LayerHub {
		t.Errorf("a literal address under a hub that lists none: %q", got)
	}
	p.Phase = policy.Build
	if p.Stack("").Name("other.example").Allow {
		t.Error("dry-run covers the build phase")
	}
}

// TestSurvivingNames: a layer is passed by names alone that the layers before
// it allow too.
func TestSurvivingNames(t *testing.T) {
	p := &policy.Policy{Phase: policy.Run, DryRun: true, Cap: policy.Lists{Names: []string{"n1"}}, Job: policy.Lists{Names: []string{"n2"}}}
	s := p.Stack("")
	j := s.IP(flow("203.0.113.1:1"), []string{"n1", "n2"})
	if len(j.Would) != 1 || j.Would[0].Layer != policy.LayerJob {
		t.Errorf("n1 is the cap's, n2 the job's, neither both's: %+v", j)
	}
	p.Cap.IPs = ips(t, "203.0.113.1/32")
	j = p.Stack("").IP(flow("203.0.113.1:1"), []string{"n2"})
	if len(j.Would) != 1 || j.Would[0].Layer != policy.LayerNodeCap || j.Would[0].Reason != "outside the node's [egress] allow_name" {
		t.Errorf("the cap has the address but refuses the name the job needs: %+v", j)
	}
	if j := p.Stack("").IP(flow("203.0.113.1:1"), []string{"n1"}); len(j.Would) != 1 || j.Would[0].Layer != policy.LayerJob {
		t.Errorf("the job has neither: %+v", j)
	}
}

func TestHubDryRunRules(t *testing.T) {
	p := &policy.Policy{Phase: policy.Build, Hub: &policy.HubEgress{
		Rules: []string{"wab"}, Build: policy.Lists{Names: []string{"debian.org", "pypi.org"}},
		DryRun: []policy.HubDryRule{
			{Rule: "wab-release", Build: policy.Lists{Names: []string{"debian.org"}}},
			{Rule: "open"},
			{Rule: "closed", Build: policy.Lists{Names: []string{}, IPs: []policy.IPRule{}}},
		}}}
	s := p.Stack("")
	if j := s.Name("crates.io"); j.Allow || len(j.Would) != 0 {
		t.Errorf("what is blocked is not would-blocked as well: %+v", j)
	}
	want := []policy.Would{
		{Layer: policy.LayerHub, Rule: "wab-release", Reason: "outside the hub's egress rules (wab-release)"},
		{Layer: policy.LayerHub, Rule: "closed", Reason: "outside the hub's egress rules (closed)"},
	}
	if d := cmp.Diff(policy.Judgement{Verdict: policy.Verdict{Allow: true}, Would: want}, s.Name("files.pypi.org")); d != "" {
		t.Error(d)
	}
	if j := s.IP(flow("203.0.113.1:443"), []string{"deb.debian.org"}); !j.Allow || len(j.Would) != 1 || j.Would[0].Rule != "closed" {
		t.Errorf("an address opened by a name the candidate allows: %+v", j)
	}
}

func TestUnreadable(t *testing.T) {
	if j := (&policy.Policy{Phase: policy.Run}).Stack("").Unreadable(); !j.Allow || j.Would != nil {
		t.Errorf("unrestricted: %+v", j)
	}
	p := &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"a"}}, DryRun: true}
	if j := p.Stack("").Unreadable(); !j.Allow || len(j.Would) != 1 {
		t.Errorf("under the node's dry-run: %+v", j)
	}
	p.Hub = &policy.HubEgress{Rules: []string{"r"}, Run: policy.Lists{Names: []string{"a"}}}
	if j := p.Stack("").Unreadable(); j.Allow || j.Layer != policy.LayerHub {
		t.Errorf("the hub's rules are not relaxed by it: %+v", j)
	}
}

func TestAsked(t *testing.T) {
	// Public case S31: two names on one address, one of them allowed.
	p := &policy.Policy{Phase: policy.Run, Job: lists(t, []string{"ok.example"}, []string{"192.0.2.1/32"})}
	s := p.Stack("")
	j := s.Asked(flow("203.0.113.7:443"), []string{"ok.example"}, "BAD.example")
	if j.Allow || j.Layer != policy.LayerJob || j.Reason != "outside the job's MICROVM_EGRESS_ALLOW_NAME: it asks for bad.example on an address that ok.example opened" {
		t.Errorf("%+v", j)
	}
	if !s.Asked(flow("203.0.113.7:443"), []string{"ok.example"}, "ok.example.").Allow {
		t.Error("the name that opened the address is refused")
	}
	if !s.Asked(flow("203.0.113.7:443"), []string{"ok.example"}, "www.ok.example").Allow {
		t.Error("another allowed name is refused")
	}
	if !s.Asked(flow("192.0.2.1:443"), nil, "bad.example").Allow {
		t.Error("an address that is listed itself may be asked for any name")
	}
	p.DryRun = true
	if j := p.Stack("").Asked(flow("203.0.113.7:443"), []string{"ok.example"}, "bad.example"); !j.Allow || len(j.Would) != 1 {
		t.Errorf("dry-run claims it was fine: %+v", j)
	}
}

// FuzzName holds the matching to a slow one that knows labels only.
func FuzzName(f *testing.F) {
	f.Add("example.com", "a.example.com")
	f.Add("com", `a\.com`)
	f.Add("b", "a.B.")
	f.Fuzz(func(t *testing.T, rule, q string) {
		n, err := policy.ParseName(rule)
		if err != nil {
			return
		}
		got := policy.NodeCap(policy.Run, policy.Lists{Names: []string{n}}).AllowsName(policy.CanonicalName(q))
		want := slices.Equal(tail(labels(policy.CanonicalName(q)), len(labels(n))), labels(n))
		if got != want {
			t.Errorf("rule %q, question %q: %v, want %v", n, q, got, want)
		}
		if c := policy.CleanName(q); len(c) > 253 || strings.ContainsFunc(c, func(r rune) bool { return r < '-' || r > 'z' }) {
			t.Errorf("CleanName(%q) = %q", q, c)
		}
	})
}

func labels(s string) []string {
	out := []string{""}
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '\\' && i+1 < len(s):
			out[len(out)-1] += s[i : i+2]
			i++
		case s[i] == '.':
			out = append(out, "")
		default:
			out[len(out)-1] += s[i : i+1]
		}
	}
	return out
}

func tail(l []string, n int) []string {
	if n > len(l) {
		return nil
	}
	return l[len(l)-n:]
}

// TestRandomPolicies holds IP and Name to the sentences of the specification,
// over random small policies: a name needs every enforced layer; an address
// needs every enforced layer's list, or a name that they all allow.
func TestRandomPolicies(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	names := []string{"a", "b", "x.a", "c"}
	addrs := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}
	pick := func() policy.Lists {
		var l policy.Lists
		if r.IntN(3) > 0 {
			l.Names = []string{}
			for _, n := range names[:2] {
				if r.IntN(2) == 0 {
					l.Names = append(l.Names, n)
				}
			}
		}
		if r.IntN(3) == 0 {
			l.IPs = []policy.IPRule{}
			for _, a := range addrs[:2] {
				if r.IntN(2) == 0 {
					l.IPs = append(l.IPs, ips(t, a)...)
				}
			}
		}
		return l
	}
	for range 3000 {
		p := &policy.Policy{Phase: policy.Run, Cap: pick(), Hub: &policy.HubEgress{Rules: []string{"r"}, Run: pick()}, Job: pick(),
			Services: []policy.Service{{VM: "db", Lists: pick()}}, DryRun: r.IntN(4) == 0}
		all := []policy.Lists{p.Cap, p.Hub.Run, p.Job, p.Services[0].Lists}
		enforced := all
		if p.DryRun {
			enforced = all[1:2]
		}
		s := p.Stack("db")
		ok := func(layers []policy.Lists, n string) bool {
			for _, l := range layers {
				if l.Restricted() && !slices.ContainsFunc(l.Names, func(x string) bool { return n == x || strings.HasSuffix(n, "."+x) }) {
					return false
				}
			}
			return true
		}
		var openers []string
		for _, n := range names {
			if j := s.Name(n); j.Allow != ok(enforced, n) {
				t.Fatalf("%s under %+v: %+v", n, p, j)
			} else if p.DryRun && j.Allow && (len(j.Would) == 0) != ok([]policy.Lists{all[0], all[2], all[3]}, n) {
				t.Fatalf("%s under %+v: would %+v", n, p, j.Would)
			} else if j.Allow && r.IntN(2) == 0 {
				openers = append(openers, n)
			}
		}
		reach := func(layers []policy.Lists, at netip.AddrPort) bool {
			if slices.ContainsFunc(openers, func(n string) bool { return ok(layers, n) }) {
				return true
			}
			for _, l := range layers {
				if l.Restricted() && !slices.ContainsFunc(l.IPs, func(x policy.IPRule) bool { return x.Net.Contains(at.Addr()) }) {
					return false
				}
			}
			return true
		}
		for _, a := range addrs {
			at := netip.MustParseAddrPort(a + ":443")
			j := s.IP(policy.Flow{Proto: policy.TCP, Dst: at}, openers)
			if want := reach(enforced, at); j.Allow != want {
				t.Fatalf("%s opened by %v under %+v: %+v", at, openers, p, j)
			}
			// What would be refused were all enforced is refused by a layer that
			// the names alone, or the addresses alone, do not excuse.
			if p.DryRun && j.Allow && len(j.Would) == 0 && !reach(all, at) && !mixed(all, openers, at, ok) {
				t.Fatalf("%s opened by %v under %+v: nothing would refuse", at, openers, p)
			}
			if p.DryRun && j.Allow && len(j.Would) > 0 && reach(all, at) {
				t.Fatalf("%s opened by %v under %+v: would be refused: %+v", at, openers, p, j.Would)
			}
		}
	}
}

// mixed says whether each layer is passed by its list, or by a name that it
// and those before it allow.
func mixed(layers []policy.Lists, openers []string, at netip.AddrPort, ok func([]policy.Lists, string) bool) bool {
	for i, l := range layers {
		byIP := !l.Restricted() || slices.ContainsFunc(l.IPs, func(x policy.IPRule) bool { return x.Net.Contains(at.Addr()) })
		if !byIP && !slices.ContainsFunc(openers, func(n string) bool { return ok(layers[:i+1], n) }) {
			return false
		}
	}
	return true
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{0, 10, 1000} {
		var l policy.Lists
		for i := range n {
			l.Names = append(l.Names, fmt.Sprintf("host%d.example.com", i))
			l.IPs = append(l.IPs, policy.IPRule{Net: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)})
		}
		s := (&policy.Policy{Phase: policy.Run, Cap: l, Job: l}).Stack("")
		b.Run(fmt.Sprintf("name-%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.Name("a.b.host3.example.com")
			}
		})
		b.Run(fmt.Sprintf("ip-%d", n), func(b *testing.B) {
			b.ReportAllocs()
			f, openers := flow("10.0.3.9:443"), []string{"host3.example.com"}
			for b.Loop() {
				s.IP(f, openers)
			}
		})
	}
}

// A service that is called as the job's port is does not lend it its policy.
func TestNoServiceIsTheJob(t *testing.T) {
	p := &policy.Policy{Phase: policy.Run, Job: policy.Lists{Names: []string{"a.example", "b.example"}},
		Services: []policy.Service{{VM: "runner", Lists: policy.Lists{Names: []string{"a.example"}}}}}
	e := policy.NewEngine(policy.EngineConfig{Policy: p, JobPort: "runner"})
	if v := e.Decide(policy.Flow{Port: "runner", Proto: policy.DNS, Name: "b.example"}); !v.Allow {
		t.Errorf("the job was held to a service's list: %+v", v)
	}
}

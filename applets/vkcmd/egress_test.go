package vkcmd

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/core/guestclient"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

func ipRules(t *testing.T, l ...string) []policy.IPRule {
	t.Helper()
	out := []policy.IPRule{}
	for _, s := range l {
		r, err := policy.ParseIP(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func TestEgressFlags(t *testing.T) {
	lists := func(f egressFlags) policy.Lists {
		e, err := f.policy("")
		if err != nil {
			t.Fatal(err)
		}
		return e.Policy.Job
	}
	if e, err := (&egressFlags{}).policy("none"); e != nil || err != nil {
		t.Errorf("no flag: %v %v; want no policy at all", e, err)
	}
	for _, tt := range []struct {
		name string
		f    egressFlags
		want policy.Lists
	}{
		{"audit alone restricts nothing", egressFlags{audit: true}, policy.Lists{}},
		{"restrict alone denies all", egressFlags{restrict: true}, policy.Lists{Names: []string{}, IPs: []policy.IPRule{}}},
		{"names", egressFlags{names: []string{"A.example,b.example", "c.example"}}, policy.Lists{Names: []string{"a.example", "b.example", "c.example"}}},
		{"an empty list allows nothing", egressFlags{ips: []string{""}}, policy.Lists{IPs: []policy.IPRule{}}},
		{"both", egressFlags{names: []string{"a.example"}, ips: []string{"192.0.2.7:443"}, restrict: true}, policy.Lists{Names: []string{"a.example"}, IPs: ipRules(t, "192.0.2.7/32:443")}},
	} {
		if d := cmp.Diff(tt.want, lists(tt.f), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
			t.Errorf("%s: %s", tt.name, d)
		}
	}
	for _, bad := range []struct {
		f    egressFlags
		net  string
		want string
	}{
		{egressFlags{names: []string{"*.x.example"}, ips: []string{"::1"}}, "", "flag --allow-name: invalid entry \"*.x.example\": a pattern: a suffix matches the names below it already (write x.example)\nflag --allow-ip: invalid entry \"::1\": IPv6, which guests do not have: write an IPv4 network"},
		{egressFlags{audit: true}, "none", "flag --net none: without a network there is nothing to allow or to audit"},
	} {
		if _, err := bad.f.policy(bad.net); err == nil || err.Error() != bad.want {
			t.Errorf("%+v: %v, want %s", bad.f, err, bad.want)
		}
	}
}

func sampleRecord(id string, ended bool) supervise.EgressRecord {
	p := policy.Policy{Phase: policy.Run, Job: policy.Lists{Names: []string{"debian.org"}}}
	e := policy.NewEngine(policy.EngineConfig{Policy: &p, JobPort: "g", Now: func() time.Time { return time.Unix(1_800_000_000, 0) }})
	e.Recorder().SetStage("build_script")
	for _, n := range []string{"deb.debian.org", "deb.debian.org", "pypi.org"} {
		e.Decide(policy.Flow{Port: "g", Proto: policy.DNS, Name: n})
	}
	e.Decide(policy.Flow{Port: "db", Proto: policy.TCP, Dst: netip.MustParseAddrPort("192.0.2.9:22")})
	return supervise.EgressRecord{Schema: "vk.egress-record/1", ID: id, Name: id, Kind: "gitlab", Updated: time.Unix(1_800_000_000, 0), Ended: ended,
		Egress: supervise.Egress{Policy: p, Audit: true, Site: "1-p/j"}, Record: e.Recorder().Snapshot(), Sent: 1024, Received: 2048}
}

// vk run tells the guest's refusals and contacts on stderr, after its output.
func TestRunTellsEgress(t *testing.T) {
	f := &fakeHost{prog: &script{res: guestclient.ExecResult{Code: 3}}, record: sampleRecord("x", false)}
	code, out, stderr := runFake(t, &runOptions{image: "x", args: []string{"a"}, egress: egressFlags{audit: true, names: []string{"debian.org"}}}, f, nil)
	want := `errvk: egress blocked by the allowlist:
vk:   dns pypi.org (once): outside the job's MICROVM_EGRESS_ALLOW_NAME
vk:   tcp 192.0.2.9:22 (once) from service db: outside the job's MICROVM_EGRESS_ALLOW_IP
vk: egress audit: what this run contacted:
vk:   dns deb.debian.org (2 times)
vk: egress audit: for allowlists of it run on the host: vk egress suggest x
`
	if code != 3 || out != "out" || stderr != want {
		t.Errorf("status %d, stdout %q, stderr:\n%s", code, out, cmp.Diff(want, stderr))
	}
	if e := f.spec.Net.Egress; e == nil || !e.Audit || !e.Policy.Flags || !cmp.Equal(e.Policy.Job.Names, []string{"debian.org"}) {
		t.Errorf("spec: %+v", e)
	}
	// Without a flag there is neither policy nor word.
	f = &fakeHost{prog: &script{}}
	if _, _, stderr := runFake(t, &runOptions{image: "x", args: []string{"a"}}, f, nil); f.spec.Net.Egress != nil || stderr != "err" {
		t.Errorf("%+v, %q", f.spec.Net.Egress, stderr)
	}
}

// vkIn runs a command of vk over a state directory.
func vkIn(t *testing.T, state string, args ...string) (int, string, string) {
	t.Helper()
	var out, stderr strings.Builder
	vars := map[string]string{"VIRTKIT_STATE_DIR": state, "HOME": state}
	env := appenv.Env{
		Args: append([]string{"vk"}, args...), Stdin: strings.NewReader(""), Stdout: &out, Stderr: &stderr,
		Getenv:    func(k string) string { return vars[k] },
		LookupEnv: func(k string) (string, bool) { v, ok := vars[k]; return v, ok },
		Environ:   func() []string { return nil },
		Dir:       os.Getwd, Exe: "/x",
	}
	return cliutil.Run(t.Context(), Command(env), env), out.String(), stderr.String()
}

func TestEgressCommandsOverKeptRecords(t *testing.T) {
	state := t.TempDir()
	kept := ledger.OpenEgress(state)
	if err := kept.Keep(sampleRecord("77-p-j-01234567", true)); err != nil {
		t.Fatal(err)
	}
	sample := sampleRecord("", true)
	fp := sample.Egress.Policy.Fingerprint()
	if _, err := kept.Contacted("1-p/j", fp, []string{"old.debian.org"}); err != nil {
		t.Fatal(err)
	}
	want := func(args []string, code int, wantOut string) string {
		t.Helper()
		got, out, stderr := vkIn(t, state, args...)
		if got != code || wantOut != "" && out != wantOut {
			t.Errorf("vk %v: %d\n%s%s", args, got, cmp.Diff(wantOut, out), stderr)
		}
		return out
	}
	want([]string{"egress", "suggest", "77"}, 0, `[egress]
allow_name = [
  "deb.debian.org", # dns, 2 times
  "old.debian.org", # in an earlier run
]
allow_ip = []
# blocked, and not proposed:
#   192.0.2.9/32:22  tcp, once, from db; refused now: outside the job's MICROVM_EGRESS_ALLOW_IP
#   pypi.org  dns, once; refused now: outside the job's MICROVM_EGRESS_ALLOW_NAME
`)
	want([]string{"egress", "suggest", "--vars", "77-p-j-01234567"}, 0, `variables:
  MICROVM_EGRESS_ALLOW_NAME: |
    deb.debian.org  # dns, 2 times
    old.debian.org  # in an earlier run
  # blocked, and not proposed:
  #   192.0.2.9/32:22  tcp, once, from db; refused now: outside the job's MICROVM_EGRESS_ALLOW_IP
  #   pypi.org  dns, once; refused now: outside the job's MICROVM_EGRESS_ALLOW_NAME
`)
	var doc struct {
		Schema string        `json:"schema"`
		Live   bool          `json:"live"`
		Policy string        `json:"policy"`
		Report policy.Report `json:"report"`
	}
	if err := json.Unmarshal([]byte(want([]string{"egress-report", "--json", "77"}, 0, "")), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Schema != "vk.egress-report/1" || doc.Live || doc.Policy != fp || len(doc.Report.Blocked) != 2 || doc.Report.Blocked[1].Service != "db" ||
		doc.Report.Run.Coverage != policy.Complete || *doc.Report.Run.Received != 2048 {
		t.Errorf("%+v", doc)
	}
	text := want([]string{"egress-report", "77"}, 0, "")
	for _, part := range []string{"77-p-j-01234567, complete\n", "policy: node cap unrestricted; job names debian.org, ips none\n", "pypi.org", "192.0.2.9:22", "deb.debian.org  dns"} {
		if !strings.Contains(text, part) {
			t.Errorf("the report lacks %q:\n%s", part, text)
		}
	}
	if out := want([]string{"egress-report"}, 0, ""); !strings.Contains(out, "77-p-j-01234567  gitlab") {
		t.Errorf("the list: %s", out)
	}
	want([]string{"egress-report", "nosuch"}, 10, "")
	want([]string{"egress", "suggest", "nosuch"}, 10, "")
}

// A job whose supervisor was killed, and whose cleanup has not come yet.
func TestEgressReportOfAKilledSupervisor(t *testing.T) {
	state := t.TempDir()
	jobs, err := ledger.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	r, err := jobs.Reserve(t.Context(), supervise.Spec{ID: "78-p-j-01234567", Kind: "gitlab"})
	if err != nil {
		t.Fatal(err)
	}
	r.Lock.Close()
	b, err := json.Marshal(sampleRecord("78-p-j-01234567", false))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, supervise.EgressFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, _ := vkIn(t, state, "egress-report", "78", "--json")
	var doc egressDocument
	if err := json.Unmarshal([]byte(out), &doc); err != nil || code != 0 || doc.Live || doc.Report.Run.Coverage != policy.Partial || len(doc.Report.Blocked) != 2 {
		t.Errorf("%d, %v: %s", code, err, out)
	}
}

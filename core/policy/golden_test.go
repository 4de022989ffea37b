package policy_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/policy"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got):\n%s", file, d)
	}
}

func lines(l []string) string { return strings.Join(l, "\n") + "\n" }

// clock is a time that the test moves.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func (c *clock) after(d time.Duration) { c.at = c.at.Add(d) }

// world is a job under a hub's rules, with a service, after some traffic.
type world struct {
	policy *policy.Policy
	engine *policy.Engine
	clock  *clock
}

func newWorld(t *testing.T, dryRun, strict bool) *world {
	t.Helper()
	w := &world{clock: &clock{t0}, policy: &policy.Policy{
		Phase: policy.Run, DryRun: dryRun,
		Cap: lists(t, []string{"corp.example.com", "debian.org", "pypi.org", "example"}, []string{"10.10.140.49/32"}),
		Hub: &policy.HubEgress{Rules: []string{"wab", "wab-branches"},
			Run:    lists(t, []string{"corp.example.com", "debian.org", "ok.example", "evil.example"}, []string{"10.10.140.49/32", "192.0.2.0/24"}),
			DryRun: []policy.HubDryRule{{Rule: "wab-release", Run: lists(t, []string{"corp.example.com", "ok.example"}, nil)}}},
		Job:      lists(t, []string{"corp.example.com", "debian.org", "ok.example"}, []string{"10.10.140.49/32:443"}),
		Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{}}}},
	}}
	w.engine = policy.NewEngine(policy.EngineConfig{Policy: w.policy, JobPort: "build", Now: w.clock.now, Strict: strict})
	return w
}

// dns asks for a name, and has the answer open an address when it may.
func (w *world) dns(port, name, gives string) bool {
	w.clock.after(time.Second)
	v := w.engine.Decide(policy.Flow{Port: port, Proto: policy.DNS, Name: name, QType: 1})
	if v.Allow && gives != "" {
		w.engine.Opened(port, []string{name, "cdn.elsewhere.test"}, []netip.Addr{netip.MustParseAddr(gives)}, 5*time.Second)
	}
	return v.Allow
}

func (w *world) tcp(port, at string) bool {
	w.clock.after(time.Second)
	return w.engine.Decide(policy.Flow{Port: port, Proto: policy.TCP, Dst: netip.MustParseAddrPort(at)}).Allow
}

// traffic is a little of everything; the stage before the second half is
// returned.
func (w *world) traffic(t *testing.T) policy.Record {
	t.Helper()
	r := w.engine.Recorder()
	r.SetStage("step_script")
	w.dns("build", "deb.debian.org", "203.0.113.5")
	w.dns("build", "DEB.debian.org.", "203.0.113.5")
	w.tcp("build", "203.0.113.5:443")
	w.dns("build", "ok.example", "203.0.113.7")
	w.tcp("build", "203.0.113.7:443")
	w.engine.Asked(policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.MustParseAddrPort("203.0.113.7:443")}, "evil.example")
	w.engine.Asked(policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.MustParseAddrPort("203.0.113.7:443")}, "OK.example")
	w.dns("build", "pypi.org", "")
	w.dns("build", "pypi.org", "")
	w.dns("build", "evil.example", "")
	w.tcp("build", "10.10.140.49:443")
	w.tcp("build", "10.10.140.49:80")
	w.tcp("build", "192.0.2.9:22")
	first := r.Snapshot()
	r.SetStage("after_script")
	w.dns("db", "deb.debian.org", "203.0.113.5")
	w.dns("build", "pypi.org", "")
	w.dns("build", "\x1b[31mx!.debian.org", "")
	w.clock.after(time.Second)
	w.engine.Decide(policy.Flow{Port: "build", Proto: policy.ICMP, Dst: netip.MustParseAddrPort("198.51.100.1:0")})
	w.engine.Denied(policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.MustParseAddrPort("169.254.169.254:80")},
		policy.Verdict{Layer: policy.LayerHost, Reason: "a link-local address (169.254.0.0/16)"})
	return first
}

func TestLayerLines(t *testing.T) {
	// The three lines that the specification quotes.
	hub := &policy.HubEgress{Rules: []string{"wab", "wab-branches"}, DryRun: []policy.HubDryRule{{Rule: "wab-release"}},
		Run: lists(t, []string{"corp.example.com"}, []string{"10.10.140.49/32"}), Build: lists(t, []string{"debian.org"}, nil)}
	run := &policy.Policy{Phase: policy.Run, Hub: hub}
	build := &policy.Policy{Phase: policy.Build, Hub: hub, Cap: lists(t, []string{"debian.org", "crates.io"}, nil)}
	want := `virtkit: egress under the hub's rules: wab, wab-branches (dry-run, not enforced: wab-release)
virtkit:   run: node cap unrestricted; hub names corp.example.com, ips 10.10.140.49/32; job not narrowed
virtkit:   build: node cap names debian.org crates.io, ips none; hub names debian.org, ips none; job not narrowed
`
	if d := cmp.Diff(want, lines(policy.LayerLines(run, build))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	w := newWorld(t, true, false)
	want = `virtkit: egress under the hub's rules: wab, wab-branches (dry-run, not enforced: wab-release)
virtkit:   run: node cap (dry-run, not enforced) names corp.example.com debian.org pypi.org example, ips 10.10.140.49/32; hub names corp.example.com debian.org ok.example evil.example, ips 10.10.140.49/32 192.0.2.0/24; job names corp.example.com debian.org ok.example, ips 10.10.140.49/32:443; service db names none, ips none
`
	if d := cmp.Diff(want, lines(policy.LayerLines(w.policy, nil))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if l := policy.LayerLines(&policy.Policy{Phase: policy.Run}, nil); l != nil {
		t.Errorf("without a hub: %q", l)
	}
	def := &policy.HubEgress{Rules: []string{"default"}, Run: policy.Lists{Names: []string{}}}
	if l := policy.LayerLines(&policy.Policy{Phase: policy.Run, Hub: def}, nil); l[1] != "virtkit:   run: node cap unrestricted; hub names none, ips none; job not narrowed" {
		t.Errorf("%q", l)
	}
}

func TestTraces(t *testing.T) {
	for _, c := range []struct {
		name           string
		dryRun, strict bool
	}{{"enforced", false, false}, {"strict", false, true}, {"dry-run", true, false}} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.dryRun, c.strict)
			first := w.traffic(t)
			all := w.engine.Recorder().Snapshot()
			var b strings.Builder
			b.WriteString("# step_script\n" + lines(policy.DenialLines(first, w.policy.Hub.Rules)))
			b.WriteString("# after_script\n" + lines(policy.DenialLines(all.Since(first), w.policy.Hub.Rules)))
			b.WriteString("# audit\n" + lines(policy.AuditLines(all, "42137")))
			st := &policy.Standing{Version: 1}
			st.Add(w.policy.Fingerprint(), all.ContactedNames(), w.clock.at)
			b.WriteString("# standing\n" + st.Line(w.policy.Fingerprint()) + "\n")
			sug := policy.Suggest(all, []string{"old.debian.org", "4.3.2.1.in-addr.arpa"}, w.policy)
			b.WriteString("# vk egress suggest\n" + sug.TOML() + sug.YAML())
			golden(t, "trace-"+c.name+".txt", b.String())
		})
	}
}

func TestReportGolden(t *testing.T) {
	w := newWorld(t, false, true)
	w.traffic(t)
	sent, received := uint64(1200), uint64(340000)
	bw := policy.NewEngine(policy.EngineConfig{Now: w.clock.now, JobPort: "build", Policy: &policy.Policy{Phase: policy.Build, Cap: lists(t, []string{"debian.org"}, nil),
		Hub: &policy.HubEgress{DryRun: []policy.HubDryRule{{Rule: "wab-release", Build: lists(t, []string{}, nil)}}}}})
	bw.Decide(policy.Flow{Port: "build", Proto: policy.DNS, Name: "deb.debian.org"})
	if l := policy.DenialLines(bw.Recorder().Snapshot(), nil); l != nil {
		t.Errorf("what a hub's rule in dry-run would block in a build is in the trace:\n%s", lines(l))
	}
	r := policy.BuildReport(policy.ReportInput{Revision: 7, Hub: w.policy.Hub,
		Refusals: w.policy.Unreachable(),
		Run:      &policy.PhaseInput{Record: w.engine.Recorder().Snapshot(), Cap: policy.ReportCap(w.policy.Cap, false).Fingerprint, Sent: &sent, Received: &received},
		Build:    &policy.PhaseInput{Record: bw.Recorder().Snapshot(), Coverage: policy.Partial}})
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", string(b)+"\n")
	var back policy.Report
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	again, err := json.MarshalIndent(back, "", " ")
	if err != nil || !bytes.Equal(again, b) {
		t.Errorf("the report changes on its way: %v\n%s", err, cmp.Diff(string(b), string(again)))
	}
}

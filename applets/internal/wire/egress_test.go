package wire

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/applets/internal/appenv"
	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/core/supervise"
)

func egressTestHost(t *testing.T, toml string) *Host {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "c.toml")
	if err := os.WriteFile(file, []byte(toml), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := Open(appenv.Env{Getenv: func(string) string { return "" }, Exe: "/x"}, Overrides{StateDir: filepath.Join(dir, "state"), ConfigFile: file})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestSwitchWithAPolicyRecords(t *testing.T) {
	h := egressTestHost(t, "[net]\ndns = [\"192.0.2.53\"]\n")
	p := policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"a.example"}}}
	n, err := h.newNetwork(supervise.Spec{Hostname: "vm", Net: supervise.NetSpec{Mode: "switch", Egress: &supervise.Egress{Policy: p}}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	e, ok := n.(supervise.EgressNetwork)
	if !ok || e.Recorder() == nil {
		t.Fatalf("%T does not record", n)
	}
	if sent, received := e.Traffic(); sent != 0 || received != 0 {
		t.Errorf("an idle switch moved %d and %d bytes", sent, received)
	}
	// Without a policy nothing decides, so that nothing is slowed down.
	n, err = h.newNetwork(supervise.Spec{Hostname: "vm", Net: supervise.NetSpec{Mode: "switch"}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if _, ok := n.(supervise.EgressNetwork); ok {
		t.Error("a guest without a policy is recorded")
	}
}

func TestEngineKnowsTheJobsPort(t *testing.T) {
	s := supervise.Spec{Hostname: "vm", Net: supervise.NetSpec{Egress: &supervise.Egress{
		Policy: policy.Policy{Phase: policy.Run, Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{}}}}},
	}}}
	e := engine(s)
	for port, want := range map[string]bool{"vm": true, "db": false} {
		if v := e.Decide(policy.Flow{Port: port, Proto: policy.DNS, Name: "x.example"}); v.Allow != want {
			t.Errorf("%s: %+v", port, v)
		}
	}
	for _, x := range e.Recorder().Snapshot().Entries {
		if want := map[policy.Outcome]string{policy.Observed: "", policy.Blocked: "db"}[x.Outcome]; x.Service != want {
			t.Errorf("recorded as %q's: %+v", x.Service, x)
		}
	}
}

func TestEgressSettings(t *testing.T) {
	s := egressTestHost(t, "[egress]\nallow_name = [\"A.example\"]\nstrict_names = true\n[egress.build]\nallow_ip = []\naudit = true\n").EgressSettings()
	if len(s.Run.Names) != 1 || s.Run.Names[0] != "a.example" || s.Run.IPs != nil || s.Build.IPs == nil || s.Build.Names != nil ||
		!s.StrictNames || !s.BuildAudit || s.Audit || s.DryRun {
		t.Errorf("%+v", s)
	}
}

func TestFallback(t *testing.T) {
	h := egressTestHost(t, "")
	if e, err := h.Fallback(); e != nil || err != nil {
		t.Errorf("no file: %+v, %v", e, err)
	}
	path := filepath.Join(h.StateDir, FallbackFile)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"rules":["default"],"run":{"names":[]},"build":{}}`)
	if e, err := h.Fallback(); err != nil || !e.Restricts(policy.Run) || e.Restricts(policy.Build) {
		t.Errorf("%+v, %v", e, err)
	}
	for what, s := range map[string]string{
		"half a file":       `{"rules":["default"],"run":`,
		"nothing":           "",
		"a phase left out":  `{"rules":[],"run":{}}`,
		"a null list":       `{"rules":[],"run":{"names":null},"build":{}}`,
		"an unknown list":   `{"rules":[],"run":{"hosts":[]},"build":{}}`,
		"an invalid entry":  `{"rules":[],"run":{"names":["*.x"]},"build":{}}`,
		"too many entries":  `{"rules":[],"build":{},"run":{"names":["` + manyNames(300) + `"]}}`,
		"no object at all":  `[]`,
		"a rule of no name": `{"rules":[""],"run":{},"build":{}}`,
	} {
		write(s)
		if e, err := h.Fallback(); fault.KindOf(err) != fault.System || err == nil || !strings.Contains(err.Error(), path) || fault.HintOf(err) == "" {
			t.Errorf("%s: %+v, %v; want no job to run", what, e, err)
		}
	}
}

func manyNames(n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = "n" + strings.Repeat("x", i%60) + string(rune('a'+i%26)) + ".example"
	}
	return strings.Join(out, `","`)
}

// What the supervisor keeps goes where the commands look.
func TestSupervisorKeepsRecordsWhereTheyAreFound(t *testing.T) {
	h := egressTestHost(t, "")
	r := supervise.EgressRecord{Schema: "vk.egress-record/1", ID: "run-1", Record: policy.NewRecorder(policy.Run).Snapshot()}
	if err := h.SupervisorDeps().KeepEgress(r); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Egress.Find(context.Background(), "run-1"); err != nil {
		t.Error(err)
	}
}

// A node says that it enforces a hub's rules where something does, and the caps
// that it holds jobs to there.
func TestWhatANodeEnforces(t *testing.T) {
	for mode, want := range map[string]string{
		"switch": "egress_rules egress_reports egress_fallback", "none": "egress_rules egress_reports egress_fallback",
		"tap": "egress_reports", "pool": "egress_reports",
	} {
		if got := strings.Join(features(mode), " "); got != want {
			t.Errorf("mode %s: %q, want %q", mode, got, want)
		}
	}
}

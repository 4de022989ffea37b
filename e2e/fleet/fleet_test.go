package fleet_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/hubdb"
)

func applied(st *wire.State) wire.Policy {
	if st == nil || st.Applied == nil {
		return wire.Policy{}
	}
	return st.Applied.Policy
}

// TestTwoNodes is the README's: a hub, two nodes, what steers them, and what
// people see of it.
func TestTwoNodes(t *testing.T) {
	f := newFleet(t)
	_, a := f.join("ci-1", f.addr)
	_, b := f.join("ci-2", f.addr)
	f.eventually("both are ready", func() bool { return f.state(a) == wire.Ready && f.state(b) == wire.Ready })
	f.must("nodes", "ceiling", "ci-1", "3")
	f.must("nodes", "stop", "ci-1")
	f.eventually("ci-1 has applied them", func() bool {
		n := f.node(a)
		p := applied(n.Reported)
		return p.Ceiling == 3 && p.Stop && n.Sync == "ok" && n.Reported.Acquisition == wire.Stopped
	})
	if out := f.must("nodes", "drain", "--wait", b); !strings.Contains(out, "drained") {
		t.Errorf("drain --wait prints %q", out)
	}
	out := f.must("nodes")
	for _, want := range []string{"ci-1", "ci-2", "stopped", "drained", "connected"} {
		if !strings.Contains(out, want) {
			t.Errorf("vk-hub nodes lacks %q:\n%s", want, out)
		}
	}
	if out := f.must("audit", "--node", "ci-2"); !strings.Contains(out, "command done: drain") || !strings.Contains(out, "state drained") {
		t.Errorf("audit:\n%s", out)
	}
	f.must("nodes", "quarantine", b)
	f.eventually("ci-2 is quarantined", func() bool { return f.state(b) == wire.Quarantined })
	f.must("nodes", "undrain", b)
	f.eventually("its undrain is refused", func() bool { return f.node(b).Commands[0].Outcome == wire.Declined })
	f.must("nodes", "release", b)
	f.eventually("a release returns it to drained", func() bool { return f.state(b) == wire.Drained })
	for _, args := range [][]string{{"status"}, {"workloads"}, {"nodes", "show", a}, {"status", "--json"}, {"workloads", "--json"}, {"nodes", "--json"}, {"check"}} {
		f.must(args...)
	}
	f.must("nodes", "remove", "ci-2")
	if out, code := f.cli("nodes", "show", b); code != 10 {
		t.Errorf("a removed node is shown: %d, %s", code, out)
	}
}

// TestRestore restores a backup that is older than a stop, a ceiling cut and a
// quarantine: the conflict is shown, nothing resumes, and nothing is lifted
// until an operator decides.
func TestRestore(t *testing.T) {
	f := newFleet(t)
	r := f.record("restore of a backup that is older than a stop, a ceiling cut and a quarantine")
	p, a := f.join("ci-1", f.addr)
	q, b := f.join("ci-2", f.addr)
	f.must("nodes", "ceiling", a, "8")
	f.eventually("the ceiling is applied", func() bool { return applied(f.node(a).Reported).Ceiling == 8 && f.state(b) == wire.Ready })
	backup := filepath.Join(f.dir, "backup")
	f.must("backup", backup)
	f.must("check", backup)
	f.must("nodes", "ceiling", a, "1")
	f.must("nodes", "stop", a)
	f.must("nodes", "quarantine", b)
	f.eventually("the cut, the stop and the quarantine are in force", func() bool {
		p := applied(f.node(a).Reported)
		return p.Ceiling == 1 && p.Stop && f.state(b) == wire.Quarantined && f.node(b).Pending == 0
	})
	before := f.node(a).Reported.Applied
	r.fault("the hub's database is the backup again")
	f.hub.kill(syscall.SIGTERM)
	db := filepath.Join(f.dir, "hub/hub.sqlite")
	data, err := os.ReadFile(backup)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"", "-wal", "-shm"} {
		_ = os.Remove(db + s)
	}
	if err := os.WriteFile(db, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f.hub.start()
	f.up()
	f.eventually("both are in conflict", func() bool { return f.node(a).Conflict != nil && f.node(b).Conflict != nil })
	r.fault("kill -9 of both nodes")
	for _, n := range []*process{p, q} { // a restart of the node changes nothing
		n.kill(syscall.SIGKILL)
		n.start()
	}
	f.eventually("they are back", func() bool { return f.node(a).Reach == hub.Connected && f.node(b).Reach == hub.Connected })
	if out := f.must("nodes"); strings.Count(out, "recovery conflict") != 2 || !strings.Contains(out, "conflict") {
		t.Errorf("vk-hub nodes:\n%s", out)
	}
	if out := f.must("nodes", "recover", a); !strings.Contains(out, "ceiling 1, acquisition stopped") || !strings.Contains(out, "ceiling 8, acquisition on") {
		t.Errorf("vk-hub nodes recover shows\n%s", out)
	}
	for _, args := range [][]string{{"nodes", "resume", a}, {"nodes", "ceiling", a, "9"}, {"nodes", "release", b}} {
		if out, code := f.cli(args...); code == 0 {
			t.Errorf("%q was taken in a conflict:\n%s", args, out)
		}
	}
	if st, err := persisted(filepath.Join(f.dir, "ci-1")); err != nil || st.Applied == nil || st.Applied.ID != before.ID {
		t.Errorf("ci-1 holds %+v, %v; want generation %d as before", st.Applied, err, before.Generation)
	}
	f.must("nodes", "recover", a, "--adopt")
	f.must("nodes", "recover", b, "--replace", "--ceiling", "2")
	f.eventually("both are in sync", func() bool { return f.node(a).Sync == "ok" && f.node(b).Sync == "ok" })
	n, m := f.node(a), f.node(b)
	if p := n.Desired.Policy; p.Ceiling != 1 || !p.Stop || n.Desired.Generation != before.Generation {
		t.Errorf("adopted %+v", n.Desired)
	}
	if applied(m.Reported).Ceiling != 2 || m.Reported.Node != wire.Quarantined {
		t.Errorf("replaced: %+v", m.Reported)
	}
	out := f.must("audit", "--node", a)
	i, j := strings.Index(out, "recovery: the hub's state: generation 1: ceiling 8"), strings.LastIndex(out, "recovery: adopted")
	if i < 0 || j < i {
		t.Errorf("the audit log lacks the states before the decision:\n%s", out)
	}
}

// TestCutConnection cuts a node off during ordinary work and during a drain.
func TestCutConnection(t *testing.T) {
	f := newFleet(t)
	r := f.record("a cut proxy during a drain")
	px := newProxy(t, f.addr)
	_, a := f.join("ci-1", px.addr())
	f.must("nodes", "ceiling", a, "4")
	f.eventually("the ceiling is applied", func() bool { return applied(f.node(a).Reported).Ceiling == 4 })
	dir := filepath.Join(f.dir, "ci-1")
	job := filepath.Join(dir, "job")
	if err := os.WriteFile(job, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.must("nodes", "drain", a)
	f.eventually("it drains", func() bool { return f.state(a) == wire.Draining })
	r.fault("the proxy cuts the connection, and refuses others")
	px.set(true)
	f.eventually("it is unreachable", func() bool { return f.node(a).Reach == hub.Unreachable })
	if n := f.node(a); n.Reported.Node == wire.Drained || n.Pending == 0 {
		t.Errorf("a node that cannot be reached is shown as %s with %d pending", n.Reported.Node, n.Pending)
	}
	if out := f.must("status"); !strings.Contains(out, "1 unreachable") {
		t.Errorf("status:\n%s", out)
	}
	f.must("nodes", "ceiling", a, "2") // waits for it
	st, err := persisted(dir)
	if err != nil || st.Node != wire.Draining || st.Applied.Policy.Ceiling != 4 {
		t.Errorf("cut off, it holds %+v, %v", st, err)
	}
	if err := os.Remove(job); err != nil {
		t.Fatal(err)
	}
	f.eventually("its drain completes without a hub", func() bool { st, err := persisted(dir); return err == nil && st.Node == wire.Drained })
	r.fault("the proxy passes")
	px.set(false)
	f.eventually("the hub learns of both", func() bool {
		n := f.node(a)
		return n.Reach == hub.Connected && n.Pending == 0 && applied(n.Reported).Ceiling == 2 && n.Reported.Node == wire.Drained
	})
}

// TestCopiedState runs one state directory on two hosts: the hub has one
// session at a time, and both are told.
func TestCopiedState(t *testing.T) {
	f := newFleet(t)
	r := f.record("a copied state directory on two hosts")
	p, a := f.join("ci-1", f.addr)
	f.eventually("it is there", func() bool { return f.state(a) == wire.Ready })
	copied := filepath.Join(f.dir, "copy")
	if err := os.CopyFS(copied, os.DirFS(filepath.Join(f.dir, "ci-1"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(copied, 0o700); err != nil {
		t.Fatal(err)
	}
	// CopyFS does not keep modes, which a node insists on.
	if err := filepath.WalkDir(filepath.Join(copied, "node"), func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			return os.Chmod(path, 0o700)
		}
		if err == nil {
			return os.Chmod(path, 0o600)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	r.fault("a copy of the state directory runs, too")
	q := f.run("copy", copied)
	warned := func(p *process) bool {
		b, _ := os.ReadFile(p.log)
		return strings.Contains(string(b), "copy of")
	}
	f.eventually("one of them warns of a copy", func() bool { return warned(p) || warned(q) })
	s, err := f.admin.Status(t.Context())
	if err != nil || s.Nodes != 1 || s.Reach["connected"] > 1 {
		t.Errorf("status %+v, %v", s, err)
	}
}

// wholeAudit checks that the lines number from 1 without gaps.
func wholeAudit(t *testing.T, f *fleet) []hub.AuditLine {
	t.Helper()
	r, err := f.admin.Audit(t.Context(), "", hub.AuditKept)
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range r.Lines {
		if l.Seq != uint64(i+1) {
			t.Fatalf("audit line %d has number %d", i+1, l.Seq)
		}
	}
	if err := hubdb.Check(t.Context(), filepath.Join(f.dir, "hub/hub.sqlite")); err != nil {
		t.Error(err)
	}
	return r.Lines
}

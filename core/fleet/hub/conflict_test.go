package hub_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// restored steers a node to generation 1, takes a backup, lets forget change
// it, and starts another hub on the backup.
func restored(t *testing.T, forget func(*testing.T, *bench, hubtest.Identity) *wire.State, check func(*testing.T, *bench, hubtest.Identity, *wire.State)) {
	t.Helper()
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		n, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(8)})
		if err != nil {
			t.Fatal(err)
		}
		c, _ := b.connect(i, ready(applied(&n.Desired)))
		c.Close()
		synctest.Wait()
		backup := b.store.Copy()
		st := forget(t, b, i)
		after := start(t, backup)
		defer after.stop()
		check(t, after, i, st)
	})
}

func cut(t *testing.T, b *bench, i hubtest.Identity) *wire.State {
	n, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(1), Stop: ptr(true)})
	if err != nil {
		t.Fatal(err)
	}
	return ready(applied(&n.Desired))
}

func TestConflictOfAStop(t *testing.T) {
	restored(t, cut, func(t *testing.T, b *bench, i hubtest.Identity, st *wire.State) {
		c, _ := b.connect(i, st)
		b.quiet(c)
		n := b.node(i)
		if n.Conflict == nil || n.Sync() != "conflict" || n.Desired.Policy.Stop {
			t.Fatalf("conflict %+v, sync %s", n.Conflict, n.Sync())
		}
		got := b.events(i)
		for _, want := range []string{"hub: recovery conflict: it applied generation 2 (ceiling 1, acquisition stopped)", "hub: recovery: the node's state: ready, generation 2: ceiling 1", "hub: recovery: the hub's state: generation 1: ceiling 8"} {
			if !strings.Contains(got, want) {
				t.Errorf("the audit log lacks %q:\n%s", want, got)
			}
		}
		// Nothing can be asked of it, and nothing is sent, in a later session either.
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(9)}); fault.KindOf(err) != fault.Conflict || !strings.Contains(fault.HintOf(err), "recover") {
			t.Errorf("SetPolicy: %v", err)
		}
		if _, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpUndrain); fault.KindOf(err) != fault.Conflict {
			t.Errorf("Issue: %v", err)
		}
		c.Close()
		c, _ = b.connect(i, st)
		b.quiet(c)
		n, err := b.Adopt(t.Context(), "uid 0", i.ID)
		if err != nil || n.Conflict != nil || n.Desired.Generation != 2 || !n.Desired.Policy.Stop || n.Desired.Policy.Ceiling != 1 {
			t.Fatalf("adopted: %+v, %v", n, err)
		}
		b.quiet(c) // the node has it already
		if s := b.node(i).Sync(); s != "ok" {
			t.Errorf("sync %s", s)
		}
		got = b.events(i)
		if !strings.HasSuffix(got, "uid 0: recovery: the node's state: ready, generation 2: ceiling 1, acquisition stopped\nuid 0: recovery: the hub's state: generation 1: ceiling 8, acquisition on\nuid 0: recovery: adopted: generation 2: ceiling 1, acquisition stopped") {
			t.Errorf("audit:\n%s", got)
		}
		if _, err := b.Adopt(t.Context(), "uid 0", i.ID); fault.KindOf(err) != fault.Conflict {
			t.Errorf("adopting twice: %v", err)
		}
		n, err = b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Stop: ptr(false)})
		if err != nil {
			t.Fatal(err)
		}
		if d := next[*wire.Desired](b, c); d.Generation != 3 || d.ID != n.Desired.ID {
			t.Errorf("after it: %+v", d)
		}
	})
}

func TestConflictReplaced(t *testing.T) {
	restored(t, cut, func(t *testing.T, b *bench, i hubtest.Identity, st *wire.State) {
		// The restored hub counts the same generation again, with another policy.
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(16)}); err != nil {
			t.Fatal(err)
		}
		c, _ := b.connect(i, st)
		b.quiet(c)
		if n := b.node(i); n.Conflict == nil || n.Desired.Generation != 2 {
			t.Fatalf("%+v", n.Record)
		}
		if _, err := b.Replace(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(2)}); err != nil {
			t.Fatal(err)
		}
		if d := next[*wire.Desired](b, c); d.Generation != 3 || d.Policy.Ceiling != 2 || d.Policy.Stop {
			t.Errorf("sent %+v", d)
		}
	})
}

func TestConflictOfAHubWithoutSteering(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		st := ready(&wire.Applied{Generation: 4, Policy: wire.Policy{Stop: true}}) // of a node that keeps no ids
		c, _ := b.connect(i, st)
		b.quiet(c)
		if n := b.node(i); n.Conflict == nil {
			t.Fatal("no conflict")
		}
		n, err := b.Adopt(t.Context(), "uid 0", i.ID)
		if err != nil || n.Desired.Generation != 5 || !n.Desired.Policy.Stop {
			t.Fatalf("%+v, %v", n.Desired, err)
		}
		if d := next[*wire.Desired](b, c); d.Generation != 5 || !d.Policy.Stop {
			t.Errorf("sent %+v", d)
		}
	})
}

// TestConflictOfAQuarantine: a command leaves no generation behind.
func TestConflictOfAQuarantine(t *testing.T) {
	restored(t, func(t *testing.T, b *bench, i hubtest.Identity) *wire.State {
		q, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpQuarantine)
		if err != nil {
			t.Fatal(err)
		}
		st := *b.node(i).State
		st.Node, st.LastCommand = wire.Quarantined, q.ID
		return &st
	}, func(t *testing.T, b *bench, i hubtest.Identity, st *wire.State) {
		// An old release in the backup must not lift it.
		rel, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpRelease)
		if err != nil {
			t.Fatal(err)
		}
		c, _ := b.connect(i, st)
		b.quiet(c)
		if n := b.node(i); n.Conflict == nil || n.Conflict.State != wire.Quarantined {
			t.Fatalf("%+v", n.Conflict)
		}
		if _, err := b.Adopt(t.Context(), "uid 0", i.ID); err != nil {
			t.Fatal(err)
		}
		if got, _ := b.store.Command(t.Context(), rel.ID); got.Outcome != wire.Failed || !strings.Contains(got.Message, "withdrawn") {
			t.Errorf("the release is %+v", got)
		}
		if got := b.events(i); !strings.Contains(got, "uid 0: recovery: adopted: the desired state is the same") || !strings.Contains(got, "uid 0: command withdrawn: release "+rel.ID) {
			t.Errorf("audit:\n%s", got)
		}
		b.quiet(c) // no release, and the desired state is the same
		c.Close()
		synctest.Wait()
		c, _ = b.connect(i, st)
		b.quiet(c)
		if n := b.node(i); n.Conflict != nil || n.State.Node != wire.Quarantined {
			t.Errorf("after it: %+v", n.Record)
		}
	})
}

// TestNoConflict: what merely lags behind is no evidence.
func TestNoConflict(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		one, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(8)})
		if err != nil {
			t.Fatal(err)
		}
		cmd, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(2)}); err != nil {
			t.Fatal(err)
		}
		st := ready(applied(&one.Desired))
		st.LastCommand = cmd.ID
		b.stop()
		b2 := start(t, b.store)
		defer b2.stop()
		c, _ := b2.connect(i, st)
		if d := next[*wire.Desired](b2, c); d.Generation != 2 {
			t.Errorf("sent %+v", d)
		}
		if m := next[*wire.Command](b2, c); m.ID != cmd.ID {
			t.Errorf("sent %+v", m)
		}
		if n := b2.node(i); n.Conflict != nil {
			t.Errorf("conflict: %+v", n.Conflict)
		}
	})
}

package node_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/wire"
)

// TestTunes: the concurrency is looked at every half minute, which alone may raise
// it, and when the desired state, the node's own state or the VMs change.
func TestTunes(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		l := r.open()
		go drainLink(l)
		l.KeepAlive(time.Second)
		// since are the passes of some time, true for one that may raise it.
		seen := 0
		since := func(d time.Duration) []bool {
			time.Sleep(d)
			synctest.Wait()
			all := r.host.Raises()
			defer func() { seen = len(all) }()
			return all[seen:]
		}
		if first := since(time.Second); len(first) == 0 || !first[0] {
			t.Fatalf("the first passes: %v", first)
		}
		for range 3 {
			if got := since(30 * time.Second); !slices.Equal(got, []bool{true}) {
				t.Errorf("in half a minute: %v", got)
			}
		}
		l.Say(&wire.Desired{Generation: 1, ID: wire.NewID(), Policy: wire.Policy{Stop: true}})
		if got := since(time.Second); len(got) == 0 || slices.Contains(got, true) {
			t.Errorf("acquisition stopped: %v", got)
		}
		r.host.SetDrain(wire.Drain{RunnerExited: true, Jobs: 1}, nil)
		say := func(op wire.Op, want wire.NodeState) {
			t.Helper()
			c := cmd(op)
			c.Expires = time.Now().Unix() + 60
			l.Say(c)
			synctest.Wait()
			if st := r.node.Store().State().Node; st != want {
				t.Errorf("after %s it is %s", op, st)
			}
		}
		say(wire.OpDrain, wire.Draining)
		if got := since(5 * time.Second); len(got) == 0 || len(got) > 2 || slices.Contains(got, true) {
			t.Errorf("draining, which is looked at each second: %v", got)
		}
		say(wire.OpQuarantine, wire.Quarantined)
		if got := since(time.Second); len(got) == 0 || slices.Contains(got, true) {
			t.Errorf("quarantined: %v", got)
		}
		r.host.SetVMs(wire.Workload{ID: "00000000000000ff", Kind: wire.KindJob})
		if got := since(6 * time.Second); !slices.Equal(got, []bool{false}) {
			t.Errorf("another VM: %v", got)
		}
		if c := r.host.Ceilings(); c[len(c)-1] != 0 {
			t.Errorf("the ceiling is %d", c[len(c)-1])
		}
		r.end()
	})
}

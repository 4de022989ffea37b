package hub_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// TestObservedWhileFull: what nodes and relays say while the store refuses is
// stored once it does not, though they do not say it again.
func TestObservedWhileFull(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i, j := hubtest.Enroll(t, b.Hub, "ci-1"), hubtest.Enroll(t, b.Hub, "ci-2")
		c, _ := b.connect(i, ready(nil))
		d, _ := b.connect(j, ready(nil))
		owner, key, err := hubtest.MakeRelay(t.Context(), b.Hub, "https://gitlab.example.com", "gl")
		if err != nil {
			t.Fatal(err)
		}
		near, far := hubtest.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- b.ServeRelay(t.Context(), far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) }()
		defer func() { near.CloseNow(); <-ended }()
		if _, err := (hubtest.Identity{ID: owner.ID, Key: key}).Dial(t.Context(), near, wire.Plaintext, wire.NewID(), dispatch.Versions); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		b.store.Fail(fmt.Errorf("%w: x", hub.ErrFull))
		say := func(c *hubtest.Client, cpus int) {
			b.send(c, &wire.Inventory{Hostname: "ci", CPUs: cpus})
			b.send(c, &wire.Report{Workloads: []wire.Workload{{ID: "0123456789abcdef", Kind: wire.KindJob, PID: cpus}}, State: ready(nil)})
			b.send(c, &wire.Heartbeat{Concurrency: cpus})
			time.Sleep(6 * time.Second) // more than one flush
			synctest.Wait()
		}
		beat, err := dispatch.Encode(&dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{{Name: "r", Jobs: 3}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := near.Write(t.Context(), beat); err != nil {
			t.Fatal(err)
		}
		say(c, 7)
		say(d, 8)
		say(d, 9) // the later one counts
		if b.Sick() == "" {
			t.Fatal("the store did not refuse")
		}
		b.store.Fail(nil)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if r := b.Snapshot().Relays[owner.ID]; r.Beat == nil || len(r.Beat.Runners) != 1 {
			t.Errorf("the relay's beat: %+v", r.Beat)
		}
		for want, of := range map[int]hubtest.Identity{7: i, 9: j} {
			n := b.node(of)
			w, err := b.store.Workloads(t.Context(), of.ID)
			if n.Inventory == nil || n.Inventory.CPUs != want || err != nil || w == nil || len(w.List) != 1 || w.List[0].PID != want || n.VMs != 1 {
				t.Errorf("want %d: inventory %+v, workloads %+v, %v", want, n.Inventory, w, err)
			}
		}
	})
}

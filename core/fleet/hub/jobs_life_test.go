package hub_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

func set[T any](n *hubtest.Placed, p *T, v T) { n.Lock(); *p = v; n.Unlock() }

func TestRefusedStarts(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		a, b := f.node("a", 9), f.node("b", 8)
		refuse := func(m wire.Message) string {
			if _, start := m.(*wire.Start); start {
				return "policy"
			}
			return ""
		}
		set(a, &a.Answer, refuse)
		id := f.mustSubmit("")
		v := f.want(id, dispatch.Running, "")
		if v.Node != b.ID || a.Starts[id] != 0 || b.Starts[id] != 1 {
			t.Errorf("a job that a refused is on %s, begun %d times on a, %d on b", v.Node, a.Starts[id], b.Starts[id])
		}
		set(b, &b.Answer, refuse)
		g := f.mustReserve()
		q := f.submission(g.Reservation, nil)
		q.PlaceWithinSecs = 20
		v, e := f.submit(q)
		if e != nil {
			t.Fatal(e)
		}
		time.Sleep(10 * time.Second)
		f.want(v.ID, dispatch.Queued, "")
		time.Sleep(12 * time.Second)
		v = f.want(v.ID, dispatch.Finished, "no_capacity")
		for _, n := range []*hubtest.Placed{a, b} {
			if held, _ := n.Holds(); len(held) != 0 {
				t.Errorf("a node holds %v after it refused the start", held)
			}
		}
		if p, e := f.Output(t.Context(), f.relay, v.ID, 0, 0); e != nil || !p.Complete || p.Length != 0 {
			t.Errorf("the output of a job that never ran: %+v, %v", p, e)
		}
	})
}

func TestCancel(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		queued := f.mustSubmit("")
		v, e := f.Cancel(t.Context(), f.relay, queued, wire.CancelGraceful)
		if e != nil || v.State != dispatch.Finished || v.Result.Failure != "canceled" {
			t.Errorf("a queued job canceled: %+v, %v", v, e)
		}
		n := f.node("a", 4)
		id := f.mustSubmit("")
		v, e = f.Cancel(t.Context(), f.relay, id, wire.CancelGraceful)
		if e != nil || v.State != dispatch.Running || v.Cancel != wire.CancelGraceful {
			t.Errorf("canceled: %+v, %v", v, e)
		}
		f.want(id, dispatch.Finished, "canceled")
		if n.Canceled[id] != wire.CancelGraceful {
			t.Errorf("the node was told %q", n.Canceled[id])
		}
		if v, e := f.Cancel(t.Context(), f.relay, id, wire.CancelImmediate); e != nil || v.Cancel != wire.CancelGraceful {
			t.Errorf("a finished job canceled: %+v, %v", v, e)
		}
		// One whose node is away hears of it when it is back; a mode of tomorrow
		// is immediate, and overrides.
		hang := f.connect(n)
		id = f.mustSubmit("")
		hang()
		for _, mode := range []wire.CancelMode{wire.CancelGraceful, "nicely", wire.CancelGraceful} {
			if _, e := f.Cancel(t.Context(), f.relay, id, mode); e != nil {
				t.Fatal(e)
			}
		}
		if v := f.view(id); v.Cancel != wire.CancelImmediate {
			t.Errorf("canceled gracefully, in a new mode, gracefully: %+v", v)
		}
		f.connect(n)
		f.want(id, dispatch.Finished, "canceled")
		if n.Canceled[id] != wire.CancelImmediate {
			t.Errorf("the node was told %q", n.Canceled[id])
		}
		if e := f.Settle(t.Context(), hub.Owner{ID: "other"}, id); code(e) != "404 not_found" {
			t.Errorf("another's job settled: %v", e)
		}
	})
}

func TestSettleNeedsAnEnd(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		id := f.mustSubmit("")
		if e := f.Settle(t.Context(), f.relay, id); code(e) != "409 conflict" {
			t.Errorf("a queued job settled: %v", e)
		}
	})
}

// TestLostAnswers loses each kind of message that a node sends of a job, with
// the connection that it would have gone over. Every job runs once, ends once,
// and its output is whole.
func TestLostAnswers(t *testing.T) {
	for _, kind := range []string{"*wire.JobState", "*wire.Output", "*wire.Result", "*wire.OfferReply", "*wire.Held"} {
		t.Run(kind, func(t *testing.T) {
			inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
				n := f.node("a", 4)
				text := strings.Repeat("0123456789abcde\n", 64)
				set(n, &n.Work, prints(text))
				set(n, &n.Chunk, 100)
				lost := 0
				if kind == "*wire.Held" { // the first session's is said already
					f.connect(n)
				}
				set(n, &n.Lose, func(m wire.Message) bool {
					if fmt.Sprintf("%T", m) == kind && lost < 2 {
						lost++
						return true
					}
					return false
				})
				reservation := ""
				if kind == "*wire.OfferReply" {
					q := &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90, WaitSecs: 60}
					got := make(chan *dispatch.ReservationGrant, 1)
					go func() {
						g, e := f.Reserve(context.Background(), f.relay, q, "x")
						if e != nil {
							t.Error(e)
						}
						got <- g
					}()
					for range 3 {
						f.connect(n)
					}
					if g := <-got; g != nil {
						reservation = g.Reservation
					}
				}
				v, e := f.submit(f.submission(reservation, nil))
				if e != nil {
					t.Fatal(e)
				}
				for range 4 {
					f.connect(n)
				}
				v = f.want(v.ID, dispatch.Finished, "")
				if n.Starts[v.ID] != 1 {
					t.Errorf("the job was begun %d times", n.Starts[v.ID])
				}
				if out := f.outputOf(v.ID); string(out) != text {
					t.Errorf("%d bytes of output, want %d", len(out), len(text))
				}
				if held, _ := n.Holds(); len(held) != 0 {
					t.Errorf("the node holds %v", held)
				}
				if lost == 0 && kind != "*wire.Held" {
					t.Error("nothing was lost")
				}
			})
		})
	}
}

// TestStartThatWasLost: a start that its node never got is placed again once
// the node says what it holds, and not before.
func TestStartThatWasLost(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 4<<30)
		near, far := hubtest.Pipe()
		f.wg.Go(func() { f.Serve(f.ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
		cl, err := n.Dial(t.Context(), near, wire.Plaintext, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatal(err)
		}
		st, inv, beat := n.State, n.Inventory, n.Beat
		for _, m := range []wire.Message{&wire.Report{State: &st}, &wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{}}, &inv, &beat} {
			if err := cl.Send(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(3 * time.Second)
		id := f.mustSubmit("")
		if m, err := hubtest.Next[*wire.Start](t.Context(), cl); err != nil || m.Job != id {
			t.Fatalf("%+v, %v", m, err)
		}
		near.CloseNow() // it is gone before it journaled it
		other := f.node("b", 4)
		time.Sleep(time.Minute)
		f.want(id, dispatch.Starting, "")
		if other.Starts[id] != 0 {
			t.Error("a start whose answer was lost went to another node")
		}
		f.connect(n)
		f.want(id, dispatch.Running, "")
		if n.Starts[id]+other.Starts[id] != 1 {
			t.Errorf("begun %d and %d times", n.Starts[id], other.Starts[id])
		}
	})
}

func TestLostNode(t *testing.T) {
	inFleet(t, hub.JobOptions{LostAfter: time.Minute}, func(t *testing.T, f *fleet) {
		n := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 4<<30)
		hang := f.connect(n)
		id := f.mustSubmit("")
		f.want(id, dispatch.Running, "")
		if err := n.Print(id, []byte("so far\n")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		hang()
		time.Sleep(70 * time.Second)
		f.want(id, dispatch.Running, "")
		time.Sleep(10 * time.Second)
		v := f.want(id, dispatch.Finished, "lost")
		if out := f.outputOf(id); string(out) != "so far\n" || v.Result.OutputLen != 7 {
			t.Errorf("output %q, result %+v", out, v.Result)
		}
		if _, err := f.SetPolicy(t.Context(), "test", n.ID, hub.PolicyChange{Ceiling: ptr(1)}); err != nil {
			t.Fatal(err)
		}
		// Back, it is told to stop, and counts under its ceiling until it has.
		set(n, &n.Lose, func(m wire.Message) bool { _, r := m.(*wire.Result); return r })
		f.connect(n)
		if n.Canceled[id] != wire.CancelImmediate {
			t.Errorf("the node was told %q", n.Canceled[id])
		}
		set(n, &n.Lose, nil)
		f.connect(n)
		f.want(id, dispatch.Finished, "lost")
		if _, e := f.reserve(0); e != nil {
			t.Errorf("no room after the result of what was given up: %v", e)
		}
		events := func(what string) (found bool) {
			lines, _ := f.store.Audit(t.Context(), hub.AuditQuery{Limit: 100})
			return slices.ContainsFunc(lines, func(l hub.AuditLine) bool { return l.Event == what && strings.Contains(l.Detail, id) })
		}
		if !events("job lost") || !events("job submitted") {
			t.Error("the audit log does not say what became of the job")
		}
	})
}

func TestRestart(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		f := run(t, hubtest.NewMemory(), dir, hub.JobOptions{})
		f.relay, _ = hubtest.NewRelay(t, f.Hub, gitlab, "gl")
		n := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 3<<30)
		f.connect(n)
		set(n, &n.Chunk, 10)
		running := f.mustSubmit("")
		done := f.mustSubmit("")
		if err := n.Print(running, []byte("before the restart\n")); err != nil {
			t.Fatal(err)
		}
		if err := n.Print(done, []byte("done\n")); err != nil {
			t.Fatal(err)
		}
		n.End(done, success())
		synctest.Wait()
		f.mustReserve()
		g := f.mustReserve()
		queued := f.mustSubmit("") // no room is left
		f.want(done, dispatch.Finished, "")
		f.want(queued, dispatch.Queued, "")
		f = f.again(hub.JobOptions{})
		defer func() { f.stop() }()
		synctest.Wait()
		f.want(running, dispatch.Running, "")
		f.want(queued, dispatch.Finished, "lost")
		f.want(done, dispatch.Finished, "")
		if out := f.outputOf(done); string(out) != "done\n" {
			t.Errorf("output %q", out)
		}
		if _, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 60}); code(e) != "410 reservation_gone" {
			t.Errorf("a reservation of before the restart: %v", e)
		}
		// The node printed on while the hub was away, and sends from where the
		// hub's file ends.
		n.Print(running, []byte("meanwhile\n"))
		f.connect(n)
		if held, _ := n.Holds(); len(held) != 0 {
			t.Errorf("the node holds %v still", held)
		}
		n.End(running, &wire.JobResult{Failure: "script", ExitCode: ptr(3), Artifacts: []wire.ArtifactResult{}})
		v := f.want(running, dispatch.Finished, "script")
		if out := f.outputOf(running); string(out) != "before the restart\nmeanwhile\n" || *v.Result.ExitCode != 3 {
			t.Errorf("output %q, result %+v", out, v.Result)
		}
		if e := f.Settle(t.Context(), f.relay, running); e != nil {
			t.Fatal(e)
		}
		f = f.again(hub.JobOptions{})
		f.want(running, dispatch.Finished, "script")
	})
}

// TestChaos runs jobs while nodes hang up, lose messages and refuse at random.
// Each is begun at most once, ends once, and its output is whole.
func TestChaos(t *testing.T) {
	inFleet(t, hub.JobOptions{LostAfter: 10 * time.Minute}, func(t *testing.T, f *fleet) {
		rng := rand.New(rand.NewPCG(7, 7))
		var calm atomic.Bool
		var nodes []*hubtest.Placed
		text := bytes.Repeat([]byte("some line of output\n"), 50)
		for i := range 4 {
			n := hubtest.NewPlaced(t, f.Hub, fmt.Sprint("n", i), "ci", 16, 64<<30)
			var mu sync.Mutex // what a node says comes from several goroutines
			r := rand.New(rand.NewPCG(uint64(i), 1))
			one := func(of int) bool {
				mu.Lock()
				defer mu.Unlock()
				return !calm.Load() && r.IntN(of) == 0
			}
			n.Chunk = 64
			n.Work = func(*wire.Start) ([]byte, *wire.JobResult) { return text, success() }
			n.Lose = func(wire.Message) bool { return one(40) }
			n.Answer = func(wire.Message) string {
				if one(5) {
					return "memory"
				}
				return ""
			}
			nodes = append(nodes, n)
			f.wg.Go(func() {
				for f.ctx.Err() == nil {
					near, far := hubtest.Pipe()
					f.wg.Go(func() { f.Serve(f.ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
					n.Session(f.ctx, near, wire.Plaintext)
					time.Sleep(100 * time.Millisecond)
				}
			})
		}
		time.Sleep(5 * time.Second)
		var ids []string
		for range 150 {
			reservation := ""
			if rng.IntN(2) == 0 {
				if g, e := f.reserve(20); e == nil {
					reservation = g.Reservation
				}
			}
			v, e := f.submit(f.submission(reservation, nil))
			if e != nil {
				t.Fatal(e)
			}
			ids = append(ids, v.ID)
			time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
		}
		calm.Store(true)
		time.Sleep(2 * time.Minute)
		for _, id := range ids {
			f.want(id, dispatch.Finished, "")
			begun := 0
			for _, n := range nodes {
				n.Lock()
				begun += n.Starts[id]
				n.Unlock()
			}
			if begun != 1 {
				t.Errorf("job %s was begun %d times", id, begun)
			}
			if out := f.outputOf(id); !bytes.Equal(out, text) {
				t.Errorf("job %s: %d bytes of output, want %d", id, len(out), len(text))
			}
		}
		for _, n := range nodes {
			if held, _ := n.Holds(); len(held) != 0 {
				t.Errorf("%s holds %v", n.Inventory.Hostname, held)
			}
		}
		if c, _ := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: small}); c.Fits != 4*64 {
			t.Errorf("fits %d after all, want %d: something is counted that is not there", c.Fits, 4*64)
		}
	})
}

// TestEndJob: an operator ends a job that its node does not; what the node
// sends of it afterwards changes nothing, and its room is free once it says so.
func TestEndJob(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 1)
		id := f.mustSubmit("")
		f.want(id, dispatch.Running, "")
		j, err := f.FindJob(t.Context(), id)
		if err == nil {
			j, err = f.EndJob(t.Context(), "uid 0", j)
		}
		if err != nil || j.State != dispatch.Finished || j.Outcome() != "canceled" {
			t.Fatalf("%+v, %v", j, err)
		}
		if j.Cancel != wire.CancelImmediate || j.Result == nil || !strings.Contains(j.Result.Message, "ended by an operator") {
			t.Errorf("how it ended: %q, %+v", j.Cancel, j.Result)
		}
		lines, _ := f.store.Audit(t.Context(), hub.AuditQuery{Limit: 100})
		if !slices.ContainsFunc(lines, func(l hub.AuditLine) bool {
			return l.Event == "job ended by force" && l.Actor == "uid 0" && l.Node == n.ID && strings.Contains(l.Detail, id)
		}) {
			t.Errorf("the audit log does not say who ended it: %+v", lines)
		}
		if again, err := f.EndJob(t.Context(), "uid 0", j); err != nil || again.Revision != j.Revision {
			t.Errorf("ended again: %+v, %v", again, err)
		}
		time.Sleep(time.Second)
		f.want(id, dispatch.Finished, "canceled")
		n.Lock()
		mode := n.Canceled[id]
		n.Unlock()
		if mode != wire.CancelImmediate {
			t.Errorf("the node was told to cancel it: %q", mode)
		}
		f.want(f.mustSubmit(""), dispatch.Running, "") // its one place is free
	})
}

package hub_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
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
		v = f.want(id, dispatch.Finished, "lost")
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

func TestOutputRules(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 8<<30)
		f.connect(n)
		v, e := f.submit(f.submission("", func(j *job.CiJob) { j.Trace.LimitBytes = 100 }))
		if e != nil {
			t.Fatal(e)
		}
		synctest.Wait()
		say := func(offset int64, text string) {
			t.Helper()
			if err := n.Say(&wire.Output{Job: v.ID, Offset: offset, Data: base64.StdEncoding.EncodeToString([]byte(text))}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		say(0, "hello ")
		say(0, "hello world") // overlapping
		say(3, "lo")          // held already
		p, e := f.Output(t.Context(), f.relay, v.ID, 6, 0)
		if e != nil || string(p.Data) != "world" || p.Length != 11 || p.Complete {
			t.Errorf("from 6: %+v, %v", p, e)
		}
		if p, e := f.Output(t.Context(), f.relay, v.ID, 12, 0); code(e) != "416 invalid" || p.Length != 11 {
			t.Errorf("past the end: %+v, %v", p, e)
		}
		// A reader is held until there is more.
		began, got := time.Now(), make(chan string, 1)
		go func() {
			p, e := f.Output(context.Background(), f.relay, v.ID, 11, 30*time.Second)
			got <- fmt.Sprintf("%s %v", p.Data, e)
		}()
		time.Sleep(5 * time.Second)
		say(11, "!")
		if s := <-got; s != "! <nil>" || time.Since(began) > 6*time.Second {
			t.Errorf("held until there is more: %s after %v", s, time.Since(began))
		}
		if p, e := f.Output(t.Context(), f.relay, v.ID, 12, 2*time.Second); e != nil || len(p.Data) != 0 {
			t.Errorf("held in vain: %+v, %v", p, e)
		}
		// Past the trace limit and 64 KiB, output is acked and dropped.
		big := strings.Repeat("x", 70<<10)
		say(12, big)
		say(12+70<<10, big)
		if p, _ := f.Output(t.Context(), f.relay, v.ID, 0, 0); p.Length != 100+64<<10 {
			t.Errorf("%d bytes are held, want %d", p.Length, 100+64<<10)
		}
		if err := n.Say(&wire.Result{Job: v.ID, Result: wire.JobResult{OutputLen: 12 + 140<<10, Artifacts: []wire.ArtifactResult{}}}); err != nil {
			t.Fatal(err)
		}
		f.want(v.ID, dispatch.Finished, "")
		// A gap ends the session.
		v, e = f.submit(f.submission("", nil))
		if e != nil {
			t.Fatal(e)
		}
		synctest.Wait()
		say(5, "later")
		if f.Snapshot().Nodes[n.ID].Live.Connected() {
			t.Error("a gap in a job's output did not end the session")
		}
		if p, e := f.Output(t.Context(), f.relay, v.ID, 0, 0); e != nil || p.Length != 0 {
			t.Errorf("what came after a gap is stored: %+v, %v", p, e)
		}
	})
}

func TestKeptOutput(t *testing.T) {
	inFleet(t, hub.JobOptions{KeptFailure: 32, Kept: 64, KeptTotal: 300, History: 3}, func(t *testing.T, f *fleet) {
		n := f.node("a", 8)
		var lines strings.Builder
		for i := range 40 {
			fmt.Fprintf(&lines, "line %02d\n", i) // 8 bytes each
		}
		result := success()
		set(n, &n.Work, func(*wire.Start) ([]byte, *wire.JobResult) { return []byte(lines.String()), result })
		end := func(r *wire.JobResult) *hub.Job {
			t.Helper()
			n.Lock()
			result = r
			n.Unlock()
			id := f.mustSubmit("")
			f.want(id, dispatch.Finished, r.Failure)
			if e := f.Settle(t.Context(), f.relay, id); e != nil {
				t.Fatal(e)
			}
			j, err := f.Store().Job(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			return j
		}
		kept := func(j *hub.Job) string {
			e, err := f.Ending(t.Context(), j)
			if err != nil {
				t.Fatal(err)
			}
			if e == nil {
				return ""
			}
			return fmt.Sprintf("%d/%d:%s", e.Start, e.Size, e.Data)
		}
		failed := end(&wire.JobResult{Failure: "script", Artifacts: []wire.ArtifactResult{}})
		if got := kept(failed); got != "288/320:line 36\nline 37\nline 38\nline 39\n" {
			t.Errorf("of a failed job %q is kept", got)
		}
		good := end(success())
		if got := kept(good); !strings.HasPrefix(got, "256/320:line 32\n") {
			t.Errorf("of another job %q is kept", got)
		}
		canceled := end(&wire.JobResult{Failure: "canceled", Artifacts: []wire.ArtifactResult{}})
		var last *hub.Job
		for range 4 {
			last = end(success())
		}
		if kept(good) != "" || kept(last) == "" || kept(failed) == "" {
			t.Errorf("kept of the oldest %q, the newest %q, a failed one %q; want nothing, something, something", kept(good), kept(last), kept(failed))
		}
		_ = canceled
		if err := f.Trim(t.Context()); err != nil {
			t.Fatal(err)
		}
		jobs, err := f.Store().Jobs(t.Context(), hub.JobQuery{Limit: 100})
		if err != nil || len(jobs) != 3 || jobs[0].ID != last.ID {
			t.Errorf("%d jobs are left of a history of 3, %v", len(jobs), err)
		}
		if kept(failed) != "" {
			t.Error("the end of an output outlived its record")
		}
		if _, e := f.View(t.Context(), f.relay, failed.ID, 0, 0); code(e) != "404 not_found" {
			t.Errorf("a job that left the history: %v", e)
		}
	})
}

func TestJobThatLeftTheHistory(t *testing.T) {
	inFleet(t, hub.JobOptions{History: 1}, func(t *testing.T, f *fleet) {
		n := f.node("a", 8)
		set(n, &n.Work, prints("x\n"))
		q := f.submission("", nil)
		v, e := f.submit(q)
		if e != nil {
			t.Fatal(e)
		}
		f.want(v.ID, dispatch.Finished, "")
		other := f.mustSubmit("")
		for _, id := range []string{v.ID, other} {
			if e := f.Settle(t.Context(), f.relay, id); e != nil {
				t.Fatal(e)
			}
		}
		if err := f.Trim(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, e := f.submit(q); code(e) != "410 not_found" {
			t.Errorf("a create retried after its job left the history: %v", e)
		}
	})
}

func TestViewIsHeld(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 8)
		id := f.mustSubmit("")
		v := f.want(id, dispatch.Running, "")
		got := make(chan *dispatch.JobView, 1)
		go func() {
			v, _ := f.View(context.Background(), f.relay, id, v.Revision, time.Minute)
			got <- v
		}()
		time.Sleep(10 * time.Second)
		if err := n.Say(&wire.JobState{Job: id, State: wire.StateOfJob{State: "running", Stage: "step_script", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 512}}}); err != nil {
			t.Fatal(err)
		}
		if now := <-got; now.Stage != "step_script" || now.Revision <= v.Revision {
			t.Errorf("the view is %+v after %+v", now, v)
		}
		began := time.Now()
		v, e := f.View(t.Context(), f.relay, id, 1000, 2*time.Minute)
		if e != nil || time.Since(began) != dispatch.MaxWaitSecs*time.Second {
			t.Errorf("held in vain: %+v, %v after %v", v, e, time.Since(began))
		}
	})
}

func TestImageAffinity(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		a, b := f.node("a", 8), f.node("b", 100)
		idle := 0.1
		for _, n := range []*hubtest.Placed{a, b} {
			n.Lock()
			n.Beat.Load1, n.Work = &idle, prints("")
			n.Unlock()
		}
		time.Sleep(6 * time.Second)
		built := func(j *job.CiJob) { j.Image = &job.Image{Name: "dockerfile:ci/Dockerfile"} }
		on := func(reservation string, change func(*job.CiJob)) string {
			t.Helper()
			v, e := f.submit(f.submission(reservation, change))
			if e != nil {
				t.Fatal(e)
			}
			return f.want(v.ID, dispatch.Finished, "").Node
		}
		g := f.mustReserve() // the first goes to b, which has more room
		if node := on(g.Reservation, built); node != b.ID {
			t.Fatalf("the first is on %s", node)
		}
		set(b, &b.Beat.Admission, wire.Admission{Budget: 10 << 30, Committed: 8 << 30}) // a has more room now
		time.Sleep(6 * time.Second)
		g = f.mustReserve()
		if g.Node != a.ID {
			t.Fatalf("the reservation is on %s, want a", g.Node)
		}
		if node := on(g.Reservation, built); node != b.ID {
			t.Errorf("a job with b's image went to %s", node)
		}
		synctest.Wait()
		if held, _ := a.Holds(); len(held) != 0 {
			t.Errorf("a holds %v, whose job went to b", held)
		}
		if node := on("", nil); node != a.ID {
			t.Errorf("a job without an image of its own went to %s", node)
		}
		busy := 12.0
		set(b, &b.Beat.Load1, &busy)
		time.Sleep(6 * time.Second)
		if node := on("", built); node != a.ID {
			t.Errorf("a job went to a busy node for its image")
		}
		set(b, &b.Beat.Load1, &idle)
		time.Sleep(31 * time.Minute)
		if node := on("", func(j *job.CiJob) { built(j); j.Job.ProjectPath = "acme/other" }); node != a.ID {
			t.Errorf("another project's job went to %s", node)
		}
	})
}

func TestKeys(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		f.node("a", 8)
		text, err := f.CreateKey(t.Context(), "uid 0", hub.Key{Name: "batch", Pools: []string{"ci"}, Max: wire.Envelope{Memory: 2 << 30}}, 24*time.Hour)
		if err != nil || len(text) != 68 || !strings.HasPrefix(text, "vkk_") {
			t.Fatalf("%q, %v", text, err)
		}
		o, e := f.ByKey(text)
		if e != nil || !o.Scoped() || o.Name != "key batch" {
			t.Fatalf("%+v, %v", o, e)
		}
		ask := func(p dispatch.Placement) string {
			_, e := f.Capacity(t.Context(), o, &dispatch.CapacityRequest{Placement: p})
			return code(e)
		}
		big, other := small, small
		big.Envelope.Memory, other.Pool = 3<<30, "gpu"
		if a, b, c := ask(small), ask(big), ask(other); a != "" || b != "403 forbidden" || c != "403 forbidden" {
			t.Errorf("within, too large, another pool: %q, %q, %q", a, b, c)
		}
		if _, err := f.CreateKey(t.Context(), "uid 0", hub.Key{Name: "batch", Pools: []string{"*"}}, time.Hour); err == nil {
			t.Error("two working keys have one name")
		}
		if e := f.HelloFrom(t.Context(), o, dispatch.ClientHello{Program: "batch", Version: "1"}); e != nil {
			t.Error(e)
		}
		if e := f.HelloFrom(t.Context(), f.relay, dispatch.ClientHello{}); code(e) != "403 forbidden" {
			t.Errorf("a relay's hello: %v", e)
		}
		g, e := f.Reserve(t.Context(), o, &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 60}, "x")
		if e != nil {
			t.Fatal(e)
		}
		if e := f.Release(t.Context(), f.relay, g.Reservation); code(e) != "404 not_found" {
			t.Errorf("a relay released a key's reservation: %v", e)
		}
		for _, want := range []int{0, 1} {
			if n, err := f.RevokeKey(t.Context(), "uid 0", "batch"); err != nil || n != want {
				t.Errorf("revoked: %d removed, %v, want %d", n, err, want)
			}
		}
		if _, e := f.ByKey(text); code(e) != "401 unauthorized" {
			t.Errorf("a removed key: %v", e)
		}
		b, _ := f.store.Load(t.Context())
		if s := fmt.Sprint(b.Keys, b.Records); strings.Contains(s, text[4:]) {
			t.Error("the store holds the key's text")
		}
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
			r := rand.New(rand.NewPCG(uint64(i), 1))
			n.Chunk = 64
			n.Work = func(*wire.Start) ([]byte, *wire.JobResult) { return text, success() }
			n.Lose = func(wire.Message) bool { return !calm.Load() && r.IntN(40) == 0 }
			n.Answer = func(wire.Message) string {
				if !calm.Load() && r.IntN(5) == 0 {
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

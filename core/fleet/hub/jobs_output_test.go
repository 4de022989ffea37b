package hub_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

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
		all, _ := f.CreateKey(t.Context(), "uid 0", hub.Key{Name: "small", Pools: []string{"*"}, Max: wire.Envelope{Memory: 1 << 30, CPUs: 2, Disk: 1 << 30}}, time.Hour)
		of, _ := f.ByKey(all)
		for what, e := range map[string]wire.Envelope{"memory": {Memory: 1<<30 + 1, CPUs: 2}, "cpus": {Memory: 1 << 30, CPUs: 3}, "disk": {Memory: 1 << 30, CPUs: 2, Disk: 1<<30 + 1}} {
			_, err := f.Capacity(t.Context(), of, &dispatch.CapacityRequest{Placement: dispatch.Placement{Pool: "any", Envelope: e}})
			if code(err) != "403 forbidden" {
				t.Errorf("more %s than the key's: %v", what, err)
			}
		}
		if _, err := f.Capacity(t.Context(), of, &dispatch.CapacityRequest{Placement: dispatch.Placement{Pool: "any", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 2, Disk: 1 << 30}}}); err != nil {
			t.Errorf("just the key's: %v", err)
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

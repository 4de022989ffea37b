package hub_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// TestIndex: the index answers every query as the store does, while jobs change
// and leave, and after a restart.
func TestIndex(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		o := hub.JobOptions{History: 9}
		f := run(t, hubtest.NewMemory(), dir, o)
		f.relay, _ = hubtest.NewRelay(t, f.Hub, gitlab, "gl")
		n := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 64<<30)
		end := 0
		n.Work = func(*wire.Start) ([]byte, *wire.JobResult) {
			if end++; end%3 == 0 {
				return nil, &wire.JobResult{Failure: "script", Artifacts: []wire.ArtifactResult{}}
			}
			return nil, success()
		}
		f.connect(n)
		start := time.Now().Unix()
		same := func(when string) {
			t.Helper()
			synctest.Wait()
			if !f.Indexed() {
				t.Fatalf("%s: there is no index", when)
			}
			for _, q := range []hub.JobQuery{
				{}, {Limit: 3}, {Before: 6}, {State: dispatch.Finished}, {State: dispatch.Running}, {Failure: "script"}, {Failure: "success", Limit: 2}, {Project: "acme/web"}, {Project: "acme/**"},
				{Project: "acme/web/**"}, {Project: "acme"}, {Name: "job 2"}, {Ref: "main", Node: n.ID, Pool: "ci", Instance: "gl", Owner: f.relay.ID}, {Ref: "none"}, {Since: 1}, {Since: start}, {Since: start + 1}, {Since: 1 << 31},
			} {
				if q.Limit == 0 {
					q.Limit = 100
				}
				got, err := f.Jobs(t.Context(), q)
				want, werr := f.Store().Jobs(t.Context(), q)
				if err != nil || werr != nil || fmt.Sprint(numbers(got)) != fmt.Sprint(numbers(want)) {
					t.Errorf("%s: Jobs(%+v) = %v, %v; the store has %v, %v", when, q, numbers(got), err, numbers(want), werr)
				}
			}
		}
		same("empty")
		for i := range 12 {
			v, e := f.submit(f.submission("", func(j *job.CiJob) { j.Job.Name = fmt.Sprint("job ", i%4) }))
			if e != nil {
				t.Fatal(e)
			}
			synctest.Wait()
			if i%2 == 0 {
				if e := f.Settle(t.Context(), f.relay, v.ID); e != nil {
					t.Fatal(e)
				}
			}
		}
		same("full")
		if err := f.Trim(t.Context()); err != nil {
			t.Fatal(err)
		}
		same("trimmed")
		f = f.again(o)
		defer func() { f.stop() }()
		same("restarted")
	})
}

func numbers(jobs []*hub.Job) (ns []int64) {
	for _, j := range jobs {
		ns = append(ns, j.N)
	}
	return ns
}

package hub_test

import (
	"bytes"
	"fmt"
	"testing"
	"testing/synctest"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// TestDictionary: specs are stored with a dictionary once there are 500 to learn
// from, and can be read whichever they were stored with, after a restart too.
func TestDictionary(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		f := run(t, hubtest.NewMemory(), dir, hub.JobOptions{})
		defer func() { f.stop() }()
		f.relay, _ = hubtest.NewRelay(t, f.Hub, gitlab, "gl")
		work := func(*wire.Start) ([]byte, *wire.JobResult) { return nil, success() }
		a := hubtest.NewPlaced(t, f.Hub, "a", "ci", 16, 64<<30)
		a.Work = work
		f.connect(a)
		one := func() *hub.Job {
			t.Helper()
			v, e := f.submit(f.submission("", func(j *job.CiJob) { j.Job.Name = fmt.Sprint("job ", f.n) }))
			if e != nil {
				t.Fatal(e)
			}
			synctest.Wait()
			if e := f.Settle(t.Context(), f.relay, v.ID); e != nil {
				t.Fatal(e)
			}
			j, err := f.Store().Job(t.Context(), v.ID)
			if err != nil || j == nil {
				t.Fatal(j, err)
			}
			return j
		}
		check := func(j *hub.Job, name int, dict uint32) {
			t.Helper()
			s, _, err := f.Store().Spec(t.Context(), j.N)
			if err != nil || s == nil || s.Dict != dict {
				t.Errorf("the spec of job %d is stored as %+v, %v; want it with dictionary %d", j.N, s, err, dict)
			}
			b, err := f.Spec(t.Context(), j)
			if err != nil || !bytes.Contains(b, fmt.Appendf(nil, "job %d", name)) {
				t.Errorf("the spec of job %d: %v, %s", j.N, err, b)
			}
		}
		first := one()
		for range 499 {
			one()
		}
		check(first, 1, 0)
		check(one(), 501, 1)
		f = f.again(hub.JobOptions{})
		check(first, 1, 0)
		a = hubtest.NewPlaced(t, f.Hub, "b", "ci", 16, 64<<30)
		a.Work = work
		f.connect(a)
		check(one(), 502, 1)
	})
}

package nodejobs

import (
	"context"
	"errors"
	"time"

	"virtkit/core/fleet/job"
	"virtkit/core/fsx"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// Times of watching.
const (
	watchTime = 200 * time.Millisecond // between two looks at what drivers write
	lockTime  = time.Second            // between two looks at an adopted driver
	idleTime  = time.Second            // while results wait to be recorded alone
	sweepTime = 10 * time.Minute
	sweepAge  = time.Minute // of a directory that is no job's
)

// Run implements node.Jobs. At its end the reservations are given back, and the
// drivers run on.
func (j *Jobs) Run(ctx context.Context) error {
	inner, cancel := context.WithCancel(ctx)
	defer j.aside.Wait()
	defer cancel()
	defer close(j.stop)
	sweep := time.NewTicker(sweepTime)
	defer sweep.Stop()
	j.sweep(time.Time{})
	for {
		next := j.look(inner)
		var timer <-chan time.Time
		if next > 0 {
			timer = time.After(next)
		}
		select {
		case <-ctx.Done():
			j.release()
			return nil
		case <-j.changed:
		case <-timer:
		case <-sweep.C:
			j.sweep(time.Now().Add(-sweepAge))
		}
	}
}

// sweep removes what is left of jobs, unchanged since before; a zero time is
// whenever: as the node starts, nobody makes or removes one.
func (j *Jobs) sweep(before time.Time) {
	if before.IsZero() {
		before = time.Now().AddDate(1, 0, 0) // the clock may have been set back
	}
	removed, err := j.Journal.SweepOld(before)
	if err != nil {
		j.Log.Warn("what is left of old jobs cannot be removed", logx.Err, err)
	}
	if len(removed) > 0 {
		j.Log.Info("removed what was left of old jobs", "jobs", removed)
	}
}

// release gives every reservation back.
func (j *Jobs) release() {
	j.mu.Lock()
	var all []*reservation
	for id, r := range j.reservations {
		if !r.taken {
			all = append(all, r)
			j.endLocked(id, "released")
		}
	}
	j.mu.Unlock()
	for _, r := range all {
		j.giveUp(r.held)
	}
}

// look reads what the drivers wrote, ends leases, and sees to drivers that are
// gone. It returns when to look again; 0 = when something changes.
func (j *Jobs) look(ctx context.Context) time.Duration {
	now := j.Now()
	next := time.Duration(0)
	sooner := func(d time.Duration) {
		if d = max(d, time.Millisecond); next == 0 || d < next {
			next = d
		}
	}
	var expired []*reservation
	j.mu.Lock()
	for id, r := range j.reservations {
		if r.taken {
			continue
		}
		if left := r.expires.Sub(now); left > 0 {
			sooner(left)
			continue
		}
		expired = append(expired, r)
		j.Log.Info("reservation expired", "reservation", id)
		j.endLocked(id, "expired")
	}
	var running []*placed
	busy := map[*placed]bool{}
	for _, p := range j.jobs {
		if p.result != nil {
			sooner(idleTime) // its result may have to be sent again
			continue
		}
		sooner(watchTime)
		running = append(running, p)
		busy[p] = p.busy
	}
	session := j.session
	j.mu.Unlock()
	for _, r := range expired {
		j.giveUp(r.held)
	}
	for _, p := range running {
		if !busy[p] && j.dead(p, time.Now()) {
			j.mu.Lock()
			p.busy = true
			j.mu.Unlock()
			j.aside.Go(func() { j.interrupt(ctx, p) })
		}
		j.read(p)
	}
	if session != nil {
		session.wake()
	}
	return next
}

// read takes over what a driver wrote. The result is looked at first: with one
// there, the output is whole.
func (j *Jobs) read(p *placed) {
	result, ok, err := p.dir.Result()
	if err != nil {
		j.Log.Error("a job's result cannot be read", logx.Job, p.id, logx.Err, err)
		result, ok = job.Result{Failure: string(job.System), Message: "the job's result on the node cannot be read"}, true
	}
	n, err := p.dir.OutputLen()
	if err != nil {
		j.Log.Error("a job's output cannot be looked at", logx.Job, p.id, logx.Err, err)
	}
	stage, err := p.dir.Stage()
	if err != nil {
		j.Log.Warn("a job's stage cannot be read", logx.Job, p.id, logx.Err, err)
	}
	report, at, fresh, err := p.dir.Egress(p.told)
	if err != nil {
		j.Log.Warn("a job's egress report cannot be read", logx.Job, p.id, logx.Err, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	p.length = max(p.length, n)
	p.stage = stage
	if p.told = at; fresh {
		p.egress = report
	}
	if ok && p.result == nil {
		p.result = &result
		j.Log.Info("job ended", logx.Job, p.id, "failure", result.Failure, "output_len", result.OutputLen)
	}
}

// dead says whether a job's driver is gone and left no result.
func (j *Jobs) dead(p *placed, now time.Time) bool {
	if p.gone != nil {
		select {
		case <-p.gone:
		default:
			return false
		}
	} else {
		if now.Sub(p.checked) < lockTime {
			return false
		}
		p.checked = now
	}
	lock, err := p.dir.Lock()
	if err != nil {
		if !errors.Is(err, fsx.ErrLocked) {
			j.Log.Error("a job's driver cannot be looked for", logx.Job, p.id, logx.Err, err)
		}
		return false
	}
	lock.Close()
	// It may have ended well since: the result is its last word.
	_, ok, err := p.dir.Result()
	return err == nil && !ok
}

// interrupt cleans up after a driver that is gone and ends its job. A node that
// is stopped meanwhile leaves the job to its next start.
func (j *Jobs) interrupt(ctx context.Context, p *placed) {
	defer func() {
		j.mu.Lock()
		p.busy = false
		j.mu.Unlock()
		j.wake()
	}()
	lock, err := p.dir.Lock()
	if err != nil {
		return // somebody has it: the next look tells
	}
	defer lock.Close()
	j.Log.Warn("a job's driver is gone without a result: cleaning up after it", logx.Job, p.id)
	limited, cancel := context.WithTimeout(ctx, CleanupTime)
	defer cancel()
	err = j.Drivers.Cleanup(limited, p.dir, lock.File())
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		j.Log.Error("the clean-up after a job's driver is not whole; vk gc removes what is left", logx.Job, p.id, logx.Err, err)
	}
	j.mu.Lock()
	report := policy.PartialReport(p.egress)
	j.mu.Unlock()
	j.finish(p, job.Result{Failure: string(job.Interrupted), Message: "the job's driver on the node was stopped", Egress: report})
}

// finish writes a job's result for a driver that cannot.
func (j *Jobs) finish(p *placed, r job.Result) {
	if err := p.dir.Finish(r); err != nil {
		j.Log.Error("a job's result cannot be written", logx.Job, p.id, logx.Err, err)
	}
	j.read(p)
}

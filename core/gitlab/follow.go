package gitlab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"
)

// Job is one that GitLab has given out.
type Job struct {
	ID         int64
	Token      string
	DebugTrace bool     // CI_DEBUG_TRACE: GitLab restricts who may read the trace
	Reasons    []string // features.failure_reasons
}

// Log is a job's trace as it grows.
type Log interface {
	io.ReaderAt
	// Sum is how many bytes there are now, and their CRC-32 (IEEE).
	Sum() (size int64, crc uint32)
}

// Result is how a job ended.
type Result struct {
	State    State  // Success or Failed
	Reason   string // of a failure, as gitlab-runner names them
	ExitCode int    // of the script; 0 is not sent
}

// Cancel is what GitLab asks of a running job.
type Cancel int

// The ways to end a job. Graceful runs its after_script; Immediate nothing
// more.
const (
	Graceful Cancel = iota + 1
	Immediate
)

// ErrGone says that GitLab has no such job any more, or takes nothing for it.
var ErrGone = errors.New("GitLab takes nothing more for this job")

// Timing is how long Follow waits. The zero value is not useful.
type Timing struct {
	Interval  time.Duration // between updates, until GitLab asks for another
	KeepAlive time.Duration // after the last answer, when there is no output
	Retry     time.Duration // before what failed at the end is tried again
	Backoff   time.Duration // more than that, doubled each time
	MaxWait   time.Duration // bound of the two together
	Finals    int           // tries of the last update that fail
}

// DefaultTiming is gitlab-runner's (vectors/README.md 4).
func DefaultTiming() Timing {
	return Timing{Interval: 3 * time.Second, KeepAlive: 30 * time.Second, Retry: 3 * time.Second, Backoff: time.Second, MaxWait: time.Hour, Finals: 10}
}

const (
	maxInterval = 15 * time.Minute
	maxPatch    = 1 << 20 // bytes of the trace in one request
)

// Accept commits to a job that was given out (two_phase_job_commit). ErrGone
// says that it is not to be run: GitLab has taken it back. canceled says that
// it was cancelled meanwhile. Any other refusal does not keep a job from
// running, as with gitlab-runner; it is returned to be logged.
func (c *Client) Accept(ctx context.Context, job Job) (canceled bool, err error) {
	a, r, err := c.update(ctx, job, jobUpdate{State: Running})
	if err != nil {
		return false, err
	}
	switch a.status {
	case http.StatusOK, http.StatusAccepted:
		switch a.jobStatus() {
		case "canceling":
			return true, nil
		case "canceled", "failed":
			return true, ErrGone
		}
		return false, nil
	case http.StatusNotFound, http.StatusForbidden:
		return false, fmt.Errorf("%w: %w", ErrGone, r.unexpected(a))
	}
	return false, r.unexpected(a)
}

// Follower sends one job's trace and state until GitLab has its last one.
type Follower struct {
	Client *Client
	Job    Job
	Log    Log
	Timing Timing
	Cancel func(Cancel) // called once for each way, from Follow's goroutine
	Logger *slog.Logger

	offset   int64 // bytes of the trace that GitLab has
	interval time.Duration
	last     time.Time // of an answer that took something
	told     Cancel
}

// Follow runs until the job's result was received from done and sent. A trace
// that GitLab has in part goes on from there, so a job may be followed again
// after a restart. ErrGone says that GitLab did not want the result; the end
// of ctx leaves the job to be followed again.
func (f *Follower) Follow(ctx context.Context, done <-chan Result) error {
	if f.Logger == nil {
		f.Logger = slog.New(slog.DiscardHandler)
	}
	f.interval, f.last = f.Timing.Interval, time.Now()
	t := time.NewTimer(f.interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case res := <-done:
			return f.finish(ctx, res)
		case <-t.C:
			// GitLab takes nothing of a job that it has ended: what is left is
			// offered once more, with the result.
			if f.told != Immediate {
				f.tick(ctx)
			}
			t.Reset(f.interval)
		}
	}
}

// tick sends what is new, or a sign of life.
func (f *Follower) tick(ctx context.Context) {
	size, crc := f.Log.Sum()
	if size > f.offset {
		for f.offset < size && f.patch(ctx, size) == patched {
		}
		return
	}
	if time.Since(f.last) < f.Timing.KeepAlive {
		return
	}
	a, r, err := f.Client.update(ctx, f.Job, jobUpdate{State: Running, Checksum: checksum(crc), Output: jobOutput{checksum(crc), size}})
	if err != nil {
		f.Logger.Warn("keeping a job alive", "job", f.Job.ID, "error", err)
		return
	}
	f.heed(a)
	if a.status == http.StatusOK {
		f.last = time.Now()
		f.pace(a)
	} else if a.status != http.StatusForbidden {
		f.Logger.Warn("keeping a job alive", "job", f.Job.ID, "error", r.unexpected(a))
	}
}

func checksum(crc uint32) string { return fmt.Sprintf("crc32:%08x", crc) }

// pace takes the interval that GitLab asks for.
func (f *Follower) pace(a *answer) {
	if d := a.interval(); d > 0 {
		f.interval = d * f.Timing.Interval / (3 * time.Second) // 1:1 but in tests
	}
}

// heed passes on that GitLab wants the job to end.
func (f *Follower) heed(a *answer) {
	want := Cancel(0)
	switch status := a.jobStatus(); {
	case a.status == http.StatusForbidden || status == "canceled" || status == "failed":
		want = Immediate
	case status == "canceling":
		want = Graceful
	}
	if want > f.told {
		f.told = want
		if f.Cancel != nil {
			f.Cancel(want)
		}
	}
}

// patchState is how a piece of the trace was taken.
type patchState int

const (
	patched  patchState = iota
	moved               // GitLab has more, or less, than was thought
	refused             // it takes no more
	rejected            // it finds fault with what is sent
	failed
)

// patch sends the next piece of the first size bytes.
func (f *Follower) patch(ctx context.Context, size int64) patchState {
	p := make([]byte, min(size-f.offset, maxPatch))
	if _, err := f.Log.ReadAt(p, f.offset); err != nil && !errors.Is(err, io.EOF) {
		f.Logger.Error("reading a trace", "job", f.Job.ID, "error", err)
		return failed
	}
	a, r, err := f.Client.patch(ctx, f.Job, f.offset, p)
	if err != nil {
		f.Logger.Warn("sending a trace", "job", f.Job.ID, "error", err)
		return failed
	}
	f.heed(a)
	switch a.status {
	case http.StatusAccepted:
		if s := a.jobStatus(); s == "canceled" || s == "failed" {
			return refused // as gitlab-runner, which sends the piece again
		}
		f.offset += int64(len(p))
		f.last = time.Now()
		f.pace(a)
		return patched
	case http.StatusRequestedRangeNotSatisfiable:
		f.offset = min(a.received(), size)
		return moved
	case http.StatusNotFound, http.StatusForbidden:
		return refused
	}
	f.Logger.Warn("sending a trace", "job", f.Job.ID, "error", r.unexpected(a))
	if a.status >= 400 && a.status < 500 && !worthAnother(a.status) {
		return rejected
	}
	return failed
}

// finish sends the rest of the trace and the last state.
func (f *Follower) finish(ctx context.Context, res Result) error {
	size, crc := f.Log.Sum()
	f.interval = f.Timing.Interval
	if f.told == Immediate {
		res = Result{State: Failed, Reason: "job_canceled"}
	}
	u := jobUpdate{State: res.State, ExitCode: res.ExitCode, Checksum: checksum(crc), Output: jobOutput{checksum(crc), size}}
	if res.State == Failed {
		u.FailureReason = MapReason(res.Reason, f.Job.Reasons)
	}
	if err := f.flush(ctx, size); err != nil {
		return err
	}
	var last error
	for fails, waits := 0, 0; ; {
		wait := f.Timing.Retry
		a, r, err := f.Client.update(ctx, f.Job, u)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			last = err
		case a.status == http.StatusOK:
			return nil
		case a.status == http.StatusForbidden || a.status == http.StatusNotFound:
			return fmt.Errorf("%w: %w", ErrGone, r.unexpected(a))
		case a.status == http.StatusAccepted || a.status == http.StatusPreconditionFailed:
			// It has taken the state and not yet the trace, or not all of that.
			f.pace(a)
			waits++
			if err := sleep(ctx, min(f.interval<<max(0, min(waits-10, 20)), f.Timing.MaxWait)); err != nil {
				return err
			}
			if a.status == http.StatusPreconditionFailed {
				f.offset = 0
				if err := f.flush(ctx, size); err != nil {
					return err
				}
			}
			continue
		default:
			last = r.unexpected(a)
		}
		fails++
		f.Logger.Warn("reporting a job's end", "job", f.Job.ID, "error", last, "try", fails)
		if fails >= f.Timing.Finals {
			return fmt.Errorf("reporting the end of job %d, %d times: %w", f.Job.ID, fails, last)
		}
		if err := sleep(ctx, min(wait+f.Timing.Backoff<<min(fails-1, 20), f.Timing.MaxWait)); err != nil {
			return err
		}
	}
}

// flush sends the trace up to size, or until GitLab takes no more of it: the
// last state is told all the same. A GitLab that cannot be reached is asked
// without end, as gitlab-runner does; one that answers each time that it does not
// want what is sent, as often as the last state is told.
func (f *Follower) flush(ctx context.Context, size int64) error {
	for fails, rejects := 0, 0; f.offset < size; {
		switch f.patch(ctx, size) {
		case patched:
			fails, rejects = 0, 0
			continue
		case rejected:
			if rejects++; rejects >= f.Timing.Finals {
				f.Logger.Error("the rest of a trace is not delivered: GitLab does not take it", "job", f.Job.ID, "bytes", size-f.offset)
				return nil
			}
		case refused:
			return nil
		case moved:
			if f.offset >= size {
				return nil
			}
			if err := sleep(ctx, f.Timing.Retry); err != nil {
				return err
			}
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		fails++
		if err := sleep(ctx, min(f.Timing.Retry+f.Timing.Backoff<<min(fails-1, 20), f.Timing.MaxWait)); err != nil {
			return err
		}
	}
	return nil
}

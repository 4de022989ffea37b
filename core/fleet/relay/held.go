package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/gitlab"
	"virtkit/core/logx"
)

// held is a job from its taking to its settling. Its steps are those of its
// Record: a restart goes on with the first that is not on disk.
type held struct {
	r   *runner
	rec Record // as it is on disk, or was to be
	log *slog.Logger
	// reported is called once GitLab needs nothing more: the job's slot is free.
	reported func()
}

// save writes the record. A disk that cannot be written keeps no job from
// running: what is lost is lost at a restart alone.
func (h *held) save() {
	if err := h.r.store.put(h.rec); err != nil {
		h.log.Error("the job's record cannot be kept: a restart now would lose a step of it", logx.Err, err)
	}
}

// live runs until the job is settled, or ctx ends; the record then stays.
func (h *held) live(ctx context.Context) {
	defer h.reported()
	err := h.steps(ctx)
	switch {
	case ctx.Err() != nil:
		h.log.Info("the job is left to the next start", logx.Err, context.Cause(ctx))
	case err != nil:
		h.log.Error("the job is given up until the next start", logx.Err, err)
	default:
		if err := h.r.store.drop(h.rec.ID); err != nil {
			h.log.Error("a job that is over stays recorded", logx.Err, err)
		}
	}
}

func (h *held) steps(ctx context.Context) error {
	if h.rec.Submission != nil && h.rec.End == nil && !h.rec.Reported {
		if err := h.submit(ctx); err != nil {
			return err
		}
	}
	if h.rec.HubJob == "" {
		return h.refuse(ctx)
	}
	if h.rec.Reported {
		if err := h.end(ctx); err != nil {
			return err
		}
	} else if err := h.follow(ctx); err != nil {
		return err
	}
	return h.settle(ctx)
}

// end has the hub end a job that GitLab needs nothing more of.
func (h *held) end(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop(errOver)
	view := newWatch()
	wg.Go(func() { h.watch(ctx, view) })
	v, err := view.wait(ctx, func(*dispatch.JobView) bool { return true })
	if err != nil || v.State == dispatch.Finished {
		return err
	}
	h.cancel(ctx)(gitlab.Immediate)
	return h.over(ctx, view)
}

// notify logs what is tried again.
func (h *held) notify(what string) func(error, int, time.Duration) {
	return func(err error, try int, wait time.Duration) {
		level := slog.LevelWarn
		if try > 3 && try%10 != 0 {
			level = slog.LevelDebug
		}
		h.log.Log(context.Background(), level, what+" is tried again", logx.Err, err, "try", try, "wait", wait.Round(time.Millisecond))
	}
}

// submit hands the job to the hub. What the hub refuses becomes an End.
func (h *held) submit(ctx context.Context) error {
	var v dispatch.JobView
	err := persist(ctx, h.r.d.pace, h.notify("submitting"), func(ctx context.Context) (err error) {
		v, err = h.r.d.hub.Submit(ctx, h.rec.Submission)
		return err
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		h.log.Error("the hub does not take the job", logx.Err, explain(err))
		h.giveBack(h.rec.Submission.Reservation)
		h.rec.End = refusedBy(err, &h.rec, h.r.d.enrollment.URL, h.r.d.conf.GitLab.URL).end(h.rec.Timestamps, h.r.d.now())
		h.rec.Submission = nil
		h.save()
		return nil
	}
	h.rec.HubJob, h.rec.Submission = v.ID, nil
	h.save()
	h.log.Info("submitted", "hub_job", v.ID, "state", string(v.State))
	return nil
}

// giveBack releases a reservation, in the background: one that stays ends with
// its lease.
func (h *held) giveBack(id string) {
	if id != "" {
		h.r.d.background(func(ctx context.Context) { h.r.release(ctx, id) })
	}
}

// refuse fails a job that the hub does not have, uncommitted.
func (h *held) refuse(ctx context.Context) error {
	if h.rec.Reported {
		return nil
	}
	if h.rec.End == nil { // of a file that was edited
		h.rec.End = (&refusal{failure: job.System, text: "what was known of the job is lost"}).end(h.rec.Timestamps, h.r.d.now())
		h.save()
	}
	s, err := newSpool(h.r.d.stateDir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.append(h.rec.End.Tail); err != nil {
		return err
	}
	return h.report(ctx, s, h.gitlabJob(), nil)
}

// outcome is what GitLab is told.
func (h *held) outcome(v *dispatch.JobView) gitlab.Result {
	f, code := job.Failure(""), 0
	if v != nil && v.Result != nil {
		f = job.Failure(v.Result.Failure)
		if v.Result.ExitCode != nil {
			code = *v.Result.ExitCode
		}
	}
	if e := h.rec.End; e != nil {
		f, code = e.Failure, e.ExitCode
	}
	if f == "" {
		return gitlab.Result{State: gitlab.Success}
	}
	return gitlab.Result{State: gitlab.Failed, Reason: job.GitLabReason(f, h.reasons()), ExitCode: code}
}

// reasons are the failure reasons that GitLab is told as they are.
func (h *held) reasons() []string {
	if h.rec.End != nil && h.rec.End.Unmapped {
		return append(slices.Clip(h.rec.Reasons), "job_canceled")
	}
	return h.rec.Reasons
}

func (h *held) gitlabJob() gitlab.Job {
	return gitlab.Job{ID: h.rec.ID, Token: h.rec.Token, DebugTrace: h.rec.DebugTrace, Reasons: h.reasons()}
}

// report sends a trace and its end until GitLab has both, or wants neither.
// done gives the result; nil = the record's End. Reported is then on disk.
func (h *held) report(ctx context.Context, s gitlab.Log, job gitlab.Job, done chan gitlab.Result) error {
	if done == nil {
		done = make(chan gitlab.Result, 1)
		done <- h.outcome(nil)
	}
	last := make(chan gitlab.Result, 1)
	gaveUp := h.r.d.now().Add(h.r.d.pace.GiveUp)
	for {
		f := &gitlab.Follower{Client: h.r.d.client, Job: job, Log: s, Timing: h.r.d.pace.Follow, Cancel: h.cancel(ctx), Logger: h.log}
		err := f.Follow(ctx, keep(ctx, done, last))
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		switch {
		case err == nil:
			h.log.Info("reported")
		case errors.Is(err, gitlab.ErrGone):
			h.log.Warn("GitLab does not want the job's outcome", logx.Err, err)
		case lasting(err) || h.r.d.now().After(gaveUp):
			h.log.Error("the job's outcome is not delivered: GitLab ends the job by its own timeout", logx.Err, err)
		default:
			h.log.Error("the job's outcome is not delivered yet", logx.Err, err, "again_in", h.r.d.pace.Again)
			if err := sleep(ctx, h.r.d.pace.Again); err != nil {
				return err
			}
			done = last
			continue
		}
		h.rec.Reported = true
		h.save()
		h.reported()
		return nil
	}
}

// keep passes the one result on and keeps a copy for another try.
func keep(ctx context.Context, from, copies chan gitlab.Result) <-chan gitlab.Result {
	to := make(chan gitlab.Result, 1)
	go func() {
		select {
		case r := <-from:
			copies <- r
			to <- r
		case <-ctx.Done():
		}
	}()
	return to
}

// lasting says whether GitLab's answer would be the same later.
func lasting(err error) bool {
	se, ok := errors.AsType[*gitlab.StatusError](err)
	return ok && se.Status < 500 && se.Status != http.StatusTooManyRequests && se.Status != http.StatusRequestTimeout
}

// cancel asks the hub for what GitLab wants, from a goroutine of its own.
func (h *held) cancel(ctx context.Context) func(gitlab.Cancel) {
	return func(c gitlab.Cancel) {
		mode := wire.CancelGraceful
		if c == gitlab.Immediate {
			mode = wire.CancelImmediate
		}
		if h.rec.HubJob == "" {
			return
		}
		h.log.Info("GitLab wants the job to end", "mode", string(mode))
		id := h.rec.HubJob
		go func() {
			err := persist(ctx, h.r.d.pace, h.notify("canceling"), func(ctx context.Context) error {
				_, err := h.r.d.hub.Cancel(ctx, id, mode)
				return err
			})
			if err != nil && ctx.Err() == nil {
				h.log.Error("the hub does not cancel the job", logx.Err, err)
			}
		}()
	}
}

// follow brings a job that the hub has to its end in GitLab.
func (h *held) follow(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	s, err := newSpool(h.r.d.stateDir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.append(h.rec.Head); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop(errOver)
	view, output := newWatch(), make(chan struct{})
	wg.Go(func() { h.watch(ctx, view) })
	wg.Go(func() { defer close(output); h.read(ctx, s) })

	v, err := view.wait(ctx, func(v *dispatch.JobView) bool { return v.State == dispatch.Running || v.State == dispatch.Finished })
	if err != nil {
		return err
	}
	if !h.rec.Committed && h.rec.End == nil && began(v) {
		canceled, err := h.commit(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, gitlab.ErrGone):
			h.log.Warn("GitLab took the job back before it was told that it runs", logx.Err, err)
			h.rec.Reported = true
			h.save()
			h.reported()
			h.cancel(ctx)(gitlab.Immediate)
			return h.over(ctx, view)
		case canceled:
			// As gitlab-runner: nothing of a trace, and the reason as it is.
			h.rec.End = &End{Failure: job.Canceled, Unmapped: true}
			h.save()
		default:
			h.rec.Committed = true
			h.save()
		}
	}
	if e := h.rec.End; e != nil && e.Unmapped {
		h.cancel(ctx)(gitlab.Immediate)
		empty, err := newSpool(h.r.d.stateDir)
		if err != nil {
			return err
		}
		defer empty.Close()
		if err := h.report(ctx, empty, h.gitlabJob(), nil); err != nil {
			return err
		}
		return h.over(ctx, view)
	}
	done, job := make(chan gitlab.Result, 1), h.gitlabJob() // before await may change the record
	wg.Go(func() {
		if r, err := h.await(ctx, s, view, output); err == nil {
			done <- r
		} else if ctx.Err() == nil {
			h.log.Error("the job's end", logx.Err, err)
			stop(err)
		}
	})
	if err := h.report(ctx, s, job, done); err != nil {
		return err
	}
	return h.over(ctx, view)
}

var errOver = errors.New("the job is over")

// began says whether a node has the job, or had it.
func began(v *dispatch.JobView) bool {
	if v.State != dispatch.Finished || v.Result == nil {
		return v.State == dispatch.Running
	}
	switch job.Failure(v.Result.Failure) {
	case job.NoCapacity:
		return false
	case job.Lost, job.Canceled, job.Configuration:
		return v.OutputLen > 0
	}
	return true
}

// commit tells GitLab that the job runs. A GitLab that does not answer is asked
// again a few times; what it refuses otherwise does not keep the job from
// running.
func (h *held) commit(ctx context.Context) (canceled bool, err error) {
	for try := range 5 {
		canceled, err = h.r.d.client.Accept(ctx, h.gitlabJob())
		if err == nil || errors.Is(err, gitlab.ErrGone) || ctx.Err() != nil {
			return canceled, err
		}
		h.log.Warn("telling GitLab that the job runs", logx.Err, err)
		if _, answered := errors.AsType[*gitlab.StatusError](err); answered {
			return false, nil
		}
		if err := sleep(ctx, h.r.d.pace.Follow.Backoff<<try); err != nil {
			return false, err
		}
	}
	return false, nil
}

// await waits for the job's end and the whole of its output, and adds the tail.
func (h *held) await(ctx context.Context, s *spool, view *watch, output <-chan struct{}) (gitlab.Result, error) {
	v, err := view.wait(ctx, func(v *dispatch.JobView) bool { return v.State == dispatch.Finished })
	if err != nil {
		return gitlab.Result{}, err
	}
	select {
	case <-output:
	case <-ctx.Done():
		return gitlab.Result{}, context.Cause(ctx)
	}
	if h.rec.End == nil {
		if tail := tailOf(v, &h.r.placement, s.midLine(), h.rec.Timestamps, h.r.d.pace.Place, h.r.d.now()); tail != nil {
			res := h.outcome(v)
			h.rec.End = &End{Failure: job.Failure(v.Result.Failure), ExitCode: res.ExitCode, Tail: tail}
			h.save()
		}
	}
	if h.rec.End != nil {
		if err := s.append(h.rec.End.Tail); err != nil {
			return gitlab.Result{}, err
		}
	}
	res := h.outcome(v)
	h.log.Info("the job has ended", "state", string(res.State), "reason", res.Reason, "exit_code", res.ExitCode, logx.Node, v.Node)
	return res, nil
}

// over waits until the hub is done with the job too.
func (h *held) over(ctx context.Context, view *watch) error {
	_, err := view.wait(ctx, func(v *dispatch.JobView) bool { return v.State == dispatch.Finished })
	return err
}

// settle lets the hub drop the output.
func (h *held) settle(ctx context.Context) error {
	err := persist(ctx, h.r.d.pace, h.notify("settling"), func(ctx context.Context) error { return h.r.d.hub.Settle(ctx, h.rec.HubJob) })
	switch code := codeOf(err); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case code == dispatch.NotFound:
		return nil
	case code == dispatch.Unauthorized:
		return explain(err)
	}
	h.log.Warn("the hub does not settle the job", logx.Err, err)
	return nil
}

// watch is the hub's newest view of a job.
type watch struct {
	mu      sync.Mutex
	v       *dispatch.JobView
	changed chan struct{} // closed and replaced at each change
}

func newWatch() *watch { return &watch{changed: make(chan struct{})} }

func (w *watch) set(v *dispatch.JobView) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.v = v
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait returns the first view that is as wanted.
func (w *watch) wait(ctx context.Context, wanted func(*dispatch.JobView) bool) (*dispatch.JobView, error) {
	for {
		w.mu.Lock()
		v, changed := w.v, w.changed
		w.mu.Unlock()
		if v != nil && wanted(v) {
			return v, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// watch keeps view at what the hub says until the job has ended. A hub that
// knows the job no more ends it as lost.
func (h *held) watch(ctx context.Context, view *watch) {
	pace := h.r.d.pace
	for after := uint64(0); ; {
		var v dispatch.JobView
		asked := time.Now()
		err := persist(ctx, pace, h.notify("asking for the job"), func(ctx context.Context) (err error) {
			v, err = h.r.d.hub.Job(ctx, h.rec.HubJob, after, pace.LongPoll)
			return err
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			h.log.Error("the hub does not tell of the job", logx.Err, explain(err))
			view.set(&dispatch.JobView{ID: h.rec.HubJob, State: dispatch.Finished, Result: &wire.JobResult{Failure: string(job.System),
				Message: "the fleet hub does not know the job any more: " + wire.Clean(err.Error(), 200)}})
			return
		}
		if v.State == dispatch.Finished && v.Result == nil {
			v.Result = &wire.JobResult{Failure: string(job.System), Message: "the fleet hub tells no result"}
		}
		view.set(&v)
		if v.State == dispatch.Finished {
			return
		}
		// A hub that answers the same at once is not to be asked at once again.
		if v.Revision == after && time.Since(asked) < pace.HubMin {
			if sleep(ctx, pace.HubMin) != nil {
				return
			}
		}
		after = v.Revision
	}
}

// read fills the spool with the hub's output until that is complete.
func (h *held) read(ctx context.Context, s *spool) {
	pace := h.r.d.pace
	for offset := int64(0); ; {
		var o Output
		asked := time.Now()
		err := persist(ctx, pace, h.notify("reading the output"), func(ctx context.Context) (err error) {
			o, err = h.r.d.hub.Output(ctx, h.rec.HubJob, offset, pace.LongPoll)
			return err
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			h.log.Error("the hub gives no more of the output", logx.Err, explain(err), "offset", offset)
			return
		}
		for len(o.Data) > 0 {
			if err = s.append(o.Data); err == nil {
				break
			}
			// The disk is full: what was written stays, the rest waits.
			h.log.Error("the trace does not fit on this host's disk", logx.Err, err)
			if sleep(ctx, pace.HubMax) != nil {
				return
			}
		}
		offset += int64(len(o.Data))
		if o.Complete {
			return
		}
		if len(o.Data) == 0 && time.Since(asked) < pace.HubMin {
			if sleep(ctx, pace.HubMin) != nil {
				return
			}
		}
	}
}

// newHeld makes a job of its record.
func (r *runner) newHeld(rec Record, reported func()) *held {
	return &held{r: r, rec: rec, reported: sync.OnceFunc(reported), log: r.log.With(logx.Job, fmt.Sprint(rec.ID))}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

var errShutdown = fault.New(fault.Interrupted, "vk-gitlab stops")

package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"virtkit/core/conf"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/fleet/wire"
	"virtkit/core/gitlab"
	"virtkit/core/logx"
)

// runner is one of the configuration's: it asks for jobs, and holds those that
// it was given.
type runner struct {
	d         *Daemon
	conf      relayconf.Runner
	name      string
	token     conf.Secret
	short     string
	placement dispatch.Placement
	store     *store
	log       *slog.Logger

	mu         sync.Mutex
	state      dispatch.RunnerStateName
	message    string
	id         int64 // GitLab's, once verified
	verified   bool
	refusedTil time.Time // asking has stopped until then
	why        dispatch.RunnerState
	refusals   int // 403s in a row
	failures   int // other failures in a row
	lastUpdate string
	requests   int
	lastStatus int
	lastAt     time.Time
}

// setState tells the hub what the runner does.
func (r *runner) setState(s dispatch.RunnerStateName, message string) {
	r.mu.Lock()
	changed := r.state != s || r.message != message
	r.state, r.message = s, message
	r.mu.Unlock()
	if changed {
		r.d.changed.signal()
	}
}

func (r *runner) see(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastStatus, r.lastAt = status, r.d.now()
}

// verify checks the token, at the start and then daily.
func (r *runner) verify(ctx context.Context) {
	wait := r.d.pace.HubMin
	for ctx.Err() == nil {
		v, err := r.d.client.Verify(ctx, r.token.Reveal(), r.d.systemID)
		next := r.d.pace.Verify
		se, answered := errors.AsType[*gitlab.StatusError](err)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			wait = r.d.pace.HubMin
			r.accepted(v)
		case answered && se.Status == http.StatusForbidden:
			r.log.Error("GitLab refuses the runner's token", logx.Err, err,
				"next_step", "create the runner again in GitLab, and write its token to "+r.conf.TokenFile)
			next = r.d.pace.Unhealthy
			r.refuse(next)
		default:
			r.log.Warn("the runner's token cannot be verified now", logx.Err, err, "again_in", wait)
			if known, _ := r.known(); !known {
				r.setState(dispatch.Unhealthy, "GitLab cannot be asked whether it takes the token")
			}
			next = wait
			wait = min(2*wait, r.d.pace.HubMax)
		}
		if sleep(ctx, next) != nil {
			return
		}
	}
}

func (r *runner) accepted(v gitlab.Verified) {
	r.mu.Lock()
	first := !r.verified || r.id != v.ID
	r.id, r.verified = v.ID, true
	r.refusedTil, r.refusals = time.Time{}, 0
	r.mu.Unlock()
	if first {
		r.log.Info("GitLab takes the runner's token", "runner_id", v.ID)
	}
	r.d.changed.signal()
	if v.ExpiresAt == nil {
		return
	}
	switch left := v.ExpiresAt.Sub(r.d.now()); {
	case left <= 0:
		r.log.Error("the runner's token has expired: GitLab gives it no jobs", "expired_at", v.ExpiresAt.UTC(), "next_step", "create the runner again in GitLab")
	case left <= 7*24*time.Hour:
		r.log.Warn("the runner's token expires soon; vk-gitlab does not rotate it", "expires_at", v.ExpiresAt.UTC(), "next_step", "create the runner again in GitLab")
	}
}

// refuse stops asking for a while.
func (r *runner) refuse(d time.Duration) {
	r.mu.Lock()
	r.verified, r.refusedTil = false, time.Now().Add(d)
	r.why = dispatch.RunnerState{State: dispatch.TokenRefused, Message: "GitLab refuses the runner's token"}
	r.mu.Unlock()
	r.d.changed.signal()
}

func (r *runner) known() (bool, int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.verified || r.id != 0, r.id
}

// ready waits until the runner may ask for jobs.
func (r *runner) ready(ctx context.Context) error {
	for {
		changed := r.d.changed.next()
		status := r.d.server()
		r.mu.Lock()
		until, id, why := time.Until(r.refusedTil), r.id, r.why
		r.mu.Unlock()
		var timer <-chan time.Time
		switch {
		case status != dispatch.Approved:
			r.setState(dispatch.ServerPending, string(status))
		case until > 0:
			r.setState(why.State, why.Message)
			timer = time.After(until)
		case id == 0: // verify says what it waits for
		default:
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-timer:
		}
	}
}

// work is one of the runner's request_concurrency loops: capacity first, then a
// reservation, then the request for a job (gitlab-dispatch, "GitLab hands a
// runner a job only when the runner asks"). ctx ends it, but never a request in
// flight: GitLab may already have assigned the job.
func (r *runner) work(ctx context.Context) {
	for ctx.Err() == nil {
		if r.ready(ctx) != nil || r.capacity(ctx) != nil {
			continue
		}
		free, err := r.d.slots.acquire(ctx, r)
		if err != nil {
			return
		}
		r.round(ctx, free)
	}
}

// capacity waits until the hub reports room.
func (r *runner) capacity(ctx context.Context) error {
	req := dispatch.CapacityRequest{Placement: r.placement}
	for r.mayAsk(ctx) {
		var c dispatch.Capacity
		asked := time.Now()
		err := persist(ctx, r.d.pace, r.notify("asking for capacity"), func(ctx context.Context) (err error) {
			if !r.mayAsk(ctx) {
				return errNotNow
			}
			c, err = r.d.hub.Capacity(ctx, req)
			return err
		})
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, errNotNow) {
				r.log.Error("the hub does not tell its capacity", logx.Err, explain(err))
				sleep(ctx, r.d.pace.HubMax)
			}
			return err
		}
		if c.Fits > 0 {
			return nil
		}
		r.setState(dispatch.WaitingCapacity, "")
		if c.Revision == req.After && req.WaitSecs > 0 && time.Since(asked) < r.d.pace.HubMin {
			sleep(ctx, r.d.pace.HubMin)
		}
		req.After, req.WaitSecs = c.Revision, r.d.pace.LongPoll
	}
	return errNotNow
}

var errNotNow = errors.New("not to ask now")

// mayAsk says whether ready would return at once.
func (r *runner) mayAsk(ctx context.Context) bool {
	approved := r.d.server() == dispatch.Approved
	r.mu.Lock()
	defer r.mu.Unlock()
	return ctx.Err() == nil && approved && !time.Now().Before(r.refusedTil)
}

func (r *runner) notify(what string) func(error, int, time.Duration) {
	return func(err error, try int, wait time.Duration) {
		level := slog.LevelWarn
		if try > 3 && try%10 != 0 {
			level = slog.LevelDebug
		}
		r.log.Log(context.Background(), level, what+" is tried again", logx.Err, err, "try", try, "wait", wait.Round(time.Millisecond))
	}
}

// round reserves and asks until there is a job, or asking is to begin anew. It
// gives the slot back unless a job has it then.
func (r *runner) round(ctx context.Context, free func()) {
	lease := r.d.pace.Lease
	from := time.Now()
	g, err := r.d.hub.Reserve(ctx, dispatch.ReservationRequest{RequestID: wire.NewHex(dispatch.RequestIDLen), Placement: r.placement, LeaseSecs: lease, WaitSecs: 0})
	if err != nil {
		free()
		if code := codeOf(err); code == dispatch.NoCapacity {
			r.setState(dispatch.WaitingCapacity, "")
		} else if ctx.Err() == nil {
			r.log.Warn("no reservation", logx.Err, explain(err))
		}
		sleep(ctx, max(r.d.pace.HubMin, retryAfter(err, r.d.pace)))
		return
	}
	res := &reservation{id: g.Reservation, secs: lease, until: from.Add(seconds(lease))}
	for {
		asked := time.Now()
		took, again := r.ask(ctx, res, free)
		if took {
			return
		}
		// A reservation serves one lease's worth of requests: another runner
		// that waits for the room it holds is to have its turn.
		if !again || !r.mayAsk(ctx) || time.Since(from) >= seconds(lease) {
			r.release(context.WithoutCancel(ctx), res.id)
			free()
			if again || ctx.Err() == nil {
				sleep(ctx, max(r.d.pace.Check-time.Since(asked), r.d.pace.HubMin/2))
			}
			return
		}
		sleep(ctx, r.d.pace.Check-time.Since(asked))
		if !r.mayAsk(ctx) || !r.renew(ctx, res) {
			r.release(context.WithoutCancel(ctx), res.id)
			free()
			return
		}
	}
}

func seconds(n int) time.Duration { return time.Duration(n) * time.Second }

func retryAfter(err error, p Pace) time.Duration {
	e, ok := errors.AsType[*dispatch.Error](err)
	if !ok {
		return 0
	}
	return p.after(e.RetryAfterSecs)
}

// reservation is a reservation as the daemon counts its lease: from when it asked,
// so that it always ends earlier here than on the node.
type reservation struct {
	id    string
	secs  int
	mu    sync.Mutex
	until time.Time
	gone  bool
}

// renew extends the lease, and says whether the reservation is there.
func (r *runner) renew(ctx context.Context, l *reservation) bool {
	from := time.Now()
	g, err := r.d.hub.Renew(ctx, l.id, l.secs)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch e, answered := errors.AsType[*dispatch.Error](err); {
	case err == nil:
		l.until = from.Add(seconds(min(g.LeaseSecs, l.secs)))
		if g.LeaseSecs <= 0 { // a hub that does not say
			l.until = from.Add(seconds(l.secs))
		}
	case answered && !e.Retry():
		l.gone = true
	default:
		r.log.Warn("the reservation is not renewed", logx.Err, err)
	}
	return !l.gone && time.Now().Before(l.until)
}

// keep renews until stop is closed.
func (r *runner) keep(ctx context.Context, l *reservation, stop <-chan struct{}) {
	t := time.NewTicker(max(seconds(l.secs)/3, 10*time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
			if !r.renew(ctx, l) {
				r.log.Warn("the reservation is gone while GitLab is asked: a job that comes now is placed afresh")
				return
			}
		}
	}
}

func (r *runner) release(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if err := r.d.hub.Release(ctx, id); err != nil && codeOf(err) != dispatch.NotFound {
		r.log.Warn("a reservation is not given back: it ends with its lease", logx.Err, err)
	}
}

// ask makes one request for a job. took says that there was one, which has the
// slot and the reservation now; again that asking may go on.
func (r *runner) ask(ctx context.Context, l *reservation, free func()) (took, again bool) {
	r.setState(dispatch.Polling, "")
	r.mu.Lock()
	r.requests++
	last := r.lastUpdate
	r.mu.Unlock()
	kept := context.WithoutCancel(ctx)
	stop := make(chan struct{})
	var keeping sync.WaitGroup
	keeping.Go(func() { r.keep(kept, l, stop) })
	o, err := r.d.client.RequestJob(kept, r.token.Reveal(), r.d.systemID, last)
	close(stop)
	keeping.Wait()
	r.mu.Lock()
	r.requests--
	r.lastUpdate = o.LastUpdate
	r.mu.Unlock()
	if o.Job != nil {
		r.see(http.StatusCreated)
		r.healthy()
		return r.take(o, l, free), false
	}
	return false, r.judge(err)
}

func (r *runner) healthy() {
	r.mu.Lock()
	r.refusals, r.failures = 0, 0
	r.mu.Unlock()
}

// judge says whether asking may go on after an answer without a job.
func (r *runner) judge(err error) (again bool) {
	se, answered := errors.AsType[*gitlab.StatusError](err)
	switch {
	case err == nil:
		r.see(http.StatusNoContent)
		r.healthy()
		return true
	case answered && se.Status == http.StatusForbidden:
		r.see(se.Status)
		r.mu.Lock()
		r.refusals++
		n := r.refusals
		r.mu.Unlock()
		r.log.Warn("GitLab gives this runner no job", logx.Err, err, "times", n)
		if n >= maxRefusals {
			r.log.Error("GitLab refuses the runner: it is not asked for a while", "again_in", r.d.pace.Unhealthy)
			r.mu.Lock()
			r.refusals = 0
			r.mu.Unlock()
			r.refuse(r.d.pace.Unhealthy)
			return false
		}
		return true
	case answered && se.Status == http.StatusConflict: // another request of this runner was given the job
		r.see(se.Status)
		r.healthy()
		return true
	}
	if answered {
		r.see(se.Status)
	} else {
		r.see(0)
	}
	r.mu.Lock()
	r.failures++
	n := r.failures
	if n >= maxRefusals {
		r.refusedTil = time.Now().Add(min(r.d.pace.HubMin<<min(n-maxRefusals, 10), r.d.pace.Silence))
		r.why = dispatch.RunnerState{State: dispatch.Unhealthy, Message: wire.Clean(err.Error(), wire.MaxText)}
	}
	r.mu.Unlock()
	r.log.Warn("asking GitLab for a job", logx.Err, err, "times", n)
	return n < maxRefusals
}

// maxRefusals in a row stop a runner from asking (vectors/README.md 4).
const maxRefusals = 3

// take records a job that GitLab gave and sets it going. It says whether the
// job was taken, with the slot.
func (r *runner) take(o gitlab.Offer, l *reservation, free func()) bool {
	d := r.d
	_, id := r.known()
	resp, spec, err := translate(o.Job, Source{
		ServerURL: d.conf.GitLab.URL, ServerCAPEM: d.serverCA, RunnerID: id, RunnerName: r.name, ShortToken: r.short, SystemID: d.systemID,
		RequestID: o.RequestID, OutputLimit: r.conf.OutputLimit, Info: d.info,
	})
	log := r.log.With(logx.Job, fmt.Sprint(resp.ID))
	if resp.ID == 0 || resp.Token == "" {
		log.Error("GitLab sent a job without an id or a token: it can neither be run nor failed", logx.Err, err)
		return false
	}
	if r.store.has(resp.ID) {
		// GitLab gives a job again that nobody has committed to for a while: it
		// may wait for a node here all that time.
		log.Warn("GitLab gave out a job once more that is held already: it goes on")
		return false
	}
	log.Info("took a job", "project", resp.JobInfo.ProjectFullPath, "name", resp.JobInfo.Name, "runner_id", id,
		"time_in_queue_secs", resp.JobInfo.TimeInQueue, "queue_size", resp.JobInfo.QueueSize, "queue_depth", resp.JobInfo.QueueDepth)
	now := d.now()
	vars := variables(resp.Variables)
	v := valuesOf(vars)
	rec := Record{
		ID: resp.ID, Token: resp.Token, TakenAt: now.UTC(), RequestID: wire.NewHex(dispatch.RequestIDLen),
		DebugTrace: v.isTrue("CI_DEBUG_TRACE"), Timestamps: timestamps(vars), Reasons: resp.Features.FailureReasons,
		Project: fmt.Sprintf("%s (ID %d)", wire.Clean(resp.JobInfo.ProjectFullPath, wire.MaxText), resp.JobInfo.ProjectID),
	}
	d.sawVersion(v["CI_SERVER_VERSION"])
	if err == nil {
		rec.Head = headLines(resp.Policy.lines(), rec.Timestamps, now)
		rec.Submission, err = r.submission(spec, rec.RequestID, l)
	}
	if err != nil {
		ref, ok := errors.AsType[*refusal](err)
		if !ok {
			ref = &refusal{failure: job.System, text: err.Error()}
		}
		log.Warn("the job is refused", logx.Err, strings.TrimSpace(ref.text))
		rec.End = ref.end(rec.Timestamps, now)
		r.giveBack(l)
	}
	h := r.newHeld(rec, free)
	h.save()
	d.start(h)
	return true
}

func (r *runner) submission(spec *job.CiJob, id string, l *reservation) (*dispatch.JobSubmission, error) {
	b, err := spec.Encode()
	if err != nil { // it passed its Check: it is too large
		return nil, refusedBy(&dispatch.Error{Failure: dispatch.Failure{Code: dispatch.TooLarge}}, nil, "", "")
	}
	s := &dispatch.JobSubmission{RequestID: id, Placement: r.placement, PlaceWithinSecs: r.d.pace.Place, Spec: b}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.gone {
		s.Reservation = l.id
	}
	return s, nil
}

func (r *runner) giveBack(l *reservation) {
	r.d.background(func(ctx context.Context) { r.release(ctx, l.id) })
}

// placementOf is where a runner's jobs go.
func placementOf(c *relayconf.Runner) dispatch.Placement {
	return dispatch.Placement{Pool: c.Pool, Labels: c.Labels, Envelope: wire.Envelope{Memory: c.Envelope.Memory, CPUs: c.Envelope.CPUs, Disk: c.Envelope.DiskBytes}}
}

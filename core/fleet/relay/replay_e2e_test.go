package relay_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/wire"
	"virtkit/core/gitlab"
	"virtkit/e2e/gitlabtest"
)

// A relay asks GitLab what gitlab-runner asked the recordings' server, in the
// same order, with the same headers and bodies, whatever the server answered.
// Its jobs are a hub's.
func TestReplayRecordings(t *testing.T) {
	recs, err := gitlabtest.Recordings("../../../testdata/runner-api")
	if err != nil || len(recs) < 20 {
		t.Fatalf("%d recordings, %v", len(recs), err)
	}
	for _, rec := range recs {
		t.Run(rec.Name, func(t *testing.T) {
			t.Parallel()
			(&replay{rec: rec}).run(t)
		})
	}
}

// replay is a fleet that does what the recorded runner's shell did.
type replay struct {
	t    *testing.T
	rec  *gitlabtest.Recording
	w    *world
	play *gitlabtest.Play

	mu      sync.Mutex
	job     *relaytest.Job
	seen    int // requests of the job
	asked   int // requests for a job
	written int64
}

func (p *replay) run(t *testing.T) {
	w := newWorld(t, 2)
	p.t, p.w = t, w
	w.gitlab.Misbehave(p.rec.Rules...)
	w.gitlab.Interval = p.rec.Interval
	runner, err := p.rec.Runner()
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range p.rec.Requests {
		if r.Endpoint == "put_running" {
			if p.play, err = p.rec.Play(i); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	w.write(w.conf.Runners[0].TokenFile, runner.Token)
	w.write(w.conf.StateDir+"/"+relay.SystemIDFile, runner.SystemID)
	w.conf.Concurrent = 1
	w.opt.Info, w.opt.Agent = runner.Info, runner.Agent
	w.opt.Pace.Check = 50 * time.Millisecond
	w.opt.Pace.Follow = gitlab.DefaultTiming()
	w.opt.Pace.Follow.Interval, w.opt.Pace.Follow.KeepAlive = 500*time.Millisecond, 5*time.Second
	w.opt.Pace.Follow.Retry, w.opt.Pace.Follow.Backoff = 20*time.Millisecond, 10*time.Millisecond
	w.before = p.step
	go p.node()
	w.run()

	want := 0
	verifies := p.rec.Requests[0].Endpoint == "verify"
	for _, r := range p.rec.Requests {
		if r.Endpoint != "upload" {
			want++
		}
	}
	got := func() (out []gitlabtest.Request) {
		for _, r := range w.gitlab.Requests() {
			if (r.Endpoint == "verify") == verifies {
				out = append(out, r)
			}
		}
		return out[:min(len(out), want)]
	}
	w.gitlabUntil("all was asked", func() bool { return len(got()) >= want })
	for _, d := range p.rec.Compare(got()) {
		t.Error(d)
	}
	if p.play == nil {
		return
	}
	// The hub hears of the end, whatever GitLab made of it.
	w.until("the job is settled", func() bool { return w.hub.Jobs()[0].Settled() })
	if got, want := w.hub.Jobs()[0].View().Cancel, p.cancels(); got != want {
		t.Errorf("the hub was asked to cancel %q, expected %q", got, want)
	}
	if j, _ := w.gitlab.Job(p.rec.Job.ID); string(j.Trace) != string(p.play.Text[:len(j.Trace)]) {
		t.Errorf("the trace is another one than the output")
	}
}

// node accepts the job, and ends it when it is to be canceled before it said
// anything.
func (p *replay) node() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	j, err := p.w.hub.Next(ctx, 0)
	if err != nil {
		return
	}
	p.mu.Lock()
	p.job = j
	p.mu.Unlock()
	j.Accept()
	if p.play.Last >= 0 {
		return
	}
	if p.w.hub.Until(ctx, "the job is canceled", func() bool { return j.View().Cancel != "" }) == nil {
		j.Finish(wire.JobResult{Failure: "canceled"})
	}
}

// step is called for each request before it is answered.
func (p *replay) step(r *http.Request) {
	switch {
	case r.URL.Path == "/api/v4/jobs/request":
		p.mu.Lock()
		p.asked++
		n := p.asked
		p.mu.Unlock()
		p.giveOut(n)
	case strings.HasPrefix(r.URL.Path, "/api/v4/jobs/"):
		p.mu.Lock()
		p.seen++
		p.print(p.seen)
		p.mu.Unlock()
	}
}

// giveOut adds the job before the request that got it.
func (p *replay) giveOut(n int) {
	for _, r := range p.rec.Requests {
		if r.Endpoint == "request" {
			n--
		}
		if n == 0 {
			if r.Status == http.StatusCreated {
				p.w.add(p.response())
			}
			return
		}
	}
}

func (p *replay) response() string {
	f, _ := json.Marshal(map[string]any{"failure_reasons": p.rec.Job.Features.FailureReasons})
	r := response(p.rec.Job.ID, `"features":`+string(f))
	if p.play.Debug {
		r = response(p.rec.Job.ID, `"features":`+string(f), `"variables":[{"key":"CI_DEBUG_TRACE","value":"true"}]`)
	}
	return strings.Replace(r, `"token":"`+jobToken+`"`, `"token":"`+p.rec.Job.Token+`"`, 1)
}

// print lets the job print what the recorded one had printed when the next
// request was sent, and waits until the relay has it. mu is held.
func (p *replay) print(seen int) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	j := p.job
	if size := p.play.Size(seen); size > p.written && (p.play.Last < 0 || seen <= p.play.Last) {
		j.Write(p.play.Text[p.written:size])
		p.written = size
		if seen != p.play.Last {
			p.w.hub.Until(ctx, "the relay has the output", func() bool { return j.Asked() >= size })
		}
	}
	if seen != p.play.Last {
		return
	}
	end := func() {
		res := wire.JobResult{}
		if p.play.Result.State == gitlab.Failed {
			res.Failure = string(classOf(p.play.Result.Reason, p.rec.Job.Features.FailureReasons))
			res.ExitCode = &p.play.Result.ExitCode
		}
		j.Finish(res)
	}
	if p.cancels() != "" { // by the answer to this request
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if p.w.hub.Until(ctx, "the job is canceled", func() bool { return j.View().Cancel != "" }) == nil {
				end()
			}
		}()
		return
	}
	end()
	p.w.hub.Until(ctx, "the relay knows the end", func() bool { return j.Told() })
}

// cancels is how GitLab ends the job, "" when it does not.
func (p *replay) cancels() wire.CancelMode {
	for _, r := range p.rec.Rules {
		switch {
		case r.On == "patch" && r.JobStatus == "canceling":
			return wire.CancelGraceful
		case r.On == "patch" && (r.JobStatus == "canceled" || r.JobStatus == "failed" || r.Status == http.StatusForbidden),
			r.On == "put_running" && (r.Status == http.StatusNotFound || r.Status == http.StatusForbidden || r.JobStatus == "canceled"):
			return wire.CancelImmediate
		}
	}
	return ""
}

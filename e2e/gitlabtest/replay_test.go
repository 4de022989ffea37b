package gitlabtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/gitlab"
)

// play is a runner that repeats a recording's job.
type play struct {
	*Play
	t     *testing.T
	done  chan gitlab.Result
	mu    sync.Mutex
	seen  int
	asked []gitlab.Cancel
}

func (p *play) ReadAt(b []byte, off int64) (int, error) {
	n := copy(b, p.Text[off:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (p *play) Sum() (int64, uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := p.Size(p.seen)
	return size, crc32.ChecksumIEEE(p.Text[:size])
}

// step is called for each request of the job, before it is answered.
func (p *play) step() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen++
	if p.seen == p.Last {
		p.done <- p.Result
	}
}

// The client of core/gitlab asks this server what gitlab-runner asked the
// recordings' server, in the same order, with the same headers and bodies, and
// gets the same answers.
func TestReplayRunnerAPI(t *testing.T) {
	recs, err := Recordings("../../testdata/runner-api")
	if err != nil || len(recs) < 20 {
		t.Fatalf("%d recordings, %v", len(recs), err)
	}
	for _, rec := range recs {
		t.Run(rec.Name, func(t *testing.T) {
			t.Parallel()
			replay(t, rec)
		})
	}
}

func replay(t *testing.T, rec *Recording) {
	srv := New()
	srv.Misbehave(rec.Rules...)
	srv.Interval = rec.Interval
	var p *play
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p != nil && strings.HasPrefix(r.URL.Path, "/api/v4/jobs/") && r.URL.Path != "/api/v4/jobs/request" {
			p.step()
		}
		srv.ServeHTTP(w, r)
	}))
	defer ts.Close()
	first, err := rec.Runner()
	if err != nil {
		t.Fatal(err)
	}
	c, err := gitlab.New(ts.URL, first.Agent, first.Info, ts.Client())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	lastUpdate := ""
	for i := 0; i < len(rec.Requests); {
		switch r := &rec.Requests[i]; r.Endpoint {
		case "verify":
			v, err := c.Verify(ctx, first.Token, first.SystemID)
			if err != nil || v.ID != 7 || v.ExpiresAt != nil {
				t.Fatalf("Verify: %+v, %v", v, err)
			}
			i++
		case "request":
			// The transport makes some calls again.
			for i+1 < len(rec.Requests) && rec.Requests[i+1].Endpoint == "request" && (r.Status == http.StatusInternalServerError || r.Status == http.StatusTooManyRequests) {
				i++
				r = &rec.Requests[i]
			}
			if r.Status == http.StatusCreated {
				addJob(t, srv, rec)
			}
			o, err := c.RequestJob(ctx, first.Token, first.SystemID, lastUpdate)
			var se *gitlab.StatusError
			switch {
			case r.Status >= http.StatusBadRequest:
				if !errors.As(err, &se) || se.Status != r.Status || se.Message != fmt.Sprintf("%d from rule", r.Status) {
					t.Fatalf("RequestJob: %v", err)
				}
			case err != nil || (o.Job != nil) != (r.Status == http.StatusCreated):
				t.Fatalf("RequestJob: %q, %v", o.Job, err)
			}
			lastUpdate = o.LastUpdate
			i++
		case "put_running":
			p = newPlay(t, rec, i)
			i = p.run(ctx, c, rec, i)
			p = nil
		default:
			t.Fatalf("%s comes out of order", r.Endpoint)
		}
	}
	for _, d := range rec.Compare(srv.Requests()) {
		t.Error(d)
	}
}

func addJob(t *testing.T, srv *Server, rec *Recording) {
	t.Helper()
	b, _ := json.Marshal(map[string]any{"id": rec.Job.ID, "token": rec.Job.Token})
	if _, err := srv.AddJob(b); err != nil {
		t.Fatal(err)
	}
}

// newPlay repeats the job whose acceptance is request i.
func newPlay(t *testing.T, rec *Recording, i int) *play {
	t.Helper()
	p, err := rec.Play(i)
	if err != nil {
		t.Fatal(err)
	}
	return &play{Play: p, t: t, done: make(chan gitlab.Result, 1)}
}

// run accepts and follows the job and returns the index of the next request.
func (p *play) run(ctx context.Context, c *gitlab.Client, rec *Recording, i int) int {
	t := p.t
	job := gitlab.Job{ID: rec.Job.ID, Token: rec.Job.Token, Reasons: rec.Job.Features.FailureReasons, DebugTrace: p.Debug}
	accepted := 0
	for accepted < len(p.Todo) && p.Todo[accepted].Endpoint == "put_running" && !strings.Contains(p.Todo[accepted].Raw, "bytesize") {
		accepted++
	}
	canceled, err := c.Accept(ctx, job)
	wantCanceled := slices.ContainsFunc(rec.Rules, func(r Rule) bool { return r.On == "put_running" && r.JobStatus != "" })
	answer := p.Todo[accepted-1].Status
	wantGone := answer == http.StatusNotFound || answer == http.StatusForbidden || wantCanceled && len(p.Todo) == accepted
	if errors.Is(err, gitlab.ErrGone) != wantGone || canceled != wantCanceled {
		t.Fatalf("Accept: %v, %v", canceled, err)
	}
	if wantCanceled { // before gitlab-runner maps what GitLab does not know
		job.Reasons = append(slices.Clip(job.Reasons), "job_canceled")
	}
	if !wantGone {
		timing := gitlab.DefaultTiming()
		timing.Interval, timing.KeepAlive = 150*time.Millisecond, 1500*time.Millisecond
		timing.Retry, timing.Backoff = 20*time.Millisecond, 10*time.Millisecond
		f := &gitlab.Follower{Client: c, Job: job, Log: p, Timing: timing, Cancel: func(w gitlab.Cancel) { p.asked = append(p.asked, w) }}
		err := f.Follow(ctx, p.done)
		last := p.Todo[len(p.Todo)-1]
		if errors.Is(err, gitlab.ErrGone) != (last.Status == http.StatusForbidden || last.Status == http.StatusNotFound) || err != nil && !errors.Is(err, gitlab.ErrGone) {
			t.Errorf("Follow: %v", err)
		}
		var want []gitlab.Cancel
		for _, r := range rec.Rules {
			if r.On == "patch" && r.JobStatus == "canceling" {
				want = append(want, gitlab.Graceful)
			}
			if r.On == "patch" && (r.JobStatus == "canceled" || r.JobStatus == "failed") {
				want = append(want, gitlab.Immediate)
			}
		}
		if got := p.asked; len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("asked to cancel: %v, expected %v", got, want)
		}
	}
	for i < len(rec.Requests) && rec.Requests[i].Endpoint != "request" {
		i++
	}
	return i
}

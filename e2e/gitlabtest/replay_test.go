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
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/gitlab"
)

// recording is what a real gitlab-runner asked in one scenario (testdata/runner-api,
// taken from shared/vectors: the requests but for Git's, and the rules).
type recording struct {
	Job *struct {
		ID       int64
		Token    string
		Features struct {
			FailureReasons []string `json:"failure_reasons"`
		}
	}
	Rules    []Rule
	Interval int // seconds, when it is not 3
	Requests []recorded
}

type recorded struct {
	Seq                      int
	JobID                    int64 `json:"job_id"`
	Endpoint, Method, Target string
	Nth                      int
	Headers                  [][2]string
	Raw                      string
	Status                   int
}

func (r *recorded) header(name string) string {
	for _, h := range r.Headers {
		if h[0] == name {
			return h[1]
		}
	}
	return ""
}

// ends is how many bytes of the trace there were when r was sent, or -1.
func (r *recorded) ends(t *testing.T) int64 {
	switch r.Endpoint {
	case "patch":
		var from, to int64
		if _, err := fmt.Sscanf(r.header("Content-Range"), "%d-%d", &from, &to); err != nil {
			t.Fatal(err)
		}
		return to + 1
	case "put_running", "put_final":
		var u struct {
			Output struct{ Bytesize int64 }
		}
		if err := json.Unmarshal([]byte(r.Raw), &u); err != nil {
			t.Fatal(err)
		}
		return u.Output.Bytesize
	}
	return -1
}

var sums = regexp.MustCompile(`crc32:[0-9a-f]{8}`)

// play is a runner that repeats a recording: its trace grows as the recorded
// one had when each request was sent.
type play struct {
	t     *testing.T
	todo  []recorded // the recorded requests of the job after its acceptance
	done  chan gitlab.Result
	res   gitlab.Result
	text  []byte
	last  int // index in todo of the request after which nothing is printed
	mu    sync.Mutex
	seen  int
	asked []gitlab.Cancel
}

func (p *play) ReadAt(b []byte, off int64) (int, error) {
	n := copy(b, p.text[off:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (p *play) Sum() (int64, uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := int64(0)
	for i := 0; i <= p.seen && i < len(p.todo); i++ {
		size = max(size, p.todo[i].ends(p.t))
	}
	return size, crc32.ChecksumIEEE(p.text[:size])
}

// step is called for each request of the job, before it is answered.
func (p *play) step() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen++
	if p.seen == p.last {
		p.done <- p.res
	}
}

// The client of core/gitlab asks this server what gitlab-runner asked the
// recordings' server, in the same order, with the same headers and bodies, and
// gets the same answers.
func TestReplayRunnerAPI(t *testing.T) {
	files, _ := filepath.Glob("../../testdata/runner-api/*.json")
	if len(files) < 20 {
		t.Fatalf("%d recordings", len(files))
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".json"), func(t *testing.T) {
			t.Parallel()
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			var rec recording
			if err := json.Unmarshal(b, &rec); err != nil {
				t.Fatal(err)
			}
			replay(t, &rec)
		})
	}
}

func replay(t *testing.T, rec *recording) {
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
	var first struct {
		Info     gitlab.Info
		Token    string
		SystemID string `json:"system_id"`
	}
	if err := json.Unmarshal([]byte(rec.Requests[0].Raw), &first); err != nil {
		t.Fatal(err)
	}
	c, err := gitlab.New(ts.URL, rec.Requests[0].header("User-Agent"), first.Info, ts.Client())
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
			if r.Status == http.StatusCreated {
				addJob(t, srv, rec)
			}
			o, err := c.RequestJob(ctx, first.Token, first.SystemID, lastUpdate)
			var se *gitlab.StatusError
			switch {
			case r.Status == http.StatusForbidden:
				if !errors.As(err, &se) || se.Status != r.Status || se.Message != "403 from rule" {
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
	compare(t, rec, srv.Requests())
}

func addJob(t *testing.T, srv *Server, rec *recording) {
	t.Helper()
	b, _ := json.Marshal(map[string]any{"id": rec.Job.ID, "token": rec.Job.Token})
	if _, err := srv.AddJob(b); err != nil {
		t.Fatal(err)
	}
}

// newPlay repeats the job whose acceptance is request i.
func newPlay(t *testing.T, rec *recording, i int) *play {
	p := &play{t: t, done: make(chan gitlab.Result, 1), last: -1}
	for _, r := range rec.Requests[i:] {
		if r.JobID == rec.Job.ID && r.Endpoint != "request" && r.Endpoint != "upload" {
			p.todo = append(p.todo, r)
		}
	}
	final := slices.IndexFunc(p.todo, func(r recorded) bool { return r.Endpoint == "put_final" })
	if final < 0 {
		return p
	}
	p.last = final
	if p.todo[final-1].Endpoint == "patch" {
		p.last = final - 1
	}
	for p.last > 0 && p.todo[p.last].Endpoint == "patch" && p.todo[p.last-1].Endpoint == "patch" &&
		p.todo[p.last].header("Content-Range") == p.todo[p.last-1].header("Content-Range") {
		p.last-- // the same call, made again by the transport
	}
	var u struct {
		State         gitlab.State
		FailureReason string `json:"failure_reason"`
		ExitCode      int    `json:"exit_code"`
		Output        struct{ Bytesize int64 }
	}
	if err := json.Unmarshal([]byte(p.todo[final].Raw), &u); err != nil {
		t.Fatal(err)
	}
	p.res = gitlab.Result{State: u.State, Reason: u.FailureReason, ExitCode: u.ExitCode}
	p.text = []byte(strings.Repeat("what the job printed\n", int(u.Output.Bytesize)/20+1))[:u.Output.Bytesize]
	return p
}

// run accepts and follows the job and returns the index of the next request.
func (p *play) run(ctx context.Context, c *gitlab.Client, rec *recording, i int) int {
	t := p.t
	job := gitlab.Job{ID: rec.Job.ID, Token: rec.Job.Token, Reasons: rec.Job.Features.FailureReasons}
	for _, r := range p.todo {
		job.DebugTrace = job.DebugTrace || strings.HasSuffix(r.Target, "debug_trace=true")
	}
	accepted := 0
	for accepted < len(p.todo) && p.todo[accepted].Endpoint == "put_running" && !strings.Contains(p.todo[accepted].Raw, "bytesize") {
		accepted++
	}
	canceled, err := c.Accept(ctx, job)
	wantGone := p.todo[accepted-1].Status == http.StatusNotFound
	if errors.Is(err, gitlab.ErrGone) != wantGone || canceled {
		t.Fatalf("Accept: %v, %v", canceled, err)
	}
	if !wantGone {
		timing := gitlab.DefaultTiming()
		timing.Interval, timing.KeepAlive = 150*time.Millisecond, 1500*time.Millisecond
		timing.Retry, timing.Backoff = 20*time.Millisecond, 10*time.Millisecond
		f := &gitlab.Follower{Client: c, Job: job, Log: p, Timing: timing, Cancel: func(w gitlab.Cancel) { p.asked = append(p.asked, w) }}
		err := f.Follow(ctx, p.done)
		last := p.todo[len(p.todo)-1]
		if errors.Is(err, gitlab.ErrGone) != (last.Status == http.StatusForbidden) || err != nil && !errors.Is(err, gitlab.ErrGone) {
			t.Errorf("Follow: %v", err)
		}
		var want []gitlab.Cancel
		for _, r := range rec.Rules {
			if r.On == "patch" && r.JobStatus == "canceling" {
				want = append(want, gitlab.Graceful)
			}
			if r.On == "patch" && r.JobStatus == "canceled" {
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

// compare is byte for byte but for what differs with each run.
func compare(t *testing.T, rec *recording, got []Request) {
	t.Helper()
	var want []recorded
	for _, r := range rec.Requests {
		if r.Endpoint != "upload" {
			want = append(want, r)
		}
	}
	for i := range max(len(want), len(got)) {
		if i >= len(got) || i >= len(want) {
			t.Fatalf("%d requests, expected %d:\n%s", len(got), len(want), sequence(got))
		}
		w, g := want[i], got[i]
		if w.Endpoint != g.Endpoint || w.Method != g.Method || w.Target != g.Target || w.Status != g.Status || w.Nth != g.Nth {
			t.Fatalf("request %d: %s %s %s, nth %d, answered %d; expected %s %s %s, nth %d, answered %d\n%s", i+1, g.Endpoint, g.Method, g.Target, g.Nth, g.Status,
				w.Endpoint, w.Method, w.Target, w.Nth, w.Status, sequence(got))
		}
		var names []string
		for _, h := range w.Headers {
			names = append(names, h[0])
			switch h[0] {
			case "Host", "X-Request-Id":
			case "Content-Length":
				// The recorded bodies had other checksums and paths; ours was sent whole.
				if g.Header.Get(h[0]) != fmt.Sprint(len(g.Body)) {
					t.Errorf("request %d: Content-Length %s, with %d bytes", i+1, g.Header.Get(h[0]), len(g.Body))
				}
			default:
				if v := g.Header.Get(h[0]); v != h[1] {
					t.Errorf("request %d (%s): %s: %q, expected %q", i+1, w.Endpoint, h[0], v, h[1])
				}
			}
		}
		if len(g.Header) != len(names) {
			t.Errorf("request %d (%s): headers %v, expected %q", i+1, w.Endpoint, g.Header, names)
		}
		if id := g.Header.Get("X-Request-Id"); len(id) != 32 {
			t.Errorf("request %d: X-Request-Id %q", i+1, id)
		}
		if body := sums.ReplaceAllString(string(g.Body), "crc32:X"); w.Endpoint != "patch" && body != sums.ReplaceAllString(w.Raw, "crc32:X") {
			t.Errorf("request %d (%s):\n%s\nexpected\n%s", i+1, w.Endpoint, body, w.Raw)
		}
	}
}

func sequence(got []Request) string {
	var b strings.Builder
	for _, g := range got {
		fmt.Fprintf(&b, "  %s %d %s %d\n", g.Endpoint, g.Nth, g.Header.Get("Content-Range"), g.Status)
	}
	return b.String()
}

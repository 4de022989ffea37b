package gitlabtest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"virtkit/core/gitlab"
)

// Recording is what a real gitlab-runner asked in one scenario
// (testdata/runner-api, taken from shared/vectors: the requests but for Git's,
// and the rules).
type Recording struct {
	Name string `json:"-"`
	Job  *struct {
		ID       int64  `json:"id"`
		Token    string `json:"token"`
		Features struct {
			FailureReasons []string `json:"failure_reasons"`
		} `json:"features"`
	} `json:"job"`
	Script   []string   `json:"script,omitempty"` // of the job, where e2e/cmd/runnerrec can record it again
	Rules    []Rule     `json:"rules"`
	Interval int        `json:"interval,omitempty"` // seconds, when it is not 3
	Requests []Recorded `json:"requests"`
}

// Recorded is one request.
type Recorded struct {
	Seq      int         `json:"seq"`
	JobID    int64       `json:"job_id"`
	Endpoint string      `json:"endpoint"`
	Nth      int         `json:"nth"`
	Method   string      `json:"method"`
	Target   string      `json:"target"`
	Headers  [][2]string `json:"headers"`
	Raw      string      `json:"raw"`
	Status   int         `json:"status"`
}

// Recordings reads those of a directory.
func Recordings(dir string) ([]*Recording, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	var out []*Recording
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		rec := &Recording{Name: strings.TrimSuffix(filepath.Base(f), ".json")}
		if err := json.Unmarshal(b, rec); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		out = append(out, rec)
	}
	return out, nil
}

// Header is the value of the first header of a name.
func (r *Recorded) Header(name string) string {
	for _, h := range r.Headers {
		if h[0] == name {
			return h[1]
		}
	}
	return ""
}

// ends is how many bytes of the trace there were when r was sent, or -1.
func (r *Recorded) ends() int64 {
	switch r.Endpoint {
	case "patch":
		var from, to int64
		if _, err := fmt.Sscanf(r.Header("Content-Range"), "%d-%d", &from, &to); err != nil {
			panic(fmt.Sprintf("a recorded patch without a range: %v", err))
		}
		return to + 1
	case "put_running", "put_final":
		var u struct {
			Output struct{ Bytesize int64 }
		}
		if err := json.Unmarshal([]byte(r.Raw), &u); err != nil {
			panic(fmt.Sprintf("a recorded update that is no JSON: %v", err))
		}
		return u.Output.Bytesize
	}
	return -1
}

// Runner is what the recorded runner said of itself.
type Runner struct {
	Info     gitlab.Info
	Token    string
	SystemID string `json:"system_id"`
	Agent    string `json:"-"` // User-Agent
}

// Runner reads it off the first request.
func (rec *Recording) Runner() (r Runner, err error) {
	r.Agent = rec.Requests[0].Header("User-Agent")
	return r, json.Unmarshal([]byte(rec.Requests[0].Raw), &r)
}

// Play is the recorded job: its trace grows as the recorded one had when each
// request was sent.
type Play struct {
	Todo   []Recorded // the job's requests from its acceptance on
	Result gitlab.Result
	Text   []byte // the whole trace: as many bytes, of its own
	Last   int    // index in Todo of the request after which nothing is printed, -1 = none
	Debug  bool   // CI_DEBUG_TRACE
}

// Play is the job whose acceptance is request i.
func (rec *Recording) Play(i int) (*Play, error) {
	p := &Play{Last: -1}
	for _, r := range rec.Requests[i:] {
		if r.JobID == rec.Job.ID && r.Endpoint != "request" && r.Endpoint != "upload" {
			p.Todo = append(p.Todo, r)
			p.Debug = p.Debug || strings.HasSuffix(r.Target, "debug_trace=true")
		}
	}
	final := slices.IndexFunc(p.Todo, func(r Recorded) bool { return r.Endpoint == "put_final" })
	if final < 0 {
		return p, nil
	}
	p.Last = final
	if p.Todo[final-1].Endpoint == "patch" {
		p.Last = final - 1
	}
	for p.Last > 0 && p.Todo[p.Last].Endpoint == "patch" && p.Todo[p.Last-1].Endpoint == "patch" &&
		p.Todo[p.Last].Header("Content-Range") == p.Todo[p.Last-1].Header("Content-Range") {
		p.Last-- // the same call, made again by the transport
	}
	var u struct {
		State         gitlab.State
		FailureReason string `json:"failure_reason"`
		ExitCode      int    `json:"exit_code"`
		Output        struct{ Bytesize int64 }
	}
	if err := json.Unmarshal([]byte(p.Todo[final].Raw), &u); err != nil {
		return nil, err
	}
	p.Result = gitlab.Result{State: u.State, Reason: u.FailureReason, ExitCode: u.ExitCode}
	p.Text = []byte(strings.Repeat("what the job printed\n", int(u.Output.Bytesize)/20+1))[:u.Output.Bytesize]
	return p, nil
}

// Size is how long the trace is once so many of the requests were sent.
func (p *Play) Size(seen int) int64 {
	size := int64(0)
	for i := 0; i <= seen && i < len(p.Todo); i++ {
		size = max(size, p.Todo[i].ends())
	}
	return size
}

var sums = regexp.MustCompile(`crc32:[0-9a-f]{8}`)

// Compare tells how requests differ from the recorded ones: byte for byte, but
// for what differs with each run.
func (rec *Recording) Compare(got []Request) (diffs []string) {
	diff := func(format string, a ...any) { diffs = append(diffs, fmt.Sprintf(format, a...)) }
	var want []Recorded
	for _, r := range rec.Requests {
		if r.Endpoint != "upload" {
			want = append(want, r)
		}
	}
	for i := range max(len(want), len(got)) {
		if i >= len(got) || i >= len(want) {
			diff("%d requests, expected %d:\n%s", len(got), len(want), Sequence(got))
			return diffs
		}
		w, g := want[i], got[i]
		if w.Endpoint != g.Endpoint || w.Method != g.Method || w.Target != g.Target || w.Status != g.Status || w.Nth != g.Nth {
			diff("request %d: %s %s %s, nth %d, answered %d; expected %s %s %s, nth %d, answered %d\n%s", i+1, g.Endpoint, g.Method, g.Target, g.Nth, g.Status,
				w.Endpoint, w.Method, w.Target, w.Nth, w.Status, Sequence(got))
			return diffs
		}
		var names []string
		for _, h := range w.Headers {
			names = append(names, h[0])
			switch h[0] {
			case "Host", "X-Request-Id":
			case "Content-Length":
				// The recorded bodies had other checksums and paths; ours was sent whole.
				if g.Header.Get(h[0]) != fmt.Sprint(len(g.Body)) {
					diff("request %d: Content-Length %s, with %d bytes", i+1, g.Header.Get(h[0]), len(g.Body))
				}
			default:
				if v := g.Header.Get(h[0]); v != h[1] {
					diff("request %d (%s): %s: %q, expected %q", i+1, w.Endpoint, h[0], v, h[1])
				}
			}
		}
		if len(g.Header) != len(names) {
			diff("request %d (%s): headers %v, expected %q", i+1, w.Endpoint, g.Header, names)
		}
		if id := g.Header.Get("X-Request-Id"); len(id) != 32 {
			diff("request %d: X-Request-Id %q", i+1, id)
		}
		if body := sums.ReplaceAllString(string(g.Body), "crc32:X"); w.Endpoint != "patch" && body != sums.ReplaceAllString(w.Raw, "crc32:X") {
			diff("request %d (%s):\n%s\nexpected\n%s", i+1, w.Endpoint, body, w.Raw)
		}
	}
	return diffs
}

// Sequence is requests as lines for a message.
func Sequence(got []Request) string {
	var b strings.Builder
	for _, g := range got {
		fmt.Fprintf(&b, "  %s %d %s %d\n", g.Endpoint, g.Nth, g.Header.Get("Content-Range"), g.Status)
	}
	return b.String()
}

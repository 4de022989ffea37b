// Package gitlabtest is a stand-in GitLab for tests and demos: the runner API,
// artifacts and Git over HTTP, answering as GitLab does in the recordings under
// shared/vectors. It keeps every request and every trace, and misbehaves where
// it is told to (the recordings' rules.json).
//
// It is not GitLab: it has no pipelines. A job is what AddJob was given, in
// GitLab's own form, and is given out once.
package gitlabtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Server is an http.Handler.
type Server struct {
	// RunnerToken is the one token that verifies and gets jobs; "" = any.
	RunnerToken string
	// Interval is what X-GitLab-Trace-Update-Interval says, in seconds; 0 = 3.
	Interval int
	// Git serves everything outside the API; nil = 404.
	Git http.Handler
	// Hold is how long a request for a job waits for one to be added when the
	// runner has said its last_update, as GitLab's Workhorse does; 0 = not.
	Hold time.Duration

	mu      sync.Mutex
	queue   []int64
	jobs    map[int64]*Job
	rules   []Rule
	seen    []Request
	nth     map[string]int
	updates int
	changed chan struct{} // closed and renewed when the queue or a job changes
}

// Job is one job as GitLab sees it.
type Job struct {
	ID       int64
	Token    string
	Response json.RawMessage // what the runner is given

	Status    string // pending, running, canceling, canceled, success, failed
	Trace     []byte
	Final     json.RawMessage // the last update's body, or nil
	Artifacts []Artifact
}

// Artifact is one upload.
type Artifact struct {
	Query    url.Values
	Filename string
	Header   map[string][]string // of the part
	Content  []byte
}

// Request is one request as the recordings keep them.
type Request struct {
	Seq      int
	Endpoint string // verify, request, put_running, put_final, patch, upload, download, git
	Nth      int    // of its endpoint and job
	JobID    int64
	Method   string
	Target   string
	Header   http.Header // with Host and, where it has one, Content-Length
	Body     []byte
	Time     time.Time
	Status   int // of the answer
}

// New returns a server with no jobs.
func New() *Server {
	return &Server{jobs: map[int64]*Job{}, nth: map[string]int{}, changed: make(chan struct{})}
}

// AddJob queues a job in the form of GitLab's answer to POST /jobs/request.
func (s *Server) AddJob(response []byte) (*Job, error) {
	var j struct {
		ID    int64
		Token string
	}
	if err := json.Unmarshal(response, &j); err != nil {
		return nil, fmt.Errorf("decoding a job: %w", err)
	}
	if j.ID == 0 || j.Token == "" {
		return nil, fmt.Errorf("a job needs id and token")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.jobs[j.ID] != nil {
		return nil, fmt.Errorf("job %d is there already", j.ID)
	}
	job := &Job{ID: j.ID, Token: j.Token, Response: response, Status: "pending"}
	s.jobs[j.ID] = job
	s.queue = append(s.queue, j.ID)
	s.change()
	return job, nil
}

// change wakes whoever waits. mu is held.
func (s *Server) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Changed is closed at the next change of the queue or of a job.
func (s *Server) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Forgotten puts the jobs that were given out and never heard of again back
// into the queue, as GitLab does with those that no runner commits to, and
// returns them. known are those that a runner has, heard of or not.
func (s *Server) Forgotten(known func(id int64) bool) []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	heard := map[int64]bool{}
	for _, r := range s.seen {
		heard[r.JobID] = true
	}
	var out []int64
	for id, j := range s.jobs {
		if j.Status == "pending" && !heard[id] && !slices.Contains(s.queue, id) && !known(id) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	s.queue = append(s.queue, out...)
	s.change()
	return out
}

// Misbehave adds rules; the first that fits a request decides.
func (s *Server) Misbehave(rules ...Rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append(s.rules, rules...)
}

// SetRules replaces the rules by others.
func (s *Server) SetRules(rules ...Rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = slices.Clone(rules)
}

// Cancel is what the button does: a runner that cancels gracefully is told
// "canceling" first.
func (s *Server) Cancel(id int64, graceful bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j := s.jobs[id]; j != nil {
		j.Status = "canceled"
		if graceful {
			j.Status = "canceling"
		}
		s.change()
	}
}

// Job is a copy of the job as it is now.
func (s *Server) Job(id int64) (Job, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.jobs[id]
	if j == nil {
		return Job{}, false
	}
	c := *j
	c.Trace = slices.Clone(j.Trace)
	c.Artifacts = slices.Clone(j.Artifacts)
	return c, true
}

// Requests are all so far.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// reply is an answer in the making.
type reply struct {
	status int
	header [][2]string
	body   string
	ctype  string
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	endpoint, id := route(r, body)
	if endpoint == "git" {
		r.Body = io.NopCloser(bytes.NewReader(body))
		s.git(w, r, body)
		return
	}
	if endpoint == "request" {
		s.hold(r, body)
	}
	s.mu.Lock()
	key := fmt.Sprintf("%s-%d", endpoint, id)
	s.nth[key]++
	nth := s.nth[key]
	rule := s.rule(endpoint, nth)
	var rep reply
	if rule == nil || rule.Apply || rule.Status == 0 {
		rep = s.answer(endpoint, s.jobs[id], r, body, rule)
	}
	if rule != nil {
		rule.over(&rep, s.jobs[id])
	}
	rep.header = append(rep.header, [2]string{"X-Request-Id", fmt.Sprintf("srv-%s-%d-%d", endpoint, id, nth)})
	s.note(r, endpoint, nth, id, body, rep.status)
	s.change()
	s.mu.Unlock()
	for _, h := range rep.header {
		w.Header().Set(h[0], h[1])
	}
	if rep.ctype != "" {
		w.Header().Set("Content-Type", rep.ctype)
	}
	w.WriteHeader(rep.status)
	io.WriteString(w, rep.body)
}

// note keeps a request. mu is held.
func (s *Server) note(r *http.Request, endpoint string, nth int, id int64, body []byte, status int) {
	h := r.Header.Clone()
	h.Set("Host", r.Host)
	if len(r.TransferEncoding) > 0 {
		h.Set("Transfer-Encoding", strings.Join(r.TransferEncoding, ","))
	} else if r.ContentLength > 0 {
		h.Set("Content-Length", strconv.FormatInt(r.ContentLength, 10))
	}
	s.seen = append(s.seen, Request{Seq: len(s.seen) + 1, Endpoint: endpoint, Nth: nth, JobID: id, Method: r.Method,
		Target: r.RequestURI, Header: h, Body: body, Time: time.Now(), Status: status})
}

// route names what a request is for, as the recordings do.
func route(r *http.Request, body []byte) (endpoint string, id int64) {
	rest, ok := strings.CutPrefix(r.URL.Path, "/api/v4/")
	if !ok {
		return "git", 0
	}
	parts := strings.Split(rest, "/")
	switch {
	case r.Method == http.MethodPost && rest == "runners/verify":
		return "verify", 0
	case r.Method == http.MethodPost && rest == "jobs/request":
		return "request", 0
	case parts[0] != "jobs" || len(parts) < 2 || len(parts) > 3:
		return "unknown", 0
	}
	id, _ = strconv.ParseInt(parts[1], 10, 64)
	what := r.Method
	if len(parts) == 3 {
		what += " " + parts[2]
	}
	switch what {
	case "PUT":
		var u struct{ State string }
		if json.Unmarshal(body, &u) == nil && u.State != "running" {
			return "put_final", id
		}
		return "put_running", id
	case "PATCH trace":
		return "patch", id
	case "POST artifacts":
		return "upload", id
	case "GET artifacts":
		return "download", id
	}
	return "unknown", id
}

func message(status int, text string) reply {
	b, _ := json.Marshal(map[string]string{"message": text})
	return reply{status: status, ctype: "application/json", body: string(b)}
}

// answer is what GitLab says. mu is held.
func (s *Server) answer(endpoint string, job *Job, r *http.Request, body []byte, rule *Rule) reply {
	switch endpoint {
	case "verify":
		if !s.knows(body) {
			return message(http.StatusForbidden, "403 Forbidden")
		}
		var v struct{ Token string }
		json.Unmarshal(body, &v)
		b, _ := json.Marshal(map[string]any{"id": 7, "token": v.Token, "token_expires_at": nil})
		return reply{status: http.StatusOK, ctype: "application/json", body: string(b)}
	case "request":
		return s.giveOut(body)
	case "unknown":
		return message(http.StatusNotFound, "404 Not Found")
	}
	if job == nil || job.Token != r.Header.Get("Job-Token") && job.Token != tokenOf(body) {
		if endpoint == "download" && job != nil {
			return message(http.StatusUnauthorized, "401 Unauthorized")
		}
		return message(http.StatusForbidden, "403 Forbidden")
	}
	switch endpoint {
	case "put_running":
		if job.Status == "pending" {
			job.Status = "running"
		}
		return s.told(reply{status: http.StatusOK, body: "200", ctype: "application/json"}, job)
	case "put_final":
		return s.end(job, body)
	case "patch":
		return s.append(job, r, body)
	case "upload":
		return s.upload(job, r, body)
	}
	if len(job.Artifacts) == 0 {
		return message(http.StatusNotFound, "404 Not Found")
	}
	a := job.Artifacts[0]
	return reply{status: http.StatusOK, ctype: "application/zip", body: string(a.Content),
		header: [][2]string{{"Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": a.Filename})}}}
}

func tokenOf(body []byte) string {
	var v struct{ Token string }
	if json.Unmarshal(body, &v) != nil {
		return ""
	}
	return v.Token
}

func (s *Server) knows(body []byte) bool {
	return s.RunnerToken == "" || tokenOf(body) == s.RunnerToken
}

// hold waits for a job as long as the runner's last_update is the newest.
func (s *Server) hold(r *http.Request, body []byte) {
	var v struct {
		LastUpdate string `json:"last_update"`
	}
	if s.Hold == 0 || json.Unmarshal(body, &v) != nil || v.LastUpdate == "" {
		return
	}
	t := time.NewTimer(s.Hold)
	defer t.Stop()
	for {
		s.mu.Lock()
		there, changed := len(s.queue) > 0, s.changed
		s.mu.Unlock()
		if there {
			return
		}
		select {
		case <-changed:
		case <-t.C:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func (s *Server) giveOut(body []byte) reply {
	if !s.knows(body) {
		return message(http.StatusForbidden, "403 Forbidden")
	}
	s.updates++
	h := [][2]string{{"X-GitLab-Last-Update", fmt.Sprintf("lastupdate%04d", s.updates)}}
	if len(s.queue) == 0 {
		return reply{status: http.StatusNoContent, header: h}
	}
	job := s.jobs[s.queue[0]]
	s.queue = s.queue[1:]
	return reply{status: http.StatusCreated, header: h, ctype: "application/json", body: string(job.Response)}
}

// told adds what each answer about a running job says.
func (s *Server) told(rep reply, job *Job) reply {
	n := s.Interval
	if n == 0 {
		n = 3
	}
	rep.header = append(rep.header, [2]string{"Job-Status", job.Status}, [2]string{"X-GitLab-Trace-Update-Interval", strconv.Itoa(n)})
	return rep
}

func (s *Server) end(job *Job, body []byte) reply {
	var u struct{ State string }
	if err := json.Unmarshal(body, &u); err != nil || u.State != "success" && u.State != "failed" {
		return message(http.StatusBadRequest, "400 Bad request - state")
	}
	if over(job) && (job.Final == nil || job.Status != u.State) { // the same again is well
		return notRunning(job)
	}
	if job.Status == "canceling" {
		job.Status = "canceled"
	} else {
		job.Status = u.State
	}
	job.Final = slices.Clone(body)
	return reply{status: http.StatusOK, body: "200", ctype: "application/json", header: [][2]string{{"Job-Status", job.Status}}}
}

func over(job *Job) bool {
	return job.Status == "success" || job.Status == "failed" || job.Status == "canceled"
}

func notRunning(job *Job) reply {
	rep := message(http.StatusForbidden, "403 Forbidden - Job is not running")
	rep.header = append(rep.header, [2]string{"Job-Status", job.Status})
	return rep
}

func (s *Server) append(job *Job, r *http.Request, body []byte) reply {
	if over(job) {
		return notRunning(job)
	}
	from, to, ok := strings.Cut(r.Header.Get("Content-Range"), "-")
	start, err1 := strconv.Atoi(from)
	end, err2 := strconv.Atoi(to)
	if !ok || err1 != nil || err2 != nil || end-start+1 != len(body) {
		return message(http.StatusBadRequest, "400 Bad request - Content-Range")
	}
	if start != len(job.Trace) {
		return reply{status: http.StatusRequestedRangeNotSatisfiable, ctype: "text/plain", body: "416 Range Not Satisfiable",
			header: [][2]string{{"Range", fmt.Sprintf("0-%d", len(job.Trace))}}}
	}
	job.Trace = append(job.Trace, body...)
	return s.told(reply{status: http.StatusAccepted, ctype: "text/plain", body: strconv.Itoa(len(job.Trace)),
		header: [][2]string{{"Range", fmt.Sprintf("0-%d", len(job.Trace))}}}, job)
}

func (s *Server) upload(job *Job, r *http.Request, body []byte) reply {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" {
		return message(http.StatusBadRequest, "400 Bad request - multipart/form-data expected")
	}
	mr := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	part, err := mr.NextPart()
	if err != nil || part.FormName() != "file" {
		return message(http.StatusBadRequest, "400 Bad request - file is missing")
	}
	content, err := io.ReadAll(part)
	if err != nil {
		return message(http.StatusBadRequest, "400 Bad request - file is cut")
	}
	job.Artifacts = append(job.Artifacts, Artifact{Query: r.URL.Query(), Filename: part.FileName(), Header: part.Header, Content: content})
	return message(http.StatusCreated, "201 Created")
}

func (s *Server) git(w http.ResponseWriter, r *http.Request, body []byte) {
	rec := &recorder{ResponseWriter: w, status: http.StatusOK}
	if s.Git == nil {
		http.NotFound(rec, r)
	} else {
		s.Git.ServeHTTP(rec, r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nth["git"]++
	s.note(r, "git", s.nth["git"], 0, body, rec.status)
}

type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(c int) { r.status = c; r.ResponseWriter.WriteHeader(c) }

// Checksum is how an update names the trace it ends with.
func Checksum(trace []byte) string { return fmt.Sprintf("crc32:%08x", crc32.ChecksumIEEE(trace)) }

// Package gitlab speaks GitLab's runner API, as a runner does: it verifies a
// runner's token, asks for jobs, sends a job's trace in pieces and its state,
// and hears from the answers that the job was cancelled. What it sends equals
// what gitlab-runner sends (vectors/README.md 3, 4; gitlab-dispatch.txt, "vk-gitlab
// speaks GitLab's runner API").
//
// # Invariants
//
// A token is in a header and a body, never in a URL, an error or a log.
// An answer is read to its end within a limit, so that its connection serves
// the next request.
package gitlab

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Client asks one GitLab. It is safe for concurrent use.
type Client struct {
	base  string
	agent string
	info  Info
	http  *http.Client
	retry retry
}

// New returns a client of the GitLab at base, such as https://gitlab.example.com
// or https://example.com/gitlab. agent is the User-Agent. h makes the requests;
// redirects are not followed, for they would carry a token elsewhere.
func New(base, agent string, info Info, h *http.Client) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, fmt.Errorf("GitLab's URL %q: expected http:// or https:// and a host", base)
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("GitLab's URL: expected neither user, query nor fragment")
	}
	own := *h
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{base: strings.TrimRight(base, "/") + "/api/v4", agent: agent, info: info, http: &own, retry: newRetry()}, nil
}

// StatusError is an answer that is none of those the call expects.
type StatusError struct {
	Call    string // such as "PATCH /jobs/7/trace"
	Status  int
	Message string // GitLab's own, in one line, or ""
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s: GitLab answered %d %s", e.Call, e.Status, http.StatusText(e.Status))
	if e.Message != "" {
		s += ": " + e.Message
	}
	return s
}

// maxAnswer bounds what is read of an answer: a job response may be large.
const maxAnswer = 64 << 20

// request is one call, made again as long as the transport's answers say so.
type request struct {
	method, path string // path may end in a query
	header       [][2]string
	body         []byte
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a *answer) jobStatus() string { return a.header.Get("Job-Status") }

func (c *Client) call(ctx context.Context, r request) (*answer, error) {
	var id [16]byte
	rand.Read(id[:])
	return c.retry.do(ctx, func() (*answer, error) {
		req, err := http.NewRequestWithContext(ctx, r.method, c.base+r.path, bytes.NewReader(r.body))
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", r.method, r.path, err)
		}
		req.Header.Set("User-Agent", c.agent)
		req.Header.Set("X-Request-Id", hex.EncodeToString(id[:]))
		for _, h := range r.header {
			req.Header.Set(h[0], h[1])
		}
		resp, err := c.http.Do(req)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", r.method, r.path, cause(err))
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		if err != nil {
			return nil, fmt.Errorf("%s %s: reading the answer: %w", r.method, r.path, err)
		}
		if len(body) > maxAnswer {
			return nil, fmt.Errorf("%s %s: the answer is longer than %d bytes", r.method, r.path, maxAnswer)
		}
		return &answer{resp.StatusCode, resp.Header, body}, nil
	})
}

// cause takes the URL out of an error of net/http: the path is said already.
func cause(err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		return ue.Err
	}
	return err
}

func (r request) unexpected(a *answer) error {
	path, _, _ := strings.Cut(r.path, "?")
	e := &StatusError{Call: r.method + " " + path, Status: a.status}
	var m struct{ Message any }
	if json.Unmarshal(a.body, &m) == nil && m.Message != nil {
		e.Message = oneLine(fmt.Sprint(m.Message))
	}
	return e
}

// oneLine bounds a text from elsewhere.
func oneLine(s string) string {
	s = strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }), " ")
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}

func jsonBody(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // the types of this package can be encoded
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

var asksJSON = [][2]string{{"Accept", "application/json"}, {"Content-Type", "application/json"}}

// Verified is what GitLab says of a runner.
type Verified struct {
	ID        int64      `json:"id"`
	ExpiresAt *time.Time `json:"token_expires_at"` // nil = never
}

// Verify asks whether a runner's token is good. A refusal is a StatusError
// with 403.
func (c *Client) Verify(ctx context.Context, token, systemID string) (Verified, error) {
	r := request{"POST", "/runners/verify", append(asksJSON, [2]string{"Runner-Token", token}),
		jsonBody(jobRequest{Info: c.info, Token: token, SystemID: systemID})}
	a, err := c.call(ctx, r)
	if err != nil {
		return Verified{}, err
	}
	if a.status != http.StatusOK {
		return Verified{}, r.unexpected(a)
	}
	var v Verified
	if err := json.Unmarshal(a.body, &v); err != nil {
		return v, fmt.Errorf("POST /runners/verify: decoding the answer: %w", err)
	}
	return v, nil
}

// Offer is GitLab's answer to a request for a job.
type Offer struct {
	Job        []byte // the job response, or nil when there is none
	LastUpdate string // for the next request
	RequestID  string // GitLab's, for git's X-Gitaly-Correlation-ID
}

// RequestJob asks for a job. lastUpdate is that of the answer before: GitLab
// may hold the request until its queue has changed. No job is no error; a
// refused token is a StatusError with 403, too many requests one with 429.
func (c *Client) RequestJob(ctx context.Context, token, systemID, lastUpdate string) (Offer, error) {
	r := request{"POST", "/jobs/request", append(asksJSON, [2]string{"Runner-Token", token}),
		jsonBody(jobRequest{Info: c.info, Token: token, SystemID: systemID, LastUpdate: lastUpdate})}
	a, err := c.call(ctx, r)
	if err != nil {
		return Offer{LastUpdate: lastUpdate}, err
	}
	o := Offer{LastUpdate: lastUpdate, RequestID: a.header.Get("X-Request-Id")}
	if v := a.header.Get("X-GitLab-Last-Update"); v != "" {
		o.LastUpdate = v
	}
	switch a.status {
	case http.StatusCreated:
		o.Job = a.body
		return o, nil
	case http.StatusNoContent:
		return o, nil
	}
	return o, r.unexpected(a)
}

// update sends a job's state.
func (c *Client) update(ctx context.Context, job Job, u jobUpdate) (*answer, request, error) {
	u.Info, u.Token = c.info, job.Token
	r := request{"PUT", "/jobs/" + strconv.FormatInt(job.ID, 10),
		[][2]string{{"Content-Type", "application/json"}, {"Job-Token", job.Token}}, jsonBody(u)}
	a, err := c.call(ctx, r)
	return a, r, err
}

// patch sends the bytes of the trace that begin at from.
func (c *Client) patch(ctx context.Context, job Job, from int64, p []byte) (*answer, request, error) {
	r := request{"PATCH", fmt.Sprintf("/jobs/%d/trace?debug_trace=%t", job.ID, job.DebugTrace),
		[][2]string{{"Content-Range", fmt.Sprintf("%d-%d", from, from+int64(len(p))-1)}, {"Content-Type", "text/plain"}, {"Job-Token", job.Token}}, p}
	a, err := c.call(ctx, r)
	return a, r, err
}

// interval is how often an answer asks for updates, or 0.
func (a *answer) interval() time.Duration {
	n, err := strconv.Atoi(a.header.Get("X-GitLab-Trace-Update-Interval"))
	if err != nil || n <= 0 {
		return 0
	}
	return min(secs(n), maxInterval)
}

// secs are seconds that a peer named: any number fits.
func secs(n int) time.Duration { return time.Duration(min(n, 1<<30)) * time.Second }

// received is how much of the trace GitLab has, by the Range of its answer.
func (a *answer) received() int64 {
	_, end, _ := strings.Cut(a.header.Get("Range"), "-")
	n, err := strconv.ParseInt(end, 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// Package artifact moves artifacts between a job's guest and GitLab: the
// cijob.Artifacts of a node.
//
// What is asked of GitLab and told in the trace is what gitlab-runner's
// artifacts-uploader and artifacts-downloader ask and tell (vectors/artifacts-*,
// dependencies*, README.md 3 and 6.18, 6.19): a failed call is made again by the
// transport, five times at most, and the whole transfer three times; 403 and 413
// are final, and so is a dependency's 404. Unlike them, a redirection from https
// to http is refused, and the job's token goes to GitLab's own origin alone.
package artifact

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"

	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
	"virtkit/core/fleet/job"
	"virtkit/core/gitlab"
)

// tries is how often a transfer is tried, tryWait what is between.
const (
	tries            = 3
	unavailableTries = 6 // of an upload that GitLab is too busy for
	tryWait          = time.Second
)

// Client implements cijob.Artifacts. The zero Client is ready.
type Client struct {
	Agent string // User-Agent; "" = Go's
	// Sleep waits between tries; nil = as told, or until ctx ends.
	Sleep func(ctx context.Context, d time.Duration) error
}

var _ cijob.Artifacts = (*Client)(nil)

func (c *Client) sleep(ctx context.Context, d time.Duration) error {
	if c.Sleep != nil {
		return c.Sleep(ctx, d)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// final is an error that another try does not help against.
type final struct{ error }

func isFinal(err error) bool { f := final{}; return errors.As(err, &f) }

var errUnavailable = errors.New("service unavailable")

// errNoAnswer is what gitlab-runner says of an upload that GitLab refused for a
// reason that it has no words for.
var errNoAnswer = errors.New("upload failed with no response from coordinator")

// errInvalid is what gitlab-runner says of an answer that is none of those that
// it expects.
var errInvalid = errors.New("invalid argument")

// session is one transfer.
type session struct {
	c    *Client
	t    cijob.Transfer
	log  *transfer.Log
	http *http.Client
	base *url.URL
	job  int64
	tok  string
}

func (c *Client) session(t cijob.Transfer, id int64, token string) (*session, error) {
	base, err := url.Parse(strings.TrimRight(t.Job.ServerURL, "/"))
	if err != nil {
		return nil, errors.New("GitLab's URL cannot be read")
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if pem := t.Job.ServerCAPEM; pem != "" {
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM([]byte(pem)) {
			return nil, errors.New("the runner's tls_ca_file holds no certificate")
		}
		tr.TLSClientConfig.RootCAs = pool
	}
	s := &session{c: c, t: t, log: transfer.NewLog(t.Err), base: base, job: id, tok: token}
	s.http = &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return s, nil
}

func (s *session) close() { s.http.CloseIdleConnections() }

// target is the address of a job's artifacts.
func (s *session) target(query string) string {
	return s.base.String() + "/api/v4/jobs/" + strconv.FormatInt(s.job, 10) + "/artifacts?" + query
}

// shortToken names a token without telling it, as gitlab-runner does.
func shortToken(t string) string {
	if _, rest, ok := strings.Cut(t, "-"); ok && strings.HasPrefix(t, "gl") {
		t = rest
	}
	return t[:min(len(t), 9)]
}

func (s *session) fields(resp *http.Response) transfer.Fields {
	id := resp.Header.Get("X-Request-Id")
	if id == "" {
		id = resp.Request.Header.Get("X-Request-Id")
	}
	return transfer.Fields{"correlation_id": id, "id": s.job, "status": resp.StatusCode, "token": shortToken(s.tok)}
}

// maxHops bounds redirections.
const maxHops = 10

// body makes the content of a request anew; nil = it has none.
type body func() (content io.Reader, contentType string, err error)

// call makes a request, following redirections that are safe to follow.
func (s *session) call(ctx context.Context, method, target string, make body, follow func(status int) bool) (*http.Response, error) {
	requestID := requestID()
	from := ""
	for hop := 0; ; hop++ {
		u, err := url.Parse(target)
		if err != nil {
			return nil, errors.New("a redirection to what is no URL")
		}
		var content io.Reader
		var kind string
		if make != nil {
			if content, kind, err = make(); err != nil {
				return nil, final{err}
			}
		}
		req, err := http.NewRequestWithContext(ctx, method, u.String(), content)
		if err != nil {
			return nil, err
		}
		if content != nil {
			req.ContentLength = -1
			req.Header.Set("Content-Type", kind)
		}
		if s.c.Agent != "" {
			req.Header.Set("User-Agent", s.c.Agent)
		}
		req.Header.Set("X-Request-Id", requestID)
		if u.Scheme == s.base.Scheme && u.Host == s.base.Host {
			req.Header.Set("Job-Token", s.tok)
		}
		if from != "" {
			req.Header.Set("Referer", from)
		}
		resp, err := s.http.Do(req)
		if err != nil && hop == 0 {
			return nil, fmt.Errorf("%s %q: %w", title(method), target, plain(err))
		}
		if err != nil {
			return nil, plain(err)
		}
		if !follow(resp.StatusCode) || resp.Header.Get("Location") == "" {
			return resp, nil
		}
		to, err := u.Parse(resp.Header.Get("Location"))
		drop(resp)
		switch {
		case err != nil:
			return nil, final{errors.New("GitLab redirects to what is no URL")}
		case u.Scheme == "https" && to.Scheme != "https":
			return nil, final{fmt.Errorf("GitLab redirects from https to %s://%s, which is refused: what is transferred could be read on its way", to.Scheme, to.Host)}
		case hop >= maxHops:
			return nil, final{fmt.Errorf("GitLab redirects more than %d times", maxHops)}
		}
		if resp.StatusCode < http.StatusTemporaryRedirect && method != http.MethodGet {
			method, make = http.MethodGet, nil // as every client takes them
		}
		if u.Scheme == s.base.Scheme && u.Host == s.base.Host { // another's address may be a signature
			from = referer(u)
		}
		target = to.String()
	}
}

// title is a method as Go's errors name it.
func title(method string) string { return method[:1] + strings.ToLower(method[1:]) }

// referer is an address as the next server of a redirection is told it.
func referer(u *url.URL) string {
	bare := *u
	bare.User, bare.Fragment = nil, ""
	return bare.String()
}

// maxReason bounds what is read of GitLab's reason, in bytes.
const maxReason = 64 << 10

// reason is an answer in gitlab-runner's words: with what GitLab says of it,
// unless that is no more than the status.
func reason(resp *http.Response) string {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || resp.StatusCode < 300 {
		return strings.TrimSpace(resp.Status)
	}
	status := fmt.Sprintf("%d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	switch kind {
	case "application/xml", "text/xml": // an object store's
		var said struct {
			XMLName       xml.Name `xml:"Error"`
			Code, Message string
		}
		if xml.NewDecoder(io.LimitReader(resp.Body, maxReason)).Decode(&said) == nil && said.Code != "" {
			return fmt.Sprintf("%s (%s: %s)", status, said.Code, said.Message)
		}
	case "application/json":
		var said struct{ Message json.RawMessage }
		if json.NewDecoder(io.LimitReader(resp.Body, maxReason)).Decode(&said) != nil {
			break
		}
		u := *resp.Request.URL
		u.User, u.RawQuery, u.Fragment = nil, "", ""
		text := fmt.Sprintf("%s %s: %s", resp.Request.Method, u.String(), status)
		if m := message(said.Message); m != status {
			text += " (" + m + ")"
		}
		return text
	}
	return strings.TrimSpace(resp.Status)
}

// message is GitLab's, which may be an object of lists.
func message(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

func requestID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// plain is an error of the network without the address, whose query may be a
// signature.
func plain(err error) error {
	if u := (*url.Error)(nil); errors.As(err, &u) {
		return u.Err
	}
	return err
}

func drop(resp *http.Response) {
	io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	resp.Body.Close()
}

// patient is call with the transport's retries.
func (s *session) patient(ctx context.Context, method, target string, make body, follow func(int) bool) (*http.Response, error) {
	for try := 0; ; try++ {
		resp, err := s.call(ctx, method, target, make, follow)
		if err != nil {
			return nil, err
		}
		wait, again := gitlab.Another(resp.StatusCode, resp.Header, try)
		if !again {
			return resp, nil
		}
		drop(resp)
		s.log.Info("Waiting before making the next call", transfer.Fields{
			"context": "ratelimit-requester-gitlab-request", "duration": wait, "method": method, "url": target,
		})
		if err := s.c.sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// retried tries a transfer as often as it may be. who is a field of the lines
// that tell of it; "" = none.
func (s *session) retried(ctx context.Context, who string, do func(try int) error) error {
	for try := 0; ; try++ {
		err := do(try)
		max := tries
		if errors.Is(err, errUnavailable) {
			max = unavailableTries
		}
		if err == nil || isFinal(err) || ctx.Err() != nil || try == max-1 {
			return err
		}
		f := transfer.Fields{"error": err}
		if who != "" {
			f["context"] = who
		}
		s.log.Warning("Retrying...", f)
		if serr := s.c.sleep(ctx, tryWait); serr != nil {
			return serr
		}
	}
}

// nameOf is the name of the file that is uploaded.
func nameOf(a job.Artifact, name string) string {
	name = baseName(name)
	switch a.Format {
	case job.Gzip:
		return name + ".gz"
	case job.Raw:
		return name
	case job.TarZstd:
		return name + ".tar.zst"
	}
	return name + ".zip"
}

// expanded is an artifact's own name: with variables that are not there, it may
// have none.
func expanded(name string, t cijob.Transfer) string {
	if name == "" {
		return ""
	}
	if name = path.Base(transfer.Words(t, name)); name == "." || name == "/" {
		return "default"
	}
	return name
}

// baseName is an artifact's name as the beginning of a file's.
func baseName(name string) string {
	if name == "" {
		return "artifacts"
	}
	return name
}

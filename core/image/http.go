package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// polite is the RoundTripper below everything that talks to a registry. It
// waits and tries again when the registry is busy, and never speaks plain
// HTTP to a host that was not allowed it.
type polite struct {
	inner    http.RoundTripper
	insecure map[string]bool
	retries  int
	note     func(string) // told of every wait; may be nil
	patience *patience
}

// Waits between attempts: doubling from first to most, half of it random.
// A registry's own Retry-After is honoured up to longestAsked.
const (
	firstWait    = 200 * time.Millisecond
	mostWait     = 15 * time.Second
	longestAsked = 2 * time.Minute
)

func newPolite(o Options, note func(string)) *polite {
	insecure := map[string]bool{}
	for _, h := range o.Insecure {
		insecure[strings.ToLower(h)] = true
	}
	d := &net.Dialer{Timeout: min(o.Stall, 20*time.Second), KeepAlive: 15 * time.Second}
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           d.DialContext,
		TLSHandshakeTimeout:   min(o.Stall, 20*time.Second),
		ResponseHeaderTimeout: o.Stall,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       30 * time.Second,
		DisableCompression:    true, // a blob's digest is of the bytes as sent
	}
	c := &tlsChoice{strict: t, insecure: insecure}
	if len(insecure) > 0 {
		c.lax = t.Clone()
		c.lax.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // asked for by `insecure` in the configuration
	}
	return &polite{inner: &paced{c, o.Stall}, insecure: insecure, retries: o.Retries, note: note, patience: &patience{most: o.Patience}}
}

// tlsChoice verifies certificates, but for the hosts that were configured.
type tlsChoice struct {
	strict, lax *http.Transport
	insecure    map[string]bool
}

func (t *tlsChoice) RoundTrip(r *http.Request) (*http.Response, error) {
	if !allowed(t.insecure, r.URL.Host) {
		return t.strict.RoundTrip(r)
	}
	return t.lax.RoundTrip(r)
}

func allowed(set map[string]bool, host string) bool {
	host = strings.ToLower(host)
	h, _, err := net.SplitHostPort(host)
	return set[host] || err == nil && set[h]
}

// loopback hosts may be spoken to without TLS: what is said does not leave
// the machine.
func loopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

var errPlainHTTP = errors.New("plain HTTP is only spoken to this machine and to registries listed under `insecure`")

// plainHTTP is errPlainHTTP of a host, which need not be the registry: a token
// server, or where a redirect leads.
type plainHTTP struct{ host string }

func (e plainHTTP) Error() string { return e.host + ": " + errPlainHTTP.Error() }
func (e plainHTTP) Unwrap() error { return errPlainHTTP }

func (p *polite) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !loopback(req.URL.Host) && !allowed(p.insecure, req.URL.Host) {
		return nil, plainHTTP{req.URL.Host}
	}
	if err := redirected(req); err != nil {
		return nil, err
	}
	again := req.Body == nil || req.Body == http.NoBody || req.GetBody != nil
	for n := 1; ; n++ {
		if n > 1 && req.GetBody != nil {
			body, err := req.GetBody()
			if err != nil {
				return nil, err
			}
			req = req.Clone(req.Context())
			req.Body = body
		}
		resp, err := p.inner.RoundTrip(req)
		if err == nil && !busy(resp.StatusCode) {
			p.patience.answered()
		}
		if !again || req.Context().Err() != nil {
			return resp, err
		}
		if n >= p.retries {
			if err != nil && transient(err) {
				err = &exhausted{err}
			}
			return resp, err
		}
		var wait time.Duration
		var why string
		switch {
		case err != nil && transient(err):
			wait, why = backoff(n), brief(err)
		case err == nil && busy(resp.StatusCode):
			wait, why = retryAfter(resp, backoff(n)), resp.Status
			if left := p.patience.left(); wait > left {
				resp.Body.Close()
				return nil, &exhausted{&impatient{why, wait, p.patience.most}}
			}
			_, _ = io.CopyN(io.Discard, resp.Body, 64<<10)
			resp.Body.Close()
		default:
			return resp, err
		}
		if p.note != nil {
			p.note(fmt.Sprintf("%s: %s; attempt %d of %d in %s", req.URL.Host, why, n+1, p.retries, wait.Round(100*time.Millisecond)))
		}
		if e := sleep(req.Context(), wait); e != nil {
			return nil, e
		}
	}
}

// exhausted marks an error that came back at every attempt, so that those who
// asked do not multiply the attempts by their own.
type exhausted struct{ err error }

func (e *exhausted) Error() string { return e.err.Error() }
func (e *exhausted) Unwrap() error { return e.err }

// Timeout is what url.Error, which wraps it, asks for.
func (e *exhausted) Timeout() bool {
	var to net.Error
	return errors.As(e.err, &to) && to.Timeout()
}

func busy(status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusRequestTimeout, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// transient errors of a connection may go away by themselves.
func transient(err error) bool {
	var dns *net.DNSError
	var tlsHeader tls.RecordHeaderError
	var done *exhausted
	switch {
	case errors.As(err, &done):
		return false
	case errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &dns):
		return !dns.IsNotFound
	case errors.Is(err, errPlainHTTP), badCertificate(err), errors.As(err, &tlsHeader):
		return false
	case strings.Contains(err.Error(), "HTTP response to HTTPS client"): // net/http has no type for it
		return false
	}
	var op *net.OpError
	var to net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &op) ||
		errors.Is(err, unix.ECONNRESET) || errors.As(err, &to) && to.Timeout()
}

func badCertificate(err error) bool {
	var a x509.UnknownAuthorityError
	var b x509.HostnameError
	var c x509.CertificateInvalidError
	var d *tls.CertificateVerificationError
	return errors.As(err, &a) || errors.As(err, &b) || errors.As(err, &c) || errors.As(err, &d)
}

func backoff(n int) time.Duration {
	d := mostWait
	if n < 7 {
		d = min(firstWait<<(n-1), mostWait)
	}
	return d/2 + rand.N(d/2+1)
}

// retryAfter reads RFC 9110 section 10.2.3: seconds or a date.
func retryAfter(r *http.Response, otherwise time.Duration) time.Duration {
	v := r.Header.Get("Retry-After")
	if n, err := strconv.Atoi(v); err == nil && n >= 0 {
		return min(time.Duration(min(n, 1<<30))*time.Second, longestAsked) // any number fits
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, min(time.Until(t), longestAsked))
	}
	return otherwise
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

// cleaned removes what may be secret from an error of net/http: queries and
// user names in URLs. The text keeps method, host and path.
func cleaned(err error) error {
	var u *url.Error
	if !errors.As(err, &u) {
		return err
	}
	where := u.URL
	if p, e := url.Parse(u.URL); e == nil {
		where = p.Scheme + "://" + p.Host + p.Path
	} else if i := strings.IndexAny(where, "?#@"); i >= 0 {
		where = "a URL"
	}
	return fmt.Errorf("%s %s: %w", strings.ToUpper(u.Op), where, cleaned(u.Err))
}

func brief(err error) string {
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection cut"
	}
	var to net.Error
	if errors.As(err, &to) && to.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return "no answer"
	}
	return cleaned(err).Error()
}

// explain turns an error of talking to a registry into one for users. what is
// the repository with tag or digest; from says where the credentials were
// found, "" for none.
func explain(err error, registry, what, from string) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	if e := explainPatience(err, registry, what); e != nil {
		return e
	}
	// First: to this machine both TLS and plain HTTP are tried, and the answer
	// to the latter is then beside the point.
	if badCertificate(err) {
		return fault.Newf(fault.Unavailable, "registry %s: its certificate is not trusted", registry).
			Hint("install its CA on this host, or list %s under `insecure`", registry).Because(cleaned(err))
	}
	if te, ok := errors.AsType[*transport.Error](err); ok {
		return explainStatus(te, registry, what, from)
	}
	var dns *net.DNSError
	var to net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return unavailable("registry %s refused the connection while asked for %s", registry, what).
			Hint("is the registry running, and the port right?").Because(cleaned(err))
	case errors.As(err, &dns):
		return unavailable("registry %s: its name cannot be resolved", registry).
			Hint("check the image's name and the host's DNS").Because(cleaned(err))
	case errors.Is(err, errPlainHTTP):
		if p, ok := errors.AsType[plainHTTP](err); ok && p.host != registry {
			return unavailable("registry %s sends its users to %s for %s, and that by plain HTTP", registry, p.host, what).
				Hint("list %s under `insecure` to allow it", p.host).Because(errPlainHTTP)
		}
		return unavailable("registry %s offers only plain HTTP", registry).
			Hint("list %s under `insecure` to allow it", registry).Because(errPlainHTTP)
	case errors.As(err, &to) && to.Timeout(), errors.Is(err, errStalled):
		return unavailable("registry %s stopped answering while asked for %s", registry, what).
			Hint("try again; a proxy or firewall between may be dropping the connection").Because(cleaned(err))
	}
	return unavailable("registry %s: %s", registry, what).Because(cleaned(err))
}

func unavailable(format string, a ...any) *fault.Error {
	return fault.Newf(fault.Unavailable, format, a...)
}

func explainStatus(te *transport.Error, registry, what, from string) error {
	said := ""
	for _, d := range te.Errors {
		said += fmt.Sprintf(", %s: %s", d.Code, d.Message)
	}
	status := fmt.Sprintf("%d %s%s", te.StatusCode, http.StatusText(te.StatusCode), said)
	switch te.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		e := fault.Newf(fault.Denied, "registry %s denied access to %s (%s)", registry, what, status)
		if from == "" {
			return e.Hint("no credentials for %s were found; set DOCKER_AUTH_CONFIG or log in with docker login", registry)
		}
		return e.Hint("the credentials came from %s; do they allow it, and does the repository exist?", from)
	case http.StatusNotFound:
		return fault.Newf(fault.NotFound, "registry %s has no %s (%s)", registry, what, status).
			Hint("check the name and the tag or digest")
	case http.StatusTooManyRequests:
		e := fault.Newf(fault.Unavailable, "registry %s limits how often it is asked; %s was refused (%s)", registry, what, status)
		if from == "" {
			return e.Hint("log in: registries allow more to users they know")
		}
		return e.Hint("wait, or use a mirror as [docker] repo")
	}
	return fault.Newf(fault.Unavailable, "registry %s answered %s when asked for %s", registry, status, what).
		Hint("try again later; if it stays, ask the registry's operator")
}

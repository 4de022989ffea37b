package relay

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"virtkit/core/backoff"
	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
)

// Hub is the client API, one call a method. Every method blocks until the hub
// answered, at most its long poll and callTime more; none tries again: an error
// is a *dispatch.Error when the hub answered, else of the transport. ctx ends a
// call early.
type Hub interface {
	Capacity(ctx context.Context, r dispatch.CapacityRequest) (dispatch.Capacity, error)
	Reserve(ctx context.Context, r dispatch.ReservationRequest) (dispatch.ReservationGrant, error)
	Renew(ctx context.Context, id string, secs int) (dispatch.ReservationGrant, error)
	// Release is idempotent.
	Release(ctx context.Context, id string) error
	// Submit is idempotent by its request id.
	Submit(ctx context.Context, s *dispatch.JobSubmission) (dispatch.JobView, error)
	Job(ctx context.Context, id string, after uint64, wait int) (dispatch.JobView, error)
	Output(ctx context.Context, id string, offset int64, wait int) (Output, error)
	// Cancel is idempotent; a later immediate overrides a graceful.
	Cancel(ctx context.Context, id string, mode wire.CancelMode) (dispatch.JobView, error)
	// Settle is idempotent.
	Settle(ctx context.Context, id string) error
}

// Output is a piece of a job's output.
type Output struct {
	Data     []byte
	Offset   int64 // of Data's first byte
	Length   int64 // of the output so far
	Complete bool  // the job has ended, and Data reaches its end
}

// callTime is how long a call may take beside its long poll.
const callTime = 30 * time.Second

// Client is the Hub of an enrollment. Each request goes over a connection of
// its own, since its signature is good there alone. It uses no proxy and
// follows no redirect.
type Client struct {
	base  *url.URL
	relay string
	key   ed25519.PrivateKey
	tls   *tls.Config // nil = plain text, to a hub on loopback
	now   func() time.Time
	dial  func(ctx context.Context, network, addr string) (net.Conn, error)
}

// NewClient makes a client of the hub that e is enrolled with. dial replaces a
// plain TCP dial when set, in tests.
func NewClient(e *Enrollment, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (*Client, error) {
	u, err := node.ParseHub(e.URL)
	if err != nil {
		return nil, err
	}
	c := &Client{base: u, relay: e.Relay, key: e.Key, now: time.Now, dial: dial}
	if c.dial == nil {
		c.dial = (&net.Dialer{Timeout: callTime}).DialContext
	}
	if u.Scheme == "https" {
		if c.tls, err = node.TLSConfig(e.CA); err != nil {
			return nil, err
		}
		c.tls.ServerName = u.Hostname()
		// A resumed session has an exporter of its own: what is signed still
		// belongs to one connection, and a handshake costs no certificate.
		c.tls.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	}
	return c, nil
}

// connect opens the connection of one request.
func (c *Client) connect(ctx context.Context) (conn net.Conn, channel []byte, err error) {
	port := c.base.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[c.base.Scheme]
	}
	conn, err = c.dial(ctx, "tcp", net.JoinHostPort(c.base.Hostname(), port))
	if err != nil {
		return nil, nil, err
	}
	if c.tls == nil {
		channel, err = wire.Channel(nil)
		return conn, channel, err
	}
	t := tls.Client(conn, c.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, nil, err
	}
	state := t.ConnectionState()
	if channel, err = wire.Channel(&state); err != nil {
		t.Close()
		return nil, nil, err
	}
	return t, channel, nil
}

type hubAnswer struct {
	status int
	header http.Header
	body   []byte
}

// do makes one request. wait is how long the hub may hold it.
func (c *Client) do(ctx context.Context, method, target string, body []byte, wait int, max int64) (*hubAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime+time.Duration(wait)*time.Second)
	defer cancel()
	a, err := c.exchange(ctx, method, target, body, max)
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, fmt.Errorf("asking the hub %s: %w", c.base.Host, err)
	}
	if a.status >= 300 {
		e := dispatch.ReadError(a.status, a.body)
		if e.RetryAfterSecs == 0 {
			e.RetryAfterSecs, _ = strconv.Atoi(a.header.Get("Retry-After"))
		}
		return nil, e
	}
	return a, nil
}

func (c *Client) exchange(ctx context.Context, method, target string, body []byte, max int64) (*hubAnswer, error) {
	conn, channel, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	req, err := http.NewRequest(method, c.base.String()+target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Close = true
	req.Header.Set("User-Agent", "vk-gitlab")
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	signed := dispatch.Request{Relay: c.relay, Method: method, Target: target, Body: body, Unix: c.now().Unix(), Channel: channel}
	signed.Sign(c.key, req.Header)
	// An answer may come before the request was read: one that is refused by
	// its headers. What was written decides only when there is no answer.
	writing := make(chan error, 1)
	go func() { writing <- req.Write(conn) }()
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		conn.Close()
		return nil, errors.Join(<-writing, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, max+1))
	if err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	if int64(len(b)) > max {
		return nil, fmt.Errorf("the answer is longer than %d bytes", max)
	}
	return &hubAnswer{resp.StatusCode, resp.Header, b}, nil
}

// maxView bounds an answer that is no output.
const maxView = 1 << 20

// ask sends in as JSON and reads the answer into out; either may be nil.
func (c *Client) ask(ctx context.Context, method, target string, in, out any, wait int) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	a, err := c.do(ctx, method, target, body, wait, maxView)
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(a.body, out); err != nil {
		return fmt.Errorf("the hub %s does not answer as a hub does: %w", c.base.Host, err)
	}
	return nil
}

// Capacity is Hub's.
func (c *Client) Capacity(ctx context.Context, r dispatch.CapacityRequest) (a dispatch.Capacity, err error) {
	return a, c.ask(ctx, http.MethodPost, dispatch.CapacityPath, r, &a, r.WaitSecs)
}

// Reserve is Hub's.
func (c *Client) Reserve(ctx context.Context, r dispatch.ReservationRequest) (g dispatch.ReservationGrant, err error) {
	err = c.ask(ctx, http.MethodPost, dispatch.ReservationsPath, r, &g, r.WaitSecs)
	if err == nil && !wire.IsHex(g.Reservation, wire.IDLen) {
		err = errors.New("the hub granted a reservation without an id")
	}
	return g, err
}

// Renew is Hub's.
func (c *Client) Renew(ctx context.Context, id string, secs int) (g dispatch.ReservationGrant, err error) {
	return g, c.ask(ctx, http.MethodPost, dispatch.RenewPath(id), dispatch.RenewRequest{LeaseSecs: secs}, &g, 0)
}

// Release is Hub's.
func (c *Client) Release(ctx context.Context, id string) error {
	return c.ask(ctx, http.MethodDelete, dispatch.ReservationPath(id), nil, nil, 0)
}

// Submit is Hub's.
func (c *Client) Submit(ctx context.Context, s *dispatch.JobSubmission) (v dispatch.JobView, err error) {
	err = c.ask(ctx, http.MethodPost, dispatch.JobsPath, s, &v, 0)
	if err == nil && !wire.IsHex(v.ID, wire.IDLen) {
		err = errors.New("the hub took a job and gave it no id")
	}
	return v, err
}

// Job is Hub's.
func (c *Client) Job(ctx context.Context, id string, after uint64, wait int) (v dispatch.JobView, err error) {
	return v, c.ask(ctx, http.MethodGet, dispatch.JobPath(id, after, wait), nil, &v, wait)
}

// Output is Hub's.
func (c *Client) Output(ctx context.Context, id string, offset int64, wait int) (Output, error) {
	a, err := c.do(ctx, http.MethodGet, dispatch.OutputPath(id, offset, wait), nil, wait, dispatch.MaxRead)
	if err != nil {
		return Output{}, err
	}
	o := Output{Data: a.body, Complete: a.header.Get(dispatch.HeaderComplete) == "true"}
	var err1, err2 error
	o.Offset, err1 = strconv.ParseInt(a.header.Get(dispatch.HeaderOffset), 10, 64)
	o.Length, err2 = strconv.ParseInt(a.header.Get(dispatch.HeaderLength), 10, 64)
	if err1 != nil || err2 != nil || o.Offset != offset || o.Length < offset+int64(len(o.Data)) {
		return Output{}, fmt.Errorf("the hub %s does not answer as a hub does: output from %d on has offset %q and length %q", c.base.Host, offset,
			wire.Clean(a.header.Get(dispatch.HeaderOffset), 32), wire.Clean(a.header.Get(dispatch.HeaderLength), 32))
	}
	return o, nil
}

// Cancel is Hub's.
func (c *Client) Cancel(ctx context.Context, id string, mode wire.CancelMode) (v dispatch.JobView, err error) {
	return v, c.ask(ctx, http.MethodPost, dispatch.CancelPath(id), dispatch.CancelRequest{Mode: mode}, &v, 0)
}

// Settle is Hub's.
func (c *Client) Settle(ctx context.Context, id string) error {
	return c.ask(ctx, http.MethodPost, dispatch.SettlePath(id), nil, nil, 0)
}

// codeOf is the code that a hub refused with, or "".
func codeOf(err error) dispatch.Code {
	if e, ok := errors.AsType[*dispatch.Error](err); ok {
		return e.Code
	}
	return ""
}

// persist calls f until it succeeds or must not be tried again: the transport's
// errors and every retryable code are, after 1 to 30 seconds, or what the hub
// asks for (gitlab-dispatch, "Idempotency and retries"). notify may be nil.
func persist(ctx context.Context, pace Pace, notify func(error, int, time.Duration), f func(context.Context) error) error {
	p := backoff.Policy{Min: pace.HubMin, Max: pace.HubMax, Budget: -1, Notify: notify}
	return backoff.Retry(ctx, p, func(ctx context.Context) error {
		err := f(ctx)
		e, ok := errors.AsType[*dispatch.Error](err)
		switch {
		case err == nil:
			return nil
		case !ok:
			// A fault of another layer would be taken for one that lasts.
			return transient{err}
		case !e.Retry():
			return backoff.Permanent(err)
		case e.RetryAfterSecs > 0:
			return backoff.After(err, pace.after(e.RetryAfterSecs))
		}
		return err
	})
}

// after is what a hub's retry_after_secs asks for: an hour at most.
func (p Pace) after(secs int) time.Duration { return time.Duration(min(max(secs, 0), 3600)) * p.HubMin }

// transient hides what is in an error's chain from backoff.
type transient struct{ err error }

func (t transient) Error() string { return t.err.Error() }

// explain makes what lasts of a hub's refusal clear to who reads the log.
func explain(err error) error {
	if codeOf(err) == dispatch.Unauthorized {
		return fault.New(fault.Denied, "the hub does not take this relay's signature").Because(err).
			Hint("vk-hub relays, on its host, tells whether the relay is still enrolled; vk-gitlab join --replace enrolls it again")
	}
	return err
}

package web

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/wsx"
)

// The client API (gitlab-dispatch). Who makes a request is looked at before its
// body is read, and the signature once it is: it covers the body.

// MaxClients is how many connections of the client API are served at once.
const MaxClients = 1024

// bodyStep is how long a request's body may take.
const bodyStep = 30 * time.Second

// clientAPI serves the routes.
type clientAPI struct {
	n    *Nodes
	held atomic.Int64
}

// request is one that is authenticated.
type request struct {
	r     *http.Request
	owner hub.Owner
	body  []byte
	hash  string // sha256 of body
}

type route struct {
	pattern string
	most    int64  // bytes of a body
	scope   string // that a key needs
	f       func(*clientAPI, *request) (status int, v any, e *dispatch.Error)
}

// routes are all of the client API but the output's, whose answer is bytes.
var routes = []route{
	{"POST " + dispatch.CapacityPath, dispatch.MaxBody, hub.ScopeCapacity, (*clientAPI).capacity},
	{"POST " + dispatch.ReservationsPath, dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).reserve},
	{"POST " + dispatch.ReservationsPath + "/{id}/renew", dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).renew},
	{"DELETE " + dispatch.ReservationsPath + "/{id}", dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).release},
	{"POST " + dispatch.JobsPath, dispatch.MaxSubmission, hub.ScopeJobs, (*clientAPI).submit},
	{"GET " + dispatch.JobsPath + "/{id}", dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).view},
	{"POST " + dispatch.JobsPath + "/{id}/cancel", dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).cancel},
	{"POST " + dispatch.JobsPath + "/{id}/settle", dispatch.MaxBody, hub.ScopeJobs, (*clientAPI).settle},
	{"POST " + dispatch.ClientsPath, dispatch.MaxBody, hub.ScopeCapacity, (*clientAPI).hello},
}

func (a *clientAPI) register(mux *http.ServeMux) {
	for _, rt := range routes {
		mux.HandleFunc(rt.pattern, a.handle(rt.most, rt.scope, func(w http.ResponseWriter, q *request) *dispatch.Error {
			status, v, e := rt.f(a, q)
			if e != nil {
				return e
			}
			if v == nil {
				w.WriteHeader(status)
				return nil
			}
			answer(w, status, v)
			return nil
		}))
	}
	mux.HandleFunc("GET "+dispatch.JobsPath+"/{id}/output", a.handle(dispatch.MaxBody, hub.ScopeJobs, a.output))
}

// handle authenticates a request and answers with its error.
func (a *clientAPI) handle(most int64, scope string, f func(http.ResponseWriter, *request) *dispatch.Error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.SetReadDeadline(time.Now().Add(bodyStep))
		_ = rc.SetWriteDeadline(time.Now().Add(bodyStep + (dispatch.MaxReserveSecs+60)*time.Second))
		if a.held.Add(1) > MaxClients {
			a.held.Add(-1)
			w.Header().Set("Connection", "close")
			a.refuse(w, r, hub.Deny(dispatch.Unavailable, "too many requests are being served"))
			return
		}
		defer a.held.Add(-1)
		q, e := a.authenticate(r, most)
		if e == nil && q.owner.Key != nil && scope == hub.ScopeJobs && !q.owner.Scoped() {
			e = hub.Deny(dispatch.Forbidden, q.owner.Name+" may ask for capacity alone")
		}
		if e != nil {
			w.Header().Set("Connection", "close")
			a.refuse(w, r, e)
			return
		}
		letIn(r)
		// Not past the write's: a client that has gone is seen by a read.
		_ = rc.SetReadDeadline(time.Time{})
		if e := f(w, q); e != nil {
			a.refuse(w, r, e)
		}
	}
}

func (a *clientAPI) refuse(w http.ResponseWriter, r *http.Request, e *dispatch.Error) {
	a.n.Log.Debug("client API request refused", "remote", r.RemoteAddr, logx.Path, r.URL.Path, "code", e.Code, logx.Err, e.Text)
	if e.RetryAfterSecs > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.RetryAfterSecs))
	}
	answer(w, e.Status, e.Failure)
}

func (a *clientAPI) authenticate(r *http.Request, most int64) (*request, *dispatch.Error) {
	q := &request{r: r}
	signed := dispatch.Request{Method: r.Method, Target: r.RequestURI}
	var key ed25519.PublicKey
	if text, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		var e *dispatch.Error
		if q.owner, e = a.n.Hub.ByKey(text); e != nil {
			return nil, e
		}
	} else {
		var err error
		if signed.Relay, signed.Unix, err = dispatch.Claim(r.Header, a.n.Hub.Now()); err != nil {
			return nil, hub.Deny(dispatch.Unauthorized, err.Error())
		}
		var e *dispatch.Error
		if q.owner, key, e = a.n.Hub.ByRelay(signed.Relay); e != nil {
			return nil, e
		}
		if signed.Channel, err = wire.Channel(r.TLS); err != nil {
			return nil, hub.Deny(dispatch.Unauthorized, err.Error())
		}
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, most))
	if err != nil {
		if tooBig := (*http.MaxBytesError)(nil); errors.As(err, &tooBig) {
			return nil, hub.Deny(dispatch.TooLarge, "the body has more than "+strconv.FormatInt(most, 10)+" bytes")
		}
		return nil, hub.Deny(dispatch.Invalid, "the body cannot be read")
	}
	q.body = body
	if key != nil {
		signed.Body = body
		if err := signed.Verify(key, r.Header); err != nil {
			return nil, hub.Deny(dispatch.Unauthorized, err.Error())
		}
	}
	sum := sha256.Sum256(body)
	q.hash = hex.EncodeToString(sum[:])
	return q, nil
}

// read parses a request's body.
func read(q *request, v interface{ Check() error }) *dispatch.Error {
	if err := json.Unmarshal(q.body, v); err != nil {
		return hub.Deny(dispatch.Invalid, "the body cannot be read as JSON")
	}
	if err := v.Check(); err != nil {
		return hub.Deny(dispatch.Invalid, wire.Clean(err.Error(), wire.MaxReason))
	}
	return nil
}

// ctx ends with the request, or with the server.
func (a *clientAPI) ctx(q *request) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(q.r.Context())
	stop := context.AfterFunc(a.n.hangUp, cancel)
	return ctx, func() { stop(); cancel() }
}

func (a *clientAPI) capacity(q *request) (int, any, *dispatch.Error) {
	var c dispatch.CapacityRequest
	if e := read(q, &c); e != nil {
		return 0, nil, e
	}
	ctx, done := a.ctx(q)
	defer done()
	v, e := a.n.Hub.Capacity(ctx, q.owner, &c)
	return http.StatusOK, v, e
}

func (a *clientAPI) reserve(q *request) (int, any, *dispatch.Error) {
	var c dispatch.ReservationRequest
	if e := read(q, &c); e != nil {
		return 0, nil, e
	}
	ctx, done := a.ctx(q)
	defer done()
	v, e := a.n.Hub.Reserve(ctx, q.owner, &c, q.hash)
	return http.StatusCreated, v, e
}

func (a *clientAPI) renew(q *request) (int, any, *dispatch.Error) {
	var c dispatch.RenewRequest
	if e := read(q, &c); e != nil {
		return 0, nil, e
	}
	ctx, done := a.ctx(q)
	defer done()
	v, e := a.n.Hub.Renew(ctx, q.owner, q.r.PathValue("id"), &c)
	return http.StatusOK, v, e
}

func (a *clientAPI) release(q *request) (int, any, *dispatch.Error) {
	return http.StatusNoContent, nil, a.n.Hub.Release(q.r.Context(), q.owner, q.r.PathValue("id"))
}

func (a *clientAPI) submit(q *request) (int, any, *dispatch.Error) {
	var c dispatch.JobSubmission
	if e := read(q, &c); e != nil {
		return 0, nil, e
	}
	ctx, done := a.ctx(q)
	defer done()
	v, e := a.n.Hub.Submit(ctx, q.owner, &c, q.hash)
	return http.StatusCreated, v, e
}

// number reads a query's, 0 for none.
func number(q *request, name string) (int64, *dispatch.Error) {
	s := q.r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, hub.Deny(dispatch.Invalid, name+" is no number from 0 up")
	}
	return n, nil
}

// waiting reads the query's wait.
func waiting(q *request) (time.Duration, *dispatch.Error) {
	n, e := number(q, "wait")
	return time.Duration(min(n, dispatch.MaxWaitSecs)) * time.Second, e
}

func (a *clientAPI) view(q *request) (int, any, *dispatch.Error) {
	after, e := number(q, "after")
	if e != nil {
		return 0, nil, e
	}
	wait, e := waiting(q)
	if e != nil {
		return 0, nil, e
	}
	ctx, done := a.ctx(q)
	defer done()
	v, e := a.n.Hub.View(ctx, q.owner, q.r.PathValue("id"), uint64(after), wait)
	return http.StatusOK, v, e
}

func (a *clientAPI) cancel(q *request) (int, any, *dispatch.Error) {
	var c dispatch.CancelRequest
	if err := json.Unmarshal(q.body, &c); err != nil {
		return 0, nil, hub.Deny(dispatch.Invalid, "the body cannot be read as JSON")
	}
	v, e := a.n.Hub.Cancel(q.r.Context(), q.owner, q.r.PathValue("id"), c.Mode)
	return http.StatusAccepted, v, e
}

func (a *clientAPI) settle(q *request) (int, any, *dispatch.Error) {
	return http.StatusNoContent, nil, a.n.Hub.Settle(q.r.Context(), q.owner, q.r.PathValue("id"))
}

func (a *clientAPI) hello(q *request) (int, any, *dispatch.Error) {
	var c dispatch.ClientHello
	if err := json.Unmarshal(q.body, &c); err != nil {
		return 0, nil, hub.Deny(dispatch.Invalid, "the body cannot be read as JSON")
	}
	return http.StatusNoContent, nil, a.n.Hub.HelloFrom(q.r.Context(), q.owner, c)
}

func (a *clientAPI) output(w http.ResponseWriter, q *request) *dispatch.Error {
	offset, e := number(q, "offset")
	if e != nil {
		return e
	}
	wait, e := waiting(q)
	if e != nil {
		return e
	}
	ctx, done := a.ctx(q)
	defer done()
	p, e := a.n.Hub.Output(ctx, q.owner, q.r.PathValue("id"), offset, wait)
	if p != nil {
		w.Header().Set(dispatch.HeaderLength, strconv.FormatInt(p.Length, 10))
	}
	if e != nil {
		return e
	}
	w.Header().Set(dispatch.HeaderOffset, strconv.FormatInt(offset, 10))
	w.Header().Set(dispatch.HeaderComplete, strconv.FormatBool(p.Complete))
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(p.Data)))
	w.WriteHeader(http.StatusOK)
	w.Write(p.Data)
	return nil
}

// enrollRelay is POST dispatch.EnrollPath.
func (n *Nodes) enrollRelay(w http.ResponseWriter, r *http.Request) {
	var req dispatch.EnrollRequest
	channel, ok := n.enrollment(w, r, &req)
	if !ok {
		return
	}
	reply, err := n.Hub.EnrollRelay(r.Context(), &req, channel, r.RemoteAddr)
	if err != nil {
		n.Log.Warn("relay's enrollment refused", "remote", r.RemoteAddr, "hostname", wire.Clean(req.Hostname, wire.MaxText), logx.Err, err)
		refused(w, err)
		return
	}
	n.Log.Info("relay enrolled", "relay", reply.Relay, "remote", r.RemoteAddr, "again", reply.Again)
	answer(w, http.StatusOK, reply)
}

// relaySession is GET dispatch.SessionPath.
func (n *Nodes) relaySession(w http.ResponseWriter, r *http.Request) {
	n.serve(w, r, func(ctx context.Context, c *wsx.Conn, p hub.Peer) { _ = n.Hub.ServeRelay(ctx, c, p) })
}

// Package web is the hub's HTTP faces: the listener of nodes (TLS 1.3, or
// plain text on loopback), the admin socket, and /metrics.
//
// The node listener serves POST /v1/enroll and the WebSocket of sessions at
// /v1/node, those of relays at /v1/gitlab/, and the client API (client.go). What has not authenticated is bounded in number
// (MaxUnauthenticated, MaxHandshakes), in time (wire.HandshakeStep for each
// step: TLS, headers, a body, a message) and in size.
package web

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/wsx"
)

// maxEnroll is the most bytes of an enrollment's body.
const maxEnroll = 64 << 10

// Nodes serves a hub's nodes.
type Nodes struct {
	Hub *hub.Hub
	Log *slog.Logger

	gate       *gate
	api        *clientAPI
	handshakes chan struct{}
	sessions   sync.WaitGroup
	hangUp     context.Context // ends the sessions
}

// Unauthenticated counts the connections that are.
func (n *Nodes) Unauthenticated() int { return int(n.gate.held.Load()) }

// Turned counts the connections that were closed because of too many.
func (n *Nodes) Turned() uint64 { return n.gate.turned.Load() }

// NewNodes makes the face of a hub on a listener. cert is nil for plain text,
// which Serve refuses on a listener that is not on loopback.
func NewNodes(h *hub.Hub, log *slog.Logger, l net.Listener) *Nodes {
	n := &Nodes{Hub: h, Log: log.With(logx.Comp, "web"), gate: &gate{Listener: l, max: MaxUnauthenticated}, handshakes: make(chan struct{}, MaxHandshakes)}
	n.api = &clientAPI{n: n}
	return n
}

// Serve takes connections until ctx ends, then ends the sessions and returns.
func (n *Nodes) Serve(ctx context.Context, cert *Certificate) error {
	var l net.Listener = n.gate
	if cert != nil {
		l = tls.NewListener(n.gate, &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: cert.get, NextProtos: []string{"http/1.1"}})
	} else if a, ok := n.gate.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return fault.Newf(fault.Usage, "a hub without TLS serves on loopback alone, not on %s", n.gate.Addr())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+wire.EnrollPath, n.enroll)
	mux.HandleFunc("GET "+wire.SessionPath, n.session)
	mux.HandleFunc("POST "+dispatch.EnrollPath, n.enrollRelay)
	mux.HandleFunc("GET "+dispatch.SessionPath, n.relaySession)
	n.api.register(mux)
	hangUp, cancel := context.WithCancel(ctx)
	defer cancel()
	n.hangUp = hangUp
	s := &http.Server{Handler: mux, ConnContext: withGuest, ReadHeaderTimeout: wire.HandshakeStep, IdleTimeout: wire.HandshakeStep,
		MaxHeaderBytes: 16 << 10, TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		ErrorLog: log.New(logWriter{n.Log}, "", 0)}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(l)
	cancel()
	n.sessions.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serving nodes: %w", err)
}

// logWriter passes what net/http says of connections on: most is of peers that
// were cut off.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug("connection", logx.Err, wire.Clean(string(p), 300))
	return len(p), nil
}

func (n *Nodes) enroll(w http.ResponseWriter, r *http.Request) {
	var req wire.EnrollRequest
	channel, ok := n.enrollment(w, r, &req)
	if !ok {
		return
	}
	reply, err := n.Hub.Enroll(r.Context(), &req, channel, r.RemoteAddr)
	if err != nil {
		n.Log.Warn("enrollment refused", "remote", r.RemoteAddr, "hostname", wire.Clean(req.Hostname, wire.MaxText), logx.Err, err)
		refused(w, err)
		return
	}
	n.Log.Info("enrolled", logx.Node, reply.Node, "remote", r.RemoteAddr, "again", reply.Again)
	answer(w, http.StatusOK, reply)
}

// enrollment reads a request to enroll; when it is not ok, it is answered.
func (n *Nodes) enrollment(w http.ResponseWriter, r *http.Request, req any) (channel []byte, ok bool) {
	rc := http.NewResponseController(w)
	deadline := time.Now().Add(wire.HandshakeStep)
	_ = rc.SetReadDeadline(deadline)
	_ = rc.SetWriteDeadline(deadline.Add(wire.HandshakeStep))
	w.Header().Set("Connection", "close") // a session needs a connection of its own
	channel, err := wire.Channel(r.TLS)
	if err != nil {
		answer(w, http.StatusBadRequest, wire.EnrollRefused{Code: wire.BadRequest, Message: err.Error()})
		return nil, false
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxEnroll))
	if err == nil {
		err = json.Unmarshal(body, req)
	}
	if err != nil {
		answer(w, http.StatusBadRequest, wire.EnrollRefused{Code: wire.BadRequest, Message: "the request cannot be read"})
		return nil, false
	}
	return channel, true
}

func refused(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*hub.RefusedError](err)
	switch {
	case !ok:
		answer(w, http.StatusServiceUnavailable, wire.EnrollRefused{Code: wire.Internal, Message: err.Error()})
	case e.Code == wire.BadRequest:
		answer(w, http.StatusBadRequest, wire.EnrollRefused{Code: e.Code, Message: e.Text})
	default:
		answer(w, http.StatusForbidden, wire.EnrollRefused{Code: e.Code, Message: e.Text})
	}
}

func answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"kind":"system","message":"the answer cannot be written"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(b)
}

func (n *Nodes) session(w http.ResponseWriter, r *http.Request) {
	n.serve(w, r, func(ctx context.Context, c *wsx.Conn, p hub.Peer) { _ = n.Hub.Serve(ctx, c, p) })
}

// serve runs a peer's session.
func (n *Nodes) serve(w http.ResponseWriter, r *http.Request, f func(context.Context, *wsx.Conn, hub.Peer)) {
	select {
	case n.handshakes <- struct{}{}:
	default:
		http.Error(w, "too many handshakes at once; try again", http.StatusServiceUnavailable)
		return
	}
	free := sync.OnceFunc(func() { <-n.handshakes })
	defer free()
	channel, err := wire.Channel(r.TLS)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c, err := wsx.Accept(w, r)
	if err != nil {
		return
	}
	n.sessions.Add(1)
	defer n.sessions.Done()
	// Not the request's context: net/http ends it as the server is closed,
	// before the node was told.
	f(n.hangUp, c, hub.Peer{Channel: channel, Remote: r.RemoteAddr, Authenticated: func() { letIn(r); free() }})
}

// Certificate is a hub's, read again when its files change, so that a renewed
// one is used without a restart.
type Certificate struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	pair   *tls.Certificate
	stamp  [2]time.Time
	looked time.Time
}

// LoadCertificate reads a certificate and its key, PEM files.
func LoadCertificate(cert, key string, log *slog.Logger) (*Certificate, error) {
	c := &Certificate{cert: cert, key: key, log: log}
	if err := c.load(); err != nil {
		return nil, fault.Newf(fault.Usage, "reading tls_cert %s and tls_key %s", cert, key).Because(err)
	}
	return c, nil
}

func (c *Certificate) load() error {
	var stamp [2]time.Time
	for i, f := range []string{c.cert, c.key} {
		info, err := os.Stat(f)
		if err != nil {
			return err
		}
		stamp[i] = info.ModTime()
	}
	if c.pair != nil && stamp == c.stamp {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return err
	}
	c.pair, c.stamp = &pair, stamp
	return nil
}

func (c *Certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.looked) > 10*time.Second {
		c.looked = time.Now()
		if err := c.load(); err != nil {
			c.log.Error("the certificate cannot be read again; the old one is used", logx.Err, err)
		}
	}
	return c.pair, nil
}

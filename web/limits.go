package web

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
)

// Limits of the node listener (fleet-reference: "The hub admits at most 256
// connections that have not authenticated …").
const (
	MaxUnauthenticated = 256
	MaxHandshakes      = 256
)

// gate is a listener that lets at most max connections in that have not
// authenticated. One past that is closed at once: its peer tries again.
type gate struct {
	net.Listener
	max    int64
	held   atomic.Int64
	turned atomic.Uint64 // connections that were closed
}

// Accept waits for a connection that may come in.
func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g.held.Add(1) > g.max {
			g.held.Add(-1)
			g.turned.Add(1)
			c.Close()
			continue
		}
		return &guest{Conn: c, gate: g}, nil
	}
}

// guest is a connection that counts as unauthenticated until let in or closed.
type guest struct {
	net.Conn
	gate *gate
	once sync.Once
}

func (c *guest) authenticated() { c.once.Do(func() { c.gate.held.Add(-1) }) }

// Close also gives the place back.
func (c *guest) Close() error {
	c.authenticated()
	return c.Conn.Close()
}

type guestKey struct{}

// withGuest is http.Server.ConnContext: it keeps the connection for the
// handlers.
func withGuest(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, guestKey{}, c)
}

// letIn marks a request's connection as authenticated.
func letIn(r *http.Request) {
	if g, ok := r.Context().Value(guestKey{}).(*guest); ok {
		g.authenticated()
	}
}

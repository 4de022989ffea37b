package node

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"net/url"

	"virtkit/core/fleet/wire"
	"virtkit/core/wsx"
)

// Conn is one connection to a hub: whole messages, read by one goroutine and
// written by one.
type Conn interface {
	Read(ctx context.Context) ([]byte, error)
	Write(ctx context.Context, data []byte) error
	// Channel is what binds a signature to this connection.
	Channel() ([]byte, error)
	// Close says why and waits for the other side, at most 5 seconds. It ends a
	// Read, and is safe to call at any time.
	Close(reason string) error
	// CloseNow ends the connection without a word.
	CloseNow()
}

// Dialer opens connections to the node's hub.
type Dialer interface {
	Dial(ctx context.Context) (Conn, error)
}

// HubDialer dials the hub of an enrollment, of a node or another peer. It uses no proxy.
type HubDialer struct {
	URL *url.URL
	CA  []byte
	// Path is where sessions are, "" = wire.SessionPath.
	Path string
	// Net replaces a plain TCP dial when set, in tests.
	Net func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Dial opens one connection; ctx ends the dialing only.
func (d *HubDialer) Dial(ctx context.Context) (Conn, error) {
	conf, err := TLSConfig(d.CA)
	if err != nil {
		return nil, err
	}
	u := *d.URL
	u.Path, u.Scheme = cmp.Or(d.Path, wire.SessionPath), "ws"
	if d.URL.Scheme == "https" {
		u.Scheme = "wss"
	}
	c, err := wsx.Dialer{TLS: conf, Net: d.Net}.Dial(ctx, u.String(), nil)
	if err != nil {
		return nil, err
	}
	return &hubConn{c, u.Scheme == "wss"}, nil
}

type hubConn struct {
	*wsx.Conn
	secure bool
}

func (c *hubConn) Channel() ([]byte, error) {
	state := c.TLS()
	if c.secure && state == nil { // never sign the marker of plain text by mistake
		state = &tls.ConnectionState{}
	}
	return wire.Channel(state)
}

// Close ends with a normal closure.
func (c *hubConn) Close(reason string) error { return c.Conn.Close(wsx.Normal, reason) }

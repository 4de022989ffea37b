//lint:file-ignore SA1019 the design card names this path; its last release is the same code as its successor's

// Package wsx is virtkit's WebSocket (RFC 6455): whole text messages of at
// most Limit bytes, no compression, and the TLS state that a signature is
// bound to. It is the only package that knows the library beneath, so that the
// library can be exchanged here alone.
//
// A Conn may be read by one goroutine and written by others. When the context
// of a Read or a Write ends, the connection is closed: half a message cannot
// be taken back.
package wsx

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"nhooyr.io/websocket"
)

// Limit is the largest message either way, in bytes (fleet-reference: "A
// message is at most 1 MiB either way").
const Limit = 1 << 20

// Close codes, of RFC 6455 section 7.4.1.
const (
	Normal    = int(websocket.StatusNormalClosure)
	GoingAway = int(websocket.StatusGoingAway)
	Protocol  = int(websocket.StatusProtocolError)
	Policy    = int(websocket.StatusPolicyViolation)
	TooBig    = int(websocket.StatusMessageTooBig)
	Internal  = int(websocket.StatusInternalError)
	TryAgain  = int(websocket.StatusTryAgainLater)
)

// ErrTooBig is returned for a message of more than Limit bytes. One that is
// received ends the connection; one that is to be sent is not sent.
var ErrTooBig = errors.New("wsx: message of more than 1 MiB")

// StatusError is a server's answer that is no WebSocket.
type StatusError struct {
	Status int    // of HTTP, such as 503
	Body   string // its first KiB
}

func (e *StatusError) Error() string {
	return strings.TrimSpace(fmt.Sprintf("answered HTTP %d %s: %s", e.Status, http.StatusText(e.Status), e.Body))
}

// Conn is an open WebSocket.
type Conn struct {
	c   *websocket.Conn
	tls *tls.ConnectionState
}

// Dialer opens connections. It uses no proxy and follows no redirect.
type Dialer struct {
	TLS *tls.Config // used for wss; nil = the library's defaults
	// Net dials instead of a plain net.Dialer when set.
	Net func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Dial opens url, of the scheme ws or wss. ctx ends the handshake only. An
// answer other than an upgrade is a *StatusError.
func (d Dialer) Dial(ctx context.Context, url string, header http.Header) (*Conn, error) {
	var state *tls.ConnectionState
	tr := &http.Transport{
		TLSClientConfig: d.TLS, DialContext: d.Net, DisableCompression: true,
		// A connection that became a WebSocket is not the pool's any more.
		DisableKeepAlives: true,
		TLSNextProto:      map[string]func(string, *tls.Conn) http.RoundTripper{}, // no HTTP/2
	}
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	c, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: client, HTTPHeader: header})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			body := ""
			if resp.Body != nil {
				b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
				body = string(b)
			}
			return nil, &StatusError{resp.StatusCode, body}
		}
		return nil, err
	}
	state = resp.TLS
	c.SetReadLimit(Limit)
	return &Conn{c, state}, nil
}

// Accept makes a WebSocket of a request; on an error the answer is written. A
// request that a browser made for another site's page is refused.
func Accept(w http.ResponseWriter, r *http.Request) (*Conn, error) {
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil, err
	}
	c.SetReadLimit(Limit)
	return &Conn{c, r.TLS}, nil
}

// TLS is the state of the connection beneath, nil when that is plaintext.
func (c *Conn) TLS() *tls.ConnectionState { return c.tls }

// Read waits for a message. A binary one ends the connection: the protocol has
// none. When ctx ends, so does the connection.
func (c *Conn) Read(ctx context.Context) ([]byte, error) {
	typ, b, err := c.c.Read(ctx)
	if err != nil {
		if CloseCode(err) < 0 && strings.Contains(err.Error(), "read limited at") {
			err = ErrTooBig
		}
		return nil, err
	}
	if typ != websocket.MessageText {
		err := errors.New("wsx: binary message")
		c.c.Close(websocket.StatusUnsupportedData, "text messages only")
		return nil, err
	}
	return b, nil
}

// Write sends b as one message. When ctx ends, so does the connection.
func (c *Conn) Write(ctx context.Context, b []byte) error {
	if len(b) > Limit {
		return ErrTooBig
	}
	return c.c.Write(ctx, websocket.MessageText, b)
}

// Ping sends a ping and waits for its answer, which only comes while somebody
// reads.
func (c *Conn) Ping(ctx context.Context) error { return c.c.Ping(ctx) }

// Close says why (at most 123 bytes of UTF-8 reach the peer), and waits up to
// 5 seconds for the peer to agree. Safe to call twice.
func (c *Conn) Close(code int, reason string) error {
	for len(reason) > 123 {
		r := []rune(reason)
		reason = string(r[:len(r)-1])
	}
	return c.c.Close(websocket.StatusCode(code), reason)
}

// CloseNow ends the connection without a word.
func (c *Conn) CloseNow() { c.c.CloseNow() }

// CloseCode is the code with which the peer closed, or -1.
func CloseCode(err error) int { return int(websocket.CloseStatus(err)) }

// CloseReason is the peer's text, "" for none.
func CloseReason(err error) string {
	if ce, ok := errors.AsType[websocket.CloseError](err); ok {
		return ce.Reason
	}
	return ""
}

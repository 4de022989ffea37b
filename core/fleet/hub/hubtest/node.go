package hubtest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// ErrClosed is what a Pipe gives once an end is closed.
var ErrClosed = errors.New("hubtest: the connection is closed")

// Pipe is a connection in memory: two ends, each a hub.Conn.
func Pipe() (a, b *End) {
	x, y := make(chan []byte, 64), make(chan []byte, 64)
	done := make(chan struct{})
	once := new(sync.Once)
	return &End{x, y, done, once}, &End{y, x, done, once}
}

// End is one end of a Pipe.
type End struct {
	in, out chan []byte
	done    chan struct{}
	once    *sync.Once
}

// Read is hub.Conn's. What was sent before the end is still read.
func (e *End) Read(ctx context.Context) ([]byte, error) {
	select {
	case b := <-e.in:
		return b, nil
	default:
	}
	select {
	case b := <-e.in:
		return b, nil
	case <-e.done:
		select {
		case b := <-e.in:
			return b, nil
		default:
			return nil, ErrClosed
		}
	case <-ctx.Done():
		e.CloseNow()
		return nil, context.Cause(ctx)
	}
}

// Write is hub.Conn's.
func (e *End) Write(ctx context.Context, b []byte) error {
	select {
	case <-e.done:
		return ErrClosed
	default:
	}
	select {
	case e.out <- b:
		return nil
	case <-e.done:
		return ErrClosed
	case <-ctx.Done():
		e.CloseNow()
		return context.Cause(ctx)
	}
}

// Close is hub.Conn's.
func (e *End) Close(int, string) error { e.CloseNow(); return nil }

// CloseNow is hub.Conn's.
func (e *End) CloseNow() { e.once.Do(func() { close(e.done) }) }

// Identity is a node's key and the ID that a hub gave it.
type Identity struct {
	ID  string
	Key ed25519.PrivateKey
}

// NewKey makes an identity that is not enrolled.
func NewKey() Identity {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err) // the kernel gives no randomness
	}
	return Identity{Key: key}
}

// EnrollRequest asks a hub for an ID over a connection with that binding.
func (i Identity) EnrollRequest(token, hostname string, channel []byte) *wire.EnrollRequest {
	pub := i.Key.Public().(ed25519.PublicKey)
	return &wire.EnrollRequest{Token: token, PublicKey: hex.EncodeToString(pub), Hostname: hostname, VK: "test",
		Signature: hex.EncodeToString(ed25519.Sign(i.Key, wire.EnrollPayload(token, pub, channel)))}
}

// Enroll makes a node of a hub.
func Enroll(t testing.TB, h *hub.Hub, hostname string) Identity {
	t.Helper()
	i, err := Join(t.Context(), h, hostname)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// Join is Enroll for who is no test.
func Join(ctx context.Context, h *hub.Hub, hostname string) (Identity, error) {
	i := NewKey()
	token, err := h.CreateToken(ctx, "test", time.Hour)
	if err != nil {
		return i, err
	}
	r, err := h.Enroll(ctx, i.EnrollRequest(token, hostname, wire.Plaintext), wire.Plaintext, "test")
	if err != nil {
		return i, err
	}
	i.ID = r.Node
	return i, nil
}

// Client is the node's end of a session, message by message.
type Client struct {
	C       hub.Conn
	Version int
	Welcome *wire.Welcome
}

// Dial runs the node's side of the handshake. A refusal is a
// *hub.RefusedError.
func (i Identity) Dial(ctx context.Context, c hub.Conn, channel []byte, incarnation string, versions wire.Range) (*Client, error) {
	n := &Client{C: c}
	hello := &wire.Hello{Node: i.ID, Incarnation: incarnation, Versions: versions, VK: "test"}
	if err := n.Send(ctx, hello); err != nil {
		return nil, err
	}
	m, err := n.Receive(ctx)
	if err != nil {
		return nil, err
	}
	ch, ok := m.(*wire.Challenge)
	if !ok {
		return nil, refusal(m)
	}
	payload, err := wire.AuthPayload(hello, ch, channel)
	if err != nil {
		return nil, err
	}
	if err := n.Send(ctx, &wire.Auth{Signature: hex.EncodeToString(ed25519.Sign(i.Key, payload))}); err != nil {
		return nil, err
	}
	n.Version = ch.Version
	if m, err = n.Receive(ctx); err != nil {
		return nil, err
	}
	if n.Welcome, ok = m.(*wire.Welcome); !ok {
		return nil, refusal(m)
	}
	return n, nil
}

func refusal(m wire.Message) error {
	if r, ok := m.(*wire.Refused); ok {
		return &hub.RefusedError{Code: r.Code, Text: r.Message}
	}
	return fmt.Errorf("the hub sent a %T", m)
}

// Send encodes a message for the session.
func (n *Client) Send(ctx context.Context, m wire.Message) error {
	b, err := wire.Encode(n.Version, m)
	if err != nil {
		return err
	}
	return n.C.Write(ctx, b)
}

// Receive is the hub's next message.
func (n *Client) Receive(ctx context.Context) (wire.Message, error) {
	b, err := n.C.Read(ctx)
	if err != nil {
		return nil, err
	}
	return wire.Decode(wire.FromHub, n.Version, b)
}

// Next is the hub's next message of a type; others but pings are an error.
func Next[M wire.Message](ctx context.Context, n *Client) (m M, err error) {
	for {
		got, err := n.Receive(ctx)
		if err != nil {
			return m, err
		}
		if _, ping := got.(*wire.Ping); ping {
			continue
		}
		m, ok := got.(M)
		if !ok {
			return m, fmt.Errorf("the hub sent %+v, a %T was expected", got, m)
		}
		return m, nil
	}
}

// Quiet fails unless the hub sends nothing but pings, of which it waits for
// two that were sent after the call.
func (n *Client) Quiet(ctx context.Context) error {
	for range 2 {
		m, err := n.Receive(ctx)
		if err != nil {
			return err
		}
		if _, ping := m.(*wire.Ping); !ping {
			return fmt.Errorf("the hub sent %T %+v, nothing was expected", m, m)
		}
	}
	return nil
}

var _ io.Closer = (*Client)(nil)

// Close ends the session.
func (n *Client) Close() error { n.C.CloseNow(); return nil }

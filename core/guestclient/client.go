// Package guestclient is the host's side of core/guestwire: it asks a guest's
// agent for what a job needs and turns the streams of an exec into readers and
// writers.
//
// A Client works over any Opener of streams. New makes one from the byte
// stream of machine.Machine.Control (yamux over it, started at the first
// request); FromOpener makes one from connections that somebody else splices
// onto such streams, as a supervisor does for its clients.
//
// Ending a stream has one meaning each way, and whoever splices must pass it
// on (see Splice): the end of a stdin stream is the end of the input; the end
// of a stdout or stderr stream, said by the host, is "nobody reads this any
// more"; the end of the exec stream itself, said by the host before the
// program has exited, is "whoever wanted this is gone".
package guestclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/version"
)

// ErrGuestGone is in the chain of every error that comes from the end of the
// guest, or of the way to it, before the answer. What the guest had sent
// before was delivered.
var ErrGuestGone = errors.New("the guest is gone")

// Opener opens one stream to the agent. If the connection has CloseWrite, that
// ends one direction; otherwise Close must be a half-close, as yamux's is.
type Opener func(ctx context.Context) (net.Conn, error)

// Client asks one guest. It is safe for concurrent use.
type Client struct {
	open Opener
	mux  *mux // nil when the Opener is somebody else's
}

// New returns a client over the guest's byte stream, which it takes over. No
// byte is written before the first request.
func New(conn io.ReadWriteCloser) *Client {
	m := &mux{conn: guestwire.JoinFrames(&lastWords{ReadWriteCloser: conn})}
	return &Client{open: m.open, mux: m}
}

// FromOpener returns a client whose streams come from open.
func FromOpener(open Opener) *Client { return &Client{open: open} }

// Open returns a fresh stream to the agent for raw use: the caller speaks
// guestwire on it, or splices somebody onto it who does.
func (c *Client) Open(ctx context.Context) (net.Conn, error) {
	conn, err := c.open(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, fmt.Errorf("opening a stream to the agent: %w", gone(err))
	}
	return conn, nil
}

// Close ends the session with the agent and its byte stream. Requests under
// way end with ErrGuestGone. It does nothing to a client of FromOpener.
func (c *Client) Close() error {
	if c.mux == nil {
		return nil
	}
	return c.mux.close()
}

// Hello asks who answers. An agent of another build is an error: host and
// guest always ship together.
func (c *Client) Hello(ctx context.Context) (guestwire.HelloReply, error) {
	var rep guestwire.HelloReply
	if err := c.ask(ctx, guestwire.OpHello, guestwire.Hello{Build: version.Build}, &rep); err != nil {
		return rep, err
	}
	if rep.Build != version.Build {
		return rep, fault.Newf(fault.System, "the guest's agent is build %q, this program is %q", rep.Build, version.Build).
			Hint("run the same installation of vk that started the guest, or start the guest again")
	}
	return rep, nil
}

// Setup makes the bare guest into the job's machine. progress, which may be
// nil, hears of each stage as it begins. A zero UnixNano is filled in at the
// moment of sending: call Hello first, so that the agent is known to read.
func (c *Client) Setup(ctx context.Context, s guestwire.Setup, progress func(stage string)) (last guestwire.Progress, err error) {
	err = c.with(ctx, func(conn net.Conn) error {
		if s.UnixNano == 0 {
			s.UnixNano = time.Now().UnixNano()
		}
		if err := guestwire.Open(conn, guestwire.OpSetup, s); err != nil {
			return err
		}
		stage := "start"
		for {
			var p guestwire.Progress
			if err := guestwire.Recv(conn, &p); err != nil {
				return fmt.Errorf("after stage %s: %w", stage, err)
			}
			if p.Done {
				if p.Err != "" {
					return &RemoteError{Op: guestwire.OpSetup, Stage: stage, Text: p.Err}
				}
				last = p
				return nil
			}
			stage = p.Stage
			if progress != nil {
				progress(p.Stage)
			}
		}
	})
	return last, err
}

// Ping asks for the guest's pulse.
func (c *Client) Ping(ctx context.Context) (guestwire.Pong, error) {
	var p guestwire.Pong
	return p, c.ask(ctx, guestwire.OpPing, nil, &p)
}

// Victims asks whom the guest's kernel killed for want of memory.
func (c *Client) Victims(ctx context.Context) (guestwire.Victims, error) {
	var v guestwire.Victims
	return v, c.ask(ctx, guestwire.OpVictims, nil, &v)
}

// Resume tells a guest restored from memory, or continued after a pause, what
// has changed. A zero UnixNano is filled in at the moment of sending.
func (c *Client) Resume(ctx context.Context, r guestwire.Resume) error {
	if r.UnixNano == 0 {
		r.UnixNano = time.Now().UnixNano()
	}
	return c.askReply(ctx, guestwire.OpResume, r)
}

// Shutdown ends the guest in order. A guest that went before it could answer
// is no error.
func (c *Client) Shutdown(ctx context.Context, s guestwire.Shutdown) error {
	err := c.askReply(ctx, guestwire.OpShutdown, s)
	if errors.Is(err, ErrGuestGone) {
		return nil
	}
	return err
}

// Dial connects to an address inside the guest. The connection has CloseWrite.
// For "udp", each datagram is preceded by its length as two big-endian bytes.
func (c *Client) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := c.Open(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	err = guestwire.Open(conn, guestwire.OpDial, guestwire.Dial{Network: network, Addr: addr})
	if err == nil {
		err = recvReply(conn, guestwire.OpDial)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, c.explain(ctx, guestwire.OpDial, err)
	}
	return withCloseWrite(conn), nil
}

// WriteFile makes one file in the guest from exactly f.Size bytes of r. The
// file appears whole or not at all.
func (c *Client) WriteFile(ctx context.Context, f guestwire.WriteFile, r io.Reader) error {
	return c.with(ctx, func(conn net.Conn) error {
		if err := guestwire.Open(conn, guestwire.OpWrite, f); err != nil {
			return err
		}
		n, err := copyBuffered(conn, io.LimitReader(r, f.Size))
		if err != nil || n != f.Size {
			// The agent may have said why it does not take it.
			conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			CloseWrite(conn)
			if re := recvReply(conn, guestwire.OpWrite); err != nil && re != nil {
				if _, ok := errors.AsType[*RemoteError](re); ok {
					return re
				}
			}
			if err == nil {
				err = fmt.Errorf("%s: %d bytes were promised, %d came", f.Path, f.Size, n)
			}
			return err
		}
		if err := CloseWrite(conn); err != nil {
			return err
		}
		return recvReply(conn, guestwire.OpWrite)
	})
}

// RemoteError is a refusal or failure that the agent reported.
type RemoteError struct {
	Op    string
	Stage string // of a setup
	Text  string
}

func (e *RemoteError) Error() string {
	if e.Stage != "" {
		return fmt.Sprintf("guest %s, stage %s: %s", e.Op, e.Stage, e.Text)
	}
	return fmt.Sprintf("guest %s: %s", e.Op, e.Text)
}

// ask sends one request and receives its one answer.
func (c *Client) ask(ctx context.Context, op string, body, answer any) error {
	return c.with(ctx, func(conn net.Conn) error {
		if err := guestwire.Open(conn, op, body); err != nil {
			return err
		}
		if err := guestwire.Recv(conn, answer); err != nil {
			return err
		}
		return nil
	})
}

func (c *Client) askReply(ctx context.Context, op string, body any) error {
	return c.with(ctx, func(conn net.Conn) error {
		if err := guestwire.Open(conn, op, body); err != nil {
			return err
		}
		return recvReply(conn, op)
	})
}

func recvReply(conn net.Conn, op string) error {
	var rep guestwire.Reply
	if err := guestwire.Recv(conn, &rep); err != nil {
		return err
	}
	if rep.Err != "" {
		return &RemoteError{Op: op, Stage: rep.Stage, Text: rep.Err}
	}
	return nil
}

// with runs f on a stream of its own, which ends with f or with ctx.
func (c *Client) with(ctx context.Context, f func(net.Conn) error) error {
	conn, err := c.Open(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := f(conn); err != nil {
		return c.explain(ctx, "", err)
	}
	return nil
}

// explain turns a failure of a stream into what it means.
func (c *Client) explain(ctx context.Context, op string, err error) error {
	if _, ok := errors.AsType[*RemoteError](err); ok {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if op != "" {
		return fmt.Errorf("guest %s: %w", op, gone(err))
	}
	return fmt.Errorf("asking the guest: %w", gone(err))
}

// gone adds ErrGuestGone to the errors by which streams tell of it.
func gone(err error) error {
	if err == nil || errors.Is(err, ErrGuestGone) {
		return err
	}
	for _, e := range []error{
		io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe, net.ErrClosed,
		yamux.ErrSessionShutdown, yamux.ErrStreamClosed, yamux.ErrConnectionReset,
		yamux.ErrConnectionWriteTimeout, yamux.ErrRemoteGoAway,
	} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w (%w)", ErrGuestGone, err)
		}
	}
	if ne, ok := errors.AsType[*net.OpError](err); ok && !ne.Timeout() {
		return fmt.Errorf("%w (%w)", ErrGuestGone, err)
	}
	return err
}

// mux is the yamux session over a guest's byte stream, made when first needed.
type mux struct {
	conn io.ReadWriteCloser

	mu     sync.Mutex
	sess   *yamux.Session
	closed bool
}

func (m *mux) session() (*yamux.Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, net.ErrClosed
	}
	if m.sess != nil {
		return m.sess, nil
	}
	s, err := yamux.Client(m.conn, guestwire.MuxConfig())
	if err != nil {
		return nil, err
	}
	// The agent never opens a stream; a guest that does may not make the host
	// hold its bytes.
	go s.GoAway()
	m.sess = s
	return s, nil
}

func (m *mux) open(ctx context.Context) (net.Conn, error) {
	s, err := m.session()
	if err != nil {
		return nil, err
	}
	type opened struct {
		st  *yamux.Stream
		err error
	}
	// yamux's open writes to the guest, which may not read yet.
	ch := make(chan opened, 1)
	go func() {
		st, err := s.OpenStream()
		ch <- opened{st, err}
	}()
	select {
	case o := <-ch:
		if o.err != nil {
			return nil, o.err
		}
		return &muxConn{o.st}, nil
	case <-ctx.Done():
		go func() {
			if o := <-ch; o.err == nil {
				o.st.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

func (m *mux) close() error {
	m.mu.Lock()
	m.closed = true
	s := m.sess
	m.mu.Unlock()
	if s != nil {
		return s.Close()
	}
	return m.conn.Close()
}

// muxConn gives a yamux stream the close of a net.Conn.
type muxConn struct{ *yamux.Stream }

// CloseWrite ends what is written; reading goes on.
func (c *muxConn) CloseWrite() error { return c.Stream.Close() }

// Close ends both directions for this side.
func (c *muxConn) Close() error {
	err := c.Stream.Close()
	c.Stream.SetReadDeadline(time.Unix(1, 0))
	return err
}

// lastWords keeps a failed write from ending the session: a guest that died
// may have left bytes to read, and yamux would drop them. The reader's end
// ends the session.
type lastWords struct {
	io.ReadWriteCloser
	mu   sync.Mutex
	dead bool
}

func (l *lastWords) Write(p []byte) (int, error) {
	l.mu.Lock()
	dead := l.dead
	l.mu.Unlock()
	if dead {
		return len(p), nil
	}
	if _, err := l.ReadWriteCloser.Write(p); err != nil {
		l.mu.Lock()
		l.dead = true
		l.mu.Unlock()
	}
	return len(p), nil
}

package agent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/agent"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// connListener hands out the connections put into it.
type connListener chan net.Conn

func (l connListener) Accept() (net.Conn, error) {
	c, ok := <-l
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (l connListener) Close() error   { return nil }
func (l connListener) Addr() net.Addr { return &net.UnixAddr{} }

// FuzzServe gives an agent bytes that are no session, then, in a session,
// requests of any shape. Whatever they are, the agent must go on answering.
// It runs in an empty directory and dials nothing, so that a request that
// happens to be valid does no harm.
func FuzzServe(f *testing.F) {
	id := strings.Repeat("a", 32)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), "hello", []byte(`{"build":"x"}`), []byte{})
	f.Add([]byte{0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff}, "exec", []byte(`{"id":"`+id+`","argv":["true"],"stdout":true}`), []byte("\x00\x00\x00\x02{}"))
	f.Add([]byte{0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0}, "stdio", []byte(`{"id":"`+id+`","fd":2}`), []byte("x"))
	f.Add([]byte{0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9}, "write", []byte(`{"path":"/a/b","size":3}`), []byte("abc"))
	f.Add([]byte{0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, "dial", []byte(`{"network":"tcp","addr":"x:1"}`), []byte("x"))
	f.Add([]byte{1}, "setup", []byte(`{"root":{"serial":"x"}}`), []byte{})
	f.Add([]byte{}, "resume", []byte(`null`), []byte{})
	f.Add([]byte{0, 0}, "ping", []byte(`[]`), []byte{0, 0})
	f.Fuzz(func(t *testing.T, garbage []byte, op string, body, rest []byte) {
		if op == guestwire.OpShutdown {
			t.Skip("ends it, as it should")
		}
		ln := make(connListener)
		ctx, cancel := context.WithCancelCause(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- agent.Serve(ctx, ln, agent.Options{
				Root: t.TempDir(), Grace: time.Millisecond,
				Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("not here") },
			})
		}()
		a, b := net.Pipe()
		ln <- b
		go io.Copy(io.Discard, a)
		a.SetWriteDeadline(time.Now().Add(time.Minute))
		a.Write(garbage)
		a.Close()

		a, b = net.Pipe()
		ln <- b
		request(t, a, op, body, rest)

		a, b = net.Pipe()
		ln <- b
		c := guestclient.New(a)
		if _, err := c.Hello(ctxFor(t)); err != nil {
			t.Errorf("after %q, %q %q %q: Hello = %v", garbage, op, body, rest, err)
		}
		c.Close()
		stop := errors.New("done")
		cancel(stop)
		close(ln)
		if err := <-done; !errors.Is(err, stop) {
			t.Errorf("Serve = %v", err)
		}
	})
}

// request sends one request of any shape and reads what comes.
func request(t *testing.T, conn net.Conn, op string, body, rest []byte) {
	t.Helper()
	sess, err := yamux.Client(conn, guestwire.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close()
	st, err := sess.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	if json.Valid(body) {
		guestwire.Send(st, guestwire.Header{Op: op, Body: body})
	} else {
		guestwire.Send(st, json.RawMessage(bytes.ToValidUTF8(body, nil)))
	}
	st.Write(rest)
	st.Close()
	if op != guestwire.OpStdio { // waits for its exec, and says nothing
		st.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		io.Copy(io.Discard, st)
	}
}

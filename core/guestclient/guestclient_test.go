package guestclient_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/version"
)

// guest is an agent's side whose streams a test answers by hand.
func guest(t *testing.T, answer func(st net.Conn, h guestwire.Header)) (*guestclient.Client, *yamux.Session) {
	t.Helper()
	a, b := net.Pipe()
	sess, err := yamux.Server(b, guestwire.MuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			st, err := sess.Accept()
			if err != nil {
				return
			}
			go func() {
				var h guestwire.Header
				if guestwire.Recv(st, &h) == nil {
					answer(st, h)
				}
			}()
		}
	}()
	c := guestclient.New(a)
	t.Cleanup(func() { c.Close(); sess.Close() })
	return c, sess
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestHelloOfAnotherBuild(t *testing.T) {
	build := version.Build
	c, _ := guest(t, func(st net.Conn, _ guestwire.Header) {
		guestwire.Send(st, guestwire.HelloReply{Build: build})
		st.Close()
	})
	if _, err := c.Hello(ctxFor(t)); err != nil {
		t.Errorf("same build: %v", err)
	}
	build = "another"
	if _, err := c.Hello(ctxFor(t)); err == nil || !strings.Contains(err.Error(), `"another"`) {
		t.Errorf("another build: %v", err)
	}
}

func TestSetupNamesTheStage(t *testing.T) {
	c, _ := guest(t, func(st net.Conn, h guestwire.Header) {
		guestwire.Send(st, guestwire.Progress{Stage: "root"})
		guestwire.Send(st, guestwire.Progress{Done: true, Err: "no disk"})
		st.Close()
	})
	var seen []string
	_, err := c.Setup(ctxFor(t), guestwire.Setup{}, func(s string) { seen = append(seen, s) })
	var re *guestclient.RemoteError
	if !errors.As(err, &re) || re.Stage != "root" || re.Text != "no disk" || len(seen) != 1 {
		t.Errorf("Setup = %v after %v", err, seen)
	}
}

func TestSilenceEndsWithTheContext(t *testing.T) {
	c, _ := guest(t, func(net.Conn, guestwire.Header) {})
	why := errors.New("boot limit")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(20*time.Millisecond, func() { cancel(why) })
	if _, err := c.Ping(ctx); !errors.Is(err, why) {
		t.Errorf("Ping = %v, want the context's cause", err)
	}
	if _, err := c.Exec(ctx, guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil); !errors.Is(err, why) {
		t.Errorf("Exec = %v, want the context's cause", err)
	}
	// Nobody even reads the channel.
	a, _ := net.Pipe()
	dead := guestclient.New(a)
	defer dead.Close()
	if _, err := dead.Ping(ctx); !errors.Is(err, why) {
		t.Errorf("Ping of nobody = %v, want the context's cause", err)
	}
}

func TestGarbageFromTheGuest(t *testing.T) {
	for _, junk := range []string{"\x01junk-that-is-no-frame", "\x00\x07............", strings.Repeat("\xff", 4096)} {
		a, b := net.Pipe()
		go func() {
			go io.Copy(io.Discard, b)
			io.WriteString(b, junk)
		}()
		c := guestclient.New(a)
		if _, err := c.Ping(ctxFor(t)); !errors.Is(err, guestclient.ErrGuestGone) {
			t.Errorf("after %q: Ping = %v, want ErrGuestGone", junk[:8], err)
		}
		c.Close()
	}
	// A session, and frames of nonsense in it.
	c, _ := guest(t, func(st net.Conn, _ guestwire.Header) { io.WriteString(st, "\x00\x00\x00\x05nonse"); st.Close() })
	if _, err := c.Ping(ctxFor(t)); err == nil || !strings.Contains(err.Error(), "decoding") {
		t.Errorf("nonsense: Ping = %v", err)
	}
}

// TestGuestOpensNothing: a hostile guest must not make the host hold streams.
func TestGuestOpensNothing(t *testing.T) {
	c, sess := guest(t, func(st net.Conn, _ guestwire.Header) {
		guestwire.Send(st, guestwire.Pong{})
		st.Close()
	})
	if _, err := c.Ping(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	st, err := sess.Open()
	if err != nil {
		return // it knows already that the host accepts none
	}
	st.SetDeadline(time.Now().Add(time.Minute))
	if _, err := st.Read(make([]byte, 1)); !errors.Is(err, yamux.ErrConnectionReset) {
		t.Errorf("a stream of the guest was met with %v, want a reset", err)
	}
}

// TestFromOpenerOverSplice runs requests through connections that are spliced
// onto the agent's streams, as a supervisor's clients do.
func TestFromOpenerOverSplice(t *testing.T) {
	c, _ := guest(t, func(st net.Conn, h guestwire.Header) {
		defer st.Close()
		switch h.Op {
		case guestwire.OpPing:
			guestwire.Send(st, guestwire.Pong{Execs: 3})
		case guestwire.OpDial:
			guestwire.Send(st, guestwire.Reply{})
			b, _ := io.ReadAll(st)
			st.Write(bytes.ToUpper(b))
		}
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				st, err := c.Open(context.Background())
				if err != nil {
					conn.Close()
					return
				}
				guestclient.Splice(conn, st)
			}()
		}
	}()
	far := guestclient.FromOpener(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	})
	if p, err := far.Ping(ctxFor(t)); err != nil || p.Execs != 3 {
		t.Errorf("Ping = %+v, %v", p, err)
	}
	conn, err := far.Dial(ctxFor(t), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "half-closed")
	guestclient.CloseWrite(conn)
	if b, err := io.ReadAll(conn); err != nil || string(b) != "HALF-CLOSED" {
		t.Errorf("answer %q, %v", b, err)
	}
}

// TestLastBytesOfADyingGuest: the guest ends while the host is writing; what
// it had said before must still arrive.
func TestLastBytesOfADyingGuest(t *testing.T) {
	a, b := net.Pipe()
	go func() {
		sess, err := yamux.Server(b, guestwire.MuxConfig())
		if err != nil {
			return
		}
		st, err := sess.Accept()
		if err != nil {
			return
		}
		var h guestwire.Header
		guestwire.Recv(st, &h)
		guestwire.Send(st, guestwire.ExecEvent{PID: 1})
		out, err := sess.Accept()
		if err != nil {
			return
		}
		guestwire.Recv(out, &h)
		io.WriteString(out, "the end is near")
		sess.Close()
	}()
	var got bytes.Buffer
	c := guestclient.New(a)
	defer c.Close()
	res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"x"}}, guestclient.Stdio{Out: &got}, nil)
	if !errors.Is(err, guestclient.ErrGuestGone) || got.String() != "the end is near" || res.PID != 1 {
		t.Errorf("Exec = %+v, %v, output %q", res, err, got.String())
	}
}

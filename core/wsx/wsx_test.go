package wsx_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"virtkit/core/wsx"
)

// serve runs fn for each WebSocket, over TLS 1.3, and gives its URL.
func serve(t *testing.T, fn func(ctx context.Context, c *wsx.Conn)) (url string, d wsx.Dialer) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := wsx.Accept(w, r)
		if err != nil {
			return
		}
		defer c.CloseNow()
		fn(r.Context(), c)
	})
	mux.HandleFunc("/full", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "full", http.StatusServiceUnavailable) })
	mux.Handle("/away", http.RedirectHandler("/ws", http.StatusTemporaryRedirect))
	s := httptest.NewUnstartedServer(mux)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS13}
	s.StartTLS()
	t.Cleanup(s.Close)
	conf := s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	conf.MinVersion = tls.VersionTLS13
	return "wss" + strings.TrimPrefix(s.URL, "https"), wsx.Dialer{TLS: conf}
}

// echo sends back what it gets.
func echo(ctx context.Context, c *wsx.Conn) {
	for {
		b, err := c.Read(ctx)
		if err != nil || c.Write(ctx, b) != nil {
			return
		}
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestEchoAndBinding(t *testing.T) {
	label := "EXPERIMENTAL-test"
	got := make(chan []byte, 1)
	url, d := serve(t, func(ctx context.Context, c *wsx.Conn) {
		key, err := c.TLS().ExportKeyingMaterial(label, nil, 32)
		if err != nil {
			t.Error(err)
		}
		got <- key
		echo(ctx, c)
	})
	ctx := within(t)
	c, err := d.Dial(ctx, url+"/ws", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	key, err := c.TLS().ExportKeyingMaterial(label, nil, 32)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(key, <-got) {
		t.Error("the two ends export different keys")
	}
	big := bytes.Repeat([]byte("x"), wsx.Limit)
	for _, m := range [][]byte{[]byte("{}"), big} {
		if err := c.Write(ctx, m); err != nil {
			t.Fatal(err)
		}
		b, err := c.Read(ctx)
		if err != nil || !bytes.Equal(b, m) {
			t.Fatalf("echo of %d bytes: %d bytes, %v", len(m), len(b), err)
		}
	}
	if err := c.Write(ctx, append(big, 'x')); !errors.Is(err, wsx.ErrTooBig) {
		t.Errorf("a message over the limit: %v", err)
	}
	if err := c.Write(ctx, []byte("still")); err != nil {
		t.Errorf("after one that was not sent: %v", err)
	}
}

// S40: no message that is allowed ends a connection, whatever its size.
func TestSizes(t *testing.T) {
	url, d := serve(t, echo)
	ctx := within(t)
	c, err := d.Dial(ctx, url+"/ws", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	for _, n := range []int{0, 1, 125, 126, 32<<10 - 1, 32 << 10, 32<<10 + 1, 65535, 65536, wsx.Limit - 1, wsx.Limit} {
		m := bytes.Repeat([]byte("x"), n)
		if err := c.Write(ctx, m); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if b, err := c.Read(ctx); err != nil || !bytes.Equal(b, m) {
			t.Fatalf("%d bytes came back as %d, %v", n, len(b), err)
		}
	}
}

// S40: what a frame announces is not what memory is taken for, and what comes
// of it beyond the limit ends the connection with its code.
func TestAnnounced(t *testing.T) {
	ends := make(chan error, 1)
	waiting := make(chan struct{})
	url, d := serve(t, func(ctx context.Context, c *wsx.Conn) {
		close(waiting)
		_, err := c.Read(ctx)
		ends <- err
	})
	var raw net.Conn
	d.Net = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		// The TLS is ours, so that what is written below the library is too.
		conf := d.TLS.Clone()
		conf.ServerName = "127.0.0.1"
		tc := tls.Client(c, conf)
		if err := tc.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		raw = tc
		return tc, nil
	}
	plain := d
	plain.TLS = nil
	if _, err := plain.Dial(within(t), "ws"+strings.TrimPrefix(url, "wss")+"/ws", nil); err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	<-waiting
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	frame := []byte{0x81, 0x80 | 127, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0} // text, masked with zeros, 1 GiB
	if _, err := raw.Write(frame); err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Write(bytes.Repeat([]byte("x"), 64<<10)); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if got := after.HeapSys - before.HeapSys; got > 64<<20 {
		t.Errorf("a frame that announces 1 GiB took %d bytes", got)
	}
	// More than the limit: the rest never comes. A reader that takes more waits for
	// it, and is ended by the end of the connection.
	raw.Write(bytes.Repeat([]byte("x"), wsx.Limit))
	select {
	case err := <-ends:
		if !errors.Is(err, wsx.ErrTooBig) {
			t.Errorf("the reader got %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the reader waits for more than the limit")
		raw.Close()
		<-ends
		return
	}
	// The close frame of the other side: opcode 8, code 1009.
	b := make([]byte, 4)
	raw.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(raw, b); err != nil || b[0] != 0x88 || int(b[2])<<8|int(b[3]) != wsx.TooBig {
		t.Errorf("it closed with % x, %v; want code %d", b, err, wsx.TooBig)
	}
}

func TestAnswersThatAreNone(t *testing.T) {
	url, d := serve(t, func(context.Context, *wsx.Conn) {})
	for path, want := range map[string]int{"/full": 503, "/away": 307, "/none": 404} {
		_, err := d.Dial(within(t), url+path, nil)
		if se, ok := errors.AsType[*wsx.StatusError](err); !ok || se.Status != want {
			t.Errorf("%s: %v, want status %d", path, err, want)
		}
	}
}

func TestCloseReachesThePeer(t *testing.T) {
	url, d := serve(t, func(ctx context.Context, c *wsx.Conn) {
		c.Close(wsx.Policy, "revoked: "+strings.Repeat("ä", 100))
	})
	c, err := d.Dial(within(t), url+"/ws", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	_, err = c.Read(within(t))
	if wsx.CloseCode(err) != wsx.Policy || !strings.HasPrefix(wsx.CloseReason(err), "revoked: ä") {
		t.Errorf("code %d, reason %q, %v", wsx.CloseCode(err), wsx.CloseReason(err), err)
	}
	if wsx.CloseCode(context.Canceled) != -1 {
		t.Error("an error that is no close has a code")
	}
}

func TestOversizedIsRefused(t *testing.T) {
	url, d := serve(t, func(ctx context.Context, c *wsx.Conn) {
		if _, err := c.Read(ctx); !errors.Is(err, wsx.ErrTooBig) {
			t.Errorf("a message over the limit: %v, want %v", err, wsx.ErrTooBig)
		}
	})
	c, err := d.Dial(within(t), url+"/ws", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	wsx.WriteAny(within(t), c, bytes.Repeat([]byte("x"), wsx.Limit+1), false)
	if _, err := c.Read(within(t)); wsx.CloseCode(err) != wsx.TooBig {
		t.Errorf("the peer was told %v, want code %d", err, wsx.TooBig)
	}
}

func TestBinaryIsRefused(t *testing.T) {
	url, d := serve(t, func(ctx context.Context, c *wsx.Conn) {
		if b, err := c.Read(ctx); err == nil {
			t.Errorf("a binary message was taken: %q", b)
		}
	})
	c, err := d.Dial(within(t), url+"/ws", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	wsx.WriteAny(within(t), c, []byte("{}"), true)
	if _, err := c.Read(within(t)); wsx.CloseCode(err) != 1003 {
		t.Errorf("the peer was told %v, want code 1003", err)
	}
}

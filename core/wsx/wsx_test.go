package wsx_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"net/http/httptest"
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
		for {
			b, err := c.Read(ctx)
			if err != nil {
				return
			}
			if err := c.Write(ctx, b); err != nil {
				return
			}
		}
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

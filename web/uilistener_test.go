package web_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"virtkit/core/logx"
	"virtkit/web"
)

// TestServeUI: TLS 1.3 alone, plain text on loopback alone, and so many
// connections.
func TestServeUI(t *testing.T) {
	cert, trust := certificate(t)
	serve := func(cert *web.Certificate) string {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		log := logx.Discard()
		go func() {
			done <- web.ServeUI(ctx, l, cert, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }), log)
		}()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return l.Addr().String()
	}
	secure := serve(cert)
	for v, want := range map[uint16]bool{tls.VersionTLS12: false, tls.VersionTLS13: true} {
		c := trust.Clone()
		c.MinVersion, c.MaxVersion = v, v
		conn, err := tls.Dial("tcp", secure, c)
		if (err == nil) != want {
			t.Errorf("%s: %v", tls.VersionName(v), err)
		}
		if err == nil {
			conn.Close()
		}
	}
	plain := serve(nil)
	resp, err := http.Get("http://" + plain + "/")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	var held []net.Conn
	turned := false
	for range web.MaxBrowsers + 8 {
		c, err := net.Dial("tcp", plain)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	// The last one is past the bound, whoever else is connected still: it is
	// closed at once, and not after the 10 s that it has for its headers.
	_ = held[len(held)-1].SetReadDeadline(time.Now().Add(8 * time.Second))
	if _, err := held[len(held)-1].Read(make([]byte, 1)); err != nil && (err == io.EOF || strings.Contains(err.Error(), "reset")) {
		turned = true
	}
	for _, c := range held {
		c.Close()
	}
	if !turned {
		t.Errorf("%d connections are held", len(held))
	}
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // it is refused at once
	defer cancel()
	if err := web.ServeUI(ctx, l, nil, http.NotFoundHandler(), logx.Discard()); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("plain text on all addresses: %v", err)
	}
}

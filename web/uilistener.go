package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// MaxBrowsers is how many connections of browsers there are at once; one more is
// closed.
const MaxBrowsers = 512

// ServeUI serves the web UI until ctx ends. cert is nil for plain text, which it
// refuses on a listener that is not on loopback.
func ServeUI(ctx context.Context, l net.Listener, cert *Certificate, handler http.Handler, slogger *slog.Logger) error {
	l = &gate{Listener: l, max: MaxBrowsers}
	if cert != nil {
		l = tls.NewListener(l, &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: cert.get, NextProtos: []string{"http/1.1"}})
	} else if a, ok := l.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return fault.Newf(fault.Usage, "a web UI without TLS is served on loopback alone, not on %s", l.Addr())
	}
	// The TLS handshake and a request's headers have HandshakeStep each; the
	// handler bounds a form's body and the answer.
	s := &http.Server{Handler: handler, ReadHeaderTimeout: wire.HandshakeStep, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, ErrorLog: log.New(logWriter{slogger.With(logx.Comp, "ui")}, "", 0)}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(l)
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serving the web UI: %w", err)
}

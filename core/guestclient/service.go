package guestclient

import (
	"bytes"
	"context"
	"fmt"
	"net"

	"virtkit/core/guestwire"
)

// ForService is open as programs of a job's guest use it: its streams are those
// of the service of that name. The Client of such an Opener can Exec, and
// nothing else.
func ForService(open Opener, name string) Opener {
	return func(ctx context.Context) (net.Conn, error) {
		c, err := open(ctx)
		if err != nil {
			return nil, err
		}
		return &serviceConn{Conn: c, name: name}, nil
	}
}

// serviceConn puts the header of its first frame into a request for a service.
type serviceConn struct {
	net.Conn
	name string
	sent bool
}

func (s *serviceConn) Write(p []byte) (int, error) {
	if s.sent {
		return s.Conn.Write(p)
	}
	// guestwire.Open writes a header in one piece.
	var h guestwire.Header
	if err := guestwire.Recv(bytes.NewReader(p), &h); err != nil {
		return 0, fmt.Errorf("asking for service %s: %w", s.name, err)
	}
	s.sent = true
	if err := guestwire.Open(s.Conn, guestwire.OpService, guestwire.Service{Name: s.name, Request: h}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// CloseWrite ends one direction, as an Opener's connections do.
func (s *serviceConn) CloseWrite() error { return CloseWrite(s.Conn) }

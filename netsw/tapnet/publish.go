package tapnet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// maxForwarded bounds a port's connections that come in by forwards.
const maxForwarded = 4096

// forwards4 are the listeners of one guest and the connections they took.
type forwards4 struct {
	mu     sync.Mutex
	closed bool
	open   map[io.Closer]struct{}
}

func (s *forwards4) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.open) >= maxForwarded {
		return false
	}
	if s.open == nil {
		s.open = map[io.Closer]struct{}{}
	}
	s.open[c] = struct{}{}
	return true
}

func (s *forwards4) drop(c io.Closer) {
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	c.Close()
}

func (s *forwards4) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.open {
		c.Close()
	}
	clear(s.open)
}

// forward is one published port.
type forward struct {
	s *forwards4
	l net.Listener
}

// Close stops listening; connections that stand go on.
func (f *forward) Close() error { f.s.drop(f.l); return nil }

// Forward listens for TCP on the host and hands each connection to a port of
// the guest, which sees the host's end of its device as the peer. hostPort 0
// is any free one; what it got is returned.
func (p *Port) Forward(hostAddr string, hostPort, guestPort int) (int, io.Closer, error) {
	guest, err := netip.ParsePrefix(p.guest.Addr)
	if err != nil {
		return 0, nil, fmt.Errorf("the guest's address: %w", err)
	}
	at := net.JoinHostPort(hostAddr, strconv.Itoa(hostPort))
	l, err := net.Listen("tcp", at)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return 0, nil, fault.Newf(fault.Conflict, "port %s of the host is taken", at).
			Hint("choose another one, or 0 for any that is free; ss -ltnp shows who has it").Because(err)
	case err != nil:
		return 0, nil, fmt.Errorf("listening on %s: %w", at, err)
	}
	if !p.forwards.add(l) {
		l.Close()
		return 0, nil, fault.Newf(fault.Conflict, "device %s is closing", p.name)
	}
	to := netip.AddrPortFrom(guest.Addr(), uint16(guestPort)).String()
	go p.forwards.serve(l, to)
	return l.Addr().(*net.TCPAddr).Port, &forward{&p.forwards, l}, nil
}

func (s *forwards4) serve(l net.Listener, to string) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(50 * time.Millisecond) // out of descriptors: do not spin
			continue
		}
		if !s.add(c) {
			c.Close()
			continue
		}
		go func() {
			defer s.drop(c)
			s.join(c.(*net.TCPConn), to)
		}()
	}
}

// join carries one connection, each direction to its own end.
func (s *forwards4) join(c *net.TCPConn, to string) {
	d, err := net.DialTimeout("tcp", to, 30*time.Second)
	if err != nil {
		c.SetLinger(0) // the nearest thing to a refused connection
		return
	}
	if !s.add(d) {
		d.Close()
		return
	}
	defer s.drop(d)
	g := d.(*net.TCPConn)
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(g, c)
		g.CloseWrite()
	}()
	io.Copy(c, g)
	c.CloseWrite()
	<-done
}

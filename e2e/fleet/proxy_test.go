package fleet_test

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy passes connections on until it is cut, each piece after delay.
type proxy struct {
	l     net.Listener
	delay atomic.Int64 // nanoseconds

	mu   sync.Mutex
	to   string
	cut  bool
	open map[net.Conn]bool
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, to: to, open: map[net.Conn]bool{}}
	t.Cleanup(func() { l.Close(); p.set(true) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.pass(c)
		}
	}()
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	p.open[c] = true
	return true
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	p.mu.Lock()
	to := p.to
	p.mu.Unlock()
	far, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer far.Close()
	if !p.keep(c) || !p.keep(far) {
		return
	}
	done := make(chan struct{}, 2)
	for _, d := range [][2]net.Conn{{c, far}, {far, c}} {
		go func() { _ = p.copy(d[0], d[1]); done <- struct{}{} }()
	}
	<-done
}

func (p *proxy) copy(to, from net.Conn) error {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		time.Sleep(time.Duration(p.delay.Load()))
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return errors.Join(err, werr)
		}
	}
}

// lead has connections from now on go elsewhere.
func (p *proxy) lead(to string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
}

// set cuts the connections and refuses new ones, or lets them pass again.
func (p *proxy) set(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	for c := range p.open {
		c.Close()
		delete(p.open, c)
	}
}

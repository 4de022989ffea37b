package agent_test

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent"
	"virtkit/agent/agenttest"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// once is a listener with one connection.
type once struct {
	conn chan net.Conn
	done chan struct{}
	end  sync.Once
}

func (l *once) Accept() (net.Conn, error) {
	select {
	case c := <-l.conn:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *once) Close() error   { l.end.Do(func() { close(l.done) }); return nil }
func (l *once) Addr() net.Addr { return &net.UnixAddr{} }

// gated is a connection whose owner reads nothing while the gate is shut.
type gated struct {
	net.Conn
	mu   sync.Mutex
	gate chan struct{}
}

func (g *gated) shut(gate chan struct{}) { g.mu.Lock(); g.gate = gate; g.mu.Unlock() }

func (g *gated) Read(p []byte) (int, error) {
	g.mu.Lock()
	gate := g.gate
	g.mu.Unlock()
	<-gate
	// What comes while the gate is shut stays with the kernel, where it can be
	// counted: no read is under way that would take it.
	if err := g.readable(); err != nil {
		return 0, err
	}
	g.mu.Lock()
	gate = g.gate
	g.mu.Unlock()
	<-gate
	return g.Conn.Read(p)
}

// readable waits for bytes.
func (g *gated) readable() error {
	rc, err := g.Conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return err != nil || n > 0
	})
}

// unread is how many bytes lie with the kernel; -1 = unknown.
func (g *gated) unread() int {
	n := -1
	if rc, err := g.Conn.(*net.UnixConn).SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) {
			if v, err := unix.IoctlGetInt(int(fd), unix.SIOCINQ); err == nil {
				n = v
			}
		})
	}
	return n
}

// ending is a System whose Shutdown tells what its host had not read when the
// machine would have ended.
type ending struct {
	host *gated
	left chan int
}

func (e *ending) Setup(*guestwire.Setup, func(string)) ([]string, error) { return nil, nil }
func (e *ending) Resume(*guestwire.Resume) error                         { return nil }
func (e *ending) Shutdown(_ *guestwire.Shutdown, reply func()) error {
	reply()
	e.left <- e.host.unread()
	return nil
}

// serveEnding serves host's other end with an ending.
func serveEnding(t *testing.T) (*gated, *ending, *guestclient.Client) {
	ours, theirs := agenttest.Socketpair(t)
	conn, err := net.FileConn(theirs)
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	open := make(chan struct{})
	close(open)
	host := &gated{Conn: ours, gate: open}
	sys := &ending{host: host, left: make(chan int, 1)}
	ln := &once{conn: make(chan net.Conn, 1), done: make(chan struct{})}
	ln.conn <- conn
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- agent.Serve(ctx, ln, agent.Options{System: sys, Log: os.Stderr}) }()
	c := guestclient.New(host)
	t.Cleanup(func() {
		c.Close()
		cancel()
		<-served
	})
	return host, sys, c
}

// A guest ends when its host has read what its programs wrote, and the answer
// to the shutdown: what lies in the queues of its devices goes with it.
func TestShutdownIsHeard(t *testing.T) {
	host, sys, c := serveEnding(t)
	if _, err := c.Hello(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	const size = 100_000
	gate := make(chan struct{})
	host.shut(gate)
	got := make(chan int64, 1)
	go func() {
		r, w := io.Pipe()
		go func() {
			_, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"head", "-c", "100000", "/dev/zero"}}, guestclient.Stdio{Out: w}, nil)
			w.CloseWithError(err)
		}()
		n, err := io.Copy(io.Discard, r)
		if err != nil {
			t.Errorf("Exec: %v", err)
		}
		got <- n
	}()
	eventually(t, "the program's output at the host", func() bool { return host.unread() > 0 })
	time.AfterFunc(100*time.Millisecond, func() { close(gate) })
	if err := c.Shutdown(ctxFor(t), guestwire.Shutdown{}); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if n := <-sys.left; n != 0 {
		t.Errorf("the guest ended with %d bytes unread by its host", n)
	}
	if n := <-got; n != size {
		t.Errorf("%d bytes of %d arrived", n, size)
	}
}

// A host that does not read at all is not waited for.
func TestShutdownUnheard(t *testing.T) {
	host, sys, c := serveEnding(t)
	if _, err := c.Hello(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	host.shut(gate)
	told := make(chan error, 1)
	go func() { told <- c.Shutdown(ctxFor(t), guestwire.Shutdown{}) }()
	if n := <-sys.left; n == 0 {
		t.Error("the host had read the answer behind its gate")
	}
	close(gate)
	if err := <-told; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

package netsw_test

import (
	"net"
	"strings"
	"sync"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"virtkit/netsw"
	"virtkit/netsw/netswtest"
)

// pause has the guest read nothing of its link until the returned function is
// called, as a paused VM does; what it sends it still sends.
func pause(t *testing.T, g *netswtest.Guest) (resume func()) {
	paused := make(chan struct{})
	var once sync.Once
	stop := g.Tap(func([]byte) { once.Do(func() { <-paused }) })
	resume = sync.OnceFunc(func() {
		stop()
		close(paused)
	})
	t.Cleanup(resume) // or a test that failed would wait for the guest
	return resume
}

// dialMany connects that often, some at a time.
func dialMany(t *testing.T, g *netswtest.Guest, to string, n int) []*gonet.TCPConn {
	t.Helper()
	conns := make([]*gonet.TCPConn, n)
	ctx := t.Context()
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Go(func() {
			for i := k; i < n; i += 8 {
				c, err := g.Dial(ctx, to)
				if err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
				conns[i] = c
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return conns
}

// Nothing repeats a reset to a guest that says nothing itself: it has to come
// even when there were more of them than the link had room for.
func TestFullLinkKeepsResets(t *testing.T) {
	const n = 1200
	release := make(chan struct{})
	port := serve(t, func(c *net.TCPConn) {
		<-release
		_ = c.SetLinger(0)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	conns := dialMany(t, g, at(sw, port), n)
	eventually(t, "the flows stand", func() bool { return sw.Stats().OpenFlows == n })
	resume := pause(t, g)
	close(release)
	eventually(t, "the flows end", func() bool { return sw.Stats().OpenFlows == 0 })
	resume()
	var wg sync.WaitGroup
	missed := make(chan int, n)
	for i, c := range conns {
		wg.Go(func() {
			if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
				missed <- i
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-within(t).Done():
		t.Errorf("not every connection was reset within %s", limit)
		g.Close() // lets the others go
		<-done
		return
	}
	if len(missed) > 0 {
		t.Errorf("%d connections of %d ended otherwise than by a reset", len(missed), n)
	}
}

package netgen_test

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/logx"
	"virtkit/e2e/netgen"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// link is a generator on a port of a switch.
func link(t *testing.T, mtu int) *netgen.Link {
	t.Helper()
	sw, err := netsw.New(netsw.Config{HostLoopback: true, Log: logx.ForTest(t), Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sw.Close() })
	p, err := sw.AddPort(netsw.PortConfig{Name: "a", Hostname: "n0.bench.test"})
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(p.File().Fd()))
	if err != nil {
		t.Fatal(err)
	}
	p.CloseFile()
	mac, err := net.ParseMAC(p.MAC())
	if err != nil {
		t.Fatal(err)
	}
	l, err := netgen.Open(fd, netgen.Config{MAC: frame.MAC(mac), Addr: p.Addr(), Gateway: sw.Gateway(), Host: sw.Gateway(), MTU: mtu})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func serve(t *testing.T, handle func(net.Conn)) int {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
	return ln.Addr().(*net.TCPAddr).Port
}

func TestTransfers(t *testing.T) {
	var taken atomic.Int64
	source := serve(t, func(c net.Conn) {
		for b := make([]byte, 64<<10); ; {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	sink := serve(t, func(c net.Conn) {
		for b := make([]byte, 64<<10); ; {
			n, err := c.Read(b)
			if taken.Add(int64(n)); err != nil {
				return
			}
		}
	})
	for _, mtu := range []int{1500, netsw.MTU} {
		l := link(t, mtu)
		const size = 16 << 20
		if r, err := l.Receive(source, size); err != nil || r.Count < size {
			t.Errorf("MTU %d: Receive() = %+v, %v, want %d bytes", mtu, r, err, size)
		}
		// The last part of a segment is not sent.
		if r, err := l.Send(sink, size, taken.Load); err != nil || r.Count > size || r.Count < size-int64(mtu) {
			t.Errorf("MTU %d: Send() = %+v, %v, want about %d bytes", mtu, r, err, size)
		}
	}
}

func TestRates(t *testing.T) {
	var ends atomic.Int64
	one := serve(t, func(c net.Conn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err == nil {
			_, _ = c.Write(b[:])
			ends.Add(1)
		}
	})
	l := link(t, netsw.MTU)
	if r, err := l.Connect([]int{one}, 100, 8); err != nil || r.Count != 100 || ends.Load() != 100 {
		t.Errorf("Connect() = %+v, %v, the server had %d, want 100", r, err, ends.Load())
	}
	// The first name is one of the switch's own; the second has no resolver.
	if r, err := l.Ask(l.Gateway(53), 1, 1); err != nil || r.Count != 1 {
		t.Errorf("Ask() = %+v, %v, want one answer", r, err)
	}
}

// What nobody answers is an error that says what was waited for.
func TestRefused(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	_, err = link(t, 1500).Receive(port, 1)
	if err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("Receive(closed port) = %v, want a reset", err)
	}
}

package netsw_test

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"testing"
	"time"

	"virtkit/core/logx"
	"virtkit/netsw"
	"virtkit/netsw/netswtest"
)

// limit is how long anything here may take; only a failure waits for it.
const limit = time.Minute

// open makes a switch that is closed, and checked for left goroutines, when
// the test ends.
func open(t testing.TB, cfg netsw.Config) *netsw.Switch {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		for end := time.Now().Add(limit); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				buf := make([]byte, 1<<20)
				t.Errorf("%d goroutines were there before, %d after:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
				return
			}
		}
	})
	if len(cfg.Upstreams) == 0 {
		cfg.Upstreams = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9")}
	}
	if cfg.Log == nil {
		cfg.Log = logx.ForTest(t)
	}
	sw, err := netsw.New(cfg)
	if err != nil {
		t.Fatalf("New() = %v", err)
	}
	t.Cleanup(func() {
		if err := sw.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return sw
}

// join adds a port and a guest on it.
func join(t testing.TB, sw *netsw.Switch, name string, aliases ...string) (*netsw.Port, *netswtest.Guest) {
	t.Helper()
	p, err := sw.AddPort(netsw.PortConfig{Name: name, Hostname: name, Aliases: aliases})
	if err != nil {
		t.Fatalf("AddPort(%q) = %v", name, err)
	}
	g := netswtest.New(t, p.File(), p.Net())
	p.CloseFile()
	return p, g
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls cond.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, limit)
		}
	}
}

// serve accepts on the host's loopback and runs handle for each connection.
func serve(t testing.TB, handle func(*net.TCPConn)) (port int) {
	t.Helper()
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.AcceptTCP()
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

// echoUDP answers each datagram on the host's loopback with itself.
func echoUDP(t testing.TB) (port int) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).Port
}

// at is the gateway's address with a port.
func at(sw *netsw.Switch, port int) string {
	return net.JoinHostPort(sw.Gateway().String(), strconv.Itoa(port))
}

// pattern is n bytes that tell any other place in them apart.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + i>>16*29)
	}
	return b
}

func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: got %d bytes that differ from the %d wanted", what, len(got), len(want))
	}
}

// hostAddr is an address of this host that is not loopback.
func hostAddr(t testing.TB) netip.Addr {
	t.Helper()
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() {
			if ip, ok := netip.AddrFromSlice(n.IP.To4()); ok {
				return ip
			}
		}
	}
	t.Skip("needs an address on an interface other than lo")
	return netip.Addr{}
}

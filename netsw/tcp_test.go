package netsw_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
)

func TestTCPBothWays(t *testing.T) {
	const size = 24 << 20
	want := pattern(size)
	got := make(chan []byte, 1)
	port := serve(t, func(c *net.TCPConn) {
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = c.Write(want)
			_ = c.CloseWrite()
		})
		b, _ := io.ReadAll(c)
		got <- b
		wg.Wait() // either direction may be done first
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "build")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		_, _ = c.Write(want)
		_ = c.CloseWrite()
	}()
	down, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("downloading: %v", err)
	}
	same(t, "download", down, want)
	select {
	case up := <-got:
		same(t, "upload", up, want)
	case <-time.After(limit):
		t.Fatal("upload did not arrive")
	}
	eventually(t, fmt.Sprintf("%d bytes of one flow counted each way", size), func() bool {
		s := p.Stats()
		return s.Sent == size && s.Received == size && s.Flows == 1
	})
}

// Each direction can end alone, and the other goes on.
func TestTCPHalfClose(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) {
		b, err := io.ReadAll(c) // ends with the guest's half-close
		_, _ = fmt.Fprintf(c, "%s %v", b, err)
	})
	early := serve(t, func(c *net.TCPConn) {
		_ = c.CloseWrite() // the outside ends first
		b, _ := io.ReadAll(c)
		if string(b) == "still talking" {
			_ = c.SetLinger(-1)
			return
		}
		_ = c.SetLinger(0)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "build")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("all of it"))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "all of it <nil>" {
		t.Errorf("answer after half-close = %q, %v", b, err)
	}
	c.Close()

	if c, err = g.Dial(within(t), at(sw, early)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("Read after the outside's half-close = %d, %v, want 0, EOF", n, err)
	}
	if _, err := c.Write([]byte("still talking")); err != nil {
		t.Fatalf("Write after the outside's half-close = %v", err)
	}
	_ = c.CloseWrite()
	c.Close()
	eventually(t, "flows end", func() bool { return sw.Stats().OpenFlows == 0 })
}

func TestTCPRefusedIsReset(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "build")
	_, err = g.Dial(within(t), at(sw, port))
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("Dial(closed port) = %v, want connection refused", err)
	}
}

// A reset of either side reaches the other as a reset, not as a proper end.
func TestTCPReset(t *testing.T) {
	accepted := make(chan *net.TCPConn, 1)
	port := serve(t, func(c *net.TCPConn) {
		_ = c.SetLinger(0) // resets at Close
		_, _ = io.ReadFull(c, make([]byte, 4))
	})
	watch := serve(t, func(c *net.TCPConn) {
		accepted <- c
		_, err := c.Read(make([]byte, 1))
		if err != nil && strings.Contains(err.Error(), "reset") {
			accepted <- nil
		}
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "build")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("ping"))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("Read after the outside's reset = %v, want an error", err)
	}
	c.Close()

	if _, err = g.Dial(within(t), at(sw, watch)); err != nil {
		t.Fatal(err)
	}
	<-accepted
	if _, err := p.Replug(); err != nil { // the guest is gone: its flows are reset
		t.Fatal(err)
	}
	select {
	case <-accepted:
	case <-time.After(limit):
		t.Error("the outside saw no reset when the guest went away")
	}
}

// A receiver that does not read stops its sender, not the switch.
func TestTCPBackpressure(t *testing.T) {
	release := make(chan struct{})
	total := make(chan int64, 1)
	port := serve(t, func(c *net.TCPConn) {
		<-release
		n, _ := io.Copy(io.Discard, c)
		total <- n
	})
	fast := serve(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "build")
	slow, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20
	written := make(chan error, 1)
	go func() {
		_, err := slow.Write(make([]byte, size))
		_ = slow.CloseWrite()
		written <- err
	}()
	// Wait until it is stuck, then see that others are not.
	var last uint64
	eventually(t, "sender stuck", func() bool {
		s := p.Stats().Sent
		stuck := s == last && s > 0
		last = s
		time.Sleep(20 * time.Millisecond)
		return stuck
	})
	if last >= size {
		t.Fatalf("%d bytes went to a receiver that does not read", last)
	}
	c, err := g.Dial(within(t), at(sw, fast))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("hello"))
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Errorf("echo beside a stuck flow: %v", err)
	}
	c.Close()
	close(release)
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	if n := <-total; n != size {
		t.Errorf("receiver got %d bytes, want %d", n, size)
	}
	slow.Close()
}

func TestTCPManyAtOnce(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "build")
	ctx := within(t)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			c, err := g.Dial(ctx, at(sw, port))
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				return
			}
			defer c.Close()
			want := pattern(100<<10 + i)
			go func() {
				_, _ = c.Write(want)
				_ = c.CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || len(got) != len(want) {
				t.Errorf("connection %d: got %d bytes, %v, want %d", i, len(got), err, len(want))
			}
		})
	}
	wg.Wait()
	eventually(t, "flows end", func() bool { return sw.Stats().OpenFlows == 0 })
	if n := sw.Stats().Flows; n != 64 {
		t.Errorf("Flows = %d, want 64", n)
	}
}

// What cannot be reached says so instead of hanging. 240/4 is nobody's, and
// TEST-NET-1 is unreachable or silent, by the host's routes.
func TestHostIsRefused(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("secret")) })
	own := hostAddr(t)
	ln, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			t.Error("a connection of the guest reached the host")
			c.Close()
		}
	}()
	wild := ln.Addr().(*net.TCPAddr).Port
	sw := open(t, netsw.Config{})
	p, g := join(t, sw, "build")
	for _, to := range []string{
		at(sw, port),
		at(sw, wild),
		fmt.Sprintf("%s:%d", own, wild),
		"169.254.169.254:80",
		"10.200.0.77:80",
	} {
		if strings.HasPrefix(to, "10.200.0.77") {
			continue // no such guest: ARP says so, below
		}
		if _, err := g.Dial(within(t), to); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("Dial(%s) = %v, want refused", to, err)
		}
	}
	if n := p.Stats().Dropped(netsw.DropDenied); n != 4 {
		t.Errorf("denied = %d, want 4", n)
	}
	if p.Stats().Flows != 0 || p.Stats().Sent != 0 {
		t.Errorf("Stats() = %+v, want no flow", p.Stats())
	}
}

func TestHostPortsOpenOnlyThese(t *testing.T) {
	a := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("yes")) })
	b := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("no")) })
	sw := open(t, netsw.Config{HostPorts: []int{a}})
	_, g := join(t, sw, "build")
	c, err := g.Dial(within(t), at(sw, a))
	if err != nil {
		t.Fatalf("Dial(opened port) = %v", err)
	}
	if got, _ := io.ReadAll(c); string(got) != "yes" {
		t.Errorf("opened port says %q", got)
	}
	c.Close()
	if _, err := g.Dial(within(t), at(sw, b)); err == nil {
		t.Error("Dial(other port) worked, want refused")
	}
}

func TestPolicyIsAsked(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) {})
	asked := make(chan policy.Flow, 8)
	sw := open(t, netsw.Config{HostLoopback: true, Policy: policy.Func(func(f policy.Flow) policy.Verdict {
		asked <- f
		return policy.Verdict{Layer: "job", Reason: "not listed"}
	})})
	p, g := join(t, sw, "db")
	if _, err := g.Dial(within(t), at(sw, port)); err == nil {
		t.Error("Dial worked against the policy")
	}
	f := <-asked
	if f.Port != "db" || f.Proto != policy.TCP || f.Dst.String() != at(sw, port) {
		t.Errorf("policy was asked about %+v", f)
	}
	if p.Stats().Dropped(netsw.DropDenied) != 1 {
		t.Errorf("Stats() = %+v, want one denied", p.Stats())
	}
}

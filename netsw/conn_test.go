package netsw_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

const (
	flagFIN = 1
	flagPSH = 8
)

// talker is a guest whose TCP is spoken by the test, segment by segment.
type talker struct {
	t        *testing.T
	g        *netswtest.Guest
	src      uint16
	dst      netip.AddrPort
	seq, ack uint32 // next to send, next expected
	wnd      uint16
	stamps   bool   // say timestamps
	echo     uint32 // of the switch's, in the next segment
	in       chan spoken
}

// spoken is a segment of the switch's.
type spoken struct {
	seq, ack uint32
	flags    byte
	wnd      uint16
	stamp    uint32 // 0 = none
	data     []byte
}

// talk connects to a port of the host's, with a window to begin with and no
// options but an MSS of 1000.
func talk(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, port int, wnd uint16) *talker {
	t.Helper()
	return talkMSS(t, sw, g, port, wnd, 1000)
}

func talkMSS(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, port int, wnd, mss uint16) *talker {
	t.Helper()
	k := &talker{t: t, g: g, src: 4000, dst: netip.MustParseAddrPort(at(sw, port)), seq: 100, wnd: wnd, in: make(chan spoken, 1<<14)}
	k.hello(mss)
	return k
}

// hello connects.
func (k *talker) hello(mss uint16) {
	t, g, wnd := k.t, k.g, k.wnd
	t.Helper()
	g.Deafen()
	t.Cleanup(g.Tap(func(b []byte) {
		e, _ := frame.ParseEth(b)
		ip, ok := frame.ParseIPv4(e.Payload)
		if !ok || ip.Proto != frame.ProtoTCP {
			return
		}
		if frame.Checksum(ip.Payload, frame.Pseudo(ip.Src, ip.Dst, frame.ProtoTCP, len(ip.Payload))) != 0 || frame.Checksum(ip.Header, 0) != 0 {
			t.Error("a segment with a wrong checksum")
		}
		p := ip.Payload
		off := int(p[12]>>4) * 4
		s := spoken{seq: binary.BigEndian.Uint32(p[4:]), ack: binary.BigEndian.Uint32(p[8:]), flags: p[13], wnd: binary.BigEndian.Uint16(p[14:]), data: bytes.Clone(p[off:])}
		if off == 32 && bytes.HasPrefix(p[20:], []byte{1, 1, 8, 10}) {
			s.stamp = binary.BigEndian.Uint32(p[24:])
		}
		k.in <- s
	}))
	f := tcpFrame(g, k.src, k.dst, k.seq, 0, flagSYN)
	f[frame.EthSize+frame.IPv4Size+12] = 0x60
	binary.BigEndian.PutUint16(f[frame.EthSize+frame.IPv4Size+14:], wnd)
	f = append(f, 2, 4, byte(mss>>8), byte(mss))
	if k.stamps {
		f[frame.EthSize+frame.IPv4Size+12] = 0x90
		f = append(f, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0)
	}
	binary.BigEndian.PutUint16(f[frame.EthSize+2:], uint16(len(f)-frame.EthSize))
	if err := g.Send(f); err != nil {
		t.Fatal(err)
	}
	s := k.next("SYN-ACK", func(s spoken) bool { return s.flags == flagSYN|flagACK })
	k.seq++
	k.ack = s.seq + 1
	k.say(flagACK, "")
}

// say sends a segment and steps over what it carries.
func (k *talker) say(flags byte, data string) {
	k.t.Helper()
	k.sayAt(k.seq, flags, data)
	k.seq += uint32(len(data))
	if flags&flagFIN != 0 {
		k.seq++
	}
}

func (k *talker) sayAt(seq uint32, flags byte, data string) {
	k.t.Helper()
	f := tcpFrame(k.g, k.src, k.dst, seq, k.ack, flags)
	binary.BigEndian.PutUint16(f[frame.EthSize+frame.IPv4Size+14:], k.wnd)
	if k.stamps {
		f[frame.EthSize+frame.IPv4Size+12] = 0x80
		f = binary.BigEndian.AppendUint32(append(f, 1, 1, 8, 10, 0, 0, 0, 1), k.echo)
	}
	f = append(f, data...)
	binary.BigEndian.PutUint16(f[frame.EthSize+2:], uint16(len(f)-frame.EthSize))
	if err := k.g.Send(f); err != nil {
		k.t.Fatal(err)
	}
}

// next waits for a segment that match accepts; others are passed over.
func (k *talker) next(what string, match func(spoken) bool) spoken {
	k.t.Helper()
	end := time.After(limit)
	for {
		select {
		case s := <-k.in:
			if match(s) {
				return s
			}
		case <-end:
			k.t.Fatalf("no %s within %s", what, limit)
		}
	}
}

// What a guest loses it is sent again: after three acknowledgements that say
// so, and when none can be said, after a while.
func TestConnSendsAgain(t *testing.T) {
	want := pattern(100 << 10)
	port := serve(t, func(c *net.TCPConn) {
		_, _ = c.Write(want)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 65535)
	first := k.ack
	lost := map[uint32]bool{}
	var got []byte
	for ended := false; !ended; {
		s := k.next("data", func(s spoken) bool { return len(s.data) > 0 || s.flags&flagFIN != 0 })
		at := s.seq - first
		last := int(at)+len(s.data) == len(want)
		if (at/1000%7 == 3 || last) && !lost[at] { // each of those once
			lost[at] = true
			continue
		}
		if s.seq == k.ack {
			got = append(got, s.data...)
			k.ack += uint32(len(s.data))
			if s.flags&flagFIN != 0 {
				k.ack++
				ended = true
			}
		}
		k.say(flagACK, "")
	}
	same(t, "what came in the end", got, want)
	if len(lost) < 10 {
		t.Errorf("%d segments were lost, want many", len(lost))
	}
	k.say(flagFIN|flagACK, "")
	k.next("last acknowledgement", func(s spoken) bool { return s.ack == k.seq })
	eventually(t, "the flow ends", func() bool { return sw.Stats().OpenFlows == 0 })
}

// A guest may ask for segments as small as it likes: they are no smaller than
// some, and come all the same.
func TestConnSmallestSegments(t *testing.T) {
	want := pattern(300 << 10)
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Write(want) })
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talkMSS(t, sw, g, port, 65535, 1)
	var got []byte
	for len(got) < len(want) {
		s := k.next("data", func(s spoken) bool { return len(s.data) > 0 })
		if s.seq == k.ack {
			got = append(got, s.data...)
			k.ack += uint32(len(s.data))
			k.say(flagACK, "")
		}
	}
	same(t, "what came", got, want)
}

// A guest is sent no more than it said it takes; a closed window is probed, as
// the word that it has opened may have been lost.
func TestConnKeepsToTheWindow(t *testing.T) {
	want := pattern(2500)
	port := serve(t, func(c *net.TCPConn) {
		_, _ = c.Write(want)
		_, _ = io.Copy(io.Discard, c)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 900)
	var got []byte
	edge := k.ack + 900
	for len(got) < len(want) {
		s := k.next("data", func(s spoken) bool { return len(s.data) > 0 })
		if int32(s.seq+uint32(len(s.data))-edge) > 0 {
			t.Fatalf("%d bytes past the window", s.seq+uint32(len(s.data))-edge)
		}
		if s.seq != k.ack {
			continue
		}
		got = append(got, s.data...)
		k.ack += uint32(len(s.data))
		if len(got) == len(want) {
			break
		}
		k.wnd, edge = 0, k.ack
		k.say(flagACK, "")
		k.next("probe", func(s spoken) bool {
			if len(s.data) > 0 && int32(s.seq+uint32(len(s.data))-edge) > 0 {
				t.Fatalf("%d bytes into a closed window", len(s.data))
			}
			return s.seq == k.ack-1 && len(s.data) == 0
		})
		k.wnd, edge = 900, k.ack+900
		k.say(flagACK, "") // the answer to the probe
	}
	same(t, "what came", got, want)
}

// Whatever the order and the overlaps of a guest's segments, the outside gets
// its stream once.
func TestConnPutsTheStreamTogether(t *testing.T) {
	got := make(chan string, 1)
	port := serve(t, func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		if err != nil {
			b = append(b, err.Error()...)
		}
		got <- string(b)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 65535)
	start := k.seq
	says := func(s spoken) bool { return s.ack == k.seq && s.flags == flagACK }
	k.say(flagACK|flagPSH, "one ")
	k.next("acknowledgement", says)
	k.sayAt(start, flagACK, "one ")       // again
	k.sayAt(start+2, flagACK, "e two ")   // half of it again
	k.sayAt(start+100, flagACK, "beyond") // something is missing
	k.seq = start + 8
	k.next("acknowledgement", says)
	k.sayAt(start+8, flagACK|flagFIN, "three")
	k.seq += 6
	k.next("acknowledgement of the end", says)
	k.sayAt(k.seq-1, flagACK|flagFIN, "") // again
	k.next("acknowledgement of the end, again", says)
	select {
	case s := <-got:
		if s != "one two three" {
			t.Errorf("the outside got %q", s)
		}
	case <-time.After(limit):
		t.Fatal("the outside saw no end")
	}
	if n := p.Stats().Sent; n != 13 {
		t.Errorf("Sent = %d, want 13", n)
	}
}

// A reset counts at the next expected byte alone (RFC 5961); elsewhere in the
// window it is asked about, and a SYN is too.
func TestConnIsNotResetByGuesses(t *testing.T) {
	end := make(chan error, 1)
	port := serve(t, func(c *net.TCPConn) {
		_, err := c.Read(make([]byte, 1))
		end <- err
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 65535)
	eventually(t, "the flow stands", func() bool { return sw.Stats().OpenFlows == 1 })
	challenge := func(s spoken) bool { return s.flags == flagACK && s.ack == k.seq }
	k.sayAt(k.seq+1000, flagRST, "")
	k.next("challenge of a reset", challenge)
	k.sayAt(k.seq-5, flagSYN, "")
	k.next("challenge of a SYN", challenge)
	k.sayAt(k.seq+1<<24, flagRST, "") // outside: nothing
	k.sayAt(k.seq-1, flagACK, "")     // a probe of the guest's
	k.next("answer to the probe", challenge)
	select {
	case err := <-end:
		t.Fatalf("the connection ended: %v", err)
	default:
	}
	k.sayAt(k.seq, flagRST, "")
	select {
	case err := <-end:
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the outside saw %v, want a reset", err)
		}
	case <-time.After(limit):
		t.Error("the outside saw nothing of the reset")
	}
	eventually(t, "the flow ends", func() bool { return sw.Stats().OpenFlows == 0 })
}

// What a guest sends beyond the window is not kept: the sum of what is held is
// what was announced.
func TestConnHoldsNoMoreThanItSaid(t *testing.T) {
	release, got := make(chan struct{}), make(chan int64, 1)
	port := serve(t, func(c *net.TCPConn) {
		<-release
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 65535)
	piece := strings.Repeat("x", 60000)
	var closed spoken
	for closed.flags == 0 {
		k.say(flagACK, piece)
		s := k.next("acknowledgement", func(s spoken) bool { return s.flags == flagACK })
		k.seq = s.ack // what was not taken is sent again
		if s.wnd == 0 {
			closed = s
		}
	}
	sent := k.seq - 101
	k.sayAt(k.seq, flagACK, "beyond")
	if s := k.next("acknowledgement", func(s spoken) bool { return s.flags == flagACK }); s.ack != k.seq || s.wnd != 0 {
		t.Errorf("bytes beyond the window were answered with %+v", s)
	}
	close(release)
	s := k.next("word of an open window", func(s spoken) bool { return s.flags == flagACK && s.wnd > 0 })
	if s.ack != k.seq {
		t.Errorf("the window opens at %d, want %d", s.ack, k.seq)
	}
	k.say(flagACK|flagFIN, "end")
	select {
	case n := <-got:
		if n != int64(sent)+3 {
			t.Errorf("the outside got %d bytes, want %d", n, sent+3)
		}
	case <-time.After(limit):
		t.Error("the outside saw no end")
	}
}

// fullListener listens on the host's loopback with a queue that is full: the
// kernel leaves those who connect without an answer. accept makes room.
func fullListener(t *testing.T) (port int, accept func()) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port = sa.(*syscall.SockaddrInet4).Port
	c, err := net.DialTCP("tcp4", nil, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return port, func() {
		n, _, err := syscall.Accept(fd)
		if err != nil {
			t.Error(err)
			return
		}
		syscall.Close(n)
	}
}

// A connection outside that takes its time stands in the end, and then that of
// the guest does.
func TestConnWaitsForTheOutside(t *testing.T) {
	port, accept := fullListener(t)
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "a")
	done := make(chan error, 1)
	go func() {
		c, err := g.Dial(within(t), at(sw, port))
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	eventually(t, "the question outside", func() bool { return p.Stats().FramesIn > 1 })
	for i := range 50 { // an answer that is too early has the time of as many echoes
		if g.WaitFrame(echoTo(g, sw.Gateway(), uint16(i)), limit, isEchoReply) == nil {
			t.Fatal("no echo")
		}
	}
	select {
	case err := <-done:
		t.Fatalf("Dial() = %v before the outside answered", err)
	default:
	}
	accept()
	if err := <-done; err != nil {
		t.Errorf("Dial() = %v once the outside answers", err)
	}
}

// One that never stands ends with the time it has, or with the switch (open
// looks for what is left).
func TestConnGivesUpOutside(t *testing.T) {
	port, _ := fullListener(t)
	other := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("!")) })
	sw := open(t, netsw.Config{HostLoopback: true, DialTimeout: 20 * time.Millisecond, MaxFlows: 1})
	_, g := join(t, sw, "a")
	g.Deafen()
	if err := g.Send(tcpFrame(g, 4001, netip.MustParseAddrPort(at(sw, port)), 1, 0, flagSYN)); err != nil {
		t.Fatal(err)
	}
	// The port has room for one: that another comes through says that it has ended.
	eventually(t, "the flow has ended", func() bool {
		f := g.WaitFrame(tcpFrame(g, 4002, netip.MustParseAddrPort(at(sw, other)), 1, 0, flagSYN), limit, func(e frame.Eth) bool {
			ip, ok := frame.ParseIPv4(e.Payload)
			return ok && ip.Proto == frame.ProtoTCP && binary.BigEndian.Uint16(ip.Payload) == uint16(other)
		})
		e, _ := frame.ParseEth(f)
		ip, ok := frame.ParseIPv4(e.Payload)
		return ok && ip.Payload[13] == flagSYN|flagACK
	})
	// And one that is under way when all ends.
	_ = g.Send(tcpFrame(g, 4003, netip.MustParseAddrPort(at(sw, port)), 1, 0, flagSYN))
}

package netsw_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"

	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// A guest that is slow to acknowledge has lost nothing: what it acknowledges by
// the timestamps of what was sent first is not repeated to its end.
func TestConnRepeatsLittleInVain(t *testing.T) {
	const segments, size = 60, 1000 - 12
	want := pattern(segments * size)
	more := make(chan struct{})
	port := serve(t, func(c *net.TCPConn) {
		_, _ = c.Write(want)
		<-more
		_, _ = c.Write([]byte("more"))
		_, _ = io.Copy(io.Discard, c)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := &talker{t: t, g: g, src: 4000, dst: netip.MustParseAddrPort(at(sw, port)), seq: 100, wnd: 65535, stamps: true, in: make(chan spoken, 1<<14)}
	k.hello(1000)
	first := k.ack
	var got []spoken
	for have := 0; have < len(want); {
		// How much is in each is the switch's own: it may have read less at once.
		s := k.next("data", func(s spoken) bool { return int(s.seq-first) == have && len(s.data) > 0 && s.stamp != 0 })
		got = append(got, s)
		have += len(s.data)
	}
	k.next("the first segment again", func(s spoken) bool { return s.seq == first && s.stamp != got[0].stamp })
	for _, s := range got {
		k.ack, k.echo = s.seq+uint32(len(s.data)), s.stamp
		k.say(flagACK, "")
	}
	close(more)
	again := 0
	k.next("what follows", func(s spoken) bool {
		if string(s.data) == "more" {
			return true
		}
		if len(s.data) > 0 {
			again++
		}
		return false
	})
	// One more for each time that this test itself was slow.
	if again > len(got)/3 {
		t.Errorf("%d segments of %d were repeated to a guest that had them", again, len(got))
	}
}

// The outside has ended its stream and is then gone: the guest, which has not
// ended its own and says nothing, hears of it.
func TestConnResetAfterTheEnd(t *testing.T) {
	gone := make(chan struct{})
	port := serve(t, func(c *net.TCPConn) {
		_ = c.CloseWrite()
		<-gone
		_ = c.SetLinger(0)
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	_, g := join(t, sw, "a")
	k := talk(t, sw, g, port, 65535)
	k.next("end", func(s spoken) bool { return s.flags&flagFIN != 0 })
	k.ack++
	k.say(flagACK, "")
	close(gone)
	k.next("reset", func(s spoken) bool { return s.flags&flagRST != 0 })
	eventually(t, "the flow ends", func() bool { return sw.Stats().OpenFlows == 0 && sw.UsedSockets() == 0 })
}

// Segments in pieces are refused and counted, and other guests' connections go on.
func TestConnInPieces(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("!")) })
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "a")
	f := tcpFrame(g, 4000, netip.MustParseAddrPort(at(sw, port)), 1, 0, flagSYN)
	h := f[frame.EthSize:]
	h[6] = 0x20 // more follows
	binary.BigEndian.PutUint16(h[10:], 0)
	binary.BigEndian.PutUint16(h[10:], frame.Checksum(h[:frame.IPv4Size], 0))
	if err := g.Send(f); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the piece is counted", func() bool { return p.Stats().Dropped(netsw.DropFragment) == 1 })
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "!" {
		t.Errorf("a connection in whole segments gave %q, %v", b, err)
	}
	if n := sw.Stats().Flows; n != 1 {
		t.Errorf("%d flows, want that of the whole segments alone", n)
	}
}

package netsw

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A SYN that comes again when the connection outside stands, but before its
// guest has been told, is not answered: no window is known yet, and one of 0
// would have the guest wait.
func TestConnIsAcceptedWithAWindow(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	sw, err := New(Config{HostLoopback: true, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9")}})
	if err != nil {
		t.Fatal(err)
	}
	defer sw.Close()
	p, err := sw.AddPort(PortConfig{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	dst := netip.AddrPortFrom(sw.Gateway(), ln.Addr().(*net.TCPAddr).AddrPort().Port())
	c := &conn{p: p, id: connID{dst.Addr().As4(), dst.Port(), 999}, rcv: 8, edge: 8, una: 100, nxt: 100, cancel: func() {}}
	c.moved.L = &c.mu
	syn := &segment{id: c.id, seq: 7, flags: flagSyn, wnd: 1000}
	c.hello(syn)
	defer c.end(true)
	if !c.dial(t.Context(), dst) {
		t.Fatal("the connection outside does not stand")
	}
	c.mu.Lock()
	c.inputLocked(syn)
	c.mu.Unlock()
	p.kick()
	done := make(chan bool)
	go func() { done <- c.shake(64 << 10) }()
	b := make([]byte, 256)
	n, err := unix.Read(int(p.File().Fd()), b)
	if err != nil || n < natHead {
		t.Fatalf("reading the answer: %d bytes, %v", n, err)
	}
	if wnd := binary.BigEndian.Uint16(b[tcpAt+14:]); b[tcpAt+13] != flagSyn|flagAck || wnd == 0 {
		t.Errorf("the first answer has flags %#x and a window of %d, want %#x and one", b[tcpAt+13], wnd, flagSyn|flagAck)
	}
	c.end(true)
	if <-done {
		t.Error("shake() = true of a connection that was reset")
	}
}

// The patience follows what the guest needs, within bounds; an acknowledgement
// of what was repeated says nothing.
func TestConnPatience(t *testing.T) {
	c := &conn{}
	took := func(d time.Duration) {
		c.nxt++
		c.measure()
		c.clock = c.clock.Add(-d)
		c.una = c.nxt
		c.measured()
	}
	if d := c.patience(); d != againFirst {
		t.Errorf("at first %s, want %s", d, againFirst)
	}
	took(time.Millisecond)
	if d := c.patience(); d != againFirst {
		t.Errorf("with a fast guest %s, want %s", d, againFirst)
	}
	for range 50 {
		took(time.Second)
	}
	if d := c.patience(); d < time.Second || d > againSlow {
		t.Errorf("with a guest that takes a second %s, want from that to %s", d, againSlow)
	}
	took(time.Hour)
	if d := c.patience(); d != againSlow {
		t.Errorf("after a pause of an hour %s, want %s", d, againSlow)
	}
	c.tries = 30
	if d := c.patience(); d != againMost {
		t.Errorf("after many tries %s, want %s", d, againMost)
	}
	c = &conn{state: open, una: 1, nxt: 1, sent: []sentFrames{{1, 2, &frameBuf{b: make([]byte, natHead+1)}}}, mss: 100, p: &Port{sw: &Switch{}}}
	c.nxt++
	c.measure()
	c.again()
	c.una = c.nxt
	c.measured()
	if c.smooth != 0 {
		t.Errorf("an acknowledgement of what was repeated was measured: %s", c.smooth)
	}
}

// A stream that fills what is read at once is read more of at once, and less
// again when it slows down; what is kept until the guest acknowledges it never
// lies in a buffer of more than four times its size, but where segments are tiny.
func TestConnReadsMoreOfAFastStream(t *testing.T) {
	for _, mss := range []int{tcpRoom - stampSize, 8948, 1448} {
		c := &conn{p: &Port{sw: &Switch{}}, state: open, mss: mss, stamps: true, armed: true} // no timer is needed
		r := newScatter(c.head(), mss)
		var vec [mostPieces]unix.Iovec
		// read has as much come as there is room for, or most bytes, and says how much
		// room there was.
		read := func(room, most int) int {
			t.Helper()
			r.room = room
			laid := 0
			for _, v := range vec[:r.lay(&vec)] {
				laid += int(v.Len)
			}
			if laid > room {
				t.Fatalf("MSS %d: %d bytes would be read where %d may be", mss, laid, room)
			}
			r.n = min(laid, most)
			c.send(r, true)
			kept := c.sent[len(c.sent)-1].buf
			if r.n > 256 && cap(kept.b) > 4*r.n {
				t.Errorf("MSS %d: %d bytes are kept in a buffer of %d", mss, r.n, cap(kept.b))
			}
			return laid
		}
		const plenty = 8 << 20
		little := read(plenty, 100)
		if little > natBuffer {
			t.Errorf("MSS %d: at first %d bytes are read at once, want at most %d", mss, little, natBuffer)
		}
		if n := read(plenty, plenty); n != little {
			t.Errorf("MSS %d: after a small read %d bytes are read at once, want %d", mss, n, little)
		}
		for range 3 {
			if n := read(plenty, plenty); n < 5*little/2 {
				t.Errorf("MSS %d: after a full read %d bytes are read at once, want more than %d", mss, n, 5*little/2)
			}
		}
		read(100<<10, plenty)
		if n := read(plenty, plenty); n != little {
			t.Errorf("MSS %d: after a read of 100 KiB %d bytes are read at once, want %d", mss, n, little)
		}
		for n := 500; n < little; n = n * 5 / 4 {
			read(plenty, n)
		}
		read(plenty, plenty)
		read(plenty, little/3) // into the larger buffer
		read(plenty, little/2)
		if n := read(plenty, plenty); n != little {
			t.Errorf("MSS %d: after half a read %d bytes are read at once, want %d", mss, n, little)
		}
	}
}

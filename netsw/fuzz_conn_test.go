package netsw_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// FuzzConn speaks TCP to a server of this machine over a switch, as it should
// and as it should not: from the second segment on, numbers are what the input
// adds to those that would be right. Whatever is said, what either end gets is
// the other's stream from its beginning, no byte goes past a window, and the
// connection leaves nothing behind.
//
// Input: MSS (2 bytes), scale of windows (1; above 14 none), what the server
// does and whether there are timestamps (1); then for each segment eight bytes;
// see saying.
func FuzzConn(f *testing.F) {
	say := func(flags, seq, ack byte, wnd, n uint16, how byte) []byte {
		return append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16([]byte{flags, seq, ack}, wnd), n), how)
	}
	input := func(server byte, ops ...[]byte) []byte {
		b := []byte{0x05, 0xb4, 7, server}
		for _, o := range ops {
			b = append(b, o...)
		}
		return b
	}
	for server := range byte(8) {
		f.Add(input(server, say(flagACK, 0, 0, 0xffff, 1000, howWait), say(flagACK|flagFIN, 0, 0, 0xffff, 0, howWait)))
	}
	f.Add(input(1, say(flagACK, 5, 0, 0xffff, 1000, 0), say(flagACK, 0, 0, 9, 5, howWait), say(flagACK, 0xf0, 0, 0, 1000, howWait)))
	f.Add(input(0, say(flagRST, 9, 0, 1, 0, 0), say(flagSYN, 0, 0, 1, 0, howWait), say(flagACK, 0, 0xff, 1, 0, 0), say(flagRST, 0, 0, 1, 0, 0)))
	f.Add(input(1, say(flagACK, 0, 0x90, 100, 0, howWait), say(flagACK, 0, 0x90, 100, 0, 0), say(flagACK, 0, 0x90, 100, 0, 0), say(flagACK, 0, 0x90, 100, 0, howWait)))
	// A fast server and the largest window; then nothing is acknowledged for a while.
	for _, mss := range []byte{0x05, 0xff} {
		for _, server := range []byte{3, 7} {
			b := input(server)
			b[0], b[2] = mss, 14
			for range 3 {
				b = append(b, say(flagACK, 0, 0, 0xffff, 0, howWait)...)
				for range 4 {
					b = append(b, say(flagACK, 0, 0, 0xffff, 0, howOld|howWait)...)
				}
			}
			f.Add(append(b, say(flagACK, 0, 0, 0xffff, 0, howWait)...))
		}
	}

	var wrong atomic.Pointer[string]
	fail := func(s string) { wrong.CompareAndSwap(nil, &s) }
	var ports []int
	for _, handle := range []func(*net.TCPConn){
		func(c *net.TCPConn) {},
		func(c *net.TCPConn) { _, _ = c.Write(stream[:100<<10]) },
		func(c *net.TCPConn) { _ = c.SetLinger(0); c.Close() },
		func(c *net.TCPConn) { _, _ = c.Write(stream[:3<<20]) }, // is read in the largest pieces
	} {
		ports = append(ports, serve(f, func(c *net.TCPConn) {
			var wg sync.WaitGroup
			wg.Go(func() {
				handle(c)
				_ = c.CloseWrite()
			})
			b := make([]byte, 64<<10)
			for at := 0; ; {
				n, err := c.Read(b)
				for i := range n {
					if at+i < len(stream) && b[i] != stream[at+i] {
						fail("the server got another byte than the guest has there")
						break
					}
				}
				at += n
				if err != nil {
					break
				}
			}
			c.Close()
			wg.Wait()
		}))
	}
	sw, err := netsw.New(netsw.Config{Subnet: netip.MustParsePrefix("10.66.0.0/24"), Upstreams: nxdomain(f), HostPorts: ports})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { sw.Close() })
	p, err := sw.AddPort(netsw.PortConfig{Name: "hostile"})
	if err != nil {
		f.Fatal(err)
	}
	src := uint16(1000)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 4 {
			return
		}
		file, err := p.Replug()
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.FileConn(file)
		if err != nil {
			t.Fatal(err)
		}
		p.CloseFile()
		// Another each time: a SYN like that of a connection which is just ending is not answered.
		if src++; src == 60000 {
			src = 1000
		}
		k := &fuzzTalker{c: c, src: src, port: uint16(ports[int(in[3]&3)%len(ports)]), stamps: in[3]&4 != 0, fail: fail, heard: make(chan struct{}, 1)}
		k.edge = uint64(k.iss) // of nothing yet
		var wg sync.WaitGroup
		wg.Go(k.listen)
		k.hello(binary.BigEndian.Uint16(in), in[2])
		if !k.await(func() bool { return k.known || k.over }) {
			fail("a SYN was not answered")
		}
		in = in[4:]
		for n := 0; len(in) >= 8 && n < 200; n++ {
			k.saying(in[:8])
			in = in[8:]
		}
		k.settle()
		c.Close()
		wg.Wait()
		if _, err := p.Replug(); err != nil { // a guest that is gone ends its connections by its port
			t.Fatal(err)
		}
		eventually(t, "the connection leaves nothing", func() bool { return sw.Stats().OpenFlows == 0 && sw.UsedSockets() == 0 })
		if w := wrong.Swap(nil); w != nil {
			t.Fatal(*w)
		}
	})
}

// stream is what both ends say, from the beginning on.
var stream = pattern(4 << 20)

// How a segment is said, beside its numbers.
const (
	howFarSeq = 1 << iota // the number added counts 65,536 times
	howFarAck
	howStamp
	howWait // what is under way comes first
	howOld  // acknowledge what was acknowledged before
)

type fuzzTalker struct {
	c      net.Conn
	src    uint16
	port   uint16
	stamps bool
	fail   func(string)
	iss    uint32
	nxt    uint32 // next to send
	acked  uint32
	scale  uint8
	heard  chan struct{} // something came

	mu    sync.Mutex
	known bool
	over  bool   // the link has ended, or the connection was refused
	irs   uint32 // the switch's first
	got   uint32 // next expected of it
	edge  uint64 // the furthest window said, from irs+1 on
	pongs int
}

// segment sends one; opts are whole words.
func (k *fuzzTalker) segment(flags byte, seq, ack uint32, wnd uint16, opts, data []byte) {
	b := make([]byte, frame.LenSize, 128+len(data))
	b = frame.AppendEth(b, gwMAC, frame.MAC{0x02, 'v', 'k', 1, 0, 2}, frame.TypeIPv4)
	b = frame.AppendIPv4(b, frame.IP{10, 66, 0, 2}, frame.IP{10, 66, 0, 1}, frame.ProtoTCP, 20+len(opts)+len(data))
	b = binary.BigEndian.AppendUint16(b, k.src)
	b = binary.BigEndian.AppendUint16(b, k.port)
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	b = append(b, byte(20+len(opts))<<2, flags)
	b = binary.BigEndian.AppendUint16(b, wnd)
	b = append(append(append(b, 0, 0, 0, 0), opts...), data...)
	binary.BigEndian.PutUint32(b, uint32(len(b)-frame.LenSize))
	_, _ = k.c.Write(b)
}

func (k *fuzzTalker) hello(mss uint16, scale uint8) {
	opts := []byte{2, 4, byte(mss >> 8), byte(mss)}
	if scale <= 14 {
		opts = append(opts, 1, 3, 3, scale)
		k.scale = scale
	}
	if k.stamps {
		opts = append(opts, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0)
	}
	k.nxt = k.iss + 1
	k.said(0xffff, 0)
	k.segment(flagSYN, k.iss, 0, 0xffff, opts, nil)
}

// said notes a window that the other end may use from an acknowledgement on.
func (k *fuzzTalker) said(wnd uint64, from uint32) {
	k.mu.Lock()
	k.edge = max(k.edge, uint64(from)+wnd)
	k.mu.Unlock()
}

// saying sends the segment that eight bytes describe: flags, what is added to
// the sequence number, what is to the acknowledgement, window (2), length of
// the data (2), how.
func (k *fuzzTalker) saying(op []byte) {
	flags, how := op[0]&0x1f, op[7]
	if how&howWait != 0 {
		k.settle()
	}
	far := func(b byte, much bool) uint32 {
		if much {
			return uint32(int32(int8(b)) << 16)
		}
		return uint32(int32(int8(b)))
	}
	k.mu.Lock()
	irs, got := k.irs, k.got
	k.mu.Unlock()
	if how&howOld != 0 {
		got = k.acked
	}
	seq := k.nxt + far(op[1], how&howFarSeq != 0)
	ack := got + far(op[2], how&howFarAck != 0)
	wnd := binary.BigEndian.Uint16(op[3:])
	n := int(binary.BigEndian.Uint16(op[5:]) % 4096)
	at := int(seq - k.iss - 1)
	if at < 0 || at+n > len(stream) {
		n = 0
	}
	var data, opts []byte
	if n > 0 {
		data = stream[at : at+n]
	}
	if how&howStamp != 0 && k.stamps {
		opts = []byte{1, 1, 8, 10, 0, 0, 0, 2, 0, 0, 0, 0}
	}
	if flags&flagACK != 0 && int32(ack-irs) > 0 {
		k.said(uint64(wnd)<<k.scale, ack-irs-1)
	}
	k.acked = ack
	k.segment(flags, seq, ack, wnd, opts, data)
	if seq == k.nxt && flags&(flagSYN|flagRST) == 0 && flags&flagACK != 0 {
		k.nxt += uint32(n)
	}
}

// settle waits until the switch has looked at all that was said.
func (k *fuzzTalker) settle() {
	k.mu.Lock()
	want := k.pongs + 1
	k.mu.Unlock()
	b := frame.AppendICMP(frame.AppendEth(make([]byte, frame.LenSize), gwMAC, frame.MAC{0x02, 'v', 'k', 1, 0, 2}, frame.TypeIPv4),
		frame.IP{10, 66, 0, 2}, frame.IP{10, 66, 0, 1}, frame.ICMP{Type: frame.ICMPEcho, Payload: []byte("x")})
	binary.BigEndian.PutUint32(b, uint32(len(b)-frame.LenSize))
	_, _ = k.c.Write(b)
	if !k.await(func() bool { return k.pongs >= want || k.over }) {
		k.fail("the gateway does not answer any more")
	}
}

func (k *fuzzTalker) await(cond func() bool) bool {
	end := time.NewTimer(limit)
	defer end.Stop()
	for {
		k.mu.Lock()
		ok := cond()
		k.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-k.heard:
		case <-end.C:
			return false
		}
	}
}

// listen takes what comes until the link ends.
func (k *fuzzTalker) listen() {
	defer func() {
		k.mu.Lock()
		k.over = true
		k.mu.Unlock()
		k.tell()
	}()
	b := make([]byte, frame.LenSize+frame.Max)
	for {
		if _, err := io.ReadFull(k.c, b[:frame.LenSize]); err != nil {
			return
		}
		n := binary.BigEndian.Uint32(b)
		if n > frame.Max {
			k.fail("the switch's stream is out of step")
			return
		}
		if _, err := io.ReadFull(k.c, b[:n]); err != nil {
			return
		}
		if err := k.take(b[:n]); err != nil {
			k.fail(err.Error())
		}
		k.tell()
	}
}

func (k *fuzzTalker) tell() {
	select {
	case k.heard <- struct{}{}:
	default:
	}
}

func (k *fuzzTalker) take(b []byte) error {
	e, ok := frame.ParseEth(b)
	if !ok || e.Type != frame.TypeIPv4 {
		return nil
	}
	ip, ok := frame.ParseIPv4(e.Payload)
	if !ok {
		return errors.New("a packet that cannot be read")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if ip.Proto == frame.ProtoICMP {
		k.pongs++
		return nil
	}
	t := ip.Payload
	if ip.Proto != frame.ProtoTCP || len(t) < 20 {
		return errors.New("a packet that is no segment")
	}
	if frame.Checksum(t, frame.Pseudo(ip.Src, ip.Dst, frame.ProtoTCP, len(t))) != 0 {
		return errors.New("a segment with a wrong checksum")
	}
	seq, flags, data := binary.BigEndian.Uint32(t[4:]), t[13], t[int(t[12]>>4)*4:]
	switch {
	case flags&flagRST != 0:
		k.over = k.over || !k.known
		return nil
	case flags&flagSYN != 0:
		// A second one is of another connection, after the first has ended; this
		// guest never gets into it.
		if !k.known {
			k.known, k.irs, k.got = true, seq, seq+1
		}
		return nil
	case !k.known:
		return nil
	}
	at := seq - k.irs - 1
	if len(data) == 0 {
		return nil
	}
	if int(at)+len(data) > len(stream) || string(data) != string(stream[at:][:len(data)]) {
		return errors.New("the guest got another byte than the server has there")
	}
	if uint64(at)+uint64(len(data)) > k.edge {
		return errors.New("data past every window that the guest said")
	}
	if seq == k.got {
		k.got += uint32(len(data))
	}
	return nil
}

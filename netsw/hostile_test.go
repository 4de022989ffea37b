package netsw_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

// What a hostile guest may try. Frames with another's address are in
// TestSpoofedFramesAreDropped; names as they should not be written, chains of
// aliases and the like are in dnsd's tests.

// tcpFrame is a segment without data.
func tcpFrame(g *netswtest.Guest, src uint16, dst netip.AddrPort, seq, ack uint32, flags byte) []byte {
	f := frame.AppendIPv4(frame.AppendEth(nil, gwMAC, g.MAC(), frame.TypeIPv4), g.Addr.As4(), dst.Addr().As4(), frame.ProtoTCP, 20)
	f = binary.BigEndian.AppendUint16(f, src)
	f = binary.BigEndian.AppendUint16(f, dst.Port())
	f = binary.BigEndian.AppendUint32(f, seq)
	f = binary.BigEndian.AppendUint32(f, ack)
	return append(f, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0) // its checksum is not looked at
}

const (
	flagSYN = 2
	flagRST = 4
	flagACK = 16
)

// alive says whether the switch still serves a guest: echo, a name and a
// connection.
func alive(t *testing.T, sw *netsw.Switch, g *netswtest.Guest, port int) {
	t.Helper()
	if g.WaitFrame(echoTo(g, sw.Gateway(), 1), limit, isEchoReply) == nil {
		t.Error("the gateway does not answer any more")
	}
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Errorf("another guest cannot connect: %v", err)
		return
	}
	c.Close()
}

func TestHostileARP(t *testing.T) {
	sw := open(t, netsw.Config{})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	var seen atomic.Int64
	stop := gv.Tap(func([]byte) { seen.Add(1) })
	defer stop()
	arp := func(op uint16, dst, hw frame.MAC, src, target netip.Addr) []byte {
		return frame.AppendARP(frame.AppendEth(nil, dst, ge.MAC(), frame.TypeARP),
			frame.ARP{Op: op, SrcMAC: hw, SrcIP: src.As4(), DstMAC: dst, TargetIP: target.As4()})
	}
	for what, f := range map[string][]byte{
		"claims the gateway":        arp(frame.ARPReply, gv.MAC(), ge.MAC(), sw.Gateway(), gv.Addr),
		"claims the victim":         arp(frame.ARPReply, frame.Broadcast, ge.MAC(), gv.Addr, gv.Addr),
		"claims with another's MAC": arp(frame.ARPReply, gv.MAC(), gv.MAC(), ge.Addr, gv.Addr),
		"asks as the victim":        arp(frame.ARPRequest, frame.Broadcast, ge.MAC(), gv.Addr, sw.Gateway()),
	} {
		before := evil.Stats()
		if err := ge.Send(f); err != nil {
			t.Fatal(err)
		}
		eventually(t, what+": dropped", func() bool {
			s := evil.Stats()
			return s.Dropped(netsw.DropSrcIP)+s.Dropped(netsw.DropSrcMAC) == before.Dropped(netsw.DropSrcIP)+before.Dropped(netsw.DropSrcMAC)+1
		})
	}
	// Announcements of its own address, and floods of questions, go no further.
	for i := range 2000 {
		_ = ge.Send(arp(frame.ARPRequest, frame.Broadcast, ge.MAC(), ge.Addr, netip.AddrFrom4([4]byte{10, 200, 0, byte(i)})))
	}
	reply := gv.WaitFrame(frame.AppendARP(frame.AppendEth(nil, frame.Broadcast, gv.MAC(), frame.TypeARP),
		frame.ARP{Op: frame.ARPRequest, SrcMAC: gv.MAC(), SrcIP: gv.Addr.As4(), TargetIP: sw.Gateway().As4()}), limit,
		func(e frame.Eth) bool { return e.Type == frame.TypeARP })
	if e, _ := frame.ParseEth(reply); reply == nil || !bytes.Equal(e.Payload[8:14], gwMAC[:]) {
		t.Errorf("the victim's question about the gateway was answered by % x", reply)
	}
	if n := seen.Load(); n != 0 {
		t.Errorf("%d frames of the hostile guest's reached the victim", n)
	}
}

// dhcp is a message of a client, or with op 2 of a server.
func dhcp(op, kind byte, mac frame.MAC, opts ...byte) []byte {
	b := make([]byte, 236, 300)
	b[0], b[1], b[2] = op, 1, 6
	copy(b[4:], "xid!")
	copy(b[28:], mac[:])
	b = append(b, 0x63, 0x82, 0x53, 0x63, 53, 1, kind)
	return append(append(b, opts...), 255)
}

func TestHostileDHCP(t *testing.T) {
	sw := open(t, netsw.Config{})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	var seen atomic.Int64
	stop := gv.Tap(func([]byte) { seen.Add(1) })
	defer stop()
	me, mac := ge.Addr.String(), ge.MAC()
	for _, c := range []struct {
		what string
		f    []byte
		why  netsw.Drop
	}{
		{"an offer to all", udpFrame(frame.Broadcast, mac, me+":67", "255.255.255.255:68", dhcp(2, 2, gv.MAC())), netsw.DropProtocol},
		{"an offer to the victim", udpFrame(gv.MAC(), mac, me+":67", gv.Addr.String()+":68", dhcp(2, 5, gv.MAC())), netsw.DropProtocol},
		{"one from another port", udpFrame(gv.MAC(), mac, me+":1067", gv.Addr.String()+":68", dhcp(2, 5, gv.MAC())), netsw.DropProtocol},
		{"a request as the victim", udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", dhcp(1, 1, gv.MAC())), netsw.DropMalformed},
		{"options without end", udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", append(dhcp(1, 1, mac)[:243], 55, 255)), netsw.DropMalformed},
		{"a relayed one", udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", func() []byte { b := dhcp(1, 1, mac); b[24] = 10; return b }()), netsw.DropMalformed},
		{"from nobody to elsewhere", udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:69", dhcp(1, 1, mac)), netsw.DropSrcIP},
	} {
		before := evil.Stats().Dropped(c.why)
		if err := ge.Send(c.f); err != nil {
			t.Fatal(err)
		}
		eventually(t, c.what+": dropped as "+c.why.String(), func() bool { return evil.Stats().Dropped(c.why) == before+1 })
	}
	// Declining and releasing its address, and asking for others, changes nothing.
	for i := range 500 {
		_ = ge.Send(udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", dhcp(1, []byte{4, 7, 3, 1}[i%4], mac, 50, 4, 10, 200, 0, byte(i))))
	}
	r := ge.WaitFrame(udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", dhcp(1, 3, mac, 50, 4, ge.Addr.As4()[0], ge.Addr.As4()[1], ge.Addr.As4()[2], ge.Addr.As4()[3])), limit,
		func(e frame.Eth) bool {
			ip, _ := frame.ParseIPv4(e.Payload)
			u, ok := frame.ParseUDP(ip.Payload)
			return ok && u.Src == 67 && len(u.Payload) > 242 && u.Payload[242] == 5
		})
	if r == nil {
		t.Error("its own address is not its own any more")
	}
	if n := seen.Load(); n != 0 {
		t.Errorf("%d frames of the hostile guest's reached the victim", n)
	}
}

// What goes from guest to guest is for that guest: none is made a router for
// another, and nothing is sent to all that is not for all.
func TestHostileRouting(t *testing.T) {
	sw := open(t, netsw.Config{Subnet: netip.MustParsePrefix("10.200.0.0/24")})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	me := ge.Addr.String() + ":9"
	for _, c := range []struct {
		what string
		f    []byte
	}{
		{"through the victim", udpFrame(gv.MAC(), ge.MAC(), me, "192.0.2.1:53", []byte("x"))},
		{"to all, for the outside", udpFrame(frame.Broadcast, ge.MAC(), me, "192.0.2.1:53", []byte("x"))},
		{"through the gateway, to the victim", udpFrame(gwMAC, ge.MAC(), me, gv.Addr.String()+":53", []byte("x"))},
		{"through the gateway, to all", udpFrame(gwMAC, ge.MAC(), me, "10.200.0.255:53", []byte("x"))},
	} {
		before := evil.Stats().Dropped(netsw.DropMartian)
		if err := ge.Send(c.f); err != nil {
			t.Fatal(err)
		}
		eventually(t, c.what+": dropped", func() bool { return evil.Stats().Dropped(netsw.DropMartian) == before+1 })
	}
	for what, f := range map[string][]byte{
		"to all":      udpFrame(frame.Broadcast, ge.MAC(), me, "255.255.255.255:9", []byte("for all")),
		"to a subnet": udpFrame(frame.Broadcast, ge.MAC(), me, "10.200.0.255:9", []byte("for all")),
		"to a group":  udpFrame(frame.MAC{1, 0, 0x5e, 0, 0, 0xfb}, ge.MAC(), me, "224.0.0.251:5353", []byte("for all")),
		"to one":      udpFrame(gv.MAC(), ge.MAC(), me, gv.Addr.String()+":9", []byte("for all")),
	} {
		got := make(chan struct{}, 1)
		untap := gv.Tap(func(b []byte) {
			if bytes.HasSuffix(b, []byte("for all")) {
				select {
				case got <- struct{}{}:
				default:
				}
			}
		})
		_ = ge.Send(f)
		select {
		case <-got:
		case <-time.After(limit):
			t.Errorf("%s: did not arrive", what)
		}
		untap()
	}
}

// Pieces that overlap, never end, begin nowhere or are too many are dropped in
// bounded room, and whole packets go on.
func TestHostileFragments(t *testing.T) {
	port := echoUDP(t)
	sw := open(t, netsw.Config{HostLoopback: true})
	_, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	whole := udpFrame(gwMAC, ge.MAC(), ge.Addr.String()+":9", at(sw, port), make([]byte, 3000))
	piece := func(id uint16, off, n int, more bool) []byte {
		ip := whole[frame.EthSize:]
		f := append([]byte(nil), whole[:frame.EthSize+frame.IPv4Size]...)
		h := f[frame.EthSize:]
		binary.BigEndian.PutUint16(h[2:], uint16(frame.IPv4Size+n))
		binary.BigEndian.PutUint16(h[4:], id)
		fl := uint16(off / 8)
		if more {
			fl |= 0x2000
		}
		binary.BigEndian.PutUint16(h[6:], fl)
		binary.BigEndian.PutUint16(h[10:], 0)
		binary.BigEndian.PutUint16(h[10:], frame.Checksum(h[:frame.IPv4Size], 0))
		return append(f, append(ip[frame.IPv4Size:], make([]byte, 70000)...)[:n]...)
	}
	before := heapOf()
	for i := range 20000 {
		id := uint16(i)
		var f []byte
		switch i % 5 {
		case 0:
			f = piece(id, 0, 1480, true) // and never more
		case 1:
			f = piece(id, 65528, 400, false) // past the largest packet
		case 2:
			f = piece(id-2, 800, 1480, true) // over the first
		case 3:
			f = piece(id, 8, 8, true) // a tiny one
		case 4:
			f = piece(id, 48000, 9000, true)
		}
		if err := ge.Send(f); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all taken", func() bool { return sw.PortStats()["evil"].FramesIn >= 20000 })
	if grown := heapOf() - before; grown > 24<<20 {
		t.Errorf("pieces hold %d MiB", grown>>20)
	}
	if s := sw.Stats(); s.Sent != 0 {
		t.Errorf("%d bytes of pieces went out", s.Sent)
	}
	u, err := gv.DialUDP(at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	_ = u.SetDeadline(time.Now().Add(limit))
	_, _ = u.Write(pattern(65507)) // in pieces itself
	b := make([]byte, 65535)
	if n, err := u.Read(b); err != nil || n != 65507 {
		t.Errorf("another guest's datagram in pieces: %d bytes, %v", n, err)
	}
}

// heapOf is what the heap holds now.
func heapOf() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// Frames of every length, and packets that lie about theirs.
func TestHostileFrames(t *testing.T) {
	sw := open(t, netsw.Config{})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	good := udpFrame(gwMAC, ge.MAC(), ge.Addr.String()+":9", "192.0.2.1:9", make([]byte, 100))
	n := uint64(0)
	send := func(f []byte) {
		t.Helper()
		if err := ge.Send(f); err != nil {
			t.Fatalf("after %d frames: %v", n, err)
		}
		n++
	}
	for i := range len(good) {
		send(good[:i])
	}
	for i := frame.EthSize; i < frame.EthSize+28; i++ {
		for _, v := range []byte{0, 1, 0x7f, 0x80, 0xff, good[i] + 1, good[i] - 1} {
			f := bytes.Clone(good)
			f[i] = v
			if d := f[frame.EthSize+16:]; d[0] != 192 || d[1] != 0 || d[2] != 2 {
				continue // for somewhere that is not a test's
			}
			send(f)
		}
	}
	send(append(bytes.Clone(good), make([]byte, frame.EthSize+netsw.MTU-len(good)+1)...)) // one byte too long
	eventually(t, "all taken", func() bool { return evil.Stats().FramesIn == n })
	if evil.Stats().Dropped(netsw.DropMalformed) < 100 {
		t.Errorf("Stats() = %+v, want most of %d malformed", evil.Stats(), n)
	}
	if gv.WaitFrame(echoTo(gv, sw.Gateway(), 1), limit, isEchoReply) == nil {
		t.Error("the gateway does not answer any more")
	}
}

// Answers that point an allowed name at what no name may open.
func TestHostileRebinding(t *testing.T) {
	var hits atomic.Int64
	ln, err := net.Listen("tcp4", "0.0.0.0:0")
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
			hits.Add(1)
			c.Close()
		}
	}()
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	host := hostAddr(t)
	targets := []netip.Addr{host}
	for _, s := range []string{"127.0.0.1", "127.9.9.9", "0.0.0.0", "0.0.0.1", "169.254.169.254", "169.254.1.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "10.200.0.1", "10.200.0.99", "10.200.0.255"} {
		targets = append(targets, netip.MustParseAddr(s))
	}
	up := answering(t, func(string) ([]netip.Addr, uint32) { return targets, 3600 })
	eng := policy.NewEngine(policy.EngineConfig{JobPort: "job", Policy: &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"rebind.example"}}}})
	sw := open(t, netsw.Config{Policy: eng, Upstreams: up, Subnet: netip.MustParsePrefix("10.200.0.0/24")})
	p, g := join(t, sw, "job")
	if r := g.Ask(t, at(sw, 53), dnsQuery(1, "rebind.example", 1)); r[3]&15 != 0 || int(r[7]) != len(targets) {
		t.Fatalf("the answer has %d addresses, want %d", r[7], len(targets))
	}
	for i, a := range targets {
		before := drops(p)
		f := tcpFrame(g, uint16(1000+i), netip.AddrPortFrom(a, port), 1, 0, flagSYN)
		if err := g.Send(f); err != nil {
			t.Fatal(err)
		}
		eventually(t, a.String()+": refused or dropped", func() bool { return drops(p) > before })
	}
	if hits.Load() != 0 || sw.Stats().Flows != 0 {
		t.Errorf("%d connections to what no name may open", hits.Load())
	}
}

// drops is the sum of all reasons.
func drops(p *netsw.Port) (n uint64) {
	for _, d := range p.Stats().Drops {
		n += d
	}
	return n
}

// answering is a resolver of the host that gives every name what addrs says.
func answering(t testing.TB, addrs func(name string) ([]netip.Addr, uint32)) []netip.AddrPort {
	t.Helper()
	up, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	_ = up.SetReadBuffer(4 << 20)
	t.Cleanup(func() { up.Close() })
	go func() {
		b := make([]byte, 4096)
		for {
			n, from, err := up.ReadFromUDP(b)
			if err != nil {
				return
			}
			end := 12
			var name []byte
			for l := int(b[end]); l != 0; l = int(b[end]) {
				name = append(append(name, b[end+1:end+1+l]...), '.')
				end += l + 1
			}
			list, ttl := addrs(string(bytes.TrimSuffix(name, []byte("."))))
			r := append([]byte(nil), b[:end+5]...)
			r[2] |= 0x80
			r[3] = 0x80
			binary.BigEndian.PutUint16(r[6:], uint16(len(list)))
			binary.BigEndian.PutUint32(r[8:], 0)
			for _, a := range list {
				r = append(r, 0xc0, 12, 0, 1, 0, 1)
				r = binary.BigEndian.AppendUint32(r, ttl)
				r = append(append(r, 0, 4), a.AsSlice()...)
			}
			_ = n
			_, _ = up.WriteToUDP(r, from)
		}
	}()
	return []netip.AddrPort{up.LocalAddr().(*net.UDPAddr).AddrPort()}
}

// 50,000 connections, each answered by the guest and never used: those past the
// bound are reset, another guest is served, and what they hold is bounded.
func TestHostile50000Flows(t *testing.T) {
	const tries, most = 50000, 2000
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) })
	sw := open(t, netsw.Config{HostLoopback: true, MaxFlows: most})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	before := heapOf()
	dst := netip.MustParseAddrPort(at(sw, port))
	acks := make(chan []byte, tries)
	stop := ge.Tap(func(b []byte) {
		e, _ := frame.ParseEth(b)
		ip, ok := frame.ParseIPv4(e.Payload)
		if !ok || ip.Proto != frame.ProtoTCP || ip.Payload[13] != flagSYN|flagACK {
			return
		}
		src := binary.BigEndian.Uint16(ip.Payload[2:])
		acks <- tcpFrame(ge, src, dst, 2, binary.BigEndian.Uint32(ip.Payload[4:])+1, flagACK)
	})
	defer stop()
	ge.Deafen()
	for i := range tries {
		if err := ge.Send(tcpFrame(ge, uint16(1024+i), dst, 1, 0, flagSYN)); err != nil {
			t.Fatal(err)
		}
		for more := true; more; {
			select {
			case f := <-acks:
				_ = ge.Send(f)
			default:
				more = false
			}
		}
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case f := <-acks:
				_ = ge.Send(f)
			case <-done:
				return
			}
		}
	}()
	eventually(t, "all decided", func() bool {
		s := evil.Stats()
		return s.OpenFlows == most && s.Flows+s.Dropped(netsw.DropLimit) >= tries
	})
	if s := evil.Stats(); s.Flows != most {
		t.Errorf("Stats() = %+v, want %d flows", s, most)
	}
	grown := heapOf() - before
	t.Logf("%d flows hold %d KiB each, the server's end included", most, grown>>10/most)
	if grown > most*64<<10 {
		t.Errorf("%d flows hold %d MiB", most, grown>>20)
	}
	alive(t, sw, gv, port)
	evil.Remove()
	eventually(t, "all ended with their guest", func() bool { return sw.Stats().OpenFlows == 0 })
}

// Connections to where nobody answers, for ever half made: other guests connect
// all the same.
func TestHostileSYNs(t *testing.T) {
	port := serve(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) })
	sw := open(t, netsw.Config{HostLoopback: true})
	evil, ge := join(t, sw, "evil")
	_, gv := join(t, sw, "victim")
	ge.Deafen()
	dst := netip.MustParseAddrPort(at(sw, port))
	for i := range 3000 {
		_ = ge.Send(tcpFrame(ge, uint16(1024+i), dst, 1, 0, flagSYN)) // the answers are not answered
	}
	eventually(t, "those over the bound dropped", func() bool { return evil.Stats().Dropped(netsw.DropLimit) >= 2000 })
	alive(t, sw, gv, port)
	if s := evil.Stats(); s.Flows != 0 {
		t.Errorf("Stats() = %+v, want no flow of those", s)
	}
}

// 100,000 names, each opening an address of its own: all are answered, those
// soonest to expire close, and what they hold is bounded.
func TestHostile100000Names(t *testing.T) {
	const names = 100000
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18 + byte(i>>16), byte(i >> 8), byte(i)}) }
	up := answering(t, func(name string) ([]netip.Addr, uint32) {
		var i int
		_, _ = fmt.Sscanf(name, "n%d.", &i)
		return []netip.Addr{addr(i)}, uint32(i) // the first are the soonest to expire
	})
	eng := policy.NewEngine(policy.EngineConfig{JobPort: "job", Policy: &policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{"many.example"}}}})
	sw := open(t, netsw.Config{Policy: eng, Upstreams: up})
	p, g := join(t, sw, "job")
	before := heapOf()
	window := make(chan struct{}, 100)
	stop := g.Tap(func([]byte) {
		select {
		case <-window:
		default:
		}
	})
	me, gw := g.Addr.String()+":999", at(sw, 53)
	for i := range names {
		select {
		case window <- struct{}{}:
		case <-time.After(limit):
			t.Fatalf("no answer after %d names", i)
		}
		if err := g.Send(udpFrame(gwMAC, g.MAC(), me, gw, dnsQuery(uint16(i), fmt.Sprintf("n%d.many.example", i), 1))); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all asked", func() bool { return p.Stats().Questions == names })
	eventually(t, "all answered", func() bool { return len(window) == 0 })
	stop()
	grown := heapOf() - before
	t.Logf("%d names hold %d MiB", names, grown>>20)
	if grown > 40<<20 {
		t.Errorf("%d names hold %d MiB", names, grown>>20)
	}
	open := func(i int) bool {
		return eng.Decide(policy.Flow{Port: "job", Proto: policy.TCP, Dst: netip.AddrPortFrom(addr(i), 443)}).Allow
	}
	if open(1) || !open(names-1) || !open(names-16000) {
		t.Errorf("open: the first %v, the last %v, the 16,000th from the end %v; want the latest 16,384", open(1), open(names-1), open(names-16000))
	}
}

// One port of the guest's to two places is two connections, each decided for
// itself.
func TestHostileOnePortManyPlaces(t *testing.T) {
	good := serve(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) })
	bad := serve(t, func(*net.TCPConn) { t.Error("a refused connection came out") })
	j := &judge{decide: func(f policy.Flow) policy.Verdict {
		return policy.Verdict{Allow: int(f.Dst.Port()) == good, Reason: "x"}
	}}
	sw := open(t, netsw.Config{HostLoopback: true, Policy: j})
	_, g := join(t, sw, "a")
	g.Deafen()
	answer := func(port int, flags byte) bool {
		to := netip.MustParseAddrPort(at(sw, port))
		return g.WaitFrame(tcpFrame(g, 5000, to, 1, 0, flagSYN), limit, func(e frame.Eth) bool {
			ip, ok := frame.ParseIPv4(e.Payload)
			return ok && ip.Proto == frame.ProtoTCP && int(binary.BigEndian.Uint16(ip.Payload)) == port && ip.Payload[13]&flags == flags
		}) != nil
	}
	if !answer(good, flagSYN|flagACK) {
		t.Fatal("no answer to an allowed connection")
	}
	if !answer(bad, flagRST) {
		t.Error("the same port to another place was not refused")
	}
}

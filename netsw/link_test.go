package netsw_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

// udpFrame is a datagram as a guest would put it on its link.
func udpFrame(dst, src frame.MAC, from, to string, data []byte) []byte {
	return frame.AppendUDP(frame.AppendEth(nil, dst, src, frame.TypeIPv4),
		netip.MustParseAddrPort(from), netip.MustParseAddrPort(to), data)
}

var gwMAC = frame.MAC{0x02, 'v', 'k', 0, 0, 1}

func TestAddressesAreThePortsOwn(t *testing.T) {
	sw := open(t, netsw.Config{Subnet: netip.MustParsePrefix("10.77.0.0/24")})
	a, _ := join(t, sw, "a")
	b, _ := join(t, sw, "b")
	n := a.Net()
	if n.Addr != "10.77.0.2/24" || n.Gateway != "10.77.0.1" || n.MTU != 65520 || n.MAC != a.MAC() {
		t.Errorf("Net() = %+v", n)
	}
	if len(n.DNS) != 1 || n.DNS[0] != n.Gateway {
		t.Errorf("Net().DNS = %v, want the gateway", n.DNS)
	}
	if b.Addr().String() != "10.77.0.3" || a.MAC() == b.MAC() {
		t.Errorf("second port = %s %s", b.Addr(), b.MAC())
	}
	b.Remove()
	if c, _ := join(t, sw, "c"); c.Addr() != b.Addr() {
		t.Errorf("after Remove the address went to nobody: got %s, want %s", c.Addr(), b.Addr())
	}
}

func TestPortsThatCannotBe(t *testing.T) {
	sw := open(t, netsw.Config{Subnet: netip.MustParsePrefix("10.77.0.0/28")})
	join(t, sw, "build", "runner")
	for _, c := range []struct {
		pc   netsw.PortConfig
		kind fault.Kind
	}{
		{netsw.PortConfig{}, fault.Usage},
		{netsw.PortConfig{Name: "build"}, fault.Conflict},
		{netsw.PortConfig{Name: "x", Aliases: []string{"RUNNER."}}, fault.Conflict},
		{netsw.PortConfig{Name: "x", Addr: netip.MustParseAddr("10.77.0.2")}, fault.Conflict},
		{netsw.PortConfig{Name: "x", Addr: netip.MustParseAddr("10.77.0.1")}, fault.Usage},
		{netsw.PortConfig{Name: "x", Addr: netip.MustParseAddr("10.78.0.1")}, fault.Usage},
	} {
		if _, err := sw.AddPort(c.pc); err == nil || fault.KindOf(err) != c.kind {
			t.Errorf("AddPort(%+v) = %v, want %s", c.pc, err, c.kind)
		}
	}
	for i := range 12 { // .3 to .14
		if _, err := sw.AddPort(netsw.PortConfig{Name: string(rune('A' + i))}); err != nil {
			t.Fatalf("port %d: %v", i, err)
		}
	}
	if _, err := sw.AddPort(netsw.PortConfig{Name: "one more"}); fault.KindOf(err) != fault.Busy {
		t.Errorf("AddPort on a full subnet = %v, want busy", err)
	}
}

func TestSpoofedFramesAreDropped(t *testing.T) {
	sw := open(t, netsw.Config{HostLoopback: true})
	a, ga := join(t, sw, "a")
	b, gb := join(t, sw, "b")
	port := echoUDP(t)
	me, other := ga.MAC(), gb.MAC()
	mine, theirs := a.Addr().String()+":1000", b.Addr().String()+":1000"
	arp := func(e, s frame.MAC, ip netip.Addr) []byte {
		return frame.AppendARP(frame.AppendEth(nil, frame.Broadcast, e, frame.TypeARP),
			frame.ARP{Op: frame.ARPReply, SrcMAC: s, SrcIP: ip.As4(), DstMAC: frame.Broadcast, TargetIP: ip.As4()})
	}
	v6 := frame.AppendEth(nil, gwMAC, me, frame.TypeIPv6)
	multi := me
	multi[0] |= 1
	esp := frame.AppendIPv4(frame.AppendEth(nil, gwMAC, me, frame.TypeIPv4), a.Addr().As4(), frame.IP{192, 0, 2, 1}, 50, 0)
	for _, c := range []struct {
		what string
		f    []byte
		why  netsw.Drop
	}{
		{"another's MAC", udpFrame(gwMAC, other, mine, at(sw, port), []byte("x")), netsw.DropSrcMAC},
		{"a group MAC", udpFrame(gwMAC, multi, mine, at(sw, port), []byte("x")), netsw.DropSrcMAC},
		{"another's IP", udpFrame(gwMAC, me, theirs, at(sw, port), []byte("x")), netsw.DropSrcIP},
		{"another's IP to that guest", udpFrame(other, me, theirs, theirs, []byte("x")), netsw.DropSrcIP},
		{"the gateway's IP", udpFrame(other, me, at(sw, 53), theirs, []byte("x")), netsw.DropSrcIP},
		{"ARP for another's IP", arp(me, me, b.Addr()), netsw.DropSrcIP},
		{"ARP for another's MAC", arp(me, other, a.Addr()), netsw.DropSrcMAC},
		{"IPv6", v6, netsw.DropIPv6},
		{"VLAN", frame.AppendEth(nil, gwMAC, me, 0x8100), netsw.DropEtherType},
		{"runt", me[:], netsw.DropMalformed},
		{"cut packet", udpFrame(gwMAC, me, mine, at(sw, port), []byte("x"))[:30], netsw.DropMalformed},
		{"unknown MAC", udpFrame(frame.MAC{2, 2, 2, 2, 2, 2}, me, mine, theirs, nil), netsw.DropNoPort},
		{"loopback outside", udpFrame(gwMAC, me, mine, "127.0.0.1:80", nil), netsw.DropMartian},
		{"multicast outside", udpFrame(gwMAC, me, mine, "224.0.0.251:5353", nil), netsw.DropMartian},
		{"broadcast outside", udpFrame(gwMAC, me, mine, "255.255.255.255:9", nil), netsw.DropMartian},
		{"ESP", esp, netsw.DropProtocol},
	} {
		before := a.Stats().Dropped(c.why)
		if err := ga.Send(c.f); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		eventually(t, c.what+" counted as "+c.why.String(), func() bool { return a.Stats().Dropped(c.why) == before+1 })
	}
	if s := sw.Stats(); s.Sent+s.Received+s.Sessions != 0 || b.Stats().FramesOut != 0 {
		t.Errorf("something got through: %+v, %d frames to b", s, b.Stats().FramesOut)
	}
	// The port is not shut for it.
	if r := ga.WaitFrame(udpFrame(gwMAC, me, mine, at(sw, port), []byte("honest")), limit,
		func(e frame.Eth) bool { return bytes.HasSuffix(e.Payload, []byte("honest")) }); r == nil {
		t.Error("an honest frame after them got no answer")
	}
}

func TestGuestsTalkWithoutTheOutside(t *testing.T) {
	sw := open(t, netsw.Config{})
	a, ga := join(t, sw, "a")
	b, gb := join(t, sw, "b")
	ln, err := gb.Listen(80)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	want := pattern(8 << 20)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		_, _ = c.Write(want)
		c.Close()
	}()
	c, err := ga.Dial(within(t), b.Addr().String()+":80")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "from b to a", got, want)
	c.Close()
	s := sw.Stats()
	if s.Sent != 0 || s.Received != 0 || s.Flows != 0 {
		t.Errorf("Stats() = %+v, want nothing sent or received: it never left", s)
	}
	if a.Stats().Switched == 0 || b.Stats().Switched == 0 {
		t.Errorf("Switched = %d and %d, want both counted", a.Stats().Switched, b.Stats().Switched)
	}
}

func TestReplugGivesANewLink(t *testing.T) {
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "build")
	port := serve(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	if _, err := g.Dial(within(t), at(sw, port)); err != nil {
		t.Fatal(err)
	}
	f, err := p.Replug()
	if err != nil {
		t.Fatal(err)
	}
	g2 := netswtest.New(t, f, p.Net())
	p.CloseFile()
	eventually(t, "old flow gone", func() bool { return sw.Stats().OpenFlows == 0 })
	c, err := g2.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatalf("Dial on the new link = %v", err)
	}
	_, _ = c.Write([]byte("hi"))
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Errorf("echo on the new link: %v", err)
	}
	c.Close()
	if err := g.Send(make([]byte, 60)); err == nil {
		t.Error("the old link still takes frames")
	}
}

// A VM that dies closes its end; the port stays and can be plugged again.
func TestLinkEndsWithTheVM(t *testing.T) {
	sw := open(t, netsw.Config{})
	a, ga := join(t, sw, "a")
	_, gb := join(t, sw, "b")
	ga.Close()
	f := udpFrame(ga.MAC(), gb.MAC(), gb.Addr.String()+":1", a.Addr().String()+":1", nil)
	eventually(t, "frames to a dead VM counted", func() bool {
		if err := gb.Send(f); err != nil {
			t.Fatal(err)
		}
		return a.Stats().Dropped(netsw.DropNoLink) > 0
	})
	far, err := a.Replug()
	if err != nil {
		t.Fatal(err)
	}
	g2 := netswtest.New(t, far, a.Net())
	a.CloseFile()
	if g2.WaitFrame(nil, 0, func(frame.Eth) bool { return true }) != nil {
		t.Error("a frame came by itself")
	}
	got := make(chan struct{}, 1)
	stop := g2.Tap(func([]byte) {
		select {
		case got <- struct{}{}:
		default:
		}
	})
	defer stop()
	if err := gb.Send(f); err != nil {
		t.Fatal(err)
	}
	select {
	case <-got:
	case <-time.After(limit):
		t.Error("no frame on the new link")
	}
}

// A guest that reads nothing loses frames; memory and the others do not suffer.
func TestSlowGuestDrops(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, err := sw.AddPort(netsw.PortConfig{Name: "stuck"})
	if err != nil {
		t.Fatal(err)
	}
	_, gb := join(t, sw, "b")
	mac, _ := net.ParseMAC(p.MAC())
	f := udpFrame(frame.MAC(mac), gb.MAC(), gb.Addr.String()+":1", p.Addr().String()+":1", make([]byte, 60000))
	for range 400 { // far more than queue and socket hold
		if err := gb.Send(f); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "drops counted", func() bool { return p.Stats().Dropped(netsw.DropQueueFull) > 200 })
	if gb.WaitFrame(echoTo(gb, sw.Gateway(), 1), limit, isEchoReply) == nil {
		t.Error("the other guest got no answer from the gateway")
	}
}

func TestStreamOutOfStepIsUnplugged(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, err := sw.AddPort(netsw.PortConfig{Name: "liar"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.FileConn(p.File())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.CloseFile()
	_, _ = c.Write(binary.BigEndian.AppendUint32(nil, 1<<31))
	_ = c.SetReadDeadline(time.Now().Add(limit))
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("Read after a length that no frame has = %v, want EOF", err)
	}
}

// Frames cut anywhere and glued together arrive whole.
func TestStreamInPieces(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, err := sw.AddPort(netsw.PortConfig{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.FileConn(p.File())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.CloseFile()
	mac, _ := net.ParseMAC(p.MAC())
	one := frame.AppendICMP(frame.AppendEth(nil, gwMAC, frame.MAC(mac), frame.TypeIPv4), p.Addr().As4(), sw.Gateway().As4(),
		frame.ICMP{Type: frame.ICMPEcho, Rest: 7<<16 | 1, Payload: []byte("piece")})
	var stream []byte
	for range 20 {
		stream = append(binary.BigEndian.AppendUint32(stream, uint32(len(one))), one...)
	}
	go func() {
		for i := 0; i < len(stream); i += 7 {
			_, _ = c.Write(stream[i:min(i+7, len(stream))])
		}
	}()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	got := make([]byte, len(stream))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("reading 20 answers: %v", err)
	}
	if n := bytes.Count(got, []byte("piece")); n != 20 {
		t.Errorf("got %d answers, want 20", n)
	}
}

func TestCaptureHasBothDirections(t *testing.T) {
	var mu sync.Mutex
	var buf bytes.Buffer
	sw := open(t, netsw.Config{Pcap: writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return buf.Write(b)
	})})
	_, g := join(t, sw, "a")
	if g.WaitFrame(echoTo(g, sw.Gateway(), 1), limit, isEchoReply) == nil {
		t.Fatal("no echo")
	}
	if err := sw.Close(); err != nil {
		t.Fatal(err)
	}
	out := buf.String()
	if !strings.HasPrefix(out, "\x4d\x3c\xb2\xa1") || strings.Count(out, "netswtest ping") != 2 {
		t.Errorf("capture of %d bytes lacks its header or one of the two frames", len(out))
	}
}

func TestCaptureFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "job.pcap")
	sw := open(t, netsw.Config{PcapPath: path})
	_, g := join(t, sw, "a")
	if g.WaitFrame(echoTo(g, sw.Gateway(), 1), limit, isEchoReply) == nil {
		t.Fatal("no echo")
	}
	if err := sw.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || bytes.Count(b, []byte("netswtest ping")) != 2 {
		t.Errorf("capture of %d bytes, %v, want both frames", len(b), err)
	}
	if _, err := netsw.New(netsw.Config{PcapPath: filepath.Join(path, "no")}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("New with a capture that cannot be made = %v, want an error with its path", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestCloseTwiceAndAfter(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, _ := join(t, sw, "a")
	if err := sw.Close(); err != nil {
		t.Fatal(err)
	}
	if err := sw.Close(); err != nil {
		t.Errorf("second Close() = %v", err)
	}
	if _, err := sw.AddPort(netsw.PortConfig{Name: "b"}); err == nil {
		t.Error("AddPort after Close worked")
	}
	if _, err := p.Replug(); err == nil {
		t.Error("Replug after Close worked")
	}
}

// An idle guest costs its host next to nothing here.
func TestIdlePortIsSmall(t *testing.T) {
	sw := open(t, netsw.Config{})
	heap := func() uint64 {
		runtime.GC()
		runtime.GC() // pools let go at the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	const n = 32
	least := int64(1) << 40
	for range 3 { // what tests before this one left goes away meanwhile
		before := heap()
		for i := range n {
			if _, err := sw.AddPort(netsw.PortConfig{Name: fmt.Sprint(i)}); err != nil {
				t.Fatal(err)
			}
		}
		least = min(least, (int64(heap())-int64(before))/n)
		for _, p := range sw.Ports() {
			p.Remove()
		}
	}
	if least > 64<<10 {
		t.Errorf("an idle port takes %d KiB, want at most 64", least>>10)
	}
}

// A burst of small frames between guests is not lost for being read at once:
// the receiver takes as many as it can, and the switch sends on meanwhile.
func TestBurstBetweenGuests(t *testing.T) {
	sw := open(t, netsw.Config{})
	pa, err := sw.AddPort(netsw.PortConfig{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	ca, err := net.FileConn(pa.File())
	if err != nil {
		t.Fatal(err)
	}
	pa.CloseFile()
	defer ca.Close()
	pb, gb := join(t, sw, "b")
	const n = 4000
	var got atomic.Int64
	defer gb.Tap(func(b []byte) {
		if e, ok := frame.ParseEth(b); ok && e.Type == frame.TypeIPv4 {
			got.Add(1)
		}
	})()
	macA, _ := net.ParseMAC(pa.MAC())
	macB, _ := net.ParseMAC(pb.MAC())
	one := udpFrame(frame.MAC(macB), frame.MAC(macA), pa.Addr().String()+":1", pb.Addr().String()+":2", make([]byte, 10))
	one = append([]byte{0, 0, 0, byte(len(one))}, one...)
	if _, err := ca.Write(bytes.Repeat(one, n)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all frames", func() bool {
		return got.Load()+int64(pb.Stats().Dropped(netsw.DropQueueFull)+pa.Stats().Dropped(netsw.DropQueueFull)) == n
	})
	if got.Load() < n*9/10 {
		t.Errorf("%d of %d frames came; a: %+v, b: %+v", got.Load(), n, pa.Stats(), pb.Stats())
	}
}

// IPv6 is off, and who looks at the log is told so when the switch is made.
func TestIPv6IsSaidToBeOff(t *testing.T) {
	var log bytes.Buffer
	sw := open(t, netsw.Config{Log: logx.New(&log, slog.LevelInfo, false)})
	if sw.Close(); !strings.Contains(log.String(), "IPv6 is off") {
		t.Errorf("the log says %q", log.String())
	}
}

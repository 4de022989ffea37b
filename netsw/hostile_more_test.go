package netsw_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// A datagram to a network's broadcast address would be the host's own too, and
// every machine's beside it.
func TestHostileBroadcast(t *testing.T) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	var targets []netip.Addr
	for _, a := range list {
		n, ok := a.(*net.IPNet)
		if !ok || n.IP.To4() == nil || n.IP.IsLoopback() {
			continue
		}
		if ones, bits := n.Mask.Size(); bits == 32 && ones <= 30 {
			ip, _ := netip.AddrFromSlice(n.IP.To4())
			b := netip.PrefixFrom(ip, ones).Masked().Addr().As4()
			targets = append(targets, netip.AddrFrom4(b))
			last := binary.BigEndian.Uint32(b[:]) | (1<<(32-ones) - 1)
			targets = append(targets, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, last))))
		}
	}
	if targets == nil {
		t.Skip("needs an interface with a broadcast address")
	}
	pc, err := net.ListenUDP("udp4", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	got := make(chan string, 100)
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := pc.ReadFromUDP(b)
			if err != nil {
				return
			}
			got <- from.String() + " " + string(b[:n])
		}
	}()
	// An interface may call another address its broadcast address.
	last := targets[len(targets)-1]
	if c, err := netsw.DialUDP(netip.AddrPortFrom(last, 9)); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a socket to %s: %v %v", last, c, err)
	}
	for what, cfg := range map[string]netsw.Config{"": {}, "with the host's loopback": {HostLoopback: true}} {
		t.Run(what, func(t *testing.T) {
			sw := open(t, cfg)
			p, g := join(t, sw, "evil")
			for i, a := range targets {
				dst := netip.AddrPortFrom(a, uint16(pc.LocalAddr().(*net.UDPAddr).Port)).String()
				me := netip.AddrPortFrom(g.Addr, uint16(4000+i)).String()
				if g.WaitFrame(udpFrame(gwMAC, g.MAC(), me, dst, []byte("to all")), limit, unreachable(frame.CodeProhibited)) == nil {
					t.Errorf("%s over UDP: no \"prohibited\"", dst)
				}
			}
			if n := p.Stats().Dropped(netsw.DropDenied); n != uint64(len(targets)) {
				t.Errorf("%d are counted as denied, want %d", n, len(targets))
			}
			select {
			case m := <-got:
				t.Errorf("the host got a guest's datagram: %s", m)
			default:
			}
		})
	}
}

// A guest's errors are about what was sent to it: it ends no other's flows.
func TestHostileErrors(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, g := join(t, sw, "evil")
	_, victim := join(t, sw, "victim")
	quoting := func(to netip.Addr) []byte {
		quote := frame.AppendUDP(nil, netip.AddrPortFrom(sw.Gateway(), 53), netip.AddrPortFrom(to, 4000), nil)
		return frame.AppendICMP(frame.AppendEth(nil, gwMAC, g.MAC(), frame.TypeIPv4), g.Addr.As4(), sw.Gateway().As4(),
			frame.ICMP{Type: frame.ICMPUnreachable, Code: frame.CodePort, Payload: quote})
	}
	short := quoting(g.Addr)[:frame.EthSize+frame.IPv4Size+frame.ICMPSize+frame.IPv4Size-1]
	binary.BigEndian.PutUint16(short[frame.EthSize+2:], uint16(len(short)-frame.EthSize))
	for i, f := range [][]byte{quoting(g.Addr), quoting(victim.Addr), quoting(netip.MustParseAddr("192.0.2.1")), short} {
		before := p.Stats()
		if err := g.Send(f); err != nil {
			t.Fatal(err)
		}
		eventually(t, "taken", func() bool { return p.Stats().FramesIn > before.FramesIn })
		if g.WaitFrame(echoTo(g, sw.Gateway(), uint16(i)), limit, isEchoReply) == nil { // all before it is dealt with
			t.Fatal("the gateway does not answer any more")
		}
		if n := p.Stats().Dropped(netsw.DropMartian) - before.Dropped(netsw.DropMartian); (n == 1) != (i > 0) {
			t.Errorf("error %d: %d dropped", i, n)
		}
	}
}

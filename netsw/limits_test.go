package netsw_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// Flows of all kinds share the host's sockets, and give them back.
func TestSocketsAreShared(t *testing.T) {
	tcp := serve(t, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	udp := echoUDP(t)
	sw := open(t, netsw.Config{HostLoopback: true, UDPIdle: 200 * time.Millisecond})
	sw.SetMaxSockets(3)
	p, g := join(t, sw, "a")
	var conns []io.Closer
	for range 2 {
		c, err := g.Dial(within(t), at(sw, tcp))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	if b := g.Ask(t, at(sw, udp), []byte("third")); string(b) != "third" {
		t.Errorf("over UDP: %q", b)
	}
	if sw.UsedSockets() != 3 {
		t.Fatalf("%d sockets used, want 3", sw.UsedSockets())
	}
	if _, err := g.Dial(within(t), at(sw, tcp)); err == nil {
		t.Error("a fourth socket was there")
	}
	if n := p.Stats().Dropped(netsw.DropLimit); n == 0 {
		t.Error("not counted")
	}
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "all given back", func() bool { return sw.UsedSockets() == 0 })
	c, err := g.Dial(within(t), at(sw, tcp))
	if err != nil {
		t.Fatalf("after that: %v", err)
	}
	c.Close()
}

// A guest that takes nothing of what it asked for, on many connections, costs
// little for each that is one of many.
func TestManySlowReadersHoldLittle(t *testing.T) {
	const idle, greedy = 256, 200
	blob := make([]byte, 4<<20)
	port := serve(t, func(c *net.TCPConn) {
		if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
			_, _ = c.Write(blob) // until the guest takes it, which it does not
		}
	})
	sw := open(t, netsw.Config{HostLoopback: true})
	p, g := join(t, sw, "a")
	g.Deafen()
	dst := netip.MustParseAddrPort(at(sw, port))
	stop := g.Tap(func(b []byte) {
		e, _ := frame.ParseEth(b)
		ip, ok := frame.ParseIPv4(e.Payload)
		if !ok || ip.Proto != frame.ProtoTCP || ip.Payload[13] != flagSYN|flagACK {
			return
		}
		src := binary.BigEndian.Uint16(ip.Payload[2:])
		ack := binary.BigEndian.Uint32(ip.Payload[4:]) + 1
		go func() {
			_ = g.Send(tcpFrame(g, src, dst, 2, ack, flagACK))
			if src >= 2000 { // one byte: begin
				f := append(tcpFrame(g, src, dst, 2, ack, flagACK), '!')
				binary.BigEndian.PutUint16(f[frame.EthSize+2:], uint16(len(f)-frame.EthSize))
				_ = g.Send(f)
			}
		}()
	})
	defer stop()
	for i := range idle {
		_ = g.Send(tcpFrame(g, uint16(1000+i), dst, 1, 0, flagSYN))
	}
	eventually(t, "idle ones open", func() bool { return p.Stats().OpenFlows == idle })
	before := heapOf()
	for i := range greedy {
		_ = g.Send(tcpFrame(g, uint16(2000+i), dst, 1, 0, flagSYN))
	}
	eventually(t, "all have begun", func() bool {
		s := p.Stats()
		return s.OpenFlows == idle+greedy && s.Sent == greedy
	})
	// Until nothing comes in any more.
	var was uint64
	still := 0
	eventually(t, "all are full", func() bool {
		n := p.Stats().Received
		if still++; n != was || n < greedy*(8<<10) {
			still = 0
		}
		was = n
		return still > 100
	})
	grown := heapOf() - before
	t.Logf("each holds %d KiB", grown>>10/greedy)
	if grown > greedy*128<<10 {
		t.Errorf("%d readers that do not read hold %d MiB", greedy, grown>>20)
	}
}

// A guest that keeps connections to the resolver open leaves room for others.
func TestResolverConnectionsOfOneGuest(t *testing.T) {
	sw := open(t, netsw.Config{})
	p, g := join(t, sw, "greedy")
	_, other := join(t, sw, "other")
	var conns []net.Conn
	for range 40 {
		c, err := g.Dial(within(t), at(sw, 53))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	eventually(t, "those over the bound closed", func() bool { return p.Stats().Dropped(netsw.DropLimit) == 24 })
	c, err := other.Dial(within(t), at(sw, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	q := dnsQuery(1, "greedy", 1)
	_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...))
	if _, err := io.ReadFull(c, make([]byte, 14)); err != nil {
		t.Errorf("another guest got no answer: %v", err)
	}
	for _, c := range conns {
		c.Close()
	}
}

// What is held of hellos that never end is bounded, and let go of.
func TestHeldHellosAreLetGo(t *testing.T) {
	port, _ := outside(t, "")
	sw := open(t, netsw.Config{HostLoopback: true, Policy: &judge{}})
	_, g := join(t, sw, "a")
	hello := tlsHello(t, "ok.example")
	c, err := g.Dial(within(t), at(sw, port))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write(hello[:600])
	eventually(t, "held", func() bool { return sw.Held() >= 600 })
	_, _ = c.Write(hello[600:])
	eventually(t, "let go", func() bool { return sw.Held() == 0 })
	c.Close()
}

// A guest that announces the largest window and then takes nothing leaves of each
// fast connection what docs/network.md says, in large segments and in tiny ones.
func TestStalledFastReadersHoldWhatIsSaid(t *testing.T) {
	const flows, held, around = 8, 2 << 20, 5
	blob := make([]byte, 16<<20)
	for _, mss := range []uint16{65480, 1460, 64} {
		port := serve(t, func(c *net.TCPConn) { _, _ = c.Write(blob) }) // until it is closed
		sw := open(t, netsw.Config{HostLoopback: true})
		p, g := join(t, sw, "a")
		g.Deafen()
		dst := netip.MustParseAddrPort(at(sw, port))
		stop := g.Tap(func(b []byte) {
			e, _ := frame.ParseEth(b)
			ip, ok := frame.ParseIPv4(e.Payload)
			if !ok || ip.Proto != frame.ProtoTCP || ip.Payload[13] != flagSYN|flagACK {
				return
			}
			f := tcpFrame(g, binary.BigEndian.Uint16(ip.Payload[2:]), dst, 2, binary.BigEndian.Uint32(ip.Payload[4:])+1, flagACK)
			go func() { _ = g.Send(f) }()
		})
		before := heapOf()
		for i := range flows {
			f := append(tcpFrame(g, uint16(1000+i), dst, 1, 0, flagSYN), 2, 4, byte(mss>>8), byte(mss), 1, 3, 3, 14)
			binary.BigEndian.PutUint16(f[frame.EthSize+2:], uint16(len(f)-frame.EthSize))
			f[frame.EthSize+frame.IPv4Size+12] = 0x70
			_ = g.Send(f)
		}
		var was uint64
		still := 0
		eventually(t, "nothing comes any more", func() bool {
			n := p.Stats().Received
			if still++; n != was || n < flows*64<<10 {
				still = 0
			}
			was = n
			return still > 100
		})
		stop()
		grown := heapOf() - before
		t.Logf("MSS %d: each of %d has %d KiB and holds %d KiB", mss, flows, was>>10/flows, grown>>10/flows)
		if was > flows*held {
			t.Errorf("MSS %d: %d connections were sent %d KiB, want at most %d", mss, flows, was>>10, flows*held>>10)
		}
		if grown > flows*held*around {
			t.Errorf("MSS %d: %d connections hold %d KiB, want at most %d", mss, flows, grown>>10, flows*held*around>>10)
		}
		if err := sw.Close(); err != nil {
			t.Error(err)
		}
	}
}

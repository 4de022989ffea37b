package netsw_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// FuzzSwitch sends a guest's hostile stream to a whole switch. Policy refuses
// everything, so that nothing of it leaves this machine.
func FuzzSwitch(f *testing.F) {
	mac := frame.MAC{0x02, 'v', 'k', 1, 0, 2}
	other := frame.MAC{0x02, 'v', 'k', 1, 0, 3}
	one := func(b []byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	ping := frame.AppendICMP(frame.AppendEth(nil, gwMAC, mac, frame.TypeIPv4), frame.IP{10, 66, 0, 2}, frame.IP{10, 66, 0, 1},
		frame.ICMP{Type: frame.ICMPEcho, Payload: []byte("x")})
	syn := frame.AppendIPv4(frame.AppendEth(nil, gwMAC, mac, frame.TypeIPv4), frame.IP{10, 66, 0, 2}, frame.IP{192, 0, 2, 1}, frame.ProtoTCP, 20)
	syn = append(syn, 0x10, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0)
	dns := udpFrame(gwMAC, mac, "10.66.0.2:999", "10.66.0.1:53", dnsQuery(7, "a.test", 1))
	frag := append([]byte(nil), dns...)
	frag[frame.EthSize+6] = 0x20
	f.Add(one(ping))
	f.Add(one(syn))
	f.Add(one(dns))
	f.Add(append(one(frag), one(frag)...))
	f.Add(one(udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", make([]byte, 300))))
	f.Add(one(udpFrame(other, mac, "10.66.0.2:1", "10.66.0.3:2", []byte("switched"))))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})

	sw, err := netsw.New(netsw.Config{
		Subnet:    netip.MustParsePrefix("10.66.0.0/24"),
		Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9")},
		Policy:    policy.Func(func(policy.Flow) policy.Verdict { return policy.Verdict{} }),
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { sw.Close() })
	p, err := sw.AddPort(netsw.PortConfig{Name: "hostile"})
	if err != nil {
		f.Fatal(err)
	}
	q, err := sw.AddPort(netsw.PortConfig{Name: "victim"})
	if err != nil {
		f.Fatal(err)
	}
	if p.MAC() != mac.String() || q.MAC() != other.String() {
		f.Fatalf("ports have %s and %s; the seeds assume %s and %s", p.MAC(), q.MAC(), mac, other)
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		file, err := p.Replug()
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.FileConn(file)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		p.CloseFile()
		_ = c.SetDeadline(time.Now().Add(limit))
		before := p.Stats().FramesIn
		_, _ = c.Write(stream)
		// The gateway still answers, unless the stream got out of step (then the
		// link is closed) or ends within a frame that swallows the ping.
		whole, n := frames(stream)
		if whole {
			_, _ = c.Write(one(ping))
			eventually(t, "every frame taken", func() bool { return p.Stats().FramesIn >= before+uint64(n)+1 })
		}
		if s := sw.Stats(); s.Flows+s.Sessions+s.Sent+s.Received != 0 {
			t.Fatalf("something left: %+v", s)
		}
	})
}

// frames counts the frames of a stream; whole says that it ends after one.
func frames(b []byte) (whole bool, n int) {
	for len(b) >= frame.LenSize {
		l := binary.BigEndian.Uint32(b)
		if l > frame.Max || int(l)+frame.LenSize > len(b) {
			return false, n
		}
		b = b[frame.LenSize+l:]
		n++
	}
	return len(b) == 0, n
}

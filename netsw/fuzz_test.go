package netsw_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"virtkit/core/policy"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// FuzzSwitch sends a guest's hostile stream to two whole switches. The policy of
// one refuses everything, so that nothing leaves; that of the other allows one
// server of this machine, at the gateway's address, and every name. Nothing
// leaves this machine either way.
func FuzzSwitch(f *testing.F) {
	mac := frame.MAC{0x02, 'v', 'k', 1, 0, 2}
	other := frame.MAC{0x02, 'v', 'k', 1, 0, 3}
	one := func(b []byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	ping := frame.AppendICMP(frame.AppendEth(nil, gwMAC, mac, frame.TypeIPv4), frame.IP{10, 66, 0, 2}, frame.IP{10, 66, 0, 1},
		frame.ICMP{Type: frame.ICMPEcho, Payload: []byte("x")})
	syn := func(dst frame.IP, port byte) []byte {
		b := frame.AppendIPv4(frame.AppendEth(nil, gwMAC, mac, frame.TypeIPv4), frame.IP{10, 66, 0, 2}, dst, frame.ProtoTCP, 20)
		return append(b, 0x10, 0, 0, port, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0)
	}
	dns := udpFrame(gwMAC, mac, "10.66.0.2:999", "10.66.0.1:53", dnsQuery(7, "a.test", 1))
	frag := append([]byte(nil), dns...)
	frag[frame.EthSize+6] = 0x20
	f.Add(one(ping))
	f.Add(one(syn(frame.IP{192, 0, 2, 1}, 80)))
	f.Add(one(syn(frame.IP{10, 66, 0, 1}, fuzzPort)))
	f.Add(one(udpFrame(gwMAC, mac, "10.66.0.2:999", "10.66.0.1:7", []byte("echo"))))
	f.Add(one(dns))
	f.Add(append(one(frag), one(frag)...))
	f.Add(one(udpFrame(frame.Broadcast, mac, "0.0.0.0:68", "255.255.255.255:67", make([]byte, 300))))
	f.Add(one(udpFrame(other, mac, "10.66.0.2:1", "10.66.0.3:2", []byte("switched"))))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})

	port := serveBoth(f, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	gw := netip.AddrFrom4([4]byte{10, 66, 0, 1})
	ports := make([]*netsw.Port, 2)
	switches := make([]*netsw.Switch, 2)
	for i, decide := range []policy.Func{
		func(policy.Flow) policy.Verdict { return policy.Verdict{} },
		func(fl policy.Flow) policy.Verdict {
			return policy.Verdict{Allow: fl.Proto == policy.DNS || fl.Dst == netip.AddrPortFrom(gw, uint16(port))}
		},
	} {
		sw, err := netsw.New(netsw.Config{
			Subnet:    netip.MustParsePrefix("10.66.0.0/24"),
			Upstreams: nxdomain(f),
			Policy:    decide,
			HostPorts: []int{port},
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
		switches[i], ports[i] = sw, p
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		stream = bytes.Clone(stream)
		toPort(stream, gw.As4(), uint16(port))
		for _, p := range ports {
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
		}
		if s := switches[0].Stats(); s.Flows+s.Sessions+s.Sent+s.Received != 0 {
			t.Fatalf("something left: %+v", s)
		}
	})
}

// fuzzPort stands for the port of the allowed server, which differs each time.
const fuzzPort = 7

// toPort has the frames of a stream that go to dst's fuzzPort go to port.
func toPort(b []byte, dst frame.IP, port uint16) {
	const at = frame.EthSize + frame.IPv4Size + 2
	for len(b) >= frame.LenSize {
		l := binary.BigEndian.Uint32(b)
		if l > frame.Max || int(l)+frame.LenSize > len(b) {
			return
		}
		f := b[frame.LenSize:][:l]
		if len(f) >= at+2 && f[frame.EthSize] == 0x45 && frame.IP(f[frame.EthSize+16:]) == dst && binary.BigEndian.Uint16(f[at:]) == fuzzPort {
			binary.BigEndian.PutUint16(f[at:], port)
		}
		b = b[frame.LenSize+l:]
	}
}

// serveBoth is serve with a server of UDP on the same port, which echoes.
func serveBoth(t testing.TB, handle func(*net.TCPConn)) int {
	t.Helper()
	for range 100 {
		port := serve(t, handle)
		c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			continue // another's
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 64<<10)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				_, _ = c.WriteToUDPAddrPort(b[:n], from)
			}
		}()
		return port
	}
	t.Fatal("no port is free for both TCP and UDP")
	return 0
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

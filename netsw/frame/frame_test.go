package frame_test

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/netsw/frame"
)

var (
	macA = frame.MAC{2, 0, 0, 0, 0, 1}
	macB = frame.MAC{2, 0, 0, 0, 0, 2}
	ipA  = frame.IP{192, 0, 2, 1}
	ipB  = frame.IP{192, 0, 2, 2}
)

func TestARPThereAndBack(t *testing.T) {
	want := frame.ARP{Op: frame.ARPRequest, SrcMAC: macA, SrcIP: ipA, DstMAC: macB, TargetIP: ipB}
	got, ok := frame.ParseARP(frame.AppendARP(nil, want))
	if !ok || got != want {
		t.Errorf("ParseARP(AppendARP(%+v)) = %+v, %v", want, got, ok)
	}
}

func TestUDPThereAndBack(t *testing.T) {
	b := frame.AppendUDP(nil, netip.MustParseAddrPort("192.0.2.1:68"), netip.MustParseAddrPort("192.0.2.2:67"), []byte("hello"))
	ip, ok := frame.ParseIPv4(append(b, 0, 0, 0)) // padded
	if !ok || ip.Src != ipA || ip.Dst != ipB || ip.Proto != frame.ProtoUDP || ip.Fragment() {
		t.Fatalf("ParseIPv4 = %+v, %v", ip, ok)
	}
	if s := frame.Checksum(ip.Header, 0); s != 0 {
		t.Errorf("the header's checksum leaves %#x, want 0", s)
	}
	u, ok := frame.ParseUDP(ip.Payload)
	if want := (frame.UDP{Src: 68, Dst: 67, Payload: []byte("hello")}); !ok || !cmp.Equal(u, want) {
		t.Errorf("ParseUDP = %+v, %v, want %+v", u, ok, want)
	}
}

// RFC 1071's own example, and the same split at every odd place.
func TestChecksum(t *testing.T) {
	b := []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}
	if got := frame.Checksum(b, 0); got != ^uint16(0xddf2) {
		t.Errorf("Checksum(% x) = %#x, want %#x", b, got, ^uint16(0xddf2))
	}
	slow := func(b []byte) uint16 {
		var s uint32
		for i, c := range b {
			s += uint32(c) << (8 * (1 - i&1))
			s = s&0xffff + s>>16
		}
		return ^uint16(s)
	}
	var long []byte
	for i := range 100 {
		long = append(long, byte(i*37))
		if got, want := frame.Checksum(long, 0), slow(long); got != want {
			t.Fatalf("Checksum of %d bytes = %#x, want %#x", len(long), got, want)
		}
	}
}

func TestUnreachableQuotes(t *testing.T) {
	b := frame.AppendUDP(nil, netip.MustParseAddrPort("192.0.2.1:1000"), netip.MustParseAddrPort("198.51.100.7:9"), bytes.Repeat([]byte("x"), 50))
	p, _ := frame.ParseIPv4(b)
	ip, ok := frame.ParseIPv4(frame.AppendUnreachable(nil, ipB, frame.CodePort, &p))
	if !ok || ip.Src != ipB || ip.Dst != ipA || frame.Checksum(ip.Payload, 0) != 0 {
		t.Fatalf("AppendUnreachable = %+v, %v", ip, ok)
	}
	m, _ := frame.ParseICMP(ip.Payload)
	if m.Type != frame.ICMPUnreachable || m.Code != frame.CodePort || !bytes.Equal(m.Payload, b[:28]) {
		t.Errorf("message = %+v, want the header and 8 bytes quoted", m)
	}
}

func TestMAC(t *testing.T) {
	if got := (frame.MAC{0x02, 0x1a, 0xb0, 3, 0xff, 5}).String(); got != "02:1a:b0:03:ff:05" {
		t.Errorf("String() = %s", got)
	}
	for m, want := range map[frame.MAC]bool{frame.Broadcast: true, {1, 0, 0x5e}: true, {0x33, 0x33}: true, macA: false, {0xfe, 0xff, 0xff}: false} {
		if m.Multicast() != want {
			t.Errorf("%s: Multicast() = %v", m, !want)
		}
	}
}

// The numbers of a header, written out by hand (RFC 791, 3.1; RFC 792).
func TestNumbers(t *testing.T) {
	head := []byte{0x45, 0, 0, 28, 0x12, 0x34, 0x20, 0x03, 7, frame.ProtoICMP, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2}
	p, ok := frame.ParseIPv4(append(head, 8, 1, 0, 0, 0xa1, 0xb2, 0xc3, 0xd4))
	if !ok || p.ID != 0x1234 || !p.More || p.Offset != 24 || p.TTL != 7 || p.Proto != frame.ProtoICMP || !p.Fragment() {
		t.Fatalf("ParseIPv4 = %+v, %v", p, ok)
	}
	m, ok := frame.ParseICMP(append(p.Payload, "data"...))
	if want := (frame.ICMP{Type: 8, Code: 1, Rest: 0xa1b2c3d4, Payload: []byte("data")}); !ok || !cmp.Equal(m, want) {
		t.Errorf("ParseICMP = %+v, %v, want %+v", m, ok, want)
	}
	// The last fragment of the largest packet there may be, and one byte more.
	for n, want := range map[int]bool{7: true, 8: false} {
		b := append([]byte{0x45, 0, 0, byte(20 + n), 0, 0, 0x1f, 0xff, 1, frame.ProtoUDP, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2}, make([]byte, n)...)
		if p, ok := frame.ParseIPv4(b); ok != want || ok && p.Offset != 65528 {
			t.Errorf("a last fragment of %d bytes: %+v, %v", n, p, ok)
		}
	}
}

// The pseudo header (RFC 9293, 3.1), against its bytes written out.
func TestPseudo(t *testing.T) {
	s, d := frame.IP{10, 21, 32, 43}, frame.IP{192, 168, 254, 7}
	body := []byte("an odd number of bytes!")
	whole := append([]byte{10, 21, 32, 43, 192, 168, 254, 7, 0, frame.ProtoTCP, 0, byte(len(body))}, body...)
	if got, want := frame.Checksum(body, frame.Pseudo(s, d, frame.ProtoTCP, len(body))), frame.Checksum(whole, 0); got != want {
		t.Errorf("with Pseudo %#x, with its bytes %#x", got, want)
	}
}

func TestLies(t *testing.T) {
	good := frame.AppendUDP(nil, netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:2"), []byte("data"))
	edit := func(f func(b []byte)) []byte { b := bytes.Clone(good); f(b); return b }
	for what, b := range map[string][]byte{
		"empty": {}, "short": good[:19], "version 6": edit(func(b []byte) { b[0] = 0x65 }),
		"header of 16": edit(func(b []byte) { b[0] = 0x44 }), "header past the end": edit(func(b []byte) { b[0] = 0x4f; b[3] = 40 }),
		"total past the end": edit(func(b []byte) { b[3]++ }), "total within the header": edit(func(b []byte) { b[3] = 19 }),
		"fragment past 64 KiB": edit(func(b []byte) { b[6], b[7] = 0x1f, 0xff }),
	} {
		if p, ok := frame.ParseIPv4(b); ok {
			t.Errorf("%s: ParseIPv4 = %+v, want not ok", what, p)
		}
	}
	p, _ := frame.ParseIPv4(good)
	for what, n := range map[string]byte{"more than there is": 13, "less than a header": 7} {
		b := bytes.Clone(p.Payload)
		b[5] = n
		if u, ok := frame.ParseUDP(b); ok {
			t.Errorf("%s: ParseUDP = %+v, want not ok", what, u)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(frame.AppendUDP(frame.AppendEth(nil, macA, macB, frame.TypeIPv4), netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:2"), []byte("data")))
	f.Add(frame.AppendARP(frame.AppendEth(nil, macA, macB, frame.TypeARP), frame.ARP{Op: 1, SrcMAC: macB, SrcIP: ipB, TargetIP: ipA}))
	f.Add(frame.AppendICMP(frame.AppendEth(nil, macA, macB, frame.TypeIPv4), ipA, ipB, frame.ICMP{Type: frame.ICMPEcho, Payload: []byte("p")}))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := frame.ParseEth(b)
		if !ok {
			return
		}
		if got := frame.AppendEth(nil, e.Dst, e.Src, e.Type); !bytes.Equal(got, b[:frame.EthSize]) {
			t.Errorf("header does not survive: % x", got)
		}
		if a, ok := frame.ParseARP(e.Payload); ok && !bytes.Equal(frame.AppendARP(nil, a), e.Payload[:frame.ARPSize]) {
			t.Errorf("ARP does not survive: %+v", a)
		}
		ip, ok := frame.ParseIPv4(e.Payload)
		if !ok {
			return
		}
		if len(ip.Header)+len(ip.Payload) > len(e.Payload) || ip.Offset+len(ip.Payload) > frame.MaxPacket {
			t.Errorf("packet larger than its frame or than any: %+v", ip)
		}
		if u, ok := frame.ParseUDP(ip.Payload); ok && len(u.Payload) > len(ip.Payload)-frame.UDPSize {
			t.Errorf("datagram larger than its packet: %+v", u)
		}
		frame.ParseICMP(ip.Payload)
		out := frame.AppendUnreachable(nil, ipA, 0, &ip)
		if _, ok := frame.ParseIPv4(out); !ok {
			t.Errorf("an error about it does not parse: % x", out)
		}
	})
}

// The fast sum is the one that RFC 1071 describes, for every length and for
// the bytes that carry most.
func TestChecksumIsRFC1071s(t *testing.T) {
	slow := func(b []byte, sum uint32) uint16 {
		s := uint64(sum)
		for i, c := range b {
			s += uint64(c) << (8 * (1 - i%2))
		}
		for s>>16 != 0 {
			s = s&0xffff + s>>16
		}
		return ^uint16(s)
	}
	ones, mixed := make([]byte, 300), make([]byte, 300)
	for i := range ones {
		ones[i], mixed[i] = 0xff, byte(i*7+i>>3)
	}
	for n := range 300 {
		for _, b := range [][]byte{ones[:n], mixed[:n], mixed[300-n:]} {
			for _, sum := range []uint32{0, 1, 0xffff, 0x3fffc} {
				if got, want := frame.Checksum(b, sum), slow(b, sum); got != want {
					t.Fatalf("Checksum(%d bytes, %#x) = %#x, want %#x", n, sum, got, want)
				}
			}
		}
	}
}

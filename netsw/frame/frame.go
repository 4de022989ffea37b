// Package frame reads and writes the frames of the switch: Ethernet, ARP,
// IPv4, UDP and ICMP, as far as the switch itself looks into them. Readers
// take bytes from a guest that wishes harm: they never panic, never read past
// what they were given, and allocate nothing. Writers append to a slice.
//
// On a link each frame is preceded by its length, 4 bytes, big endian
// (QEMU's "-netdev stream").
package frame

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
)

// Sizes in bytes.
const (
	LenSize   = 4  // the length before a frame
	EthSize   = 14 // Ethernet header, no VLAN tag
	ARPSize   = 28
	IPv4Size  = 20 // without options
	UDPSize   = 8
	ICMPSize  = 8
	MaxPacket = 65535               // an IPv4 packet
	Max       = EthSize + MaxPacket // a frame: nothing longer is one
)

// EtherTypes.
const (
	TypeIPv4 = 0x0800
	TypeARP  = 0x0806
	TypeIPv6 = 0x86dd
)

// IP protocol numbers.
const (
	ProtoICMP = 1
	ProtoTCP  = 6
	ProtoUDP  = 17
)

// MAC is a link address; usable as a map key.
type MAC [6]byte

// Broadcast is everyone's MAC.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// String is the usual colon form.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// Multicast tells group addresses, broadcast included.
func (m MAC) Multicast() bool { return m[0]&1 != 0 }

// IP is an IPv4 address; usable as a map key.
type IP [4]byte

// Addr is the address as netip has it.
func (i IP) Addr() netip.Addr { return netip.AddrFrom4(i) }

// Eth is an Ethernet header and what follows.
type Eth struct {
	Dst, Src MAC
	Type     uint16
	Payload  []byte
}

// ParseEth reads a frame.
func ParseEth(f []byte) (e Eth, ok bool) {
	if len(f) < EthSize {
		return e, false
	}
	copy(e.Dst[:], f)
	copy(e.Src[:], f[6:])
	e.Type = binary.BigEndian.Uint16(f[12:])
	e.Payload = f[EthSize:]
	return e, true
}

// PutEth writes a header into b, which has EthSize bytes at least.
func PutEth(b []byte, dst, src MAC, typ uint16) {
	copy(b, dst[:])
	copy(b[6:], src[:])
	binary.BigEndian.PutUint16(b[12:], typ)
}

// AppendEth appends a header.
func AppendEth(b []byte, dst, src MAC, typ uint16) []byte {
	b = append(b, dst[:]...)
	b = append(b, src[:]...)
	return binary.BigEndian.AppendUint16(b, typ)
}

// ARP operations.
const (
	ARPRequest = 1
	ARPReply   = 2
)

// ARP is a request or reply for IPv4 over Ethernet.
type ARP struct {
	Op       uint16
	SrcMAC   MAC
	SrcIP    IP
	DstMAC   MAC
	TargetIP IP
}

// ParseARP reads the payload of an ARP frame.
func ParseARP(b []byte) (a ARP, ok bool) {
	if len(b) < ARPSize || binary.BigEndian.Uint16(b) != 1 || binary.BigEndian.Uint16(b[2:]) != TypeIPv4 ||
		b[4] != 6 || b[5] != 4 {
		return a, false
	}
	a.Op = binary.BigEndian.Uint16(b[6:])
	copy(a.SrcMAC[:], b[8:])
	copy(a.SrcIP[:], b[14:])
	copy(a.DstMAC[:], b[18:])
	copy(a.TargetIP[:], b[24:])
	return a, true
}

// AppendARP appends the payload.
func AppendARP(b []byte, a ARP) []byte {
	b = append(b, 0, 1, TypeIPv4>>8, TypeIPv4&0xff, 6, 4)
	b = binary.BigEndian.AppendUint16(b, a.Op)
	b = append(b, a.SrcMAC[:]...)
	b = append(b, a.SrcIP[:]...)
	b = append(b, a.DstMAC[:]...)
	return append(b, a.TargetIP[:]...)
}

// IPv4 is a packet. Header and Payload lie in the bytes it was read from.
type IPv4 struct {
	Src, Dst IP
	Proto    uint8
	TTL      uint8
	ID       uint16
	Offset   int  // of a fragment, in bytes
	More     bool // fragments follow
	Header   []byte
	Payload  []byte
}

// Fragment tells a piece from a whole packet.
func (p *IPv4) Fragment() bool { return p.More || p.Offset != 0 }

// ParseIPv4 reads a packet; bytes after its total length (Ethernet's padding)
// are left out. The checksum is not looked at: links do not corrupt.
func ParseIPv4(b []byte) (p IPv4, ok bool) {
	if len(b) < IPv4Size || b[0]>>4 != 4 {
		return p, false
	}
	hl := int(b[0]&15) * 4
	total := int(binary.BigEndian.Uint16(b[2:]))
	if hl < IPv4Size || total < hl || total > len(b) {
		return p, false
	}
	p.ID = binary.BigEndian.Uint16(b[4:])
	fl := binary.BigEndian.Uint16(b[6:])
	p.More = fl&0x2000 != 0
	p.Offset = int(fl&0x1fff) * 8
	p.TTL = b[8]
	p.Proto = b[9]
	copy(p.Src[:], b[12:])
	copy(p.Dst[:], b[16:])
	p.Header, p.Payload = b[:hl], b[hl:total]
	// A fragment that would end past the largest packet is an attack.
	if p.Offset+len(p.Payload) > MaxPacket {
		return p, false
	}
	return p, true
}

// AppendIPv4 appends a header (no options, not to be fragmented, TTL 64) for
// a payload of n bytes that the caller appends after it.
func AppendIPv4(b []byte, src, dst IP, proto uint8, n int) []byte {
	at := len(b)
	b = append(b, 0x45, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(IPv4Size+n))
	b = append(b, 0, 0, 0x40, 0, 64, proto, 0, 0)
	b = append(b, src[:]...)
	b = append(b, dst[:]...)
	binary.BigEndian.PutUint16(b[at+10:], Checksum(b[at:], 0))
	return b
}

// LetCut lets the packet that begins with this header be cut on its way; id
// tells its pieces from those of others.
func LetCut(h []byte, id uint16) {
	h = h[:IPv4Size]
	binary.BigEndian.PutUint16(h[4:], id)
	h[6], h[10], h[11] = 0, 0, 0
	binary.BigEndian.PutUint16(h[10:], Checksum(h, 0))
}

// UDP is a datagram.
type UDP struct {
	Src, Dst uint16
	Payload  []byte
}

// ParseUDP reads the payload of an unfragmented IPv4 packet.
func ParseUDP(b []byte) (u UDP, ok bool) {
	if len(b) < UDPSize {
		return u, false
	}
	n := int(binary.BigEndian.Uint16(b[4:]))
	if n < UDPSize || n > len(b) {
		return u, false
	}
	u.Src = binary.BigEndian.Uint16(b)
	u.Dst = binary.BigEndian.Uint16(b[2:])
	u.Payload = b[UDPSize:n]
	return u, true
}

// AppendUDP appends an IPv4 packet with a datagram in it.
func AppendUDP(b []byte, src, dst netip.AddrPort, data []byte) []byte {
	s, d := IP(src.Addr().As4()), IP(dst.Addr().As4())
	n := UDPSize + len(data)
	b = AppendIPv4(b, s, d, ProtoUDP, n)
	at := len(b)
	b = binary.BigEndian.AppendUint16(b, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	b = append(b, 0, 0)
	b = append(b, data...)
	sum := Checksum(b[at:], Pseudo(s, d, ProtoUDP, n))
	if sum == 0 { // 0 means "none" on the wire
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(b[at+6:], sum)
	return b
}

// ICMP types and the codes used here.
const (
	ICMPEchoReply   = 0
	ICMPUnreachable = 3
	ICMPEcho        = 8
	ICMPTimeOut     = 11
	ICMPBadParam    = 12

	CodeNet        = 0
	CodeHost       = 1
	CodePort       = 3
	CodeProhibited = 13 // by administration
)

// ICMP is a message; Rest is the second word (id and sequence of an echo).
type ICMP struct {
	Type, Code uint8
	Rest       uint32
	Payload    []byte
}

// ParseICMP reads the payload of an unfragmented IPv4 packet.
func ParseICMP(b []byte) (m ICMP, ok bool) {
	if len(b) < ICMPSize {
		return m, false
	}
	return ICMP{Type: b[0], Code: b[1], Rest: binary.BigEndian.Uint32(b[4:]), Payload: b[ICMPSize:]}, true
}

// AppendICMP appends an IPv4 packet with a message in it. It may be cut on its
// way, since a long echo's answer goes to who sent it, however narrow that way;
// its pieces are told apart by the echo's sequence number.
func AppendICMP(b []byte, src, dst IP, m ICMP) []byte {
	head := len(b)
	b = AppendIPv4(b, src, dst, ProtoICMP, ICMPSize+len(m.Payload))
	at := len(b)
	LetCut(b[head:at], uint16(m.Rest))
	b = append(b, m.Type, m.Code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, m.Rest)
	b = append(b, m.Payload...)
	binary.BigEndian.PutUint16(b[at+2:], Checksum(b[at:], 0))
	return b
}

// AppendUnreachable appends the ICMP error that says why a packet did not get
// there; it quotes the packet's header and the 8 bytes after it.
func AppendUnreachable(b []byte, from IP, code uint8, p *IPv4) []byte {
	quote := make([]byte, 0, 68)
	quote = append(quote, p.Header...)
	quote = append(quote, p.Payload[:min(8, len(p.Payload))]...)
	return AppendICMP(b, from, p.Src, ICMP{Type: ICMPUnreachable, Code: code, Payload: quote})
}

// wideStep is how many bytes sumWide takes at a time, and wideLeast from how many
// on it is worth its start.
const (
	wideStep  = 128
	wideLeast = 256
)

// Checksum is the Internet checksum of b, continued from a partial sum
// (RFC 1071). It adds eight bytes at a time in the processor's own order with
// the carry going round, which the order of bytes does not matter to, and
// turns the sum at the end. Of what is long, most is added by vector
// instructions where there are some: four times as fast.
func Checksum(b []byte, sum uint32) uint16 {
	var acc, carry uint64
	if n := len(b) &^ (wideStep - 1); wideSum && n >= wideLeast {
		acc = sumWide(b[:n])
		b = b[n:]
	}
	for len(b) >= 64 {
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[8:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[16:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[24:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[32:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[40:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[48:]), carry)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b[56:64]), carry)
		b = b[64:]
	}
	for len(b) >= 8 {
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(b), carry)
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		acc, carry = bits.Add64(acc, binary.LittleEndian.Uint64(last[:]), carry)
	}
	acc, carry = bits.Add64(acc, 0, carry)
	acc += carry
	s := uint64(bits.ReverseBytes16(fold(acc))) + uint64(sum)
	return ^fold(s)
}

// fold adds up 16 bits at a time, until 16 are left.
func fold(s uint64) uint16 {
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// Pseudo is the partial sum of the pseudo header of n bytes (RFC 9293, 3.1).
func Pseudo(s, d IP, proto uint8, n int) uint32 {
	return uint32(s[0])<<8 + uint32(s[1]) + uint32(s[2])<<8 + uint32(s[3]) +
		uint32(d[0])<<8 + uint32(d[1]) + uint32(d[2])<<8 + uint32(d[3]) +
		uint32(proto) + uint32(n)
}

// Package dhcpd answers DHCP for a guest whose address is fixed already: one
// port, one lease. It is there for images that configure themselves; guests of
// ours are told their address by the agent.
package dhcpd

import (
	"encoding/binary"
	"strings"

	"virtkit/netsw/frame"
)

// Ports of the protocol.
const (
	ServerPort = 67
	ClientPort = 68
)

// Lease is what a guest is told.
type Lease struct {
	MAC      frame.MAC
	Addr     frame.IP
	Server   frame.IP // and router
	Bits     int      // of the subnet
	DNS      frame.IP
	Search   []string
	MTU      int
	Hostname string
}

// Messages of the protocol (option 53).
const (
	discover = 1
	offer    = 2
	request  = 3
	decline  = 4
	ack      = 5
	nak      = 6
	release  = 7
	inform   = 8
)

// LeaseTime, in seconds: the address is the port's for the switch's life, so
// guests need not come back often.
const LeaseTime = 7 * 24 * 3600

const (
	fixed = 236 // BOOTP's part
	magic = 0x63825363
)

type message struct {
	xid    [4]byte
	flags  uint16
	ciaddr frame.IP
	giaddr frame.IP
	chaddr frame.MAC
	kind   byte
	wants  frame.IP // option 50
	server frame.IP // option 54
	params []byte   // option 55
}

func parse(b []byte) (m message, ok bool) {
	// A BOOTREQUEST over Ethernet with 6 byte addresses.
	if len(b) < fixed+4 || b[0] != 1 || b[1] != 1 || b[2] != 6 || binary.BigEndian.Uint32(b[fixed:]) != magic {
		return m, false
	}
	copy(m.xid[:], b[4:])
	m.flags = binary.BigEndian.Uint16(b[10:])
	copy(m.ciaddr[:], b[12:])
	copy(m.giaddr[:], b[24:])
	copy(m.chaddr[:], b[28:])
	for o := b[fixed+4:]; len(o) > 0; {
		switch o[0] {
		case 0:
			o = o[1:]
			continue
		case 255:
			return m, m.kind != 0
		}
		if len(o) < 2 || len(o) < 2+int(o[1]) {
			return m, false
		}
		code, v := o[0], o[2:2+int(o[1])]
		o = o[2+int(o[1]):]
		switch {
		case code == 53 && len(v) == 1:
			m.kind = v[0]
		case code == 50 && len(v) == 4:
			m.wants = frame.IP(v)
		case code == 54 && len(v) == 4:
			m.server = frame.IP(v)
		case code == 55:
			m.params = v
		}
	}
	return m, m.kind != 0 // no end mark: forgiven
}

// Reply answers a request's payload and says to which address the answer goes
// (255.255.255.255 when the guest has none). A nil answer with ok means that
// none is due; not ok, that the request is not one.
func Reply(req []byte, l Lease) (reply []byte, dst frame.IP, ok bool) {
	m, ok := parse(req)
	if !ok || m.chaddr != l.MAC || m.giaddr != (frame.IP{}) {
		return nil, dst, false
	}
	all := frame.IP{255, 255, 255, 255}
	dst = all
	kind := byte(ack)
	switch m.kind {
	case discover:
		kind = offer
	case request:
		if (m.server != frame.IP{}) && m.server != l.Server {
			return nil, dst, true // it took another's offer
		}
		asked := m.wants
		if (asked == frame.IP{}) {
			asked = m.ciaddr
		}
		if asked != l.Addr {
			return encode(m, l, nak, frame.IP{}), all, true
		}
	case inform:
		if m.ciaddr == l.Addr {
			dst = l.Addr
		}
		return encode(m, l, ack, frame.IP{}), dst, true
	case decline, release:
		return nil, dst, true // the address stays the port's
	default:
		return nil, dst, false
	}
	switch {
	case m.ciaddr == l.Addr:
		dst = l.Addr
	case m.flags&0x8000 == 0:
		dst = l.Addr // the link address is known: no need for a broadcast
	}
	return encode(m, l, kind, l.Addr), dst, true
}

func encode(m message, l Lease, kind byte, yours frame.IP) []byte {
	b := make([]byte, fixed, 400)
	b[0], b[1], b[2] = 2, 1, 6
	copy(b[4:], m.xid[:])
	binary.BigEndian.PutUint16(b[10:], m.flags)
	if kind != nak {
		copy(b[12:], m.ciaddr[:])
		copy(b[20:], l.Server[:])
	}
	copy(b[16:], yours[:])
	copy(b[28:], l.MAC[:])
	b = binary.BigEndian.AppendUint32(b, magic)
	b = append(b, 53, 1, kind, 54, 4)
	b = append(b, l.Server[:]...)
	if kind != nak {
		if m.kind != inform {
			b = append(b, 51, 4)
			b = binary.BigEndian.AppendUint32(b, LeaseTime)
		}
		mask := ^uint32(0) << (32 - l.Bits)
		b = append(b, 1, 4)
		b = binary.BigEndian.AppendUint32(b, mask)
		b = append(b, 3, 4)
		b = append(b, l.Server[:]...)
		b = append(b, 6, 4)
		b = append(b, l.DNS[:]...)
		b = append(b, 26, 2)
		b = binary.BigEndian.AppendUint16(b, uint16(l.MTU))
		if n := len(l.Hostname); n > 0 && n < 64 {
			b = append(append(b, 12, byte(n)), l.Hostname...)
		}
		if s := searchList(l.Search); len(s) > 0 {
			b = append(append(b, 119, byte(len(s))), s...)
		}
	}
	b = append(b, 255)
	for len(b) < 300 { // old clients want BOOTP's least size
		b = append(b, 0)
	}
	return b
}

// searchList is option 119 without compression, cut to what one option holds.
func searchList(names []string) []byte {
	var out []byte
	for _, n := range names {
		var e []byte
		for label := range strings.SplitSeq(strings.TrimSuffix(n, "."), ".") {
			if len(label) == 0 || len(label) > 63 {
				e = nil
				break
			}
			e = append(append(e, byte(len(label))), label...)
		}
		if len(e) == 0 || len(e) > 253 || len(out)+len(e)+1 > 255 {
			continue
		}
		out = append(append(out, e...), 0)
	}
	return out
}

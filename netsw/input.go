package netsw

import (
	"net/netip"
	"slices"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"virtkit/core/policy"
	"virtkit/netsw/dhcpd"
	"virtkit/netsw/frame"
)

// input takes one frame from the guest. f is the reader's and not kept longer
// than g, which it flushes before it reads on.
func (p *Port) input(f []byte, g *gather) {
	p.capture(f)
	e, ok := frame.ParseEth(f)
	switch {
	case !ok || len(f) > frame.EthSize+MTU:
		p.c.drop(DropMalformed)
	case e.Src != p.mac:
		p.c.drop(DropSrcMAC)
	case e.Type == frame.TypeIPv4:
		p.inputIPv4(f, &e, g)
	case e.Type == frame.TypeARP:
		p.inputARP(&e)
	case e.Type == frame.TypeIPv6:
		p.c.drop(DropIPv6)
	default:
		p.c.drop(DropEtherType)
	}
}

// inputARP answers from the table. A guest's claims are never passed on.
func (p *Port) inputARP(e *frame.Eth) {
	a, ok := frame.ParseARP(e.Payload)
	if !ok {
		p.c.drop(DropMalformed)
		return
	}
	probe := a.SrcIP == frame.IP{} // "does anyone have this address?"
	if a.SrcMAC != p.mac {
		p.c.drop(DropSrcMAC)
		return
	}
	if a.SrcIP != p.ip && !probe {
		p.c.drop(DropSrcIP)
		return
	}
	if a.Op != frame.ARPRequest || a.TargetIP == p.ip {
		return // announcements: nobody needs them
	}
	mac := p.sw.gwMAC
	if a.TargetIP != p.sw.gwIP {
		q := p.sw.table.Load().byIP[a.TargetIP]
		if q == nil {
			return // silence is how ARP says no
		}
		mac = q.mac
	}
	buf := getBuffer(frame.LenSize + frame.EthSize + frame.ARPSize)
	b := frame.AppendEth(buf.b[:frame.LenSize], p.mac, p.sw.gwMAC, frame.TypeARP)
	buf.b = frame.AppendARP(b, frame.ARP{Op: frame.ARPReply, SrcMAC: mac, SrcIP: a.TargetIP, DstMAC: p.mac, TargetIP: a.SrcIP})
	p.sendBuf(buf)
}

func (p *Port) inputIPv4(f []byte, e *frame.Eth, g *gather) {
	ip, ok := frame.ParseIPv4(e.Payload)
	if !ok {
		p.c.drop(DropMalformed)
		return
	}
	if ip.Src != p.ip {
		// A guest that has no address yet asks for one from 0.0.0.0.
		if (ip.Src == frame.IP{}) && p.inputDHCP(&ip) {
			return
		}
		p.c.drop(DropSrcIP)
		return
	}
	switch {
	case e.Dst == p.sw.gwMAC:
		p.inputGateway(e, &ip, g)
	case e.Dst.Multicast():
		if p.inputDHCP(&ip) {
			return
		}
		// To all the job's guests, as on any Ethernet; never outside.
		if ip.Dst[0] < 224 && ip.Dst != p.sw.allIP {
			p.c.drop(DropMartian)
			return
		}
		if leases(&ip) {
			p.c.drop(DropProtocol)
			return
		}
		for _, q := range p.sw.table.Load().ports {
			if q != p {
				p.forward(q, f, g)
			}
		}
	default:
		q := p.sw.table.Load().byMAC[e.Dst]
		if q == nil || q == p {
			p.c.drop(DropNoPort)
			return
		}
		// A guest that forwards, for its containers, must not do so for others: what
		// it sends out is its own.
		if ip.Dst != q.ip {
			p.c.drop(DropMartian)
			return
		}
		if leases(&ip) {
			p.c.drop(DropProtocol)
			return
		}
		p.forward(q, f, g)
	}
}

// leases tells what a DHCP server would say: no guest may be one for another.
func leases(ip *frame.IPv4) bool {
	return ip.Proto == frame.ProtoUDP && ip.Offset == 0 && len(ip.Payload) >= 4 &&
		ip.Payload[2] == 0 && ip.Payload[3] == dhcpd.ClientPort
}

// forward passes a frame to another guest unchanged.
func (p *Port) forward(q *Port, f []byte, g *gather) {
	buf := getBuffer(frame.LenSize + len(f))
	copy(buf.b[frame.LenSize:], f)
	if q.queueBuf(buf) {
		p.c.switched.Add(1)
		if !slices.Contains(g.touched, q) {
			g.touched = append(g.touched, q)
		}
	}
}

// inputGateway takes a packet that is for the gateway or the outside.
func (p *Port) inputGateway(e *frame.Eth, ip *frame.IPv4, g *gather) {
	if ip.Dst != p.sw.gwIP && p.sw.nobodys(ip.Dst) {
		p.c.drop(DropMartian)
		return
	}
	switch ip.Proto {
	case frame.ProtoUDP:
		if p.inputDHCP(ip) || p.inputDNS(ip) {
			return
		}
	case frame.ProtoTCP:
		if p.inputTCP(ip, g) {
			return
		}
	case frame.ProtoICMP:
		if !p.inputICMP(ip) {
			return
		}
	default:
		p.c.drop(DropProtocol)
		return
	}
	n := len(ip.Header) + len(ip.Payload)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(e.Payload[:n])})
	p.sw.gw.inject(pkt)
	pkt.DecRef()
}

// inputICMP says whether the message is the stack's to look at: errors about
// its own flows. Echo is answered or sent on here, because the stack, which
// takes every address for its own, would answer for the whole world.
func (p *Port) inputICMP(ip *frame.IPv4) bool {
	m, ok := frame.ParseICMP(ip.Payload)
	switch {
	case ip.Fragment():
		p.c.drop(DropFragment)
	case !ok:
		p.c.drop(DropMalformed)
	case m.Type == frame.ICMPEcho && ip.Dst == p.sw.gwIP:
		m.Type = frame.ICMPEchoReply
		p.sendIP(frame.IPv4Size+frame.ICMPSize+len(m.Payload), func(b []byte) []byte {
			return frame.AppendICMP(b, p.sw.gwIP, p.ip, m)
		})
	case m.Type == frame.ICMPEcho:
		p.sw.pinger.echo(p, ip, m)
	case m.Type == frame.ICMPUnreachable, m.Type == frame.ICMPTimeOut, m.Type == frame.ICMPBadParam:
		// About what was sent to this guest, and not to another, whose flow it would
		// be believed to end.
		if len(m.Payload) < frame.IPv4Size || frame.IP(m.Payload[16:20]) != p.ip {
			p.c.drop(DropMartian)
			return false
		}
		return true
	default:
		p.c.drop(DropProtocol)
	}
	return false
}

// unreachable tells the guest that a packet of its did not get there.
func (p *Port) unreachable(code uint8, ip *frame.IPv4) {
	p.sendIP(128, func(b []byte) []byte { return frame.AppendUnreachable(b, p.sw.gwIP, code, ip) })
}

// inputDHCP answers a DHCP request; false when ip is something else.
func (p *Port) inputDHCP(ip *frame.IPv4) bool {
	if ip.Proto != frame.ProtoUDP || ip.Fragment() {
		return false
	}
	u, ok := frame.ParseUDP(ip.Payload)
	if !ok || u.Dst != dhcpd.ServerPort || u.Src != dhcpd.ClientPort {
		return false
	}
	reply, dst, ok := dhcpd.Reply(u.Payload, dhcpd.Lease{
		MAC: p.mac, Addr: p.ip, Server: p.sw.gwIP, Bits: p.sw.subnet.Bits(),
		DNS: p.sw.gwIP, Search: p.sw.search, MTU: MTU, Hostname: p.hostname(),
	})
	if !ok {
		p.c.drop(DropMalformed)
		return true
	}
	if reply == nil {
		return true
	}
	buf := getBuffer(frame.LenSize + frame.EthSize + frame.IPv4Size + frame.UDPSize + len(reply))
	mac := p.mac
	if (dst == frame.IP{255, 255, 255, 255}) {
		mac = frame.Broadcast
	}
	b := frame.AppendEth(buf.b[:frame.LenSize], mac, p.sw.gwMAC, frame.TypeIPv4)
	buf.b = frame.AppendUDP(b, netip.AddrPortFrom(p.sw.gwIP.Addr(), dhcpd.ServerPort),
		netip.AddrPortFrom(dst.Addr(), dhcpd.ClientPort), reply)
	p.sendBuf(buf)
	return true
}

// nobodys tells destinations that cannot be one: they get no answer, as on
// any network. The link-local and host addresses, which a program may well try,
// are refused later and told so.
func (s *Switch) nobodys(d frame.IP) bool {
	switch {
	case d[0] == 0, d[0] == 127, d[0] >= 224:
		return true
	}
	return s.subnet.Contains(d.Addr())
}

// admit tells whether a flow may be, and counts when not.
func (p *Port) admit(proto policy.Proto, dst netip.AddrPort) bool {
	v := p.sw.decide(policy.Flow{Port: p.name, Proto: proto, Dst: dst})
	if !v.Allow {
		p.c.drop(DropDenied)
		p.sw.log.Debug("refused a flow", "vm", p.name, "proto", string(proto), "dst", dst.String(), "layer", v.Layer, "reason", v.Reason)
	}
	return v.Allow
}

// deny refuses a flow that had been admitted, on the switch's own account.
func (p *Port) deny(proto policy.Proto, dst netip.AddrPort, reason string) {
	p.c.drop(DropDenied)
	p.sw.refused(policy.Flow{Port: p.name, Proto: proto, Dst: dst}, refuse(reason))
}

// addrOf converts from the stack's address.
func addrOf(b []byte, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, port)
}

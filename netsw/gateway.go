package netsw

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"virtkit/netsw/frame"
)

// Buffers of a connection inside the stack, in bytes. They grow to the
// largest only while a transfer needs it.
const (
	bufMin     = 4 << 10
	bufDefault = 512 << 10
	bufMax     = 2 << 20
)

const nic = 1

// gateway is the TCP/IP stack that stands for the whole outside: it takes
// every address for its own, ends the guests' flows, and hands each to a
// goroutine that speaks to the outside through the host's sockets.
type gateway struct {
	sw   *Switch
	st   *stack.Stack
	link *linkEndpoint

	udpFwd *udp.Forwarder

	resolver *resolver
}

func newGateway(s *Switch) (*gateway, error) {
	g := &gateway{sw: s}
	g.link = &linkEndpoint{sw: s}
	g.st = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	if err := g.configure(); err != nil {
		g.st.Destroy()
		return nil, err
	}
	g.udpFwd = udp.NewForwarder(g.st, func(*udp.ForwarderRequest) bool { return false })
	g.st.SetTransportProtocolHandler(udp.ProtocolNumber, g.handleUDP)
	var err error
	if g.resolver, err = newResolver(g); err != nil {
		g.st.Destroy()
		return nil, err
	}
	return g, nil
}

func (g *gateway) configure() error {
	check := func(what string, err tcpip.Error) error {
		if err != nil {
			return fmt.Errorf("setting up the network stack: %s: %s", what, err)
		}
		return nil
	}
	sack := tcpip.TCPSACKEnabled(true)
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: bufMin, Default: bufDefault, Max: bufMax}
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: bufMin, Default: bufDefault, Max: bufMax}
	for _, e := range []error{
		check("SACK", g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)),
		check("receive moderation", g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &moderate)),
		check("receive buffers", g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &rcv)),
		check("send buffers", g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &snd)),
		check("device", g.st.CreateNIC(nic, g.link)),
		check("address", g.st.AddProtocolAddress(nic, tcpip.ProtocolAddress{
			Protocol:          ipv4.ProtocolNumber,
			AddressWithPrefix: tcpip.AddrFrom4(g.sw.gwIP).WithPrefix(),
		}, stack.AddressProperties{})),
		check("promiscuous mode", g.st.SetPromiscuousMode(nic, true)),
		check("spoofing", g.st.SetSpoofing(nic, true)),
	} {
		if e != nil {
			return e
		}
	}
	g.st.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	return nil
}

// inject hands a packet of a guest to the stack; its source address has been
// checked.
func (g *gateway) inject(pkt *stack.PacketBuffer) { g.link.deliver(pkt) }

// port finds whose flow it is, by the source address that the switch vouches for.
func (g *gateway) port(a tcpip.Address) *Port { return g.sw.table.Load().byIP[a.As4()] }

// close ends the stack once every goroutine that uses it has returned.
// Endpoints are aborted until then, because one may still be being made.
func (g *gateway) close(wait func()) {
	g.resolver.close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait()
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ended := false; !ended; {
		for _, e := range g.st.RegisteredEndpoints() {
			e.Abort()
		}
		select {
		case <-done:
			ended = true
		case <-tick.C:
		}
	}
	g.st.Destroy()
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(a.Addr().As4()), Port: a.Port()}
}

// linkEndpoint is the stack's device. It has no link layer: which guest a
// packet goes to follows from its destination address, and the Ethernet header
// is put before it when it is written out.
type linkEndpoint struct {
	sw *Switch

	disp atomic.Pointer[stack.NetworkDispatcher]
}

var _ stack.LinkEndpoint = (*linkEndpoint)(nil)

func (e *linkEndpoint) deliver(pkt *stack.PacketBuffer) {
	if d := e.disp.Load(); d != nil {
		(*d).DeliverNetworkPacket(ipv4.ProtocolNumber, pkt)
	}
}

// WritePackets queues packets for their guests. It never fails and never
// blocks: what does not fit is dropped and counted, and TCP slows down.
func (e *linkEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	t := e.sw.table.Load()
	list := pkts.AsSlice()
	for _, pkt := range list {
		h := pkt.NetworkHeader().Slice()
		if len(h) < frame.IPv4Size {
			continue
		}
		if p := t.byIP[frame.IP(h[16:20])]; p != nil {
			p.sendPkt(pkt.IncRef())
		}
	}
	return len(list), nil
}

// What the stack asks of a device.
func (e *linkEndpoint) MTU() uint32                             { return MTU }
func (e *linkEndpoint) SetMTU(uint32)                           {}
func (e *linkEndpoint) MaxHeaderLength() uint16                 { return 0 }
func (e *linkEndpoint) LinkAddress() tcpip.LinkAddress          { return "" }
func (e *linkEndpoint) SetLinkAddress(tcpip.LinkAddress)        {}
func (e *linkEndpoint) Wait()                                   {}
func (e *linkEndpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (e *linkEndpoint) AddHeader(*stack.PacketBuffer)           {}
func (e *linkEndpoint) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (e *linkEndpoint) Close()                                  {}
func (e *linkEndpoint) SetOnCloseAction(func())                 {}

// Capabilities: a socket pair does not corrupt, so checksums of guests are
// not verified; ours are computed, because a guest may well verify them.
func (e *linkEndpoint) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

func (e *linkEndpoint) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		e.disp.Store(nil)
		return
	}
	e.disp.Store(&d)
}

func (e *linkEndpoint) IsAttached() bool { return e.disp.Load() != nil }

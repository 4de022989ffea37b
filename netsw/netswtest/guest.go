// Package netswtest is a guest without a VM: a TCP/IP stack of its own on the
// guest's end of a switch's link, so that everything a switch does can be tried
// in one process. It also sends frames that no honest guest would.
package netswtest

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"virtkit/core/guestwire"
	"virtkit/netsw/frame"
)

// Guest is a stack with one interface.
type Guest struct {
	Net  guestwire.Net
	Addr netip.Addr
	st   *stack.Stack
	w    *wire
}

// New makes a guest with static addressing on the far end of a link. It takes
// a copy of file. It ends with the test or by Close.
func New(t testing.TB, file *os.File, n guestwire.Net) *Guest {
	t.Helper()
	c, err := net.FileConn(file)
	if err != nil {
		t.Fatalf("using the guest's end: %v", err)
	}
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix(n.Addr)
	w := &wire{conn: c, mac: tcpip.LinkAddress(mac), mtu: uint32(n.MTU) + header.EthernetMinimumSize}
	g := &Guest{Net: n, Addr: prefix.Addr(), w: w}
	g.st = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
		HandleLocal:        true,
	})
	sack := tcpip.TCPSACKEnabled(true)
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 1 << 20, Max: 4 << 20}
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: 1 << 20, Max: 4 << 20}
	must(t, g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &sack))
	must(t, g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &rcv))
	must(t, g.st.SetTransportProtocolOption(tcp.ProtocolNumber, &snd))
	must(t, g.st.CreateNIC(1, ethernet.New(w)))
	must(t, g.st.AddProtocolAddress(1, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(g.Addr.As4()), PrefixLen: prefix.Bits()},
	}, stack.AddressProperties{}))
	gw := netip.MustParseAddr(n.Gateway)
	local := tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(prefix.Masked().Addr().As4()), PrefixLen: prefix.Bits()}
	g.st.SetRouteTable([]tcpip.Route{
		{Destination: local.Subnet(), NIC: 1},
		{Destination: header.IPv4EmptySubnet, Gateway: tcpip.AddrFrom4(gw.As4()), NIC: 1},
	})
	w.wg.Go(w.read)
	t.Cleanup(g.Close)
	return g
}

func must(t testing.TB, err tcpip.Error) {
	t.Helper()
	if err != nil {
		t.Fatalf("setting up the guest: %s", err)
	}
}

// Close ends the guest as a killed VM does: its link closes, nothing is said.
func (g *Guest) Close() {
	if g.w.closed.Swap(true) {
		return
	}
	g.w.conn.Close()
	g.w.wg.Wait()
	g.st.Destroy()
}

// Dial connects over TCP.
func (g *Guest) Dial(ctx context.Context, to string) (*gonet.TCPConn, error) {
	return gonet.DialContextTCP(ctx, g.st, full(to), ipv4.ProtocolNumber)
}

// DialUDP opens a UDP socket that talks to one address.
func (g *Guest) DialUDP(to string) (*gonet.UDPConn, error) {
	a := full(to)
	return gonet.DialUDP(g.st, nil, &a, ipv4.ProtocolNumber)
}

// Ask sends a datagram and returns the answer to it, as a resolver of the guest
// would: it asks again when none came for a second, five times.
func (g *Guest) Ask(t testing.TB, to string, q []byte) []byte {
	t.Helper()
	c, err := g.DialUDP(to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 64<<10)
	for range 5 {
		if _, err = c.Write(q); err != nil {
			t.Fatalf("asking %s: %v", to, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		var n int
		if n, err = c.Read(b); err == nil {
			return b[:n]
		}
	}
	t.Fatalf("asking %s: %v", to, err)
	return nil
}

// Listen listens on a TCP port of the guest.
func (g *Guest) Listen(port uint16) (*gonet.TCPListener, error) {
	return gonet.ListenTCP(g.st, tcpip.FullAddress{NIC: 1, Port: port}, ipv4.ProtocolNumber)
}

// ListenUDP opens a UDP port of the guest.
func (g *Guest) ListenUDP(port uint16) (*gonet.UDPConn, error) {
	return gonet.DialUDP(g.st, &tcpip.FullAddress{NIC: 1, Port: port}, nil, ipv4.ProtocolNumber)
}

// Send writes a frame to the switch as it is.
func (g *Guest) Send(f []byte) error { return g.w.send(f) }

// Tap hands a copy of each frame from the switch to f, until the returned
// function is called.
func (g *Guest) Tap(f func([]byte)) (stop func()) {
	g.w.tap.Store(&f)
	return func() { g.w.tap.Store(nil) }
}

// Deafen keeps frames from the guest's stack from now on; taps have them still.
// For tests that speak for the guest themselves: its stack would reset what it
// knows nothing of.
func (g *Guest) Deafen() { g.w.deaf.Store(true) }

// WaitFrame sends frame (nil = nothing) and waits for a frame that match
// accepts; nil when none came in time.
func (g *Guest) WaitFrame(send []byte, limit time.Duration, match func(frame.Eth) bool) []byte {
	got := make(chan []byte, 1)
	stop := g.Tap(func(b []byte) {
		if e, ok := frame.ParseEth(b); ok && match(e) {
			select {
			case got <- append([]byte(nil), b...):
			default:
			}
		}
	})
	defer stop()
	if send != nil && g.Send(send) != nil {
		return nil
	}
	select {
	case b := <-got:
		return b
	case <-time.After(limit):
		return nil
	}
}

// MAC is the guest's link address.
func (g *Guest) MAC() frame.MAC { return frame.MAC([]byte(g.w.mac)) }

func full(s string) tcpip.FullAddress {
	ap := netip.MustParseAddrPort(s)
	return tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFrom4(ap.Addr().As4()), Port: ap.Port()}
}

// wire is the guest's network device.
type wire struct {
	conn   net.Conn
	mac    tcpip.LinkAddress
	mtu    uint32
	closed atomic.Bool
	deaf   atomic.Bool
	wg     sync.WaitGroup
	tap    atomic.Pointer[func([]byte)]

	wmu  sync.Mutex
	mu   sync.RWMutex
	disp stack.NetworkDispatcher
}

func (w *wire) send(f []byte) error {
	w.wmu.Lock()
	defer w.wmu.Unlock()
	var h [frame.LenSize]byte
	binary.BigEndian.PutUint32(h[:], uint32(len(f)))
	b := net.Buffers{h[:], f}
	if _, err := b.WriteTo(w.conn); err != nil {
		return fmt.Errorf("sending a frame: %w", err)
	}
	return nil
}

func (w *wire) read() {
	buf := make([]byte, frame.Max)
	var h [frame.LenSize]byte
	for {
		if _, err := io.ReadFull(w.conn, h[:]); err != nil {
			return
		}
		f := buf[:binary.BigEndian.Uint32(h[:])]
		if _, err := io.ReadFull(w.conn, f); err != nil {
			return
		}
		if t := w.tap.Load(); t != nil {
			(*t)(f)
		}
		w.mu.RLock()
		d := w.disp
		w.mu.RUnlock()
		if d != nil && !w.deaf.Load() {
			p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(f)})
			d.DeliverNetworkPacket(0, p)
			p.DecRef()
		}
	}
}

// WritePackets sends the stack's frames.
func (w *wire) WritePackets(l stack.PacketBufferList) (int, tcpip.Error) {
	for i, p := range l.AsSlice() {
		w.wmu.Lock()
		var h [frame.LenSize]byte
		binary.BigEndian.PutUint32(h[:], uint32(p.Size()))
		b := append(net.Buffers{h[:]}, p.AsSlices()...)
		_, err := b.WriteTo(w.conn)
		w.wmu.Unlock()
		if err != nil {
			return i, &tcpip.ErrClosedForSend{}
		}
	}
	return l.Len(), nil
}

// What the stack asks of a device.
func (w *wire) MTU() uint32                                  { return w.mtu }
func (w *wire) SetMTU(uint32)                                {}
func (w *wire) MaxHeaderLength() uint16                      { return 0 }
func (w *wire) LinkAddress() tcpip.LinkAddress               { return w.mac }
func (w *wire) SetLinkAddress(tcpip.LinkAddress)             {}
func (w *wire) Capabilities() stack.LinkEndpointCapabilities { return 0 }
func (w *wire) Wait()                                        {}
func (w *wire) ARPHardwareType() header.ARPHardwareType      { return header.ARPHardwareEther }
func (w *wire) AddHeader(*stack.PacketBuffer)                {}
func (w *wire) ParseHeader(*stack.PacketBuffer) bool         { return true }
func (w *wire) Close()                                       {}
func (w *wire) SetOnCloseAction(func())                      {}

func (w *wire) Attach(d stack.NetworkDispatcher) {
	w.mu.Lock()
	w.disp = d
	w.mu.Unlock()
}

func (w *wire) IsAttached() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.disp != nil
}

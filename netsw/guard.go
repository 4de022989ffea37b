package netsw

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/policy"
)

// hostGuard keeps guests off the host and off addresses that are nobody's:
//
//   - 0.0.0.0/8, 127.0.0.0/8, multicast, reserved and broadcast: always;
//   - link-local 169.254.0.0/16, where clouds serve their metadata: always;
//   - the gateway's address: unless HostLoopback, or HostPorts has the port;
//     then it means the host's 127.0.0.1;
//   - every address of the host's interfaces: unless HostLoopback;
//   - the broadcast addresses of their networks, which are the host's too and
//     everybody's beside it: always. A socket for a guest cannot send to one
//     either, whatever the interface calls its broadcast address: see dialUDP.
//
// It also runs on the address that a connection really got: see local.
type hostGuard struct {
	gateway  netip.Addr
	subnet   netip.Prefix
	loopback bool
	ports    map[uint16]bool

	mu    sync.Mutex
	read  time.Time
	addrs map[netip.Addr]string // with the reason they are refused for
	err   error
}

// guardAge is for how long the list of the host's addresses is believed. An
// address that appears meanwhile is caught by local.
const guardAge = time.Second

var linkLocal = netip.MustParsePrefix("169.254.0.0/16")

func newHostGuard(s *Switch) *hostGuard {
	g := &hostGuard{gateway: s.Gateway(), subnet: s.subnet, loopback: s.cfg.HostLoopback, ports: make(map[uint16]bool)}
	for _, p := range s.cfg.HostPorts {
		g.ports[uint16(p)] = true
	}
	return g
}

func refuse(reason string) policy.Verdict {
	return policy.Verdict{Layer: policy.LayerHost, Reason: reason}
}

// check decides over a destination as the guest names it.
func (g *hostGuard) check(dst netip.AddrPort) policy.Verdict {
	a := dst.Addr()
	switch {
	case !a.Is4():
		return refuse("not an IPv4 address")
	case a == g.gateway:
		if g.loopback || g.ports[dst.Port()] {
			return policy.Verdict{Allow: true}
		}
		return refuse("the host's own services are not reachable from a guest")
	case a.IsLoopback(), a.As4()[0] == 0:
		return refuse("a loopback address")
	case linkLocal.Contains(a):
		return refuse("a link-local address (169.254.0.0/16)")
	case a.As4()[0] >= 224:
		return refuse("a multicast, reserved or broadcast address")
	case g.subnet.Contains(a):
		return refuse("no guest of the job has this address")
	}
	why, err := g.own(a)
	switch {
	case g.loopback && why != toAll:
		return policy.Verdict{Allow: true}
	case err != nil:
		return refuse("the host's addresses cannot be read: " + err.Error())
	case why != "":
		return refuse(why)
	}
	return policy.Verdict{Allow: true}
}

// target is where a flow is really dialled.
func (g *hostGuard) target(dst netip.AddrPort) netip.AddrPort {
	if dst.Addr() == g.gateway {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dst.Port())
	}
	return dst
}

// Why an address of the host's interfaces is refused; ownAddress is also what a
// connection which local found out is refused for.
const (
	ownAddress = "an address of the host"
	toAll      = "a broadcast address of a network of the host's"
)

// local tells a connection that ended up on the host itself although its
// address was not known to be the host's: the kernel talks to an own address
// from that address.
func (g *hostGuard) local(dst netip.AddrPort, c net.Conn) bool {
	return g.guards(dst) && ipOf(c.LocalAddr()) == ipOf(c.RemoteAddr())
}

// guards tells the destinations that must not be the host.
func (g *hostGuard) guards(dst netip.AddrPort) bool {
	return !g.loopback && dst.Addr() != g.gateway
}

// own is why an address is refused as one of the host's; "" if it is none.
func (g *hostGuard) own(a netip.Addr) (why string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.addrs == nil || time.Since(g.read) > guardAge {
		g.addrs, g.err = hostAddrs()
		g.read = time.Now()
	}
	return g.addrs[a], g.err
}

func hostAddrs() (map[netip.Addr]string, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of the host's interfaces: %w", err)
	}
	out := make(map[netip.Addr]string)
	for _, a := range list {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, _ := netip.AddrFromSlice(n.IP)
		ip = ip.Unmap()
		// Of a network of two or one, all addresses are machines' (RFC 3021). The
		// first of a larger one is the broadcast address to older kernels.
		if ones, bits := n.Mask.Size(); ip.Is4() && bits == 32 && ones <= 30 {
			p := netip.PrefixFrom(ip, ones).Masked()
			for _, b := range []netip.Addr{p.Addr(), lastAddr(p)} {
				if out[b] == "" {
					out[b] = toAll
				}
			}
		}
		out[ip] = ownAddress
	}
	return out, nil
}

func ipOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// subnets are tried in order: private, and seldom used by others.
var subnets = []string{
	"10.200.0.0/24", "10.231.57.0/24", "172.29.213.0/24", "192.168.219.0/24",
	"10.94.163.0/24", "172.23.87.0/24", "192.168.143.0/24",
}

// pickSubnet checks want, or picks the first of subnets that hides nothing the
// host can reach directly.
func pickSubnet(want netip.Prefix, avoid []netip.AddrPort) (netip.Prefix, error) {
	if want.IsValid() {
		if !want.Addr().Is4() || want.Bits() < 16 || want.Bits() > 28 {
			return want, fault.Newf(fault.Usage, "subnet %s: not an IPv4 network between /16 and /28", want)
		}
		return want.Masked(), nil
	}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return want, fmt.Errorf("reading the addresses of the host's interfaces: %w", err)
	}
	for _, s := range subnets {
		p := netip.MustParsePrefix(s)
		clash := slices.ContainsFunc(avoid, func(a netip.AddrPort) bool { return p.Contains(a.Addr()) })
		for _, a := range list {
			n, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			ip, _ := netip.AddrFromSlice(n.IP)
			ones, bits := n.Mask.Size()
			if ip = ip.Unmap(); ip.Is4() && bits == 32 && netip.PrefixFrom(ip, ones).Overlaps(p) {
				clash = true
			}
		}
		if !clash {
			return p, nil
		}
	}
	return want, fault.New(fault.Usage, "every private network that vk uses for guests overlaps one of this host's").
		Hint("choose a free one: [net] subnet")
}

func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	n := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	n |= 1<<(32-p.Bits()) - 1
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

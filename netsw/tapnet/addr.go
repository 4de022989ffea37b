package tapnet

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// Bounds of a device's MTU: the driver's least, and the most of an Ethernet
// device.
const (
	minMTU     = 576
	maxMTU     = 65521
	defaultMTU = 1500
)

// networks are tried in order for blocks: private, and seldom used by others.
// Each has room for 1024.
var networks = []netip.Prefix{
	netip.MustParsePrefix("10.201.96.0/20"), netip.MustParsePrefix("172.29.48.0/20"),
	netip.MustParsePrefix("192.168.208.0/20"), netip.MustParsePrefix("10.87.128.0/20"),
}

// maxSlots bounds devices of one kind; their names have 15 bytes (IFNAMSIZ).
const maxSlots = 4096

// block is a slot's network.
type block struct{ host, guest netip.Prefix }

func blockOf(network netip.Prefix, slot int) (block, bool) {
	n := 1 << (30 - network.Bits())
	if slot >= n {
		return block{}, false
	}
	b := network.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(slot) * 4
	at := func(v uint32) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)}), 30)
	}
	return block{host: at(v + 1), guest: at(v + 2)}, true
}

// capacity is how many slots a network has.
func capacity(network netip.Prefix) int { return min(1<<(30-network.Bits()), maxSlots) }

// pickNetwork checks want against the host's interfaces, or picks the first of
// networks that hides nothing the host has a route to. Devices of ours do not
// count: blocks are told apart by their slots.
func pickNetwork(want netip.Prefix, avoid []netip.Addr) (netip.Prefix, error) {
	taken, routed, err := hostNetworks()
	if err != nil {
		return want, err
	}
	if want.IsValid() {
		want = want.Masked()
		for _, t := range taken {
			if t.Overlaps(want) {
				return want, fault.Newf(fault.System, "[net] subnet %s overlaps %s, which an interface of this host has", want, t).
					Hint("choose another [net] subnet")
			}
		}
		return want, nil
	}
	for _, n := range networks {
		clash := func(p netip.Prefix) bool { return p.Overlaps(n) }
		if !slices.ContainsFunc(taken, clash) && !slices.ContainsFunc(routed, clash) && !slices.ContainsFunc(avoid, n.Contains) {
			return n, nil
		}
	}
	return want, fault.New(fault.System, "every private network that vk uses for guests' devices overlaps one that this host has or routes to").
		Hint("choose a free one: [net] subnet")
}

// hostNetworks are the networks of the host's interfaces, and those that its
// routes lead to, the default ones left out; not those of our own devices.
func hostNetworks() (taken, routed []netip.Prefix, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, nil, fmt.Errorf("listing the host's interfaces: %w", err)
	}
	ours := map[int]bool{}
	for _, l := range links {
		ours[l.Attrs().Index] = isOurs(l.Attrs().Name)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, nil, fmt.Errorf("listing the host's addresses: %w", err)
	}
	for _, a := range addrs {
		if p, ok := prefixOf(a.IPNet); ok && !ours[a.LinkIndex] {
			taken = append(taken, p)
		}
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, nil, fmt.Errorf("listing the host's routes: %w", err)
	}
	for _, r := range routes {
		if p, ok := prefixOf(r.Dst); ok && p.Bits() > 0 && !ours[r.LinkIndex] {
			routed = append(routed, p)
		}
	}
	return taken, routed, nil
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits != 32 {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(ip.Unmap(), ones).Masked(), true
}

// uplinkMTU is the smallest MTU of the ways out, so that what a guest sends
// need not be cut or refused by its host.
func uplinkMTU() (int, error) {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return 0, fmt.Errorf("listing the host's routes: %w", err)
	}
	least := 0
	for _, r := range routes {
		if p, ok := prefixOf(r.Dst); ok && p.Bits() > 0 {
			continue
		}
		mtu := r.MTU
		if mtu == 0 {
			l, err := netlink.LinkByIndex(r.LinkIndex)
			if err != nil {
				continue // a route of several ways, or one that went meanwhile
			}
			mtu = l.Attrs().MTU
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	if least == 0 {
		return defaultMTU, nil
	}
	return min(max(least, minMTU), maxMTU), nil
}

// resolvers decides whom guests ask for names, and their search list. A guest
// asks by itself, at port 53: a resolver that only this host can reach is of no
// use to it.
func resolvers(want []netip.AddrPort, files []string) (addrs []netip.Addr, search []string, err error) {
	for _, r := range want {
		a := r.Addr().Unmap()
		switch {
		case r.Port() != 53:
			return nil, nil, fault.Newf(fault.System, `[net] dns: %s: a guest on a device of the host asks at port 53 alone`, r).
				Hint(`name a resolver without a port, or use [net] mode "switch"`)
		case !a.Is4() || a.IsLoopback():
			return nil, nil, fault.Newf(fault.System, "[net] dns: %s cannot be reached from a guest on a device of the host", a).
				Hint(`name an IPv4 address that is not this host's loopback, or use [net] mode "switch"`)
		}
		addrs = append(addrs, a)
	}
	if len(addrs) > 0 {
		return addrs, nil, nil
	}
	for _, f := range files {
		cf, err := dns.ClientConfigFromFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("reading %s: %w", f, err)
		}
		for _, s := range cf.Servers {
			if a, err := netip.ParseAddr(s); err == nil && a.Is4() && !a.IsLoopback() {
				addrs = append(addrs, a)
			}
		}
		if len(addrs) > 0 {
			return addrs, cf.Search, nil
		}
	}
	return nil, nil, fault.Newf(fault.System, "%s names no IPv4 resolver that a guest on a device of the host can reach", strings.Join(files, " or ")).
		Hint(`name one: [net] dns, or use [net] mode "switch", which asks this host's own`)
}

// resolvConfs are read in this order; the second is systemd-resolved's own, of
// a host whose /etc/resolv.conf leads to 127.0.0.53 (resolved.conf(5)).
var resolvConfs = []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"}

// forwards fails where the host routes nothing.
func forwards() error {
	const file = "/proc/sys/net/ipv4/ip_forward"
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("asking whether this host routes: %w", err)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || n == 0 {
		return fault.New(fault.System, "this host does not route packets, so guests on its devices could reach nothing").
			Hint("sysctl -w net.ipv4.ip_forward=1 (in /etc/sysctl.d to stay), or use [net] mode \"switch\"")
	}
	return nil
}

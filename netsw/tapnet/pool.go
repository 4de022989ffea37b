package tapnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/user"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
)

// Device is an administrator's, as the configuration names it.
type Device struct {
	Name string
	// Guest is the address of the guest with its network's length, Gateway its
	// way out. Zero: the device itself has the gateway's address, and the guest
	// gets the first other one of that network.
	Guest   netip.Prefix
	Gateway netip.Addr
}

// Lease attaches a guest to a device of the pool that nobody is attached to.
// When all are, the error is fault.Busy and says so; it never waits for one.
func Lease(ctx context.Context, cfg Config) (*Port, error) {
	cfg.fill()
	if len(cfg.Devices) == 0 {
		return leaseOwn(ctx, cfg)
	}
	addrs, search, err := resolvers(cfg.Resolvers, cfg.ResolvConf)
	if err != nil {
		return nil, err
	}
	var broken []error
	for _, d := range cfg.Devices {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		cfg.Hook("lease " + d.Name)
		n, err := d.network()
		if err == nil {
			p := &Port{cfg: cfg, name: d.Name, kept: true}
			if err = p.attach(); err == nil {
				for _, a := range addrs {
					n.DNS = append(n.DNS, a.String())
				}
				n.Search = search
				p.guest = n
				return p, nil
			}
		}
		if !errors.Is(err, unix.EBUSY) {
			broken = append(broken, err)
			cfg.Log.Warn("a device of the pool cannot be used", "device", d.Name, logx.Err, err)
		}
	}
	if len(broken) > 0 {
		hint := fault.HintOf(broken[0])
		if hint == "" {
			hint = "vk check looks at each of them"
		}
		return nil, fault.Newf(fault.System, "no device of [net] pool can be used: %d of %d are in use", len(cfg.Devices)-len(broken), len(cfg.Devices)).
			Hint("%s", hint).Because(errors.Join(broken...))
	}
	return nil, exhausted(len(cfg.Devices), "")
}

func exhausted(n int, by string) error {
	return fault.Newf(fault.Busy, "all %d devices of [net] pool are in use%s", n, by).
		Hint("let the runner take at most as many jobs at once (concurrent in its config.toml), or give the pool more devices")
}

// attach takes the device, which must be persistent.
func (p *Port) attach() error {
	f, err := open(p.name, tapFlags)
	switch {
	case errors.Is(err, unix.EBUSY):
		return err
	case errors.Is(err, unix.EPERM):
		return fault.Newf(fault.System, "device %s is another user's", p.name).
			Hint("%s", makeHint(p.name, netip.Prefix{})).Because(err)
	case errors.Is(err, unix.EINVAL):
		return fault.Newf(fault.System, "device %s is no tap device of a single queue", p.name).
			Hint("%s", makeHint(p.name, netip.Prefix{})).Because(err)
	case err != nil:
		return fmt.Errorf("attaching to the device %s: %w", p.name, err)
	}
	keep, err := persistent(f)
	if err == nil && !keep {
		// It was gone meanwhile, and this made another of its name.
		err = fault.Newf(fault.System, "device %s is not there any more", p.name).Hint("%s", makeHint(p.name, netip.Prefix{}))
	}
	if err != nil {
		f.Close()
		return err
	}
	p.f = f
	return nil
}

// makeHint is how an administrator makes a device for this user.
func makeHint(name string, addr netip.Prefix) string {
	who := "USER"
	if u, err := user.Current(); err == nil {
		who = u.Username
	}
	at := "10.201.240.1/30"
	if addr.IsValid() {
		at = addr.String()
	}
	return fmt.Sprintf("as root: ip tuntap add dev %s mode tap user %s && ip addr add %s dev %s && ip link set %s up", name, who, at, name, name)
}

// network is what the guest behind d is told, without resolvers.
func (d Device) network() (guestwire.Net, error) {
	var n guestwire.Net
	link, err := netlink.LinkByName(d.Name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return n, fault.Newf(fault.System, "device %s of [net] pool does not exist", d.Name).Hint("%s", makeHint(d.Name, netip.Prefix{}))
	}
	if err != nil {
		return n, fmt.Errorf("looking for the device %s: %w", d.Name, err)
	}
	tap, ok := link.(*netlink.Tuntap)
	if !ok || tap.Mode != netlink.TUNTAP_MODE_TAP {
		return n, fault.Newf(fault.System, "device %s of [net] pool is no tap device (it is a %s)", d.Name, link.Type()).Hint("%s", makeHint(d.Name, netip.Prefix{}))
	}
	a := link.Attrs()
	if a.Flags&net.FlagUp == 0 {
		return n, fault.Newf(fault.System, "device %s of [net] pool is down", d.Name).Hint("as root: ip link set %s up", d.Name)
	}
	n.MTU = min(max(a.MTU, minMTU), maxMTU)
	if d.Guest.IsValid() {
		n.Addr, n.Gateway, n.MAC = d.Guest.String(), d.Gateway.String(), macOf(d.Guest.Addr())
		return n, nil
	}
	if a.MasterIndex != 0 {
		return n, fault.Newf(fault.System, "device %s of [net] pool is a port of a bridge, so its guest's address cannot be told from it", d.Name).
			Hint(`say it in [net] pool: "%s=192.0.2.50/24 via 192.0.2.1"`, d.Name)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return n, fmt.Errorf("asking for the addresses of %s: %w", d.Name, err)
	}
	for _, ad := range addrs {
		own, ok := netip.AddrFromSlice(ad.IP)
		bits, _ := ad.Mask.Size()
		if g, found := otherAddr(own.Unmap(), bits); ok && found {
			n.Addr, n.Gateway, n.MAC = g.String(), own.Unmap().String(), guestMAC
			return n, nil
		}
	}
	return n, fault.Newf(fault.System, "device %s of [net] pool has no IPv4 network with room for a guest", d.Name).
		Hint("as root: ip addr add 10.201.240.1/30 dev %s", d.Name)
}

// otherAddr is the first address of own's network that is not own.
func otherAddr(own netip.Addr, bits int) (netip.Prefix, bool) {
	if !own.Is4() || bits > 31 || bits < 8 {
		return netip.Prefix{}, false
	}
	p := netip.PrefixFrom(own, bits)
	g := p.Masked().Addr()
	if bits < 31 {
		g = g.Next() // the network's own
	}
	if g == own {
		g = g.Next()
	}
	return netip.PrefixFrom(g, bits), true
}

// macOf tells guests on one bridge apart.
func macOf(a netip.Addr) string {
	b := a.As4()
	return net.HardwareAddr{0x06, 'v', b[0], b[1], b[2], b[3]}.String()
}

// leaseOwn leases a device of vk's own, which it makes first if need be.
func leaseOwn(ctx context.Context, cfg Config) (_ *Port, err error) {
	addrs, search, err := cfg.prepare()
	if err != nil {
		return nil, err
	}
	cfg.Hook("lock")
	l, err := lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	network, err := pickNetwork(cfg.Subnet, addrs)
	if err != nil {
		return nil, err
	}
	var users []string
	for i := range cfg.PoolSize {
		p, err := ownDevice(ctx, cfg, i, network, addrs, search)
		if err == nil {
			cfg.Hook("unlock")
			return p, nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
		if link, err := netlink.LinkByName(poolPrefix + strconv.Itoa(i)); err == nil {
			if job, _, ok := parseAlias(link.Attrs().Alias); ok {
				users = append(users, job)
			}
		}
	}
	by := ""
	if len(users) > 0 {
		by = ": " + strings.Join(users, ", ")
	}
	return nil, exhausted(cfg.PoolSize, by)
}

// ownDevice attaches to the pool's device of this number, making it when it is
// not there or was left half made. unix.EBUSY: a guest has it.
func ownDevice(ctx context.Context, cfg Config, i int, network netip.Prefix, addrs []netip.Addr, search []string) (_ *Port, err error) {
	p := &Port{cfg: cfg, name: poolPrefix + strconv.Itoa(i), kept: true}
	cfg.Hook("lease " + p.name)
	// One that is missing is made by this, and goes again unless it becomes
	// persistent.
	if p.f, err = open(p.name, tapFlags); err != nil {
		if errors.Is(err, unix.EBUSY) {
			return nil, err
		}
		return nil, fmt.Errorf("making the device %s: %w", p.name, rights(err))
	}
	defer func() {
		if err != nil {
			p.f.Close()
		}
	}()
	keep, err := persistent(p.f)
	if err != nil {
		return nil, err
	}
	if keep {
		return p, p.reuse(ctx, addrs, search)
	}
	have, err := devices()
	if err != nil {
		return nil, err
	}
	_, b, ok := freeSlot(network, have)
	if !ok {
		return nil, fault.Newf(fault.Busy, "all %d networks of guests' devices in %s are taken; %d devices of vk are there", capacity(network), network, len(have)).
			Hint("sweep with vk gc, or give [net] subnet a wider network")
	}
	mtu, err := cfg.setUp(ctx, p.name, b, addrs)
	if err != nil {
		return nil, err
	}
	p.guest = ownGuest(b, mtu, addrs, search)
	cfg.Hook("persist")
	return p, setPersistent(p.f, true) // last: what persists is whole
}

// reuse takes a device over that an earlier guest had.
func (p *Port) reuse(ctx context.Context, addrs []netip.Addr, search []string) error {
	n, err := Device{Name: p.name}.network()
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(p.name)
	if err != nil {
		return fmt.Errorf("looking for the device %s: %w", p.name, err)
	}
	p.cfg.Hook("alias")
	if err := netlink.LinkSetAlias(link, alias(p.cfg.Job, p.cfg.Home)); err != nil {
		return fmt.Errorf("naming the job of %s: %w", p.name, err)
	}
	mtu, err := uplinkMTU()
	if err != nil {
		return err
	}
	p.cfg.Hook("mtu")
	if err := netlink.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("giving %s an MTU of %d: %w", p.name, mtu, err)
	}
	p.cfg.Hook("rules")
	if err := applyRules(ctx, addrs); err != nil {
		return err
	}
	for _, a := range addrs {
		n.DNS = append(n.DNS, a.String())
	}
	n.Search, n.MTU = search, mtu
	p.guest = n
	return nil
}

package tapnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
)

// Names of devices of ours; the rules know prefix too.
const (
	prefix     = "vktap"
	poolPrefix = "vktap-p"
)

// guestMAC is the same in every guest that is alone on its wire, so that
// saved states of guests fit them all; it is that of a switch's first guest.
const guestMAC = "02:76:6b:01:00:02"

// Config says which device a guest gets.
type Config struct {
	// Job is the guest's id and Home its host's job directories (see HomeOf);
	// both are shown in the device's alias.
	Job  string
	Home string
	// Subnet is where blocks are taken from; zero = a free private one.
	Subnet netip.Prefix
	// Devices are an administrator's, to be leased; used by Lease alone. Empty =
	// PoolSize devices of vk's own, made where they are missing.
	Devices  []Device
	PoolSize int
	// Resolvers are the guest's; empty takes those of the files in ResolvConf,
	// which is for tests: nil means the host's.
	Resolvers  []netip.AddrPort
	ResolvConf []string
	Log        *slog.Logger // nil = none
	// Hook, when set, is called before each step with its name. For tests.
	Hook func(step string)
}

func (c *Config) fill() {
	if c.Log == nil {
		c.Log = logx.Discard()
	}
	if c.Hook == nil {
		c.Hook = func(string) {}
	}
	if c.ResolvConf == nil {
		c.ResolvConf = resolvConfs
	}
}

// HomeOf names a host's job directories in 36 bytes or less, whatever their
// path is and whoever else has the same path in another mount namespace.
func HomeOf(jobs string) (string, error) {
	fi, err := os.Stat(jobs)
	if err != nil {
		return "", fmt.Errorf("naming the job directories: %w", err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return "", fmt.Errorf("naming the job directories %s: no inode", jobs)
	}
	return fmt.Sprintf("%x-%x", st.Dev, st.Ino), nil
}

// alias is at most 255 bytes (IFALIASZ - 1): an id has at most 128.
func alias(job, home string) string { return "virtkit job " + job + " of " + home }

// parseAlias undoes alias.
func parseAlias(s string) (job, home string, ok bool) {
	s, ok = strings.CutPrefix(s, "virtkit job ")
	if !ok {
		return "", "", false
	}
	return strings.Cut(s, " of ")
}

// isOurs reports whether a device was made by vk, its lock included.
func isOurs(name string) bool { return strings.HasPrefix(name, prefix) }

// Port is a guest's device. It is not safe for concurrent use but for
// Forward.
type Port struct {
	cfg   Config
	name  string
	f     *os.File
	guest guestwire.Net
	kept  bool // the device stays when the port closes

	forwards forwards4
}

// Name is the device's, such as "vktap0".
func (p *Port) Name() string { return p.name }

// Guest is what the guest's agent sets its interface up with.
func (p *Port) Guest() guestwire.Net { return p.guest }

// File is another descriptor of the device, for a VMM; the caller owns it.
// Of those given out, only one may be in use at a time.
func (p *Port) File() (*os.File, error) {
	if p.f == nil {
		return nil, os.ErrClosed
	}
	return duplicate(p.f)
}

// Stats counts a guest's frames with their Ethernet headers, as the kernel
// does.
type Stats struct{ SentBytes, RecvBytes, SentPackets, RecvPackets uint64 }

// Stats are the device's figures since it was made; zero once it is gone.
func (p *Port) Stats() Stats {
	link, err := netlink.LinkByName(p.name)
	if err != nil || link.Attrs().Statistics == nil {
		return Stats{}
	}
	s := link.Attrs().Statistics // the host's: it receives what the guest sent
	return Stats{SentBytes: s.RxBytes, RecvBytes: s.TxBytes, SentPackets: s.RxPackets, RecvPackets: s.TxPackets}
}

// Make makes a device for one guest. It waits for others that do so, up to
// lockWait. Without the right to, it fails before it has done anything.
func Make(ctx context.Context, cfg Config) (_ *Port, err error) {
	cfg.fill()
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
	cfg.Hook("choose")
	have, err := devices()
	if err != nil {
		return nil, err
	}
	network, err := pickNetwork(cfg.Subnet, addrs)
	if err != nil {
		return nil, err
	}
	p := &Port{cfg: cfg}
	slot, b, ok := freeSlot(network, have)
	if !ok {
		return nil, fault.Newf(fault.Busy, "all %d networks of guests' devices in %s are taken; %d devices of vk are there", capacity(network), network, len(have)).
			Hint("end some guests (vk list), sweep with vk gc, or give [net] subnet a wider network")
	}
	p.name = prefix + strconv.Itoa(slot)
	cfg.Hook("create")
	if p.f, err = open(p.name, tapFlags|exclusive); err != nil {
		return nil, fmt.Errorf("making the device %s: %w", p.name, rights(err))
	}
	defer func() {
		if err != nil {
			p.f.Close() // and the device goes
		}
	}()
	mtu, err := cfg.setUp(ctx, p.name, b, addrs)
	if err != nil {
		return nil, err
	}
	p.guest = ownGuest(b, mtu, addrs, search)
	cfg.Hook("unlock")
	return p, nil
}

func ownGuest(b block, mtu int, resolvers []netip.Addr, search []string) guestwire.Net {
	n := guestwire.Net{MAC: guestMAC, Addr: b.guest.String(), Gateway: b.host.Addr().String(), Search: search, MTU: mtu}
	for _, a := range resolvers {
		n.DNS = append(n.DNS, a.String())
	}
	return n
}

// prepare finds out what can be wrong before anything is made.
func (c *Config) prepare() (addrs []netip.Addr, search []string, err error) {
	if !Admin() {
		return nil, nil, rights(unix.EPERM)
	}
	if _, err := nftPath(); err != nil {
		return nil, nil, err
	}
	if err := forwards(); err != nil {
		return nil, nil, err
	}
	return resolvers(c.Resolvers, c.ResolvConf)
}

// setUp makes a new device usable and returns its MTU. The rules are in force
// before it is up.
func (c *Config) setUp(ctx context.Context, name string, b block, resolvers []netip.Addr) (int, error) {
	mtu, err := uplinkMTU()
	if err != nil {
		return 0, err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("looking for the device %s: %w", name, err)
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"alias", func() error { return netlink.LinkSetAlias(link, alias(c.Job, c.Home)) }},
		{"mtu", func() error { return netlink.LinkSetMTU(link, mtu) }},
		{"ipv6", func() error { return noIPv6(name, c.Log) }},
		{"address", func() error {
			a, err := netlink.ParseAddr(b.host.String())
			if err != nil {
				return err
			}
			return netlink.AddrAdd(link, a)
		}},
		{"rules", func() error { return applyRules(ctx, resolvers) }},
		{"up", func() error { return netlink.LinkSetUp(link) }},
	}
	for _, s := range steps {
		c.Hook(s.name)
		if err := s.do(); err != nil {
			if fault.HintOf(err) != "" {
				return 0, err
			}
			return 0, fmt.Errorf("setting the device %s up (%s): %w", name, s.name, rights(err))
		}
	}
	return mtu, nil
}

// noIPv6 keeps the host from speaking IPv6 on a device. Where it cannot be
// written (a read-only /proc), the rules still drop what the guest sends.
func noIPv6(name string, log *slog.Logger) error {
	err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Debug("IPv6 stays on at the host's end of a device", "device", name, logx.Err, err)
	}
	return nil
}

// device is one of ours that exists.
type device struct {
	name  string
	index int
	alias string
	nets  []netip.Prefix
}

// devices lists ours, the lock left out.
func devices() ([]device, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing the host's interfaces: %w", err)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("listing the host's addresses: %w", err)
	}
	var out []device
	for _, l := range links {
		a := l.Attrs()
		if !isOurs(a.Name) || a.Name == lockName {
			continue
		}
		d := device{name: a.Name, index: a.Index, alias: a.Alias}
		for _, ad := range addrs {
			if p, ok := prefixOf(ad.IPNet); ok && ad.LinkIndex == a.Index {
				d.nets = append(d.nets, p)
			}
		}
		out = append(out, d)
	}
	return out, nil
}

// freeSlot is the lowest one whose name and block are free. Blocks of other
// configurations may lie across this network.
func freeSlot(network netip.Prefix, have []device) (int, block, bool) {
	for n := range capacity(network) {
		name := prefix + strconv.Itoa(n)
		b, ok := blockOf(network, n)
		if ok && !slices.ContainsFunc(have, func(d device) bool {
			return d.name == name || slices.ContainsFunc(d.nets, b.host.Overlaps)
		}) {
			return n, b, true
		}
	}
	return 0, block{}, false
}

// closeLimit bounds the end of a port.
const closeLimit = lockWait + 10*time.Second

// Close ends the port's forwards and gives the device up. The guest must be
// gone: a descriptor that it still had would be of a removed device.
func (p *Port) Close() error {
	if p.f == nil {
		return nil
	}
	p.forwards.close()
	f := p.f
	p.f = nil
	if p.kept {
		p.cfg.Hook("release")
		return f.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	p.cfg.Hook("close lock")
	l, err := lock(ctx)
	if err != nil {
		// Without it the device goes all the same; the rules stay for a sweep.
		f.Close()
		return fmt.Errorf("removing the rules of guests' devices: %w", err)
	}
	defer l.Close()
	p.cfg.Hook("close")
	f.Close()
	if link, err := netlink.LinkByName(p.name); err == nil && link.Attrs().Alias == alias(p.cfg.Job, p.cfg.Home) {
		p.cfg.Log.Warn("a device outlived its guest: somebody holds it", "device", p.name)
		if err := netlink.LinkDel(link); err != nil {
			return fmt.Errorf("removing the device %s: %w", p.name, err)
		}
	}
	p.cfg.Hook("drop rules")
	_, err = dropUnused(ctx)
	p.cfg.Hook("closed")
	return err
}

// dropUnused removes the rules when no device needs them. The lock is held.
func dropUnused(ctx context.Context) (dropped bool, err error) {
	have, err := devices()
	if err != nil || len(have) > 0 {
		return false, err
	}
	if there, err := haveRules(ctx); err != nil || !there {
		return false, err
	}
	return true, dropRules(ctx)
}

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/e2e/netgen"
	"virtkit/netsw"
)

// How much each measurement moves. Large enough that the start does not
// count, small enough that five rounds of all take minutes.
const (
	bulkLarge   = 512 << 20 // bytes at the largest MTU
	bulkSmall   = 192 << 20 // bytes at 1500
	connections = 4000
	atOnce      = 16 // connections
	questions   = 10000
	asking      = 32 // questions at once
)

// netSide is one program with its samples, each in the order of the rounds.
type netSide struct {
	*plugged
	mtu  int
	vals map[string][]float64

	failed map[string]bool // what could not be measured once
}

// What is measured of each, with its unit; more is better but for CPU time.
const (
	toGuest   = "to a guest"
	fromGuest = "from a guest"
	cpuTo     = "CPU to a guest"
	cpuFrom   = "CPU from a guest"
	connect   = "connections"
	dnsRate   = "questions"
	cpuConn   = "CPU of a connection"
	cpuDNS    = "CPU of a question"
)

// beside is an area that needs the peers and the servers outside:
// vk's switch beside what else can be a guest's network, without a
// guest. A generator (e2e/netgen) is at the guest's end of each, the same for
// all, and cheap servers are on the host's loopback. Each is a process of its
// own, so that its CPU time can be told. They take turns, so that a busy host
// hits all alike.
func beside(measure func(*bench, context.Context, *outside) error) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error {
		if err := b.buildPeers(ctx); err != nil {
			return err
		}
		if err := findPeers(); err != nil {
			return err
		}
		o, err := newOutside()
		if err != nil {
			return err
		}
		defer o.close()
		return measure(b, ctx, o)
	}
}

// buildPeers builds the peer that is a Go module, from the versions pinned in
// e2e/peers.
func (b *bench) buildPeers(ctx context.Context) error {
	out, err := filepath.Abs(gvproxyPath)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-C", "e2e/peers", "-trimpath", "-buildvcs=false", "-o", out, "github.com/containers/gvisor-tap-vsock/cmd/gvproxy")
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building gvproxy: %w: %s", err, said)
	}
	return nil
}

// netPeers adds the rows beside the other programs.
func (b *bench) netPeers(ctx context.Context, o *outside) error {
	var sides []*netSide
	defer func() {
		for _, s := range sides {
			s.stop()
		}
	}()
	add := func(p *plugged, err error, mtu int) error {
		if err != nil {
			return err
		}
		sides = append(sides, &netSide{plugged: p, mtu: mtu, vals: map[string][]float64{}})
		return nil
	}
	for _, mtu := range []int{1500, netsw.MTU} {
		p, err := b.plugVK(ctx, mtu, switchConfig{DNS: o.dns})
		if err := add(p, err, mtu); err != nil {
			return err
		}
		for _, peer := range peers {
			if only := os.Getenv("VIRTKIT_BENCH_BESIDE"); only != "" && only != peer.name {
				continue
			}
			if slices.Contains(peer.mtus, mtu) {
				p, err := peer.plug(b, ctx, mtu)
				if err := add(p, err, mtu); err != nil {
					return err
				}
			}
		}
	}
	for round := range b.rounds + 1 { // the first one warms up
		for _, s := range sides {
			if err := s.bulk(o); err != nil {
				return err
			}
			if s.mtu != 1500 {
				continue
			}
			if err := s.connects(o); err != nil {
				return err
			}
		}
		if round == 0 {
			for _, s := range sides {
				clear(s.vals)
			}
		}
	}
	b.netRows(sides)
	return nil
}

// netRows compares the sides of each MTU with vk's. A program that has one MTU
// only is beside vk at its largest too: that is what a guest gets.
func (b *bench) netRows(sides []*netSide) {
	for _, mtu := range []int{1500, netsw.MTU} {
		vk := sides[slices.IndexFunc(sides, func(s *netSide) bool { return s.name == "vk" && s.mtu == mtu })]
		for _, s := range sides {
			only := !slices.ContainsFunc(sides, func(o *netSide) bool { return o.name == s.name && o.mtu == mtu })
			if s.name == "vk" || (s.mtu != mtu && !only) {
				continue
			}
			at := fmt.Sprintf("MTU %d", mtu)
			peer := s.name
			if s.mtu != mtu {
				peer += fmt.Sprintf(" (MTU %d, its only one)", s.mtu)
			}
			row := func(what, name, unit string, more bool) {
				add := b.add
				if more {
					add = b.addRate
				}
				add("net", name, unit, median(slices.Clone(vk.vals[what])), peer, median(slices.Clone(s.vals[what])), 1)
			}
			row(toGuest, "to a guest, "+at, "MB/s", true)
			row(fromGuest, "from a guest, "+at, "MB/s", true)
			row(cpuTo, "CPU of the switch, to a guest, "+at, "s/GB", false)
			row(cpuFrom, "CPU of the switch, from a guest, "+at, "s/GB", false)
			if mtu == 1500 {
				row(connect, "connections from a guest", "1/s", true)
				row(cpuConn, "CPU of the switch, each connection", "µs", false)
			}
		}
	}
}

func (s *netSide) size() int64 {
	if s.mtu == 1500 {
		return bulkSmall
	}
	return bulkLarge
}

// run takes one measurement and files its rate, and the CPU time of one unit.
func (s *netSide) run(what, cpuWhat string, rateUnit, cpuUnit float64, do func() (netgen.Result, error)) error {
	before, err := s.cpu()
	if err != nil {
		return err
	}
	r, err := do()
	if err != nil {
		err = fmt.Errorf("%s, MTU %d: %s: %w: %s", s.name, s.mtu, what, err, s.said)
		// One that stands still for once, as passt does when a guest sends faster than
		// a busy host takes it, ends no measurement of minutes.
		if s.name == "vk" || s.failed[what] {
			return err
		}
		if s.failed == nil {
			s.failed = map[string]bool{}
		}
		s.failed[what] = true
		fmt.Fprintln(os.Stderr, "bench: net: left out of the round:", err)
		return nil
	}
	after, err := s.cpu()
	if err != nil {
		return err
	}
	if os.Getenv("VIRTKIT_BENCH_VERBOSE") != "" {
		fmt.Fprintf(os.Stderr, "bench: net: %s, MTU %d: %s: %.5g, CPU %.4g, again %d\n", s.name, s.mtu, what, r.Rate()*rateUnit, (after-before).Seconds()/float64(r.Count)*cpuUnit, r.Again)
	}
	s.vals[what] = append(s.vals[what], r.Rate()*rateUnit)
	s.vals[cpuWhat] = append(s.vals[cpuWhat], (after-before).Seconds()/float64(r.Count)*cpuUnit)
	return nil
}

func (s *netSide) bulk(o *outside) error {
	err := s.run(toGuest, cpuTo, 1e-6, 1e9, func() (netgen.Result, error) { return s.Receive(o.source, s.size()) })
	if err != nil {
		return err
	}
	return s.run(fromGuest, cpuFrom, 1e-6, 1e9, func() (netgen.Result, error) { return s.Send(o.sink, s.size(), o.taken.Load) })
}

func (s *netSide) connects(o *outside) error {
	return s.run(connect, cpuConn, 1, 1e6, func() (netgen.Result, error) { return s.Connect(o.answer, connections, atOnce) })
}

func (s *netSide) asks() error {
	return s.run(dnsRate, cpuDNS, 1, 1e6, func() (netgen.Result, error) { return s.Ask(s.Gateway(53), questions, asking) })
}

// startDnsmasq runs a forwarder that keeps nothing, for the same resolver.
func (b *bench) startDnsmasq(ctx context.Context, o *outside) (*plugged, int, error) {
	path, err := lookPath("dnsmasq")
	if err != nil {
		return nil, 0, err
	}
	// A free port: one that was, a moment ago.
	fd, port, err := (&outside{}).bind(unix.SOCK_DGRAM)
	if err != nil {
		return nil, 0, err
	}
	unix.Close(fd)
	p, err := launch("dnsmasq", exec.CommandContext(ctx, path, "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-daemon",
		"--listen-address=127.0.0.1", "--bind-interfaces", fmt.Sprintf("--port=%d", port), "--cache-size=0", "--dns-forward-max=1000",
		fmt.Sprintf("--server=127.0.0.1#%d", o.dns), "--user=", "--pid-file="))
	if err != nil {
		return nil, 0, err
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if _, err = askDirect(port, 1, 1); err == nil {
			return p, port, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			p.stop()
			return nil, 0, fmt.Errorf("asking dnsmasq: %w: %s", err, p.said)
		}
	}
}

// netDNS adds the rows beside dnsmasq, which is asked over a socket of the host.
func (b *bench) netDNS(ctx context.Context, o *outside) error {
	masq, port, err := b.startDnsmasq(ctx, o)
	if err != nil {
		return err
	}
	defer masq.stop()
	p, err := b.plugVK(ctx, netsw.MTU, switchConfig{DNS: o.dns})
	if err != nil {
		return err
	}
	vk := &netSide{plugged: p, mtu: netsw.MTU, vals: map[string][]float64{}}
	defer vk.stop()
	peer := &netSide{plugged: masq, vals: map[string][]float64{}}
	for round := range b.rounds + 1 {
		if err := vk.asks(); err != nil {
			return err
		}
		if err := peer.run(dnsRate, cpuDNS, 1, 1e6, func() (netgen.Result, error) { return askDirect(port, questions, asking) }); err != nil {
			return err
		}
		if round == 0 {
			clear(vk.vals)
			clear(peer.vals)
		}
	}
	b.addRate("net", "DNS questions of a guest", "1/s", median(vk.vals[dnsRate]), "dnsmasq", median(peer.vals[dnsRate]), 1)
	b.add("net", "CPU of the switch, each DNS question", "µs", median(vk.vals[cpuDNS]), "dnsmasq", median(peer.vals[cpuDNS]), 1)
	return nil
}

// netPolicy adds the rows of lists of 0, 10 and 1,000 entries, recorded,
// beside a switch that allows all and records nothing.
func (b *bench) netPolicy(ctx context.Context, o *outside) error {
	lists := []int{-1, 0, 10, 1000}
	var sides, small []*netSide // in the order of lists, with the largest MTU and with 1500
	defer func() {
		for _, s := range slices.Concat(sides, small) {
			s.stop()
		}
	}()
	for _, n := range lists {
		for _, to := range []struct {
			mtu  int
			list *[]*netSide
		}{{netsw.MTU, &sides}, {1500, &small}} {
			p, err := b.plugVK(ctx, to.mtu, switchConfig{DNS: o.dns, Policy: n >= 0, Entries: max(n, 0)})
			if err != nil {
				return err
			}
			*to.list = append(*to.list, &netSide{plugged: p, mtu: to.mtu, vals: map[string][]float64{}})
		}
	}
	for round := range b.rounds + 1 {
		for _, m := range []struct {
			sides []*netSide
			do    func(*netSide) error
		}{
			{sides, func(s *netSide) error { return s.bulk(o) }},
			{small, func(s *netSide) error { return s.bulk(o) }},
			{sides, func(s *netSide) error { return s.connects(o) }},
			{sides, (*netSide).asks},
		} {
			for i := range m.sides { // right after each other, as the host's other work changes
				if err := m.do(m.sides[(i+round)%len(m.sides)]); err != nil { // what came before differs
					return err
				}
			}
		}
		if round == 0 {
			for _, s := range slices.Concat(sides, small) {
				clear(s.vals)
			}
		}
	}
	const peer, goal = "vk without a policy", 0.95
	for i, n := range lists {
		if n < 0 {
			continue
		}
		name := fmt.Sprintf(", audit and %d entries", n)
		row := func(of []*netSide, what, called, unit string, more bool) {
			vk, bare := median(slices.Clone(of[i].vals[what])), median(slices.Clone(of[0].vals[what]))
			if more {
				b.addRate("net", called+name, unit, vk, peer, bare, goal)
			} else {
				b.add("net", called+name, unit, vk, peer, bare, 1/goal)
			}
		}
		for _, of := range [][]*netSide{small, sides} {
			at := fmt.Sprintf(", MTU %d", of[i].mtu)
			row(of, toGuest, "to a guest"+at, "MB/s", true)
			row(of, fromGuest, "from a guest"+at, "MB/s", true)
			// What a decision costs is told by CPU time, which a busy host changes less.
			row(of, cpuTo, "CPU of the switch, to a guest"+at, "s/GB", false)
			row(of, cpuFrom, "CPU of the switch, from a guest"+at, "s/GB", false)
		}
		row(sides, connect, "connections", "1/s", true)
		row(sides, cpuConn, "CPU of the switch, each connection", "µs", false)
		row(sides, dnsRate, "DNS questions", "1/s", true)
		row(sides, cpuDNS, "CPU of the switch, each DNS question", "µs", false)
	}
	return nil
}

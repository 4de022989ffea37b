package tapnet_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/netsw/tapnet"
)

func makePort(t *testing.T, cfg tapnet.Config) *tapnet.Port {
	t.Helper()
	p, err := tapnet.Make(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestGuestReachesTheOutside(t *testing.T) {
	if !inside(t) {
		return
	}
	world := newWorld(t)
	world.serve(t, worldIP+":80")
	p := makePort(t, config(t, "job"))
	g := p.Guest()
	if g.MTU != uplink || !cmp.Equal(g.DNS, []string{worldIP}) || g.Addr != "10.201.96.2/30" || g.Gateway != "10.201.96.1" {
		t.Errorf("%+v", g)
	}
	guest := newGuest(t, p)
	if from, err := guest.asked(worldIP + ":80"); err != nil || from != hostIP {
		t.Errorf("the world saw %q, %v; want the host's address %s", from, err, hostIP)
	}
	if err := guest.echo(t, worldIP); err != nil {
		t.Errorf("echo of the world: %v", err)
	}
	if err := guest.echo(t, g.Gateway); err != nil {
		t.Errorf("echo of the gateway: %v", err)
	}
	dns, at := world.udp(t, worldIP+":53"), guest.udp(t, "0.0.0.0:0")
	send(t, at, worldIP+":53", "question")
	if what, from := receive(t, dns); what != "question" || from.String() != hostIP {
		t.Errorf("the resolver got %q from %s", what, from)
	}
	if s := p.Stats(); s.SentPackets == 0 || s.RecvBytes == 0 {
		t.Errorf("figures of the device: %+v", s)
	}
	must(t, p.Close())
	if l := left(t); len(l) > 0 {
		t.Errorf("left after the end: %v", l)
	}
}

func TestGuestIsHeldBack(t *testing.T) {
	if !inside(t) {
		return
	}
	world := newWorld(t)
	here := &namespace{do: make(chan func())} // the host's own: any thread will do
	go func() {
		for f := range here.do {
			f()
		}
	}()
	here.serve(t, "0.0.0.0:8080")
	cfg := config(t, "one")
	cfg.Resolvers = append(cfg.Resolvers, netip.MustParseAddrPort(hostIP+":53"))
	one, two := makePort(t, cfg), makePort(t, config(t, "two"))
	guest, other := newGuest(t, one), newGuest(t, two)
	otherIP := netip.MustParsePrefix(two.Guest().Addr).Addr().String()
	other.serve(t, "0.0.0.0:8080")

	if from, err := here.asked(otherIP + ":8080"); err != nil || from != two.Guest().Gateway {
		t.Fatalf("the host reaches its guest: %q, %v", from, err)
	}
	// Whoever is no guest reaches the host as before.
	if from, err := world.asked(hostIP + ":8080"); err != nil || from != worldIP {
		t.Errorf("the world asks the host: %q, %v", from, err)
	}
	for what, at := range map[string]string{
		"the host at the gateway": one.Guest().Gateway, "the host at its own address": hostIP,
		"another job's guest": otherIP, "another job's gateway": two.Guest().Gateway, "the metadata service": "169.254.169.254",
	} {
		if from, err := guest.asked(at + ":8080"); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s at %s: answered %q, %v; want a refusal", what, at, from, err)
		}
	}
	for _, at := range []string{otherIP, hostIP, two.Guest().Gateway, "169.254.169.254"} {
		if err := guest.echo(t, at); !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("echo of %s: %v; want it prohibited", at, err)
		}
	}
	// A resolver that is the host itself is let through.
	dns, at := here.udp(t, hostIP+":53"), guest.udp(t, "0.0.0.0:0")
	send(t, at, hostIP+":53", "question")
	if what, _ := receive(t, dns); what != "question" {
		t.Errorf("the host's resolver got %q", what)
	}

	// A forged source never gets out: what comes after it is what arrives first.
	sink := world.udp(t, worldIP+":5000")
	guest.run(func() { sh(t, "ip addr add "+otherIP+"/32 dev lo; ip addr add 198.51.100.7/32 dev lo") })
	for _, forged := range []string{otherIP, "198.51.100.7"} {
		send(t, guest.udp(t, forged+":0"), worldIP+":5000", "forged as "+forged)
	}
	send(t, at, worldIP+":5000", "honest")
	if what, _ := receive(t, sink); what != "honest" {
		t.Errorf("the world got a packet %s", what)
	}

	// Nor does the world reach a guest first.
	in := other.udp(t, otherIP+":6000")
	send(t, sink, otherIP+":6000", "unasked")
	send(t, here.udp(t, two.Guest().Gateway+":0"), otherIP+":6000", "from the host")
	if what, _ := receive(t, in); what != "from the host" {
		t.Errorf("the guest got %q", what)
	}

	// The other guest's end takes nothing from this one.
	must(t, two.Close())
	world.serve(t, worldIP+":80")
	if from, err := guest.asked(worldIP + ":80"); err != nil || from != hostIP {
		t.Errorf("after the other guest's end: %q, %v", from, err)
	}
	close(here.do)
}

// TestNoPacketGetsOut is of those that a router might pass on. What comes after
// them is what arrives first.
func TestNoPacketGetsOut(t *testing.T) {
	if !inside(t) {
		return
	}
	world := newWorld(t)
	world.run(func() {
		sh(t, "ip addr add 240.0.0.7/32 dev lo; ip addr add 169.254.169.254/32 dev lo; ip -6 addr add 2001:db8:1::1/64 dev w0 nodad; ip -6 route add 2001:db8::/64 via 2001:db8:1::2")
	})
	cfg := config(t, "job")
	cfg.Resolvers = []netip.AddrPort{netip.MustParseAddrPort("169.254.169.254:53")}
	p := makePort(t, cfg)
	guest := newGuest(t, p)
	// As if IPv6 could not be turned off, on a host that routes it.
	sh(t, "ip route add 240.0.0.0/4 via "+worldIP+`
		sysctl -qw net.ipv6.conf.`+p.Name()+`.disable_ipv6=0 net.ipv6.conf.all.forwarding=1
		ip -6 addr add 2001:db8::1/64 dev `+p.Name()+` nodad; ip -6 addr add 2001:db8:1::2/64 dev up0 nodad`)
	mac := strings.TrimSpace(sh(t, "ip -br link show "+p.Name()+" | awk '{print $3}'"))
	guest.run(func() {
		sh(t, "ip -6 addr add 2001:db8::2/64 dev eth0 nodad; ip -6 neigh replace 2001:db8::1 lladdr "+mac+" dev eth0; ip -6 route add default via 2001:db8::1")
	})
	sink := world.udp(t, "[::]:5000")
	for _, to := range []string{"[2001:db8:1::1]:5000", "240.0.0.7:5000"} {
		c, err := guest.dial("udp", to)
		must(t, err)
		_, err = c.Write([]byte("to " + to))
		must(t, err)
		c.Close()
	}
	at := guest.udp(t, "0.0.0.0:0")
	send(t, at, worldIP+":5000", "honest")
	if what, _ := receive(t, sink); what != "honest" {
		t.Errorf("the world got a packet %s", what)
	}
	// A cloud's resolver is where its metadata is.
	dns := world.udp(t, "169.254.169.254:53")
	send(t, at, "169.254.169.254:53", "question")
	if what, _ := receive(t, dns); what != "question" {
		t.Errorf("the resolver got %q", what)
	}
}

func TestSlotsAtOnceAndAllTaken(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	cfg := config(t, "job")
	cfg.Subnet = netip.MustParsePrefix("10.222.0.0/28")
	var mu sync.Mutex
	var ports []*tapnet.Port
	var full []error
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			p, err := tapnet.Make(t.Context(), cfg)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				full = append(full, err)
			} else {
				ports = append(ports, p)
			}
		})
	}
	wg.Wait()
	var addrs []string
	for _, p := range ports {
		addrs = append(addrs, p.Guest().Addr)
	}
	slices.Sort(addrs)
	if d := cmp.Diff([]string{"10.222.0.10/30", "10.222.0.14/30", "10.222.0.2/30", "10.222.0.6/30"}, addrs); d != "" {
		t.Errorf("addresses (-want +got)\n%s\n%v", d, full)
	}
	for _, err := range full {
		if fault.KindOf(err) != fault.Busy || !strings.Contains(err.Error(), "all 4 networks of guests' devices in 10.222.0.0/28 are taken") || fault.HintOf(err) == "" {
			t.Errorf("all taken: %v (%s)", err, fault.HintOf(err))
		}
	}
	// Another configuration's network that lies across keeps clear of them.
	wide := config(t, "wide")
	wide.Subnet = netip.MustParsePrefix("10.222.0.0/16")
	p := makePort(t, wide)
	if p.Guest().Addr != "10.222.0.18/30" {
		t.Errorf("beside the others: %s", p.Guest().Addr)
	}
	for _, p := range ports {
		must(t, p.Close())
	}
	must(t, p.Close())
	if l := left(t); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

func TestWhatIsMissingIsTold(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	fails := func(what string, cfg tapnet.Config, kind fault.Kind, want, hint string) {
		t.Helper()
		p, err := tapnet.Make(t.Context(), cfg)
		if err == nil {
			p.Close()
		}
		if fault.KindOf(err) != kind || !strings.Contains(err.Error(), want) || !strings.Contains(fault.HintOf(err), hint) {
			t.Errorf("%s: %v; hint %q; want %q and %q", what, err, fault.HintOf(err), want, hint)
		}
		if l := left(t); len(l) > 0 {
			t.Errorf("%s: left %v", what, l)
		}
	}
	cfg := config(t, "job")
	cfg.Subnet = netip.MustParsePrefix("192.0.2.0/24")
	fails("a network of the host's", cfg, fault.System, "[net] subnet 192.0.2.0/24 overlaps 192.0.2.0/24", "another [net] subnet")
	cfg = config(t, "job")
	cfg.Resolvers = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}
	fails("a resolver of the host's loopback", cfg, fault.System, "127.0.0.1 cannot be reached", `mode "switch"`)
	cfg.Resolvers = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:5353")}
	fails("a resolver's port", cfg, fault.System, "asks at port 53 alone", `mode "switch"`)
	sh(t, "sysctl -qw net.ipv4.ip_forward=0")
	fails("a host that does not route", config(t, "job"), fault.System, "does not route", "net.ipv4.ip_forward=1")
	sh(t, "sysctl -qw net.ipv4.ip_forward=1")

	// A program without the right to.
	if out := helperAs(t, 12345, "make"); !strings.Contains(out, "CAP_NET_ADMIN") {
		t.Errorf("without rights: %s", out)
	}
	// All routes taken: nothing is hidden from the host.
	sh(t, "ip route add 10.0.0.0/8 via "+worldIP+"; ip route add 172.16.0.0/12 via "+worldIP)
	p := makePort(t, config(t, "job"))
	if p.Guest().Addr != "192.168.208.2/30" {
		t.Errorf("beside routes to the other networks: %s", p.Guest().Addr)
	}
	must(t, p.Close())
	sh(t, "ip route add 192.168.0.0/16 via "+worldIP)
	fails("no network", config(t, "job"), fault.System, "every private network", "[net] subnet")
}

func TestMTUOfTheWaysOut(t *testing.T) {
	if !inside(t) {
		return
	}
	world := newWorld(t)
	sh(t, "ip route replace default via "+worldIP+" mtu 1300")
	if m := makePort(t, config(t, "job")).Guest().MTU; m != 1300 {
		t.Errorf("a route's MTU of 1300: %d", m)
	}
	// A narrower way behind the first one: TCP is told of it as it begins.
	world.run(func() {
		sh(t, "ip addr add 203.0.113.1/32 dev lo")
		l, err := net.Listen("tcp4", "203.0.113.1:80")
		must(t, err)
		t.Cleanup(func() { l.Close() })
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			rc, _ := c.(*net.TCPConn).SyscallConn()
			rc.Control(func(fd uintptr) {
				n, _ := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
				fmt.Fprint(c, n)
			})
		}()
	})
	sh(t, "ip route add 203.0.113.1/32 via "+worldIP+" mtu 1000")
	if mss, err := newGuest(t, makePort(t, config(t, "job"))).asked("203.0.113.1:80"); err != nil || mss != "948" {
		t.Errorf("segments of %q bytes, %v; want 948: 1000 less the headers with timestamps", mss, err)
	}
	sh(t, "ip route del default")
	if m := makePort(t, config(t, "job")).Guest().MTU; m != 1500 {
		t.Errorf("no way out: %d", m)
	}
}

func TestForward(t *testing.T) {
	if !inside(t) {
		return
	}
	newWorld(t)
	p := makePort(t, config(t, "job"))
	newGuest(t, p).serve(t, "0.0.0.0:80")
	port, c, err := p.Forward("127.0.0.1", 0, 80)
	must(t, err)
	at := net.JoinHostPort("127.0.0.1", itoa(port))
	_, _, err = p.Forward("127.0.0.1", port, 80)
	if fault.KindOf(err) != fault.Conflict {
		t.Errorf("the port twice: %v", err)
	}
	ask := func() (string, error) {
		c, err := net.Dial("tcp", at)
		if err != nil {
			return "", err
		}
		defer c.Close()
		b := make([]byte, 100)
		n, err := c.Read(b)
		return string(b[:n]), err
	}
	if from, err := ask(); err != nil || from != p.Guest().Gateway {
		t.Errorf("answer %q, %v", from, err)
	}
	nobody, _, err := p.Forward("127.0.0.1", 0, 81)
	must(t, err)
	at = net.JoinHostPort("127.0.0.1", itoa(nobody))
	if from, err := ask(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a port that nobody listens on: %q, %v", from, err)
	}
	at = net.JoinHostPort("127.0.0.1", itoa(port))
	c.Close()
	if _, err := ask(); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("an unpublished port: %v", err)
	}
}

func TestBlocks(t *testing.T) {
	n := netip.MustParsePrefix("10.201.96.0/20")
	for slot, want := range map[int][3]string{
		0:    {"10.201.96.1/30", "10.201.96.2/30"},
		64:   {"10.201.97.1/30", "10.201.97.2/30"},
		1023: {"10.201.111.253/30", "10.201.111.254/30"},
	} {
		if h, g, ok := tapnet.BlockOf(n, slot); !ok || h != want[0] || g != want[1] {
			t.Errorf("block %d: %s, %s, %v; want %v", slot, h, g, ok, want)
		}
	}
	if _, _, ok := tapnet.BlockOf(n, 1024); ok {
		t.Error("a block past the network's end")
	}
}

func TestAlias(t *testing.T) {
	job := strings.Repeat("x", 128)
	a := tapnet.Alias(job, "ffffffffffffffff-ffffffffffffffff")
	if j, h, ok := tapnet.ParseAlias(a); len(a) > 255 || !ok || j != job || h != "ffffffffffffffff-ffffffffffffffff" {
		t.Errorf("%d bytes: %q, %q, %v", len(a), j, h, ok)
	}
	for _, s := range []string{"", "virtkit job", "somebody's"} {
		if _, _, ok := tapnet.ParseAlias(s); ok {
			t.Errorf("%q is read as an alias", s)
		}
	}
}

func TestResolvers(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		f := filepath.Join(dir, name)
		must(t, os.WriteFile(f, []byte(text), 0o600))
		return f
	}
	stub := file("stub", "nameserver 127.0.0.53\nsearch a.example\n")
	real := file("real", "nameserver 2001:db8::1\nnameserver 192.0.2.9\nnameserver 192.0.2.8\nsearch b.example\n")
	got, search, err := tapnet.Resolvers(nil, []string{stub, real})
	if err != nil || len(got) != 2 || got[0].String() != "192.0.2.9" || !cmp.Equal(search, []string{"b.example"}) {
		t.Errorf("%v, %v, %v", got, search, err)
	}
	if _, _, err := tapnet.Resolvers(nil, []string{stub, filepath.Join(dir, "none")}); fault.KindOf(err) != fault.System || !strings.Contains(fault.HintOf(err), "[net] dns") {
		t.Errorf("only a stub: %v", err)
	}
}

func TestClosedChains(t *testing.T) {
	const listing = `table ip filter {
	chain FORWARD {
		type filter hook forward priority filter; policy drop;
	}
	chain INPUT {
		type filter hook input priority filter; policy drop;
	}
	chain DOCKER {
	}
}
table inet virtkit {
	chain through {
		type filter hook forward priority filter; policy accept;
	}
}
`
	if d := cmp.Diff([]string{"ip filter FORWARD"}, tapnet.ClosedChains(listing)); d != "" {
		t.Error(d)
	}
}

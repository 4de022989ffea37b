package tapnet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"virtkit/netsw/tapnet"
)

// Addresses of the world: TEST-NET-1, which nobody has.
const (
	worldIP = "192.0.2.1"
	hostIP  = "192.0.2.2"
)

// uplink is the MTU of the host's way out.
const uplink = 1400

const inNS = "VK_TAPNET_INSIDE"

// inside runs the rest of the test in a process that has network devices and
// mounts of its own, in which it returns true. The caller returns on false.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inNS) != "" {
		prepareHost(t)
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to make a network namespace")
	}
	for _, p := range []string{"/usr/sbin/nft", "/usr/sbin/ip"} {
		if _, err := os.Stat(p); err != nil {
			t.Skipf("needs %s: apt-get install nftables iproute2", p)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=120s")
	cmd.Env = append(os.Environ(), inNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("in a namespace of its own: %v\n%s", err, out)
	}
	return false
}

// prepareHost makes the namespace a host that routes, with the world behind
// its one way out, and with a door to tap devices for every user.
func prepareHost(t *testing.T) {
	t.Helper()
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	door := t.TempDir() + "/tun"
	must(t, unix.Mknod(door, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200))))
	must(t, os.Chmod(door, 0o666))
	must(t, unix.Mount(door, "/dev/net/tun", "", unix.MS_BIND, ""))
	sh(t, "ip link set lo up")
	must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"+script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// namespace is another one, which a thread of its own is in.
type namespace struct{ do chan func() }

func newNamespace(t *testing.T) (ns *namespace, tid int) {
	t.Helper()
	ns = &namespace{do: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		tid = unix.Gettid()
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		for f := range ns.do {
			f()
		}
	}()
	must(t, <-ready)
	t.Cleanup(func() { close(ns.do) })
	return ns, tid
}

// run runs f in ns. Sockets that f makes stay in it.
func (ns *namespace) run(f func()) {
	done := make(chan struct{})
	ns.do <- func() { defer close(done); f() }
	<-done
}

// newWorld is what is behind the host's way out.
func newWorld(t *testing.T) *namespace {
	t.Helper()
	ns, tid := newNamespace(t)
	sh(t, "ip link add up0 type veth peer name w0 netns /proc/"+itoa(os.Getpid())+"/task/"+itoa(tid)+"/ns/net\n"+
		"ip addr add "+hostIP+"/24 dev up0; ip link set up0 mtu "+itoa(uplink)+" up; ip route add default via "+worldIP)
	ns.run(func() {
		sh(t, "ip link set lo up; ip addr add "+worldIP+"/24 dev w0; ip link set w0 up; ip route add 10.201.96.0/20 via "+hostIP)
	})
	return ns
}

func itoa(n int) string { return strconv.Itoa(n) }

// newGuest is a kernel behind p's device: a namespace whose only device is
// joined to it frame by frame, set up as a guest's agent would.
func newGuest(t *testing.T, p *tapnet.Port) *namespace {
	t.Helper()
	ns, _ := newNamespace(t)
	wire, err := p.File()
	must(t, err)
	n := p.Guest()
	var own *os.File
	ns.run(func() {
		own = openTap(t, "eth0")
		sh(t, "ip link set lo up; ip link set eth0 address "+n.MAC+" mtu "+itoa(n.MTU)+" up; ip addr add "+n.Addr+" dev eth0; ip route add default via "+n.Gateway)
	})
	for _, c := range [][2]*os.File{{wire, own}, {own, wire}} {
		go func() {
			b := make([]byte, 1<<17)
			for {
				k, err := c[0].Read(b)
				if err != nil {
					return
				}
				if _, err := c[1].Write(b[:k]); err != nil && !errors.Is(err, unix.EINVAL) {
					return
				}
			}
		}()
	}
	t.Cleanup(func() { wire.Close(); own.Close() })
	return ns
}

func openTap(t *testing.T, name string) *os.File {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(t, err)
	req, err := unix.NewIfreq(name)
	must(t, err)
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	must(t, unix.IoctlIfreq(fd, unix.TUNSETIFF, req))
	return os.NewFile(uintptr(fd), name)
}

// dial connects from ns, or says how that was refused.
func (ns *namespace) dial(network, to string) (c net.Conn, err error) {
	ns.run(func() { c, err = net.DialTimeout(network, to, 20*time.Second) })
	return c, err
}

// echo pings from ns.
func (ns *namespace) echo(t *testing.T, to string) error {
	t.Helper()
	c, err := ns.dial("ip4:icmp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	m := []byte{8, 0, 0, 0, 0, 7, 0, 1, 'v', 'k', 'v', 'k'}
	sum := uint32(0)
	for i := 0; i < len(m); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(m[i:]))
	}
	binary.BigEndian.PutUint16(m[2:], ^uint16(sum+sum>>16))
	if _, err := c.Write(m); err != nil {
		return err
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	for b := make([]byte, 200); ; {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		head := int(b[0]&15) * 4 // of IP
		switch b := b[:n]; {
		case n <= head:
		case b[head] == 0:
			return nil
		case b[head] == 3:
			return unix.EHOSTUNREACH
		}
	}
}

// serve answers each TCP connection with who it came from.
func (ns *namespace) serve(t *testing.T, at string) {
	t.Helper()
	ns.run(func() {
		l, err := net.Listen("tcp4", at)
		must(t, err)
		t.Cleanup(func() { l.Close() })
		go answer(l)
	})
}

func answer(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			io.WriteString(c, c.RemoteAddr().(*net.TCPAddr).IP.String())
		}()
	}
}

// asked is what a server answered.
func (ns *namespace) asked(at string) (string, error) {
	c, err := ns.dial("tcp4", at)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	b, err := io.ReadAll(c)
	return string(b), err
}

// udp is a socket in ns.
func (ns *namespace) udp(t *testing.T, at string) *net.UDPConn {
	t.Helper()
	var c net.PacketConn
	var err error
	ns.run(func() { c, err = net.ListenPacket("udp", at) })
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

func send(t *testing.T, c *net.UDPConn, to, text string) {
	t.Helper()
	_, err := c.WriteToUDPAddrPort([]byte(text), netip.MustParseAddrPort(to))
	must(t, err)
}

func receive(t *testing.T, c *net.UDPConn) (string, netip.Addr) {
	t.Helper()
	b := make([]byte, 100)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	n, from, err := c.ReadFromUDPAddrPort(b)
	must(t, err)
	return string(b[:n]), from.Addr()
}

// left are devices of vk's and its rules.
func left(t *testing.T) []string {
	t.Helper()
	var out []string
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "vktap") {
			out = append(out, l.Attrs().Name)
		}
	}
	if strings.Contains(sh(t, "nft list tables"), "virtkit") {
		out = append(out, "rules")
	}
	return out
}

// config is that of a job of this test.
func config(t *testing.T, job string) tapnet.Config {
	return tapnet.Config{Job: job, Home: "fe00-1", PoolSize: 2, Resolvers: []netip.AddrPort{netip.MustParseAddrPort(worldIP + ":53")}}
}

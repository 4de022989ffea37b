package netsw_test

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

// Public case S35: a guest may forward to a network of its own with a smaller MTU, such as its
// containers': what the switch sends it can be cut there. TCP keeps to what the
// other side says; datagrams and echo answers are not marked as whole for ever.
func TestInnerNetworkWithSmallerMTU(t *testing.T) {
	echo := echoUDP(t)
	blob := pattern(1 << 20)
	web := serve(t, func(c *net.TCPConn) { _, _ = c.Write(blob) })
	sw := open(t, netsw.Config{HostLoopback: true})
	p, err := sw.AddPort(netsw.PortConfig{Name: "job"})
	if err != nil {
		t.Fatal(err)
	}
	n := p.Net()
	n.MTU = 1500 // as the container's interface, behind the guest's
	g := netswtest.New(t, p.File(), n)
	p.CloseFile()
	var long, whole atomic.Int64
	stop := g.Tap(func(b []byte) {
		e, _ := frame.ParseEth(b)
		ip, ok := frame.ParseIPv4(e.Payload)
		if !ok {
			return
		}
		if ip.Proto == frame.ProtoTCP && len(e.Payload) > 1500 {
			long.Add(1)
		}
		if ip.Proto != frame.ProtoTCP && ip.Header[6]&0x40 != 0 && len(e.Payload) > 1500 {
			whole.Add(1)
		}
	})
	defer stop()
	c, err := g.Dial(within(t), at(sw, web))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "download", got, blob)
	c.Close()
	if long.Load() != 0 {
		t.Errorf("%d segments are longer than what the guest's side said it takes", long.Load())
	}
	u, err := g.DialUDP(at(sw, echo))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	_ = u.SetDeadline(time.Now().Add(limit))
	_, _ = u.Write(pattern(9000))
	b := make([]byte, 64<<10)
	if k, err := u.Read(b); err != nil || !bytes.Equal(b[:k], pattern(9000)) {
		t.Errorf("9,000 bytes over UDP: %d back, %v", k, err)
	}
	ping := frame.AppendICMP(frame.AppendEth(nil, gwMAC, g.MAC(), frame.TypeIPv4), g.Addr.As4(), sw.Gateway().As4(),
		frame.ICMP{Type: frame.ICMPEcho, Rest: 1, Payload: make([]byte, 5000)})
	if whole.Load() != 0 {
		t.Errorf("%d long datagrams may not be cut on their way", whole.Load())
	}
	reply := g.WaitFrame(ping, limit, isEchoReply)
	if reply == nil {
		t.Fatal("no answer to a long echo request")
	}
	e, _ := frame.ParseEth(reply)
	if ip, ok := frame.ParseIPv4(e.Payload); !ok || ip.Header[6]&0x40 != 0 || frame.Checksum(ip.Header, 0) != 0 {
		t.Errorf("the answer to an echo request may not be cut on its way, or its header is wrong: % x", ip.Header)
	}
}

const inNS = "VK_NETSW_INSIDE"

// Public case S35: the host's way out has a small MTU in the middle, which only the router there
// knows: TCP and UDP of a guest, whose own MTU is far larger, get through.
func TestSmallOuterMTU(t *testing.T) {
	if os.Getenv(inNS) == "" {
		inNamespace(t)
		return
	}
	// host — router — world; the last link takes 1280 bytes.
	router, world := newThread(t), newThread(t)
	ns := func(tid int) string {
		return "/proc/" + strconv.Itoa(os.Getpid()) + "/task/" + strconv.Itoa(tid) + "/ns/net"
	}
	sh(t, "ip link set lo up; ip link add h0 type veth peer name r0 netns "+ns(router.tid)+
		"; ip addr add 192.0.2.2/30 dev h0; ip link set h0 up; ip route add default via 192.0.2.1")
	router.run(func() {
		sh(t, "ip link set lo up; ip addr add 192.0.2.1/30 dev r0; ip link set r0 up; ip link add r1 mtu 1280 type veth peer name w0 mtu 1280 netns "+ns(world.tid)+
			"; ip addr add 192.0.2.5/30 dev r1; ip link set r1 up; echo 1 >/proc/sys/net/ipv4/ip_forward")
	})
	world.run(func() {
		sh(t, "ip link set lo up; ip addr add 192.0.2.6/30 dev w0; ip link set w0 up; ip route add default via 192.0.2.5")
	})
	blob := pattern(1 << 20)
	var ln net.Listener
	var pc net.PacketConn
	var err error
	world.run(func() {
		if ln, err = net.Listen("tcp4", "192.0.2.6:80"); err == nil {
			pc, err = net.ListenPacket("udp4", "192.0.2.6:7")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	defer pc.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				b, _ := io.ReadAll(c)
				_, _ = c.Write(b)
				c.Close()
			}()
		}
	}()
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(b[:n], from)
		}
	}()
	sw := open(t, netsw.Config{})
	_, g := join(t, sw, "job")
	c, err := g.Dial(within(t), "192.0.2.6:80")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = c.Write(blob)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "1 MiB there and back", got, blob)
	c.Close()
	// A datagram may be lost where the path is found to be narrow; not the ones
	// after it.
	for _, n := range []int{100, 1400, 9000} {
		if b := g.Ask(t, "192.0.2.6:7", pattern(n)); !bytes.Equal(b, pattern(n)) {
			t.Errorf("%d bytes over UDP came back as %d", n, len(b))
		}
	}
}

// inNamespace runs the test again in a process that has network devices of its
// own, as root of a user namespace where it is not root anyway.
func inNamespace(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("needs ip: apt-get install iproute2")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=120s")
	cmd.Env = append(os.Environ(), inNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	if cmd.Process == nil {
		t.Skipf("needs root, or user namespaces (sysctl kernel.unprivileged_userns_clone): %v", err)
	}
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("in a namespace of its own: %v\n%s", err, out)
	}
}

// thread is one in a network namespace of its own.
type thread struct {
	tid int
	do  chan func()
}

func newThread(t *testing.T) *thread {
	t.Helper()
	th := &thread{do: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		th.tid = unix.Gettid()
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		for f := range th.do {
			f()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(th.do) })
	return th
}

// run runs f there. Sockets that f makes stay there.
func (th *thread) run(f func()) {
	done := make(chan struct{})
	th.do <- func() { defer close(done); f() }
	<-done
}

func sh(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

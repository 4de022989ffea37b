package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
	"virtkit/e2e/netgen"
	"virtkit/netsw"
	"virtkit/netsw/frame"
)

// plugged is a program that is a guest's network, with the guest's end of it.
type plugged struct {
	*netgen.Link
	name string
	cmd  *exec.Cmd
	said *bytes.Buffer
}

// cpu is the CPU time of the program so far.
func (p *plugged) cpu() (time.Duration, error) { return processCPU(p.cmd.Process.Pid) }

// processCPU is the CPU time of a process with all its threads, those that
// ended included: its CPU clock (clock_getcpuclockid(3)) counts nanoseconds.
func processCPU(pid int) (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
		return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

func (p *plugged) stop() {
	if p.Link != nil {
		p.Link.Close()
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // all of them end by it
	_ = p.cmd.Wait()
}

// guestMAC is what the programs that do not assign one are told by use.
var guestMAC = frame.MAC{0x02, 0xbe, 0xef, 0, 0, 2}

// peers are what vk runs beside, in the order of the rows.
var peers = []struct {
	name string
	need string // program
	how  string // to install it
	mtus []int
	plug func(b *bench, ctx context.Context, mtu int) (*plugged, error)
}{
	{"QEMU's user network", "qemu-system-x86_64", "apt-get install qemu-system-x86", []int{1500}, (*bench).plugSlirp},
	{"passt", "passt", "apt-get install passt", []int{1500, 65520}, (*bench).plugPasst},
	{"gvproxy", gvproxyPath, "make bench builds it from e2e/peers", []int{1500, 65520}, (*bench).plugGvproxy},
}

const gvproxyPath = "bin/peers/gvproxy"

// findPeers fails when one is missing: a comparison with less would look won.
func findPeers() error {
	var all []error
	for _, p := range peers {
		if _, err := exec.LookPath(p.need); err != nil {
			all = append(all, fmt.Errorf("%s is missing: %s", p.name, p.how))
		}
	}
	if _, err := lookPath("dnsmasq"); err != nil {
		all = append(all, errors.New("dnsmasq is missing: apt-get install dnsmasq-base"))
	}
	return errors.Join(all...)
}

// lookPath looks in the folders of administrators too.
func lookPath(name string) (string, error) {
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if p := filepath.Join(dir, name); unix.Access(p, unix.X_OK) == nil {
			return p, nil
		}
	}
	return exec.LookPath(name)
}

// launch starts cmd; it dies with this process.
func launch(name string, cmd *exec.Cmd) (*plugged, error) {
	p := &plugged{name: name, cmd: cmd, said: &bytes.Buffer{}}
	cmd.Stdout, cmd.Stderr = p.said, p.said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	return p, nil
}

func (p *plugged) open(fd int, cfg netgen.Config) (*plugged, error) {
	l, err := netgen.Open(fd, cfg)
	if err != nil {
		p.stop()
		return nil, fmt.Errorf("%s: %w: %s", p.name, err, p.said)
	}
	p.Link = l
	return p, nil
}

// pair makes a socket pair; the near end is a descriptor, the far one a file.
func pair() (near int, far *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("making a socket pair: %w", err)
	}
	_ = unix.SetsockoptInt(fds[1], unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	return fds[0], os.NewFile(uintptr(fds[1]), "far"), nil
}

// plugSlirp runs QEMU without a machine: its user network joined by a hub to a
// stream socket. It has one MTU, 1500.
func (b *bench) plugSlirp(ctx context.Context, mtu int) (*plugged, error) {
	near, far, err := pair()
	if err != nil {
		return nil, err
	}
	defer far.Close()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-M", "none", "-nodefaults", "-nographic", "-monitor", "none",
		"-netdev", "user,id=u", "-netdev", "hubport,id=hu,hubid=0,netdev=u",
		"-netdev", "stream,id=s,server=off,addr.type=fd,addr.str=3", "-netdev", "hubport,id=hs,hubid=0,netdev=s")
	cmd.ExtraFiles = []*os.File{far}
	p, err := launch("QEMU's user network", cmd)
	if err != nil {
		unix.Close(near)
		return nil, err
	}
	gw := netip.MustParseAddr("10.0.2.2")
	return p.open(near, netgen.Config{MAC: guestMAC, Addr: netip.MustParseAddr("10.0.2.15"), Gateway: gw, Host: gw, MTU: mtu})
}

func (b *bench) plugPasst(ctx context.Context, mtu int) (*plugged, error) {
	p, fd, cfg, err := b.startPasst(ctx, mtu)
	if err != nil {
		return nil, err
	}
	return p.open(fd, cfg)
}

// startPasst runs passt for one guest; it gives the guest's end and how the guest
// is to be set up.
func (b *bench) startPasst(ctx context.Context, mtu int) (*plugged, int, netgen.Config, error) {
	sock := b.socket("passt")
	gw := netip.MustParseAddr("10.99.0.1")
	cfg := netgen.Config{MAC: guestMAC, Addr: netip.MustParseAddr("10.99.0.2"), Gateway: gw, Host: gw, MTU: mtu}
	return startOn(ctx, "passt", sock, cfg, exec.CommandContext(ctx, "passt", "-f", "-e", "-1", "-s", sock, "-4", "-m", strconv.Itoa(mtu), "--runas", strconv.Itoa(os.Getuid()),
		"-a", cfg.Addr.String(), "-n", "24", "-g", gw.String()))
}

func (b *bench) plugGvproxy(ctx context.Context, mtu int) (*plugged, error) {
	p, fd, cfg, err := b.startGvproxy(ctx, mtu)
	if err != nil {
		return nil, err
	}
	return p.open(fd, cfg)
}

// startGvproxy is startPasst for gvproxy.
func (b *bench) startGvproxy(ctx context.Context, mtu int) (*plugged, int, netgen.Config, error) {
	sock := b.socket("gvproxy")
	cfg := netgen.Config{MAC: guestMAC, Addr: netip.MustParseAddr("192.168.127.2"),
		Gateway: netip.MustParseAddr("192.168.127.1"), Host: netip.MustParseAddr("192.168.127.254"), MTU: mtu}
	return startOn(ctx, "gvproxy", sock, cfg, exec.CommandContext(ctx, gvproxyPath, "-mtu", strconv.Itoa(mtu), "-ssh-port", "-1", "-listen-qemu", "unix://"+sock))
}

// socket is a path for one that is not used yet.
func (b *bench) socket(name string) string {
	b.sockets++
	return filepath.Join(b.dir, fmt.Sprintf("%s-%d.sock", name, b.sockets))
}

// startOn runs a program that listens at a socket for a guest, and is that guest.
func startOn(ctx context.Context, name, sock string, cfg netgen.Config, cmd *exec.Cmd) (*plugged, int, netgen.Config, error) {
	p, err := launch(name, cmd)
	if err != nil {
		return nil, 0, cfg, err
	}
	fd, err := dialUnix(ctx, sock)
	if err != nil {
		p.stop()
		return nil, 0, cfg, fmt.Errorf("%s: %w: %s", name, err, p.said)
	}
	return p, fd, cfg, nil
}

// dialUnix connects to a socket that a program is about to make.
func dialUnix(ctx context.Context, path string) (int, error) {
	for end := time.Now().Add(10 * time.Second); ; {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err == nil {
			return fd, nil
		}
		unix.Close(fd)
		if time.Now().After(end) || ctx.Err() != nil {
			return 0, fmt.Errorf("connecting to %s: %w", path, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// switchConfig is what the process that holds vk's switch is told.
type switchConfig struct {
	DNS     int  // port of the resolver on the host's loopback
	Policy  bool // decide and record; else everything is allowed unseen
	Entries int  // of each list, when there is a policy; 0 = no list
}

// switchWord makes this program the process of a switch; see runSwitch.
const switchWord = "switch-process"

// startSwitch runs vk's switch in a process of its own, which is this program
// again; it gives the guest's end and what the guest's interface is to be.
func (b *bench) startSwitch(ctx context.Context, c switchConfig) (p *plugged, fd int, set guestwire.Net, err error) {
	near, far, err := pair()
	if err != nil {
		return nil, 0, set, err
	}
	defer unix.Close(near)
	defer far.Close()
	self, err := os.Executable()
	if err != nil {
		return nil, 0, set, err
	}
	arg, err := json.Marshal(c)
	if err != nil {
		return nil, 0, set, err
	}
	cmd := exec.CommandContext(ctx, self, switchWord, string(arg))
	cmd.ExtraFiles = []*os.File{far}
	if p, err = launch("vk", cmd); err != nil {
		return nil, 0, set, err
	}
	far.Close()
	if fd, set, err = receiveLink(near); err != nil {
		p.stop()
		return nil, 0, set, fmt.Errorf("vk's switch: %w: %s", err, p.said)
	}
	return p, fd, set, nil
}

// plugVK is a generator on vk's switch.
func (b *bench) plugVK(ctx context.Context, mtu int, c switchConfig) (*plugged, error) {
	p, fd, set, err := b.startSwitch(ctx, c)
	if err != nil {
		return nil, err
	}
	mac, err := parseMAC(set.MAC)
	if err != nil {
		p.stop()
		return nil, err
	}
	gw := netip.MustParseAddr(set.Gateway)
	return p.open(fd, netgen.Config{MAC: mac, Addr: netip.MustParsePrefix(set.Addr).Addr(), Gateway: gw, Host: gw, MTU: min(mtu, netsw.MTU)})
}

package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent/agenttest"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// bootKernel names the kernel of TestBoot: one with virtio, ext4 and overlay
// built in, or whose modules VIRTKIT_TEST_MODULES lists in load order.
const bootKernel = "VIRTKIT_TEST_KERNEL"

// needGuest skips where no guest can be booted.
func needGuest(t *testing.T) (kernel, busybox string) {
	t.Helper()
	kernel = os.Getenv(bootKernel)
	if kernel == "" {
		t.Skip("needs a guest kernel: set " + bootKernel + " to a bzImage or vmlinux")
	}
	for _, tool := range []string{"qemu-system-x86_64", "mke2fs", "busybox", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("needs " + tool + ": apt-get install qemu-system-x86 e2fsprogs busybox-static golang")
		}
	}
	busybox, _ = exec.LookPath("busybox")
	return kernel, busybox
}

// newc is a cpio archive of regular files, directories and the two nodes
// without which nothing can be printed.
type newc struct{ bytes.Buffer }

func (a *newc) add(name string, mode, major, minor int, data []byte) {
	fmt.Fprintf(a, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.Len()+1, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	a.pad()
	a.Write(data)
	a.pad()
}

func (a *newc) pad() {
	for a.Len()%4 != 0 {
		a.WriteByte(0)
	}
}

func initramfs(t *testing.T, dir string) string {
	t.Helper()
	bin := filepath.Join(dir, "vk-agent")
	cmd := exec.Command("go", "build", "-tags", "netgo,osusergo", "-trimpath", "-ldflags", "-s -w", "-o", bin, "./agenttest/cmd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the agent: %v\n%s", err, out)
	}
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	var a newc
	for _, d := range []string{"dev", "proc", "sys", "lib", "lib/vk-modules"} {
		a.add(d, 0o40755, 0, 0, nil)
	}
	a.add("dev/console", 0o20600, 5, 1, nil)
	a.add("dev/null", 0o20666, 1, 3, nil)
	a.add("init", 0o100755, 0, 0, b)
	var order strings.Builder
	for _, m := range strings.Fields(os.Getenv("VIRTKIT_TEST_MODULES")) {
		data, err := os.ReadFile(m)
		if err != nil {
			t.Fatal(err)
		}
		a.add("lib/vk-modules/"+filepath.Base(m), 0o100644, 0, 0, data)
		order.WriteString(filepath.Base(m) + "\n")
	}
	a.add("lib/vk-modules/order", 0o100644, 0, 0, []byte(order.String()))
	a.add("TRAILER!!!", 0, 0, 0, nil)
	path := filepath.Join(dir, "initrd")
	if err := os.WriteFile(path, a.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func ext4(t *testing.T, path, size, from string) {
	t.Helper()
	args := []string{"-q", "-t", "ext4", "-E", "lazy_itable_init=1,root_owner=0:0"}
	if from != "" {
		args = append(args, "-d", from)
	}
	if out, err := exec.Command("mke2fs", append(args, path, size)...).CombinedOutput(); err != nil {
		t.Fatalf("mke2fs: %v\n%s", err, out)
	}
}

// image makes a root of busybox with traps for a setup that follows links.
func image(t *testing.T, dir, busybox string) string {
	t.Helper()
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{"bin", "etc", "old/dir", "home/dev"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(tree+"/bin/busybox", b, 0o755)
	for _, n := range []string{"sh", "cat", "echo", "id", "ls", "mount", "ip", "date", "mv", "hostname", "stat", "ping", "touch", "sleep", "tty", "dd", "ps", "tail", "head", "df", "wc", "sync", "grep", "nc", "kill"} {
		os.Symlink("busybox", tree+"/bin/"+n)
	}
	os.WriteFile(tree+"/etc/passwd", []byte("root:x:0:0::/root:/bin/sh\ndev:x:1000:1000::/home/dev:/bin/sh\n"), 0o644)
	os.WriteFile(tree+"/etc/group", []byte("root:x:0:\ndev:x:1000:\nextra:x:77:dev\n"), 0o644)
	os.Symlink("../run/systemd/resolve/stub-resolv.conf", tree+"/etc/resolv.conf")
	os.WriteFile(tree+"/old/dir/file", []byte("kept\n"), 0o644)
	img := filepath.Join(dir, "root.img")
	ext4(t, img, "32M", tree)
	return img
}

// bootedGuest is a QEMU with the agent in it.
type bootedGuest struct {
	*guestclient.Client
	cmd     *exec.Cmd
	console *lockedBuffer
	exited  chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func boot(t *testing.T, kernel, initrd, root, upper string) *bootedGuest {
	t.Helper()
	ours, theirs := agenttest.Socketpair(t)
	g := &bootedGuest{Client: guestclient.New(ours), console: &lockedBuffer{}, exited: make(chan struct{})}
	g.cmd = exec.Command("qemu-system-x86_64", "-M", "microvm,acpi=on", "-accel", "tcg", "-cpu", "max", "-m", "256", "-smp", "1",
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio",
		"-global", "virtio-mmio.force-legacy=false", "-kernel", kernel, "-initrd", initrd,
		"-append", fmt.Sprintf("console=ttyS0 panic=-1 quiet tsc_early_khz=%d tsc=reliable", tscKHz(t)),
		"-chardev", "socket,id=ctl,fd=3", "-device", "virtio-serial-device,max_ports=2",
		"-device", "virtserialport,chardev=ctl,name="+guestwire.PortName,
		"-drive", "if=none,id=r,format=raw,readonly=on,file="+root, "-device", "virtio-blk-device,drive=r,serial=root",
		"-drive", "if=none,id=u,format=raw,cache=unsafe,file="+upper, "-device", "virtio-blk-device,drive=u,serial=upper",
		"-netdev", "user,id=n0,restrict=on", "-device", "virtio-net-device,netdev=n0,mac=52:54:00:12:34:56",
		"-device", "virtio-rng-device")
	g.cmd.ExtraFiles = []*os.File{theirs}
	g.cmd.Stdout, g.cmd.Stderr = g.console, g.console
	g.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	go func() { g.cmd.Wait(); close(g.exited) }()
	t.Cleanup(func() {
		g.cmd.Process.Kill()
		<-g.exited
		g.Client.Close()
		if t.Failed() {
			t.Logf("console:\n%s", g.console)
		}
	})
	return g
}

// tscKHz measures the host's time stamp counter, which a TCG guest sees.
func tscKHz(t *testing.T) int {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "cpu MHz" {
			var mhz float64
			fmt.Sscan(v, &mhz)
			return int(mhz * 1000)
		}
	}
	t.Skip("needs \"cpu MHz\" in /proc/cpuinfo")
	return 0
}

func (g *bootedGuest) sh(t *testing.T, user, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var o bytes.Buffer
	res, err := g.Exec(ctx, guestwire.ExecRequest{Argv: []string{"/run/vk/bin/vk-shell", "-c", script}, User: user, Dir: "/"}, guestclient.Stdio{Out: &o, Err: &o}, nil)
	if err != nil || res.Code != 0 {
		t.Errorf("%q ended with %+v, %v, output %q", script, res, err, o.String())
	}
	return strings.TrimSpace(o.String())
}

func TestBoot(t *testing.T) {
	kernel, busybox := needGuest(t)
	dir := t.TempDir()
	initrd, root, upper := initramfs(t, dir), image(t, dir, busybox), filepath.Join(dir, "upper.img")
	ext4(t, upper, "64M", "")
	setup := guestwire.Setup{
		Hostname: "guest-1", MachineID: "0123456789abcdef0123456789abcdef", Entropy: bytes.Repeat([]byte{7}, 64),
		Root: guestwire.Disk{Serial: "root", FSType: "ext4"}, Upper: &guestwire.Disk{Serial: "upper", FSType: "ext4"},
		Net:      &guestwire.Net{MAC: "52:54:00:12:34:56", Addr: "10.0.2.15/24", Gateway: "10.0.2.2", DNS: []string{"10.0.2.3"}, Search: []string{"a.test"}, MTU: 1400},
		Hosts:    []guestwire.HostEntry{{Addr: "10.9.8.7", Names: []string{"db", "db.test"}}},
		Dirs:     []guestwire.Dir{{Path: "/builds", Mode: 0o1777}, {Path: "/builds/own", Mode: 0o750, User: "dev"}},
		Env:      []string{"FROM_IMAGE=yes"},
		Loopback: []int{8123},
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	start := time.Now()
	g := boot(t, kernel, initrd, root, upper)
	h, err := g.Hello(ctx)
	if err != nil || h.Ready {
		t.Fatalf("Hello = %+v, %v", h, err)
	}
	hello := time.Since(start)
	var stages []string
	if _, err := g.Setup(ctx, setup, func(s string) { stages = append(stages, s) }); err != nil {
		t.Fatalf("Setup after %v: %v", stages, err)
	}
	t.Logf("hello after %v (guest uptime %d ms), ready after %v, stages %v", hello, h.UptimeMS, time.Since(start), stages)

	for _, tc := range []struct{ user, script, want string }{
		{"", "echo $FROM_IMAGE $HOME $USER", "yes /root root"},
		{"", "hostname; cat /etc/hostname /etc/machine-id", "guest-1\nguest-1\n0123456789abcdef0123456789abcdef"},
		{"", "cat /etc/resolv.conf", "nameserver 10.0.2.3\nsearch a.test"},
		{"", "ls /run", "vk"},
		// What an exec leaves goes soon: there are its own control group and one
		// for the next.
		{"", "i=0; while [ $(ls -d /sys/fs/cgroup/vk/exec-* | wc -l) -gt 2 ] && [ $i -lt 500 ]; do sleep .1; i=$((i+1)); done; ls -d /sys/fs/cgroup/vk/exec-* | wc -l", "2"},
		// Late timers are for the thread of the agent that watches it.
		{"", "cat /proc/self/timerslack_ns; set -- $(ls /proc/1/task | sort -n); cat /proc/$2/timerslack_ns", "50000\n2000000"},
		{"", "grep -c db.test /etc/hosts", "1"},
		{"dev", "id -u; id -G; echo $HOME", "1000\n1000 77\n/home/dev"},
		{"", "stat -c '%a %U' /builds /builds/own", "1777 root\n750 dev"},
		{"", "stat -c %a /dev/shm /dev/null /tmp", "1777\n666\n1777"},
		{"", "mv /old/dir /old/renamed && cat /old/renamed/file", "kept"},
		{"", "cat /sys/class/net/eth0/mtu", "1400"},
		{"", "ip route | head -1 | grep -o 'via 10.0.2.2'", "via 10.0.2.2"},
		{"", "cat /proc/sys/net/ipv4/ping_group_range", "0\t2147483647"},
		{"", "echo x > /dev/stderr; ls -l /dev/fd | grep -c self/fd", "x\n1"},
		{"dev", "echo x > /dev/stderr", "x"},
		{"", "grep -c vk/ /proc/self/cgroup", "1"},
		{"", "cat /proc/1/comm", "init"},
		{"", "cat /etc/nothing 2>/dev/null; vk-agent version > /dev/null && echo found", "found"},
	} {
		if got := g.sh(t, tc.user, tc.script); got != tc.want {
			t.Errorf("%s: %q = %q, want %q", tc.user, tc.script, got, tc.want)
		}
	}
	checkClock(t, g, "setup")
	if err := g.Resume(ctx, guestwire.Resume{UnixNano: time.Now().Add(-time.Hour).UnixNano()}); err != nil {
		t.Errorf("Resume to the past: %v", err)
	}
	err = g.Resume(ctx, guestwire.Resume{Hostname: "guest-2", MachineID: "ffff6789abcdef0123456789abcdef01", Entropy: []byte("new"),
		Net: &guestwire.Net{MAC: "52:54:00:12:34:99", Addr: "10.0.2.77/24", Gateway: "10.0.2.2", DNS: []string{"10.0.2.4"}}})
	if err != nil {
		t.Errorf("Resume: %v", err)
	}
	checkClock(t, g, "resume")
	if got := g.sh(t, "", "hostname; cat /etc/resolv.conf; ip -4 addr show | grep -c 10.0.2.; ip addr | grep -c 12:34:99; ip route | grep -c default"); got != "guest-2\nnameserver 10.0.2.4\n1\n1\n1" {
		t.Errorf("after Resume: %q", got)
	}

	// What a program eats is told as such.
	var o bytes.Buffer
	res, err := g.Exec(ctx, guestwire.ExecRequest{Argv: []string{"tail", "/dev/zero"}}, guestclient.Stdio{Out: &o, Err: &o}, nil)
	if err != nil || !res.OOM || res.Signal != 9 {
		t.Errorf("a program that eats all memory: %+v, %v", res, err)
	}
	v, err := g.Victims(ctx)
	if err != nil || v.Err != "" || v.Total == 0 || len(v.List) == 0 || v.List[0].Name != "tail" || v.List[0].PID != res.PID || v.List[0].RSS < 16<<20 || v.List[0].UptimeMS <= 0 {
		t.Errorf("Victims = %+v, %v; want tail, pid %d", v, err, res.PID)
	}
	if p, err := g.Ping(ctx); err != nil || p.OOMKills == 0 || p.UpperSize < 32<<20 || p.UpperSize > 64<<20 {
		t.Errorf("Ping = %+v, %v", p, err)
	}
	rtt := time.Now()
	const n = 20
	for range n {
		if _, err := g.Exec(ctx, guestwire.ExecRequest{Argv: []string{"/bin/busybox", "true"}}, guestclient.Stdio{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("exec of true: %v each", time.Since(rtt)/n)
	var big countWriter
	rtt = time.Now()
	if _, err := g.Exec(ctx, guestwire.ExecRequest{Argv: []string{"head", "-c", "67108864", "/dev/zero"}}, guestclient.Stdio{Out: &big}, nil); err != nil || big != 64<<20 {
		t.Errorf("64 MiB out: %d, %v", big, err)
	}
	t.Logf("stream out: %.0f MB/s", 67.108864/time.Since(rtt).Seconds())

	g.sh(t, "", "echo survives > /builds/mark")
	if err := g.Shutdown(ctx, guestwire.Shutdown{Reboot: true, Grace: 5 * time.Second}); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	await(t, g)
	g = boot(t, kernel, initrd, root, upper)
	if _, err := g.Hello(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Setup(ctx, setup, nil); err != nil {
		t.Fatal(err)
	}
	if got := g.sh(t, "", "cat /builds/mark"); got != "survives" {
		t.Errorf("after a reboot: %q", got)
	}
	// Killing init is asking for a reboot, and output before it arrives.
	o.Reset()
	_, err = g.Exec(ctx, guestwire.ExecRequest{Argv: []string{"sh", "-c", "echo last words; kill -TERM 1; sleep 100"}}, guestclient.Stdio{Out: &o}, nil)
	if o.String() != "last words\n" {
		t.Errorf("last words %q, %v", o.String(), err)
	}
	await(t, g)
}

type countWriter int64

func (c *countWriter) Write(p []byte) (int, error) { *c += countWriter(len(p)); return len(p), nil }

func checkClock(t *testing.T, g *bootedGuest, after string) {
	t.Helper()
	before := time.Now()
	p, err := g.Ping(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	const slack = 2 * time.Second
	if guest := time.Unix(0, p.UnixNano); guest.Before(before.Add(-slack)) || guest.After(time.Now().Add(slack)) {
		t.Errorf("after %s the guest's clock was at %v, the host's at %v and later", after, guest, before)
	}
}

func await(t *testing.T, g *bootedGuest) {
	t.Helper()
	select {
	case <-g.exited:
	case <-time.After(time.Minute):
		t.Fatal("the guest did not end")
	}
}

// TestBootGarbage gives the agent of a real guest bytes that are no session.
func TestBootGarbage(t *testing.T) {
	kernel, busybox := needGuest(t)
	dir := t.TempDir()
	initrd, root, upper := initramfs(t, dir), image(t, dir, busybox), filepath.Join(dir, "upper.img")
	ext4(t, upper, "64M", "")
	ours, _ := net.Pipe()
	ours.Close()
	g := boot(t, kernel, initrd, root, upper)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if _, err := g.Setup(ctx, guestwire.Setup{Root: guestwire.Disk{Serial: "no-such-disk", FSType: "ext4"}}, nil); err == nil || !strings.Contains(err.Error(), "no-such-disk") {
		t.Errorf("Setup with a disk that is not there = %v", err)
	}
	var re *guestclient.RemoteError
	if _, err := g.Setup(ctx, guestwire.Setup{Root: guestwire.Disk{Serial: "upper", FSType: "erofs"}}, nil); !errors.As(err, &re) || re.Stage != "root" {
		t.Errorf("Setup with the wrong filesystem = %v", err)
	}
}

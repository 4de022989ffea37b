package qemu_test

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/machine"
	"virtkit/vmm/disk"
	"virtkit/vmm/qemu"
	"virtkit/vmm/virtiofs"
	"virtkit/vmm/vmmtest"
)

// asker boots s and gives a function that asks the guest.
func asker(t *testing.T, d *qemu.Driver, s machine.Spec) (machine.Machine, func(string) string) {
	t.Helper()
	console, err := os.Create(filepath.Join(t.TempDir(), "console"))
	if err != nil {
		t.Fatal(err)
	}
	s.Console = console
	s.ProcLog = console
	m, err := d.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.Kill()
		m.Control().Close()
		if t.Failed() {
			b, _ := os.ReadFile(console.Name())
			t.Logf("console:\n%s", b)
		}
		console.Close()
	})
	in := bufio.NewReader(m.Control())
	return m, func(line string) string {
		t.Helper()
		m.Control().SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(m.Control(), line+"\n")
		got, err := in.ReadString('\n')
		if err != nil {
			t.Fatalf("asking %q: %v", line, err)
		}
		return strings.TrimSpace(got)
	}
}

// TestDevices has a guest look at all that it was given; with Debian's kernel
// too, whose drivers are modules.
func TestDevices(t *testing.T) {
	for _, kernel := range []string{"tuned", "debian"} {
		t.Run(kernel, func(t *testing.T) {
			d, s := real(t, kernel)
			dir := t.TempDir()
			s.Disks = []machine.Disk{{Path: filepath.Join(dir, "root.img"), Serial: "vk-root", ReadOnly: true}, {Path: filepath.Join(dir, "upper.img"), Serial: "vk-upper"}}
			if err := os.WriteFile(s.Disks[0].Path, make([]byte, 1<<20), 0o400); err != nil {
				t.Fatal(err)
			}
			if err := disk.Upper(t.Context(), dir, s.Disks[1].Path, 64<<20); err != nil {
				t.Skipf("needs a writable layer: %v", err)
			}
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			s.NIC = &machine.NIC{File: os.NewFile(uintptr(fds[0]), "nic"), MAC: "52:54:00:12:34:56", MTU: 65520}
			wire := os.NewFile(uintptr(fds[1]), "wire")
			m, ask := asker(t, d, s)
			if got := ask("disks"); got != "disks vk-root=1 vk-upper=0" {
				t.Errorf("guest has %s", got)
			}
			if got := ask("scribble marked"); got != "scribble <nil>" {
				t.Errorf("writing: %s", got)
			}
			if b, err := os.ReadFile(s.Disks[1].Path); err != nil || string(b[8192:8198]) != "marked" {
				t.Errorf("the host reads %q (%v)", b[8192:8198], err)
			}
			if got := ask("net"); got != "net 52:54:00:12:34:56 65520" {
				t.Errorf("guest has %s", got)
			}
			// tsc-early is the same counter until the kernel is about a second old; what
			// must not be is refined-jiffies.
			switch got := ask("clock"); got {
			case "clock tsc", "clock tsc-early", "clock kvm-clock":
			default:
				t.Errorf("guest's %s", got)
			}
			wantDead(t, m, wire)
		})
	}
}

// wantDead kills the guest and wants the other end of its network closed:
// nobody else holds it.
func wantDead(t *testing.T, m machine.Machine, wire *os.File) {
	t.Helper()
	m.Kill()
	defer wire.Close()
	c, err := net.FileConn(wire)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(time.Minute))
	for {
		var n [4]byte
		if _, err := io.ReadFull(c, n[:]); err != nil {
			if err != io.EOF && !strings.Contains(err.Error(), "reset") {
				t.Errorf("the network's socket gives %v", err)
			}
			return
		}
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(n[:]))); err != nil {
			return
		}
	}
}

func TestShares(t *testing.T) {
	if _, err := virtiofs.Binary(); err != nil {
		t.Skipf("needs virtiofsd: %v", err)
	}
	d, s := real(t, "")
	rw, ro := t.TempDir(), t.TempDir()
	for _, dir := range []string{rw, ro} {
		if err := os.WriteFile(filepath.Join(dir, "f"), []byte("host's"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.Shares = []machine.Share{{Tag: "rw", Source: rw}, {Tag: "ro", Source: ro, ReadOnly: true}}
	m, ask := asker(t, d, s)
	if got := ask("share rw f guest's"); got != "share read host's, wrote" {
		t.Errorf("writable: %s", got)
	}
	if b, err := os.ReadFile(filepath.Join(rw, "f.new")); string(b) != "guest's" {
		t.Errorf("the host reads %q (%v)", b, err)
	}
	if got := ask("share ro f guest's"); !strings.HasPrefix(got, "share read host's, write:") || !strings.Contains(got, "read-only") {
		t.Errorf("read-only: %s", got)
	}
	if left, _ := filepath.Glob(filepath.Join(ro, "*")); len(left) != 1 {
		t.Errorf("the guest left %v in a read-only share", left)
	}
	m.Kill()
	if left, _ := os.ReadDir(s.Dir); len(left) != 0 {
		t.Errorf("left in the guest's directory: %v", left)
	}
}

// TestUnprivileged: QEMU has none of root's rights when vk runs as root, and
// no descriptor but its own.
func TestUnprivileged(t *testing.T) {
	d, s := real(t, "")
	m, ask := asker(t, d, s)
	ask("echo up")
	pid := strconv.Itoa(m.PID())
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(status)) {
		f := strings.Fields(l)
		switch {
		case len(f) == 0:
		case f[0] == "Uid:" && f[1] == "0" && os.Geteuid() == 0:
			t.Logf("uid map: %s", read("/proc/self/uid_map"))
			t.Errorf("QEMU runs as root: %s", l)
		case f[0] == "CapEff:" && f[1] != "0000000000000000":
			t.Errorf("QEMU has capabilities: %s", l)
		case f[0] == "Seccomp:" && f[1] != "2":
			t.Errorf("QEMU has no system call filter: %s", l)
		}
	}
	if got, want := strings.TrimSpace(read("/proc/"+pid+"/comm")), ("vk:" + s.Name)[:min(15, 3+len(s.Name))]; got != want {
		t.Errorf("QEMU's process is called %q, want %q", got, want)
	}
}

// TestDiesWithItsParent kills a process that runs a guest with a share: QEMU
// and virtiofsd end with it.
func TestDiesWithItsParent(t *testing.T) {
	if os.Getenv("VK_TEST_PARENT") != "" {
		d, s := real(t, "")
		if _, err := virtiofs.Binary(); err == nil {
			s.Shares = []machine.Share{{Tag: "x", Source: s.Dir}}
		}
		m, ask := asker(t, d, s)
		ask("echo up")
		kids := ""
		lists, _ := filepath.Glob("/proc/self/task/*/children")
		for _, l := range lists {
			kids += " " + read(l)
		}
		os.Stdout.WriteString("pids: " + strconv.Itoa(m.PID()) + " " + strings.TrimSpace(kids) + "\n")
		select {}
	}
	vmmtest.NeedQEMU(t)
	vmmtest.NeedKernel(t, "")
	cmd := exec.Command(os.Args[0], "-test.run=^TestDiesWithItsParent$")
	cmd.Env = append(os.Environ(), "VK_TEST_PARENT=1", "TMPDIR="+t.TempDir()) // it is killed, and clears nothing up
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	var pids []string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if l, ok := strings.CutPrefix(lines.Text(), "pids: "); ok {
			pids = strings.Fields(l)
			break
		}
	}
	if len(pids) == 0 {
		t.Fatal("the process did not boot a guest")
	}
	cmd.Process.Kill()
	cmd.Wait()
	deadline := time.Now().Add(time.Minute)
	for _, p := range pids {
		for {
			stat := read("/proc/" + p + "/stat")
			if stat == "" || strings.Contains(stat, ") Z ") { // gone, or nobody's to reap
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("process %s outlived its parent: %s", p, stat)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func read(p string) string { b, _ := os.ReadFile(p); return string(b) }

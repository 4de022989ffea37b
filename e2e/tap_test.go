package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/execdrv"
	"virtkit/e2e/host"
)

// insideNS tells a test that it has network devices of its own.
const insideNS = "VK_E2E_NETNS"

// ownDevices runs the rest of the test in a process with network devices of
// its own, in which it returns true: what a guest's device does to a host is
// none of the real host's business. The caller returns on false.
func ownDevices(t *testing.T) bool {
	t.Helper()
	if os.Getenv(insideNS) != "" {
		for _, args := range [][]string{{"ip", "link", "set", "lo", "up"}, {"sysctl", "-qw", "net.ipv4.ip_forward=1"}} {
			if err := command(args[0], args[1:]...); err != nil {
				t.Fatal(err)
			}
		}
		return true
	}
	guests(t) // which skips where there can be none
	if os.Getuid() != 0 {
		t.Skip("needs root, to make a network namespace")
	}
	for _, p := range []string{"/usr/sbin/nft", "/usr/sbin/ip"} {
		if _, err := os.Stat(p); err != nil {
			t.Skipf("needs %s: apt-get install nftables iproute2", p)
		}
	}
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=15m")
	cmd.Env = append(os.Environ(), insideNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("with devices of its own: %v\n%s", err, out)
	}
	return false
}

// devicesLeft are guests' devices and rules of this namespace.
func devicesLeft(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", "ip -br link | grep ^vktap | cut -d' ' -f1; nft list tables | grep virtkit || true").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(out)), " ")
}

// tapHost is a virtkit of this mode whose resolver is the outside's.
func tapHost(t *testing.T, net string) *host.Host {
	t.Helper()
	h, err := host.New(root, filepath.Join(world.dir, t.Name()), "[net]\ndns = [\""+farIP+"\"]\n"+net+"[vmm]\ndisk = \"2G\"\n[executor.vm]\ncpus = 1\nmem = \"512M\"\n")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Run(context.Background(), "pull", "--policy", "missing", "local/default"); err != nil {
		t.Fatal(err)
	}
	outside(t)
	if err := command("ip", "route", "add", "default", "via", farIP); err != nil {
		t.Fatal(err)
	}
	return h
}

// TestTapOfARealGuest is docs/network.md, Modes, from within a guest.
func TestTapOfARealGuest(t *testing.T) {
	if !ownDevices(t) {
		return
	}
	h := tapHost(t, "mode = \"tap\"\n")
	checked(t, h, "tap: devices in 10.201.96.0/20, 0 of 1024 taken, MTU 1500")
	traps := newTraps(t)
	const name = "tapped"
	if _, err := h.Run(t.Context(), "run", "-d", "--name", name, "--publish", "0:8080", "local/default", "perl", "-e", guestServers); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = h.Run(context.Background(), "stop", "--kill", name) })
	in := func(t *testing.T, script string) string {
		t.Helper()
		out, err := h.Run(t.Context(), "exec", name, "bash", "-c", script)
		if err != nil {
			t.Errorf("%s: %v", script, err)
		}
		return strings.TrimSpace(out)
	}
	sum := sha256.Sum256(bigBytes())
	want := hex.EncodeToString(sum[:])
	got := in(t, "cd /tmp && curl -sSf -o big http://"+farIP+"/big && curl -sSf -H 'Expect:' -T big http://"+farIP+"/up")
	if !strings.HasPrefix(got, fmt.Sprintf("%d %s from %s:", bigSize, want, nearIP)) {
		t.Errorf("down and up: %q, want %d %s from %s", got, bigSize, want, nearIP)
	}
	for script, want := range map[string]string{
		"cat /sys/class/net/eth0/mtu": "1500", "getent ahostsv4 many.test | grep -c STREAM": "100",
		"sed -n 's/^nameserver //p' /etc/resolv.conf": farIP, "getent ahostsv4 nosuch.test || echo none": "none",
	} {
		if got := in(t, script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	if got, err := send(portsOf(t, h, name)["8080/tcp"], bigBytes()); err != nil || got != fmt.Sprintf("%d from 10.201.96.1", bigSize) {
		t.Errorf("through a published port: %q, %v", got, err)
	}
	if got := in(t, "perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(PeerAddr => \""+farIP+":7\", Proto => \"udp\"); alarm 20; $s->send(\"x\" x 9000); $s->recv($b, 65536); print length $b'"); got != "9000" {
		t.Errorf("a datagram in pieces: %q", got)
	}
	for _, at := range []string{"10.201.96.1", nearIP, "169.254.169.254"} {
		d := fmt.Sprintf("%s/%d", at, traps.everywhere)
		if got := in(t, "(exec 3<>/dev/tcp/"+d+" && cat <&3) 2>&1 || true"); !strings.Contains(got, "refused") {
			t.Errorf("/dev/tcp/%s: %q, want refused", d, got)
		}
	}
	if _, err := h.Run(t.Context(), "reboot", name); err != nil {
		t.Fatal(err)
	}
	in(t, "for i in $(seq 300); do (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null && exit; sleep 0.1; done; exit 1") // the command starts again
	if got := in(t, "curl -sSf http://"+farIP+"/big | sha256sum"); got != want+"  -" {
		t.Errorf("after a reboot: %q, want %s", got, want)
	}
	if got, err := send(portsOf(t, h, name)["8080/tcp"], []byte("abc")); err != nil || got != "3 from 10.201.96.1" {
		t.Errorf("through a published port after a reboot: %q, %v", got, err)
	}
	if n := traps.sprung.Load(); n != 0 {
		t.Errorf("%d connections of the guest reached the host", n)
	}
	if got := devicesLeft(t); got != "vktap0 table inet virtkit" {
		t.Errorf("while it runs: %q", got)
	}
	// The supervisor is killed: the device goes by itself, the rules by a sweep.
	dirs := h.JobDirs()
	if len(dirs) != 1 {
		t.Fatalf("job directories: %q", dirs)
	}
	if pid := h.Supervisors(dirs[0])["supervisor"]; pid <= 1 || syscall.Kill(pid, syscall.SIGKILL) != nil {
		t.Fatalf("no supervisor to kill: %d", pid)
	}
	for end := time.Now().Add(time.Minute); strings.HasPrefix(devicesLeft(t), "vktap0") && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond) // until the supervisor and its VMM are dead
	}
	if got := devicesLeft(t); got != "table inet virtkit" {
		t.Errorf("after the supervisor's death: %q", got)
	}
	out, err := h.Run(t.Context(), "gc")
	if err != nil || !strings.Contains(out, "removed nftables table inet virtkit\n") || !strings.Contains(out, "removed guest "+dirs[0]) {
		t.Errorf("vk gc: %v\n%s", err, out)
	}
	if got := devicesLeft(t); got != "" {
		t.Errorf("after vk gc: %q", got)
	}
	nothingLeft(t, h)
}

// checked fails unless vk check says want of the network.
func checked(t *testing.T, h *host.Host, want string) {
	t.Helper()
	out, err := h.Run(t.Context(), "check", "--json")
	var doc struct {
		Findings []struct{ Name, Verdict, Text, Mend string } `json:"findings"`
	}
	if jerr := json.Unmarshal([]byte(out), &doc); jerr != nil {
		t.Fatalf("vk check: %v, %v\n%s", err, jerr, out)
	}
	for _, f := range doc.Findings {
		if f.Name == "net" {
			if got := strings.TrimSuffix(f.Text+" → "+f.Mend, " → "); !strings.HasPrefix(got, want) {
				t.Errorf("vk check says %q of the network, want %q", got, want)
			}
			return
		}
	}
	t.Errorf("vk check says nothing of the network:\n%s", out)
}

// TestPoolOfRealGuests has GitLab jobs on devices that stay.
func TestPoolOfRealGuests(t *testing.T) {
	if !ownDevices(t) {
		return
	}
	h := tapHost(t, "mode = \"pool\"\npool_size = 1\n")
	job := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default"}, nil)
	prepared(t, job)
	other := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default"}, nil)
	t.Cleanup(func() { _, _ = other.Cleanup(context.Background()) })
	if res, _, err := other.Config(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("config: %+v, %v", res, err)
	}
	res, err := other.Prepare(t.Context())
	if err != nil || res.Exit != 2 || !strings.Contains(string(res.Stderr), "all 1 devices of [net] pool are in use: "+job.Vars["CI_JOB_ID"]) {
		t.Errorf("a job too many: %d, %v\n%s", res.Exit, err, res.Stderr)
	}
	if res := stage(t, job, execdrv.StageBuild, "curl -sSf -o /tmp/big http://"+farIP+"/big && stat -c %s /tmp/big\n"); res.Exit != 0 || strings.TrimSpace(string(res.Stdout)) != fmt.Sprint(bigSize) {
		t.Errorf("build_script: %d\n%s%s", res.Exit, res.Stdout, res.Stderr)
	}
	if res, err := job.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %+v, %v", res, err)
	}
	if got := devicesLeft(t); got != "vktap-p0 table inet virtkit" {
		t.Errorf("between jobs: %q", got)
	}
	if out, err := h.Run(t.Context(), "run", "local/default", "cat", "/sys/class/net/eth0/mtu"); err != nil || strings.TrimSpace(out) != "1500" {
		t.Errorf("the next guest: %q, %v", out, err)
	}
	// What only a switch can do is refused before anything starts.
	for _, tt := range []struct{ toml, want string }{
		{"mode = \"tap\"\n[egress]\nallow_name = []\n", "the allowlist of [egress] cannot be had"},
		{"mode = \"tap\"\nhost_loopback = [80]\n", "the host's loopback cannot be had"},
		{"mode = \"pool\"\npool = [\"ci0\"]\n", "device ci0 of [net] pool does not exist"},
	} {
		if err := os.WriteFile(h.Conf, []byte("[net]\ndns = [\""+farIP+"\"]\n"+tt.toml), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Run(t.Context(), "run", "local/default", "true"); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "hint:") {
			t.Errorf("%q: %v, want %q", tt.toml, err, tt.want)
		}
	}
	// A host of another mode takes the pool away.
	if err := os.WriteFile(h.Conf, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := h.Run(t.Context(), "gc"); err != nil || !strings.Contains(out, "removed device vktap-p0\n") || devicesLeft(t) != "" {
		t.Errorf("vk gc: %v\n%s%s", err, out, devicesLeft(t))
	}
	nothingLeft(t, h)
}

package boot_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/vmm/boot"
)

func TestInitramfsIsWhatTheKernelReads(t *testing.T) {
	if _, err := exec.LookPath("cpio"); err != nil {
		t.Skip("needs cpio: apt-get install cpio")
	}
	a := boot.BuildInitramfs([]byte("agent!"), boot.Module("b", []byte("bb")), boot.Module("a", []byte("aaa")))
	if !bytes.Equal(a, boot.BuildInitramfs([]byte("agent!"), boot.Module("b", []byte("bb")), boot.Module("a", []byte("aaa")))) {
		t.Error("equal content made different archives")
	}
	if len(a)%512 != 0 {
		t.Errorf("length %d is no multiple of 512", len(a))
	}
	dir := t.TempDir()
	// Without the devices, so that it also works without root.
	cmd := exec.Command("cpio", "-i", "-d", "--quiet", "--no-absolute-filenames", "-f", "dev/console", "dev/null")
	cmd.Dir, cmd.Stdin = dir, bytes.NewReader(a)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	for name, want := range map[string]string{
		"init": "agent!", "lib/vk-modules/order": "b.ko\na.ko\n", "lib/vk-modules/a.ko": "aaa", "lib/vk-modules/b.ko": "bb",
	} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(got) != want {
			t.Errorf("%s is %q (%v), want %q", name, got, err, want)
		}
	}
	st, err := os.Stat(filepath.Join(dir, "init"))
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode().Perm() != 0o755 {
		t.Errorf("init has mode %o", st.Mode().Perm())
	}
	cmd = exec.Command("cpio", "-tv", "--quiet")
	cmd.Stdin = bytes.NewReader(a)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "5,   1") {
		t.Errorf("no console node in\n%s", out)
	}
}

func TestPrepareConcurrently(t *testing.T) {
	state := t.TempDir()
	k := boot.Kernel{Name: "k", Image: "/k", Tuned: true}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			mk, err := boot.Prepare(t.Context(), state, k, boot.Options{Agent: []byte("x")})
			if err != nil {
				t.Error(err)
				return
			}
			if b, err := os.ReadFile(mk.Initrd); err != nil || len(b) == 0 {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
	wg.Wait()
	left, err := os.ReadDir(filepath.Join(state, "boot"))
	if err != nil || len(left) != 1 {
		t.Errorf("%v, %v; want one file", left, err)
	}
	if n, err := boot.Sweep(state, time.Hour, false); n != 0 || err != nil {
		t.Errorf("Sweep removed %d bytes in use (%v)", n, err)
	}
	would, err := boot.Sweep(state, -time.Second, true)
	if err != nil || would == 0 {
		t.Errorf("dry run = %d, %v", would, err)
	}
	if n, err := boot.Sweep(state, -time.Second, false); n != would || err != nil {
		t.Errorf("Sweep removed %d idle bytes (%v)", n, err)
	}
	if n, err := boot.Sweep(filepath.Join(state, "none"), 0, false); n != 0 || err != nil {
		t.Errorf("Sweep of nothing: %d, %v", n, err)
	}
}

// A fetch that was killed leaves files, a hundred megabytes, that go with the
// next sweep, unless somebody fetches now.
func TestSweepFetches(t *testing.T) {
	state := t.TempDir()
	left := filepath.Join(state, "kernels", ".fetch-1234", "root", "boot")
	if err := os.MkdirAll(left, 0o755); err != nil {
		t.Fatal(err)
	}
	lock, err := fsx.TryLock(filepath.Join(state, "kernels", ".fetch.lock"), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := boot.Sweep(state, time.Hour, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(left); err != nil {
		t.Errorf("swept under a fetch: %v", err)
	}
	lock.Close()
	if _, err := boot.Sweep(state, time.Hour, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("not swept: %v", err)
	}
}

func TestNoAgent(t *testing.T) {
	t.Setenv(boot.AgentEnv, filepath.Join(t.TempDir(), "missing"))
	_, err := boot.Agent()
	if fault.KindOf(err) != fault.Usage || !strings.Contains(fault.HintOf(err), boot.AgentEnv) {
		t.Errorf("error %v, hint %q", err, fault.HintOf(err))
	}
	f := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(f, []byte("my agent"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(boot.AgentEnv, f)
	if b, err := boot.Agent(); err != nil || string(b) != "my agent" {
		t.Errorf("Agent is %q, %v", b, err)
	}
}

func TestModinfo(t *testing.T) {
	deps, soft := boot.ParseModinfo([]byte("license=GPL\x00depends=virtio-ring,virtio\x00softdep=pre: crc32c aes-x post: later\x00\x00bad"))
	if d := cmp.Diff([]string{"virtio_ring", "virtio"}, deps); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"crc32c", "aes_x"}, soft); d != "" {
		t.Error(d)
	}
}

func TestPickPackage(t *testing.T) {
	got := boot.PickPackage([]byte(`linux-image-6.12.9+deb12-cloud-amd64
linux-image-6.12-cloud-amd64
linux-image-6.12.117+deb12-cloud-amd64
linux-image-6.12.117+deb12-cloud-amd64-unsigned
linux-image-6.12.200+deb12-amd64
linux-image-6.12.100+deb12-cloud-amd64
`))
	if want := "linux-image-6.12.117+deb12-cloud-amd64"; got != want {
		t.Errorf("picked %q, want %q", got, want)
	}
	if got := boot.PickPackage(nil); got != "" {
		t.Errorf("picked %q of nothing", got)
	}
}

// fakeApt puts an apt-cache first in PATH that knows nothing.
func TestAptWithoutLists(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "apt-cache"), []byte("#!/bin/sh\nexit 0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	_, err := boot.NewestPackage(t.Context())
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(fault.HintOf(err), "apt-get update") {
		t.Errorf("error %v (%s), hint %q", err, fault.KindOf(err), fault.HintOf(err))
	}
	t.Setenv("PATH", t.TempDir())
	_, err = boot.NewestPackage(t.Context())
	if !errors.Is(err, exec.ErrNotFound) || !strings.Contains(fault.HintOf(err), "make kernel") {
		t.Errorf("error %v, hint %q", err, fault.HintOf(err))
	}
}

// A full disk is told as one, not as a fault of the network, whichever of the
// two tools meets it.
func TestFetchOnFullDisk(t *testing.T) {
	const pkg = "linux-image-6.12.9+deb12-cloud-amd64"
	for _, c := range []struct{ name, apt, dpkg string }{
		{"download", "echo \"E: You don't have enough free space in /var/cache/apt/archives/.\" >&2; exit 100", "exit 0"},
		{"unpacking", ": > " + pkg + "_1_amd64.deb", "echo 'tar: ./boot/vmlinuz: Cannot write: No space left on device' >&2; exit 2"},
	} {
		bin, state := t.TempDir(), t.TempDir()
		for name, body := range map[string]string{"apt-cache": "echo " + pkg, "apt-get": c.apt, "dpkg-deb": c.dpkg} {
			if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		t.Setenv("PATH", bin)
		_, err := boot.Fetch(t.Context(), state, nil)
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(fault.HintOf(err), "VIRTKIT_STATE_DIR") {
			t.Errorf("%s: %v, hint %q", c.name, err, fault.HintOf(err))
		}
		if left, _ := filepath.Glob(filepath.Join(boot.KernelsDir(state), ".fetch-*")); len(left) > 0 {
			t.Errorf("%s: %v left behind", c.name, left)
		}
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestListOrder(t *testing.T) {
	state, sys, bootDir := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "boot")
	put(t, bootDir+"/vmlinuz-6.1.0-57-cloud-amd64", "k")
	kernel := func(dir, extra string) {
		put(t, dir+"/kernel.json", `{"version":"`+filepath.Base(dir)+`","image":"vmlinux"`+extra+`}`)
		put(t, dir+"/vmlinux", "k")
	}
	kernel(state+"/kernels/tuned-6.12.9-aa", `,"tuned":true`)
	kernel(state+"/kernels/tuned-6.12.95-aa", `,"tuned":true`)
	kernel(state+"/kernels/debian-6.12.117", `,"modules":"modules"`)
	kernel(sys+"/site-kernel", `,"tuned":true`)
	put(t, state+"/kernels/tuned-broken/kernel.json", "{")
	kernel(state+"/kernels/tuned-evil", `,"modules":"../../etc"`)
	all, errs := boot.ListIn(state, sys, bootDir)
	var got []string
	for _, k := range all {
		got = append(got, k.Origin+" "+k.Name)
	}
	want := []string{"tuned tuned-6.12.95-aa", "tuned tuned-6.12.9-aa", "system site-kernel", "debian debian-6.12.117", "host host-6.1.0-57-cloud-amd64"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if len(errs) != 2 {
		t.Errorf("errors are %v, want the broken and the evil one", errs)
	}
}

func TestFind(t *testing.T) {
	state := t.TempDir()
	_, err := boot.Find(state, "nope")
	if fault.KindOf(err) != fault.NotFound || !strings.Contains(err.Error(), "nope") {
		t.Errorf("error %v", err)
	}
	img := filepath.Join(t.TempDir(), "bzImage")
	put(t, img, "k")
	k, err := boot.Find(state, img)
	if err != nil || k.Image != img || !k.Tuned {
		t.Errorf("given kernel is %+v, %v", k, err)
	}
	if _, err := boot.Find(state, img+"-missing"); fault.KindOf(err) != fault.NotFound {
		t.Errorf("error %v", err)
	}
	dir := state + "/kernels/tuned-x"
	put(t, dir+"/kernel.json", `{"version":"6.12.1-x","image":"vmlinux","tuned":true}`)
	put(t, dir+"/vmlinux", "k")
	for _, want := range []string{"", "tuned", "tuned-x", "6.12.1-x", dir, dir + "/vmlinux"} {
		if k, err := boot.Find(state, want); err != nil || k.Version != "6.12.1-x" || !k.Tuned {
			t.Errorf("Find(%q) is %+v, %v", want, k, err)
		}
	}
}

func TestMissingModule(t *testing.T) {
	dir := t.TempDir()
	put(t, dir+"/modules.builtin", "kernel/fs/ext4/ext4.ko\n")
	_, err := boot.Prepare(context.Background(), t.TempDir(), boot.Kernel{Name: "k", Modules: dir}, boot.Options{Agent: []byte("x")})
	if err == nil || !strings.Contains(err.Error(), "virtio_mmio") || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v names neither module nor directory", err)
	}
	_, err = boot.Prepare(context.Background(), t.TempDir(), boot.Kernel{Name: "k"}, boot.Options{Agent: []byte("x")})
	if err == nil || fault.HintOf(err) == "" {
		t.Errorf("error %v has no hint", err)
	}
}

func FuzzDependsOf(f *testing.F) {
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		deps, soft, err := boot.DependsOf(b)
		if err != nil && (deps != nil || soft != nil) {
			t.Error("an error and a result")
		}
	})
}

func FuzzExtractVmlinux(f *testing.F) {
	head := make([]byte, 0x260)
	copy(head[0x202:], "HdrS")
	f.Add(head)
	f.Fuzz(func(t *testing.T, b []byte) {
		out, err := boot.ExtractVmlinux(b)
		if err != nil && out != nil {
			t.Error("an error and a result")
		}
	})
}

func FuzzCompareVersions(f *testing.F) {
	f.Add("6.9", "6.12")
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := boot.Compare(a, b), boot.Compare(b, a)
		if (x < 0) != (y > 0) || (x == 0) != (y == 0) {
			t.Errorf("%q, %q: %d one way, %d the other", a, b, x, y)
		}
	})
}

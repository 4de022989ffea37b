package boot_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/vmm/boot"
)

// fetched is Debian's kernel under VIRTKIT_STATE_DIR (or a directory kept
// between runs), fetched when it is missing; the test is skipped where that
// cannot be done.
func fetched(t *testing.T) (string, boot.Kernel) {
	t.Helper()
	if _, err := exec.LookPath("apt-get"); err != nil {
		t.Skip("needs apt-get to fetch Debian's kernel")
	}
	state := os.Getenv("VIRTKIT_STATE_DIR")
	if state == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("needs a cache directory for Debian's kernel: %v", err)
		}
		state = filepath.Join(cache, "virtkit-test")
	}
	k, err := boot.Fetch(t.Context(), state, func(s string) { t.Log(s) })
	if fault.KindOf(err) == fault.Unavailable {
		t.Skipf("needs Debian's kernel: %v (%s)", err, fault.HintOf(err))
	}
	if err != nil {
		t.Fatal(err)
	}
	return state, k
}

func TestFetchAndPrepare(t *testing.T) {
	state, k := fetched(t)
	if k.Origin != "debian" || k.Tuned || k.Version == "" {
		t.Errorf("kernel is %+v", k)
	}
	agent := bytes.Repeat([]byte("agent"), 1000)
	mk, err := boot.Prepare(t.Context(), state, k, boot.Options{Agent: agent})
	if err != nil {
		t.Fatal(err)
	}
	list := cpioList(t, mk.Initrd)
	for _, want := range []string{"init", "dev/console", "lib/vk-modules/order", "lib/vk-modules/virtio_mmio.ko", "lib/vk-modules/overlay.ko"} {
		if !strings.Contains(list, want+"\n") {
			t.Errorf("initramfs has no %s; it has\n%s", want, list)
		}
	}
	if strings.Contains(list, "kvm") {
		t.Error("initramfs of a guest without nesting has KVM's modules")
	}
	again, err := boot.Prepare(t.Context(), state, k, boot.Options{Agent: agent})
	if err != nil || again.Initrd != mk.Initrd {
		t.Errorf("second Prepare gave %+v, %v; the first %+v", again, err, mk)
	}
}

func cpioList(t *testing.T, path string) string {
	t.Helper()
	if _, err := exec.LookPath("cpio"); err != nil {
		t.Skip("needs cpio: apt-get install cpio")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("cpio", "-t", "--quiet")
	cmd.Stdin = f
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	return string(out)
}

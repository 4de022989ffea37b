package vmmtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"virtkit/vmm/boot"
)

var initBinary struct {
	once sync.Once
	data []byte
	err  error
	out  []byte
}

// InitEnv names a testinit that is built already, for tests that run as a user
// without a Go toolchain.
const InitEnv = "VIRTKIT_TEST_INIT"

// BuildInit is testinit, built once a test binary.
func BuildInit(t testing.TB) []byte {
	t.Helper()
	b := &initBinary
	b.once.Do(func() {
		if p := os.Getenv(InitEnv); p != "" {
			b.data, b.err = os.ReadFile(p)
			return
		}
		dir, err := os.MkdirTemp("", "vk-testinit-")
		if err != nil {
			b.err = err
			return
		}
		defer os.RemoveAll(dir)
		out := filepath.Join(dir, "init")
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "virtkit/vmm/vmmtest/testinit")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
		if b.out, b.err = cmd.CombinedOutput(); b.err == nil {
			b.data, b.err = os.ReadFile(out)
		}
	})
	if b.err != nil {
		t.Fatalf("building testinit: %v\n%s", b.err, b.out)
	}
	return b.data
}

// StateDir is where tests look for kernels: $VIRTKIT_STATE_DIR, else where vk
// itself would.
func StateDir() string {
	if d := os.Getenv("VIRTKIT_STATE_DIR"); d != "" {
		return d
	}
	if _, err := os.Stat("/var/lib/virtkit/kernels"); err == nil {
		return "/var/lib/virtkit"
	}
	d := os.Getenv("XDG_STATE_HOME")
	if d == "" {
		d = filepath.Join(os.Getenv("HOME"), ".local/state")
	}
	return filepath.Join(d, "virtkit")
}

// NeedQEMU skips the test where QEMU is not installed.
func NeedQEMU(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("needs qemu-system-x86_64: apt-get install qemu-system-x86")
	}
}

// NeedKernel is the kernel that want names ("" = the best), or the test is
// skipped.
func NeedKernel(t testing.TB, want string) boot.Kernel {
	t.Helper()
	k, err := boot.Find(StateDir(), want)
	if err != nil {
		t.Skipf("needs a guest kernel: %v", err)
	}
	return k
}

package disk_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/vmm/disk"
)

func needMkfs(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("/usr/sbin/mkfs.ext4"); err != nil {
		if _, err := exec.LookPath("mkfs.ext4"); err != nil {
			t.Skip("needs mkfs.ext4: apt-get install e2fsprogs")
		}
	}
}

// What a maker that was killed left goes when the next template is made; what
// one at work holds does not.
func TestLeftTemplates(t *testing.T) {
	needMkfs(t)
	state := t.TempDir()
	dir := filepath.Join(state, "templates")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	for _, n := range []string{".upper-1.tmp", ".upper-2.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(dir, n), old, old); err != nil {
			t.Fatal(err)
		}
	}
	l, err := fsx.TryLock(filepath.Join(dir, ".upper-2.tmp"), true)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := disk.Upper(t.Context(), state, filepath.Join(t.TempDir(), "upper.img"), 64<<20); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, ".upper-*.tmp"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != ".upper-2.tmp" {
		t.Errorf("left are %v (%v)", left, err)
	}
}

func TestUpperIsSparseAndSound(t *testing.T) {
	needMkfs(t)
	state, dst := t.TempDir(), filepath.Join(t.TempDir(), "upper.img")
	const size = 2 << 30
	if err := disk.Upper(t.Context(), state, dst, size); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(dst)
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() != size {
		t.Errorf("size is %d, want %d", st.Size(), size)
	}
	if m := st.Mode().Perm(); m != 0o600 {
		t.Errorf("mode is %o, want 600", m)
	}
	if used := st.Sys().(*syscall.Stat_t).Blocks * 512; used > 8<<20 {
		t.Errorf("the new layer of %d bytes uses %d on the host", st.Size(), used)
	}
	fsck := "/usr/sbin/e2fsck"
	if _, err := os.Stat(fsck); err != nil {
		t.Skip("needs e2fsck: apt-get install e2fsprogs")
	}
	if out, err := exec.Command(fsck, "-fn", dst).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	if err := disk.Upper(t.Context(), state, dst, size); err == nil {
		t.Error("an existing file was overwritten")
	}
}

func TestManyAtOnce(t *testing.T) {
	needMkfs(t)
	state, out := t.TempDir(), t.TempDir()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			if err := disk.Upper(t.Context(), state, filepath.Join(out, string(rune('a'+i))), 1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	left, err := os.ReadDir(filepath.Join(state, "templates"))
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 {
		t.Errorf("templates are %v, want one and no leftovers", left)
	}
	st, err := os.Stat(filepath.Join(out, "a"))
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() != disk.MinUpper {
		t.Errorf("smallest layer has %d bytes, want %d", st.Size(), disk.MinUpper)
	}
}

func TestCancelledLeavesNothing(t *testing.T) {
	needMkfs(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	state := t.TempDir()
	dst := filepath.Join(state, "upper.img")
	if err := disk.Upper(ctx, state, dst, 64<<20); err == nil {
		t.Fatal("no error")
	}
	left, _ := filepath.Glob(filepath.Join(state, "templates", "*"))
	hidden, _ := filepath.Glob(filepath.Join(state, "templates", ".*"))
	if len(left)+len(hidden) != 0 {
		t.Errorf("left %v %v", left, hidden)
	}
}

func TestReadOnlyState(t *testing.T) {
	f := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(f, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := disk.Upper(t.Context(), f, filepath.Join(t.TempDir(), "x"), 1)
	if err == nil || !strings.Contains(err.Error(), f) {
		t.Errorf("error %v does not name %s", err, f)
	}
	if fault.KindOf(err) != fault.System {
		t.Errorf("kind is %s", fault.KindOf(err))
	}
}

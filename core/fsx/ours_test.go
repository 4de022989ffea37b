package fsx_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
)

func TestNotOurs(t *testing.T) {
	dir := t.TempDir()
	file, sub, link := filepath.Join(dir, "file"), filepath.Join(dir, "sub"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Mkdir(sub, 0o700), os.Symlink("file", link)); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{dir, file, sub} {
		if err := fsx.NotOurs(p); err != nil {
			t.Errorf("NotOurs(%s) = %v, want nil", p, err)
		}
	}
	if err := fsx.NotOurs(link); err == nil || !strings.Contains(err.Error(), "symlink") {
		t.Errorf("a symlink: %v", err)
	}
	if err := fsx.NotOurs(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
	if err := fsx.NotOurs("/proc"); err == nil {
		t.Error("/proc is a mount and may go")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give files away and to mount")
	}
	if err := os.Chown(file, 4321, 0); err != nil {
		t.Fatal(err)
	}
	if err := fsx.NotOurs(file); err == nil || !strings.Contains(err.Error(), "uid 4321") {
		t.Errorf("another user's: %v", err)
	}
	if err := unix.Mount(dir, sub, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("needs to mount: %v", err)
	}
	defer unix.Unmount(sub, unix.MNT_DETACH)
	if err := fsx.NotOurs(sub); !errors.Is(err, fsx.ErrMounted) {
		t.Errorf("a bind mount of the same filesystem: %v", err)
	}
}

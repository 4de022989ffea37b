package fsx_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
)

func TestRemoveTreeFollowsNoSymlink(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{outside, filepath.Join(tree, "a", "b"), filepath.Join(tree, "shut")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	precious := filepath.Join(outside, "precious")
	for _, f := range []string{precious, filepath.Join(tree, "a", "b", "f"), filepath.Join(tree, "shut", "f")} {
		if err := os.WriteFile(f, []byte("x"), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range []string{"l", "a/l", "a/b/l"} {
		if err := os.Symlink(outside, filepath.Join(tree, l)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(tree, "shut"), 0); err != nil {
		t.Fatal(err)
	}
	if err := fsx.RemoveTree(tree); err != nil {
		t.Fatalf("RemoveTree = %v", err)
	}
	if _, err := os.Lstat(tree); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("tree is still there: %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Errorf("a file behind a symlink is gone: %v", err)
	}
	if err := fsx.RemoveTree(tree); err != nil {
		t.Errorf("RemoveTree of nothing = %v, want nil", err)
	}
}

func TestRemoveTreeStopsAtMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a tmpfs")
	}
	for _, kind := range []string{"tmpfs", "bind"} {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			mnt := filepath.Join(dir, "tree", "mnt")
			src := filepath.Join(dir, "src")
			for _, d := range []string{mnt, src} {
				if err := os.MkdirAll(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			if kind == "tmpfs" {
				err = unix.Mount("tmpfs", mnt, "tmpfs", 0, "size=64k")
			} else {
				err = unix.Mount(src, mnt, "", unix.MS_BIND, "")
			}
			if err != nil {
				t.Skipf("needs the right to mount: %v", err)
			}
			defer unix.Unmount(mnt, unix.MNT_DETACH)
			f := filepath.Join(mnt, "precious")
			if err := os.WriteFile(f, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := fsx.RemoveTree(filepath.Join(dir, "tree")); !errors.Is(err, fsx.ErrMounted) {
				t.Errorf("RemoveTree = %v, want ErrMounted", err)
			}
			if _, err := os.Stat(f); err != nil {
				t.Errorf("a file on the mount is gone: %v", err)
			}
		})
	}
}

// Many who remove the same tree at once all find it gone.
func TestRemoveTreeTogether(t *testing.T) {
	for range 50 {
		dir := filepath.Join(t.TempDir(), "tree")
		for i := range 20 {
			if err := os.MkdirAll(filepath.Join(dir, strconv.Itoa(i), "below"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		errs := make(chan error, 4)
		for range cap(errs) {
			go func() { errs <- fsx.RemoveTree(dir) }()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Lstat(dir); !os.IsNotExist(err) {
			t.Fatalf("the tree is still there: %v", err)
		}
	}
}

package fsx_test

import (
	"os"
	"path/filepath"
	"testing"

	"virtkit/core/fsx"
)

func TestTaken(t *testing.T) {
	dir := t.TempDir()
	if n, inodes, err := fsx.Taken(filepath.Join(dir, "nosuch")); n != 0 || inodes != 0 || err != nil {
		t.Error(n, inodes, err)
	}
	empty, one, err := fsx.Taken(dir)
	if err != nil || one != 1 {
		t.Fatal(one, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	// A second name, a hole and a link to what is elsewhere take nothing.
	os.Link(filepath.Join(dir, "f"), filepath.Join(dir, "g"))
	os.Symlink("/usr", filepath.Join(dir, "usr"))
	h, err := os.Create(filepath.Join(dir, "hole"))
	if err != nil {
		t.Fatal(err)
	}
	h.Truncate(1 << 30)
	h.Close()
	n, inodes, err := fsx.Taken(dir)
	if n -= empty; err != nil || n < 1<<20 || n > 1<<20+64<<10 || inodes != 4 {
		t.Errorf("%d bytes in %d files, %v", n, inodes, err)
	}
}

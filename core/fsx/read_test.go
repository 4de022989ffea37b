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

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.WriteFile(at("f"), []byte("12345"), 0o600), os.Symlink("f", at("link")), unix.Mkfifo(at("fifo"), 0o600), os.Mkdir(at("dir"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if b, err := fsx.ReadFile(at("f"), 5); err != nil || string(b) != "12345" {
		t.Errorf("as large as it may be: %q, %v", b, err)
	}
	for name, want := range map[string]string{"link": "too many levels of symbolic links", "fifo": "is no regular file", "dir": "is no regular file"} {
		if _, err := fsx.ReadFile(at(name), 5); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	if _, err := fsx.ReadFile(at("f"), 4); err == nil || !strings.Contains(err.Error(), at("f")+" is larger than the 4 bytes") {
		t.Errorf("too large: %v", err)
	}
	if _, err := fsx.ReadFile(at("none"), 4); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

package erofs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/erofs"
)

// extract unpacks an image with the judge of the format.
func extract(t *testing.T, image string) string {
	t.Helper()
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("needs fsck.erofs: apt-get install erofs-utils")
	}
	dir := filepath.Join(t.TempDir(), "x")
	if out, err := exec.Command(fsck, "--extract="+dir, image).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	return dir
}

// listing is a tree as lines: path, kind, mode, time, content.
func listing(t *testing.T, dir string, skip string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if skip != "" && rel == skip {
			return filepath.SkipDir
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%q %v", rel, fi.Mode())
		switch {
		case fi.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %v %d %x", fi.ModTime().UnixNano(), len(b), b)
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += " -> " + to
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func write(t *testing.T, dir, name string, data []byte, mode fs.FileMode) {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, data, mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(p, mode); err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1700000000, int64(len(data))*1001)
	if err := os.Chtimes(p, at, at); err != nil {
		t.Fatal(err)
	}
}

// oddTree has what a repository may hold and an image must keep: every size
// around the format's limits, names of any bytes, more names than a block of a
// directory takes.
func oddTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, n := range []int{0, 1, 31, 32, 33, 1023, 1024, 1025, 5119, 5120, 5121, 4031, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 12000, 300000, 1<<20 + 5} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i*7 + n)
		}
		write(t, dir, fmt.Sprintf("size/%d", n), b, 0o644)
	}
	for _, n := range []string{"a\nb", "\xff\xfe", "-dash", "!bang", "...", ".hidden", " ", "\t", "ünï", strings.Repeat("n", 255), "\x01", "~"} {
		write(t, dir, "names/"+n, []byte(n), 0o644)
	}
	for i := range 1500 {
		write(t, dir, fmt.Sprintf("many/file-with-a-longer-name-%04d", i*7919%1500), []byte(fmt.Sprint(i)), 0o644)
	}
	write(t, dir, "run", []byte("#!/bin/sh\n"), 0o755)
	deep := strings.Repeat("d/", 200)
	write(t, dir, deep+"bottom", []byte("deep"), 0o644)
	for name, to := range map[string]string{"out": "/etc/passwd", "up": "../../../..", "gone": "nothing", "long": strings.Repeat("x/", 2000)} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func pack(t *testing.T, tree *erofs.Tree) (string, erofs.Stats) {
	t.Helper()
	img := filepath.Join(t.TempDir(), "img")
	st, err := tree.Write(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	return img, st
}

func diff(t *testing.T, got, want []string) {
	t.Helper()
	in := map[string]bool{}
	for _, l := range want {
		in[l] = true
	}
	for _, l := range got {
		if !in[l] {
			t.Errorf("is there, but should not be: %.200s", l)
		}
		delete(in, l)
	}
	for l := range in {
		t.Errorf("is missing: %.200s", l)
	}
}

func TestWholeTree(t *testing.T) {
	dir := oddTree(t)
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	img, st := pack(t, tree)
	got := listing(t, extract(t, img), "")
	want := listing(t, dir, "")
	diff(t, got, want)
	if st.Files != len(want) {
		t.Errorf("the image has %d inodes, the tree %d", st.Files, len(want))
	}
	if fi, err := os.Stat(img); err != nil || fi.Size() != st.Bytes || fi.Mode().Perm() != 0o600 {
		t.Errorf("image %v %v, stats %d", fi, err, st.Bytes)
	}
}

// The kernel is the judge that counts, and stricter than the tools: it searches
// names in its own order.
func TestKernelReads(t *testing.T) {
	if kinds, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(kinds), "\terofs\n") {
		t.Skipf("needs a kernel with erofs: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount an image")
	}
	dir := oddTree(t)
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	img, _ := pack(t, tree)
	at := t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", img, at).CombinedOutput(); err != nil {
		if strings.Contains(string(out), "loop") {
			t.Skipf("needs a loop device: %s", out)
		}
		t.Fatalf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	diff(t, listing(t, at, ""), listing(t, dir, ""))
}

// Equal trees give equal images, however the goroutines run.
func TestSameBytes(t *testing.T) {
	dir := oddTree(t)
	var first []byte
	for range 3 {
		tree := erofs.New()
		if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
			t.Fatal(err)
		}
		img, _ := pack(t, tree)
		b, err := os.ReadFile(img)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = b
		} else if !bytes.Equal(first, b) {
			t.Fatal("two images of one tree differ")
		}
	}
}

// Directories can be merged, names left out, files made.
func TestMerge(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	write(t, a, ".git/objects/aa/1", []byte("a1"), 0o444)
	write(t, a, ".git/objects/info/alternates", []byte("/outside"), 0o644)
	write(t, a, ".git/config", []byte("ours"), 0o644)
	write(t, a, "f", []byte("f"), 0o644)
	write(t, b, "aa/1", []byte("other"), 0o644)
	write(t, b, "aa/2", []byte("b2"), 0o644)
	write(t, b, "pack/p", []byte("p"), 0o644)
	write(t, b, "tmp_x", []byte("x"), 0o644)
	tree := erofs.New()
	skip := func(p string, _ bool) bool {
		return p == ".git/objects/info/alternates" || strings.HasPrefix(filepath.Base(p), "tmp_")
	}
	if err := tree.AddDir(t.Context(), a, "", skip); err != nil {
		t.Fatal(err)
	}
	if err := tree.AddDir(t.Context(), b, ".git/objects", skip); err != nil {
		t.Fatal(err)
	}
	tree.AddFile(".git/config", []byte("guest's"), 1)
	tree.AddFile("new/dir/file", []byte("new"), 2)
	if !tree.SetTime("f", 1234567890) || tree.SetTime("nosuch", 1) {
		t.Error("SetTime does not know what is there")
	}
	if n := tree.Newest(); n != 1700000000 {
		t.Errorf("the newest file is of %d", n)
	}
	img, _ := pack(t, tree)
	x := extract(t, img)
	for p, want := range map[string]string{".git/config": "guest's", ".git/objects/aa/1": "a1", ".git/objects/aa/2": "b2", ".git/objects/pack/p": "p", "new/dir/file": "new", "f": "f"} {
		if got, err := os.ReadFile(filepath.Join(x, p)); err != nil || string(got) != want {
			t.Errorf("%s is %q (%v), want %q", p, got, err, want)
		}
	}
	for _, p := range []string{".git/objects/info/alternates", ".git/objects/tmp_x"} {
		if _, err := os.Lstat(filepath.Join(x, p)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", p, err)
		}
	}
	if fi, err := os.Stat(filepath.Join(x, "f")); err != nil || fi.ModTime().Unix() != 1234567890 {
		t.Errorf("the set time is lost: %v %v", fi, err)
	}
}

// What no file of a repository is stays outside; nothing waits for a pipe.
func TestSpecialFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "f", []byte("f"), 0o600)
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	if tree.Skipped() != 1 {
		t.Errorf("skipped %d, want the pipe alone", tree.Skipped())
	}
	img, st := pack(t, tree)
	if st.Files != 2 {
		t.Errorf("%d inodes, want the root and f", st.Files)
	}
	if fi, err := os.Stat(filepath.Join(extract(t, img), "f")); err != nil || fi.Mode() != 0o644 {
		t.Errorf("modes are git's: %v %v", fi, err)
	}
}

// A file that is written to between the look at it and its copy is no file of
// any moment: it is refused, also when its size and time are the same again.
func TestChangedMeanwhile(t *testing.T) {
	for name, change := range map[string]func(p string) error{
		"in place": func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("new"), 5000)
			return errors.Join(err, f.Close())
		},
		"longer": func(p string) error { return os.Truncate(p, 20000) },
		"another": func(p string) error {
			return errors.Join(os.WriteFile(p+"~", make([]byte, 10000), 0o644), os.Rename(p+"~", p))
		},
		"a symlink": func(p string) error { return errors.Join(os.Remove(p), os.Symlink("/etc/passwd", p)) },
	} {
		dir := t.TempDir()
		write(t, dir, "d/f", make([]byte, 10000), 0o644)
		p := filepath.Join(dir, "d/f")
		was, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		tree := erofs.New()
		if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
			t.Fatal(err)
		}
		if err := change(p); err != nil {
			t.Fatal(err)
		}
		if name != "a symlink" {
			// The kernel's clock of files has ticks: one later there is no doubt.
			for st, err := os.Lstat(p); err == nil && changeTime(st) == changeTime(was); st, err = os.Lstat(p) {
				if err := os.Chtimes(p, was.ModTime(), was.ModTime()); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Chtimes(p, was.ModTime(), was.ModTime()); err != nil {
				t.Fatal(err)
			}
		}
		img := filepath.Join(t.TempDir(), "img")
		if _, err := tree.Write(t.Context(), img); err == nil || !strings.Contains(err.Error(), "d/f") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(img); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: half an image was left: %v", name, err)
		}
	}
}

// Of a store's files the times may move: git touches an object that it finds to
// be there already, and links one to its name. Its size may not.
func TestStoreTouched(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "aa/1", []byte("object"), 0o444)
	p := filepath.Join(dir, "aa/1")
	tree := erofs.New()
	if err := tree.AddStore(t.Context(), dir, "objects", nil); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Link(p, filepath.Join(dir, "tmp")), os.Chtimes(p, time.Now(), time.Now())); err != nil {
		t.Fatal(err)
	}
	img, _ := pack(t, tree)
	if b, err := os.ReadFile(filepath.Join(extract(t, img), "objects/aa/1")); err != nil || string(b) != "object" {
		t.Errorf("%q %v", b, err)
	}
	if err := errors.Join(os.Chmod(p, 0o644), os.Truncate(p, 100)); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Write(t.Context(), filepath.Join(t.TempDir(), "img")); err == nil || !strings.Contains(err.Error(), "changed") {
		t.Errorf("an object that grew: %v", err)
	}
}

func changeTime(fi fs.FileInfo) int64 {
	return fi.Sys().(*syscall.Stat_t).Ctim.Nano()
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "f", make([]byte, 10000), 0o644)
	img := filepath.Join(t.TempDir(), "img")
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "f"), 5000); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Write(t.Context(), img); err == nil || !strings.Contains(err.Error(), "shorter") {
		t.Errorf("a file that shrank: %v", err)
	}
	if _, err := os.Lstat(img); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("half an image was left: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := erofs.New().AddDir(ctx, dir, "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := erofs.New().AddDir(t.Context(), filepath.Join(dir, "f"), "", nil); err == nil {
		t.Error("a file was packed as a directory")
	}
	link := filepath.Join(t.TempDir(), "l")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := erofs.New().AddDir(t.Context(), link, "", nil); err == nil {
		t.Error("a symlink was followed")
	}
}

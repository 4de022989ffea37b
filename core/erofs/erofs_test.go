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

// blockSlack is what a filesystem may need for a file beside its content.
const blockSlack = 1 << 20

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
	if fi, err := os.Stat(img); err != nil || fi.Size() != st.Length || fi.Mode().Perm() != 0o600 {
		t.Errorf("image %v %v, stats %+v", fi, err, st)
	} else if disk := fi.Sys().(*syscall.Stat_t).Blocks * 512; st.Bytes > st.Length || disk > st.Bytes+blockSlack {
		t.Errorf("%+v, but %d bytes are used on the disk", st, disk)
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
	skip := func(dir, name string) bool {
		return dir == ".git/objects/info" && name == "alternates" || strings.HasPrefix(name, "tmp_")
	}
	if err := tree.AddDir(t.Context(), a, "", skip); err != nil {
		t.Fatal(err)
	}
	if err := tree.AddDir(t.Context(), b, ".git/objects", skip); err != nil {
		t.Fatal(err)
	}
	late := time.Unix(1800000000, 5)
	if err := os.Chtimes(filepath.Join(b, "pack/p"), late, late); err != nil {
		t.Fatal(err)
	}
	tree.AddFile(".git/config", []byte("guest's"))
	tree.AddFile("new/dir/file", []byte("new"))
	if !tree.Later("f", 7) || tree.Later("nosuch", 1) || tree.Later("new", 1) {
		t.Error("Later does not know what is there")
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
	for p, want := range map[string]time.Time{"f": time.Unix(1800000007, 0), ".git/config": time.Unix(1800000000, 0), "new/dir/file": time.Unix(1800000000, 0), ".git/objects/pack/p": late} {
		if fi, err := os.Stat(filepath.Join(x, p)); err != nil || !fi.ModTime().Equal(want) {
			t.Errorf("%s is of %v (%v), want %v", p, fi.ModTime(), err, want)
		}
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

// A file that changes while it is copied is no file of any moment: it is
// refused, also when its size and time are the same again. So is one that has
// gone since the directory was read, or is no file any more.
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
		"longer":      func(p string) error { return os.Truncate(p, 20000) },
		"shorter":     func(p string) error { return os.Truncate(p, 9000) },
		"before gone": os.Remove,
		"before a symlink": func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink("/etc/passwd", p))
		},
		"before a directory": func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o755)) },
		"before a pipe":      func(p string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o644)) },
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
		var failed error
		if strings.HasPrefix(name, "before") {
			failed = change(p)
		} else {
			tree.Copied(func(string) {
				failed = change(p)
				// The kernel's clock of files has ticks: one later there is no doubt.
				for st, err := os.Lstat(p); err == nil && changeTime(st) == changeTime(was); st, err = os.Lstat(p) {
					failed = errors.Join(failed, os.Chtimes(p, was.ModTime(), was.ModTime()))
				}
				failed = errors.Join(failed, os.Chtimes(p, was.ModTime(), was.ModTime()))
			})
		}
		img := filepath.Join(t.TempDir(), "img")
		_, err = tree.Write(t.Context(), img)
		if failed != nil {
			t.Fatalf("%s: %v", name, failed)
		}
		if err == nil || !strings.Contains(err.Error(), "d/f") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(img); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: half an image was left: %v", name, err)
		}
	}
}

// Files may have come to other sizes between the look at a directory and their
// copy: each is that of the moment of its copy, whatever was planned.
func TestGrownBefore(t *testing.T) {
	dir := t.TempDir()
	for i := range 300 {
		write(t, dir, fmt.Sprint(i), nil, 0o644)
	}
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		write(t, dir, fmt.Sprint(i), bytes.Repeat([]byte{byte(i)}, i*97), 0o755)
	}
	img, _ := pack(t, tree)
	diff(t, listing(t, extract(t, img), ""), listing(t, dir, ""))
}

// Parts that are longer than a window wait for those before them, and none waits
// for ever; a tree without a file has a file's length all the same.
func TestLongParts(t *testing.T) {
	dir := t.TempDir()
	for i := range 600 {
		size := i * 13
		if i%200 == 7 {
			size = 3<<20 + i
		}
		b := make([]byte, size)
		for j := range b {
			b[j] = byte(j*i + j>>8)
		}
		write(t, dir, fmt.Sprintf("%03d", i), b, 0o644)
	}
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	img, _ := pack(t, tree)
	diff(t, listing(t, extract(t, img), ""), listing(t, dir, ""))

	empty := erofs.New()
	if err := empty.AddDir(t.Context(), t.TempDir(), "", nil); err != nil {
		t.Fatal(err)
	}
	img, st := pack(t, empty)
	if got := listing(t, extract(t, img), ""); len(got) != 1 || st.Files != 1 {
		t.Errorf("%q %+v", got, st)
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
	var failed error
	touch := func() error {
		return errors.Join(os.Link(p, filepath.Join(dir, "tmp")), os.Chtimes(p, time.Now(), time.Now()))
	}
	tree.Copied(func(string) { failed = touch() })
	img, _ := pack(t, tree)
	if failed != nil {
		t.Fatal(failed)
	}
	if b, err := os.ReadFile(filepath.Join(extract(t, img), "objects/aa/1")); err != nil || string(b) != "object" {
		t.Errorf("%q %v", b, err)
	}
	tree.Copied(func(string) { failed = errors.Join(os.Chmod(p, 0o644), os.Truncate(p, 100)) })
	if _, err := tree.Write(t.Context(), filepath.Join(t.TempDir(), "img")); err == nil || !strings.Contains(err.Error(), "changed") || failed != nil {
		t.Errorf("an object that grew: %v, %v", err, failed)
	}
}

func changeTime(fi fs.FileInfo) int64 {
	return fi.Sys().(*syscall.Stat_t).Ctim.Nano()
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "f", make([]byte, 10000), 0o644)
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := erofs.New().AddDir(ctx, dir, "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := tree.Write(ctx, filepath.Join(t.TempDir(), "img")); !errors.Is(err, context.Canceled) {
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

// TestLargestInodes: files whose content all lies beside their inodes, as long as
// it may be, take all the room that there is for inodes, and no more.
func TestLargestInodes(t *testing.T) {
	dir := t.TempDir()
	for i := range 598 { // two whole parts, and one of 86 = 3*28 + 2
		write(t, dir, fmt.Sprintf("f%03d", i), bytes.Repeat([]byte{byte(i)}, 1024), 0o644)
	}
	tree := erofs.New()
	if err := tree.AddDir(t.Context(), dir, "", nil); err != nil {
		t.Fatal(err)
	}
	image, st := pack(t, tree)
	diff(t, listing(t, extract(t, image), ""), listing(t, dir, ""))
	if st.Bytes <= 0 || st.Bytes >= st.Length {
		t.Errorf("%d bytes of a file of %d, which has room that is not used", st.Bytes, st.Length)
	}
}

package image_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/core/image"
)

// TestAgainstUmoci unpacks the same layers with umoci, mounts what we made of
// them, and compares every name: type, mode, owner, size, time, content,
// symlink, device, extended attributes and which names are one file.
func TestAgainstUmoci(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount the filesystem image and to unpack owners")
	}
	for _, p := range []string{"umoci", "mount"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s: apt-get install %s", p, p)
		}
	}
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	one := []f{
		{name: "./", mode: 0o755}, {name: "etc/", mode: 0o755}, {name: "etc/a", body: "1"}, {name: "etc/b", body: "2", uid: 1000, gid: 70000},
		{name: "bin/"}, {name: "bin/su", body: "suid", mode: 0o4755}, {name: "bin/su2", typ: tar.TypeLink, link: "bin/su"}, {name: "bin/su3", typ: tar.TypeLink, link: "bin/su"},
		{name: "bin/ping", body: "p", mode: 0o755, pax: map[string]string{"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.note": "hello"}},
		{name: "sticky/", mode: 0o1777}, {name: "setgid/", mode: 0o2755, gid: 5}, {name: "lnk", typ: tar.TypeSymlink, link: "etc/a"},
		{name: "usr/"}, {name: "usr/lib/"}, {name: "lib", typ: tar.TypeSymlink, link: "usr/lib"}, {name: "usr/lib/one", body: "1"},
		{name: "old/"}, {name: "old/deep/"}, {name: "old/deep/file", body: "x"}, {name: "gone/"}, {name: "gone/x", body: "x"},
		{name: "dev/"}, {name: "dev/null", typ: tar.TypeChar, major: 1, minor: 3, mode: 0o666}, {name: "dev/loop", typ: tar.TypeBlock, major: 7, minor: 300}, {name: "run/"}, {name: "run/fifo", typ: tar.TypeFifo},
		{name: "names/"}, {name: "names/" + strings.Repeat("l", 250), body: "long"}, {name: "names/\xff\xfe", body: "bytes"}, {name: "names/new\nline", body: "nl"}, {name: "names/" + strings.Repeat("d/", 70), mode: 0o711},
		{name: "sparse", body: strings.Repeat("\x00", 1<<20) + "end"}, {name: "empty"}, {name: "swap1/"}, {name: "swap1/x"}, {name: "swap2", body: "file"}, {name: "swap3", typ: tar.TypeSymlink, link: "etc"},
		{name: "far", typ: tar.TypeSymlink, link: strings.Repeat("x/", 100)},
	}
	two := []f{
		{name: "etc/", mode: 0o700}, {name: "etc/.wh.a"}, {name: "etc/b", body: "two", mode: 0o600}, {name: "bin/"}, {name: "bin/.wh.su"},
		{name: "old/", mode: 0o750, uid: 3}, {name: "old/.wh..wh..opq"}, {name: "old/new", body: "n"}, {name: ".wh.gone"},
		{name: "lib/two", body: "2"}, {name: "swap1", body: "now a file"}, {name: "swap2/"}, {name: "swap2/x", body: "y"}, {name: "swap3/"}, {name: "swap3/z", body: "z"},
		{name: "hard", typ: tar.TypeLink, link: "names/new\nline"},
	}
	many := [][]f{one, two}
	for i := range 30 {
		many = append(many, []f{{name: fmt.Sprintf("l/%d", i), body: fmt.Sprint(i)}, {name: fmt.Sprintf("l/.wh.%d", i-3)}, {name: "l/", mode: int64(0o700 + i%8)}})
	}
	var layers []sent
	for i, l := range many {
		raw := layer(t, l...)
		if i%2 == 0 {
			layers = append(layers, gz(t, raw))
		} else {
			layers = append(layers, sent{raw, raw, "application/vnd.oci.image.layer.v1.tar"})
		}
	}
	compareWithUmoci(t, layers...)
}

func TestAgainstUmociForReal(t *testing.T) {
	file := os.Getenv("VIRTKIT_BENCH_TAR")
	if file == "" {
		t.Skip("needs a root filesystem: set VIRTKIT_BENCH_TAR to a tar")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount the filesystem image and to unpack owners")
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	compareWithUmoci(t, sent{raw, raw, "application/vnd.oci.image.layer.v1.tar"}, gz(t, layer(t, f{name: "etc/.wh.hostname"}, f{name: "new", body: "x"})))
}

func compareWithUmoci(t *testing.T, layers ...sent) {
	t.Helper()
	dir := t.TempDir()
	layout := filepath.Join(dir, "layout")
	writeLayout(t, layout, layers...)
	if out, err := exec.Command("umoci", "unpack", "--image", layout+":one", filepath.Join(dir, "umoci")).CombinedOutput(); err != nil {
		t.Fatalf("umoci: %v\n%s", err, out)
	}
	s := openStore(t, image.Options{})
	i, err := s.Import(t.Context(), layout, "x", image.ImportOptions{Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	mnt := filepath.Join(dir, "mnt")
	if err := os.Mkdir(mnt, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "-o", "loop,ro", i.Path, mnt).CombinedOutput(); err != nil {
		t.Skipf("needs to mount a loop device: %v: %s", err, bytes.TrimSpace(out))
	}
	defer func() {
		if err := syscall.Unmount(mnt, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	want, got := treeOf(t, filepath.Join(dir, "umoci", "rootfs")), treeOf(t, mnt)
	if len(want) < 3 {
		t.Fatalf("umoci unpacked %d names", len(want))
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("trees (-umoci +vk):\n%s", d)
	}
	t.Logf("%d names alike", len(got))
}

// treeOf describes every name below root in a line.
func treeOf(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	first := map[uint64]string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		if rel == "lost+found" { // every ext4 has it
			return filepath.SkipDir
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		l := fmt.Sprintf("%q %o %d:%d", rel, st.Mode, st.Uid, st.Gid)
		// Times of directories that no layer has are the unpacker's affair.
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			l += fmt.Sprintf(" links=%d time=%d.%09d", st.Nlink, st.Mtim.Sec, st.Mtim.Nsec)
			if f, ok := first[st.Ino]; ok {
				l += fmt.Sprintf(" same as %q", f)
			} else {
				first[st.Ino] = rel
			}
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			l += " " + sum(b)
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			l += fmt.Sprintf(" -> %q", to)
		case unix.S_IFCHR, unix.S_IFBLK:
			l += fmt.Sprintf(" dev=%d,%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		for _, x := range []string{"security.capability", "user.note"} {
			v := make([]byte, 100)
			if n, err := unix.Lgetxattr(p, x, v); err == nil {
				l += fmt.Sprintf(" [%s=%q]", x, v[:n])
			}
		}
		out = append(out, l)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(out)
	return out
}

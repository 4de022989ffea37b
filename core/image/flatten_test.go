package image_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// f is one tar entry, with defaults that keep the tables short.
type f struct {
	name  string
	typ   byte // 0: directory when the name ends in "/", else regular
	body  string
	link  string
	mode  int64
	uid   int
	gid   int
	major int64
	minor int64
	mtime time.Time
	pax   map[string]string
}

var stamp = time.Unix(1700000000, 123456789)

func layer(t testing.TB, entries ...f) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{
			Name: e.name, Typeflag: e.typ, Linkname: e.link, Mode: e.mode, Uid: e.uid, Gid: e.gid,
			Devmajor: e.major, Devminor: e.minor, ModTime: e.mtime, Format: tar.FormatPAX, PAXRecords: e.pax,
		}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = map[bool]int64{true: 0o755, false: 0o644}[h.Typeflag == tar.TypeDir]
		}
		if h.ModTime.IsZero() {
			h.ModTime = stamp
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(e.body))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatalf("%q: %v", e.name, err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// listing turns the merged stream into sorted lines that tables can hold.
func listing(t testing.TB, stream []byte) []string {
	t.Helper()
	var out []string
	seen := map[string]bool{}
	tr := tar.NewReader(bytes.NewReader(stream))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if seen[h.Name] {
			t.Fatalf("%q comes twice", h.Name)
		}
		seen[h.Name] = true
		if dir := parent(h.Name); dir != "" && !seen[dir+"/"] {
			t.Fatalf("%q comes before its directory", h.Name)
		}
		if h.Name == "./" && h.Mode == 0o755 && h.Uid == 0 {
			continue
		}
		b, _ := io.ReadAll(tr)
		line := fmt.Sprintf("%s %04o", h.Name, h.Mode)
		if h.Uid != 0 || h.Gid != 0 {
			line += fmt.Sprintf(" %d:%d", h.Uid, h.Gid)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			if len(b) > 40 {
				b = []byte(fmt.Sprintf("%d bytes", len(b)))
			}
			line += " =" + string(b)
		case tar.TypeLink:
			if !seen[h.Linkname] {
				t.Fatalf("hard link %q comes before its target %q", h.Name, h.Linkname)
			}
			line = h.Name + " => " + h.Linkname
		case tar.TypeSymlink:
			line = h.Name + " -> " + h.Linkname
		case tar.TypeChar, tar.TypeBlock:
			line += fmt.Sprintf(" %c%d,%d", h.Typeflag+'a'-'0', h.Devmajor, h.Devminor)
		case tar.TypeFifo:
			line += " fifo"
		}
		var xs []string
		for k, v := range h.PAXRecords {
			if n, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok {
				xs = append(xs, fmt.Sprintf(" [%s=%q]", n, v))
			}
		}
		sort.Strings(xs)
		out = append(out, line+strings.Join(xs, ""))
	}
	sort.Strings(out)
	return out
}

func parent(name string) string {
	name = strings.TrimSuffix(name, "/")
	i := strings.LastIndexByte(name, '/')
	if i < 0 || name == "." {
		return ""
	}
	return name[:i]
}

func TestFlatten(t *testing.T) {
	long := strings.Repeat("d/", 60) + strings.Repeat("n", 200)
	for _, c := range []struct {
		name   string
		layers [][]f
		want   []string
		err    string
	}{
		{name: "no layers"},
		{name: "plain", layers: [][]f{{{name: "a/", mode: 0o700, uid: 5}, {name: "a/x", body: "1", mode: 0o4755, gid: 70000}}},
			want: []string{"a/ 0700 5:0", "a/x 4755 0:70000 =1"}},
		{name: "upper layer wins", layers: [][]f{{{name: "x", body: "old"}}, {{name: "x", body: "new", mode: 0o600}}},
			want: []string{"x 0600 =new"}},
		{name: "twice in one layer", layers: [][]f{{{name: "x", body: "old"}, {name: "x", body: "new"}}}, want: []string{"x 0644 =new"}},
		{name: "whiteout", layers: [][]f{{{name: "a/"}, {name: "a/x"}, {name: "a/y"}}, {{name: "a/.wh.x"}}}, want: []string{"a/ 0755", "a/y 0644 ="}},
		{name: "whiteout of a folder", layers: [][]f{{{name: "a/"}, {name: "a/b/"}, {name: "a/b/c"}}, {{name: ".wh.a"}}}},
		{name: "whiteout of nothing there", layers: [][]f{{{name: ".wh.gone"}, {name: "no/such/.wh.x"}, {name: "x"}}}, want: []string{"x 0644 ="}},
		{name: "whiteout acts on lower layers alone", layers: [][]f{{{name: "x", body: "1"}}, {{name: "x", body: "2"}, {name: ".wh.x"}}}, want: []string{"x 0644 =2"}},
		{name: "whiteout then folder of that name", layers: [][]f{{{name: "a/"}, {name: "a/old"}}, {{name: "a/"}, {name: "a/new"}, {name: ".wh.a"}}},
			want: []string{"a/ 0755", "a/new 0644 ="}},
		{name: "S22 opaque after", layers: [][]f{{{name: "a/", mode: 0o711}, {name: "a/b/"}, {name: "a/b/foo"}}, {{name: "a/", mode: 0o750, uid: 7}, {name: "a/.wh..wh..opq"}, {name: "a/new"}}},
			want: []string{"a/ 0750 7:0", "a/new 0644 ="}},
		{name: "S22 opaque last", layers: [][]f{{{name: "a/"}, {name: "a/b/"}, {name: "a/b/foo"}}, {{name: "a/new"}, {name: "a/", mode: 0o750}, {name: "a/.wh..wh..opq"}}},
			want: []string{"a/ 0750", "a/new 0644 ="}},
		{name: "S22 folder again after the marker", layers: [][]f{{{name: "a/"}, {name: "a/b/"}, {name: "a/b/foo"}}, {{name: "a/.wh..wh..opq"}, {name: "a/", mode: 0o750}, {name: "a/new"}}},
			want: []string{"a/ 0750", "a/new 0644 ="}},
		{name: "opaque with a folder only implied", layers: [][]f{{{name: "a/"}, {name: "a/b/", mode: 0o700, uid: 9}}, {{name: "a/b/new"}, {name: "a/.wh..wh..opq"}}},
			want: []string{"a/ 0755", "a/b/ 0755", "a/b/new 0644 ="}},
		{name: "opaque root", layers: [][]f{{{name: "x"}}, {{name: ".wh..wh..opq"}, {name: "y"}}}, want: []string{"y 0644 ="}},
		{name: "aufs bookkeeping", layers: [][]f{{{name: ".wh..wh.plnk/"}, {name: ".wh..wh.aufs"}, {name: "x"}}}, want: []string{"x 0644 ="}},
		{name: "S23 target deleted", layers: [][]f{{{name: "x", body: "1", mode: 0o755}, {name: "y", typ: tar.TypeLink, link: "x"}}, {{name: ".wh.x"}}},
			want: []string{"y 0755 =1"}},
		{name: "S23 target becomes a folder", layers: [][]f{{{name: "x", body: "1"}, {name: "y", typ: tar.TypeLink, link: "x"}}, {{name: "x/"}, {name: "x/z"}}},
			want: []string{"x/ 0755", "x/z 0644 =", "y 0644 =1"}},
		{name: "S23 target replaced", layers: [][]f{{{name: "x", body: "1"}, {name: "y", typ: tar.TypeLink, link: "x"}}, {{name: "x", body: "2"}}},
			want: []string{"x 0644 =2", "y 0644 =1"}},
		{name: "S24 no entries for parents", layers: [][]f{{{name: "bin/app", body: "1"}, {name: "bin/app.files/deep/app", typ: tar.TypeLink, link: "bin/app"}}},
			want: []string{"bin/ 0755", "bin/app 0644 =1", "bin/app.files/ 0755", "bin/app.files/deep/ 0755", "bin/app.files/deep/app => bin/app"}},
		{name: "link to a lower layer's file", layers: [][]f{{{name: "z", body: "1"}}, {{name: "a", typ: tar.TypeLink, link: "/z"}}}, want: []string{"a 0644 =1", "z => a"}},
		{name: "link to a symlink", layers: [][]f{{{name: "s", typ: tar.TypeSymlink, link: "t"}, {name: "u", typ: tar.TypeLink, link: "s"}}}, want: []string{"s -> t", "u => s"}},
		{name: "link to itself", layers: [][]f{{{name: "x", body: "1"}, {name: "x", typ: tar.TypeLink, link: "x"}}}, want: []string{"x 0644 =1"}},
		{name: "link to nothing", layers: [][]f{{{name: "x", typ: tar.TypeLink, link: "gone"}}}, err: `hard link to "gone", which is in no layer`},
		{name: "link to a folder", layers: [][]f{{{name: "a/"}, {name: "x", typ: tar.TypeLink, link: "a"}}}, err: "which is a directory"},
		{name: "file over folder", layers: [][]f{{{name: "a/"}, {name: "a/x"}}, {{name: "a", body: "1"}}}, want: []string{"a 0644 =1"}},
		{name: "folder over symlink", layers: [][]f{{{name: "t/"}, {name: "a", typ: tar.TypeSymlink, link: "t"}}, {{name: "a/"}, {name: "a/x"}}}, want: []string{"a/ 0755", "a/x 0644 =", "t/ 0755"}},
		{name: "symlink over folder", layers: [][]f{{{name: "a/"}, {name: "a/x"}}, {{name: "a", typ: tar.TypeSymlink, link: "t"}}}, want: []string{"a -> t"}},
		{name: "through a symlink", layers: [][]f{{{name: "usr/lib/"}, {name: "lib", typ: tar.TypeSymlink, link: "usr/lib"}}, {{name: "lib/x", body: "1"}}},
			want: []string{"lib -> usr/lib", "usr/ 0755", "usr/lib/ 0755", "usr/lib/x 0644 =1"}},
		{name: "through an absolute symlink and above the root", layers: [][]f{{{name: "a", typ: tar.TypeSymlink, link: "/b"}, {name: "b", typ: tar.TypeSymlink, link: "../../../c"}}, {{name: "a/x", body: "1"}}},
			want: []string{"a -> /b", "b -> ../../../c", "c/ 0755", "c/x 0644 =1"}},
		{name: "whiteout through a symlink", layers: [][]f{{{name: "d/"}, {name: "d/x"}, {name: "l", typ: tar.TypeSymlink, link: "d"}}, {{name: "l/.wh.x"}}}, want: []string{"d/ 0755", "l -> d"}},
		{name: "symlink loop", layers: [][]f{{{name: "a", typ: tar.TypeSymlink, link: "b"}, {name: "b", typ: tar.TypeSymlink, link: "a"}, {name: "a/x"}}}, err: "symbolic links on the way"},
		{name: "file on the way", layers: [][]f{{{name: "a"}, {name: "a/x"}}}, err: `"a" on the way is not a directory`},
		{name: "out of the root", layers: [][]f{{{name: "a/../../x"}}}, err: "leads out of the root"},
		{name: "absolute out of the root", layers: [][]f{{{name: "/../x"}}}, err: "leads out of the root"},
		{name: "link out of the root", layers: [][]f{{{name: "x", typ: tar.TypeLink, link: "../etc/passwd"}}}, err: "leads out of the root"},
		{name: "odd names", layers: [][]f{{{name: "./a//b/./c", body: "1"}, {name: "/abs", body: "2"}, {name: "sp ace\n", body: "3"}, {name: "\xff\xfe", body: "4"}, {name: `back\slash`, body: "5"}, {name: "x", body: "6"}, {name: "X", body: "7"}}},
			want: []string{"X 0644 =7", "a/ 0755", "a/b/ 0755", "a/b/c 0644 =1", "abs 0644 =2", `back\slash 0644 =5`, "sp ace\n 0644 =3", "x 0644 =6", "\xff\xfe 0644 =4"}},
		{name: "root's own entry", layers: [][]f{{{name: "./", mode: 0o555, uid: 3}}}, want: []string{"./ 0555 3:0"}},
		{name: "root as a file", layers: [][]f{{{name: "."}}}, err: "the root can only be a directory"},
		{name: "long names", layers: [][]f{{{name: long, body: "1"}}, {{name: parent(long) + "/.wh." + strings.Repeat("n", 200)}, {name: strings.Repeat("m", 255)}}},
			want: append(nested("d", 60), strings.Repeat("m", 255)+" 0644 =")},
		{name: "too long a part", layers: [][]f{{{name: strings.Repeat("m", 256)}}}, err: "longer than 255 bytes"},
		{name: "too long a path", layers: [][]f{{{name: strings.Repeat("m/", 2100)}}}, err: "more than 4095 bytes"},
		{name: "devices", layers: [][]f{{{name: "c", typ: tar.TypeChar, major: 4095, minor: 1048575}, {name: "b", typ: tar.TypeBlock, major: 8, minor: 1}, {name: "p", typ: tar.TypeFifo}}},
			want: []string{"b 0644 e8,1", "c 0644 d4095,1048575", "p 0644 fifo"}},
		{name: "device out of range", layers: [][]f{{{name: "c", typ: tar.TypeChar, major: 5000}}}, err: "out of range"},
		{name: "xattrs", layers: [][]f{{{name: "x", pax: map[string]string{
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"SCHILY.xattr.user.a":              "b", "SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.btrfs.what": "1", "LIBARCHIVE.xattr.user.z": "eg",
		}}}}, want: []string{`x 0644 = [security.capability="\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"] [user.a="b"] [user.z="z"]`}},
		{name: "S25 empty PAX values", layers: [][]f{{{name: "x", body: "1", pax: map[string]string{"SCHILY.xattr.user.overlay.origin": "", "SCHILY.xattr.user.empty": "", "VENDOR.comment": ""}}}},
			want: []string{`x 0644 =1 [user.empty=""]`}},
		{name: "folder's xattrs are replaced", layers: [][]f{{{name: "a/", pax: map[string]string{"SCHILY.xattr.user.a": "1"}}}, {{name: "a/", pax: map[string]string{"SCHILY.xattr.user.b": "2"}}}},
			want: []string{`a/ 0755 [user.b="2"]`}},
		{name: "ACL in ext4's form", layers: [][]f{{{name: "x", pax: map[string]string{"SCHILY.xattr.system.posix_acl_access": "\x02\x00\x00\x00" +
			"\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\xe8\x03\x00\x00" + "\x20\x00\x04\x00\xff\xff\xff\xff"}}}},
			want: []string{`x 0644 = [system.posix_acl_access="\x01\x00\x00\x00\x01\x00\x06\x00\x02\x00\x04\x00\xe8\x03\x00\x00 \x00\x04\x00"]`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var layers [][]byte
			for _, l := range c.layers {
				layers = append(layers, layer(t, l...))
			}
			got, err := image.FlattenTar(layers...)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error = %v; want one with %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			sort.Strings(c.want)
			if d := cmp.Diff(c.want, listing(t, got)); d != "" {
				t.Errorf("merged tree (-want +got):\n%s", d)
			}
		})
	}
}

func nested(name string, n int) []string {
	var out []string
	for p := ""; n > 0; n-- {
		p += name + "/"
		out = append(out, p+" 0755")
	}
	return out
}

func TestFlatten120Layers(t *testing.T) {
	var layers [][]byte
	for i := range 120 {
		layers = append(layers, layer(t, f{name: "count", body: fmt.Sprint(i)}, f{name: fmt.Sprintf("d/%03d", i), body: "x"}, f{name: fmt.Sprintf("d/.wh.%03d", i-2)}))
	}
	got, err := image.FlattenTar(layers...)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"count 0644 =119", "d/ 0755", "d/118 0644 =x", "d/119 0644 =x"}, listing(t, got)); d != "" {
		t.Errorf("merged tree (-want +got):\n%s", d)
	}
}

// oldSparse is a GNU tar entry of 1 MiB with one byte at its end.
func TestFlattenSparse(t *testing.T) {
	tarBin, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("needs GNU tar: apt-get install tar")
	}
	dir := t.TempDir()
	file, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte("end"), 1<<20); err != nil {
		t.Fatal(err)
	}
	file.Close()
	for _, format := range []string{"--format=gnu", "--format=posix --sparse-version=0.0", "--format=posix --sparse-version=0.1", "--format=posix --sparse-version=1.0"} {
		args := append(strings.Fields(format), "-S", "-C", dir, "-cf", "-", "sparse")
		b, err := exec.Command(tarBin, args...).Output()
		if err != nil {
			t.Fatalf("tar %v: %v", args, err)
		}
		if len(b) > 100<<10 {
			t.Fatalf("tar %s did not write it sparse: %d bytes", format, len(b))
		}
		out, err := image.FlattenTar(b)
		if err != nil {
			t.Fatalf("%s: %v", format, err)
		}
		got := listing(t, out)
		if want := fmt.Sprintf("=%d bytes", 1<<20+3); len(got) != 1 || !strings.HasSuffix(got[0], want) {
			t.Errorf("%s: %q; want one file ending in %q", format, got, want)
		}
	}
}

func TestFlattenIsReproducible(t *testing.T) {
	var l []f
	for i := range 300 {
		l = append(l, f{name: fmt.Sprintf("d%d/f%d", i%7, i), body: strings.Repeat("x", i*37), pax: map[string]string{"SCHILY.xattr.user.a": "1", "SCHILY.xattr.user.bb": strings.Repeat("v", i)}})
	}
	a, b := layer(t, l...), layer(t, f{name: "d0/.wh.f0"}, f{name: "link", typ: tar.TypeLink, link: "d1/f1"})
	dir := t.TempDir()
	var first []byte
	for i := range 3 {
		p := filepath.Join(dir, fmt.Sprint(i))
		if err := image.FlattenExt4(p, 0, a, b); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = got
		} else if !bytes.Equal(first, got) {
			t.Fatal("equal layers gave another filesystem")
		}
	}
}

func TestFlattenTooBig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "root")
	err := image.FlattenExt4(path, 1<<20, layer(t, f{name: "x", body: strings.Repeat("x", 2<<20)}))
	if fault.KindOf(err) != fault.System || !strings.Contains(err.Error(), "the limit is") {
		t.Errorf("error = %v; want one that names the limit", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something is left at %s", path)
	}
}

// TestExt4IsSound has e2fsck and debugfs judge a filesystem with everything
// in it that a layer can hold.
func TestExt4IsSound(t *testing.T) {
	fsck, err := exec.LookPath("e2fsck")
	if err != nil {
		t.Skip("needs e2fsck: apt-get install e2fsprogs")
	}
	var l []f
	for i := range 3000 {
		l = append(l, f{name: fmt.Sprintf("huge/%0200d", i)})
	}
	l = append(l,
		f{name: "holes", body: strings.Repeat("\x00", 8<<20) + "end"},
		f{name: "cap", body: "x", mode: 0o4755, uid: 100000, gid: 1 << 30, pax: map[string]string{
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"SCHILY.xattr.user.large":          strings.Repeat("v", 3000), "SCHILY.xattr.user.empty": "",
		}},
		f{name: "s", typ: tar.TypeSymlink, link: strings.Repeat("l", 4000)},
		f{name: "null", typ: tar.TypeChar, major: 1, minor: 3},
		f{name: "hard", typ: tar.TypeLink, link: "cap"},
		f{name: "\xff", body: "n"},
	)
	path := filepath.Join(t.TempDir(), "root.ext4")
	if err := image.FlattenExt4(path, 0, layer(t, l...)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(fsck, "-fn", path).CombinedOutput(); err != nil {
		t.Fatalf("e2fsck: %v\n%s", err, out)
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode().Perm() != 0o400 {
		t.Errorf("mode of the root = %o; want 400", st.Mode().Perm())
	}
	debugfs, err := exec.LookPath("debugfs")
	if err != nil {
		t.Skip("needs debugfs for the rest: apt-get install e2fsprogs")
	}
	out, err := exec.Command(debugfs, "-R", "stat /cap", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Mode:  04755", "User: 100000", "Group: 1073741824", "Links: 2", "security.capability", "user.large (3000)", "user.empty (0)"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("debugfs does not show %q in:\n%s", want, out)
		}
	}
}

func FuzzFlatten(x *testing.F) {
	x.Add(layer(x, f{name: "a/"}, f{name: "a/x", body: "1"}), layer(x, f{name: "a/.wh.x"}, f{name: "b", typ: tar.TypeLink, link: "a/x"}))
	x.Add(layer(x, f{name: "a", typ: tar.TypeSymlink, link: "../b"}, f{name: "a/x"}), layer(x, f{name: ".wh..wh..opq"}))
	x.Add([]byte{0x1f, 0x8b}, []byte{0x28, 0xb5, 0x2f, 0xfd})
	x.Fuzz(func(t *testing.T, a, b []byte) {
		out, err := image.FlattenTar(a, b)
		if err != nil {
			return
		}
		// Whatever came out must be sound: no doubles, parents and targets
		// first, nothing outside.
		for _, l := range listing(t, out) {
			if strings.HasPrefix(l, "/") || strings.HasPrefix(l, "../") {
				t.Errorf("%q is outside of the root", l)
			}
		}
	})
}

package archive_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/archive"
)

// old is a time in whole seconds, long ago.
var old = time.Date(2024, 2, 3, 4, 5, 6, 0, time.UTC)

func make1(t *testing.T, root, name, text string, mode fs.FileMode) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
}

// project is the tree of the recordings artifacts-*.
func project(t *testing.T) string {
	root := t.TempDir()
	make1(t, root, "out/one.txt", "one\n", 0o644)
	make1(t, root, "out/sub/two.log", "two\n", 0o644)
	make1(t, root, "out/tool", "bin", 0o755)
	make1(t, root, "out/skip.txt", "skip\n", 0o644)
	make1(t, root, "untracked.txt", "u\n", 0o644)
	make1(t, root, "README.md", "# a project\n", 0o644)
	if err := os.Mkdir(filepath.Join(root, "emptyd"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("one.txt", filepath.Join(root, "out/link")); err != nil {
		t.Fatal(err)
	}
	return root
}

func names(entries []archive.Entry) (out []string) {
	for _, e := range entries {
		out = append(out, e.Name)
	}
	return out
}

// notes collects what is said, as "level: text".
type notes []string

func (n *notes) say(m archive.Note) { *n = append(*n, fmt.Sprintf("%s: %s", m.Level, m.Text)) }

func TestSelect(t *testing.T) {
	root := project(t)
	above := filepath.Base(root)
	nothing := func(p string) string {
		return "warning: " + p + ": no matching files. Ensure that the artifact path is relative to the working directory (" + root + ")"
	}
	for _, tt := range []struct {
		name           string
		paths, exclude []string
		want, said     []string
	}{
		{"the recording artifacts-zip", []string{"out", "emptyd/", "nothing*"}, []string{"out/skip.txt", "out/**/*.none"},
			[]string{"emptyd", "out", "out/link", "out/sub", "out/one.txt", "out/sub/two.log", "out/tool"},
			[]string{"info: out: found 6 matching artifact files and directories", "info: emptyd/: found 1 matching artifact files and directories", nothing("nothing*"), "info: out/skip.txt: excluded 1 files"}},
		{"globs", []string{"out/**/*.log", "README.md"}, nil, []string{"README.md", "out/sub/two.log"},
			[]string{"info: out/**/*.log: found 1 matching artifact files and directories", "info: README.md: found 1 matching artifact files and directories"}},
		{"braces and classes", []string{"out/{one,skip}.t[xy]t"}, nil, []string{"out/one.txt", "out/skip.txt"},
			[]string{"info: out/{one,skip}.t[xy]t: found 2 matching artifact files and directories"}},
		{"absolute", []string{root + "/out/sub"}, []string{root + "/out/sub/*.log"}, []string{"out/sub"},
			[]string{"info: " + root + "/out/sub: found 1 matching artifact files and directories", "info: " + root + "/out/sub/*.log: excluded 1 files"}},
		{"an excluded directory is not what is below it", []string{"out/sub"}, []string{"out/sub"}, []string{"out/sub/two.log"},
			[]string{"info: out/sub: found 1 matching artifact files and directories", "info: out/sub: excluded 1 files"}},
		{"outside", []string{"../" + above + "x", "/etc/passwd", "out/../../*"}, nil, nil, []string{
			"warning: processPath: artifact path is not a subpath of project directory: ../" + above + "x",
			"warning: processPath: artifact path is not a subpath of project directory: /etc/passwd",
			"warning: processPath: artifact path is not a subpath of project directory: out/../../*"}},
		{"there and back", []string{"../" + above + "/untracked.txt"}, nil, []string{"untracked.txt"},
			[]string{"info: ../" + above + "/untracked.txt: found 1 matching artifact files and directories"}},
		{"a bad glob", []string{"out/[z"}, nil, nil, []string{"warning: out/[z: syntax error in pattern"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var said notes
			got, err := archive.Select(archive.Selection{Tree: root, Paths: tt.paths, Exclude: tt.exclude}, said.say)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, names(got)); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff(tt.said, []string(said)); d != "" {
				t.Error(d)
			}
		})
	}
}

// The recording artifacts-untracked: the README is tracked, and a name that git
// would quote is one of the six.
func TestUntracked(t *testing.T) {
	root := project(t)
	if err := os.Rename(filepath.Join(root, "untracked.txt"), filepath.Join(root, "un\ntracked \xff\"")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{"init -q .", "add README.md"} {
		cmd := exec.Command("git", strings.Fields(c)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", c, err, out)
		}
	}
	var said notes
	got, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"README.md"}, Untracked: true}, said.say)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"out/link", "README.md", "out/one.txt", "out/skip.txt", "out/sub/two.log", "out/tool", "un\ntracked \xff\""}
	if d := cmp.Diff(want, names(got)); d != "" {
		t.Error(d)
	}
	if !slices.Contains(said, "info: untracked: found 6 files") {
		t.Errorf("%q", said)
	}

	said = nil
	plain := t.TempDir()
	t.Setenv("GIT_CEILING_DIRECTORIES", filepath.Dir(plain))
	if got, err := archive.Select(archive.Selection{Tree: plain, Untracked: true}, said.say); err != nil || len(got) > 0 || len(said) != 1 || !strings.HasPrefix(said[0], "warning: untracked: ") {
		t.Errorf("no repository: %v, %v, %q", got, err, said)
	}
}

// pack is the stream of everything in root.
func pack(t *testing.T, root string) []byte {
	t.Helper()
	var said notes
	entries, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"."}}, said.say)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := archive.Write(&b, root, entries, said.say); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// tree tells all that is below a directory.
func tree(t *testing.T, root string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		fi, err := d.Info()
		if err != nil || rel == "." {
			return err
		}
		line := fmt.Sprintf("%q %v %d", rel, fi.Mode(), fi.ModTime().Unix())
		switch {
		case fi.Mode().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %q", b)
		case fi.Mode()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(path)
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

func TestRoundTrip(t *testing.T) {
	root := project(t)
	make1(t, root, "odd/a\nb", "newline", 0o644)
	make1(t, root, "odd/\xff\xfe", "no UTF-8", 0o444)
	make1(t, root, "odd/"+strings.Repeat("long", 60), strings.Repeat("x", 1<<20), 0o640)
	make1(t, root, "odd/empty", "", 0o4755)
	for _, to := range []string{"/etc/passwd", "../..", "nowhere", "\xff"} {
		if err := os.Symlink(to, filepath.Join(root, "odd", "to"+strings.ReplaceAll(to, "/", "_"))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(filepath.Join(root, "odd"), old, old); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(root, "odd"), 0o555); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(filepath.Join(root, "odd"), 0o755) })
	into := t.TempDir()
	make1(t, into, "out/one.txt", "an older one, longer", 0o600)
	if err := os.Symlink("/etc", filepath.Join(into, "out/tool")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("one.txt", filepath.Join(into, "emptyd")); err != nil {
		t.Fatal(err)
	}
	stream := pack(t, root)
	var said notes
	for range 2 { // and over itself
		if err := archive.Extract(bytes.NewReader(stream), into, archive.Limits{}, said.say); err != nil {
			t.Fatal(err)
		}
		os.Chmod(filepath.Join(into, "odd"), 0o755) // for who is not root
	}
	os.Chmod(filepath.Join(into, "odd"), 0o555)
	t.Cleanup(func() { os.Chmod(filepath.Join(into, "odd"), 0o755) })
	if d := cmp.Diff(tree(t, root), tree(t, into)); d != "" || len(said) > 0 {
		t.Errorf("%s\n%q", d, said)
	}
}

// hostile is a stream made by hand.
func hostile(t *testing.T, hs ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		h.Format = tar.FormatPAX
		if h.Typeflag == tar.TypeReg {
			h.Size = 2
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, "hi")
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// Nothing is made outside of the tree, by names or by links.
func TestNoEscape(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755} }
	for _, tt := range []struct {
		name  string
		in    func(outside string) []tar.Header
		fails bool
		notes int
	}{
		{"up", func(string) []tar.Header { return []tar.Header{file("../x"), file("a/../../x"), file("ok")} }, false, 2},
		{"absolute", func(o string) []tar.Header { return []tar.Header{file(o + "/x"), dir(o + "/d")} }, false, 2},
		{"through its own link", func(o string) []tar.Header { return []tar.Header{link("l", o), file("l/x")} }, true, 0},
		{"through a link up", func(string) []tar.Header { return []tar.Header{link("l", ".."), file("l/outside/x")} }, true, 0},
		{"through a link of the tree", func(string) []tar.Header { return []tar.Header{file("there/x")} }, true, 0},
		{"a directory over a link", func(o string) []tar.Header { return []tar.Header{link("l", o), dir("l"), file("l/x")} }, false, 0},
		{"a link over a directory", func(o string) []tar.Header { return []tar.Header{dir("l"), link("l", o)} }, false, 0},
		{"a file over a link", func(o string) []tar.Header { return []tar.Header{link("l", o+"/x"), file("l")} }, false, 0},
		{"a hard link", func(o string) []tar.Header {
			return []tar.Header{{Name: "h", Linkname: o + "/secret", Typeflag: tar.TypeLink}}
		}, false, 1},
		{"a device", func(string) []tar.Header {
			return []tar.Header{{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}
		}, false, 1},
		{"the tree itself", func(string) []tar.Header { return []tar.Header{dir("./"), file(".")} }, false, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			top := t.TempDir()
			outside, into := filepath.Join(top, "outside"), filepath.Join(top, "tree")
			make1(t, outside, "secret", "s", 0o600)
			if err := os.Mkdir(into, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(outside, filepath.Join(into, "there")); err != nil {
				t.Fatal(err)
			}
			before := tree(t, outside)
			var said notes
			err := archive.Extract(hostile(t, tt.in(outside)...), into, archive.Limits{}, said.say)
			if (err != nil) != tt.fails || len(said) != tt.notes {
				t.Errorf("%v, %q", err, said)
			}
			if d := cmp.Diff(before, tree(t, outside)); d != "" {
				t.Errorf("outside changed: %s", d)
			}
		})
	}
}

func TestBroken(t *testing.T) {
	root := project(t)
	stream := pack(t, root)
	var said notes
	for name, r := range map[string]io.Reader{
		"cut short": bytes.NewReader(stream[:len(stream)/2]),
		"no tar":    strings.NewReader(strings.Repeat("no tar ", 1000)),
	} {
		if err := archive.Extract(r, t.TempDir(), archive.Limits{}, said.say); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for _, l := range []archive.Limits{{Bytes: 10}, {Entries: 3}} {
		if err := archive.Extract(bytes.NewReader(stream), t.TempDir(), l, said.say); !errors.Is(err, archive.ErrTooLarge) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	// An unreadable stream after the tar is an error: its writer did not end well.
	bad := io.MultiReader(bytes.NewReader(stream), iotestErr{})
	if err := archive.Extract(bad, t.TempDir(), archive.Limits{}, said.say); err == nil {
		t.Error("an error at the end was lost")
	}
}

type iotestErr struct{}

// Read implements io.Reader.
func (iotestErr) Read([]byte) (int, error) { return 0, errors.New("broken") }

// What changes between the look and the read is told and harms nothing.
func TestChanging(t *testing.T) {
	root := t.TempDir()
	make1(t, root, "gone", "x", 0o644)
	make1(t, root, "link", "x", 0o644)
	make1(t, root, "longer", "12", 0o644)
	make1(t, root, "stays", "s", 0o644)
	if out, err := exec.Command("mkfifo", filepath.Join(root, "pipe")).CombinedOutput(); err != nil {
		t.Fatalf("mkfifo: %v %s", err, out)
	}
	var said notes
	entries, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"*"}}, said.say)
	if err != nil {
		t.Fatal(err)
	}
	os.Remove(filepath.Join(root, "gone"))
	os.Remove(filepath.Join(root, "link"))
	os.Symlink("/etc/passwd", filepath.Join(root, "link"))
	make1(t, root, "longer", "1234", 0o644)
	said = nil
	var b bytes.Buffer
	if err := archive.Write(&b, root, entries, said.say); err != nil {
		t.Fatal(err)
	}
	into := t.TempDir()
	if err := archive.Extract(&b, into, archive.Limits{}, said.say); err != nil {
		t.Fatal(err)
	}
	want := []string{fmt.Sprintf(`"longer" -rw-r--r-- %d "1234"`, old.Unix()), fmt.Sprintf(`"stays" -rw-r--r-- %d "s"`, old.Unix())}
	if d := cmp.Diff(want, tree(t, into)); d != "" {
		t.Error(d)
	}
	said1 := []string{"warning: gone: gone while it was being archived", "warning: link: gone while it was being archived"}
	if d := cmp.Diff(said1, []string(said)); d != "" {
		t.Error(d)
	}
}

func FuzzExtract(f *testing.F) {
	f.Add([]byte{})
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	w.WriteHeader(&tar.Header{Name: "l", Linkname: "..", Typeflag: tar.TypeSymlink})
	w.WriteHeader(&tar.Header{Name: "l/x", Typeflag: tar.TypeReg, Size: 1})
	w.Write([]byte("x"))
	w.Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		top := t.TempDir()
		into := filepath.Join(top, "tree")
		if err := os.Mkdir(into, 0o755); err != nil {
			t.Fatal(err)
		}
		archive.Extract(bytes.NewReader(data), into, archive.Limits{Bytes: 1 << 20, Entries: 100}, func(archive.Note) {})
		if ents, err := os.ReadDir(top); err != nil || len(ents) != 1 {
			t.Errorf("%v, %v: something is outside of the tree", ents, err)
		}
	})
}

// TestExcludeByName: a name that looks like a pattern excludes what has it.
func TestExcludeByName(t *testing.T) {
	root := t.TempDir()
	for _, n := range []string{"a[1].txt", "a1.txt", "b.txt"} {
		if err := os.WriteFile(filepath.Join(root, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var said notes
	got, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"*.txt"}, Exclude: []string{"a[1].txt"}}, said.say)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"b.txt"}, names(got)); d != "" {
		t.Error(d)
	}
}

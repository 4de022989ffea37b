package checkout_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"virtkit/core/checkout"
)

// manyFiles is how many files TestManyFiles has; the environment may say more.
const (
	manyFiles = 3_000
	manyEnv   = "VIRTKIT_TEST_FILES" // such as 200000
)

// A repository of many files, some of whose names are no text and some of which
// are symlinks out of it, is checked out, brought up to date, packed and swept.
func TestManyFiles(t *testing.T) {
	n := manyFiles
	if v := os.Getenv(manyEnv); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatalf("%s: %v", manyEnv, err)
		}
	}
	s, d := newServer(t), newDirs(t)
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	commit := func(text, from string) string {
		var in bytes.Buffer
		fmt.Fprintf(&in, "blob\nmark :1\ndata %d\n%s\nblob\nmark :2\ndata %d\n%s\ncommit refs/heads/main\ncommitter P <p@example.com> 1700000000 +0000\ndata 3\none\n%s",
			len(text), text, len(outside), outside, from)
		for i := range n {
			name, mode := fmt.Sprintf("d%03d/f%06d", i/1000, i), "100644 :1"
			switch i % 1000 {
			case 7:
				name = fmt.Sprintf("d%03d/new\nline", i/1000)
			case 8:
				name = fmt.Sprintf("d%03d/\xff\xfe\x80", i/1000)
			case 9:
				name, mode = fmt.Sprintf("d%03d/out", i/1000), "120000 :2"
			}
			fmt.Fprintf(&in, "M %s %s\n", mode, cQuote(name))
		}
		runGit(t, "", in.Bytes(), "--git-dir="+s.bare, "fast-import", "--quiet", "--force")
		sha := head(s)
		s.git("", "--git-dir="+s.bare, "update-ref", "refs/pipelines/500", sha)
		return sha
	}
	st := d.open(t)
	first := commit("one", "")
	done(t, st, s.job(first))
	tree := take(t, st, s.job(commit("two", "from "+first+"\n")))
	if !tree.Reused || tree.Mended != "" {
		t.Errorf("reused %v, mended %q", tree.Reused, tree.Mended)
	}
	for name, want := range map[string]string{"d000/f000000": "two", "d001/new\nline": "two", "d002/\xff\xfe\x80": "two", "d001/out": "precious"} {
		isFile(t, filepath.Join(tree.Path, name), want)
	}
	img := filepath.Join(t.TempDir(), "img")
	p, err := tree.Pack(t.Context(), img, "")
	if err != nil || p.Files < n {
		t.Fatalf("packed %d of %d files: %v", p.Files, n, err)
	}
	t.Logf("%d inodes, %d MiB packed in %v", p.Files, p.Bytes>>20, p.Took)
	if fsck, err := exec.LookPath("fsck.erofs"); err == nil {
		if out, err := exec.Command(fsck, img).CombinedOutput(); err != nil {
			t.Errorf("fsck.erofs: %v %s", err, out)
		}
	}
	tree.Close()
	r, err := st.Sweep(t.Context(), checkout.SweepOptions{Idle: 0, Sizes: true})
	if err != nil || len(r.Trees) != 1 || r.Bytes < int64(n)*3 || len(r.Kept) != 0 {
		t.Errorf("swept %+v, %v", r, err)
	}
	isFile(t, outside, "precious")
}

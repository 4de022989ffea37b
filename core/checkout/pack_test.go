package checkout_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The packed tree stands alone: all of the repository is in it, git finds
// nothing changed and reads no file to find that out, whatever their names.
func TestPack(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("needs fsck.erofs: apt-get install erofs-utils")
	}
	srv, d := newServer(t), newDirs(t)
	files := map[string]string{"f": "1", "run": "#!/bin/sh\n", "link": "->/etc/passwd", "up": "->../../..", "a\nb": "newline", "\xff\xfe": "no UTF-8", "sp ace": "s", "-d": "dash", "dir/\x01": "c"}
	s := d.open(t)
	done(t, s, srv.job(srv.commit(files)))
	sha := srv.commit(map[string]string{"f": "2"})
	tree := take(t, s, srv.job(sha))
	img := filepath.Join(t.TempDir(), "img")
	p, err := tree.Pack(t.Context(), img, "/builds/group/project.tmp/conf")
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(img); err != nil || fi.Size() != 1<<30 || p.Bytes >= 1<<20 || p.Files < len(files) {
		t.Errorf("the image: %v %v %+v", fi, err, p)
	}
	x := filepath.Join(t.TempDir(), "x")
	if out, err := exec.Command(fsck, "--extract="+x, img).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v %s", err, out)
	}
	files["f"] = "2"
	for name, data := range files {
		if to, ok := strings.CutPrefix(data, "->"); ok {
			if l, err := os.Readlink(filepath.Join(x, name)); err != nil || l != to {
				t.Errorf("%q leads to %q, %v", name, l, err)
			}
			continue
		}
		isFile(t, filepath.Join(x, name), data)
	}
	os.RemoveAll(d.root)
	os.RemoveAll(d.mirrors)
	if got := srv.git(x, "log", "-1", "--format=%H"); got != sha {
		t.Errorf("HEAD is %s", got)
	}
	if out := srv.git(x, "fsck", "--full"); strings.Contains(out, "missing") || strings.Contains(out, "broken") {
		t.Errorf("fsck: %s", out)
	}
	if got := srv.git(x, "config", "include.path"); got != "/builds/group/project.tmp/conf" {
		t.Errorf("include.path is %q", got)
	}
	if got := srv.git(x, "config", "remote.origin.url"); got != srv.URL {
		t.Errorf("the remote is %q", got)
	}
	// A file that git need not read is one whose content may be wrong.
	f := filepath.Join(x, "f")
	fi, err := os.Stat(f)
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(f, []byte("X"), 0o644)
	os.Chtimes(f, fi.ModTime(), fi.ModTime())
	if got := srv.git(x, "status", "--porcelain"); got != "" {
		t.Errorf("git status reads files: %q", got)
	}
	os.WriteFile(f, []byte("other"), 0o644)
	if got := srv.git(x, "status", "--porcelain"); got != "M f" && got != " M f" {
		t.Errorf("git status does not see a change: %q", got)
	}
}

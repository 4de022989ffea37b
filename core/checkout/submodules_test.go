package checkout_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/checkout"
	"virtkit/core/fault"
)

// beside adds a repository to a server, by its name there.
func (s *server) beside(name string) *server {
	s.t.Helper()
	o := &server{t: s.t, bare: filepath.Join(filepath.Dir(filepath.Dir(s.bare)), name), URL: strings.Replace(s.URL, "group/project.git", name, 1)}
	s.git("", "init", "-q", "--bare", "-b", "main", o.bare)
	return o
}

func module(name, path, url string) string {
	return "[submodule \"" + name + "\"]\n\tpath = " + path + "\n\turl = " + url + "\n"
}

// withModules is a repository of three levels.
type withModules struct {
	top, sub, nested *server
}

func newModules(t *testing.T) withModules {
	top := newServer(t)
	w := withModules{top, top.beside("group/sub.git"), top.beside("group/nested.git")}
	n := w.nested.commit(map[string]string{"nested.txt": "nested\n"})
	s := w.sub.commit(map[string]string{"sub.txt": "sub\n", ".gitmodules": module("nested", "nested", "../nested.git"), "nested": "@" + n})
	w.top.commit(map[string]string{"README": "one\n", "dir/f": "f", ".gitmodules": module("sub", "dir/sub", "../sub.git"), "dir/sub": "@" + s})
	return w
}

func head(s *server) string { return s.git("", "--git-dir="+s.bare, "rev-parse", "refs/heads/main") }

func (w withModules) job(recursive bool) checkout.Job {
	j := w.top.job(head(w.top))
	j.Submodules = &checkout.Submodules{Recursive: recursive, Depth: 20}
	return j
}

// unpack is a tree as a guest gets it, when the host's is gone.
func unpack(t *testing.T, tree *checkout.Tree) string {
	t.Helper()
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("needs fsck.erofs: apt-get install erofs-utils")
	}
	img := filepath.Join(t.TempDir(), "img")
	if _, err := tree.Pack(t.Context(), img, "/builds/group/project.tmp/conf"); err != nil {
		t.Fatal(err)
	}
	x := filepath.Join(t.TempDir(), "x")
	if out, err := exec.Command(fsck, "--extract="+x, img).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v %s", err, out)
	}
	return x
}

// The words are those of the recording git-submodules-recursive, with this
// server and these paths; what is packed stands alone.
func TestSubmodules(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		w, d := newModules(t), newDirs(t)
		s := d.open(t, change...)
		tree := done(t, s, w.job(true))
		sub, nested := head(w.sub), head(w.nested)
		base := strings.TrimSuffix(w.top.URL, "project.git")
		before := green("Fetching changes with git depth set to 20...") + "Initialized empty Git repository in /builds/group/project/.git/\n" +
			green("Created fresh repository.") + green("Checking out "+head(w.top)[:8]+" as detached HEAD (ref is main)...")
		update := green("Updating/initializing submodules recursively with git depth set to 20...")
		sync := "Synchronizing submodule url for 'dir/sub'\n"
		syncs := sync + "Synchronizing submodule url for 'dir/sub/nested'\n"
		enter := "Entering 'dir/sub'\nEntering 'dir/sub/nested'\n"
		end := green("Updated submodules") + syncs + enter + green("Configuring submodules to use parent git credentials...") + enter
		want := before + update +
			"Submodule 'sub' (" + base + "sub.git) registered for path 'dir/sub'\n" + sync +
			"Cloning into '/builds/group/project/dir/sub'...\nSubmodule path 'dir/sub': checked out '" + sub + "'\n" +
			"Submodule 'nested' (" + base + "nested.git) registered for path 'dir/sub/nested'\n" +
			"Cloning into '/builds/group/project/dir/sub/nested'...\nSubmodule path 'dir/sub/nested': checked out '" + nested + "'\n" + end
		if diff := cmp.Diff(want, string(tree.Trace)); diff != "" {
			t.Errorf("the first job's trace (-want +got):\n%s", diff)
		}

		// The second job finds them, and asks no server but for the project.
		w.top.sent.Store(0)
		for _, f := range []string{"dir/sub/left", "dir/sub/nested/left"} {
			os.WriteFile(filepath.Join(tree.Path, f), nil, 0o644)
		}
		os.WriteFile(filepath.Join(tree.Path, "dir/sub/sub.txt"), []byte("changed"), 0o644)
		held := take(t, s, w.job(true))
		want = strings.Replace(strings.Replace(before, "Initialized empty", "Reinitialized existing", 1), green("Created fresh repository."), "", 1) + update + syncs +
			"Entering 'dir/sub'\nRemoving left\nEntering 'dir/sub/nested'\nRemoving left\n" +
			"Entering 'dir/sub'\nHEAD is now at " + sub[:7] + " one\nEntering 'dir/sub/nested'\nHEAD is now at " + nested[:7] + " one\n" + end
		if diff := cmp.Diff(want, string(held.Trace)); diff != "" || !held.Reused {
			t.Errorf("the second job's trace (-want +got), reused %v, mended %q:\n%s", held.Reused, held.Mended, diff)
		}
		noSecrets(t, filepath.Dir(d.root))
		x := unpack(t, held)
		os.RemoveAll(d.root)
		os.RemoveAll(d.mirrors)
		isFile(t, filepath.Join(x, "dir/sub/sub.txt"), "sub\n")
		isFile(t, filepath.Join(x, "dir/sub/nested/nested.txt"), "nested\n")
		if got := w.top.git(x, "status", "--porcelain"); got != "" {
			t.Errorf("status: %q", got)
		}
		// Nothing of a submodule is read to find that out: its content may be wrong.
		f := filepath.Join(x, "dir/sub/sub.txt")
		fi, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		os.WriteFile(f, []byte("XXX\n"), 0o644)
		os.Chtimes(f, fi.ModTime(), fi.ModTime())
		if got := w.top.git(x, "status", "--porcelain"); got != "" {
			t.Errorf("git status reads files of a submodule: %q", got)
		}
		if got, want := w.top.git(x, "submodule", "status", "--recursive"), sub+" dir/sub (heads/main)\n "+nested+" dir/sub/nested (heads/main)"; got != want {
			t.Errorf("submodule status is\n%s\nwant\n%s", got, want)
		}
		for _, p := range []string{"", "dir/sub", "dir/sub/nested"} {
			if out := w.top.git(filepath.Join(x, p), "fsck", "--full"); strings.Contains(out, "missing") || strings.Contains(out, "broken") {
				t.Errorf("fsck of %q: %s", p, out)
			}
			if got := w.top.git(filepath.Join(x, p), "config", "include.path"); got != "/builds/group/project.tmp/conf" {
				t.Errorf("include.path of %q is %q", p, got)
			}
		}
		if got := w.top.git(x, "config", "submodule.sub.url"); got != base+"sub.git" {
			t.Errorf("submodule.sub.url is %q", got)
		}
	})
}

// What changes from job to job: commits, depth of the strategy, places, and
// that there are none.
func TestSubmodulesChange(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		w, d := newModules(t), newDirs(t)
		s := d.open(t, change...)
		tree := done(t, s, w.job(false))
		isFile(t, filepath.Join(tree.Path, "dir/sub/sub.txt"), "sub\n")
		isGone(t, filepath.Join(tree.Path, "dir/sub/nested/nested.txt"))
		if strings.Contains(string(tree.Trace), "nested") || !strings.Contains(string(tree.Trace), green("Updating/initializing submodules with git depth set to 20...")) {
			t.Errorf("normal: %s", tree.Trace)
		}

		two := w.sub.commit(map[string]string{"sub.txt": "two\n"})
		w.top.commit(map[string]string{"dir/sub": "@" + two})
		tree = done(t, s, w.job(true))
		isFile(t, filepath.Join(tree.Path, "dir/sub/sub.txt"), "two\n")
		isFile(t, filepath.Join(tree.Path, "dir/sub/nested/nested.txt"), "nested\n")
		if n := strings.Count(string(tree.Trace), "Cloning into"); n != 1 || !tree.Reused {
			t.Errorf("%d repositories were cloned, want the nested one alone:\n%s", n, tree.Trace)
		}

		// Another job of the slot wants none: their places are empty, and git
		// finds nothing amiss.
		j := w.job(true)
		j.Submodules = nil
		tree = done(t, s, j)
		isGone(t, filepath.Join(tree.Path, "dir/sub/sub.txt"))
		isGone(t, filepath.Join(tree.Path, ".git/modules"))
		if got := w.top.git(tree.Path, "status", "--porcelain"); got != "" || !tree.Reused {
			t.Errorf("status without submodules: %q, reused %v", got, tree.Reused)
		}
		done(t, s, w.job(true))

		// The submodule moves, and a file takes its place.
		w.top.commit(map[string]string{".gitmodules": module("sub", "moved", "../sub.git"), "moved": "@" + two, "dir/sub": "-", "dir/sub/plain": "p"})
		tree = done(t, s, w.job(true))
		isFile(t, filepath.Join(tree.Path, "moved/nested/nested.txt"), "nested\n")
		isFile(t, filepath.Join(tree.Path, "dir/sub/plain"), "p")
		isGone(t, filepath.Join(tree.Path, "dir/sub/sub.txt"))
		if got := w.top.git(tree.Path, "status", "--porcelain"); got != "" {
			t.Errorf("status after the move: %q", got)
		}

		// None are left in the repository.
		w.top.commit(map[string]string{".gitmodules": "-", "moved": "-"})
		tree = done(t, s, w.job(true))
		isGone(t, filepath.Join(tree.Path, "moved"))
		if es, _ := os.ReadDir(filepath.Join(tree.Path, ".git/modules")); len(es) != 0 {
			t.Errorf("repositories are left: %v", es)
		}
	})
}

func TestSubmodulePaths(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	n := head(w.nested)
	w.top.commit(map[string]string{".gitmodules": module("sub", "dir/sub", "../sub.git") + module("other", "other", "./../nested.git") + module("never", "never", "ssh://git@elsewhere.example/x.git") + "\tupdate = none\n",
		"other": "@" + n, "never": "@" + n})
	s := d.open(t)
	for _, tt := range []struct {
		paths      []string
		there, not string
	}{
		{[]string{"other"}, "other/nested.txt", "dir/sub/sub.txt"},
		{[]string{":(exclude)other"}, "dir/sub/sub.txt", "other/nested.txt"},
		{nil, "dir/sub/sub.txt", "never/nested.txt"},
	} {
		j := w.job(false)
		j.Fresh = true
		j.Submodules.Paths = tt.paths
		tree := done(t, s, j)
		if _, err := os.Stat(filepath.Join(tree.Path, tt.there)); err != nil {
			t.Errorf("%q: %v", tt.paths, err)
		}
		isGone(t, filepath.Join(tree.Path, tt.not))
	}
}

// How many commits of a submodule there are: the job's number, else what the
// repository recommends, else all.
func TestSubmoduleDepths(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		w, d := newModules(t), newDirs(t)
		s := d.open(t, change...)
		n := ""
		for i := range 4 {
			n = w.nested.commit(map[string]string{"f": fmt.Sprint(i)})
		}
		for _, tt := range []struct {
			shallow string
			depth   int
			want    string
		}{{"", 2, "2"}, {"", 0, "5"}, {"\tshallow = true\n", 0, "1"}, {"\tshallow = true\n", 3, "3"}} {
			w.top.commit(map[string]string{".gitmodules": module("m", "m", "../nested.git") + tt.shallow, "m": "@" + n, "dir/sub": "-"})
			j := w.job(false)
			j.Fresh, j.Submodules.Depth = true, tt.depth
			if got := w.top.git(filepath.Join(done(t, s, j).Path, "m"), "rev-list", "--count", "HEAD"); got != tt.want {
				t.Errorf("%q, depth %d: %s commits, want %s", tt.shallow, tt.depth, got, tt.want)
			}
		}
	})
}

// A submodule's objects are the mirror's: another slot's tree has none of its
// own, and the server is asked for what is new alone.
func TestSubmodulesAreBorrowed(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	big := make([]byte, 2<<20) // does not compress
	for i, x := 0, uint32(1); i < len(big); i++ {
		x = x*1664525 + 1013904223
		big[i] = byte(x >> 24)
	}
	w.top.commit(map[string]string{"dir/sub": "@" + w.sub.commit(map[string]string{"big": string(big)})})
	s := d.open(t)
	done(t, s, w.job(true))
	if n := w.top.sent.Swap(0); n < int64(len(big)) {
		t.Fatalf("the first job got %d bytes", n)
	}
	j := w.job(true)
	j.Slot = "tok-1"
	tree := done(t, s, j)
	if n := w.top.sent.Load(); n > 100<<10 {
		t.Errorf("the second slot got %d bytes of the server", n)
	}
	if n := taken(t, filepath.Join(tree.Path, ".git/modules")); n > 1<<20 {
		t.Errorf("the second slot's submodules have %d bytes of their own", n)
	}
	isFile(t, filepath.Join(tree.Path, "dir/sub/big"), string(big))
}

// That a mirror has a commit does not make its history this tree's: what another
// slot has fetched is fetched here as well, and all of it when it is wanted.
func TestSubmoduleOfAnotherSlot(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	s := d.open(t)
	at := func(slot, sha string, depth int) string {
		w.top.commit(map[string]string{"dir/sub": "@" + sha})
		j := w.job(false)
		j.Slot, j.Submodules.Depth = slot, depth
		return filepath.Join(done(t, s, j).Path, "dir/sub")
	}
	one := w.sub.commit(map[string]string{"f": "1"})
	at("tok-0", one, 1)
	for i := range 3 {
		one = w.sub.commit(map[string]string{"f": fmt.Sprint("more ", i)})
	}
	at("tok-1", one, 1) // into the mirror
	sub := at("tok-0", one, 1)
	if out := w.top.git(sub, "fsck", "--full"); strings.Contains(out, "missing") || strings.Contains(out, "broken") {
		t.Errorf("fsck: %s", out)
	}
	if n := w.top.git(sub, "rev-list", "--count", "HEAD"); n != "1" {
		t.Errorf("%s commits, want 1", n)
	}
	sub = at("tok-0", one, 0)
	if n := w.top.git(sub, "rev-list", "--count", "HEAD"); n != "5" {
		t.Errorf("%s commits once all are wanted, want 5", n)
	}
}

// Where a submodule is not the server's, the guest fetches: the host is under
// none of the job's rules. What git itself would not do, the job is told.
func TestSubmodulesRefused(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	s := d.open(t)
	n := head(w.nested)
	host := strings.TrimSuffix(w.top.URL, "/group/project.git")
	outside := t.TempDir()
	for name, tt := range map[string]struct {
		files map[string]string
		guest bool
		words string
	}{
		"elsewhere":   {map[string]string{".gitmodules": module("m", "m", "https://elsewhere.example/m.git"), "m": "@" + n}, true, `"m" comes from elsewhere`},
		"other port":  {map[string]string{".gitmodules": module("m", "m", "http://127.0.0.1:1/m.git"), "m": "@" + n}, true, "elsewhere"},
		"metadata":    {map[string]string{".gitmodules": module("m", "m", "http://169.254.169.254/x"), "m": "@" + n}, true, "elsewhere"},
		"ssh":         {map[string]string{".gitmodules": module("m", "m", "git@127.0.0.1:group/nested.git"), "m": "@" + n}, true, "elsewhere"},
		"file":        {map[string]string{".gitmodules": module("m", "m", "file://"+w.nested.bare), "m": "@" + n}, true, "elsewhere"},
		"ext":         {map[string]string{".gitmodules": module("m", "m", "ext::touch "+outside+"/ran"), "m": "@" + n}, true, "elsewhere"},
		"password":    {map[string]string{".gitmodules": module("m", "m", strings.Replace(host, "://", "://u:p@", 1)+"/group/nested.git"), "m": "@" + n}, true, "elsewhere"},
		"above":       {map[string]string{".gitmodules": module("m", "m", "../../../../elsewhere.example/m.git"), "m": "@" + n}, true, "elsewhere"},
		"flag":        {map[string]string{".gitmodules": module("m", "m", "--upload-pack=x"), "m": "@" + n}, false, "--upload-pack"},
		"name":        {map[string]string{".gitmodules": module("../../hooks", "m", "../nested.git"), "m": "@" + n}, false, "could lead out"},
		"in another":  {map[string]string{".gitmodules": module("a", "m", "../nested.git") + module("a/modules/b", "o", "../nested.git"), "m": "@" + n, "o": "@" + n}, false, "one in the other"},
		"command":     {map[string]string{".gitmodules": module("m", "m", "../nested.git") + "\tupdate = !touch " + outside + "/ran\n", "m": "@" + n}, false, "update ="},
		"no entry":    {map[string]string{".gitmodules": module("other", "other", "../nested.git"), "m": "@" + n}, false, `at "m" in .gitmodules`},
		"a symlink":   {map[string]string{".gitmodules": "->real", "real": module("m", "m", "../nested.git"), "m": "@" + n}, false, "'.gitmodules'"},
		"garbage":     {map[string]string{".gitmodules": "[submodule \"m\n", "m": "@" + n}, false, "config"},
		"no commit":   {map[string]string{".gitmodules": module("m", "m", "../nested.git"), "m": "@" + strings.Repeat("1", 40)}, false, strings.Repeat("1", 40)},
		"no such one": {map[string]string{".gitmodules": module("m", "m", "../nosuch.git"), "m": "@" + n}, false, "not found"},
	} {
		w.top.git("", "--git-dir="+w.top.bare, "update-ref", "-d", "refs/heads/main")
		w.top.commit(tt.files)
		_, err := s.Take(t.Context(), w.job(true), func(string) {})
		var g *checkout.GuestOnly
		if err == nil || errors.As(err, &g) != tt.guest || !strings.Contains(err.Error(), tt.words) || strings.Contains(err.Error(), token) {
			t.Errorf("%s: %v, want the guest %v, and %q", name, err, tt.guest, tt.words)
		}
		if !tt.guest && fault.KindOf(err) != fault.Unavailable {
			t.Errorf("%s is a %s", name, fault.KindOf(err))
		}
	}
	if es, _ := os.ReadDir(outside); len(es) != 0 {
		t.Errorf("a command of the repository ran: %v", es)
	}
	// The server's own by ssh, when the job asks for it.
	w.top.commit(map[string]string{".gitmodules": module("m", "m", "git@127.0.0.1:group/nested.git"), "m": "@" + n})
	j := w.job(true)
	j.Submodules.ForceHTTPS = true
	isFile(t, filepath.Join(done(t, s, j).Path, "m/nested.txt"), "nested\n")
}

// A repository that holds itself ends, and with a word that names where.
func TestSubmoduleOfItself(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	one := w.nested.commit(map[string]string{"f": "1"})
	for range 40 {
		one = w.nested.commit(map[string]string{".gitmodules": module("m", "m", "../nested.git"), "m": "@" + one})
	}
	w.top.commit(map[string]string{".gitmodules": module("m", "m", "../nested.git"), "m": "@" + one, "dir/sub": "-"})
	j := w.job(true)
	j.Submodules.Depth = 0
	_, err := d.open(t).Take(t.Context(), j, func(string) {})
	if fault.KindOf(err) != fault.JobFailed || !strings.Contains(err.Error(), "more than 32 deep") {
		t.Errorf("Take: %v", err)
	}
}

package checkout_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/checkout"
	"virtkit/core/fault"
)

// dirs are the places of a store below one directory.
type dirs struct{ root, mirrors string }

func newDirs(t *testing.T) dirs {
	d := t.TempDir()
	return dirs{filepath.Join(d, "checkouts"), filepath.Join(d, "mirrors")}
}

func (d dirs) open(t *testing.T, change ...func(*checkout.Options)) *checkout.Store {
	t.Helper()
	o := checkout.Options{Root: d.root, Mirrors: d.mirrors, Idle: time.Hour, MirrorIdle: 24 * time.Hour}
	for _, c := range change {
		c(&o)
	}
	s, err := checkout.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func noMirrors(o *checkout.Options) { o.Mirrors = "" }

func take(t *testing.T, s *checkout.Store, j checkout.Job) *checkout.Tree {
	t.Helper()
	tree, err := s.Take(t.Context(), j, func(l string) { t.Log(l) })
	if err != nil {
		t.Fatalf("Take: %v", err)
	}
	t.Cleanup(func() { tree.Close() })
	return tree
}

func done(t *testing.T, s *checkout.Store, j checkout.Job) checkout.Tree {
	t.Helper()
	tree := take(t, s, j)
	if err := tree.Close(); err != nil {
		t.Fatal(err)
	}
	return *tree
}

func isFile(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s is %q (%v), want %q", path, b, err, want)
	}
}

func isGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there (%v)", path, err)
	}
}

// green is a line as the runner's script writes it.
func green(s string) string { return "\x1b[32;1m" + s + "\x1b[0;m\n" }

// both runs a test with a mirror and without.
func both(t *testing.T, f func(t *testing.T, change ...func(*checkout.Options))) {
	t.Run("mirror", func(t *testing.T) { f(t) })
	t.Run("none", func(t *testing.T) { f(t, noMirrors) })
}

func TestFirstAndSecondJob(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		srv, d := newServer(t), newDirs(t)
		one := srv.commit(map[string]string{"README": "one\n", "run": "#!/bin/sh\n", "link": "->README", "gone": "x", ".gitignore": "*.tmp\n"})
		s := d.open(t, change...)
		tree := done(t, s, srv.job(one))
		want := green("Fetching changes with git depth set to 20...") +
			"Initialized empty Git repository in /builds/group/project/.git/\n" +
			green("Created fresh repository.") +
			green("Checking out "+one[:8]+" as detached HEAD (ref is main)...") +
			green("Skipping Git submodules setup")
		if string(tree.Trace) != want || tree.Reused {
			t.Errorf("the first job's trace is\n%s\nwant\n%s\nreused %v", tree.Trace, want, tree.Reused)
		}
		isFile(t, filepath.Join(tree.Path, "README"), "one\n")
		if fi, err := os.Stat(filepath.Join(tree.Path, "run")); err != nil || fi.Mode()&0o111 == 0 {
			t.Errorf("run is not executable: %v %v", fi, err)
		}
		if tree.Path != filepath.Join(d.root, "tok-0", "7-project") {
			t.Errorf("the tree is at %s", tree.Path)
		}
		two := srv.commit(map[string]string{"README": "two\n", "dir/new": "n"})
		for _, f := range []string{"left.over", "ignored.tmp"} {
			if err := os.WriteFile(filepath.Join(tree.Path, f), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		os.WriteFile(filepath.Join(tree.Path, "gone"), []byte("changed"), 0o644)
		tree = done(t, s, srv.job(two))
		want = green("Fetching changes with git depth set to 20...") +
			"Reinitialized existing Git repository in /builds/group/project/.git/\n" +
			green("Checking out "+two[:8]+" as detached HEAD (ref is main)...") +
			"Removing ignored.tmp\nRemoving left.over\n" +
			green("Skipping Git submodules setup")
		if string(tree.Trace) != want || !tree.Reused || tree.Mended != "" {
			t.Errorf("the second job's trace is\n%s\nwant\n%s\nreused %v, mended %q", tree.Trace, want, tree.Reused, tree.Mended)
		}
		isFile(t, filepath.Join(tree.Path, "README"), "two\n")
		isFile(t, filepath.Join(tree.Path, "gone"), "x")
		isGone(t, filepath.Join(tree.Path, "left.over"))
		if head := srv.git(tree.Path, "rev-parse", "HEAD"); head != two {
			t.Errorf("HEAD is %s, want %s", head, two)
		}
		noSecrets(t, filepath.Dir(d.root))
	})
}

// noSecrets looks for the token in every file that was left.
func noSecrets(t *testing.T, dir string) {
	t.Helper()
	filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), token) {
			t.Errorf("the token is in %s", p)
		}
		return nil
	})
}

func TestStrategies(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	one := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	first := done(t, s, srv.job(one))
	os.WriteFile(filepath.Join(first.Path, "kept"), nil, 0o644)

	j := srv.job(one)
	j.CleanFlags = []string{"-ffdx", "-e", "kept"}
	if tree := done(t, s, j); strings.Contains(string(tree.Trace), "Removing") {
		t.Errorf("GIT_CLEAN_FLAGS: %s", tree.Trace)
	}
	isFile(t, filepath.Join(first.Path, "kept"), "")

	j.CleanFlags = nil
	os.WriteFile(filepath.Join(first.Path, "more"), nil, 0o644)
	done(t, s, j)
	isFile(t, filepath.Join(first.Path, "more"), "")

	two := srv.commit(map[string]string{"f": "2"})
	j = srv.job(two)
	j.NoCheckout = true
	if tree := done(t, s, j); !strings.Contains(string(tree.Trace), green("Skipping Git checkout")) {
		t.Errorf("GIT_CHECKOUT=false: %s", tree.Trace)
	}
	isFile(t, filepath.Join(first.Path, "f"), "1")
	if got := srv.git(first.Path, "rev-parse", "refs/remotes/origin/main"); got != two {
		t.Errorf("GIT_CHECKOUT=false fetched %s, want %s", got, two)
	}

	j = srv.job(two)
	j.Fresh = true
	if tree := done(t, s, j); tree.Reused || !strings.Contains(string(tree.Trace), "Initialized empty") {
		t.Errorf("GIT_STRATEGY=clone: reused %v\n%s", tree.Reused, tree.Trace)
	}
	isGone(t, filepath.Join(first.Path, "kept"))

	other := srv.job(two)
	other.URL = strings.Replace(other.URL, "127.0.0.1", "localhost", 1)
	if tree := done(t, s, other); tree.Reused || tree.Mended != "it is of another repository" {
		t.Errorf("another URL: reused %v (%s)", tree.Reused, tree.Mended)
	}
}

func TestDepths(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		srv, d := newServer(t), newDirs(t)
		sha := ""
		for i := range 4 {
			sha = srv.commit(map[string]string{"f": fmt.Sprint(i)})
		}
		s := d.open(t, change...)
		for _, c := range []struct{ depth, want int }{{2, 2}, {0, 4}, {3, 3}} {
			j := srv.job(sha)
			j.Depth = c.depth
			tree := done(t, s, j)
			if n := srv.git(tree.Path, "rev-list", "--count", "HEAD"); n != fmt.Sprint(c.want) {
				t.Errorf("depth %d: %s commits, want %d", c.depth, n, c.want)
			}
			if out := srv.git(tree.Path, "fsck"); strings.Contains(out, "missing") {
				t.Errorf("depth %d: %s", c.depth, out)
			}
		}
	})
}

// A mirror without the whole history has the beginnings of many pipelines: a tree
// that borrows from it meets all of them, and has its own depth.
func TestShallowMirror(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		srv, d := newServer(t), newDirs(t)
		s := d.open(t, change...)
		for i := range 6 {
			sha := ""
			for k := range 3 {
				sha = srv.commit(map[string]string{"f": fmt.Sprint(i, k)})
			}
			pipeline := fmt.Sprint("refs/pipelines/", 501+i)
			srv.git("", "--git-dir="+srv.bare, "update-ref", pipeline, sha)
			for _, depth := range []int{1, 2, 0}[:2+i/5] {
				j := srv.job(sha)
				j.Depth, j.Slot = depth, fmt.Sprint("tok-", i%4)
				j.Refspecs[0] = "+" + pipeline + ":" + pipeline
				tree := done(t, s, j)
				want := depth
				if depth == 0 {
					want = 18
				}
				if n := srv.git(tree.Path, "rev-list", "--count", "HEAD"); n != fmt.Sprint(want) {
					t.Errorf("pipeline %d, depth %d: %s commits", i, depth, n)
				}
				if out := srv.git(tree.Path, "fsck", "--full"); strings.Contains(out, "missing") || strings.Contains(out, "broken") {
					t.Errorf("pipeline %d, depth %d: %s", i, depth, out)
				}
			}
		}
	})
}

// The second slot of a repository fetches from the server what is new alone.
func TestMirrorIsShared(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	big := make([]byte, 3<<20) // does not compress
	x := uint32(1)
	for i := range big {
		x = x*1664525 + 1013904223
		big[i] = byte(x >> 24)
	}
	one := srv.commit(map[string]string{"big": string(big)})
	s := d.open(t)
	done(t, s, srv.job(one))
	first := srv.sent.Swap(0)
	if first < int64(len(big)) {
		t.Fatalf("the first job got %d bytes", first)
	}
	two := srv.commit(map[string]string{"small": "s"})
	j := srv.job(two)
	j.Slot = "tok-1"
	tree := done(t, s, j)
	if n := srv.sent.Load(); n > 100<<10 || !tree.Fetched {
		t.Errorf("the second slot got %d bytes of the server (mirror known: %v), want the new commit alone", n, tree.Fetched)
	}
	isFile(t, filepath.Join(tree.Path, "small"), "s")
	isFile(t, filepath.Join(tree.Path, "big"), string(big))
	if n := taken(t, filepath.Join(tree.Path, ".git")); n > 1<<20 {
		t.Errorf("the second tree's repository has %d bytes of its own", n)
	}
}

func taken(t *testing.T, dir string) (n int64) {
	filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			fi, _ := e.Info()
			n += fi.Size()
		}
		return err
	})
	return n
}

func TestManyAtOnce(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	sha := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			j := srv.job(sha)
			j.Slot = fmt.Sprintf("tok-%d", i/2) // two jobs each meet in one slot
			tree, err := s.Take(context.Background(), j, func(string) {})
			if err != nil {
				t.Error(err)
				return
			}
			isFile(t, filepath.Join(tree.Path, "f"), "1")
			tree.Close()
		})
	}
	wg.Wait()
	// A slot whose tree is held gives its next job another one.
	held := take(t, s, srv.job(sha))
	next := take(t, s, srv.job(sha))
	if held.Path == next.Path || filepath.Base(filepath.Dir(next.Path)) != "tok-0+1" {
		t.Errorf("the trees are %s and %s", held.Path, next.Path)
	}
}

// Nothing in a tree or a mirror that somebody else has written is obeyed.
func TestHostileTree(t *testing.T) {
	both(t, func(t *testing.T, change ...func(*checkout.Options)) {
		srv, d := newServer(t), newDirs(t)
		canary := filepath.Join(t.TempDir(), "ran")
		evil := "#!/bin/sh\ntouch " + canary + "\n"
		one := srv.commit(map[string]string{"f": "1", ".gitattributes": "* filter=evil diff=evil merge=evil\n", "evil.sh": evil})
		s := d.open(t, change...)
		tree := done(t, s, srv.job(one))
		conf := fmt.Sprintf("[core]\n\tfsmonitor = %[1]s\n\thooksPath = %[2]s\n\tsshCommand = %[1]s\n\tworktree = /\n\tgitProxy = %[1]s\n\tpager = %[1]s\n[filter \"evil\"]\n\tclean = %[1]s\n\tsmudge = %[1]s\n\tprocess = %[1]s\n\trequired = true\n"+
			"[credential]\n\thelper = !%[1]s\n[remote \"origin\"]\n\turl = ext::%[1]s\n\tuploadpack = %[1]s\n\tvcs = evil\n[url \"ext::%[1]s #\"]\n\tinsteadOf = http\n[uploadpack]\n\tpackObjectsHook = %[1]s\n[gpg]\n\tprogram = %[1]s\n",
			filepath.Join(tree.Path, "evil.sh"), filepath.Join(tree.Path, "h"))
		places := []string{filepath.Join(tree.Path, ".git")}
		if m, _ := filepath.Glob(d.mirrors + "/*.git"); len(m) == 1 {
			places = append(places, m[0])
		}
		for _, g := range places {
			for _, dir := range []string{filepath.Join(g, "hooks"), filepath.Join(tree.Path, "h"), filepath.Join(g, "info")} {
				os.MkdirAll(dir, 0o755)
				for _, h := range []string{"post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc", "fsmonitor-watchman", "post-update"} {
					os.WriteFile(filepath.Join(dir, h), []byte(evil), 0o755)
				}
			}
			for n, b := range map[string]string{"config": conf, "config.worktree": conf, "commondir": "/nonexistent\n", "info/attributes": "* filter=evil\n",
				"objects/info/alternates": "/nonexistent\n", "index.lock": "", "HEAD.lock": "", "shallow.lock": "", "refs/heads/x.lock": ""} {
				os.MkdirAll(filepath.Dir(filepath.Join(g, n)), 0o755)
				if err := os.WriteFile(filepath.Join(g, n), []byte(b), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		two := srv.commit(map[string]string{"f": "2"})
		tree = done(t, s, srv.job(two))
		isFile(t, filepath.Join(tree.Path, "f"), "2")
		isGone(t, canary)
		if !tree.Reused {
			t.Errorf("the tree was made anew: %s", tree.Mended)
		}
	})
}

// What leads out of the tree is content, not a path: whatever the repository
// has, nothing outside changes.
func TestLinksOutOfTheTree(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	outside := t.TempDir()
	precious := filepath.Join(outside, "precious")
	os.WriteFile(precious, []byte("p"), 0o644)
	one := srv.commit(map[string]string{"dir": "->" + outside, "file": "->" + precious, "up": "->../../../.."})
	s := d.open(t)
	done(t, s, srv.job(one))
	// The link becomes a directory with a file of the same name in it.
	srv.git("", "--git-dir="+srv.bare, "update-ref", "-d", "refs/heads/main")
	two := srv.commit(map[string]string{"dir/precious": "mine", "file": "mine"})
	tree := done(t, s, srv.job(two))
	isFile(t, filepath.Join(tree.Path, "dir/precious"), "mine")
	isFile(t, filepath.Join(tree.Path, "file"), "mine")
	isFile(t, precious, "p")
	// And back.
	done(t, s, srv.job(srv.commit(map[string]string{"dir/x": "y"})))
	j := srv.job(one)
	j.Refspecs = []string{"+" + one + ":refs/pipelines/1"}
	srv.git("", "--git-dir="+srv.bare, "config", "uploadpack.allowAnySHA1InWant", "true")
	tree = done(t, s, j)
	if l, err := os.Readlink(filepath.Join(tree.Path, "dir")); err != nil || l != outside {
		t.Errorf("dir is %q, %v", l, err)
	}
	isFile(t, precious, "p")
}

func TestRefused(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	sha := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	canary := filepath.Join(t.TempDir(), "ran")
	for name, c := range map[string]struct {
		change func(*checkout.Job)
		kind   fault.Kind
		words  string
	}{
		"upload-pack": {func(j *checkout.Job) { j.FetchFlags = []string{"--upload-pack=touch " + canary} }, fault.JobFailed, "GIT_FETCH_EXTRA_FLAGS"},
		"exec":        {func(j *checkout.Job) { j.FetchFlags = []string{"--quiet", "-c"} }, fault.JobFailed, "GIT_FETCH_EXTRA_FLAGS"},
		"clean path":  {func(j *checkout.Job) { j.CleanFlags = []string{"-ffdx", "/"} }, fault.JobFailed, "GIT_CLEAN_FLAGS"},
		"clean ask":   {func(j *checkout.Job) { j.CleanFlags = []string{"-i"} }, fault.JobFailed, "GIT_CLEAN_FLAGS"},
		"clean end":   {func(j *checkout.Job) { j.CleanFlags = []string{"-ffdx", "-e"} }, fault.JobFailed, "GIT_CLEAN_FLAGS"},
		"ext":         {func(j *checkout.Job) { j.URL = "ext::touch " + canary }, fault.System, "http"},
		"file":        {func(j *checkout.Job) { j.URL = "file://" + srv.bare }, fault.System, "http"},
		"flag as ref": {func(j *checkout.Job) { j.Refspecs = []string{"--upload-pack=touch " + canary} }, fault.System, "refspec"},
		"sha":         {func(j *checkout.Job) { j.SHA = "main" }, fault.System, "commit"},
		"slot":        {func(j *checkout.Job) { j.Slot = "../x" }, fault.System, "slot"},
		"project":     {func(j *checkout.Job) { j.Project = ".git" }, fault.System, "project"},
		"token":       {func(j *checkout.Job) { j.URL, j.User, j.Token = srv.URL, "u", "a\nb" }, fault.System, "token"},
	} {
		j := srv.job(sha)
		c.change(&j)
		_, err := s.Take(t.Context(), j, func(string) {})
		if fault.KindOf(err) != c.kind || !strings.Contains(fmt.Sprint(err), c.words) {
			t.Errorf("%s: %v (%s)", name, err, fault.KindOf(err))
		}
	}
	isGone(t, canary)
}

// A server that fails is told apart from a tree that does, says why, and costs
// nothing of what is there.
func TestServerFails(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	one := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	done(t, s, srv.job(one))
	for name, spoil := range map[string]func(*checkout.Job){
		"down":     func(*checkout.Job) { srv.down.Store(true) },
		"denied":   func(j *checkout.Job) { j.URL, j.User, j.Token = srv.URL, "gitlab-ci-token", "wrong-"+token },
		"no ref":   func(j *checkout.Job) { j.Refspecs = []string{"+refs/heads/nosuch:refs/remotes/origin/nosuch"} },
		"no such":  func(j *checkout.Job) { j.SHA = strings.Repeat("1", 40) },
		"no repos": func(j *checkout.Job) { j.URL = strings.Replace(j.URL, "project.git", "nosuch.git", 1) },
	} {
		j := srv.job(one)
		j.Attempts = 2
		spoil(&j)
		var lines []string
		_, err := s.Take(t.Context(), j, func(l string) { lines = append(lines, l) })
		if fault.KindOf(err) != fault.Unavailable || strings.Contains(fmt.Sprint(err), token) {
			t.Errorf("%s: %v (%s)", name, err, fault.KindOf(err))
		}
		if len(lines) != 1 || strings.Contains(lines[0], token) {
			t.Errorf("%s: the second attempt is told as %q", name, lines)
		}
		srv.down.Store(false)
	}
	two := srv.commit(map[string]string{"f": "2"})
	tree := done(t, s, srv.job(two))
	isFile(t, filepath.Join(tree.Path, "f"), "2")
	noSecrets(t, filepath.Dir(d.root))
}

// Trees and mirrors that are broken are made anew without a word to the job.
func TestMendsWhatIsBroken(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	one := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	tree := done(t, s, srv.job(one))
	mirrors, _ := filepath.Glob(d.mirrors + "/*.git")
	if len(mirrors) != 1 {
		t.Fatal(mirrors)
	}
	rec := filepath.Join(filepath.Dir(tree.Path), ".7-project.json")
	for name, spoil := range map[string]func(){
		"tree's HEAD":   func() { os.WriteFile(filepath.Join(tree.Path, ".git/HEAD"), []byte("garbage"), 0o644) },
		"tree's index":  func() { os.WriteFile(filepath.Join(tree.Path, ".git/index"), []byte("garbage"), 0o644) },
		"no repository": func() { os.RemoveAll(filepath.Join(tree.Path, ".git")) },
		"a file for .git": func() {
			os.RemoveAll(filepath.Join(tree.Path, ".git"))
			os.WriteFile(filepath.Join(tree.Path, ".git"), []byte("gitdir: /etc\n"), 0o644)
		},
		"no record":      func() { os.Remove(rec) },
		"garbage record": func() { os.WriteFile(rec, []byte("{"), 0o600) },
		"another record": func() { os.WriteFile(rec, []byte(`{"schema":"vk.checkout/9"}`), 0o600) },
		"another dir": func() {
			os.Rename(tree.Path, tree.Path+"-x")
			os.Mkdir(tree.Path, 0o755)
			os.RemoveAll(tree.Path + "-x")
		},
		"a symlink":        func() { os.RemoveAll(tree.Path); os.Symlink("/etc", tree.Path) },
		"mirror's objects": func() { os.RemoveAll(filepath.Join(mirrors[0], "objects", "pack")); emptyLoose(mirrors[0]) },
		"mirror's HEAD":    func() { os.Remove(filepath.Join(mirrors[0], "HEAD")) },
		"mirror's refs":    func() { os.WriteFile(filepath.Join(mirrors[0], "packed-refs"), []byte("garbage\n"), 0o644) },
		"no mirror":        func() { os.RemoveAll(mirrors[0]) },
	} {
		spoil()
		want := name
		sha := srv.commit(map[string]string{"f": want})
		tree := done(t, s, srv.job(sha))
		isFile(t, filepath.Join(tree.Path, "f"), want)
		if got := srv.git(tree.Path, "status", "--porcelain"); got != "" {
			t.Errorf("%s: status %q", name, got)
		}
		if out, err := exec.Command("git", "-C", tree.Path, "fsck", "--connectivity-only").CombinedOutput(); err != nil {
			t.Errorf("%s: fsck: %v %s", name, err, out)
		}
	}
	if fi, err := os.Stat("/etc"); err != nil || !fi.IsDir() {
		t.Fatal("/etc is gone")
	}
}

func emptyLoose(dir string) {
	loose, _ := filepath.Glob(dir + "/objects/??")
	for _, l := range loose {
		os.RemoveAll(l)
	}
}

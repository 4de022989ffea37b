package checkout

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// Tree is a checkout that is held: nobody else changes or removes it until
// Close.
type Tree struct {
	Path  string
	Trace []byte // what the runner's own script would have printed
	// Reused says that an earlier job's tree was brought up to date, Fetched
	// that the server was asked through a mirror that was there already.
	Reused, Fetched bool
	// Mended is why an earlier tree was not simply used; "" = it was.
	Mended string

	job    Job
	lock   *fsx.Lock
	mirror *mirror // nil = none
	// modules are its submodules, each before those within it.
	modules []*module
}

// Close lets the tree go. Safe when called twice.
func (t *Tree) Close() error {
	t.letMirrorsGo()
	return t.lock.Close()
}

// letMirrorsGo ends an attempt at the tree.
func (t *Tree) letMirrorsGo() {
	t.mirror.close()
	t.mirror = nil
	t.letModulesGo()
}

func (t *Tree) letModulesGo() {
	for _, m := range t.modules {
		m.mirror.close()
		m.mirror = nil
	}
	t.modules = nil
}

// spareSlots is how many trees of one slot and project may be in use at once:
// a slot's next job may begin while the last one's tree is still packed.
const spareSlots = 8

// Take brings the tree of the job's slot and project to the job's commit, or
// makes it, and returns it held. progress gets lines for the trace while it
// works. What a repository or its server do wrong is fault.Unavailable, what
// the guest has to fetch itself *GuestOnly.
func (s *Store) Take(ctx context.Context, j Job, progress func(line string)) (*Tree, error) {
	if err := j.check(); err != nil {
		return nil, err
	}
	bin, err := findGit()
	if err != nil {
		return nil, err
	}
	p, lock, err := s.lockSlot(&j)
	if err != nil {
		return nil, err
	}
	caFile, err := caFile(p.slot, j.CA)
	if err != nil {
		lock.Close()
		return nil, noRoom(p.slot, err)
	}
	if caFile != "" {
		defer os.Remove(caFile)
	}
	w := &work{s: s, j: &j, p: p, git: newGit(bin, &j, caFile), progress: progress}
	t := &Tree{Path: p.tree, job: j, lock: lock}
	for try := 1; ; try++ {
		if err = w.do(ctx, t); err == nil {
			return t, nil
		}
		t.letMirrorsGo()
		if try >= j.Attempts || ctx.Err() != nil || fault.KindOf(err) != fault.Unavailable || forGuests(err) {
			break
		}
		progress(fmt.Sprintf("fetching the sources: %v; trying again (%d of %d)", err, try+1, j.Attempts))
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(try) * time.Second):
		}
	}
	lock.Close()
	return nil, err
}

func forGuests(err error) bool {
	var g *GuestOnly
	return errors.As(err, &g)
}

// lockSlot finds a tree of the job's slot that nobody works in.
func (s *Store) lockSlot(j *Job) (place, *fsx.Lock, error) {
	for n := range spareSlots {
		slot := j.Slot
		if n > 0 {
			slot += "+" + strconv.Itoa(n)
		}
		p := s.place(slot, j.Project)
		if err := os.Mkdir(p.slot, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return p, nil, noRoom(s.o.Root, err)
		}
		if _, err := identityOf(p.slot); err != nil {
			return p, nil, fault.Newf(fault.System, "%s is no directory of checkouts", p.slot).Because(err).Hint("remove it; virtkit keeps nothing else there")
		}
		lock, err := fsx.TryLock(p.lock, false)
		if errors.Is(err, fs.ErrNotExist) { // a sweep took the empty slot away: once more
			if err = os.Mkdir(p.slot, 0o700); err == nil || errors.Is(err, fs.ErrExist) {
				lock, err = fsx.TryLock(p.lock, false)
			}
		}
		if err == nil {
			return p, lock, nil
		}
		if !errors.Is(err, fsx.ErrLocked) {
			return p, nil, noRoom(p.slot, err)
		}
	}
	return place{}, nil, fault.Newf(fault.Busy, "%d jobs use the checkouts of slot %s and project %s at once", spareSlots, j.Slot, j.Project).
		Hint("two runners with the same short token on one host? each job holds its tree only while it is fetched and packed")
}

// work is one attempt at a tree.
type work struct {
	s        *Store
	j        *Job
	p        place
	git      *git
	progress func(string)
	rec      record
	trace    bytes.Buffer
	// trusted says that the tree's submodules are as a job before left them.
	trusted bool
}

// do uses what is there when it can, and else begins anew.
func (w *work) do(ctx context.Context, t *Tree) error {
	// First what says nothing against the tree: whether the server gives the
	// commit, and whether the host may fetch all that it names.
	if w.s.o.Mirrors != "" {
		m, known, err := w.s.openMirror(ctx, w.git, w.j)
		if err != nil {
			return err
		}
		t.mirror, t.Fetched = m, known
		if err := w.askMirror(ctx, m); err != nil {
			return err
		}
	}
	why, err := w.known()
	if err != nil {
		return err
	}
	t.Mended = why
	if why == "" || why == unfinished {
		t.Reused = true
		err := w.update(ctx, t, false)
		if err == nil || ctx.Err() != nil || fault.KindOf(err) == fault.JobFailed || fault.KindOf(err) == fault.Busy || forGuests(err) {
			return err
		}
		// The tree may be at fault, or the server. A new tree tells: if that
		// fails too it was the server, and nothing is lost but this tree.
		w.s.o.Log.Warn("a checkout could not be brought up to date; cloning it anew", logx.Path, w.p.tree, logx.Err, err)
		t.letModulesGo()
		t.Mended = "it could not be brought up to date: " + err.Error()
	}
	t.Reused = false
	return w.update(ctx, t, true)
}

// unfinished is a tree that the process before died in.
const unfinished = "a job before was killed while it worked in it"

// known says why the tree that is there cannot be used as it is; "" = it can.
func (w *work) known() (why string, err error) {
	w.s.o.Hook("look")
	id, ierr := identityOf(w.p.tree)
	if errors.Is(ierr, fs.ErrNotExist) {
		return "there was none", nil
	}
	rec, rerr := readRecord(w.p.record)
	clean, _, _ := w.j.credentials()
	switch {
	case ierr != nil:
		return "it is no directory of ours: " + ierr.Error(), nil
	case errors.Is(rerr, fs.ErrNotExist):
		return "nothing is recorded of it", nil
	case rerr != nil:
		return rerr.Error(), nil
	case rec.Dir != id:
		return "it is not the directory that was recorded", nil
	case w.j.Fresh:
		return "GIT_STRATEGY is clone", nil
	case rec.URL != clean:
		return "it is of another repository", nil
	case rec.Format != w.j.Format:
		return "its objects have another format", nil
	}
	if fi, err := os.Lstat(filepath.Join(w.p.tree, ".git")); err != nil || !fi.IsDir() {
		return "it has no repository", nil
	}
	w.rec = rec
	w.trusted = rec.State == stateClean && rec.Boot == bootID()
	if rec.Boot != bootID() {
		// Its files may never have reached the disk: git looks at each again.
		if err := os.Remove(filepath.Join(w.p.tree, ".git", "index")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err.Error(), nil
		}
	}
	switch rec.State {
	case stateClean:
		return "", nil
	case stateBusy:
		return unfinished, nil
	}
	return "it was being removed", nil
}

// update does all of the work, in a new tree or in the one that is there.
func (w *work) update(ctx context.Context, t *Tree, anew bool) error {
	w.trace.Reset()
	if anew {
		w.trusted = false
		if err := w.makeNew(); err != nil {
			return noRoom(w.p.slot, err)
		}
	} else {
		w.rec.State = stateBusy
		if err := w.rec.write(w.p.record); err != nil {
			return noRoom(w.p.slot, err)
		}
	}
	w.sayFetching()
	steps := []struct {
		name string
		do   func() error
	}{
		{"init", func() error { return w.init(ctx, anew) }},
		{"settle", func() error { return w.settle(t) }},
		{"fetch", func() error { return w.fetch(ctx, t) }},
		{"checkout", func() error { return w.checkout(ctx) }},
		{"clean", func() error { return w.clean(ctx) }},
		{"submodules", func() error { return w.submodules(ctx, t) }},
		{"record", func() error { return w.finish(t.modulePaths()) }},
	}
	for _, s := range steps {
		w.s.o.Hook(s.name)
		if err := s.do(); err != nil {
			if forGuests(err) {
				w.leave()
			}
			return noRoom(w.p.tree, err)
		}
	}
	t.Trace = bytes.Clone(w.trace.Bytes())
	return nil
}

// finish records that nobody works in the tree any more.
func (w *work) finish(modules []string) error {
	w.rec.State, w.rec.Used, w.rec.SHA, w.rec.Modules = stateClean, w.s.o.Now(), w.j.SHA, modules
	return w.rec.write(w.p.record)
}

// leave makes a tree whose submodules are the guest's to fetch one without any:
// the slot's next job finds nothing to mend.
func (w *work) leave() {
	err := w.dropModules()
	if err == nil {
		err = w.finish(nil)
	}
	if err != nil { // that next job mends it
		w.s.o.Log.Warn("leaving a checkout to the guest", logx.Path, w.p.tree, logx.Err, err)
	}
}

// green is how the runner's script writes its own lines.
func (w *work) green(format string, a ...any) {
	fmt.Fprintf(&w.trace, "\x1b[32;1m"+format+"\x1b[0;m\n", a...)
}

func (w *work) sayFetching() {
	if w.j.Depth > 0 {
		w.green("Fetching changes with git depth set to %d...", w.j.Depth)
	} else {
		w.green("Fetching changes...")
	}
}

// makeNew removes what is there and makes an empty directory in its place,
// recorded before it has its name.
func (w *work) makeNew() error {
	w.s.o.Hook("remove")
	if err := w.dropTree(); err != nil {
		return err
	}
	w.s.o.Hook("make")
	tmp, err := os.MkdirTemp(w.p.slot, ".new-")
	if err != nil {
		return err
	}
	id, err := identityOf(tmp)
	if err != nil {
		return err
	}
	clean, _, _ := w.j.credentials()
	w.rec = record{Dir: id, State: stateBusy, URL: clean, Format: w.j.Format, Used: w.s.o.Now()}
	if err := w.rec.write(w.p.record); err != nil {
		return err
	}
	w.s.o.Hook("name")
	if err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, w.p.tree, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: tmp, New: w.p.tree, Err: err}
	}
	return os.Chmod(w.p.tree, 0o755)
}

// dropTree removes what is at the tree's place, and trees that never got their
// name. Both are ours alone: the lock is held, and the root is private.
func (w *work) dropTree() error {
	left, _ := filepath.Glob(filepath.Join(escapeGlob(w.p.slot), ".new-*"))
	for _, l := range left {
		// Another project's may be about to get its name.
		if fi, err := os.Lstat(l); err == nil && w.s.o.Now().Sub(fi.ModTime()) > time.Minute {
			if err := fsx.RemoveTree(l); err != nil {
				return err
			}
		}
	}
	return fsx.RemoveTree(w.p.tree)
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(s)
}

func (w *work) gitDir() string { return filepath.Join(w.p.tree, ".git") }

// in runs git in the tree, whose repository is named and not looked for.
func (w *work) in(ctx context.Context, protocols string, args ...string) error {
	return w.git.run(ctx, w.p.tree, protocols, &w.trace, append([]string{"--git-dir=" + w.gitDir(), "--work-tree=" + w.p.tree}, args...)...)
}

func (w *work) init(ctx context.Context, anew bool) error {
	verb := "Reinitialized existing"
	if anew {
		verb = "Initialized empty"
		args := []string{"init", "-q", "--template="}
		if w.j.Format != "" {
			args = append(args, "--object-format="+w.j.Format)
		}
		if err := w.git.run(ctx, w.p.tree, local, &w.trace, append(args, w.p.tree)...); err != nil {
			return err
		}
	}
	fmt.Fprintf(&w.trace, "%s Git repository in %s/.git/\n", verb, strings.TrimRight(w.j.Dir, "/"))
	if anew {
		w.green("Created fresh repository.")
	}
	return nil
}

// unwanted are names in a repository that lead git elsewhere or make it run
// something, and leavings of a git that was killed.
var unwanted = []string{"hooks", "info", "commondir", "gitdir", "config.worktree", "worktrees", "config.lock", "index.lock",
	"shallow.lock", "HEAD.lock", "packed-refs.lock", "FETCH_HEAD", "MERGE_HEAD", "rebase-merge", "rebase-apply", "objects/info/alternates", "objects/info/http-alternates"}

// settle makes the repository's own files say what we say.
func (w *work) settle(t *Tree) error {
	for _, n := range unwanted {
		if err := fsx.RemoveTree(filepath.Join(w.gitDir(), n)); err != nil {
			return err
		}
	}
	if w.j.Submodules == nil || !w.trusted {
		if err := w.dropModules(); err != nil {
			return err
		}
	}
	if err := removeLocks(filepath.Join(w.gitDir(), "refs")); err != nil {
		return err
	}
	clean, _, _ := w.j.credentials()
	if err := replaceFile(filepath.Join(w.gitDir(), "config"), []byte(repoConfig(clean, w.j.Format)), 0o644); err != nil {
		return err
	}
	if t.mirror == nil {
		return nil
	}
	info := filepath.Join(w.gitDir(), "objects", "info")
	if err := os.MkdirAll(info, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(info, "alternates"), []byte(t.mirror.objects()+"\n"), 0o644)
}

// removeLocks removes git's lock files of references.
func removeLocks(dir string) error {
	return filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(p, ".lock") {
			return os.Remove(p)
		}
		return err
	})
}

// repoConfig is a repository's config file.
func repoConfig(url, format string) string {
	version, ext := 0, ""
	if format == "sha256" {
		version, ext = 1, "[extensions]\n\tobjectFormat = sha256\n"
	}
	return fmt.Sprintf("[core]\n\trepositoryformatversion = %d\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n%s"+
		"[init]\n\tdefaultBranch = none\n[fetch]\n\trecurseSubmodules = false\n[credential]\n\tinteractive = never\n[gc]\n\tautoDetach = false\n"+
		"[remote \"origin\"]\n\turl = %s\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n", version, ext, quoteConfig(url))
}

func quoteConfig(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}

// fetch gets what the job names: from the server, or from the mirror that has
// just got it.
func (w *work) fetch(ctx context.Context, t *Tree) error {
	if t.mirror != nil {
		args := append([]string{"fetch", t.mirror.url(), "--no-recurse-submodules", "--no-auto-maintenance"}, w.j.Refspecs...)
		return t.mirror.out(ctx, w.gitDir(), func() error {
			return w.in(ctx, local, append(append(args, depthFlags(w.gitDir(), w.j.Depth)...), w.j.FetchFlags...)...)
		})
	}
	args := append([]string{"fetch", "origin", "--no-recurse-submodules", "--no-auto-maintenance"}, w.j.Refspecs...)
	err := w.in(ctx, remote, append(append(args, depthFlags(w.gitDir(), w.j.Depth)...), w.j.FetchFlags...)...)
	return unreachable(err)
}

// unreachable makes an error of what a server or a repository did.
func unreachable(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.New(fault.Unavailable, "fetching the sources").Because(err)
}

func depthFlags(gitDir string, depth int) []string {
	if depth > 0 {
		return []string{"--depth", strconv.Itoa(depth)}
	}
	if _, err := os.Stat(filepath.Join(gitDir, "shallow")); err == nil {
		return []string{"--unshallow"}
	}
	return nil
}

func (w *work) checkout(ctx context.Context) error {
	if w.j.NoCheckout {
		w.green("Skipping Git checkout")
		return nil
	}
	w.green("Checking out %.8s as detached HEAD (ref is %s)...", w.j.SHA, w.j.Ref)
	// A commit that the server has not given is the job's or the server's
	// fault; a full disk is ours, and noRoom tells.
	return unreachable(w.in(ctx, local, "checkout", "-f", "-q", "--no-recurse-submodules", w.j.SHA))
}

func (w *work) clean(ctx context.Context) error {
	if !w.j.NoCheckout && len(w.j.CleanFlags) > 0 {
		if err := w.in(ctx, local, append([]string{"clean"}, w.j.CleanFlags...)...); err != nil {
			return err
		}
	}
	return nil
}

// caFile writes a server's certificates where git finds them.
func caFile(dir, pem string) (string, error) {
	if pem == "" {
		return "", nil
	}
	f, err := os.CreateTemp(dir, ".ca-*")
	if err != nil {
		return "", err
	}
	_, err = f.WriteString(pem)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// noRoom makes a fault of a full filesystem, named with how full it is. What
// git says of it is words, so the filesystem is asked.
func noRoom(path string, err error) error {
	if err == nil {
		return nil
	}
	for path != "/" {
		if _, serr := os.Lstat(path); serr == nil {
			break
		}
		path = filepath.Dir(path)
	}
	var st unix.Statfs_t
	if serr := unix.Statfs(path, &st); serr != nil {
		return err
	}
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || st.Bavail*uint64(st.Bsize) < 1<<20 || st.Files > 0 && st.Ffree == 0
	if !full {
		return err
	}
	return fault.Newf(fault.Busy, "no room for the sources in %s: %d MiB of %d MiB and %d of %d inodes are free", path,
		st.Bavail*uint64(st.Bsize)>>20, st.Blocks*uint64(st.Bsize)>>20, st.Ffree, st.Files).Because(err).
		Hint("vk gc removes checkouts that nobody uses; [executor] checkout_cache_idle_secs sets after how long")
}

package checkout

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// populate brings the submodules of one repository to their commits, and those
// within them when the job wants that. It returns them all, each before those
// within it; the tree holds the mirrors of what it has begun with.
func (w *work) populate(ctx context.Context, t *Tree, all []*module) (done []*module, err error) {
	cloned := map[*module]bool{}
	for _, m := range all {
		if m.skip {
			fmt.Fprintf(&w.trace, "Skipping submodule '%s'\n", m.path)
			continue
		}
		w.s.o.Hook("submodule")
		t.modules = append(t.modules, m)
		known := slices.Contains(w.rec.Modules, m.path) && w.isOurs(m)
		if known && w.borrow(ctx, m) && w.done(ctx, m) {
			continue
		}
		m.mirror.close()
		m.mirror = nil
		if err := w.fetchModule(ctx, m, known); err != nil {
			return nil, err
		}
		cloned[m] = !known
	}
	for _, m := range all {
		if m.skip {
			continue
		}
		done = append(done, m)
		if cloned[m] || w.head(ctx, m) != m.sha {
			w.s.o.Hook("submodule-checkout")
			if err := w.inRepo(ctx, m.repo(), local, &w.trace, "checkout", "-f", "-q", "--no-recurse-submodules", "--detach", m.sha); err != nil {
				return nil, noRoom(w.p.tree, unreachable(err))
			}
			fmt.Fprintf(&w.trace, "Submodule path '%s': checked out '%s'\n", m.path, m.sha)
		}
		if !w.j.Submodules.Recursive {
			continue
		}
		if strings.Count(m.gitDir, "/modules/") >= tooDeep { // a repository may hold itself
			return nil, fault.Newf(fault.JobFailed, "submodules are more than %d deep in each other, at %s", tooDeep, m.path)
		}
		below, err := w.level(ctx, m.repo(), nil)
		if err != nil {
			return nil, err
		}
		for _, n := range below {
			if !slices.Contains(w.rec.Modules, n.path) {
				w.sayRegistered(n)
			}
		}
		within, err := w.populate(ctx, t, below)
		if err != nil {
			return nil, err
		}
		done = append(done, within...)
	}
	return done, nil
}

// tooDeep bounds how far submodules are within each other.
const tooDeep = 32

// configFile is what a submodule's repository is configured with; guest
// lines are added when it is packed.
func (m *module) configFile(format string) string {
	up := strings.Repeat("../", strings.Count(m.gitDir, "/")+1)
	return repoConfig(m.from, format) + "[core]\n\tworktree = " + quoteConfig(up+m.path) + "\n"
}

// isOurs says whether the submodule's repository is one that a job before has
// finished, of the same address.
func (w *work) isOurs(m *module) bool {
	b, err := os.ReadFile(filepath.Join(w.p.tree, m.gitDir, "config"))
	git, ok := w.linked(m.path)
	return err == nil && ok && git == m.gitDir && string(b) == m.configFile(w.j.Format)
}

func (w *work) has(ctx context.Context, m *module) bool {
	return w.inRepo(ctx, m.repo(), local, io.Discard, "cat-file", "-e", m.sha+"^{tree}") == nil
}

// done says whether a submodule needs nothing fetched. That its commit is there
// is not enough: a mirror that others fetch into may have it without what comes
// before it, which only a fetch makes a matter of this repository's.
func (w *work) done(ctx context.Context, m *module) bool {
	return w.head(ctx, m) == m.sha && (m.depth > 0 || len(w.deep(m)) == 0) && w.has(ctx, m)
}

func (w *work) deep(m *module) []string {
	return depthFlags(filepath.Join(w.p.tree, m.gitDir), m.depth)
}

func (w *work) head(ctx context.Context, m *module) string {
	var out strings.Builder
	if err := w.inRepo(ctx, m.repo(), local, &out, "rev-parse", "-q", "--verify", "HEAD"); err != nil {
		return ""
	}
	return strings.TrimSpace(out.String())
}

// mirrorJob is how a submodule's mirror is fetched.
func (w *work) mirrorJob(m *module, refspecs ...string) *Job {
	_, user, token := w.j.credentials()
	return &Job{URL: m.from, User: user, Token: token, Depth: m.depth, Format: w.j.Format, Refspecs: refspecs}
}

// borrow holds the mirror of a submodule that is there, and fetches nothing. A
// store without mirrors has none to hold.
func (w *work) borrow(ctx context.Context, m *module) bool {
	if w.s.o.Mirrors == "" {
		return true
	}
	dir := w.s.mirrorDir(m.from, w.j.Format)
	use, err := fsx.AcquireLock(ctx, useLock(dir), true)
	if err != nil {
		return false
	}
	m.mirror = &mirror{dir, use}
	_, err = os.Lstat(filepath.Join(dir, "HEAD"))
	return err == nil
}

// fetchModule gets a submodule's commit: through its mirror where there is one,
// into its repository when that is known, else into a new one, which has the
// server's own branch as a clone has.
func (w *work) fetchModule(ctx context.Context, m *module, known bool) (err error) {
	branch := ""
	if !known {
		if err := w.makeModule(ctx, m); err != nil {
			return err
		}
		if branch, err = w.serversBranch(ctx, m); err != nil {
			return err
		}
	}
	wants := []string{m.sha}
	if branch != "" {
		wants = append(wants, "+"+branch+":refs/remotes/origin/"+strings.TrimPrefix(branch, "refs/heads/"))
	}
	from, protocols := "origin", remote
	if w.s.o.Mirrors != "" {
		m.mirror, _, err = w.s.openMirror(ctx, w.git, w.mirrorJob(m, wants...))
		if err != nil && ctx.Err() == nil {
			// Not each server gives a commit by its name alone.
			m.mirror, _, err = w.s.openMirror(ctx, w.git, w.mirrorJob(m, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"))
		}
		if err != nil {
			return err
		}
		from, protocols = m.mirror.url(), local
		if err := w.alternates(m); err != nil {
			return err
		}
	}
	fetch := func(what ...string) error {
		args := append([]string{"fetch", "-q", "--no-recurse-submodules", "--no-auto-maintenance"}, w.deep(m)...)
		return w.inRepo(ctx, m.repo(), protocols, &w.trace, append(append(args, from), what...)...)
	}
	if m.mirror != nil {
		err = m.mirror.out(ctx, filepath.Join(w.p.tree, m.gitDir), func() error { return fetch(wants...) })
	} else {
		err = fetch(wants...)
	}
	if err != nil && ctx.Err() == nil && m.mirror == nil {
		if err = fetch(); err == nil && !w.has(ctx, m) {
			err = fmt.Errorf("the server has no commit %s of %s", m.sha, m.path)
		}
	}
	if err != nil {
		return unreachable(err)
	}
	if branch == "" {
		return nil
	}
	// Where the server's branch is gone meanwhile, there is none.
	name := strings.TrimPrefix(branch, "refs/heads/")
	for _, args := range [][]string{{"update-ref", branch, "refs/remotes/origin/" + name}, {"symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/" + name}} {
		if err := w.inRepo(ctx, m.repo(), local, io.Discard, args...); err != nil {
			return unreachable(err)
		}
	}
	return nil
}

// serversBranch is what a server's HEAD leads to, "" for what is no branch.
func (w *work) serversBranch(ctx context.Context, m *module) (string, error) {
	var out strings.Builder
	if err := w.inRepo(ctx, m.repo(), remote, &out, "ls-remote", "-q", "--symref", "origin", "HEAD"); err != nil {
		return "", unreachable(err)
	}
	for line := range strings.Lines(out.String()) {
		if to, ok := strings.CutPrefix(line, "ref: "); ok {
			to, _, _ = strings.Cut(to, "\t")
			if strings.HasPrefix(to, "refs/heads/") && refspecForm.MatchString(to) {
				return to, nil
			}
		}
	}
	return "", nil
}

// alternates says where a submodule's repository borrows from.
func (w *work) alternates(m *module) error {
	if m.mirror == nil {
		return nil
	}
	info := filepath.Join(w.p.tree, m.gitDir, "objects", "info")
	if err := os.MkdirAll(info, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(info, "alternates"), []byte(m.mirror.objects()+"\n"), 0o644)
}

// makeModule makes a submodule's repository and its empty work tree. The record
// names the place before there is anything in it.
func (w *work) makeModule(ctx context.Context, m *module) error {
	if !slices.Contains(w.rec.Modules, m.path) {
		w.rec.Modules = append(w.rec.Modules, m.path)
		if err := w.rec.write(w.p.record); err != nil {
			return noRoom(w.p.slot, err)
		}
	}
	if err := w.makePlace(m.path); err != nil {
		return err
	}
	gitDir, dir := filepath.Join(w.p.tree, m.gitDir), filepath.Join(w.p.tree, m.path)
	if err := fsx.RemoveTree(gitDir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(gitDir), 0o755); err != nil {
		return noRoom(w.p.tree, err)
	}
	fmt.Fprintf(&w.trace, "Cloning into '%s'...\n", path.Join(w.j.Dir, m.path))
	args := []string{"init", "-q", "--template=", "--separate-git-dir=" + gitDir}
	if w.j.Format != "" {
		args = append(args, "--object-format="+w.j.Format)
	}
	if err := w.git.run(ctx, w.p.tree, local, io.Discard, append(args, dir)...); err != nil {
		return noRoom(w.p.tree, unreachable(err))
	}
	w.s.o.Hook("submodule-made")
	link := strings.Repeat("../", strings.Count(m.path, "/")+1) + m.gitDir
	if err := replaceFile(filepath.Join(dir, ".git"), []byte("gitdir: "+link+"\n"), 0o644); err != nil {
		return noRoom(w.p.tree, err)
	}
	return noRoom(w.p.tree, replaceFile(filepath.Join(gitDir, "config"), []byte(m.configFile(w.j.Format)), 0o644))
}

// makePlace makes an empty directory for a submodule. Nothing on its way is a
// symlink: a repository within the tree is in the tree.
func (w *work) makePlace(p string) error {
	root, err := os.OpenRoot(w.p.tree)
	if err != nil {
		return err
	}
	defer root.Close()
	at := ""
	for part := range strings.SplitSeq(p, "/") {
		at = path.Join(at, part)
		if fi, err := root.Lstat(at); err == nil && !fi.IsDir() {
			return unreachable(fmt.Errorf("the submodule at %q: %q is no directory", p, at))
		}
	}
	if err := root.RemoveAll(p); err != nil {
		return err
	}
	return root.MkdirAll(p, 0o755)
}

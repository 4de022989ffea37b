package checkout

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// mirror is a mirror that is held: nothing in it goes until close. Others may
// fetch into it meanwhile, which only adds.
type mirror struct {
	dir  string
	lock *fsx.Lock
}

func (m *mirror) close() {
	if m != nil {
		m.lock.Close()
	}
}

func (m *mirror) objects() string { return filepath.Join(m.dir, "objects") }

// url is how git is told of it: as of a server, so that depths work.
func (m *mirror) url() string { return (&url.URL{Scheme: "file", Path: m.dir}).String() }

// sharedWait bounds how long a fetch out of a mirror waits for those into it.
const sharedWait = 15 * time.Second

// out runs a fetch out of the mirror into the repository at gitDir, which borrows
// from it. Where the mirror has no history before a commit, the repository is told
// the same: it meets all of the mirror's references, also those of other jobs, and
// would look for what is before them. Nobody fetches into the mirror meanwhile,
// unless it takes long: what comes in the meantime makes git look once more.
func (m *mirror) out(ctx context.Context, gitDir string, fetch func() error) error {
	wait, cancel := context.WithTimeout(ctx, sharedWait)
	defer cancel()
	if lock, err := fsx.AcquireLock(wait, fetchLock(m.dir), true); err == nil {
		defer lock.Close()
	} else if ctx.Err() != nil {
		return err
	}
	if err := shareShallow(gitDir, m.dir); err != nil {
		return noRoom(gitDir, err)
	}
	return fetch()
}

// shareShallow adds to a repository's shallow file what a mirror's has.
func shareShallow(gitDir, mirror string) error {
	theirs, err := os.ReadFile(filepath.Join(mirror, "shallow"))
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(theirs) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	ours, err := os.ReadFile(filepath.Join(gitDir, "shallow"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	all := slices.Concat(strings.Fields(string(ours)), strings.Fields(string(theirs)))
	slices.Sort(all)
	return replaceFile(filepath.Join(gitDir, "shallow"), []byte(strings.Join(slices.Compact(all), "\n")+"\n"), 0o644)
}

// mirrorName is the directory of a URL's mirror.
func mirrorName(clean string) string {
	base := "repository"
	if u, err := url.Parse(clean); err == nil {
		base = strings.TrimSuffix(path.Base(u.Path), ".git")
	}
	var b strings.Builder
	for _, c := range base {
		if c < 0x80 && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') && b.Len() < 40 {
			b.WriteRune(c)
		}
	}
	sum := sha256.Sum256([]byte(clean))
	return b.String() + "-" + hex.EncodeToString(sum[:8]) + ".git"
}

// mirrorDir is where the mirror of a URL is.
func (s *Store) mirrorDir(clean, format string) string {
	name := mirrorName(clean + "\x00" + format)
	if format == "" || format == "sha1" {
		name = mirrorName(clean)
	}
	return filepath.Join(s.o.Mirrors, name)
}

// fetchLock is held by who fetches into the mirror, useLock is shared by who
// borrows from it, and exclusive to who takes something out of it. The first is
// taken before the second.
func fetchLock(dir string) string { return lockBeside(dir, ".lock") }
func useLock(dir string) string   { return lockBeside(dir, ".use") }

func lockBeside(dir, suffix string) string {
	return filepath.Join(filepath.Dir(dir), "."+strings.TrimSuffix(filepath.Base(dir), ".git")+suffix)
}

// openMirror brings the mirror of the job's repository up to what the job
// names, or makes it, and returns it held. known says that it was there.
func (s *Store) openMirror(ctx context.Context, g *git, j *Job) (m *mirror, known bool, err error) {
	if err := os.MkdirAll(s.o.Mirrors, 0o700); err != nil {
		return nil, false, noRoom(s.o.Mirrors, err)
	}
	clean, _, _ := j.credentials()
	dir := s.mirrorDir(clean, j.Format)
	s.o.Hook("mirror")
	lock, err := fsx.AcquireLock(ctx, fetchLock(dir), false)
	if err != nil {
		return nil, false, fmt.Errorf("waiting for the mirror %s: %w", dir, err)
	}
	defer lock.Close()
	_, serr := os.Lstat(filepath.Join(dir, "HEAD"))
	known = serr == nil
	err = s.fetchMirror(ctx, g, j, dir, clean)
	if err != nil && known && ctx.Err() == nil && fault.KindOf(err) != fault.Busy {
		// The mirror or the server? A new one tells, and costs nothing when it
		// was the server.
		known = false
		err = s.replaceMirror(ctx, g, j, dir, clean, err)
	}
	if err != nil {
		return nil, false, err
	}
	s.packMirror(ctx, g, dir)
	use, err := fsx.AcquireLock(ctx, useLock(dir), true)
	if err != nil {
		return nil, false, fmt.Errorf("waiting for the mirror %s: %w", dir, err)
	}
	return &mirror{dir, use}, known, nil
}

// packMirror packs a mirror when there is much to pack, and drops what no
// reference has led to for two weeks: a tree that borrowed that is cloned anew.
// While somebody borrows from it, that waits for a later job.
func (s *Store) packMirror(ctx context.Context, g *git, dir string) {
	use, err := fsx.TryLock(useLock(dir), false)
	if err != nil {
		return
	}
	defer use.Close()
	s.o.Hook("mirror-gc")
	if err := g.run(ctx, s.o.Mirrors, local, io.Discard, "--git-dir="+dir, "-c", "gc.auto=6700", "gc", "--auto", "--quiet"); err != nil {
		s.o.Log.Warn("packing a mirror", logx.Path, dir, logx.Err, err)
	}
}

// borrowTime bounds how long to wait for those who borrow from a mirror.
const borrowTime = 2 * time.Minute

// replaceMirror makes a mirror anew beside one that could not be fetched into.
func (s *Store) replaceMirror(ctx context.Context, g *git, j *Job, dir, clean string, why error) error {
	tmp, err := os.MkdirTemp(s.o.Mirrors, ".new-")
	if err != nil {
		return noRoom(s.o.Mirrors, err)
	}
	defer fsx.RemoveTree(tmp)
	if err := s.fetchMirror(ctx, g, j, tmp, clean); err != nil {
		return err
	}
	s.o.Log.Warn("a mirror could not be fetched into and is made anew", logx.Path, dir, logx.Err, why)
	wctx, cancel := context.WithTimeout(ctx, borrowTime)
	defer cancel()
	use, err := fsx.AcquireLock(wctx, useLock(dir), false)
	if err != nil {
		return fault.Newf(fault.Busy, "the mirror %s is broken, and jobs borrow from it", dir).Because(err)
	}
	defer use.Close()
	if err := fsx.RemoveTree(dir); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// fetchMirror makes dir a bare repository when it is none, and fetches. The
// mirror's lock is held.
func (s *Store) fetchMirror(ctx context.Context, g *git, j *Job, dir, clean string) error {
	if _, err := os.Lstat(filepath.Join(dir, "HEAD")); err != nil {
		if err := fsx.RemoveTree(dir); err != nil {
			return err
		}
		args := []string{"init", "-q", "--bare", "--template="}
		if j.Format != "" {
			args = append(args, "--object-format="+j.Format)
		}
		if err := g.run(ctx, s.o.Mirrors, local, io.Discard, append(args, dir)...); err != nil {
			return noRoom(s.o.Mirrors, err)
		}
	}
	s.o.Hook("mirror-init")
	if err := settleMirror(dir, j.Format); err != nil {
		return noRoom(dir, err)
	}
	args := []string{"--git-dir=" + dir, "fetch", "--no-auto-maintenance", "--quiet", "--force", clean}
	for _, r := range j.Refspecs {
		args = append(args, mirrorRefspec(r))
	}
	// A mirror that has all of a history keeps all of it.
	_, serr := os.Stat(filepath.Join(dir, "shallow"))
	if shallow := serr == nil; shallow || j.Depth > 0 && empty(dir) {
		args = append(args, depthFlags(dir, j.Depth)...)
	}
	s.o.Hook("mirror-fetch")
	if err := g.run(ctx, s.o.Mirrors, remote, io.Discard, args...); err != nil {
		return noRoom(dir, unreachable(err))
	}
	now := s.o.Now()
	return os.Chtimes(dir, now, now)
}

// mirrorRefspec gives what a refspec fetches the name in the mirror that it has
// on the server, so that the same refspec fetches it from there.
func mirrorRefspec(r string) string {
	src, _, _ := strings.Cut(strings.TrimPrefix(r, "+"), ":")
	if shaForm.MatchString(src) {
		return "+" + src + ":refs/vk/" + src
	}
	if !strings.HasPrefix(src, "refs/") {
		return "+" + src + ":refs/heads/" + src
	}
	return "+" + src + ":" + src
}

// empty says whether a mirror has no object yet.
func empty(dir string) bool {
	refs, _ := filepath.Glob(filepath.Join(escapeGlob(dir), "refs", "*", "*"))
	_, err := os.Stat(filepath.Join(dir, "packed-refs"))
	return len(refs) == 0 && err != nil
}

// settleMirror makes the mirror's own files say what we say and removes what a
// git that was killed has left. Nobody else is in it.
func settleMirror(dir, format string) error {
	for _, n := range []string{"hooks", "info", "config.lock", "shallow.lock", "HEAD.lock", "packed-refs.lock", "gc.pid", "gc.pid.lock", "FETCH_HEAD", "objects/info/alternates"} {
		if err := fsx.RemoveTree(filepath.Join(dir, n)); err != nil {
			return err
		}
	}
	if err := removeLocks(filepath.Join(dir, "refs")); err != nil {
		return err
	}
	err := filepath.WalkDir(filepath.Join(dir, "objects"), func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if n := d.Name(); d.Type().IsRegular() && (strings.HasPrefix(n, "tmp_") || strings.HasSuffix(n, ".lock")) || d.IsDir() && strings.HasPrefix(n, "tmp_objdir") || d.IsDir() && strings.HasPrefix(n, "incoming-") {
			if err := fsx.RemoveTree(p); err != nil {
				return err
			}
			if d.IsDir() {
				return fs.SkipDir
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	version, ext := 0, ""
	if format == "sha256" {
		version, ext = 1, "[extensions]\n\tobjectFormat = sha256\n"
	}
	conf := fmt.Sprintf("[core]\n\trepositoryformatversion = %d\n\tbare = true\n%s[uploadpack]\n\tallowAnySHA1InWant = true\n[gc]\n\tautoDetach = false\n", version, ext)
	return replaceFile(filepath.Join(dir, "config"), []byte(conf), 0o644)
}

// Package template keeps the saved states of guests that have booted and wait
// for their first orders, so that later guests like them start from there.
//
// A template is the file <key>.state (0600) in the directory given to Open; the
// key says all that decides whether it fits (see machine.Restorer). It holds
// no secret: it was taken before the host told the guest anything but hello.
// Its modification time is when it was last used. A file being written is
// .new-*.tmp, locked by its writer; one without a writer is dead and swept. A
// template is replaced by nobody: it is made once and removed.
package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
)

// Most is how many templates are kept; making one more removes the one that
// was used longest ago.
const Most = 16

const (
	suffix    = ".state"
	newPrefix = ".new-"
	newSuffix = ".tmp"
	lockFile  = "lock" // held by who makes one
)

// Store is a directory of templates. It is safe for concurrent use, also by
// several processes.
type Store struct{ dir string }

// Open makes the directory of a store, 0700.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of guest templates: %w", err)
	}
	return &Store{dir}, nil
}

func (s *Store) path(key string) string { return filepath.Join(s.dir, key+suffix) }

// Get opens the template of key for reading and notes its use. fs.ErrNotExist
// when there is none.
func (s *Store) Get(key string) (*os.File, error) {
	f, err := os.Open(s.path(key))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	_ = os.Chtimes(f.Name(), now, now) // only its age for the next sweep
	return f, nil
}

// spare is the free space, in bytes, below which no template is made: jobs need
// it more.
const spare = 1 << 30

// Make writes the template of key, all or nothing, and reports whether it wrote
// one. It does not when there is one already, or when another process is making
// one, for which it does not wait.
func (s *Store) Make(ctx context.Context, key string, write func(context.Context, *os.File) error) (made bool, err error) {
	// One at a time on a host: the first guests of a burst would else all
	// write the same 60 MB.
	lock, err := fsx.TryLock(filepath.Join(s.dir, lockFile), false)
	if errors.Is(err, fsx.ErrLocked) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer lock.Close()
	if _, err := os.Lstat(s.path(key)); err == nil {
		return false, nil
	}
	if _, err := s.sweepNew(false); err != nil {
		return false, err
	}
	if err := s.thin(Most - 1); err != nil {
		return false, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(s.dir, &fs); err != nil {
		return false, fmt.Errorf("looking at the free space of %s: %w", s.dir, err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < spare {
		return false, fmt.Errorf("only %d MiB are free in %s: a template is kept where 1024 are", free>>20, s.dir)
	}
	f, err := os.CreateTemp(s.dir, newPrefix+"*"+newSuffix)
	if err != nil {
		return false, err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if err := write(ctx, f); err != nil {
		return false, err
	}
	// Without the file's own fsync a power cut could leave a name without its
	// bytes, and a guest that hangs on them.
	if err := f.Sync(); err != nil {
		return false, err
	}
	if err := os.Rename(f.Name(), s.path(key)); err != nil {
		return false, err
	}
	return true, fsx.SyncDir(s.dir)
}

// Drop removes the template of key; a guest that reads it still can.
func (s *Store) Drop(key string) error {
	if err := os.Remove(s.path(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// thin leaves the n templates used last.
func (s *Store) thin(n int) error {
	all, err := s.list()
	if err != nil {
		return err
	}
	for len(all) > n {
		if err := os.Remove(filepath.Join(s.dir, all[0].Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		all = all[1:]
	}
	return nil
}

// list is the templates, the one used longest ago first.
func (s *Store) list() ([]fs.FileInfo, error) {
	ents, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var out []fs.FileInfo
	for _, e := range ents {
		if !e.Type().IsRegular() || !strings.HasSuffix(e.Name(), suffix) {
			continue
		}
		if fi, err := e.Info(); err == nil {
			out = append(out, fi)
		}
	}
	slices.SortFunc(out, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	return out, nil
}

// Sweep removes templates not used for idle, and what interrupted makers have
// left. It returns how many bytes of disk that gives back; with dryRun, would.
func (s *Store) Sweep(idle time.Duration, dryRun bool) (freed int64, err error) {
	all, err := s.list()
	if err != nil {
		return 0, err
	}
	for _, fi := range all {
		if time.Since(fi.ModTime()) < idle || fsx.NotOurs(filepath.Join(s.dir, fi.Name())) != nil {
			continue
		}
		if !dryRun {
			if err := os.Remove(filepath.Join(s.dir, fi.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return freed, err
			}
		}
		freed += onDisk(fi)
	}
	lock, err := fsx.TryLock(filepath.Join(s.dir, lockFile), false)
	if errors.Is(err, fsx.ErrLocked) {
		return freed, nil // one is being made
	}
	if err != nil {
		return freed, err
	}
	defer lock.Close()
	n, err := s.sweepNew(dryRun)
	return freed + n, err
}

// sweepNew removes unfinished files. The lock is held, so they have no writer.
func (s *Store) sweepNew(dryRun bool) (freed int64, err error) {
	left, err := filepath.Glob(filepath.Join(s.dir, newPrefix+"*"+newSuffix))
	if err != nil {
		return 0, err
	}
	for _, p := range left {
		fi, err := os.Lstat(p)
		if err != nil {
			continue
		}
		if !dryRun {
			if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return freed, err
			}
		}
		freed += onDisk(fi)
	}
	return freed, nil
}

func onDisk(fi fs.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return fi.Size()
}

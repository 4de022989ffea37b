// Package buildcache bounds the local cache of image builds.
//
// Vocabulary: an entry is what one step of a build has produced, kept under the
// digest of what it was made from. Files below the cache's directory
// (<state_dir>/buildcache):
//
//	<64 hex digits>/   an entry, whole
//	.new-<anything>/   one being made
//	.dead-<digits>/    one being removed
//
// The maker of an entry holds flock(2) on its directory until it has its name,
// and who uses one shares that lock; the kernel drops it with them. The
// directory's time of change is that of the last use (Touch). Whatever else is
// there, is a symlink, a mount point or another user's, stays and is told.
package buildcache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
	"virtkit/core/lazyre"
)

// DefaultMax is the most that a cache holds where nothing is configured: a tenth
// of its filesystem of size bytes, at most 50 GiB.
func DefaultMax(size int64) int64 { return min(size/10, 50<<30) }

// Options say what goes.
type Options struct {
	Retention time.Duration // entries unused for so long go; 0 = whatever their age they stay
	// Max is the most bytes of disk that entries may take together, beyond which
	// the least recently used go; negative = no limit.
	Max    int64
	DryRun bool
	Now    func() time.Time // nil = time.Now
}

// Collected is what went.
type Collected struct {
	Entries []string `json:"entries"` // names
	Bytes   int64    `json:"bytes"`   // of disk space
	Kept    []string `json:"kept"`    // what is no entry of ours, with why; for people
}

const (
	newPrefix  = ".new-"
	deadPrefix = ".dead-"
	// newborn is how old what has no lock must be to count as abandoned: its
	// maker is between two system calls.
	newborn = time.Minute
)

var entryForm = lazyre.New(`^[0-9a-f]{64}$`)

type entry struct {
	name  string
	used  time.Time
	bytes int64
	seen  fs.FileInfo // of the directory that was looked at
}

// Touch records that an entry is used now.
func Touch(dir, name string) error {
	now := time.Now()
	return os.Chtimes(filepath.Join(dir, name), now, now)
}

// Collect removes what Options say from the cache in dir. One that is not there
// is empty.
func Collect(ctx context.Context, dir string, o Options) (Collected, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	r := Collected{Entries: []string{}, Kept: []string{}}
	ents, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("collecting the build cache: %w", err)
	}
	if err := fsx.NotOurs(dir); err != nil && !errors.Is(err, fsx.ErrMounted) { // a filesystem of its own may be its place
		r.Kept = append(r.Kept, err.Error())
		return r, nil
	}
	var all []entry
	total := int64(0)
	for _, e := range ents {
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
		path := filepath.Join(dir, e.Name())
		left := strings.HasPrefix(e.Name(), newPrefix) || strings.HasPrefix(e.Name(), deadPrefix)
		if !left && !entryForm.MatchString(e.Name()) {
			r.Kept = append(r.Kept, path+" is none of the build cache's")
			continue
		}
		err := fsx.NotOurs(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !e.IsDir() {
			err = fmt.Errorf("%s is no directory", path)
		}
		if err != nil {
			r.Kept = append(r.Kept, err.Error())
			continue
		}
		fi, err := e.Info()
		if err != nil {
			continue // it has gone
		}
		it := entry{e.Name(), fi.ModTime(), 0, fi}
		if it.bytes, _, err = fsx.Taken(path); err != nil {
			r.Kept = append(r.Kept, err.Error())
			continue
		}
		if left {
			if o.Now().Sub(it.used) >= newborn {
				r.drop(dir, it, o)
			}
			continue
		}
		total += it.bytes
		all = append(all, it)
	}
	slices.SortFunc(all, func(a, b entry) int { return a.used.Compare(b.used) })
	for _, it := range all {
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
		old := o.Retention > 0 && o.Now().Sub(it.used) >= o.Retention
		if !old && (o.Max < 0 || total <= o.Max) {
			continue
		}
		if r.drop(dir, it, o) {
			total -= it.bytes
			r.Entries = append(r.Entries, it.name)
		}
	}
	return r, nil
}

// drop removes a directory of the cache that nobody holds, and reports whether
// it went.
func (r *Collected) drop(dir string, it entry, o Options) bool {
	path := filepath.Join(dir, it.name)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false // it has gone
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if err != unix.EWOULDBLOCK {
			r.Kept = append(r.Kept, fmt.Sprintf("locking %s: %v", path, err))
		}
		return false
	}
	// It may have been used, or replaced, since it was looked at.
	now, err1 := os.Lstat(path)
	held, err2 := f.Stat()
	if err1 != nil || err2 != nil || !os.SameFile(now, held) || !os.SameFile(now, it.seen) || !now.ModTime().Equal(it.used) {
		return false
	}
	if !o.DryRun {
		dead := path
		if !strings.HasPrefix(it.name, ".") {
			// Half of an entry must not be taken for one.
			dead = filepath.Join(dir, fmt.Sprintf("%s%d", deadPrefix, time.Now().UnixNano()))
			if err := os.Rename(path, dead); err != nil {
				r.Kept = append(r.Kept, err.Error())
				return false
			}
		}
		if err := fsx.RemoveTree(dead); err != nil {
			r.Kept = append(r.Kept, err.Error())
			return false
		}
	}
	r.Bytes += it.bytes
	return true
}

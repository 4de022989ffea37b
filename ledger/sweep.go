package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
	"virtkit/core/supervise"
)

// DefaultRetention is how long a kept directory stays.
const DefaultRetention = 7 * 24 * time.Hour

// QuickSweep bounds the sweep that every command does that starts a guest.
const QuickSweep = 2 * time.Second

// newbornAge is how old a directory without a lock must be to count as
// abandoned: its maker is between two system calls.
const newbornAge = time.Minute

// SweepOptions bound a sweep.
type SweepOptions struct {
	// Retention is how long a kept directory stays after its guest's end;
	// 0 = DefaultRetention.
	Retention time.Duration
	// Now is the clock; nil = time.Now.
	Now func() time.Time
	// DryRun tells what would be removed and killed, and does neither.
	DryRun bool
}

// Swept is what a sweep did.
type Swept struct {
	Removed  []string // ids and staging names
	Killed   []int    // processes that had outlived their supervisor
	Skipped  []string // names that are not ours
	Problems []error  // each names its path
	Busy     bool     // another sweep runs; nothing was done
}

// Sweep removes what dead supervisors and launchers left. It never waits for
// a lock; ctx bounds it between two directories. What cannot be removed is
// reported in Problems and tried again by the next sweep.
func (j *Jobs) Sweep(ctx context.Context, o SweepOptions) (Swept, error) {
	if o.Retention <= 0 {
		o.Retention = DefaultRetention
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	var w Swept
	lock, err := fsx.TryLock(filepath.Join(j.dir, sweepName), false)
	if errors.Is(err, fsx.ErrLocked) {
		w.Busy = true
		return w, nil
	}
	if err != nil {
		return w, fmt.Errorf("sweeping jobs: %w", err)
	}
	defer lock.Close()
	ids, others, err := j.scan()
	if err != nil {
		return w, err
	}
	for _, n := range others {
		if ctx.Err() != nil {
			return w, context.Cause(ctx)
		}
		j.sweepOther(n, o, &w)
	}
	for _, id := range ids {
		if ctx.Err() != nil {
			return w, context.Cause(ctx)
		}
		j.sweepJob(ctx, id, o, &w)
	}
	return w, nil
}

// sweepOther removes a directory being made or removed whose process is gone.
func (j *Jobs) sweepOther(name string, o SweepOptions, w *Swept) {
	path := filepath.Join(j.dir, name)
	fi, err := os.Lstat(path)
	if err != nil {
		return
	}
	if fi.IsDir() && notOurs(path, w) {
		return
	}
	made, dead := strings.HasPrefix(name, supervise.NewPrefix), strings.HasPrefix(name, supervise.DeadPrefix)
	if !fi.IsDir() || !made && !dead {
		w.Skipped = append(w.Skipped, name)
		return
	}
	lock, err := tryExisting(path)
	switch {
	case errors.Is(err, fsx.ErrLocked):
		return
	case errors.Is(err, fs.ErrNotExist):
		if made && o.Now().Sub(fi.ModTime()) < newbornAge {
			return
		}
	case err != nil:
		w.Problems = append(w.Problems, err)
		return
	}
	defer lock.Close()
	j.remove(name, func() error { return fsx.RemoveTree(path) }, o, w)
}

// notOurs leaves a mount point and another user's directory alone, and says so.
func notOurs(path string, w *Swept) bool {
	err := fsx.NotOurs(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.Skipped = append(w.Skipped, filepath.Base(path))
	}
	return err != nil
}

// sweepJob removes a job directory whose lock is free and that nobody wants
// any more.
func (j *Jobs) sweepJob(ctx context.Context, id string, o SweepOptions, w *Swept) {
	dir := j.Path(id)
	fi, err := os.Lstat(dir)
	if err != nil || notOurs(dir, w) {
		return
	}
	lock, err := tryExisting(dir)
	switch {
	case errors.Is(err, fsx.ErrLocked):
		return
	case errors.Is(err, fs.ErrNotExist):
		// Not made by Make, which puts the lock there first.
		if !exists(filepath.Join(dir, supervise.SpecFile)) {
			w.Skipped = append(w.Skipped, id)
			return
		}
	case err != nil:
		w.Problems = append(w.Problems, err)
		return
	}
	defer lock.Close()
	leftover := supervise.KillLeftover
	if o.DryRun {
		leftover = supervise.Leftover
	}
	killed, err := leftover(ctx, dir)
	w.Killed = append(w.Killed, killed...)
	if err != nil {
		w.Problems = append(w.Problems, fmt.Errorf("%s: %w", dir, err))
		return
	}
	if wanted(dir, fi, o) {
		return
	}
	if !o.DryRun {
		if err := j.egress.keepOf(dir); err != nil {
			w.Problems = append(w.Problems, err)
		}
	}
	j.remove(id, func() error { return supervise.RemoveJobDir(dir) }, o, w)
}

// wanted tells whether somebody may still come for a dead job's directory.
func wanted(dir string, fi fs.FileInfo, o SweepOptions) bool {
	s, err := supervise.ReadSpec(dir)
	now := o.Now()
	if err != nil {
		// A directory of ours whose spec is damaged: kept as if it were to be.
		return now.Sub(fi.ModTime()) < o.Retention
	}
	if !s.Keep {
		return false
	}
	if s.Kind == "gitlab" {
		if s.Owner.PID != 0 && !s.Owner.Alive() {
			return false // no runner: no cleanup
		}
		if !s.Deadline.IsZero() && now.After(s.Deadline) {
			return false
		}
	}
	end := fi.ModTime()
	if st, err := supervise.ReadState(dir); err == nil && st.Since.After(end) {
		end = st.Since
	}
	return now.Sub(end) < o.Retention
}

func (j *Jobs) remove(name string, remove func() error, o SweepOptions, w *Swept) {
	if o.DryRun {
		w.Removed = append(w.Removed, name)
		return
	}
	if err := remove(); err != nil {
		w.Problems = append(w.Problems, err)
		return
	}
	w.Removed = append(w.Removed, name)
}

// tryExisting takes the lock in dir without waiting and without making it.
func tryExisting(dir string) (*fsx.Lock, error) {
	path := filepath.Join(dir, supervise.LockFile)
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			err = fsx.ErrLocked
		}
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return fsx.HeldLock(f), nil
}

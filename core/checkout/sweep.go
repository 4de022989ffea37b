package checkout

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
)

// Swept is what a sweep did.
type Swept struct {
	Trees   []string // removed, as slot/project
	Mirrors []string // removed, by name
	Bytes   int64    // they held
	Kept    []string // left, with why; for people
}

// SweepOptions say how far a sweep goes.
type SweepOptions struct {
	// Idle is how long an unused tree may stay; negative = as Options has it.
	Idle time.Duration
	// DryRun removes nothing.
	DryRun bool
	// Sizes measures what is removed.
	Sizes bool
	// TreesOnly leaves the mirrors alone.
	TreesOnly bool
}

// Sweep removes trees that nobody has used for the idle time, and what a killed
// process left of others. Only what a record says to be ours is removed, and
// only while it is the very directory that was recorded. What is in use stays,
// and so does what is no tree of ours: other users' files, mount points,
// symlinks.
func (s *Store) Sweep(ctx context.Context, o SweepOptions) (Swept, error) {
	if o.Idle < 0 {
		o.Idle = s.o.Idle
	}
	var r Swept
	var root unix.Stat_t
	if err := unix.Lstat(s.o.Root, &root); err != nil {
		return r, &os.PathError{Op: "stat", Path: s.o.Root, Err: err}
	}
	slots, err := os.ReadDir(s.o.Root)
	if err != nil {
		return r, err
	}
	for _, e := range slots {
		slot := filepath.Join(s.o.Root, e.Name())
		if why := foreign(slot, root.Dev); why != "" {
			r.Kept = append(r.Kept, slot+": "+why)
			continue
		}
		ents, err := os.ReadDir(slot)
		if err != nil {
			r.Kept = append(r.Kept, slot+": "+err.Error())
			continue
		}
		for _, f := range ents {
			if err := ctx.Err(); err != nil {
				return r, context.Cause(ctx)
			}
			name := f.Name()
			switch {
			case strings.HasPrefix(name, ".new-"):
				s.sweepUnnamed(&r, o, filepath.Join(slot, name), root.Dev)
			case strings.HasPrefix(name, ".") && strings.HasSuffix(name, ".json") && f.Type().IsRegular():
				s.sweepTree(&r, o, e.Name(), strings.TrimSuffix(name[1:], ".json"), root.Dev)
			}
		}
		if !o.DryRun {
			s.sweepSlot(slot)
		}
	}
	if s.o.Mirrors != "" && !o.TreesOnly {
		s.sweepMirrors(ctx, &r, o)
	}
	return r, nil
}

// foreign says why path is no directory of this user's on this filesystem; ""
// = it is one.
func foreign(path string, dev uint64) string {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err.Error()
	}
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return "it is a symlink"
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return "it is no directory"
	case st.Dev != dev:
		return "another filesystem is mounted there"
	case st.Uid != uint32(os.Geteuid()):
		return fmt.Sprintf("it belongs to user %d", st.Uid)
	}
	return ""
}

// sweepTree looks at the tree of one record.
func (s *Store) sweepTree(r *Swept, o SweepOptions, slot, project string, dev uint64) {
	p := s.place(slot, project)
	lock, err := fsx.TryLock(p.lock, false)
	if err != nil {
		if !errors.Is(err, fsx.ErrLocked) {
			r.Kept = append(r.Kept, p.tree+": "+err.Error())
		}
		return
	}
	defer lock.Close()
	rec, err := readRecord(p.record)
	if err != nil {
		r.Kept = append(r.Kept, p.tree+": "+err.Error())
		return
	}
	if age := s.o.Now().Sub(rec.Used); rec.State != stateGoing && age < o.Idle {
		return
	}
	id, err := identityOf(p.tree)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.forget(p, o.DryRun)
		return
	case err != nil:
		r.Kept = append(r.Kept, p.tree+": "+err.Error())
		return
	case id != rec.Dir:
		// Somebody has removed our tree, and this is not it.
		r.Kept = append(r.Kept, p.tree+": it is not the directory that was recorded")
		s.forget(p, o.DryRun)
		return
	}
	if why := foreign(p.tree, dev); why != "" {
		r.Kept = append(r.Kept, p.tree+": "+why)
		return
	}
	bytes := int64(0)
	if o.Sizes {
		bytes, _, _ = fsx.Taken(p.tree)
	}
	if !o.DryRun {
		rec.State = stateGoing
		if err := rec.write(p.record); err != nil && !errors.Is(err, unix.ENOSPC) { // on a full disk the removal is what helps
			r.Kept = append(r.Kept, p.tree+": "+err.Error())
			return
		}
		s.o.Hook("sweep")
		// Rechecked at the last moment: what was looked at may have been
		// replaced by who does not know of our lock.
		if again, err := identityOf(p.tree); err != nil || again != rec.Dir {
			r.Kept = append(r.Kept, p.tree+": it is not the directory that was recorded")
			return
		}
		if err := fsx.RemoveTree(p.tree); err != nil {
			r.Kept = append(r.Kept, p.tree+": "+err.Error())
			return
		}
		s.forget(p, false)
	}
	r.Trees = append(r.Trees, slot+"/"+project)
	r.Bytes += bytes
}

// forget removes the bookkeeping of a tree that is gone; its lock is held.
func (s *Store) forget(p place, dryRun bool) {
	if dryRun {
		return
	}
	os.Remove(p.record)
	os.Remove(p.lock)
}

// sweepUnnamed removes a tree that never got its name: its maker was killed.
func (s *Store) sweepUnnamed(r *Swept, o SweepOptions, path string, dev uint64) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || s.o.Now().Sub(time.Unix(st.Ctim.Sec, st.Ctim.Nsec)) < time.Minute {
		return
	}
	if why := foreign(path, dev); why != "" {
		r.Kept = append(r.Kept, path+": "+why)
		return
	}
	if o.DryRun {
		return
	}
	// Such a directory is empty: git works only in those that have a name.
	if err := os.Remove(path); err != nil {
		r.Kept = append(r.Kept, path+": "+err.Error())
	}
}

// sweepSlot removes locks whose tree is gone, files whose maker was killed, and then the slot if it is empty.
func (s *Store) sweepSlot(slot string) {
	ents, _ := os.ReadDir(slot)
	for _, e := range ents {
		name := e.Name()
		path := filepath.Join(slot, name)
		if strings.HasPrefix(name, ".ca-") || strings.HasPrefix(name, ".tmp-") {
			if fi, err := e.Info(); err == nil && s.o.Now().Sub(fi.ModTime()) > 24*time.Hour {
				os.Remove(path)
			}
			continue
		}
		project, ok := strings.CutSuffix(strings.TrimPrefix(name, "."), ".lock")
		if !ok || !strings.HasPrefix(name, ".") {
			continue
		}
		if _, err := os.Lstat(filepath.Join(slot, project)); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if _, err := os.Lstat(filepath.Join(slot, "."+project+".json")); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if l, err := fsx.TryLock(path, false); err == nil {
			os.Remove(path)
			l.Close()
		}
	}
	unix.Rmdir(slot)
}

// sweepMirrors removes mirrors unused for their own idle time. A mirror's
// directory is touched by each fetch.
func (s *Store) sweepMirrors(ctx context.Context, r *Swept, o SweepOptions) {
	var top unix.Stat_t
	if unix.Lstat(s.o.Mirrors, &top) != nil {
		return
	}
	ents, _ := os.ReadDir(s.o.Mirrors)
	for _, e := range ents {
		dir := filepath.Join(s.o.Mirrors, e.Name())
		unnamed := strings.HasPrefix(e.Name(), ".new-")
		if ctx.Err() != nil || !unnamed && (strings.HasPrefix(e.Name(), ".") || !strings.HasSuffix(e.Name(), ".git")) {
			continue
		}
		if why := foreign(dir, top.Dev); why != "" {
			r.Kept = append(r.Kept, dir+": "+why)
			continue
		}
		fi, err := e.Info()
		idle := s.o.MirrorIdle
		if unnamed {
			idle = 24 * time.Hour
		}
		if err != nil || s.o.Now().Sub(fi.ModTime()) < idle {
			continue
		}
		lock, err := fsx.TryLock(fetchLock(dir), false)
		if err != nil {
			continue
		}
		use, err := fsx.TryLock(useLock(dir), false)
		if err == nil {
			if fi, err = os.Lstat(dir); err == nil && s.o.Now().Sub(fi.ModTime()) >= idle {
				s.dropMirror(r, o, dir, e.Name())
			}
			use.Close()
		}
		lock.Close()
	}
}

func (s *Store) dropMirror(r *Swept, o SweepOptions, dir, name string) {
	bytes := int64(0)
	if o.Sizes {
		bytes, _, _ = fsx.Taken(dir)
	}
	if !o.DryRun {
		// Without HEAD it is no repository to anyone, whatever ends us now.
		os.Remove(filepath.Join(dir, "HEAD"))
		if err := fsx.RemoveTree(dir); err != nil {
			r.Kept = append(r.Kept, dir+": "+err.Error())
			return
		}
		os.Remove(useLock(dir))
		os.Remove(fetchLock(dir))
	}
	r.Mirrors = append(r.Mirrors, name)
	r.Bytes += bytes
}

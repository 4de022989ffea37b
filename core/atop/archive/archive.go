// Package archive keeps the recordings of guests (core/atop) on a host, by UTC
// day and job:
//
//	<root>/2026-08-11/42137-acme-web-test_unit/atop.log[.zst], vmm-threads.txt
//
// A log is plain while it is written and is held by a flock(2) of its writer.
// When the guest is gone Finish packs it; one whose job was never cleaned up is
// packed by the first recording of a later day, one over PackMax stays plain.
// That first recording also drops the days that are older than the archive
// keeps. Only real directories whose name is a date are ever dropped; whatever
// else is found is left alone. A crash leaves the log whole, plain or packed:
// when both are there, the plain one is it.
package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/zst"
)

// PackMax is the largest log that is packed, in bytes.
const PackMax = 512 << 20

// maxName bounds a recording's name, in bytes.
const maxName = 200

// Archive is the recordings of one host.
type Archive struct {
	Root string
	Days int // whole UTC days kept beside today's
	Now  func() time.Time
	Warn func(line string) // what a sweep could not do; nil = nobody
}

func (a *Archive) now() time.Time {
	if a.Now != nil {
		return a.Now().UTC()
	}
	return time.Now().UTC()
}

func (a *Archive) warn(format string, args ...any) {
	if a.Warn != nil {
		a.Warn(fmt.Sprintf(format, args...))
	}
}

// Name makes a name of a recording: what is outside of [A-Za-z0-9._-] becomes
// "_".
func Name(job int64, project, name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d-", job)
	put := func(s string) {
		for _, c := range s {
			if b.Len() >= maxName {
				return
			}
			if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-' {
				b.WriteRune(c)
			} else {
				b.WriteByte('_')
			}
		}
	}
	if project != "" {
		put(strings.ReplaceAll(project, "/", "-") + "-")
	}
	put(name)
	return b.String()
}

// Begin makes a directory for a recording that begins now. Another recording of
// that name on this day gets a name with a number.
func (a *Archive) Begin(name string) (dir string, err error) {
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return "", fmt.Errorf("%q is no name of a recording", name)
	}
	day := filepath.Join(a.Root, a.now().Format(time.DateOnly))
	if err := os.MkdirAll(day, 0o700); err != nil {
		return "", err
	}
	for n := 1; n < 1000; n++ {
		dir = filepath.Join(day, name)
		if n > 1 {
			dir += "-" + strconv.Itoa(n)
		}
		err := os.Mkdir(dir, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		return dir, err
	}
	return "", fault.Newf(fault.Conflict, "%s has too many recordings of %s", day, name)
}

// Finish packs the log of a recording whose guest is gone. Nothing to pack is
// no error; a log that is still written is left.
func (a *Archive) Finish(dir string) error {
	log := filepath.Join(dir, atop.LogFile)
	f, err := os.OpenFile(log, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fault.Newf(fault.Busy, "%s is still being written", log)
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Nlink == 0 {
		return nil // another has packed and removed it meanwhile
	}
	if !st.Mode().IsRegular() || st.Size() > PackMax {
		return nil
	}
	if st.Size() == 0 { // the guest was never there
		if err := os.Remove(log); err != nil {
			return err
		}
		os.Remove(dir) // unless there is something else
		return nil
	}
	if err := pack(f, filepath.Join(dir, atop.PackedFile), st.ModTime()); err != nil {
		return fmt.Errorf("packing %s: %w", log, err)
	}
	return os.Remove(log)
}

// pack writes the packed log durably, with the time of the plain one.
func pack(r io.Reader, path string, at time.Time) error {
	dir := filepath.Dir(path)
	f, err := os.OpenFile(filepath.Join(dir, "."+atop.PackedFile+".new"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	tmp := f.Name()
	done := false
	defer func() {
		if !done {
			f.Close()
			os.Remove(tmp)
		}
	}()
	w, err := zst.NewWriter(f, zst.Default)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = f.Close()
	}
	if err == nil {
		err = os.Chtimes(tmp, at, at)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return err
	}
	done = true
	return fsx.SyncDir(dir)
}

// sweptFile holds the last day on which a sweep was done to its end, and is
// locked by the one that is under way.
const sweptFile = ".swept"

// Sweep packs what jobs of the days before have left plain and drops the days
// that are older than the archive keeps: once a day, whoever calls it first.
// What it cannot do it tells and goes on; what a crash cuts short is done by the
// next call.
func (a *Archive) Sweep() {
	path := filepath.Join(a.Root, sweptFile)
	l, err := fsx.TryLock(path, false)
	if err != nil {
		if !errors.Is(err, fsx.ErrLocked) {
			a.warn("looking after old recordings: %v", err)
		}
		return
	}
	defer l.Close()
	today := a.now().Format(time.DateOnly)
	if done, err := os.ReadFile(path); err == nil && string(done) == today {
		return
	}
	a.sweep()
	if err := os.WriteFile(path, []byte(today), 0o600); err != nil {
		a.warn("looking after old recordings: %v", err)
	}
}

func (a *Archive) sweep() {
	today := a.now().Format(time.DateOnly)
	keep := a.now().AddDate(0, 0, -a.Days).Format(time.DateOnly)
	for _, day := range a.days() {
		path := filepath.Join(a.Root, day)
		switch {
		case day < keep:
			if err := os.RemoveAll(path); err != nil {
				a.warn("dropping recordings of %s: %v", day, err)
			}
		case day < today:
			for _, name := range subdirs(path) {
				if err := a.Finish(filepath.Join(path, name)); err != nil && fault.KindOf(err) != fault.Busy {
					a.warn("%v", err)
				}
			}
		}
	}
}

// days are the directories of the archive whose name is a date, oldest first.
func (a *Archive) days() []string {
	var out []string
	for _, n := range subdirs(a.Root) {
		if t, err := time.Parse(time.DateOnly, n); err == nil && t.Format(time.DateOnly) == n {
			out = append(out, n)
		}
	}
	return out
}

// subdirs are the real directories in dir, by name.
func subdirs(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() { // a symlink is none
			out = append(out, e.Name())
		}
	}
	return out
}

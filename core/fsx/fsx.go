// Package fsx holds the few file operations whose crash behaviour matters:
// atomic durable replacement, locks that the kernel drops with their holder,
// sparse copies, and unix sockets below long paths.
package fsx

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// WriteFile replaces path with data so that a crash at any instruction leaves
// the old file or the new one: write, fsync, rename, fsync of the directory.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return err
	}
	tmp := f.Name()
	ok := false
	defer func() {
		if !ok {
			f.Close()
			os.Remove(tmp)
		}
	}()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	ok = true
	return SyncDir(dir)
}

// SweepWrites removes from dir what WriteFile of a process that was killed has
// left there. Only who knows that nobody else writes in dir now may call it: the
// holder of its lock.
func SweepWrites(dir string) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range list {
		name, n, ok := strings.Cut(e.Name(), ".tmp-")
		if _, err := strconv.ParseUint(n, 10, 64); !ok || err != nil || !strings.HasPrefix(name, ".") || !e.Type().IsRegular() {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

// ErrLocked is returned by TryLock when another process or descriptor holds
// the lock.
var ErrLocked = errors.New("fsx: locked by another process")

// Lock is a held flock(2). It ends with Close or with the process.
type Lock struct{ f *os.File }

// TryLock takes the lock on path, made 0600 if missing, without waiting. The
// lock is on the file that the path names once it is held: a file replaced or
// removed meanwhile is tried again.
func TryLock(path string, shared bool) (*Lock, error) {
	how := unix.LOCK_EX
	if shared {
		how = unix.LOCK_SH
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		for {
			err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
			if err != unix.EINTR {
				break
			}
		}
		if err != nil {
			f.Close()
			if err == unix.EWOULDBLOCK {
				return nil, fmt.Errorf("%s: %w", path, ErrLocked)
			}
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		var a, b unix.Stat_t
		if unix.Fstat(int(f.Fd()), &a) == nil && unix.Lstat(path, &b) == nil && a.Ino == b.Ino && a.Dev == b.Dev {
			return &Lock{f}, nil
		}
		f.Close()
	}
}

// AcquireLock is TryLock that waits until ctx ends.
func AcquireLock(ctx context.Context, path string, shared bool) (*Lock, error) {
	wait := 2 * time.Millisecond
	for {
		l, err := TryLock(path, shared)
		if !errors.Is(err, ErrLocked) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, context.Cause(ctx))
		case <-time.After(wait):
		}
		wait = min(wait*2, 100*time.Millisecond)
	}
}

// File is the locked file, for handing over by descriptor.
func (l *Lock) File() *os.File { return l.f }

// Close releases the lock. Safe on nil and when called twice.
func (l *Lock) Close() error {
	if l == nil || l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	return f.Close()
}

// SparseCopy copies src to dst (which must not exist, made with mode),
// sharing extents where the filesystem can and skipping holes elsewhere.
func SparseCopy(dst, src string, mode fs.FileMode) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(dst)
		}
	}()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	if err := out.Truncate(st.Size()); err != nil {
		return err
	}
	for off := int64(0); off < st.Size(); {
		data, err := unix.Seek(int(in.Fd()), off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		if err != nil {
			return fmt.Errorf("finding data in %s: %w", src, err)
		}
		hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("finding holes in %s: %w", src, err)
		}
		if _, err := out.Seek(data, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(out, io.NewSectionReader(in, data, hole-data)); err != nil {
			return err
		}
		off = hole
	}
	return nil
}

// ListenUnix listens on path, however long: the kernel's limit of 108 bytes
// is met through /proc/self/fd.
func ListenUnix(path string) (*net.UnixListener, error) {
	short, done, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	return l, nil
}

// DialUnix connects to path, however long.
func DialUnix(path string) (*net.UnixConn, error) {
	short, done, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", path, errors.Unwrap(err))
	}
	return c, nil
}

func shortPath(path string) (string, func(), error) {
	fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("opening %s: %w", filepath.Dir(path), err)
	}
	return "/proc/self/fd/" + strconv.Itoa(fd) + "/" + filepath.Base(path), func() { unix.Close(fd) }, nil
}

// ProcStart is the start time of a process in clock ticks since boot
// (proc_pid_stat(5), field 22); it tells a process from a later one with the
// same number.
func ProcStart(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	i := len(b) - 1
	for i >= 0 && b[i] != ')' {
		i--
	}
	f := splitSpaces(b[i+1:])
	if len(f) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has too few fields", pid)
	}
	return strconv.ParseUint(f[19], 10, 64)
}

func splitSpaces(b []byte) []string {
	var out []string
	start := -1
	for i, c := range b {
		if c == ' ' || c == '\n' {
			if start >= 0 {
				out = append(out, string(b[start:i]))
				start = -1
			}
		} else if start < 0 {
			start = i
		}
	}
	return out
}

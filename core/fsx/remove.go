package fsx

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrMounted is wrapped by RemoveTree when something is mounted inside the
// tree.
var ErrMounted = errors.New("fsx: a filesystem is mounted there")

// RemoveTree removes path and all below it. It walks by descriptor, so that no
// symlink is ever followed, whoever swaps one in meanwhile, and it never
// crosses into another mount: it stops there with ErrMounted and leaves the
// rest. No error when path does not exist.
func RemoveTree(path string) error {
	path = filepath.Clean(path)
	parent, err := unix.Open(filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		if err == unix.ENOENT {
			return nil
		}
		return fmt.Errorf("removing %s: opening its parent: %w", path, err)
	}
	defer unix.Close(parent)
	return removeAt(parent, filepath.Base(path), path)
}

func removeAt(parent int, name, path string) error {
	err := unix.Unlinkat(parent, name, 0)
	switch err {
	case nil, unix.ENOENT:
		return nil
	case unix.EBUSY:
		return fmt.Errorf("removing %s: %w", path, ErrMounted)
	case unix.EISDIR, unix.EPERM:
	default:
		return fmt.Errorf("removing %s: %w", path, err)
	}
	fd, err := openBelow(parent, name)
	switch err {
	case nil:
	case unix.ENOENT:
		return nil
	case unix.EXDEV:
		return fmt.Errorf("removing %s: %w", path, ErrMounted)
	default:
		return fmt.Errorf("removing %s: %w", path, err)
	}
	d := os.NewFile(uintptr(fd), path)
	err = removeEntries(d, path)
	d.Close()
	if err != nil {
		return err
	}
	switch err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err {
	case nil, unix.ENOENT:
		return nil
	case unix.EBUSY:
		return fmt.Errorf("removing %s: %w", path, ErrMounted)
	default:
		return fmt.Errorf("removing %s: %w", path, err)
	}
}

func removeEntries(d *os.File, path string) error {
	var errs []error
	for {
		names, err := d.Readdirnames(256)
		for _, n := range names {
			if e := removeAt(int(d.Fd()), n, filepath.Join(path, n)); e != nil {
				errs = append(errs, e)
			}
		}
		// A directory that somebody else has removed meanwhile cannot be listed.
		if err == io.EOF || errors.Is(err, unix.ENOENT) || len(errs) > 16 {
			return errors.Join(errs...)
		}
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("listing %s: %w", path, err))...)
		}
	}
}

// openBelow opens a directory entry of parent, never a symlink, and answers
// EXDEV for another mount.
func openBelow(parent int, name string) (int, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NOFOLLOW
	how := unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH}
	open := func() (int, error) {
		fd, err := unix.Openat2(parent, name, &how)
		if err != unix.ENOSYS && err != unix.EPERM {
			return fd, err
		}
		// A sandbox without openat2: compare devices, which misses a bind mount
		// of the same filesystem only; unlinking its entries would still fail
		// for nothing that we own alone.
		var a, b unix.Stat_t
		if err := unix.Fstat(parent, &a); err != nil {
			return -1, err
		}
		fd, err = unix.Openat(parent, name, flags, 0)
		if err != nil {
			return -1, err
		}
		if err := unix.Fstat(fd, &b); err != nil || a.Dev != b.Dev {
			unix.Close(fd)
			return -1, unix.EXDEV
		}
		return fd, nil
	}
	fd, err := open()
	if err == unix.EACCES {
		// A directory of ours without permissions; fchmodat would follow a
		// symlink, but open has just refused one by another error.
		if p, e := unix.Openat(parent, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); e == nil {
			unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", p), 0o700)
			unix.Close(p)
			fd, err = open()
		}
	}
	return fd, err
}

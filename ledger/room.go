package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
)

// roomOf looks at the filesystem of a directory.
func roomOf(dir string) (admit.Room, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return admit.Room{}, fmt.Errorf("looking for the room in %s: %w", dir, err)
	}
	return admit.Room{
		Path: dir, Size: int64(st.Blocks) * st.Bsize, Free: int64(st.Bavail) * st.Bsize,
		Inodes: int64(st.Files), FreeInodes: int64(st.Ffree),
	}, nil
}

// Held is what a job's directory holds: bytes that its files take on the disk,
// and how many files there are. What vanishes meanwhile counts nothing, and so
// does a directory that is not there.
func Held(dir string) (bytes, inodes int64, err error) {
	seen := map[[2]uint64]bool{} // of files with several names
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%s: the system does not tell its size", path)
		}
		if st.Nlink > 1 && !fi.IsDir() {
			k := [2]uint64{st.Dev, st.Ino}
			if seen[k] {
				return nil
			}
			seen[k] = true
		}
		bytes += st.Blocks * 512
		inodes++
		return nil
	})
	if err != nil {
		return bytes, inodes, fmt.Errorf("measuring %s: %w", dir, err)
	}
	return bytes, inodes, nil
}

// SameFilesystem reports whether two directories share their room.
func SameFilesystem(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	if err1 != nil || err2 != nil {
		return false
	}
	s, ok1 := x.Sys().(*syscall.Stat_t)
	t, ok2 := y.Sys().(*syscall.Stat_t)
	return ok1 && ok2 && s.Dev == t.Dev
}

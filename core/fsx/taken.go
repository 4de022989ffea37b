package fsx

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
)

// Taken is what a directory holds: bytes that its files take on the disk, and
// how many files there are, itself included. What vanishes meanwhile counts nothing, and so
// does a directory that is not there.
func Taken(dir string) (bytes, inodes int64, err error) {
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

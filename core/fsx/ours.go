package fsx

import (
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// NotOurs says why a collector leaves path alone, although its name is one of
// ours: it is a symlink, the root of a mount, or another user's. Nil: it may
// go. An error wraps fs.ErrNotExist when there is nothing. Bind mounts are told
// from their own filesystem by kernels from 5.8 on.
func NotOurs(path string) error {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS, &st); err != nil {
		return &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return fmt.Errorf("%s is a symlink", path)
	case st.Attributes&st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0:
		return fmt.Errorf("%s: %w", path, ErrMounted)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to uid %d, not to %d who collects", path, st.Uid, os.Geteuid())
	}
	return nil
}

package ledger

import (
	"fmt"
	"os"
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

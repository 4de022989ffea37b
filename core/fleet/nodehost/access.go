package nodehost

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// What a user may be asked to be able to do with a path.
const (
	accessExec  = 1 // run, or pass through
	accessWrite = 2
	accessRead  = 4
)

// Access asks what a user may do by mode bits alone: access control lists are
// not looked at.
type Access struct {
	Root Root
	User User
}

// Can says why the user cannot do all of what to a path; nil = it can. Each
// directory above it must let the user pass.
func (a Access) Can(path string, what int) error {
	groups, err := a.Root.GroupsOf(a.User)
	if err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks(a.Root.Path(path))
	if err != nil {
		return err
	}
	for dir := filepath.Dir(real); ; dir = filepath.Dir(dir) {
		if err := a.check(dir, accessExec, groups); err != nil {
			return err
		}
		if up := filepath.Dir(dir); up == dir || a.Root != "" && dir == filepath.Clean(string(a.Root)) {
			break
		}
	}
	return a.check(real, what, groups)
}

func (a Access) check(path string, what int, groups []int) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || a.User.UID == 0 {
		return nil
	}
	mode := int(st.Mode().Perm())
	bits := mode & 7
	switch {
	case int(sys.Uid) == a.User.UID:
		bits = mode >> 6 & 7
	case slices.Contains(groups, int(sys.Gid)):
		bits = mode >> 3 & 7
	}
	if bits&what != what {
		return &fs.PathError{Op: "access", Path: path, Err: fmt.Errorf("mode %v of user %d and group %d: %w", st.Mode().Perm(), sys.Uid, sys.Gid, fs.ErrPermission)}
	}
	return nil
}

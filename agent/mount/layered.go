package mount

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Layered joins the read-only directory lower and the writable one rw at
// target, whose root belongs to uid and gid.
func Layered(lower, rw, target string, uid, gid int) error {
	upper, work := rw+"/upper", rw+"/work"
	for _, d := range []string{upper, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("writable layer: %w", err)
		}
	}
	// As of Overlay: the layer of a guest that reboots is mounted again.
	if err := os.RemoveAll(work + "/work/incompat"); err != nil {
		return fmt.Errorf("writable layer: %w", err)
	}
	if err := errors.Join(os.Chmod(upper, 0o755), os.Chown(upper, uid, gid)); err != nil {
		return fmt.Errorf("writable layer: %w", err)
	}
	return overlay(lower, upper, work, target, unix.MS_NODEV)
}

// Owned mounts the directory from at to so that what belongs to root there
// belongs to uid and gid here (mount_setattr(2), MOUNT_ATTR_IDMAP).
func Owned(from, to string, uid, gid uint32) error {
	ns, err := userNamespace(int(uid), int(gid))
	if err != nil {
		return err
	}
	defer unix.Close(ns)
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree %s: %w", from, err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns)}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("mount_setattr %s: %w", from, err)
	}
	if err := Dir(to, 0o755); err != nil {
		return err
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount %s: %w", to, err)
	}
	return nil
}

// userNamespace makes a user namespace in which 0 is uid and gid outside. A
// namespace lives in a process; this one is stopped before it runs anything.
func userNamespace(uid, gid int) (int, error) {
	runtime.LockOSThread() // a traced process belongs to a thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", "nop")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, Ptrace: true,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}},
	}
	if err := cmd.Start(); err != nil {
		return -1, fmt.Errorf("making a user namespace: %w", err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait() // or PID 1's reaper has had it
	}()
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("opening a user namespace: %w", err)
	}
	return ns, nil
}

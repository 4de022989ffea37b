// Package virtiofs runs the system's virtiofsd for the shares of `vk run
// --share`. Jobs never use it: their inputs are disks, so that nothing of the
// host's filesystem code faces a job (DESIGN.md, section 3).
package virtiofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/vmm/internal/spawn"
)

// Config is one share.
type Config struct {
	Source   string // directory on the host
	ReadOnly bool   // enforced on the host's side
	Dir      string // private directory, for a socket that lives for an instant
	Log      io.Writer
}

// Daemon is a running virtiofsd. It dies with this process.
type Daemon struct {
	cmd  *exec.Cmd
	done chan struct{}
	once sync.Once
}

// binaries are where distributions put virtiofsd.
var binaries = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd", "/usr/libexec/qemu/virtiofsd"}

// Binary finds virtiofsd.
func Binary() (string, error) {
	for _, p := range binaries {
		if unix.Access(p, unix.X_OK) == nil {
			return p, nil
		}
	}
	if p, err := exec.LookPath("virtiofsd"); err == nil {
		return p, nil
	}
	return "", fault.New(fault.System, "there is no virtiofsd on this host, which serves shares").
		Hint("apt-get install qemu-system-common (Debian 12) or virtiofsd (later ones)")
}

// Serve starts virtiofsd for c and returns it with the socket that the VMM
// speaks vhost-user on; the caller closes that once the VMM has it. The daemon
// ends by itself when the VMM does.
func Serve(ctx context.Context, c Config) (*Daemon, *os.File, error) {
	src, err := checkSource(c.Source)
	if err != nil {
		return nil, nil, err
	}
	bin, err := Binary()
	if err != nil {
		return nil, nil, err
	}
	listener, conn, err := sockets(c.Dir)
	if err != nil {
		return nil, nil, fmt.Errorf("sharing %s: %w", src, err)
	}
	defer listener.Close()
	argv, attr := command(bin, src, c.ReadOnly, os.Geteuid(), os.Getegid())
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = attr
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
	cmd.ExtraFiles = []*os.File{listener} // descriptor 3
	cmd.Stdout, cmd.Stderr = c.Log, c.Log
	if err := spawn.Start(cmd); err != nil {
		conn.Close()
		e := fault.Newf(fault.System, "starting virtiofsd for %s", src).Because(err)
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EUSERS) {
			e = e.Hint("it needs a user namespace: allow them (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or run vk as root")
		}
		return nil, nil, e
	}
	d := &Daemon{cmd: cmd, done: make(chan struct{})}
	go func() {
		cmd.Wait()
		close(d.done)
	}()
	return d, conn, nil
}

func checkSource(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		k := fault.System
		if errors.Is(err, fs.ErrNotExist) {
			k = fault.NotFound
		}
		return "", fault.Newf(k, "sharing %s", path).Because(err)
	}
	st, err := os.Stat(real)
	if err != nil {
		return "", fmt.Errorf("sharing %s: %w", path, err)
	}
	if !st.IsDir() {
		return "", fault.Newf(fault.Usage, "sharing %s: it is not a directory", path)
	}
	if strings.ContainsAny(real, ",\n") { // it goes into a list of options
		return "", fault.Newf(fault.Usage, "sharing %q: its path has a comma or a line break in it", real)
	}
	return real, nil
}

// command is how virtiofsd is started. Its descriptor 3 is the listener.
//
// Without root it gets a user namespace of its own, in which it may do what it
// does to lock itself in. Debian 12's has no read-only mode, so a read-only
// share is a read-only bind mount in a mount namespace of its own: the host's
// kernel refuses the writes, whatever virtiofsd is talked into. Filesystems
// mounted below the source are not part of a read-only share.
func command(bin, src string, readOnly bool, uid, gid int) ([]string, *syscall.SysProcAttr) {
	argv := []string{bin, "--fd=3", "-o", "source=" + src, "-o", "cache=auto", "--rlimit-nofile=" + strconv.FormatUint(maxFiles(), 10)}
	attr := &syscall.SysProcAttr{}
	if uid != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}}
	}
	if readOnly {
		attr.Cloneflags |= syscall.CLONE_NEWNS
		script := `set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o "remount,bind,ro$2" "$1"
shift 2
exec "$@"`
		argv = append([]string{"/bin/sh", "-c", script, "vk-share", src, keptFlags(src)}, argv...)
	}
	return argv, attr
}

// keptFlags are the mount options of the filesystem under src that a remount
// in a user namespace may not take away, with a comma before each.
func keptFlags(src string) string {
	var st unix.Statfs_t
	if unix.Statfs(src, &st) != nil {
		return ""
	}
	out := ""
	for _, f := range []struct {
		bit  int64
		name string
	}{{unix.ST_NOSUID, "nosuid"}, {unix.ST_NODEV, "nodev"}, {unix.ST_NOEXEC, "noexec"},
		{unix.ST_NOATIME, "noatime"}, {unix.ST_NODIRATIME, "nodiratime"}, {unix.ST_RELATIME, "relatime"}} {
		if st.Flags&f.bit != 0 {
			out += "," + f.name
		}
	}
	return out
}

// maxFiles is the descriptor limit virtiofsd is given: it holds one for every
// inode that the guest knows, so as many as the host lets us.
func maxFiles() uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return 4096
	}
	return min(l.Max, 1<<20)
}

// sockets makes a listener and a connection to it. The name is gone before
// anything else could use it.
func sockets(dir string) (listener, conn *os.File, err error) {
	tmp, err := os.MkdirTemp(dir, "fs-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(tmp)
	path := filepath.Join(tmp, "s")
	l, err := fsx.ListenUnix(path)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	c, err := fsx.DialUnix(path)
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	if listener, err = l.File(); err != nil {
		return nil, nil, err
	}
	if conn, err = c.File(); err != nil {
		listener.Close()
		return nil, nil, err
	}
	// QEMU and virtiofsd set what they want; File left both blocking.
	return listener, conn, nil
}

// Kill ends the daemon and waits until it is gone. Safe to call twice.
func (d *Daemon) Kill() {
	d.once.Do(func() {
		select {
		case <-d.done: // its number may be another's by now
		default:
			syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
		}
	})
	<-d.done
}

// Done is closed when the daemon has ended.
func (d *Daemon) Done() <-chan struct{} { return d.done }

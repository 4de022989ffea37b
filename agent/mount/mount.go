// Package mount puts together what a guest sees as its files: the kernel's own
// filesystems, disks by their serial, the overlay that is the root, and the
// modules that have to be there before.
package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// FS is one mount.
type FS struct {
	Source, Target, Type string
	Flags                uintptr
	Data                 string
}

// Do makes the target directory and mounts.
func (m FS) Do() error {
	if err := Dir(m.Target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.Source, m.Target, m.Type, m.Flags, m.Data); err != nil {
		return fmt.Errorf("mounting %s (%s) at %s with %q: %w", m.Source, m.Type, m.Target, m.Data, err)
	}
	return nil
}

// Dir makes path a directory, whatever an image has put there.
func Dir(path string, mode os.FileMode) error {
	if fi, err := os.Stat(path); err == nil && fi.IsDir() {
		return nil
	}
	if fi, err := os.Lstat(path); err == nil && !fi.IsDir() {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	return os.Chmod(path, mode) // past the umask
}

const nosuid = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV

// Early mounts what an init needs to see anything at all, on the bare
// initramfs.
func Early() error {
	for _, m := range []FS{
		{"proc", "/proc", "proc", nosuid, ""},
		{"sysfs", "/sys", "sysfs", nosuid, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	} {
		if err := m.Do(); err != nil && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return nil
}

// devLinks are the names in /dev that are not devices.
var devLinks = [][2]string{
	{"/proc/self/fd", "/dev/fd"},
	{"/proc/self/fd/0", "/dev/stdin"},
	{"/proc/self/fd/1", "/dev/stdout"},
	{"/proc/self/fd/2", "/dev/stderr"},
	{"pts/ptmx", "/dev/ptmx"},
	{"/proc/kcore", "/dev/core"},
}

// Kernel mounts the rest of the kernel's filesystems below the final root, in
// which the caller is, and makes the links of /dev. It returns the control
// group directory for execs, or "" with the reason.
func Kernel() (cgroup string, why error, err error) {
	for _, m := range []FS{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{"shm", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	} {
		if err := m.Do(); err != nil {
			return "", nil, err
		}
	}
	// Not in every kernel, and missed by few programs.
	FS{"mqueue", "/dev/mqueue", "mqueue", nosuid, ""}.Do()
	FS{"securityfs", "/sys/kernel/security", "securityfs", nosuid, ""}.ifThere()
	FS{"debugfs", "/sys/kernel/debug", "debugfs", nosuid, ""}.ifThere()
	FS{"tracefs", "/sys/kernel/tracing", "tracefs", nosuid, ""}.ifThere()
	FS{"bpf", "/sys/fs/bpf", "bpf", nosuid, "mode=0700"}.ifThere()
	FS{"fusectl", "/sys/fs/fuse/connections", "fusectl", nosuid, ""}.ifThere()
	for _, l := range devLinks {
		os.Remove(l[1])
		if err := os.Symlink(l[0], l[1]); err != nil {
			return "", nil, err
		}
	}
	for dev, mode := range map[string]os.FileMode{"null": 0o666, "zero": 0o666, "full": 0o666, "random": 0o666, "urandom": 0o666, "tty": 0o666, "fuse": 0o666, "net/tun": 0o666} {
		os.Chmod("/dev/"+dev, mode)
	}
	cgroup, why = cgroups()
	return cgroup, why, nil
}

// ifThere mounts when the kernel offers the mount point.
func (m FS) ifThere() {
	if _, err := os.Stat(m.Target); err == nil {
		unix.Mount(m.Source, m.Target, m.Type, m.Flags, m.Data)
	}
}

// cgroups mounts cgroup2 with every controller handed down, and makes the
// group below which each exec gets its own.
func cgroups() (string, error) {
	const top = "/sys/fs/cgroup"
	if err := (FS{"cgroup2", top, "cgroup2", nosuid, "nsdelegate,memory_recursiveprot"}).Do(); err != nil {
		if err := (FS{"cgroup2", top, "cgroup2", nosuid, ""}).Do(); err != nil {
			return "", err
		}
	}
	dir := top + "/vk"
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return "", err
	}
	for _, d := range []string{top, dir} {
		b, err := os.ReadFile(d + "/cgroup.controllers")
		if err != nil {
			return "", err
		}
		for _, c := range strings.Fields(string(b)) {
			// One by one: a controller that cannot be handed down (cpu with
			// realtime processes) must not keep the others back.
			os.WriteFile(d+"/cgroup.subtree_control", []byte("+"+c), 0)
		}
	}
	return dir, nil
}

// Disk waits up to wait for the block device with this virtio serial and
// returns its path.
func Disk(serial string, wait time.Duration) (string, error) {
	deadline := time.Now().Add(wait)
	for {
		seen, dev := scanDisks(serial)
		if dev != "" {
			return dev, nil
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("no disk has the serial %q (there are: %s)", serial, strings.Join(seen, ", "))
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func scanDisks(serial string) (seen []string, dev string) {
	files, _ := filepath.Glob("/sys/block/*/serial")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		s := strings.TrimSpace(string(b))
		name := filepath.Base(filepath.Dir(f))
		if s == serial {
			return nil, "/dev/" + name
		}
		seen = append(seen, name+"="+s)
	}
	return seen, ""
}

// ReadOnlyData is the mount data with which a filesystem's image is read and
// never written, not even by its journal's replay.
func ReadOnlyData(fstype string) string {
	switch fstype {
	case "ext4", "ext3":
		return "noload"
	case "xfs":
		return "norecovery"
	}
	return ""
}

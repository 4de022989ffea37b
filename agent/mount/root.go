package mount

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Where the parts of the root are mounted on the initramfs; the overlay hides
// them once it is the root.
const (
	lowerDir = "/vk/lower"
	rootDir  = "/vk/root"
)

// UpperDir is where Upper mounts the writable layer.
const UpperDir = "/vk/rw"

// Lower mounts the root's read-only image.
func Lower(dev, fstype string) error {
	return FS{dev, lowerDir, fstype, unix.MS_RDONLY, ReadOnlyData(fstype)}.Do()
}

// Upper mounts the writable layer's disk, or a tmpfs when dev is "".
func Upper(dev, fstype string) error {
	if dev == "" {
		return FS{"tmpfs", UpperDir, "tmpfs", 0, "mode=0755,size=75%"}.Do()
	}
	return FS{dev, UpperDir, fstype, unix.MS_NOATIME, ""}.Do()
}

// overlayData are mount options, the best first. No index and no metacopy, so
// that the layer is plain files; xino, so that inode numbers are stable and
// unique; redirect_dir, so that a directory of the image can be renamed as on
// any filesystem; volatile, since the layer never outlives the guest's job and
// a sync of every fsync would buy nothing.
var overlayData = []string{
	",index=off,xino=auto,metacopy=off,redirect_dir=on,volatile",
	",index=off,xino=auto,metacopy=off,redirect_dir=on",
	",index=off,xino=off,metacopy=off",
	"",
}

// Overlay joins the two at the place that SwitchRoot makes the root.
func Overlay() error {
	upper, work := UpperDir+"/upper", UpperDir+"/work"
	for _, d := range []string{upper, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("writable layer: %w", err)
		}
	}
	// A volatile overlay leaves a mark that forbids a second mount: the layer
	// of a guest that reboots is mounted again, its disk was synced before.
	if err := os.RemoveAll(work + "/work/incompat"); err != nil {
		return fmt.Errorf("writable layer: %w", err)
	}
	if fi, err := os.Stat(lowerDir); err == nil {
		os.Chmod(upper, fi.Mode().Perm())
	}
	return overlay(lowerDir, upper, work, rootDir, 0)
}

// overlay joins a read-only directory and a writable one.
func overlay(lower, upper, work, target string, flags uintptr) error {
	var errs []error
	for _, opt := range overlayData {
		err := FS{"overlay", target, "overlay", flags, "lowerdir=" + lower + ",upperdir=" + upper + ",workdir=" + work + opt}.Do()
		if err == nil {
			return nil
		}
		errs = append(errs, err)
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	return errors.Join(errs...)
}

// SwitchRoot makes the overlay the root of this process and of all that it
// starts; /proc, /sys and /dev come along, and self stays reachable as
// /run/vk/bin/vk-agent without a copy in memory.
func SwitchRoot(self string, names []string) error {
	for _, d := range []string{"/proc", "/sys", "/dev"} {
		if err := Dir(rootDir+d, 0o755); err != nil {
			return fmt.Errorf("making %s in the image: %w", d, err)
		}
		if err := unix.Mount(d, rootDir+d, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s into the root: %w", d, err)
		}
	}
	if err := ownDir(self, names); err != nil {
		return err
	}
	if err := os.Chdir(rootDir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("moving the root into place: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("entering the root: %w", err)
	}
	return os.Chdir("/")
}

// ownDir makes /run/vk in the new root: a small tmpfs with our own program
// under its names.
func ownDir(self string, names []string) error {
	const vk = rootDir + "/run/vk"
	// An image's /run may be a link that leads anywhere.
	if fi, err := os.Lstat(rootDir + "/run"); err == nil && !fi.IsDir() {
		if err := os.Remove(rootDir + "/run"); err != nil {
			return err
		}
	}
	if err := (FS{"vk", vk, "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755,size=4m"}).Do(); err != nil {
		return err
	}
	if err := os.Mkdir(vk+"/bin", 0o755); err != nil {
		return err
	}
	agent := vk + "/bin/vk-agent"
	if err := os.WriteFile(agent, nil, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(self, agent, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s to /run/vk/bin/vk-agent: %w", self, err)
	}
	for _, n := range names {
		if err := os.Symlink("vk-agent", vk+"/bin/"+n); err != nil {
			return err
		}
	}
	return nil
}

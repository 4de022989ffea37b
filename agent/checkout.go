package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent/exec"
	"virtkit/agent/mount"
	"virtkit/core/guestwire"
)

// checkoutDir is where the parts of the work tree are; only the two joined are
// for programs.
const checkoutDir = "/run/vk/checkout"

// layerPause is between two looks at how full the work tree's layer is. What
// came and went in between is not seen.
const layerPause = time.Second

// layer is the writable layer of a work tree in memory.
type layer struct {
	path string
	top  atomic.Int64 // most bytes it was seen to hold
}

// see looks how full the layer is. Its size is 0 when it cannot be seen.
func (l *layer) see() (top, size int64) {
	var st unix.Statfs_t
	if unix.Statfs(l.path, &st) != nil {
		return l.top.Load(), 0
	}
	used := int64(st.Blocks-st.Bfree) * st.Bsize
	for {
		was := l.top.Load()
		if used <= was || l.top.CompareAndSwap(was, used) {
			return max(used, was), int64(st.Blocks) * st.Bsize
		}
	}
}

// watch keeps the high-water mark for the guest's life.
func (l *layer) watch() {
	for {
		l.see()
		time.Sleep(layerPause)
	}
}

// stepCheckout puts the work tree in its place: the host's disk, read-only, and
// above it a layer that takes what the job writes.
func (g *guest) stepCheckout(m *guestwire.Setup) error {
	c := m.Checkout
	if !filepath.IsAbs(c.Target) {
		return fmt.Errorf("checkout target %q is not absolute", c.Target)
	}
	u, err := exec.LookupUser("/", c.User)
	if err != nil {
		return err
	}
	dev, err := mount.Disk(c.Disk.Serial, deviceWait)
	if err != nil {
		return err
	}
	if err := os.Mkdir(checkoutDir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	lower := mount.FS{Source: dev, Target: checkoutDir + "/tree", Type: c.Disk.FSType, Flags: unix.MS_RDONLY | unix.MS_NODEV | unix.MS_NOSUID, Data: mount.ReadOnlyData(c.Disk.FSType)}
	if err := lower.Do(); err != nil {
		return err
	}
	tree := lower.Target
	if u.UID != 0 || u.GID != 0 {
		tree = checkoutDir + "/owned"
		if err := mount.Owned(lower.Target, tree, u.UID, u.GID); err != nil {
			return fmt.Errorf("giving the work tree to user %s: %w", c.User, err)
		}
	}
	rw := checkoutDir + "/rw"
	switch {
	case c.Memory > 0:
		fs := mount.FS{Source: "vk-checkout", Target: rw, Type: "tmpfs", Flags: unix.MS_NODEV | unix.MS_NOSUID, Data: fmt.Sprintf("mode=0755,size=%d,nr_inodes=0", c.Memory)}
		if err := fs.Do(); err != nil {
			return err
		}
	case g.upperFD < 0:
		return fmt.Errorf("the work tree's writable layer is to be on the guest's disk, and it has none")
	default:
		rw = fmt.Sprintf("/proc/self/fd/%d/checkout", g.upperFD)
		if err := os.MkdirAll(rw, 0o755); err != nil {
			return err
		}
	}
	if err := mount.Layered(tree, rw, c.Target, int(u.UID), int(u.GID)); err != nil {
		return err
	}
	if c.Memory > 0 {
		l := &layer{path: rw}
		g.srv.setLayer(l)
		g.srv.guard("layer", l.watch)
	}
	return nil
}

package nodehost

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Usage is how much of a filesystem is used.
type Usage struct {
	Dev        Dev
	Size, Free int64 // bytes; free to this user
	Inodes     int64 // it can hold; 0 = it does not count them
	FreeInodes int64
	Tmpfs      bool
}

// StatFS looks at the filesystem that a directory is on. What does not exist yet
// is on that of its nearest parent that does.
func StatFS(path string) (u Usage, err error) {
	var st unix.Stat_t
	for {
		err = unix.Stat(path, &st)
		up := filepath.Dir(path)
		if !errors.Is(err, fs.ErrNotExist) || up == path {
			break
		}
		path = up
	}
	var sf unix.Statfs_t
	if err == nil {
		err = unix.Statfs(path, &sf)
	}
	if err != nil {
		return u, fmt.Errorf("looking at the filesystem of %s: %w", path, err)
	}
	return Usage{
		Dev:  Dev{unix.Major(st.Dev), unix.Minor(st.Dev)},
		Size: blocks(sf.Blocks, sf.Bsize), Free: blocks(sf.Bavail, sf.Bsize),
		Inodes: clamp(sf.Files), FreeInodes: clamp(sf.Ffree),
		Tmpfs: sf.Type == unix.TMPFS_MAGIC || sf.Type == unix.RAMFS_MAGIC,
	}, nil
}

func clamp(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// blocks is n blocks in bytes, held to what an int64 holds: a network
// filesystem may claim to be endless.
func blocks(n uint64, size int64) int64 {
	if size <= 0 || n > uint64(math.MaxInt64/size) {
		return math.MaxInt64
	}
	return int64(n) * size
}

// mount is one line of /proc/self/mountinfo.
type mount struct {
	dev    Dev
	point  string
	fstype string
	source string
}

// mounts reads /proc/self/mountinfo (proc_pid_mountinfo(5)).
func (r Root) mounts() ([]mount, error) {
	b, err := r.read("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []mount
	for _, l := range lines(b) {
		head, tail, ok := strings.Cut(l, " - ")
		h, t := strings.Fields(head), strings.Fields(tail)
		if !ok || len(h) < 5 || len(t) < 2 {
			continue
		}
		major, minor, _ := strings.Cut(h[2], ":")
		a, err1 := strconv.ParseUint(major, 10, 32)
		c, err2 := strconv.ParseUint(minor, 10, 32)
		if err1 != nil || err2 != nil {
			continue
		}
		out = append(out, mount{dev: Dev{uint32(a), uint32(c)}, point: unescape(h[4]), fstype: t[0], source: unescape(t[1])})
	}
	return out, nil
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// mountOf is the device that a directory's filesystem is on and the filesystem's
// type, as the mount table has them: of the mounts of that device whose point is
// above the directory, the nearest; else any. A device without a name is its
// number.
func mountOf(ms []mount, path string, dev Dev) (device, fstype string) {
	best := mount{}
	score := -1
	for _, m := range ms {
		if m.dev != dev {
			continue
		}
		n := 0
		if m.point == "/" || path == m.point || strings.HasPrefix(path, m.point+"/") {
			n = 1 + len(m.point)
		}
		if n >= score { // of two on one point, the later hides the earlier
			best, score = m, n
		}
	}
	if score < 0 || best.source == "" || best.source == "none" {
		return fmt.Sprintf("%d:%d", dev.Major, dev.Minor), best.fstype
	}
	return best.source, best.fstype
}

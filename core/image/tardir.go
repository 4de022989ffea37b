package image

import (
	"archive/tar"
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tarDirectory writes the tree below dir as a tar to file, in order of names.
// It stays on dir's filesystem: mount points come out as empty directories.
// Sockets are left out, as tar has none.
func tarDirectory(ctx context.Context, dir, file string) (err error) {
	out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
	}()
	bw := bufio.NewWriterSize(out, 1<<20)
	w := &dirTar{tw: tar.NewWriter(bw), dir: dir, links: map[inodeKey]string{}}
	var top unix.Stat_t
	if err := unix.Stat(dir, &top); err != nil {
		return fmt.Errorf("reading %s: %w", dir, err)
	}
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		return w.add(p, top.Dev)
	})
	if err != nil {
		return err
	}
	if err := w.tw.Close(); err != nil {
		return err
	}
	return bw.Flush()
}

type inodeKey struct{ dev, ino uint64 }

type dirTar struct {
	tw    *tar.Writer
	dir   string
	links map[inodeKey]string
}

func (w *dirTar) add(p string, dev uint64) error {
	var st unix.Stat_t
	if p == w.dir {
		if err := unix.Stat(p, &st); err != nil {
			return &fs.PathError{Op: "stat", Path: p, Err: err}
		}
	} else if err := unix.Lstat(p, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: p, Err: err}
	}
	rel, err := filepath.Rel(w.dir, p)
	if err != nil {
		return err
	}
	h := &tar.Header{
		Name: rel, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Format: tar.FormatPAX, PAXRecords: map[string]string{},
	}
	// Without root nobody else's files can be made, so the tree stands for root's.
	if u := os.Geteuid(); u != 0 {
		if h.Uid == u {
			h.Uid = 0
		}
		if h.Gid == os.Getegid() {
			h.Gid = 0
		}
	}
	typ := st.Mode & unix.S_IFMT
	if typ != unix.S_IFDIR && st.Nlink > 1 {
		k := inodeKey{uint64(st.Dev), st.Ino}
		if first, ok := w.links[k]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return w.tw.WriteHeader(h)
		}
		w.links[k] = rel
	}
	switch typ {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(p); err != nil {
			return err
		}
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if typ == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	default:
		return nil // socket
	}
	if err := addXattrs(h, p); err != nil {
		return err
	}
	if err := w.tw.WriteHeader(h); err != nil {
		return fmt.Errorf("%s: %w", p, err)
	}
	if typ == unix.S_IFDIR && uint64(st.Dev) != dev {
		return filepath.SkipDir
	}
	if h.Size == 0 {
		return nil
	}
	return w.copy(p, h.Size)
}

func (w *dirTar) copy(p string, size int64) error {
	f, err := os.OpenFile(p, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.Copy(w.tw, io.LimitReader(f, size))
	if err == nil && n != size {
		err = fmt.Errorf("%s became shorter while it was read", p)
	}
	return err
}

func addXattrs(h *tar.Header, p string) error {
	size, err := unix.Llistxattr(p, nil)
	if err != nil || size == 0 {
		return nil //nolint:nilerr // a filesystem without attributes has none
	}
	names := make([]byte, size)
	if size, err = unix.Llistxattr(p, names); err != nil {
		return &fs.PathError{Op: "listxattr", Path: p, Err: err}
	}
	for _, n := range strings.Split(strings.Trim(string(names[:size]), "\x00"), "\x00") {
		val := make([]byte, 64<<10)
		k, err := unix.Lgetxattr(p, n, val)
		if err != nil {
			return &fs.PathError{Op: "getxattr " + n, Path: p, Err: err}
		}
		h.PAXRecords[paxXattr+n] = string(val[:k])
	}
	return nil
}

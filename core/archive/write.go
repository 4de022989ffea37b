package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Write writes the entries as a tar stream. A file that is gone meanwhile is
// left out, one that got shorter is filled up with zeros, both with a warning;
// one that cannot be read is an error.
func Write(w io.Writer, root string, entries []Entry, say func(Note)) error {
	t := tar.NewWriter(w)
	buf := make([]byte, 256<<10)
	for _, e := range entries {
		err := write(t, tree(root).path(e.Name), e, buf, say)
		if errors.Is(err, fs.ErrNotExist) {
			say(Note{Warning, fmt.Sprintf("%s: gone while it was being archived", e.Name)})
			continue
		}
		if err != nil {
			return err
		}
	}
	return t.Close()
}

func write(t *tar.Writer, path string, e Entry, buf []byte, say func(Note)) error {
	h := &tar.Header{Name: e.Name, Format: tar.FormatPAX}
	switch e.Info.Mode().Type() {
	case fs.ModeDir:
		h.Typeflag, h.Name = tar.TypeDir, e.Name+"/"
	case fs.ModeSymlink:
		to, err := os.Readlink(path)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, to
	case 0:
		return writeFile(t, path, h, buf, say)
	default:
		return nil // counted as found, as with gitlab-runner, and in no archive
	}
	fill(h, e.Info)
	return t.WriteHeader(h)
}

// fill takes mode, owner and time of a file.
func fill(h *tar.Header, fi fs.FileInfo) {
	h.ModTime = fi.ModTime().Truncate(time.Second)
	h.Mode = int64(fi.Mode().Perm())
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		h.Mode = int64(st.Mode & 0o7777)
		h.Uid, h.Gid = int(st.Uid), int(st.Gid)
	}
}

// writeFile writes a regular file. What the walk saw as one may be a link or a
// pipe by now: neither is followed or waited for.
func writeFile(t *tar.Writer, path string, h *tar.Header, buf []byte, say func(Note)) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, unix.ELOOP) {
			return &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		}
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return nil
	}
	h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	fill(h, fi)
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	// The reader is wrapped, so that the buffer is used.
	n, err := io.CopyBuffer(t, struct{ io.Reader }{io.LimitReader(f, h.Size)}, buf)
	if err != nil {
		return fmt.Errorf("archiving %s: %w", path, err)
	}
	if n == h.Size {
		return nil
	}
	say(Note{Warning, fmt.Sprintf("%s: got shorter while it was being archived", h.Name)})
	clear(buf)
	for n < h.Size {
		m, err := t.Write(buf[:min(int64(len(buf)), h.Size-n)])
		if err != nil {
			return err
		}
		n += int64(m)
	}
	return nil
}

// Below says whether a name of a stream stays below the tree that it is for.
func Below(name string) bool {
	clean := filepath.Clean(name)
	return name != "" && !filepath.IsAbs(clean) && !outside(clean)
}

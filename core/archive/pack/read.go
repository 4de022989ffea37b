package pack

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"virtkit/core/zst"
)

// maxLink bounds the target of a symbolic link, in bytes.
const maxLink = 64 << 10

// zstdMagic begins a tarzstd archive.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// Read writes the archive in f, a zip or a tar of zstd, as a tar stream. What is
// neither is told of as a bad zip. What
// its entries are named is for core/archive to judge.
func Read(w io.Writer, f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	magic := make([]byte, 4)
	if n, err := f.ReadAt(magic, 0); err != nil && n < len(magic) {
		return zip.ErrFormat
	}
	if bytes.Equal(magic, zstdMagic) {
		return readTar(w, io.NewSectionReader(f, 0, fi.Size()))
	}
	z, err := zip.NewReader(f, fi.Size())
	if err != nil {
		return err // its words are gitlab-runner's
	}
	z.RegisterDecompressor(zstdMethod, func(r io.Reader) io.ReadCloser {
		d, err := zst.NewReader(r)
		if err != nil {
			return io.NopCloser(failing{err})
		}
		return d
	})
	t := tar.NewWriter(w)
	for _, e := range z.File {
		if err := readEntry(t, e); err != nil {
			return fmt.Errorf("%s: %w", e.Name, err)
		}
	}
	return t.Close()
}

type failing struct{ err error }

// Read implements io.Reader.
func (f failing) Read([]byte) (int, error) { return 0, f.err }

// readTar passes a tar on.
func readTar(w io.Writer, r io.Reader) error {
	z, err := zst.NewReader(r)
	if err != nil {
		return err
	}
	defer z.Close()
	_, err = io.Copy(w, z)
	return err
}

func readEntry(t *tar.Writer, e *zip.File) error {
	h := &tar.Header{Name: e.Name, Format: tar.FormatPAX, ModTime: e.Modified.Truncate(time.Second)}
	h.Uid, h.Gid = owner(e.Extra)
	mode := e.Mode()
	h.Mode = int64(mode.Perm())
	for bit, to := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if mode&bit != 0 {
			h.Mode |= to
		}
	}
	switch {
	case mode.IsDir() || strings.HasSuffix(e.Name, "/"):
		h.Typeflag = tar.TypeDir
		return t.WriteHeader(h)
	case mode&fs.ModeSymlink != 0:
		r, err := e.Open()
		if err != nil {
			return err
		}
		defer r.Close()
		to, err := io.ReadAll(io.LimitReader(r, maxLink))
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, string(to)
		return t.WriteHeader(h)
	case !mode.IsRegular():
		return nil
	}
	r, err := e.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	h.Typeflag, h.Size = tar.TypeReg, int64(e.UncompressedSize64)
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(t, r) // one that is longer or shorter than it says is an error
	return err
}

// owner reads the extra field "ux"; 0 where there is none.
func owner(extra []byte) (uid, gid int) {
	for len(extra) >= 4 {
		id, size := binary.LittleEndian.Uint16(extra), int(binary.LittleEndian.Uint16(extra[2:]))
		extra = extra[4:]
		if size > len(extra) {
			return 0, 0
		}
		if x := extra[:size]; id == 0x7875 && size == 11 && x[0] == 1 && x[1] == 4 && x[6] == 4 {
			return int(binary.LittleEndian.Uint32(x[2:])), int(binary.LittleEndian.Uint32(x[7:]))
		}
		extra = extra[size:]
	}
	return 0, 0
}

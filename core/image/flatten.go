package image

import (
	"archive/tar"
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"
	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// converterVersion is part of what a root is kept by where its inputs are not
// the whole story (local/default): raise it when equal layers would give
// another filesystem.
const converterVersion = 1

// maxLinks keeps below ext4's 65000 names of one file. More names than that
// get a copy of the file.
const maxLinks = 64000

// layerSource is one layer of an image to be made, bottom first.
type layerSource struct {
	name string // for errors
	idx  *index
	open func() (io.ReadCloser, error) // its bytes, compressed or not
}

// corruptError says that a layer's bytes are not those that its index was made
// from: a kept blob went bad on disk, or a file changed while it was read.
type corruptError struct{ layer, want, got string }

func (e *corruptError) Error() string {
	return fmt.Sprintf("layer %s unpacks to %s instead of %s", e.layer, e.got, e.want)
}

// merge plans the root that layers make.
func merge(layers []layerSource) (*plan, error) {
	t := newTree()
	for k, l := range layers {
		if err := t.apply(k, l.idx); err != nil {
			return nil, fault.Newf(fault.System, "layer %s (%d of %d) cannot be unpacked", l.name, k+1, len(layers)).Because(err)
		}
	}
	return t.plan(len(layers)), nil
}

// writeTar writes the planned root as one tar stream in which every name
// appears once, parents and hard link targets first. progress gets the number
// of content bytes written so far.
func (p *plan) writeTar(w io.Writer, layers []layerSource, progress func(int64)) error {
	tw := tar.NewWriter(w)
	for i, d := range p.dirs {
		name := p.paths[i] + "/"
		if name == "/" {
			name = "./"
		}
		if err := tw.WriteHeader(header(d.ino, name)); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	var done int64
	for k, live := range p.content {
		if len(live) == 0 {
			continue
		}
		if err := writeContent(tw, &layers[k], live, func(n int64) {
			done += n
			if progress != nil {
				progress(done)
			}
		}); err != nil {
			return err
		}
	}
	for _, ino := range p.empty {
		if err := tw.WriteHeader(header(ino, ino.paths[0])); err != nil {
			return fmt.Errorf("%q: %w", ino.paths[0], err)
		}
	}
	for _, ino := range p.links {
		if len(ino.paths) > maxLinks {
			return fmt.Errorf("%q has %d names; ext4 takes %d", ino.paths[0], len(ino.paths), maxLinks)
		}
		for _, more := range ino.paths[1:] {
			h := &tar.Header{Typeflag: tar.TypeLink, Name: more, Linkname: ino.paths[0], Format: tar.FormatPAX}
			if err := tw.WriteHeader(h); err != nil {
				return fmt.Errorf("%q: %w", more, err)
			}
		}
	}
	return tw.Close()
}

// writeContent copies those files of one layer that are still visible in the
// end, and checks that the layer is the one that was planned with.
func writeContent(tw *tar.Writer, l *layerSource, live map[int]*inode, progress func(int64)) error {
	in, err := l.open()
	if err != nil {
		return fmt.Errorf("opening layer %s: %w", l.name, err)
	}
	defer in.Close()
	z, _, err := expand(in)
	if err != nil {
		return &corruptError{l.name, l.idx.DiffID, err.Error()}
	}
	defer z.Close()
	ra := readAhead(z)
	defer ra.Close()
	t := &hashed{r: ra, h: sha256.New()}
	ord, buf := 0, make([]byte, 256<<10)
	var writing error
	err = eachEntry(t, func(e entry, r io.Reader) error {
		ino := live[ord]
		ord++
		if ino == nil {
			return nil
		}
		if e.Size != ino.Size {
			return errors.New("another size than planned")
		}
		if writing = tw.WriteHeader(header(ino, ino.paths[0])); writing != nil {
			writing = fmt.Errorf("%q: %w", ino.paths[0], writing)
			return writing
		}
		dst := &noted{w: tw}
		n, err := io.CopyBuffer(dst, struct{ io.Reader }{r}, buf)
		writing = dst.err
		progress(n)
		return err
	})
	switch {
	case writing != nil:
		return writing
	case err != nil:
		return &corruptError{l.name, l.idx.DiffID, err.Error()}
	case t.digest() != l.idx.DiffID:
		return &corruptError{l.name, l.idx.DiffID, t.digest()}
	}
	return nil
}

// noted remembers the error of a write, to tell it from one of a read.
type noted struct {
	w   io.Writer
	err error
}

func (n *noted) Write(p []byte) (int, error) {
	k, err := n.w.Write(p)
	n.err = err
	return k, err
}

func header(i *inode, name string) *tar.Header {
	h := &tar.Header{
		Typeflag: i.Type, Name: name, Mode: int64(i.Mode), Uid: int(i.UID), Gid: int(i.GID),
		ModTime: i.mtime(), Format: tar.FormatPAX,
	}
	switch i.Type {
	case tar.TypeReg:
		h.Size = i.Size
	case tar.TypeSymlink:
		h.Linkname = i.Link
	case tar.TypeChar, tar.TypeBlock:
		h.Devmajor, h.Devminor = int64(i.Major), int64(i.Minor)
	}
	for k, v := range i.Xattrs {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[paxXattr+k] = v
	}
	return h
}

// writeExt4 makes path, which must not exist, the ext4 image of the planned
// root, durably. On an error nothing is left at path.
func (p *plan) writeExt4(path string, layers []layerSource, maxBytes int64, progress func(int64)) (err error) {
	// The converter sets room for block descriptors aside by the largest size
	// it may reach: 4 KiB for 16 GiB. Twice the need is plenty.
	need := p.size + p.inodes*32 + 64<<20
	if maxBytes > 0 && p.size > maxBytes {
		return fault.Newf(fault.System, "the image unpacks to %d bytes; the limit is %d", p.size, maxBytes)
	}
	const step = 16 << 30
	limit := (2*need + step - 1) / step * step

	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return noSpace(path, err)
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = noSpace(path, e)
		}
		if err != nil {
			os.Remove(path)
		}
	}()
	out := &sparseFile{f: f}
	pr, pw := io.Pipe()
	emitted := make(chan error, 1)
	go func() {
		bw := bufio.NewWriterSize(pw, 512<<10)
		err := p.writeTar(bw, layers, progress)
		if err == nil {
			err = bw.Flush()
		}
		pw.CloseWithError(err)
		emitted <- err
	}()
	converting := tar2ext4.ConvertTarToExt4(pr, out, tar2ext4.MaximumDiskSize(limit))
	pr.CloseWithError(errConverterGone)
	if e := <-emitted; e != nil && !errors.Is(e, errConverterGone) {
		return noSpace(path, e)
	}
	if converting != nil {
		return noSpace(path, fmt.Errorf("writing the filesystem: %w", converting))
	}
	if err := out.f.Truncate(out.end); err != nil {
		return noSpace(path, err)
	}
	if err := padInodeBitmaps(f); err != nil {
		return noSpace(path, err)
	}
	return noSpace(path, out.finish())
}

var errConverterGone = errors.New("image: the converter ended")

// sparseFile leaves holes where a file would get whole blocks of zeros.
type sparseFile struct {
	f   *os.File
	off int64
	end int64 // high water; below it everything is written as given
	wb  int64 // up to here the kernel was told to begin writing to disk
}

var zeroBlock [4096]byte

func (s *sparseFile) Read(p []byte) (int, error) {
	n, err := s.f.ReadAt(p, s.off)
	s.off += int64(n)
	return n, err
}

func (s *sparseFile) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += s.off
	case io.SeekEnd:
		off += s.end
	}
	if off < 0 {
		return 0, unix.EINVAL
	}
	s.off = off
	return off, nil
}

func (s *sparseFile) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n, zero := s.run(p[done:])
		if !zero {
			if _, err := s.f.WriteAt(p[done:done+n], s.off); err != nil {
				return done, err
			}
		}
		s.off += int64(n)
		s.end = max(s.end, s.off)
		done += n
	}
	// The final flush waits for the disk; starting early makes it short.
	if s.end-s.wb >= 32<<20 && s.off == s.end {
		_ = unix.SyncFileRange(int(s.f.Fd()), s.wb, s.end-s.wb, unix.SYNC_FILE_RANGE_WRITE)
		s.wb = s.end
	}
	return len(p), nil
}

// run is how many bytes of p are alike: to be written, or blocks of zeros
// beyond everything written so far.
func (s *sparseFile) run(p []byte) (n int, zero bool) {
	if s.off < s.end || s.off%4096 != 0 {
		// Up to the next block in new territory.
		n = len(p)
		if s.off >= s.end {
			n = min(n, int(4096-s.off%4096))
		} else {
			n = int(min(int64(n), s.end-s.off))
		}
		return n, false
	}
	for n+4096 <= len(p) {
		z := [4096]byte(p[n:n+4096]) == zeroBlock
		if n == 0 {
			zero = z
		} else if z != zero {
			return n, zero
		}
		n += 4096
	}
	if n == 0 || !zero {
		return len(p), false
	}
	return n, true
}

// finish sets the length and waits until everything is on disk.
func (s *sparseFile) finish() error {
	if err := s.f.Truncate(s.end); err != nil {
		return err
	}
	return s.f.Sync()
}

// noSpace gives the errors of a full or read-only filesystem their name.
func noSpace(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC):
		return fault.Newf(fault.System, "the filesystem of %s is full%s", path, freeOn(path)).
			Hint("vk gc removes images that are no longer used; or set state_dir to a larger filesystem").Because(err)
	case errors.Is(err, unix.EDQUOT):
		return fault.Newf(fault.System, "the disk quota on %s is used up", path).
			Hint("vk gc removes images that are no longer used").Because(err)
	case errors.Is(err, unix.EROFS):
		return fault.Newf(fault.System, "the filesystem of %s is read-only", path).
			Hint("set state_dir to a place that can be written").Because(err)
	case errors.Is(err, unix.EFBIG):
		return fault.Newf(fault.System, "the filesystem of %s takes no file this large", path).
			Hint("set state_dir to another filesystem, or raise the file size limit (ulimit -f)").Because(err)
	}
	return err
}

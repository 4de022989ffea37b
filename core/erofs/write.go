package erofs

import (
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// FSType is what a mount of an image is asked for as.
const FSType = "erofs"

// Stats are what an image holds.
type Stats struct {
	Files int   // inodes
	Bytes int64 // of the image
}

// partSize is how much of the metadata one goroutine fills at once.
const partSize = 64 * blockSize

// Write writes the image to path, which must not exist, readable by its owner
// alone. It is not made durable. On error no file is left.
func (t *Tree) Write(ctx context.Context, path string) (st Stats, err error) {
	l, err := t.plan()
	if err != nil {
		return st, err
	}
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return st, err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(path)
		}
	}()
	if err := out.Truncate(l.end * blockSize); err != nil {
		return st, err
	}
	super := make([]byte, blockSize)
	l.putSuper(super, t.root)
	if _, err := out.WriteAt(super, 0); err != nil {
		return st, err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	l.parts(func(part []*node) {
		g.Go(func() error {
			if err := context.Cause(gctx); err != nil {
				return err
			}
			return fill(gctx, out, part)
		})
	})
	if err := g.Wait(); err != nil {
		return st, fmt.Errorf("packing: %w", err)
	}
	return Stats{Files: len(l.nodes), Bytes: l.end * blockSize}, nil
}

// parts cuts the inodes into runs whose metadata lies in blocks of their own.
func (l *layout) parts(f func([]*node)) {
	for start := 0; start < len(l.nodes); {
		limit := l.nodes[start].off/blockSize*blockSize + partSize
		end := start + 1
		for end < len(l.nodes) && l.nodes[end].off < limit {
			end++
		}
		f(l.nodes[start:end])
		start = end
	}
}

// fill writes the metadata of part and all of its content.
func fill(ctx context.Context, out *os.File, part []*node) error {
	base := part[0].off / blockSize * blockSize
	last := part[len(part)-1]
	buf := make([]byte, (last.off+inodeSize+int64(last.tail)-base+blockSize-1)/blockSize*blockSize)
	c := copier{out: out, dir: -1}
	defer c.close()
	for _, n := range part {
		b := buf[n.off-base:]
		n.putInode(b)
		tail := b[inodeSize : inodeSize+n.tail]
		if n.src == nil {
			rest := n.size - int64(n.tail)
			copy(tail, n.data[rest:])
			if rest > 0 {
				if _, err := out.WriteAt(n.data[:rest], n.block*blockSize); err != nil {
					return err
				}
			}
			continue
		}
		if err := c.file(ctx, n, tail); err != nil {
			return err
		}
	}
	_, err := out.WriteAt(buf, base)
	return err
}

// copier copies files; those of one directory come together and share its
// descriptor.
type copier struct {
	out *os.File
	src *source
	dir int // descriptor of src; -1 = none
	buf []byte
}

func (c *copier) close() {
	if c.dir >= 0 {
		unix.Close(c.dir)
	}
}

func (c *copier) enter(src *source) error {
	if c.src == src {
		return nil
	}
	c.close()
	c.src, c.dir = src, -1
	fd, err := src.open()
	if err != nil {
		return err
	}
	c.dir = fd
	return nil
}

// open opens the directory, following no symlink below its top.
func (s *source) open() (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NOFOLLOW
	if s.parent == nil {
		fd, err := unix.Open(s.name, flags, 0)
		if err != nil {
			return -1, &os.PathError{Op: "open", Path: s.name, Err: err}
		}
		return fd, nil
	}
	up, err := s.parent.open()
	if err != nil {
		return -1, err
	}
	defer unix.Close(up)
	fd, err := unix.Openat(up, s.name, flags, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: s.path(), Err: err}
	}
	return fd, nil
}

// file puts the last part of a file's content into tail and the rest into its
// blocks. A file that is not as long as it was is an error: nothing may change
// a tree while it is packed.
func (c *copier) file(ctx context.Context, n *node, tail []byte) error {
	if n.size == 0 {
		return nil
	}
	if err := c.enter(n.src); err != nil {
		return err
	}
	fd, err := unix.Openat(c.dir, n.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: n.src.path() + "/" + n.name, Err: err}
	}
	defer unix.Close(fd)
	off := n.block * blockSize
	for rest := n.size - int64(n.tail); rest > 0; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if c.buf == nil {
			c.buf = make([]byte, 256<<10)
		}
		b := c.buf[:min(rest, int64(len(c.buf)))]
		if err := readFull(fd, b); err != nil {
			return n.changed(err)
		}
		if _, err := c.out.WriteAt(b, off); err != nil {
			return err
		}
		off, rest = off+int64(len(b)), rest-int64(len(b))
	}
	if err := readFull(fd, tail); err != nil {
		return n.changed(err)
	}
	return nil
}

func (n *node) changed(err error) error {
	if err == io.ErrUnexpectedEOF {
		return fmt.Errorf("%s/%s became shorter while it was packed", n.src.path(), n.name)
	}
	return &os.PathError{Op: "read", Path: n.src.path() + "/" + n.name, Err: err}
}

// readFull fills b from fd.
func readFull(fd int, b []byte) error {
	for len(b) > 0 {
		k, err := unix.Read(fd, b)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case k == 0:
			return io.ErrUnexpectedEOF
		default:
			b = b[k:]
		}
	}
	return nil
}

package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

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

// partSize is how much of the metadata a worker fills at once, windowSize how
// much content it writes at once, in bytes: whole blocks.
const (
	partSize   = 16 * blockSize
	windowSize = 256 * blockSize
)

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
	if err := l.fill(ctx, out); err != nil {
		return st, fmt.Errorf("packing: %w", err)
	}
	return Stats{Files: len(l.nodes), Bytes: l.end * blockSize}, nil
}

// fill writes what is behind the superblock: each worker takes the next part.
func (l *layout) fill(ctx context.Context, out *os.File) error {
	parts := l.parts()
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(workers, len(parts)) {
		g.Go(func() error {
			c := copier{ctx: ctx, out: out, dir: -1, data: make([]byte, 0, windowSize)}
			defer c.close()
			for {
				i := int(next.Add(1)) - 1
				if i >= len(parts) {
					return nil
				}
				if err := c.part(parts[i]); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// parts cuts the inodes into runs whose metadata lies in blocks of their own.
// The content of a run is one row of blocks too.
func (l *layout) parts() (all [][]*node) {
	for start := 0; start < len(l.nodes); {
		limit := l.nodes[start].off/blockSize*blockSize + partSize
		end := start + 1
		for end < len(l.nodes) && l.nodes[end].off < limit {
			end++
		}
		all = append(all, l.nodes[start:end])
		start = end
	}
	return all
}

// copier writes parts, one after the other. Content is read to where it goes in
// a part's metadata or in a window of its blocks, and written in as few and as
// long pieces as there are: a filesystem takes a long piece in large folios, for
// a fraction of what single pages cost.
type copier struct {
	ctx context.Context
	out *os.File
	src *source // whose descriptor is dir; files of one directory come together
	dir int     // -1 = none

	meta []byte // of the part
	data []byte // blocks that are to be written at off
	off  int64
	iov  [2][]byte
}

// part writes the metadata of some nodes and all of their content.
func (c *copier) part(part []*node) error {
	base := part[0].off / blockSize * blockSize
	last := part[len(part)-1]
	size := int((last.off + inodeSize + int64(last.tail) - base + blockSize - 1) / blockSize * blockSize)
	if cap(c.meta) < size {
		c.meta = make([]byte, size)
	}
	c.meta = c.meta[:size]
	clear(c.meta)
	for _, n := range part {
		if err := context.Cause(c.ctx); err != nil {
			return err
		}
		b := c.meta[n.off-base:]
		n.putInode(b)
		tail := b[inodeSize : inodeSize+n.tail]
		if n.block != 0 && len(c.data) == 0 {
			c.off = n.block * blockSize
		}
		if n.src != nil {
			if err := c.file(n, tail); err != nil {
				return err
			}
			continue
		}
		rest := n.data[:n.size-int64(n.tail)]
		copy(tail, n.data[len(rest):])
		for len(rest) > 0 {
			b, err := c.room(int64(len(rest)))
			if err != nil {
				return err
			}
			c.keep(copy(b, rest))
			rest = rest[len(b):]
		}
		c.pad()
	}
	if err := c.flush(); err != nil {
		return err
	}
	_, err := c.out.WriteAt(c.meta, base)
	return err
}

// room is where the next bytes of content go: up to max, at least one.
func (c *copier) room(max int64) ([]byte, error) {
	if len(c.data) == cap(c.data) {
		if err := c.flush(); err != nil {
			return nil, err
		}
	}
	return c.data[len(c.data) : len(c.data)+int(min(max, int64(cap(c.data)-len(c.data))))], nil
}

// keep takes the n bytes in that have been put into the last room.
func (c *copier) keep(n int) { c.data = c.data[:len(c.data)+n] }

// pad fills the block up.
func (c *copier) pad() {
	if n := -len(c.data) & (blockSize - 1); n > 0 {
		clear(c.data[len(c.data) : len(c.data)+n])
		c.keep(n)
	}
}

// flush writes the window.
func (c *copier) flush() error {
	_, err := c.out.WriteAt(c.data, c.off)
	c.off += int64(len(c.data))
	c.data = c.data[:0]
	return err
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
// blocks. A file that is not what it was when the tree was read is an error:
// nothing may change a tree while it is packed.
func (c *copier) file(n *node, tail []byte) error {
	if n.size == 0 {
		return nil // its time and size say that it has nothing to copy
	}
	if err := c.enter(n.src); err != nil {
		return err
	}
	fd, err := unix.Openat(c.dir, n.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: n.src.path() + "/" + n.name, Err: err}
	}
	defer unix.Close(fd)
	rest := n.size - int64(n.tail)
	for rest > 0 {
		b, err := c.room(rest)
		if err != nil {
			return err
		}
		whole := int64(len(b)) == rest
		if whole { // with what follows: most files are one call
			err = c.read(fd, b, tail)
		} else {
			err = c.read(fd, b, nil)
		}
		if err != nil {
			return n.changed(err)
		}
		c.keep(len(b))
		if rest -= int64(len(b)); whole {
			tail = nil
		} else if err := context.Cause(c.ctx); err != nil {
			return err
		}
	}
	c.pad()
	if err := c.read(fd, nil, tail); err != nil {
		return n.changed(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: n.src.path() + "/" + n.name, Err: err}
	}
	if n.was != n.src.id(&st) {
		return n.changed(errOther)
	}
	return nil
}

// errOther is a file that has another size, time or number than it had.
var errOther = errors.New("it is not the file that was there")

func (n *node) changed(err error) error {
	name := n.src.path() + "/" + n.name
	switch err {
	case io.ErrUnexpectedEOF:
		return fmt.Errorf("%s became shorter while it was packed", name)
	case errOther:
		return fmt.Errorf("%s was changed while it was packed", name)
	}
	return &os.PathError{Op: "read", Path: name, Err: err}
}

// read fills a and then b from fd.
func (c *copier) read(fd int, a, b []byte) error {
	for len(a)+len(b) > 0 {
		var k int
		var err error
		switch {
		case len(b) == 0:
			k, err = unix.Read(fd, a)
		case len(a) == 0:
			k, err = unix.Read(fd, b)
		default:
			c.iov = [2][]byte{a, b}
			k, err = unix.Readv(fd, c.iov[:])
		}
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case k == 0:
			return io.ErrUnexpectedEOF
		default:
			m := min(k, len(a))
			a, b = a[m:], b[k-m:]
		}
	}
	return nil
}

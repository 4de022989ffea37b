package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// FSType is what a mount of an image is asked for as.
const FSType = "erofs"

// Stats are what an image holds.
type Stats struct {
	Files  int   // inodes
	Bytes  int64 // of the image, without the hole among its inodes
	Length int64 // of its file, in bytes
}

// partSize is how much of the directories' metadata a worker fills at once,
// windowSize how much content it writes at once, in bytes: whole blocks.
const (
	partSize   = 16 * blockSize
	windowSize = 512 * blockSize
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
	room := l.place
	if err := l.fill(ctx, out, t.copied); err != nil {
		return st, fmt.Errorf("packing: %w", err)
	}
	super := make([]byte, blockSize)
	l.putSuper(super, t.root)
	if _, err := out.WriteAt(super, 0); err != nil {
		return st, err
	}
	st = Stats{Files: len(l.dirs) + len(l.files), Length: l.end.data * blockSize}
	// Files may have had nothing to write, so the file is not that long yet.
	if err := out.Truncate(st.Length); err != nil {
		return st, err
	}
	first := room.data
	for _, n := range l.dirs {
		if n.block != 0 {
			first = min(first, n.block)
		}
	}
	st.Bytes = st.Length - (first-l.end.meta)*blockSize
	return st, nil
}

// fill writes what is behind the superblock: the files, and then the
// directories, whose entries tell where each file is.
func (l *layout) fill(ctx context.Context, out *os.File, copied func(*node)) error {
	var parts [][]*node
	for p := range slices.Chunk(l.files, partFiles) {
		parts = append(parts, p)
	}
	turns := make([]chan place, len(parts)+1)
	for i := range turns {
		turns[i] = make(chan place, 1)
	}
	turns[0] <- l.place
	to := &image{file: out}
	work := func(parts [][]*node, do func(c *copier, i int) error) error {
		g, ctx := errgroup.WithContext(ctx)
		var next atomic.Int64
		for range min(workers, len(parts)) {
			g.Go(func() error {
				c := &copier{ctx: ctx, out: to, dir: -1, data: make([]byte, 0, windowSize), copied: copied}
				defer c.close()
				for {
					i := int(next.Add(1)) - 1
					if i >= len(parts) {
						return nil
					}
					if err := do(c, i); err != nil {
						return err
					}
				}
			})
		}
		return g.Wait()
	}
	if err := work(parts, func(c *copier, i int) error {
		newest, err := c.files(parts[i], turns[i], turns[i+1])
		for old := l.newest.Load(); newest > old && !l.newest.CompareAndSwap(old, newest); old = l.newest.Load() {
		}
		return err
	}); err != nil {
		return err
	}
	l.end = <-turns[len(parts)]
	if l.end.meta > l.limit { // inodes would lie on content
		return fmt.Errorf("the files' inodes take %d blocks, room is for %d", l.end.meta-l.place.meta, l.limit-l.place.meta)
	}
	dirs := l.dirParts()
	if err := work(dirs, func(c *copier, i int) error { return c.dirs(dirs[i]) }); err != nil {
		return err
	}
	for _, n := range l.late {
		n.sec, n.nsec = l.newest.Load()+n.by, 0
		b := make([]byte, inodeSize)
		n.putInode(b)
		if _, err := to.WriteAt(b, n.off); err != nil {
			return err
		}
	}
	return nil
}

// dirParts cuts the directories into runs whose metadata lies in blocks of their
// own. The content of a run is one row of blocks too.
func (l *layout) dirParts() (all [][]*node) {
	for start := 0; start < len(l.dirs); {
		limit := l.dirs[start].off/blockSize*blockSize + partSize
		end := start + 1
		for end < len(l.dirs) && l.dirs[end].off < limit {
			end++
		}
		all = append(all, l.dirs[start:end])
		start = end
	}
	return all
}

// image is the file that is written. A filesystem lets one write to a file at
// once and has others spin on a processor until they may: they wait here, where
// another goroutine goes on meanwhile.
type image struct {
	mu   sync.Mutex
	file *os.File
}

func (m *image) WriteAt(b []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.file.WriteAt(b, off)
}

// copier writes parts, one after the other. Content is read to where it goes in
// a part's metadata or in a window of its blocks, and written in as few and as
// long pieces as there are: a filesystem takes a long piece in large folios, for
// a fraction of what single pages cost.
//
// A file is opened once, and its size is asked for then: so what the kernel
// looks up for it is looked up once and still at hand when it is read. Where a
// part goes is known when all parts before it have been read, as the image of a
// tree does not depend on who read what first; until then it waits in memory,
// as long as its window is enough.
type copier struct {
	ctx    context.Context
	out    *image
	src    *source // whose descriptor is dir; files of one directory come together
	dir    int     // -1 = none
	copied func(*node)

	meta   []byte       // of the part
	turn   <-chan place // tells where the part goes; nil once at and off are that
	at     place
	used   int64  // of meta
	blocks int64  // of content that the part has
	data   []byte // blocks that are to be written at off
	off    int64
	iov    [2][]byte
}

// files writes some files: their inodes and all of their content. It takes the
// part's place from turn and gives next that of what follows. It returns the
// latest time among them.
func (c *copier) files(part []*node, turn <-chan place, next chan<- place) (newest int64, err error) {
	c.turn, c.used, c.blocks = turn, 0, 0
	c.clean(int64(len(part)+inodesInBlock-1) / inodesInBlock * blockSize)
	for _, n := range part {
		if c.ctx.Err() != nil {
			return 0, context.Cause(c.ctx)
		}
		if n.src != nil {
			err = c.file(n)
		} else {
			err = c.made(n, c.place(n))
		}
		if err != nil {
			return 0, err
		}
		newest = max(newest, n.sec) // a made file has no time yet
	}
	if err := c.begin(); err != nil {
		return 0, err
	}
	end := place{c.at.meta + (c.used+blockSize-1)/blockSize, c.at.data + c.blocks}
	if end.data > 1<<32-1 {
		return 0, fmt.Errorf("the tree has %d bytes, more than an image can hold", end.data*blockSize)
	}
	next <- end
	if err := c.flush(); err != nil {
		return 0, err
	}
	for _, n := range part {
		b := c.meta[n.off:]
		n.off += c.at.meta * blockSize
		if n.size > int64(n.tail) {
			n.block += c.at.data
		}
		n.putInode(b)
	}
	_, err = c.out.WriteAt(c.meta[:(end.meta-c.at.meta)*blockSize], c.at.meta*blockSize)
	return newest, err
}

// clean makes the part's metadata empty, and size bytes long.
func (c *copier) clean(size int64) {
	if int64(cap(c.meta)) < size {
		c.meta = make([]byte, size)
	}
	c.meta = c.meta[:size]
	clear(c.meta)
}

// place gives a file its inode and blocks in the part, and returns where the
// last part of its content goes.
func (c *copier) place(n *node) (tail []byte) {
	n.tail = int(n.size % blockSize)
	if n.tail > maxTail {
		n.tail = 0
	}
	c.used = n.put(c.used)
	n.block = 0
	if rest := n.size - int64(n.tail); rest > 0 {
		n.block = c.blocks
		c.blocks += (rest + blockSize - 1) / blockSize
	}
	return c.meta[n.off+inodeSize:][:n.tail]
}

// begin waits until it is known where the part goes.
func (c *copier) begin() error {
	if c.turn == nil {
		return nil
	}
	select {
	case c.at = <-c.turn:
		c.turn, c.off = nil, c.at.data*blockSize
		return nil
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	}
}

// dirs writes some directories.
func (c *copier) dirs(part []*node) error {
	base := part[0].off / blockSize * blockSize
	last := part[len(part)-1]
	c.clean((last.off + inodeSize + int64(last.tail) - base + blockSize - 1) / blockSize * blockSize)
	for _, n := range part {
		if c.ctx.Err() != nil {
			return context.Cause(c.ctx)
		}
		b := c.meta[n.off-base:]
		n.putInode(b)
		if n.block != 0 && len(c.data) == 0 {
			c.off = n.block * blockSize
		}
		n.fillDir()
		err := c.made(n, b[inodeSize:][:n.tail])
		n.data = nil
		if err != nil {
			return err
		}
	}
	if err := c.flush(); err != nil {
		return err
	}
	_, err := c.out.WriteAt(c.meta, base)
	return err
}

// made puts the content of what is no file of the host into its tail and blocks.
func (c *copier) made(n *node, tail []byte) error {
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
	return nil
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
	if len(c.data) == 0 {
		return nil
	}
	if err := c.begin(); err != nil {
		return err
	}
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

// file places a file and copies its content. One that changes meanwhile is an
// error: nothing may change a tree while it is packed.
func (c *copier) file(n *node) error {
	if err := c.enter(n.src); err != nil {
		return err
	}
	fd, err := openAt(c.dir, n.name)
	if err != nil {
		return &os.PathError{Op: "open", Path: n.src.path() + "/" + n.name, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: n.src.path() + "/" + n.name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return n.changed(errOther)
	}
	n.mode = unix.S_IFREG | 0o644
	if st.Mode&0o111 != 0 {
		n.mode |= 0o111
	}
	n.size, n.sec, n.nsec = st.Size, st.Mtim.Sec, uint32(st.Mtim.Nsec)
	was := n.src.id(&st)
	tail := c.place(n)
	if n.size == 0 {
		return nil
	}
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
		} else if c.ctx.Err() != nil {
			return context.Cause(c.ctx)
		}
	}
	c.pad()
	if err := c.read(fd, nil, tail); err != nil {
		return n.changed(err)
	}
	if c.copied != nil {
		c.copied(n)
	}
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: n.src.path() + "/" + n.name, Err: err}
	}
	if was != n.src.id(&st) {
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

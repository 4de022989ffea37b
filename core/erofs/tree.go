package erofs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// node is one name of the tree.
type node struct {
	name     string
	parent   *node // the root's is itself
	mode     uint32
	size     int64
	sec      int64
	nsec     uint32
	children []*node // of a directory; sorted by sortAll

	src  *source // of a regular file: the directory its content is in
	data []byte  // of a symlink, a directory (made by fillDir) and a made file

	late bool  // its time is that of the newest file, and by seconds
	by   int64 // 0 unless late

	off   int64 // of the inode in the image
	block int64 // first block of what is not inline; 0 = none
	tail  int   // bytes inline
	ino   uint32
}

func (n *node) isDir() bool { return n.mode&unix.S_IFMT == unix.S_IFDIR }

// id is what tells a file from another one, and from itself changed: whatever
// changes a file moves its change time, which nobody can set.
type id struct {
	dev, ino    uint64
	size        int64
	csec, cnsec int64
}

func (s *source) id(st *unix.Stat_t) id {
	if s.store {
		return id{dev: st.Dev, ino: st.Ino, size: st.Size}
	}
	return id{st.Dev, st.Ino, st.Size, st.Ctim.Sec, st.Ctim.Nsec}
}

// source is a directory of the host whose files are in the tree. Its path is
// that of parent with name below it.
type source struct {
	parent *source
	name   string // of the top: an absolute path
	store  bool   // see AddStore
}

func (s *source) path() string {
	if s.parent == nil {
		return s.name
	}
	return s.parent.path() + "/" + s.name
}

// Tree is an image to be. Its zero value is not usable: see New.
type Tree struct {
	root    *node
	skipped int
	copied  func(*node) // for tests: called between a file's content and the last look at it
}

// New is an empty tree.
func New() *Tree {
	r := &node{mode: unix.S_IFDIR | 0o755}
	r.parent = r
	return &Tree{root: r}
}

// Skipped is how many sockets, pipes and devices were left out.
func (t *Tree) Skipped() int { return t.skipped }

// ErrMounted is wrapped when another filesystem is mounted inside a directory.
var ErrMounted = errors.New("erofs: another filesystem is mounted there")

// Skip tells what of a directory is left out.
type Skip func(dir, name string) bool

// AddDir puts what is below the host's directory dir at the place at of the
// tree ("" = its root, else slash-separated), merged with what is there: a
// file that is there already stays. skip, when set, is asked for each name and
// leaves out what it answers true to, with all below it; dir is the path in the
// tree of the directory that it is in ("" = the root). It is called by several
// goroutines at once. dir must not change until Write has ended: Write fails when
// a name has gone or become another kind of thing since, and when a file changes
// while it is copied; one that was rewritten in between is packed as it then is.
func (t *Tree) AddDir(ctx context.Context, dir, at string, skip Skip) error {
	return t.add(ctx, &source{name: dir}, at, skip)
}

// AddStore is AddDir of a directory whose files never change once they have
// their names, while others may still come and times be moved: git's objects.
func (t *Tree) AddStore(ctx context.Context, dir, at string, skip Skip) error {
	return t.add(ctx, &source{name: dir, store: true}, at, skip)
}

func (t *Tree) add(ctx context.Context, top *source, at string, skip Skip) error {
	dir := top.name
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	into := t.dir(at)
	into.sec, into.nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
	s := &scan{ctx: ctx, dev: st.Dev, skip: skip, slots: make(chan struct{}, workers)}
	s.wg.Add(1)
	s.dir(fd, top, into, strings.Trim(at, "/"))
	s.wg.Wait()
	t.skipped += s.skipped
	return s.err
}

// AddFile puts a file with this content at path, in the place of what is there.
// Its time is that of the newest file of a directory.
func (t *Tree) AddFile(p string, data []byte) {
	dir := t.dir(path.Dir(p))
	n := &node{name: path.Base(p), mode: unix.S_IFREG | 0o644, size: int64(len(data)), data: data, late: true}
	for i, c := range dir.children {
		if c.name == n.name {
			dir.children[i] = n
			n.parent = dir
			return
		}
	}
	dir.add(n)
}

// Later gives the file at path a time that is by seconds after that of the
// newest file. It reports whether there is one.
func (t *Tree) Later(p string, by int64) bool {
	n := t.root
	for part := range strings.SplitSeq(strings.Trim(p, "/"), "/") {
		if n = n.child(part); n == nil {
			return false
		}
	}
	if n.isDir() {
		return false
	}
	n.late, n.by = true, by
	return true
}

func (n *node) child(name string) *node {
	for _, c := range n.children {
		if c.name == name {
			return c
		}
	}
	return nil
}

func (n *node) add(c *node) {
	c.parent = n
	n.children = append(n.children, c)
}

// dir finds a directory of the tree, made where it is missing.
func (t *Tree) dir(p string) *node {
	n := t.root
	for part := range strings.SplitSeq(strings.Trim(path.Clean("/"+p), "/"), "/") {
		if part == "" {
			continue
		}
		c := n.child(part)
		if c == nil || !c.isDir() {
			c = &node{name: part, mode: unix.S_IFDIR | 0o755, sec: n.sec}
			n.add(c)
		}
		n = c
	}
	return n
}

// workers is how many goroutines read at once: files come from the page cache
// at best, and from a disk that likes a queue at worst.
const workers = 8

// scan is one AddDir.
type scan struct {
	ctx   context.Context
	dev   uint64
	skip  Skip
	slots chan struct{}
	wg    sync.WaitGroup
	done  atomic.Bool // err is set

	mu      sync.Mutex
	err     error
	skipped int
}

func (s *scan) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.done.Store(true)
}

// dir reads one directory and closes fd. Only this call touches into.
func (s *scan) dir(fd int, src *source, into *node, at string) {
	defer s.wg.Done()
	defer unix.Close(fd)
	if err := context.Cause(s.ctx); err != nil {
		s.fail(err)
		return
	}
	all, err := entriesOf(fd)
	if err != nil {
		s.fail(&os.PathError{Op: "readdir", Path: src.path(), Err: err})
		return
	}
	// As the image has them, and by several goroutines here.
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	var there map[string]*node
	if len(into.children) > 0 {
		there = map[string]*node{}
		for _, c := range into.children {
			there[c.name] = c
		}
	}
	into.children = slices.Grow(into.children, len(all))
	skipped := 0
	nodes := make([]node, len(all)) // at once: one by one they cost more than their look
	for i, e := range all {
		if s.done.Load() {
			return
		}
		if s.skip != nil && s.skip(at, e.name) {
			continue
		}
		if !s.one(fd, e, src, into, &nodes[i], there[e.name], at, &skipped) {
			return
		}
	}
	s.mu.Lock()
	s.skipped += skipped
	s.mu.Unlock()
}

// one takes in one name, as n; false ends the scan.
func (s *scan) one(fd int, e entry, src *source, into, n, old *node, at string, skipped *int) bool {
	fail := func(op string, err error) bool {
		s.fail(&os.PathError{Op: op, Path: src.path() + "/" + e.name, Err: err})
		return false
	}
	var st unix.Stat_t
	kind := e.kind
	if kind == 0 || kind == unix.S_IFLNK {
		if err := unix.Fstatat(fd, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fail("stat", err)
		}
		kind = st.Mode & unix.S_IFMT
	}
	if old != nil && (!old.isDir() || kind != unix.S_IFDIR) {
		return true
	}
	*n = node{name: e.name, mode: kind}
	switch kind {
	case unix.S_IFREG:
		n.src = src // all else is asked of the open file
	case unix.S_IFLNK:
		n.mode |= 0o777
		buf := make([]byte, unix.PathMax)
		l, err := unix.Readlinkat(fd, e.name, buf)
		if err != nil {
			return fail("readlink", err)
		}
		n.data, n.size = slices.Clone(buf[:l]), int64(l)
		n.sec, n.nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
	case unix.S_IFDIR:
		sub, err := unix.Openat(fd, e.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return fail("open", err)
		}
		if err := unix.Fstat(sub, &st); err != nil {
			unix.Close(sub)
			return fail("stat", err)
		}
		if st.Dev != s.dev {
			unix.Close(sub)
			s.fail(fmt.Errorf("packing %s/%s: %w", src.path(), e.name, ErrMounted))
			return false
		}
		if old != nil {
			n = old
		} else {
			n.mode |= 0o755
			n.sec, n.nsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
			into.add(n)
		}
		in := e.name
		if at != "" {
			in = at + "/" + e.name
		}
		s.enter(sub, &source{parent: src, name: e.name, store: src.store}, n, in)
		return true
	default:
		*skipped++
		return true
	}
	into.add(n)
	return true
}

// enter reads a directory beside this one when there is a worker free.
func (s *scan) enter(fd int, src *source, n *node, at string) {
	s.wg.Add(1)
	select {
	case s.slots <- struct{}{}:
		go func() {
			defer func() { <-s.slots }()
			s.dir(fd, src, n, at)
		}()
	default:
		s.dir(fd, src, n, at)
	}
}

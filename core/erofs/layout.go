package erofs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The format's numbers (fs/erofs/erofs_fs.h).
const (
	blockSize   = 4096
	superOffset = 1024
	superMagic  = 0xE0F5E1E2
	compatMtime = 0x2 // an inode's time is that of its content
	slotSize    = 32  // of a nid
	inodeSize   = 64  // of an extended inode
	metaBlock   = 1   // first block of the metadata
	layoutPlain = 0   // content in blocks
	layoutTail  = 2   // its last part behind the inode
	direntSize  = 12
	maxName     = 255
)

// maxTail is the longest last part of a file's content that lies behind its
// inode. The format allows a block less an inode; but then each inode would be
// in a block of its own, and who looks at all files of a tree (git status) would
// read all of it, block by block. So 20 and more inodes are in a block, for a
// tenth more blocks of content.
const maxTail = 1024

// partFiles is how many files are read and placed together.
const partFiles = 256

// inodesInBlock is how many inodes of files fit into a block at least.
const inodesInBlock = blockSize / (inodeSize + maxTail)

// layout is where everything goes. What is known of a tree before its files are
// opened is its names: so the directories have their places first, then comes
// room for as many inodes as there are files, each as large as it may become,
// and behind that the directories' content, and the files'. The room that is not
// needed stays a hole of the image's file.
type layout struct {
	dirs   []*node // in order of their place; the root first
	files  []*node // all others, in order of their place
	late   []*node // those of files whose time is told by the newest file
	place  place   // of the first file
	end    place   // behind the last
	limit  int64   // block at which the room for inodes ends
	newest atomic.Int64
}

// place is where inodes and content go next, in blocks.
type place struct{ meta, data int64 }

// plan sorts the tree, and places the directories.
func (t *Tree) plan() (*layout, error) {
	l := &layout{}
	if err := l.visit(t.root); err != nil {
		return nil, err
	}
	// The root's nid has 16 bits: it comes first. The first two slots stay
	// empty, as an inode number of 0 is none.
	off := int64(metaBlock*blockSize + 2*slotSize)
	for i, n := range l.dirs {
		n.ino = uint32(i + 1)
		n.tail = int(n.size % blockSize)
		if n.tail > blockSize-inodeSize {
			n.tail = 0 // a block of its own
		}
		off = n.put(off)
	}
	for i, n := range l.files {
		n.ino = uint32(len(l.dirs) + i + 1)
	}
	parts := (len(l.files) + partFiles - 1) / partFiles
	l.place.meta = (off + blockSize - 1) / blockSize
	l.place.data = l.place.meta + int64((len(l.files)+inodesInBlock-1)/inodesInBlock+parts)
	l.limit = l.place.data
	for _, n := range l.dirs {
		if rest := n.size - int64(n.tail); rest > 0 {
			n.block = l.place.data
			l.place.data += (rest + blockSize - 1) / blockSize
		}
	}
	return l, nil
}

// put places an inode at off or, where it would not fit into a block there, at
// the next block. It returns where the next one may be.
func (n *node) put(off int64) int64 {
	need := int64(inodeSize + n.tail)
	if room := blockSize - off%blockSize; need > room {
		off += room
	}
	n.off = off
	return off + (need+slotSize-1)/slotSize*slotSize
}

// nid is what entries call a node whose place is known.
func (n *node) nid() uint64 { return uint64(n.off-metaBlock*blockSize) / slotSize }

// visit sorts a directory and sizes its content.
func (l *layout) visit(dir *node) error {
	l.dirs = append(l.dirs, dir)
	slices.SortFunc(dir.children, func(a, b *node) int { return cmp.Compare(a.name, b.name) })
	dir.size = dirSize(dir)
	for _, c := range dir.children {
		if len(c.name) > maxName {
			return fmt.Errorf("name %q has more than %d bytes", c.name, maxName)
		}
		if c.isDir() {
			if err := l.visit(c); err != nil {
				return err
			}
			continue
		}
		l.files = append(l.files, c)
		if c.late {
			l.late = append(l.late, c)
		}
	}
	return nil
}

// dirent is an entry of a directory before its place is known.
type dirent struct {
	name string
	to   *node
}

// entries are a directory's in the order in which the kernel searches them: by
// bytes, with "." and ".." among the others.
func entries(dir *node) []dirent {
	out := make([]dirent, 0, len(dir.children)+2)
	self, up := dirent{".", dir}, dirent{"..", dir.parent}
	for _, c := range dir.children {
		if self.to != nil && c.name > "." {
			out, self.to = append(out, self), nil
		}
		if up.to != nil && c.name > ".." {
			out, up.to = append(out, up), nil
		}
		out = append(out, dirent{c.name, c})
	}
	if self.to != nil {
		out = append(out, self)
	}
	if up.to != nil {
		out = append(out, up)
	}
	return out
}

// dirBlocks calls f with the entries of each block.
func dirBlocks(all []dirent, f func(block []dirent, used int)) {
	for len(all) > 0 {
		used, n := 0, 0
		for n < len(all) && used+direntSize+len(all[n].name) <= blockSize {
			used += direntSize + len(all[n].name)
			n++
		}
		f(all[:n], used)
		all = all[n:]
	}
}

func dirSize(dir *node) int64 {
	var blocks, last int64
	dirBlocks(entries(dir), func(_ []dirent, used int) { blocks++; last = int64(used) })
	return (blocks-1)*blockSize + last
}

// fillDir makes a directory's content; its children's nids are known.
func (n *node) fillDir() {
	n.data = make([]byte, n.size)
	off := 0
	dirBlocks(entries(n), func(block []dirent, _ int) {
		name := len(block) * direntSize
		for i, e := range block {
			b := n.data[off+i*direntSize:]
			binary.LittleEndian.PutUint64(b, e.to.nid())
			binary.LittleEndian.PutUint16(b[8:], uint16(name))
			b[10] = fileType(e.to.mode)
			name += copy(n.data[off+name:], e.name)
		}
		off += blockSize
	})
}

func fileType(mode uint32) byte {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return 2
	case unix.S_IFLNK:
		return 7
	}
	return 1
}

// putInode writes an inode into b.
func (n *node) putInode(b []byte) {
	form := uint16(1) // extended
	if n.tail > 0 {
		form |= layoutTail << 1
	}
	links := uint32(1)
	if n.isDir() {
		links = 2
		for _, c := range n.children {
			if c.isDir() {
				links++
			}
		}
	}
	le := binary.LittleEndian
	le.PutUint16(b, form)
	le.PutUint16(b[4:], uint16(n.mode))
	le.PutUint64(b[8:], uint64(n.size))
	le.PutUint32(b[16:], uint32(n.block))
	le.PutUint32(b[20:], n.ino)
	le.PutUint64(b[32:], uint64(n.sec))
	le.PutUint32(b[40:], n.nsec)
	le.PutUint32(b[44:], links)
}

// putSuper writes the superblock into the image's first block.
func (l *layout) putSuper(b []byte, root *node) {
	le := binary.LittleEndian
	s := b[superOffset:]
	le.PutUint32(s, superMagic)
	le.PutUint32(s[8:], compatMtime)
	s[12] = 12 // log2 of the block's size
	le.PutUint16(s[14:], uint16(root.nid()))
	le.PutUint64(s[16:], uint64(len(l.dirs)+len(l.files)))
	le.PutUint64(s[24:], uint64(root.sec))
	le.PutUint32(s[36:], uint32(l.end.data))
	le.PutUint32(s[40:], metaBlock)
}

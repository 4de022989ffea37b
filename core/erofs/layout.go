package erofs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

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

// layout is where everything goes.
type layout struct {
	nodes []*node // in order of their place
	meta  int64   // blocks of metadata
	end   int64   // blocks of all
}

// plan sorts the tree, makes the content of its directories, and gives each
// inode and each content its place.
func (t *Tree) plan() (*layout, error) {
	l := &layout{}
	if err := l.visit(t.root); err != nil {
		return nil, err
	}
	// The root's nid has 16 bits: it comes first. The first two slots stay
	// empty, as an inode number of 0 is none.
	off := int64(metaBlock*blockSize + 2*slotSize)
	for i, n := range l.nodes {
		n.ino = uint32(i + 1)
		n.tail = int(n.size % blockSize)
		if n.tail > blockSize-inodeSize || n.tail > maxTail && !n.isDir() {
			n.tail = 0 // a block of its own
		}
		need := int64(inodeSize + n.tail)
		if room := blockSize - off%blockSize; need > room {
			off += room
		}
		n.off = off
		n.nid = uint64(off-metaBlock*blockSize) / slotSize
		off += (need + slotSize - 1) / slotSize * slotSize
	}
	l.meta = (off+blockSize-1)/blockSize - metaBlock
	next := metaBlock + l.meta
	for _, n := range l.nodes {
		if rest := n.size - int64(n.tail); rest > 0 {
			n.block = next
			next += (rest + blockSize - 1) / blockSize
		}
	}
	if next > 1<<32-1 {
		return nil, fmt.Errorf("the tree has %d bytes, more than an image can hold", next*blockSize)
	}
	l.end = next
	for _, n := range l.nodes {
		if n.isDir() {
			n.fillDir()
		}
	}
	return l, nil
}

// visit sorts a directory and sizes its content.
func (l *layout) visit(dir *node) error {
	l.nodes = append(l.nodes, dir)
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
		l.nodes = append(l.nodes, c)
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
			binary.LittleEndian.PutUint64(b, e.to.nid)
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
	le.PutUint16(s[14:], uint16(root.nid))
	le.PutUint64(s[16:], uint64(len(l.nodes)))
	le.PutUint64(s[24:], uint64(root.sec))
	le.PutUint32(s[36:], uint32(l.end))
	le.PutUint32(s[40:], metaBlock)
}

package image

import (
	"archive/tar"
	"fmt"
	"sort"
	"strings"
)

// A tree is what unpacking an image's layers one after the other would leave
// in an empty directory, held as headers only. It is built bottom layer first
// by apply, which decides everything that depends on order: whiteouts, hard
// links whose first name goes away, replaced types, paths through symlinks.
type tree struct {
	root *node
}

// node is one name. Several nodes may share an inode: hard links.
type node struct {
	parent   *node // the root's is itself
	name     string
	ino      *inode
	children map[string]*node // of a directory
	layer    int              // that last put this name here
	plen     int              // bytes of the whole path
}

// inode is what a name leads to.
type inode struct {
	entry
	layer int // whose tar has the content of a regular file,
	ord   int // as its ord-th entry
	paths []string
}

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	// What Linux follows is 40; unpackers of container images follow 255.
	maxSymlinks = 255
	// Linux's PATH_MAX without its final NUL: other unpackers cannot make
	// longer names, so no image has them.
	maxPath = 4095
)

func newTree() *tree {
	t := &tree{root: &node{children: map[string]*node{}, layer: -1, ino: implicitDir()}}
	t.root.parent = t.root
	return t
}

// implicitDir is a folder that no layer has an entry for (S24).
func implicitDir() *inode { return &inode{entry: entry{Type: tar.TypeDir, Mode: 0o755}} }

func (n *node) isDir() bool { return n.ino.Type == tar.TypeDir }

// apply puts layer k, counted from 0 at the bottom, on top of the tree.
func (t *tree) apply(k int, idx *index) error {
	for ord := range idx.Entries {
		e := &idx.Entries[ord]
		if err := t.add(k, ord, e); err != nil {
			return fmt.Errorf("entry %q: %w", e.Name, err)
		}
	}
	return nil
}

func (t *tree) add(k, ord int, e *entry) error {
	if e.Name == "" {
		if e.Type != tar.TypeDir {
			return fmt.Errorf("the root can only be a directory")
		}
		t.root.ino, t.root.layer = &inode{entry: *e}, k
		return nil
	}
	dirname, base := "", e.Name
	if i := strings.LastIndexByte(e.Name, '/'); i >= 0 {
		dirname, base = e.Name[:i], e.Name[i+1:]
	}
	if strings.HasPrefix(base, whiteout) {
		return t.whiteout(k, dirname, base)
	}
	dir, err := t.walk(dirname, k, true)
	if err != nil {
		return err
	}
	old := dir.children[base]
	switch {
	case e.Type == tar.TypeLink:
		return t.link(k, dir, base, old, e)
	case e.Type == tar.TypeDir && old != nil && old.isDir():
		old.ino, old.layer = &inode{entry: *e, layer: k, ord: ord}, k
	default:
		return dir.put(base, k, &inode{entry: *e, layer: k, ord: ord})
	}
	return nil
}

// put makes name in directory n lead to ino, in the place of what was there.
func (n *node) put(name string, k int, ino *inode) error {
	c := &node{parent: n, name: name, layer: k, ino: ino, plen: n.plen + 1 + len(name)}
	if c.plen > maxPath+1 {
		return fmt.Errorf("its path has more than %d bytes, the most that Linux takes", maxPath)
	}
	if ino.Type == tar.TypeDir {
		c.children = map[string]*node{}
	}
	n.children[name] = c
	return nil
}

// link makes base in dir another name of what e.Link leads to. Like link(2)
// it does not follow a symlink at the end: its target is the link itself.
func (t *tree) link(k int, dir *node, base string, old *node, e *entry) error {
	toDir, toBase := "", e.Link
	if i := strings.LastIndexByte(e.Link, '/'); i >= 0 {
		toDir, toBase = e.Link[:i], e.Link[i+1:]
	}
	parent, err := t.walk(toDir, k, false)
	if err != nil {
		return fmt.Errorf("hard link to %q: %w", e.Link, err)
	}
	var target *node
	if parent != nil {
		target = parent.children[toBase]
	}
	switch {
	case target == nil:
		return fmt.Errorf("hard link to %q, which is in no layer up to this one", e.Link)
	case target.isDir():
		return fmt.Errorf("hard link to %q, which is a directory", e.Link)
	case target == old:
		return nil
	}
	return dir.put(base, k, target.ino)
}

// whiteout handles a ".wh." entry. Wherever it stands in its layer, it acts on
// lower layers alone (OCI image-spec, "Whiteouts"; S22).
func (t *tree) whiteout(k int, dirname, base string) error {
	hidden := base[len(whiteout):]
	switch {
	case base == opaque:
	case strings.HasPrefix(base, whiteout+whiteout): // aufs's own bookkeeping
		return nil
	case hidden == "" || hidden == "." || hidden == "..":
		return fmt.Errorf("a whiteout of nothing")
	}
	dir, err := t.walk(dirname, k, false)
	if err != nil || dir == nil {
		return err // nothing there to hide
	}
	if base == opaque {
		for _, c := range dir.children {
			t.hideLower(c, k)
		}
	} else if c := dir.children[hidden]; c != nil {
		t.hideLower(c, k)
	}
	return nil
}

// hideLower removes n and what is below it, but for names that layer k has put
// there itself. A folder that stays only for these is as if it had no entry.
func (t *tree) hideLower(n *node, k int) {
	for _, c := range n.children {
		t.hideLower(c, k)
	}
	switch {
	case n.layer == k:
	case len(n.children) > 0:
		n.ino, n.layer = implicitDir(), k
	default:
		delete(n.parent.children, n.name)
	}
}

// walk finds the directory that path names, following symlinks as if the tree
// were the root of the system. When create is set, missing parts are made for
// layer k; else the result is nil when one is missing.
func (t *tree) walk(path string, k int, create bool) (*node, error) {
	if path == "" {
		return t.root, nil
	}
	cur, links := t.root, 0
	for rest := path; rest != ""; {
		var p string
		p, rest, _ = strings.Cut(rest, "/")
		switch p {
		case "", ".":
			continue
		case "..":
			cur = cur.parent
			continue
		}
		next := cur.children[p]
		if next == nil {
			if !create {
				return nil, nil
			}
			if len(p) > 255 {
				return nil, fmt.Errorf("a symbolic link leads to a name longer than 255 bytes")
			}
			if err := cur.put(p, k, implicitDir()); err != nil {
				return nil, err
			}
			next = cur.children[p]
		}
		switch {
		case next.isDir():
			cur = next
		case next.ino.Type == tar.TypeSymlink:
			if links++; links > maxSymlinks {
				return nil, fmt.Errorf("more than %d symbolic links on the way", maxSymlinks)
			}
			if strings.HasPrefix(next.ino.Link, "/") {
				cur = t.root
			}
			rest = next.ino.Link + "/" + rest
			if len(rest) > 1<<20 {
				return nil, fmt.Errorf("symbolic links on the way make the name longer than 1 MiB")
			}
		default:
			return nil, fmt.Errorf("%q on the way is not a directory", p)
		}
	}
	return cur, nil
}

// plan is the tree in the order in which it is written: directories first,
// then content as it comes in the layers, then everything without content,
// then further names.
type plan struct {
	dirs    []*node
	paths   []string         // of dirs
	content []map[int]*inode // by layer, by entry
	empty   []*inode         // symlinks, devices, fifos, empty files
	links   []*inode         // of which more than one name exists
	size    int64            // bytes of content in whole blocks, and of what describes it
	inodes  int64
}

func (t *tree) plan(layers int) *plan {
	p := &plan{content: make([]map[int]*inode, layers)}
	p.visit(t.root, "")
	return p
}

// visit goes through names in order of bytes, so that equal layers give equal
// filesystems.
func (p *plan) visit(dir *node, path string) {
	p.dirs = append(p.dirs, dir)
	p.paths = append(p.paths, path)
	p.count(dir.ino)
	names := make([]string, 0, len(dir.children))
	var listing int64
	for n := range dir.children {
		names = append(names, n)
		listing += int64(len(n)) + 12
	}
	p.size += blocks(listing + listing/16)
	sort.Strings(names)
	if path != "" {
		path += "/"
	}
	for _, n := range names {
		c := dir.children[n]
		if c.isDir() {
			p.visit(c, path+n)
			continue
		}
		ino := c.ino
		ino.paths = append(ino.paths, path+n)
		switch len(ino.paths) {
		case 1:
			p.count(ino)
			if ino.Type != tar.TypeReg || ino.Size == 0 {
				p.empty = append(p.empty, ino)
				continue
			}
			if p.content[ino.layer] == nil {
				p.content[ino.layer] = map[int]*inode{}
			}
			p.content[ino.layer][ino.ord] = ino
		case 2:
			p.links = append(p.links, ino)
		}
	}
}

func (p *plan) count(i *inode) {
	p.inodes++
	p.size += blocks(i.Size) + 256
	if len(i.Link) > 59 || len(i.Xattrs) > 0 {
		p.size += 4096
	}
}

func blocks(n int64) int64 { return (n + 4095) &^ 4095 }

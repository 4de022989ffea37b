// Package numa chooses the memory node of this host that a guest is put on. It
// reads the kernel's account of the nodes and decides; it moves nothing.
//
// Vocabulary: a node is a set of processors and the memory beside them. A
// guest is placed on a node: its virtual processors' threads run there and its
// memory prefers it. Prefers: a guest that grows past what the node has free
// spills onto another instead of being killed. A guest that fits on no node is
// interleaved: its pages go to all nodes in turn.
package numa

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Modes of [numa] mode.
const (
	Auto       = "auto"
	Off        = "off"
	Interleave = "interleave"
)

// Sysfs is where the kernel tells of its nodes.
const Sysfs = "/sys/devices/system/node"

// Node is one memory node.
type Node struct {
	ID       int
	CPUs     []int  // sorted; none for memory without processors
	CPUList  string // the same as the kernel writes it, such as "24-47"
	TotalMiB int64
	FreeMiB  int64 // free, or of a file's cache that nobody has to write back first
}

// Read reads the nodes below dir (Sysfs), by number. A kernel that knows of
// none gives none.
func Read(dir string) ([]Node, error) {
	ents, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the memory nodes: %w", err)
	}
	var out []Node
	for _, e := range ents {
		id, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "node"))
		if err != nil || !strings.HasPrefix(e.Name(), "node") {
			continue
		}
		n := Node{ID: id}
		at := filepath.Join(dir, e.Name())
		list, err := os.ReadFile(filepath.Join(at, "cpulist"))
		if err == nil {
			n.CPUList = strings.TrimSpace(string(list))
			n.CPUs, err = ParseList(n.CPUList)
		}
		if err == nil {
			err = n.readMemory(filepath.Join(at, "meminfo"))
		}
		if err != nil {
			return nil, fmt.Errorf("reading memory node %d: %w", id, err)
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b Node) int { return a.ID - b.ID })
	return out, nil
}

// readMemory reads lines such as "Node 0 MemTotal:       16318172 kB".
func (n *Node) readMemory(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	kib := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "Node" {
			continue
		}
		if v, err := strconv.ParseInt(f[3], 10, 64); err == nil {
			kib[strings.TrimSuffix(f[2], ":")] = v
		}
	}
	total, ok1 := kib["MemTotal"]
	free, ok2 := kib["MemFree"]
	if !ok1 || !ok2 {
		return fmt.Errorf("%s has no MemTotal or no MemFree", path)
	}
	cache := max(0, kib["FilePages"]-kib["Shmem"]-kib["Dirty"]-kib["Writeback"])
	n.TotalMiB, n.FreeMiB = total>>10, min(free+cache, total)>>10
	return nil
}

// ParseList reads a list of processors as the kernel writes it: "0-3,8,10-11".
func ParseList(s string) ([]int, error) {
	var out []int
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		a, err1 := strconv.Atoi(lo)
		b, err2 := strconv.Atoi(hi)
		if err1 != nil || err2 != nil || a < 0 || b < a || b > 1<<16 {
			return nil, fmt.Errorf("%q is no list of processors", s)
		}
		for c := a; c <= b; c++ {
			out = append(out, c)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Guest is what is to be placed.
type Guest struct {
	MemMiB int64
	CPUs   int
}

// Placement is where a guest goes. Node counts unless Interleave is set, in
// which case Nodes are all there are.
type Placement struct {
	Node       int    `json:"node"`
	Interleave bool   `json:"interleave,omitempty"`
	Nodes      []int  `json:"nodes"`          // that the host has
	CPUs       []int  `json:"cpus,omitempty"` // to run on; none = any
	CPUList    string `json:"cpu_list,omitempty"`
	Unfit      bool   `json:"unfit,omitempty"` // interleaved because no node has the room
}

// Line says where the guest went.
func (p Placement) Line() string {
	switch {
	case p.Interleave && p.Unfit:
		return fmt.Sprintf("NUMA: interleaved across %d nodes (the VM does not fit one node)", len(p.Nodes))
	case p.Interleave:
		return fmt.Sprintf("NUMA: interleaved across %d nodes", len(p.Nodes))
	}
	return fmt.Sprintf("NUMA: node %d (cpus %s) of %d", p.Node, p.CPUList, len(p.Nodes))
}

// Choose places a guest. room is what a node has left, in MiB; nil = its
// FreeMiB. It is nil where there is nothing to choose: mode off, or a host of
// fewer than two nodes.
func Choose(mode string, nodes []Node, room func(Node) int64, g Guest) *Placement {
	if mode == Off || mode == "" || len(nodes) < 2 {
		return nil
	}
	if room == nil {
		room = func(n Node) int64 { return n.FreeMiB }
	}
	p := &Placement{}
	best, most := -1, int64(0)
	for i, n := range nodes {
		p.Nodes = append(p.Nodes, n.ID)
		r := room(n)
		if mode == Interleave || r < g.MemMiB || len(n.CPUs) < g.CPUs {
			continue
		}
		if best < 0 || r > most {
			best, most = i, r
		}
	}
	if best < 0 {
		p.Interleave, p.Unfit = true, mode != Interleave
		return p
	}
	n := nodes[best]
	p.Node, p.CPUs, p.CPUList = n.ID, n.CPUs, n.CPUList
	return p
}

// Outstanding is a guest that was placed a moment ago and has yet to touch its
// memory.
type Outstanding struct {
	Place  *Placement
	MemMiB int64
}

// Beside is the room of a node beside such guests, which its FreeMiB knows
// nothing of. They count in full.
func Beside(guests []Outstanding) func(Node) int64 {
	return func(n Node) int64 {
		left := n.FreeMiB
		for _, g := range guests {
			left -= g.Place.Share(n.ID, g.MemMiB)
		}
		return left
	}
}

// Share is what a placed guest takes of a node, in MiB.
func (p *Placement) Share(node int, memMiB int64) int64 {
	switch {
	case p == nil:
		return 0
	case p.Interleave:
		if slices.Contains(p.Nodes, node) {
			return memMiB / int64(len(p.Nodes))
		}
		return 0
	case p.Node == node:
		return memMiB
	}
	return 0
}

package trace

import (
	"bytes"
	"cmp"
	"slices"
)

// automaton finds every occurrence of a set of patterns in one pass over the
// text (Aho and Corasick, CACM 18(6), 1975). States near the root, where
// ordinary text stays, have a full row of transitions; deeper ones keep their
// edges and a link to the longest suffix that is a state, so that a thousand
// long patterns take megabytes and not hundreds of them.
type automaton struct {
	class  [256]uint8 // bytes that no pattern tells apart share a class
	nclass int
	starts [256]bool // bytes that begin a pattern
	few    []byte    // these, when there are at most maxFew
	rows   []int32   // full rows of the states below full
	full   int32
	nodes  []node
}

// node is one state: the text read so far ends in this prefix of a pattern.
type node struct {
	edges  []edge // sorted by byte
	fail   int32  // the longest proper suffix that is a state
	depth  int32  // length of the prefix
	length int32  // of the pattern that ends here, or 0
	suffix int32  // the nearest state on the chain of fails in which one ends, or 0
	reach  int32  // the longest pattern of which this or a suffix is a proper prefix
}

type edge struct {
	b  byte
	to int32
}

// maxFull bounds the states with a full row: 4 bytes × up to 256 classes each.
const maxFull = 4096

// newAutomaton compiles patterns; empty ones and repeats are dropped. It
// returns nil when none is left.
func newAutomaton(patterns [][]byte) *automaton {
	patterns = slices.Clone(patterns)
	slices.SortFunc(patterns, func(a, b []byte) int { return slices.Compare(a, b) })
	patterns = slices.CompactFunc(patterns, func(a, b []byte) bool { return slices.Equal(a, b) })
	if len(patterns) > 0 && len(patterns[0]) == 0 {
		patterns = patterns[1:]
	}
	if len(patterns) == 0 {
		return nil
	}
	a := &automaton{nodes: make([]node, 1)}
	for _, p := range patterns {
		a.insert(p)
	}
	for b, is := range a.starts {
		if is {
			a.few = append(a.few, byte(b))
		}
	}
	if len(a.few) > maxFew {
		a.few = nil
	}
	a.classify()
	a.link()
	a.fill()
	return a
}

func (a *automaton) insert(p []byte) {
	a.starts[p[0]] = true
	s := int32(0)
	for i, b := range p {
		to := a.nodes[s].child(b)
		if to == 0 {
			to = int32(len(a.nodes))
			a.nodes = append(a.nodes, node{depth: int32(i + 1)})
			// Patterns come sorted, so edges do too.
			a.nodes[s].edges = append(a.nodes[s].edges, edge{b, to})
		}
		if s != 0 {
			a.nodes[s].reach = max(a.nodes[s].reach, int32(len(p)))
		}
		s = to
	}
	a.nodes[s].length = int32(len(p))
}

func (n *node) child(b byte) int32 {
	if len(n.edges) < 8 {
		for _, e := range n.edges {
			if e.b == b {
				return e.to
			}
		}
		return 0
	}
	if i, ok := slices.BinarySearchFunc(n.edges, b, func(e edge, b byte) int { return cmp.Compare(e.b, b) }); ok {
		return n.edges[i].to
	}
	return 0
}

// classify gives each byte that occurs in a pattern a class of its own; all
// others share class 0.
func (a *automaton) classify() {
	var used [256]bool
	n := 0
	for i := range a.nodes {
		for _, e := range a.nodes[i].edges {
			if !used[e.b] {
				used[e.b] = true
				n++
			}
		}
	}
	a.nclass = n + 1
	c := 1
	if n == 256 { // nothing left for class 0
		a.nclass, c = 256, 0
	}
	for b, u := range used {
		if u {
			a.class[b] = uint8(c)
			c++
		}
	}
}

// link renumbers the states in breadth-first order and sets fail, suffix and
// reach.
func (a *automaton) link() {
	order := make([]int32, 1, len(a.nodes))
	for i := 0; i < len(order); i++ {
		for _, e := range a.nodes[order[i]].edges {
			order = append(order, e.to)
		}
	}
	at := make([]int32, len(order))
	for i, old := range order {
		at[old] = int32(i)
	}
	nodes := make([]node, len(order))
	for i, old := range order {
		nodes[i] = a.nodes[old]
		for j := range nodes[i].edges {
			nodes[i].edges[j].to = at[nodes[i].edges[j].to]
		}
	}
	a.nodes = nodes
	for i := range nodes {
		n := &nodes[i]
		for _, e := range n.edges {
			to := &nodes[e.to]
			if i > 0 {
				f := n.fail
				for f != 0 && nodes[f].child(e.b) == 0 {
					f = nodes[f].fail
				}
				to.fail = nodes[f].child(e.b)
			}
			f := &nodes[to.fail]
			to.suffix = f.suffix
			if f.length > 0 {
				to.suffix = to.fail
			}
			to.reach = max(to.reach, f.reach)
		}
	}
}

// fill makes the full rows, in the order of the states: a row is that of the
// fail link with the state's own edges over it.
func (a *automaton) fill() {
	a.full = int32(min(len(a.nodes), maxFull))
	a.rows = make([]int32, int(a.full)*a.nclass)
	for s := int32(0); s < a.full; s++ {
		row := a.rows[int(s)*a.nclass : int(s+1)*a.nclass]
		if s > 0 {
			f := int(a.nodes[s].fail) // a shorter state, so its row is there
			copy(row, a.rows[f*a.nclass:(f+1)*a.nclass])
		}
		for _, e := range a.nodes[s].edges {
			row[a.class[e.b]] = e.to
		}
	}
}

// maxFew is for how many bytes a text is searched one by one, which is faster
// than a look at each of its bytes.
const maxFew = 4

// seeker finds where in a text a pattern may begin.
type seeker struct {
	a    *automaton
	p    []byte
	seen [maxFew]int // where few's bytes are next; below what is asked for = not known
}

func (a *automaton) seek(p []byte) seeker {
	return seeker{a: a, p: p, seen: [maxFew]int{-1, -1, -1, -1}}
}

// from is the first place from i on, the text's end when there is none.
func (k *seeker) from(i int) int {
	if k.a.few == nil {
		for i < len(k.p) && !k.a.starts[k.p[i]] {
			i++
		}
		return i
	}
	at := len(k.p)
	for n, b := range k.a.few {
		if k.seen[n] < i {
			if j := bytes.IndexByte(k.p[i:], b); j >= 0 {
				k.seen[n] = i + j
			} else {
				k.seen[n] = len(k.p)
			}
		}
		at = min(at, k.seen[n])
	}
	return at
}

// step is the state after one more byte.
func (a *automaton) step(s int32, b byte) int32 {
	for s >= a.full {
		if to := a.nodes[s].child(b); to != 0 {
			return to
		}
		s = a.nodes[s].fail
	}
	return a.rows[int(s)*a.nclass+int(a.class[b])]
}

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
	pairs  []uint64  // a bit for each two bytes that a pattern begins with
	rows   []int32   // full rows of the states below full
	full   int32
	nodes  []node
	edges  []edge
}

// node is one state: the text read so far ends in this prefix of a pattern.
type node struct {
	first  int32 // of its edges, which are sorted by byte
	count  int32 // of them
	fail   int32 // the longest proper suffix that is a state
	depth  int32 // length of the prefix
	length int32 // of the pattern that ends here, or 0
	suffix int32 // the nearest state on the chain of fails in which one ends, or 0
	reach  int32 // the longest pattern of which this or a suffix is a proper prefix
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
	a := &automaton{}
	for _, p := range patterns {
		a.starts[p[0]] = true
	}
	a.build(patterns)
	for b, is := range a.starts {
		if is {
			a.few = append(a.few, byte(b))
		}
	}
	if len(a.few) > maxFew {
		a.few = nil
	}
	a.pair(patterns)
	a.classify()
	a.fill()
	return a
}

// branch is a state while the patterns are put in.
type branch struct {
	b                byte  // that leads to it
	first, last      int32 // of its children; 0 = it has none
	next             int32 // of its parent's children, after it
	children, length int32
	reach            int32
}

// build makes the states of the patterns, which are sorted, in breadth-first
// order, and their edges. No state is an allocation of its own: a thousand
// patterns have tens of thousands.
func (a *automaton) build(patterns [][]byte) {
	total := 1
	for _, p := range patterns {
		total += len(p)
	}
	tree := make([]branch, 1, total)
	for _, p := range patterns {
		s := int32(0)
		for _, b := range p {
			// As they are sorted, what a pattern shares with those before it
			// is with the last one.
			to := tree[s].last
			if to == 0 || tree[to].b != b {
				to = int32(len(tree))
				tree = append(tree, branch{b: b})
				if tree[s].last == 0 {
					tree[s].first = to
				} else {
					tree[tree[s].last].next = to
				}
				tree[s].last = to
				tree[s].children++
			}
			if s != 0 {
				tree[s].reach = max(tree[s].reach, int32(len(p)))
			}
			s = to
		}
		tree[s].length = int32(len(p))
	}
	order := make([]int32, 1, len(tree))
	a.nodes, a.edges = make([]node, len(tree)), make([]edge, 0, len(tree)-1)
	for i := 0; i < len(order); i++ {
		t, n := &tree[order[i]], &a.nodes[i]
		n.first, n.count, n.length, n.reach = int32(len(a.edges)), t.children, t.length, t.reach
		for c := t.first; c != 0; c = tree[c].next {
			to := int32(len(order))
			a.nodes[to].depth = n.depth + 1
			a.edges = append(a.edges, edge{tree[c].b, to})
			order = append(order, c)
		}
	}
	a.link()
}

// pair fills pairs: of ordinary text a fifth begins like one of a thousand
// patterns, but hardly any two bytes of it do.
func (a *automaton) pair(patterns [][]byte) {
	a.pairs = make([]uint64, 1<<16/64)
	set := func(b, c byte) {
		n := uint16(b)<<8 | uint16(c)
		a.pairs[n>>6] |= 1 << (n & 63)
	}
	for _, p := range patterns {
		if len(p) > 1 {
			set(p[0], p[1])
			continue
		}
		for c := range 256 {
			set(p[0], byte(c))
		}
	}
}

func (a *automaton) edgesOf(n *node) []edge { return a.edges[n.first : n.first+n.count] }

func (a *automaton) child(n *node, b byte) int32 {
	if n.count == 1 { // as most are, deep down
		if e := a.edges[n.first]; e.b == b {
			return e.to
		}
		return 0
	}
	edges := a.edgesOf(n)
	if len(edges) < 8 {
		for _, e := range edges {
			if e.b == b {
				return e.to
			}
		}
		return 0
	}
	if i, ok := slices.BinarySearchFunc(edges, b, func(e edge, b byte) int { return cmp.Compare(e.b, b) }); ok {
		return edges[i].to
	}
	return 0
}

// classify gives each byte that occurs in a pattern a class of its own; all
// others share class 0.
func (a *automaton) classify() {
	var used [256]bool
	n := 0
	for _, e := range a.edges {
		if !used[e.b] {
			used[e.b] = true
			n++
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

// link sets fail, suffix and reach.
func (a *automaton) link() {
	nodes := a.nodes
	for i := range nodes {
		n := &nodes[i]
		for _, e := range a.edgesOf(n) {
			to := &nodes[e.to]
			if i > 0 {
				f := n.fail
				for f != 0 && a.child(&nodes[f], e.b) == 0 {
					f = nodes[f].fail
				}
				to.fail = a.child(&nodes[f], e.b)
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
		for _, e := range a.edgesOf(&a.nodes[s]) {
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

// from is the first place from i on, the text's end when there is none. What
// follows the text's last byte is not known yet.
func (k *seeker) from(i int) int {
	p, pairs := k.p, (*[1 << 16 / 64]uint64)(k.a.pairs)
	if k.a.few == nil {
		for ; i+1 < len(p); i++ {
			if n := uint16(p[i])<<8 | uint16(p[i+1]); pairs[n>>6]&(1<<(n&63)) != 0 {
				return i
			}
		}
		if i < len(p) && !k.a.starts[p[i]] {
			i++
		}
		return i
	}
	for {
		at := len(p)
		for n, b := range k.a.few {
			if k.seen[n] < i {
				if j := bytes.IndexByte(p[i:], b); j >= 0 {
					k.seen[n] = i + j
				} else {
					k.seen[n] = len(p)
				}
			}
			at = min(at, k.seen[n])
		}
		if at+1 >= len(p) {
			return at
		}
		if n := uint16(p[at])<<8 | uint16(p[at+1]); pairs[n>>6]&(1<<(n&63)) != 0 {
			return at
		}
		i = at + 1
	}
}

// step is the state after one more byte.
func (a *automaton) step(s int32, b byte) int32 {
	for s >= a.full {
		if to := a.child(&a.nodes[s], b); to != 0 {
			return to
		}
		s = a.nodes[s].fail
	}
	return a.rows[int(s)*a.nclass+int(a.class[b])]
}

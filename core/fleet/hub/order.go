package hub

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"

	"virtkit/core/fleet/dispatch"
)

// The order of nodes for a placement is kept between two picks: with thousands
// of nodes, looking at all of them costs more than the rest of a placement. A
// spot that changes is written into a log; an order that is asked puts those
// that changed since it was asked last where they belong.

// maxOrders is how many placements have an order; past it all are made anew.
const maxOrders = 64

// order is the nodes that take a placement and have room for it, the first at
// the top of a heap.
type order struct {
	pl   dispatch.Placement
	list []ranked
	at   map[*spot]int // in list
	seen int           // of placer.log
}

type ranked struct {
	s    *spot
	load float64
	room int
}

func (a *ranked) compare(b *ranked) int {
	return cmp.Or(cmp.Compare(a.load, b.load), cmp.Compare(b.room, a.room), strings.Compare(a.s.id, b.s.id))
}

// rank is what a spot is for a placement; false = nothing.
func (s *spot) rank(pl *dispatch.Placement) (ranked, bool) {
	if !s.takes(pl) {
		return ranked{}, false
	}
	room := s.room(&pl.Envelope)
	return ranked{s, s.load(room), room}, room > 0
}

// Len is heap.Interface's, as the next four.
func (o *order) Len() int           { return len(o.list) }
func (o *order) Less(i, j int) bool { return o.list[i].compare(&o.list[j]) < 0 }
func (o *order) Swap(i, j int) {
	o.list[i], o.list[j] = o.list[j], o.list[i]
	o.at[o.list[i].s], o.at[o.list[j].s] = i, j
}

// Push is heap.Interface's.
func (o *order) Push(x any) {
	r := x.(ranked)
	o.at[r.s] = len(o.list)
	o.list = append(o.list, r)
}

// Pop is heap.Interface's.
func (o *order) Pop() any {
	last := o.list[len(o.list)-1]
	o.list = o.list[:len(o.list)-1]
	delete(o.at, last.s)
	return last
}

// look ranks a spot anew.
func (o *order) look(s *spot) {
	r, fits := s.rank(&o.pl)
	i, is := o.at[s]
	switch {
	case is && fits:
		o.list[i] = r
		heap.Fix(o, i)
	case is:
		heap.Remove(o, i)
	case fits:
		heap.Push(o, r)
	}
}

// changed says that a spot is to be ranked anew. p.mu is held.
func (p *placer) changed(s *spot) {
	if len(p.orders) == 0 {
		return
	}
	if len(p.log) > 0 && p.log[len(p.log)-1] == s && p.looked() < len(p.log) {
		return // it is what nobody has looked at yet
	}
	if len(p.log) > 1024+4*len(p.spots) {
		clear(p.orders)
		p.log = p.log[:0]
		return
	}
	p.log = append(p.log, s)
}

// looked is how much of the log any order has seen.
func (p *placer) looked() int {
	n := 0
	for _, o := range p.orders {
		n = max(n, o.seen)
	}
	return n
}

// ordered is a placement's order, up to date. p.mu is held.
func (p *placer) ordered(pl *dispatch.Placement) *order {
	key := pkey(pl)
	o := p.orders[key]
	if o == nil {
		if len(p.orders) >= maxOrders {
			clear(p.orders)
			p.log = p.log[:0]
		}
		o = &order{pl: *pl, at: make(map[*spot]int, len(p.spots)), list: make([]ranked, 0, len(p.spots))}
		o.pl.Labels = slices.Clone(pl.Labels)
		for _, s := range p.spots {
			if r, fits := s.rank(pl); fits {
				o.at[s] = len(o.list)
				o.list = append(o.list, r)
			}
		}
		heap.Init(o)
		o.seen = len(p.log)
		p.orders[key] = o
	}
	for ; o.seen < len(p.log); o.seen++ {
		o.look(p.log[o.seen])
	}
	if len(p.orders) == 1 {
		p.log, o.seen = p.log[:0], 0
	}
	return o
}

// pick is the node that comes first for a placement, nil for none. p.mu is held.
func (p *placer) pick(pl *dispatch.Placement, not func(*spot) bool) *spot {
	o := p.ordered(pl)
	if len(o.list) == 0 {
		return nil
	}
	if s := o.list[0].s; !not(s) {
		return s
	}
	var best *ranked // the first has refused: those behind it are in no order
	for i := range o.list {
		if r := &o.list[i]; !not(r.s) && (best == nil || r.compare(best) < 0) {
			best = r
		}
	}
	if best == nil {
		return nil
	}
	return best.s
}

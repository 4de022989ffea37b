package trace

import (
	"cmp"
	"slices"
)

// masked is what stands in the place of a secret.
var masked = []byte("[MASKED]")

// next takes what a stage lets through, in order, and does not keep p. mark
// says that p stands in the place of a secret.
type next interface {
	put(p []byte, mark bool)
	close()
}

// phrases replaces every occurrence of a set of secrets. Where occurrences
// overlap the longer one is replaced, of equally long ones the first, as if
// one secret after the other were replaced in the whole stream, longest first.
// It holds back only what may still become part of an occurrence, so at most
// as much as the secrets that overlap are long.
type phrases struct {
	a    *automaton
	next next

	s     int32  // the automaton's state
	base  int64  // offset in the stream of the first byte not passed on
	held  []byte // bytes from base on that came with earlier writes
	found []match
}

// match is an occurrence at [from, to) of the stream.
type match struct {
	from, to int64
	win      bool // nothing found so far beats it
}

func (m match) length() int64         { return m.to - m.from }
func (m match) overlaps(o match) bool { return m.from < o.to && o.from < m.to }

func (p *phrases) put(text []byte, _ bool) {
	start := p.base + int64(len(p.held)) // offset of text[0]
	a, s := p.a, p.s
	k := a.seek(text)
	for i := 0; i < len(text); {
		if s == 0 && len(p.found) == 0 {
			if i = k.from(i); i == len(text) {
				break
			}
		}
		if s < a.full {
			s = a.rows[int(s)*a.nclass+int(a.class[text[i]])]
		} else {
			s = a.step(s, text[i])
		}
		i++
		n := &a.nodes[s]
		if n.length == 0 && n.suffix == 0 && len(p.found) == 0 {
			continue
		}
		end := start + int64(i)
		if p.add(s, end) && p.last() == end && int64(n.reach) <= p.found[len(p.found)-1].length() {
			// Whatever is under way overlaps this and is no longer.
			s = 0
		}
		horizon := end - int64(a.nodes[s].depth)
		if n := len(p.found); n > 0 && (p.last() <= horizon || n%64 == 0) {
			p.replace(text, start, horizon)
		}
	}
	p.s = s
	p.release(text, start)
}

// add notes the occurrences that end at end and tells whether there is one
// that nothing beats so far.
func (p *phrases) add(s int32, end int64) bool {
	won := false
	for ; s != 0; s = p.a.nodes[s].suffix {
		if n := int64(p.a.nodes[s].length); n > 0 {
			won = p.enter(match{from: end - n, to: end, win: true}) || won
		}
	}
	return won
}

// enter adds one occurrence unless a winner that is no shorter overlaps it:
// whatever will yet beat that one ends later, so it covers this one as well.
func (p *phrases) enter(m match) bool {
	beats := false
	for i := len(p.found) - 1; i >= 0; i-- {
		if f := p.found[i]; f.win && f.overlaps(m) {
			if f.length() >= m.length() {
				return false
			}
			beats = true
		}
	}
	p.found = append(p.found, m)
	if beats {
		p.settle()
	}
	return true
}

// settle says anew which occurrences win.
func (p *phrases) settle() {
	order := make([]int, len(p.found))
	for i := range order {
		order[i] = i
		p.found[i].win = false
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := p.found[i], p.found[j]
		return cmp.Or(cmp.Compare(b.length(), a.length()), cmp.Compare(a.from, b.from))
	})
	for _, i := range order {
		m := p.found[i]
		if !slices.ContainsFunc(p.found, func(f match) bool { return f.win && f.overlaps(m) }) {
			p.found[i].win = true
		}
	}
}

// last is the end of what was found.
func (p *phrases) last() int64 { return p.found[len(p.found)-1].to }

// replace passes on what is found up to the horizon, masked, and all before
// it. No occurrence that begins before the horizon is still to come, so those
// that none beyond it overlaps, even by way of others, are decided.
func (p *phrases) replace(text []byte, start, horizon int64) {
	slices.SortFunc(p.found, func(a, b match) int { return cmp.Compare(a.from, b.from) })
	decided, end := 0, int64(0)
	for i, m := range p.found {
		if i > 0 && m.from >= end {
			decided = i
		}
		if end = max(end, m.to); end > horizon {
			break
		}
		if i == len(p.found)-1 {
			decided = i + 1
		}
	}
	for _, m := range p.found[:decided] {
		if m.win {
			p.pass(text, start, m.from)
			p.next.put(masked, true)
			p.skip(m.to, start)
		}
	}
	p.found = slices.Delete(p.found, 0, decided)
	slices.SortFunc(p.found, func(a, b match) int { return cmp.Compare(a.to, b.to) })
}

// pass lets the bytes up to the offset to through.
func (p *phrases) pass(text []byte, start, to int64) {
	if p.base < start && to > p.base {
		n := min(to-p.base, int64(len(p.held)))
		p.next.put(p.held[:n], false)
		p.held = p.held[n:]
		p.base += n
	}
	if to > p.base {
		p.next.put(text[p.base-start:to-start], false)
		p.base = to
	}
}

// skip drops the bytes up to the offset to.
func (p *phrases) skip(to, start int64) {
	if p.base < start {
		p.held = p.held[min(to-p.base, int64(len(p.held))):]
	}
	p.base = to
}

// release ends a write: all goes on but what may be part of an occurrence.
func (p *phrases) release(text []byte, start int64) {
	end := start + int64(len(text))
	keep := end - int64(p.a.nodes[p.s].depth)
	for _, m := range p.found {
		keep = min(keep, m.from)
	}
	p.pass(text, start, keep)
	if p.base < start {
		p.held = append(p.held, text...)
	} else {
		p.held = append(p.held[:0], text[p.base-start:]...)
	}
}

// close decides what is left.
func (p *phrases) close() {
	start := p.base + int64(len(p.held))
	if len(p.found) > 0 {
		p.replace(nil, start, start)
	}
	p.pass(nil, start, start)
	p.s, p.held = 0, nil
	p.next.close()
}

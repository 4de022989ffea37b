package netsw

import (
	"slices"

	"virtkit/core/fault"
	"virtkit/core/policy"
)

// AddNames gives the port further names, as PortConfig's Aliases. One that
// another port has is fault.Conflict, and then none is added; one that another
// port yields is taken from it.
func (p *Port) AddNames(names ...string) error {
	return p.rename(func(t *table) error { return p.take(t, names) })
}

// AddYields gives the port further names, as PortConfig's Yields.
func (p *Port) AddYields(names ...string) error {
	return p.rename(func(*table) error {
		p.yields = canonicals(p.yields, names)
		return nil
	})
}

// rename changes the port's names and has everyone see them.
func (p *Port) rename(change func(*table) error) error {
	s := p.sw
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || p.removed {
		return errClosed
	}
	t := s.table.Load()
	if err := change(t); err != nil {
		return err
	}
	s.store(t.ports)
	return nil
}

// take adds names that no other port has for its own.
func (p *Port) take(t *table, names []string) error {
	all := canonicals(p.names, names)
	for _, n := range all {
		if q := t.byName[n]; q != nil && q != p && slices.Contains(q.names, n) {
			return fault.Newf(fault.Conflict, "name %q of %q is taken by %q on the job's network", n, p.name, q.name).
				Hint("give one of the two another alias")
		}
	}
	p.names = all
	return nil
}

// canonicals appends names in the form that they are looked up in, each once.
func canonicals(to, names []string) []string {
	to = slices.Clone(to)
	for _, n := range names {
		if n = policy.CanonicalName(n); n != "" && !slices.Contains(to, n) {
			to = append(to, n)
		}
	}
	return to
}

// name enters names of a port that are still free.
func (t *table) name(p *Port, names []string) {
	for _, n := range names {
		if t.byName[n] == nil {
			t.byName[n] = p
		}
		if t.byName[n] == p && t.named[p] == "" {
			t.named[p] = n
		}
	}
}

// hostname is the first of the names that lead to the port.
func (p *Port) hostname() string { return p.sw.table.Load().named[p] }

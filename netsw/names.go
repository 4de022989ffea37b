package netsw

import (
	"slices"

	"virtkit/core/fault"
	"virtkit/core/policy"
)

// take gives the port its names, once. One that another port has is
// fault.Conflict.
func (p *Port) take(t *table, names []string) error {
	for _, n := range names {
		if n = policy.CanonicalName(n); n == "" || slices.Contains(p.names, n) {
			continue
		}
		if q := t.byName[n]; q != nil {
			return fault.Newf(fault.Conflict, "name %q of %q is taken by %q on the job's network", n, p.name, q.name).
				Hint("give one of the two another alias")
		}
		p.names = append(p.names, n)
	}
	return nil
}

// hostname is what the port's address is looked up as: the first of its names.
func (p *Port) hostname() string {
	if len(p.names) == 0 {
		return ""
	}
	return p.names[0]
}

package hubtest

import (
	"maps"
	"slices"

	"virtkit/core/fleet/hub"
)

// people is the part of Memory that sign-in needs.
type people struct {
	grants   map[string]hub.Grant
	links    map[string]hub.Link
	sessions map[string]hub.UISession
}

func newPeople() people {
	return people{map[string]hub.Grant{}, map[string]hub.Link{}, map[string]hub.UISession{}}
}

func (p *people) copy() people {
	return people{maps.Clone(p.grants), maps.Clone(p.links), maps.Clone(p.sessions)}
}

func (p *people) load(l *hub.LoadedPeople) {
	l.Grants, l.Links, l.UISessions = slices.Collect(maps.Values(p.grants)), slices.Collect(maps.Values(p.links)), slices.Collect(maps.Values(p.sessions))
}

func (p *people) apply(b *hub.PeopleBatch) {
	for _, g := range b.Grants {
		p.grants[g.Address] = g
	}
	for _, a := range b.DropGrants {
		delete(p.grants, a)
	}
	for _, k := range b.Links {
		p.links[k.Hash] = k
	}
	for _, hash := range b.DropLinks {
		delete(p.links, hash)
	}
	for _, u := range b.UISessions {
		p.sessions[u.Hash] = u
	}
	for _, hash := range b.DropUISessions {
		delete(p.sessions, hash)
	}
}

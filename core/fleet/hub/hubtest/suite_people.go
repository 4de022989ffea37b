package hubtest

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/hub"
)

// suitePeople: grants, links and sessions come back whole, replace those of
// their key, and are dropped by it.
func suitePeople(t *testing.T, s hub.Store, reopen func() hub.Store) {
	alice := hub.Grant{Address: "alice@example.com", Role: hub.Operator, Actor: "uid 0", At: 3}
	everyone := hub.Grant{Address: hub.Everyone, Role: hub.Viewer, Actor: "uid 1", At: 4}
	link := hub.Link{Hash: id(1), Role: hub.Operator, Actor: "uid 0", Created: 5, Expires: 6}
	by := hub.UISession{Hash: id(2), Role: hub.Viewer, From: "uid 0", Created: 7, Expires: 8}
	through := hub.UISession{Hash: id(3), Role: hub.Operator, Identity: "a@b", Email: "a@b", From: "login.example.com", Created: 9, Expires: 10, Fallback: true}
	apply(t, s, hub.Batch{Durable: true, PeopleBatch: hub.PeopleBatch{Grants: []hub.Grant{alice, everyone}, Links: []hub.Link{link, {Hash: id(9)}}, UISessions: []hub.UISession{by, through}}})
	check := func(s hub.Store, want hub.LoadedPeople) {
		t.Helper()
		l := load(t, s).LoadedPeople
		slices.SortFunc(l.Grants, func(a, b hub.Grant) int { return strings.Compare(b.Address, a.Address) })
		slices.SortFunc(l.Links, func(a, b hub.Link) int { return strings.Compare(a.Hash, b.Hash) })
		slices.SortFunc(l.UISessions, func(a, b hub.UISession) int { return strings.Compare(a.Hash, b.Hash) })
		if d := cmp.Diff(want, l); d != "" {
			t.Error(d)
		}
	}
	check(s, hub.LoadedPeople{Grants: []hub.Grant{alice, everyone}, Links: []hub.Link{link, {Hash: id(9)}}, UISessions: []hub.UISession{by, through}})
	alice.Role, alice.At, alice.Actor = hub.Viewer, 20, "ui session 0"
	apply(t, s, hub.Batch{Durable: true, PeopleBatch: hub.PeopleBatch{Grants: []hub.Grant{alice}, DropGrants: []string{hub.Everyone, "nobody@x"}, DropLinks: []string{id(9)}, DropUISessions: []string{by.Hash}}})
	want := hub.LoadedPeople{Grants: []hub.Grant{alice}, Links: []hub.Link{link}, UISessions: []hub.UISession{through}}
	check(s, want)
	check(reopen(), want)
}

package hub

import (
	"context"
	"fmt"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

// SignOut ends a session by its own wish.
func (h *Hub) SignOut(ctx context.Context, u UISession) error {
	return h.do(ctx, func(t *tx) error {
		if _, ok := t.s.UISessions[u.Hash]; !ok {
			return nil // a second press of the button
		}
		t.dropUISession(u.Hash)
		if u.Fallback {
			t.bounded("out "+u.Identity, u.Principal(), "signed out", "")
		} else {
			t.audit("", u.Principal(), "signed out", "")
		}
		return nil
	})
}

// EndUISessions ends all sessions of an ID, or all there are for "", and gives
// them.
func (h *Hub) EndUISessions(ctx context.Context, actor, id string) (ended []UISession, err error) {
	if id != "" && !wire.IsHex(id, UISessionIDLen/2) {
		return nil, fault.Newf(fault.Usage, "%q is no session: an ID has %d hex digits", wire.Clean(id, 40), UISessionIDLen).Hint("vk-hub ui sessions lists them")
	}
	var list []UISession
	err = h.do(ctx, func(t *tx) error {
		list = nil
		for _, u := range t.s.UISessionList(t.now) {
			if id == "" || u.ID() == id {
				list = append(list, u)
			}
		}
		if len(list) == 0 && id != "" {
			return fault.Newf(fault.NotFound, "no session %s", id).Hint("vk-hub ui sessions lists them")
		}
		for _, u := range list {
			t.end(actor, u, "ended by an operator")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// GrantChange is a change of a grant as an operator saw it.
type GrantChange struct {
	Address string
	Role    Role // NoRole revokes
	// Seen, when Checked, is the grant that the operator decided on, nil for
	// none: the change is refused once it is another.
	Checked bool
	Seen    *Grant
	// KeepLast refuses a change that leaves no operator.
	KeepLast bool
}

// ErrChanged is of a grant that is not as the operator saw it.
var ErrChanged = fault.New(fault.Conflict, "the grant was changed meanwhile").Hint("look at it again, then decide")

// Lowers says whether a change takes something from an address that now has g,
// nil for none.
func (c *GrantChange) Lowers(g *Grant) bool { return g != nil && !c.Role.Covers(g.Role) }

// SetGrant gives an address a role, or takes it for NoRole, and ends the
// sessions above what is allowed then.
func (h *Hub) SetGrant(ctx context.Context, actor string, c GrantChange) (g Grant, ended int, err error) {
	if c.Address, err = Address(c.Address); err != nil {
		return g, 0, err
	}
	switch {
	case c.Role != NoRole && c.Role.rank() < 0:
		return g, 0, fault.Newf(fault.Usage, "%q is no role: %s and %s are", wire.Clean(string(c.Role), 40), Viewer, Operator)
	case c.Address == Everyone && c.Role == Operator:
		return g, 0, fault.New(fault.Usage, "* admits everyone whom the provider signs in, and only as a viewer").Hint("grant operator to addresses")
	}
	var made Grant
	var gone int
	err = h.do(ctx, func(t *tx) error {
		old, had := t.s.Grants[c.Address]
		if c.Checked && (had != (c.Seen != nil) || had && old != *c.Seen) {
			return ErrChanged
		}
		switch {
		case c.Role == NoRole && !had:
			return fault.Newf(fault.NotFound, "no grant for %s", c.Address).Hint("vk-hub accounts lists them")
		case !had && len(t.s.Grants) >= MaxGrants:
			return fault.Newf(fault.Busy, "the hub holds %d grants already", len(t.s.Grants)).Hint("vk-hub accounts revoke ADDRESS")
		case c.KeepLast && had && old.Role == Operator && c.Role != Operator && t.operators() == 1:
			return fault.Newf(fault.Conflict, "%s is the last operator: without it no operator could sign in through the provider", c.Address).
				Hint("grant another address operator first, or use vk-hub accounts on the hub's host")
		}
		before := len(t.s.UISessions)
		if c.Role == NoRole {
			t.dropGrant(c.Address)
			t.audit("", actor, "grant revoked", fmt.Sprintf("%s, was %s", c.Address, old.Role))
			t.endAbove(actor, "the grant of "+c.Address+" was revoked")
		} else {
			made = Grant{Address: c.Address, Role: c.Role, Actor: actor, At: t.unix()}
			t.grant(made)
			detail := fmt.Sprintf("%s: %s", c.Address, c.Role)
			if had && old.Role != c.Role {
				detail += ", was " + string(old.Role)
			}
			t.audit("", actor, "grant made", detail)
			t.endAbove(actor, fmt.Sprintf("the grant of %s is %s", c.Address, c.Role))
		}
		gone = before - len(t.s.UISessions)
		return nil
	})
	if err != nil {
		return g, 0, err
	}
	return made, gone, nil
}

func (t *tx) operators() (n int) {
	for _, g := range t.s.Grants {
		if g.Role == Operator {
			n++
		}
	}
	return n
}

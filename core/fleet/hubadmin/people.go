package hubadmin

import (
	"context"
	"net/url"
	"time"

	"virtkit/core/fleet/hub"
)

// Routes of who may use the web UI.
var (
	UILink        = Route{"POST", "/v1/ui/links"}
	UISessions    = Route{"GET", "/v1/ui/sessions"}
	UILogout      = Route{"DELETE", "/v1/ui/sessions"}
	Accounts      = Route{"GET", "/v1/accounts"}
	AccountGrant  = Route{"POST", "/v1/accounts"}
	AccountRevoke = Route{"DELETE", "/v1/accounts"}
)

// LinkRequest asks for a sign-in link.
type LinkRequest struct {
	Role    hub.Role `json:"role"`
	TTLSecs int64    `json:"ttl_secs"`
}

// LinkReply holds it.
type LinkReply struct {
	URL     string   `json:"url"`
	Role    hub.Role `json:"role"`
	Expires int64    `json:"expires_at"`
}

// UISession is a browser that is signed in.
type UISession struct {
	ID       string   `json:"id"`
	Role     hub.Role `json:"role"`
	Identity string   `json:"identity,omitempty"` // whom the provider named
	From     string   `json:"from"`               // who issued its link, or the provider's host
	Created  int64    `json:"created_at"`
	Expires  int64    `json:"expires_at"`
}

// UISessionOf converts.
func UISessionOf(u hub.UISession) UISession {
	return UISession{u.ID(), u.Role, u.Identity, u.From, u.Created, u.Expires}
}

// UISessionList is sessions, newest first.
type UISessionList struct {
	Sessions []UISession `json:"sessions"`
}

// Grant gives whom the provider signs in with an address a role.
type Grant struct {
	Address string   `json:"address"`
	Role    hub.Role `json:"role"`
	Actor   string   `json:"actor,omitempty"`
	At      int64    `json:"at,omitempty"`
}

// GrantOf converts.
func GrantOf(g hub.Grant) Grant { return Grant{g.Address, g.Role, g.Actor, g.At} }

// AccountList is who may sign in through the provider.
type AccountList struct {
	Grants  []Grant  `json:"grants"`
	Default hub.Role `json:"default_role"`
	OIDC    bool     `json:"oidc"` // there is a provider
}

// AccountReply says what a change of a grant did.
type AccountReply struct {
	Grant
	Ended int `json:"sessions_ended"`
}

// Link issues a sign-in link.
func (c *Client) Link(ctx context.Context, role hub.Role, ttl time.Duration) (*LinkReply, error) {
	r := new(LinkReply)
	return r, c.Call(ctx, UILink, "", nil, LinkRequest{role, int64(ttl / time.Second)}, r)
}

// UISessions lists the sessions of the web UI.
func (c *Client) UISessions(ctx context.Context) (*UISessionList, error) {
	r := new(UISessionList)
	return r, c.Call(ctx, UISessions, "", nil, nil, r)
}

// UILogout ends the sessions of an ID, or all for "".
func (c *Client) UILogout(ctx context.Context, id string) (*UISessionList, error) {
	r, q := new(UISessionList), url.Values{"all": {"true"}}
	if id != "" {
		q = url.Values{"id": {id}}
	}
	return r, c.Call(ctx, UILogout, "", q, nil, r)
}

// Accounts lists the grants.
func (c *Client) Accounts(ctx context.Context) (*AccountList, error) {
	r := new(AccountList)
	return r, c.Call(ctx, Accounts, "", nil, nil, r)
}

// Grant gives an address a role.
func (c *Client) Grant(ctx context.Context, address string, role hub.Role) (*AccountReply, error) {
	r := new(AccountReply)
	return r, c.Call(ctx, AccountGrant, "", nil, Grant{Address: address, Role: role}, r)
}

// Revoke takes an address's grant.
func (c *Client) Revoke(ctx context.Context, address string) (*AccountReply, error) {
	r := new(AccountReply)
	return r, c.Call(ctx, AccountRevoke, "", url.Values{"address": {address}}, nil, r)
}

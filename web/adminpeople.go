package web

import (
	"cmp"
	"context"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
)

// The admin socket's part of the web UI.

func (a *Admin) peopleRoutes() map[hubadmin.Route]func(context.Context, *call) (any, error) {
	return map[hubadmin.Route]func(context.Context, *call) (any, error){
		hubadmin.UILink:        a.uiLink,
		hubadmin.UISessions:    a.uiSessions,
		hubadmin.UILogout:      a.uiLogout,
		hubadmin.Accounts:      a.accounts,
		hubadmin.AccountGrant:  a.grant,
		hubadmin.AccountRevoke: a.revoke,
	}
}

func (a *Admin) uiLink(ctx context.Context, c *call) (any, error) {
	var q hubadmin.LinkRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	if a.UI == "" {
		return nil, fault.New(fault.Conflict, "this hub serves no web UI").Hint("set ui_addr in hub.toml and start the hub again")
	}
	ttl := time.Duration(min(max(q.TTLSecs, 0), 1<<31)) * time.Second // no overflow; the hub refuses it
	token, k, err := a.Hub.CreateLink(ctx, c.actor, q.Role, ttl)
	if err != nil {
		return nil, err
	}
	return hubadmin.LinkReply{URL: a.UI + "/login?t=" + token, Role: k.Role, Expires: k.Expires}, nil
}

func sessionList(list []hub.UISession) hubadmin.UISessionList {
	out := hubadmin.UISessionList{Sessions: []hubadmin.UISession{}}
	for _, u := range list {
		out.Sessions = append(out.Sessions, hubadmin.UISessionOf(u))
	}
	return out
}

func (a *Admin) uiSessions(context.Context, *call) (any, error) {
	return sessionList(a.Hub.Snapshot().UISessionList(a.Hub.Now())), nil
}

func (a *Admin) uiLogout(ctx context.Context, c *call) (any, error) {
	q := c.r.URL.Query()
	id := q.Get("id")
	if (id == "") != (q.Get("all") == "true") {
		return nil, fault.New(fault.Usage, "one session's ID, or all")
	}
	ended, err := a.Hub.EndUISessions(ctx, c.actor, id)
	if err != nil {
		return nil, err
	}
	return sessionList(ended), nil
}

func (a *Admin) accounts(context.Context, *call) (any, error) {
	o := a.Hub.People()
	list := hubadmin.AccountList{Grants: []hubadmin.Grant{}, Default: cmp.Or(o.DefaultRole, hub.NoRole), OIDC: o.OIDC}
	for _, g := range a.Hub.Snapshot().GrantList() {
		list.Grants = append(list.Grants, hubadmin.GrantOf(g))
	}
	return list, nil
}

func (a *Admin) grant(ctx context.Context, c *call) (any, error) {
	var q hubadmin.Grant
	if err := c.body(&q); err != nil {
		return nil, err
	}
	if q.Role == hub.NoRole {
		return nil, fault.New(fault.Usage, "none is no role to grant").Hint("vk-hub accounts revoke takes a grant")
	}
	g, ended, err := a.Hub.SetGrant(ctx, c.actor, hub.GrantChange{Address: q.Address, Role: q.Role})
	if err != nil {
		return nil, err
	}
	return hubadmin.AccountReply{Grant: hubadmin.GrantOf(g), Ended: ended}, nil
}

func (a *Admin) revoke(ctx context.Context, c *call) (any, error) {
	address := c.r.URL.Query().Get("address")
	_, ended, err := a.Hub.SetGrant(ctx, c.actor, hub.GrantChange{Address: address, Role: hub.NoRole})
	if err != nil {
		return nil, err
	}
	return hubadmin.AccountReply{Grant: hubadmin.Grant{Address: address, Role: hub.NoRole}, Ended: ended}, nil
}

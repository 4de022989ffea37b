package hubdb

import (
	"context"
	"database/sql"

	"virtkit/core/fleet/hub"
)

func (w *writer) people(b *hub.PeopleBatch) {
	for _, g := range b.Grants {
		w.exec("INSERT OR REPLACE INTO grants (address, role, actor, at) VALUES (?,?,?,?)", g.Address, string(g.Role), g.Actor, g.At)
	}
	for _, a := range b.DropGrants {
		w.exec("DELETE FROM grants WHERE address = ?", a)
	}
	for _, k := range b.Links {
		w.exec("INSERT OR REPLACE INTO ui_links (hash, role, actor, created_at, expires_at) VALUES (?,?,?,?,?)", k.Hash, string(k.Role), k.Actor, k.Created, k.Expires)
	}
	for _, hash := range b.DropLinks {
		w.exec("DELETE FROM ui_links WHERE hash = ?", hash)
	}
	for _, u := range b.UISessions {
		w.exec("INSERT OR REPLACE INTO ui_sessions (hash, role, identity, email, issuer, created_at, expires_at, fallback) VALUES (?,?,?,?,?,?,?,?)",
			u.Hash, string(u.Role), u.Identity, u.Email, u.From, u.Created, u.Expires, u.Fallback)
	}
	for _, hash := range b.DropUISessions {
		w.exec("DELETE FROM ui_sessions WHERE hash = ?", hash)
	}
}

func (d *DB) loadPeople(ctx context.Context, l *hub.LoadedPeople) error {
	if err := d.query(ctx, l1(&l.Grants, func(r *sql.Rows) (g hub.Grant, err error) {
		return g, r.Scan(&g.Address, &g.Role, &g.Actor, &g.At)
	}), "SELECT address, role, actor, at FROM grants"); err != nil {
		return err
	}
	if err := d.query(ctx, l1(&l.Links, func(r *sql.Rows) (k hub.Link, err error) {
		return k, r.Scan(&k.Hash, &k.Role, &k.Actor, &k.Created, &k.Expires)
	}), "SELECT hash, role, actor, created_at, expires_at FROM ui_links"); err != nil {
		return err
	}
	return d.query(ctx, l1(&l.UISessions, func(r *sql.Rows) (u hub.UISession, err error) {
		return u, r.Scan(&u.Hash, &u.Role, &u.Identity, &u.Email, &u.From, &u.Created, &u.Expires, &u.Fallback)
	}), "SELECT hash, role, identity, email, issuer, created_at, expires_at, fallback FROM ui_sessions")
}

package hubdb

import (
	"context"
	"crypto/ed25519"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"virtkit/core/fleet/hub"
)

// query calls f for each row of a query of the read pool.
func (d *DB) query(ctx context.Context, f func(*sql.Rows) error, q string, args ...any) error {
	ctx, cancel := within(ctx)
	defer cancel()
	st, err := d.prepared(ctx, q)
	if err != nil {
		return explain(err)
	}
	var rows *sql.Rows
	if st != nil {
		rows, err = st.QueryContext(ctx, args...)
	} else {
		rows, err = d.read.QueryContext(ctx, q, args...)
	}
	if err != nil {
		return explain(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := f(rows); err != nil {
			return explain(err)
		}
	}
	return explain(rows.Err())
}

// maxPrepared is how many queries are kept prepared: more than there are texts,
// but for those of job filters and lists of numbers.
const maxPrepared = 256

// prepared keeps a query's statement: preparing takes longer than most of them
// run. database/sql prepares it anew on each connection of the pool. It is nil
// once there are too many.
func (d *DB) prepared(ctx context.Context, q string) (*sql.Stmt, error) {
	d.rmu.Lock()
	defer d.rmu.Unlock()
	if st := d.reads[q]; st != nil {
		return st, nil
	}
	if len(d.reads) >= maxPrepared {
		return nil, nil
	}
	st, err := d.read.PrepareContext(ctx, q)
	if err == nil {
		if d.reads == nil {
			d.reads = map[string]*sql.Stmt{}
		}
		d.reads[q] = st
	}
	return st, err
}

// parse reads a document; NULL leaves p nil.
func parse[T any](what string, text sql.NullString, p **T) error {
	if !text.Valid {
		return nil
	}
	v := new(T)
	if err := json.Unmarshal([]byte(text.String), v); err != nil {
		return fmt.Errorf("%w: %s: %w", hub.ErrBroken, what, err)
	}
	*p = v
	return nil
}

func into[T any](what, text string, p *T) error {
	if err := json.Unmarshal([]byte(text), p); err != nil {
		return fmt.Errorf("%w: %s: %w", hub.ErrBroken, what, err)
	}
	return nil
}

// Load is hub.Store's.
func (d *DB) Load(ctx context.Context) (*hub.Loaded, error) {
	l := &hub.Loaded{}
	var last sql.NullInt64
	for _, f := range []func() error{
		func() error {
			return d.query(ctx, func(r *sql.Rows) error { return r.Scan(&l.Hub) }, "SELECT value FROM meta WHERE name = 'hub'")
		},
		func() error {
			return d.query(ctx, func(r *sql.Rows) error { return r.Scan(&last) }, "SELECT max(seq) FROM audit")
		},
		func() error { return d.query(ctx, l1(&l.Records, scanRecord), recordQuery) },
		func() error {
			return d.query(ctx, l1(&l.Heartbeats, scanBeat), "SELECT node, at, beat FROM heartbeats")
		},
		func() error {
			return d.query(ctx, l1(&l.Tokens, func(r *sql.Rows) (t hub.Token, err error) {
				return t, r.Scan(&t.Hash, &t.Created, &t.Expires, &t.Actor, &t.Spent, &t.Node, &t.Kind)
			}), "SELECT hash, created_at, expires_at, actor, spent_at, node, kind FROM tokens")
		},
		func() error {
			return d.query(ctx, l1(&l.Commands, func(r *sql.Rows) (*hub.Command, error) { c, err := scanCommand(r); return &c, err }),
				commandQuery+" WHERE settled = 0 ORDER BY n")
		},
		func() error {
			l.LastIssued = map[string]int64{}
			return d.query(ctx, func(r *sql.Rows) error {
				var node string
				var at sql.NullInt64
				err := r.Scan(&node, &at)
				l.LastIssued[node] = at.Int64
				return err
			}, "SELECT node, max(json_extract(command, '$.issued_at')) FROM commands GROUP BY node")
		},
		func() error {
			return d.query(ctx, l1(&l.Revoked, func(r *sql.Rows) (rv hub.Revoked, err error) {
				var key []byte
				err = r.Scan(&rv.Node, &key, &rv.At)
				rv.Key = ed25519.PublicKey(key)
				return rv, err
			}), "SELECT node, key, at FROM revoked")
		},
	} {
		if err := f(); err != nil {
			return nil, err
		}
	}
	l.LastAudit = uint64(last.Int64)
	if err := d.loadPeople(ctx, &l.LoadedPeople); err != nil {
		return nil, err
	}
	return l, d.loadJobs(ctx, &l.LoadedJobs)
}

// l1 appends what scan makes of each row.
func l1[T any](list *[]T, scan func(*sql.Rows) (T, error)) func(*sql.Rows) error {
	return func(r *sql.Rows) error {
		v, err := scan(r)
		if err == nil {
			*list = append(*list, v)
		}
		return err
	}
}

const recordQuery = `SELECT id, key, name, enrolled_at, version, incarnation, generation, desired_id, policy, pools,
	state, reported_at, vms, vms_omitted, inventory, last_command, conflict FROM nodes`

func scanRecord(rows *sql.Rows) (*hub.Record, error) {
	r := &hub.Record{}
	var key []byte
	var policy, pools string
	var state, inventory, conflict sql.NullString
	if err := rows.Scan(&r.ID, &key, &r.Name, &r.Enrolled, &r.Version, &r.Incarnation, &r.Desired.Generation, &r.Desired.ID, &policy, &pools,
		&state, &r.Reported, &r.VMs, &r.Omitted, &inventory, &r.LastCommand, &conflict); err != nil {
		return nil, err
	}
	r.Key = ed25519.PublicKey(key)
	err := errors.Join(into("a policy", policy, &r.Desired.Policy), into("pools", pools, &r.Pools), parse("a state", state, &r.State),
		parse("an inventory", inventory, &r.Inventory), parse("a conflict", conflict, &r.Conflict))
	if len(r.Pools) == 0 {
		r.Pools = nil
	}
	return r, err
}

func scanBeat(rows *sql.Rows) (b hub.Heartbeat, err error) {
	var text sql.NullString
	if err := rows.Scan(&b.Node, &b.At, &text); err != nil {
		return b, err
	}
	return b, parse("a heartbeat", text, &b.Beat)
}

const commandQuery = "SELECT id, node, actor, command, outcome, message, acked_at FROM commands"

func scanCommand(rows *sql.Rows) (c hub.Command, err error) {
	var id, text string
	if err := rows.Scan(&id, &c.Node, &c.Actor, &text, &c.Outcome, &c.Message, &c.Acked); err != nil {
		return c, err
	}
	return c, into("a command", text, &c.Command)
}

// Audit is hub.Store's.
func (d *DB) Audit(ctx context.Context, q hub.AuditQuery) (lines []hub.AuditLine, err error) {
	text, args := "SELECT seq, at, node, actor, event, detail FROM audit WHERE 1", []any{}
	if q.Node != "" {
		text, args = text+" AND node = ?", append(args, q.Node)
	}
	if q.Before > 0 {
		text, args = text+" AND seq < ?", append(args, int64(q.Before))
	}
	err = d.query(ctx, l1(&lines, func(r *sql.Rows) (l hub.AuditLine, err error) {
		return l, r.Scan(&l.Seq, &l.At, &l.Node, &l.Actor, &l.Event, &l.Detail)
	}), text+" ORDER BY seq DESC LIMIT ?", append(args, q.Limit)...)
	slices.Reverse(lines)
	return lines, err
}

// Workloads is hub.Store's.
func (d *DB) Workloads(ctx context.Context, node string) (w *hub.Workloads, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		var text string
		w = &hub.Workloads{Node: node}
		if err := r.Scan(&w.At, &text, &w.Omitted); err != nil {
			return err
		}
		return into("a list of VMs", text, &w.List)
	}, "SELECT at, list, omitted FROM workloads WHERE node = ?", node)
	return w, err
}

// Commands is hub.Store's.
func (d *DB) Commands(ctx context.Context, node string, limit int) (list []hub.Command, err error) {
	err = d.query(ctx, l1(&list, scanCommand), commandQuery+" WHERE node = ? ORDER BY n DESC LIMIT ?", node, limit)
	return list, err
}

// Command is hub.Store's.
func (d *DB) Command(ctx context.Context, id string) (c *hub.Command, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		v, err := scanCommand(r)
		c = &v
		return err
	}, commandQuery+" WHERE id = ?", id)
	return c, err
}

// Issued is hub.Store's.
func (d *DB) Issued(ctx context.Context, node, id string) (known bool, err error) {
	err = d.query(ctx, func(r *sql.Rows) error { known = true; return nil }, "SELECT 1 FROM issued WHERE node = ? AND id = ?", node, id)
	return known, err
}

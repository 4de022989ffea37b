package hubdb

import (
	"context"
	"encoding/json"

	"virtkit/core/fleet/hub"
)

// Apply is hub.Store's.
func (d *DB) Apply(ctx context.Context, b *hub.Batch) (err error) {
	d.wmu.Lock()
	defer d.wmu.Unlock()
	defer func() { err = explain(err) }()
	mode := "NORMAL"
	if b.Durable {
		mode = "FULL"
	}
	if d.sync != mode {
		if _, err := d.conn.ExecContext(ctx, "PRAGMA synchronous = "+mode); err != nil {
			return err
		}
		d.sync = mode
	}
	// Not database/sql's transactions: in one it would prepare each statement
	// anew each time.
	w := writer{ctx: ctx, d: d}
	w.exec("BEGIN IMMEDIATE")
	if w.err != nil {
		return w.err
	}
	w.nodes(b)
	w.observed(b)
	w.steering(b)
	w.placed(&b.JobBatch)
	w.people(&b.PeopleBatch)
	w.audit(b)
	w.exec("COMMIT")
	if w.err != nil {
		// SQLite has rolled back by itself after some errors, which makes this
		// one fail; after a failed COMMIT the transaction is open still.
		_, _ = d.conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
		return w.err
	}
	if d.commits++; d.commits%walEvery == 0 && d.walSize() > walBytes/2 {
		d.restart(ctx)
	}
	return nil
}

// restart has the log begin anew. Readers that overlap for ever would keep the
// checkpoints that SQLite makes by itself from doing so: this one waits for
// those that read the log now, while new ones read the file. What it cannot do
// within the connection's busy_timeout is tried again later.
func (d *DB) restart(ctx context.Context) {
	_, _ = d.conn.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)")
}

// writer runs statements until one fails.
type writer struct {
	ctx context.Context
	d   *DB
	err error
}

func (w *writer) exec(query string, args ...any) {
	if w.err != nil {
		return
	}
	st := w.d.st[query]
	if st == nil {
		if st, w.err = w.d.conn.PrepareContext(w.ctx, query); w.err != nil {
			return
		}
		w.d.st[query] = st
	}
	_, w.err = st.ExecContext(w.ctx, args...)
}

// doc is v as JSON, nil (NULL) for a nil pointer.
func doc[T any](w *writer, v *T) any {
	if v == nil {
		return nil
	}
	b, err := json.Marshal(v)
	if err != nil && w.err == nil {
		w.err = err
	}
	return string(b)
}

func (w *writer) nodes(b *hub.Batch) {
	for _, r := range b.Records {
		pools := r.Pools
		if pools == nil {
			pools = []string{}
		}
		w.exec(`INSERT INTO nodes (id, key, name, enrolled_at, version, incarnation, generation, desired_id, policy, pools,
			state, reported_at, vms, vms_omitted, inventory, last_command, conflict)
			VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
			ON CONFLICT (id) DO UPDATE SET key=excluded.key, name=excluded.name, enrolled_at=excluded.enrolled_at,
			version=excluded.version, incarnation=excluded.incarnation, generation=excluded.generation,
			desired_id=excluded.desired_id, policy=excluded.policy, pools=excluded.pools, state=excluded.state,
			reported_at=excluded.reported_at, vms=excluded.vms, vms_omitted=excluded.vms_omitted,
			inventory=excluded.inventory, last_command=excluded.last_command, conflict=excluded.conflict`,
			r.ID, []byte(r.Key), r.Name, r.Enrolled, r.Version, r.Incarnation, r.Desired.Generation, r.Desired.ID,
			doc(w, &r.Desired.Policy), doc(w, &pools), doc(w, r.State), r.Reported, r.VMs, r.Omitted, doc(w, r.Inventory),
			r.LastCommand, doc(w, r.Conflict))
	}
	for _, id := range b.Removed {
		for _, q := range []string{
			"DELETE FROM nodes WHERE id = ?", "DELETE FROM heartbeats WHERE node = ?", "DELETE FROM workloads WHERE node = ?",
			"DELETE FROM issued WHERE node = ?", "DELETE FROM commands WHERE node = ?",
		} {
			w.exec(q, id)
		}
	}
	for _, r := range b.Revoked {
		w.exec("INSERT OR REPLACE INTO revoked (node, key, at) VALUES (?,?,?)", r.Node, []byte(r.Key), r.At)
	}
}

func (w *writer) observed(b *hub.Batch) {
	for _, h := range b.Heartbeats {
		w.exec("INSERT OR REPLACE INTO heartbeats (node, at, beat) VALUES (?,?,?)", h.Node, h.At, doc(w, h.Beat))
	}
	for _, l := range b.Workloads {
		list := l.List
		if list == nil {
			list = list[:0:0]
		}
		w.exec("INSERT OR REPLACE INTO workloads (node, at, list, omitted) VALUES (?,?,?,?)", l.Node, l.At, doc(w, &list), l.Omitted)
	}
}

func (w *writer) steering(b *hub.Batch) {
	for _, i := range b.Issued {
		w.exec("INSERT OR REPLACE INTO issued (node, id, generation, policy, at) VALUES (?,?,?,?,?)",
			i.Node, i.Desired.ID, i.Desired.Generation, doc(w, &i.Desired.Policy), i.At)
	}
	for _, t := range b.Tokens {
		w.exec("INSERT OR REPLACE INTO tokens (hash, created_at, expires_at, actor, spent_at, node, kind) VALUES (?,?,?,?,?,?,?)",
			t.Hash, t.Created, t.Expires, t.Actor, t.Spent, t.Node, t.Kind)
	}
	for _, hash := range b.DropTokens {
		w.exec("DELETE FROM tokens WHERE hash = ?", hash)
	}
	for _, c := range b.Commands {
		settled := 0
		if !c.Open() {
			settled = 1
		}
		w.exec(`INSERT INTO commands (id, node, actor, command, outcome, message, acked_at, settled) VALUES (?,?,?,?,?,?,?,?)
			ON CONFLICT (id) DO UPDATE SET outcome=excluded.outcome, message=excluded.message, acked_at=excluded.acked_at, settled=excluded.settled`,
			c.ID, c.Node, c.Actor, doc(w, &c.Command), string(c.Outcome), c.Message, c.Acked, settled)
	}
	if b.SettledBefore > 0 {
		w.exec(`DELETE FROM commands WHERE settled = 1 AND acked_at < ? AND (
			SELECT count(*) FROM commands AS newer WHERE newer.node = commands.node AND newer.n > commands.n) >= ?`,
			b.SettledBefore, hub.CommandsKept)
	}
}

func (w *writer) audit(b *hub.Batch) {
	for _, l := range b.Audit {
		w.exec("INSERT INTO audit (seq, at, node, actor, event, detail) VALUES (?,?,?,?,?,?)", int64(l.Seq), l.At, l.Node, l.Actor, l.Event, l.Detail)
	}
	if n := len(b.Audit); n > 0 {
		if last := int64(b.Audit[n-1].Seq); last > hub.AuditKept {
			w.exec("DELETE FROM audit WHERE seq <= ?", last-hub.AuditKept)
		}
	}
}

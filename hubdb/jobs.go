package hubdb

import (
	"context"
	"crypto/ed25519"
	"database/sql"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
)

// placed writes what is of placed jobs. A job goes with its spec, its output
// and its requests stay to say that it has gone.
func (w *writer) placed(b *hub.JobBatch) {
	if b.Empty() {
		return
	}
	w.peers(b)
	for _, j := range b.Jobs {
		w.exec(`INSERT INTO jobs (n, id, owner, state, outcome, instance, project, ref, name, pool, node, image_key, submitted_at, accepted_at, finished_at, settled_at, doc)
			VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
			ON CONFLICT (n) DO UPDATE SET state=excluded.state, outcome=excluded.outcome, node=excluded.node, accepted_at=excluded.accepted_at,
			finished_at=excluded.finished_at, settled_at=excluded.settled_at, doc=excluded.doc`,
			j.N, j.ID, j.Owner, string(j.State), j.Outcome(), j.Instance, j.Path, j.Ref, j.Name, j.Placement.Pool, j.Node, j.ImageKey,
			j.Submitted, j.Accepted, j.Finished, j.Settled, doc(w, j))
	}
	for _, n := range b.DropJobs {
		w.exec("DELETE FROM jobs WHERE n = ?", n)
		w.exec("DELETE FROM job_specs WHERE n = ?", n)
		w.exec("DELETE FROM job_tails WHERE n = ?", n)
		w.exec("DELETE FROM job_egress WHERE n = ?", n)
	}
	for _, e := range b.Egress {
		w.exec(`INSERT INTO job_egress (n, revision, data) VALUES (?,?,?) ON CONFLICT (n) DO UPDATE
			SET revision=excluded.revision, data=excluded.data WHERE excluded.revision >= revision`, e.N, int64(e.Revision), e.Data)
	}
	for _, r := range b.Rules {
		w.exec("INSERT OR REPLACE INTO egress_rules (name, doc) VALUES (?,?)", r.Name, doc(w, &r))
	}
	for _, name := range b.DropRules {
		w.exec("DELETE FROM egress_rules WHERE name = ?", name)
	}
	for _, s := range b.Specs {
		w.exec("INSERT OR REPLACE INTO job_specs (n, dict, data) VALUES (?,?,?)", s.N, int64(s.Dict), s.Data)
	}
	if b.DropSpecs > 0 {
		w.exec(`DELETE FROM job_specs WHERE n IN (SELECT n FROM jobs WHERE finished_at > 0 AND
			CASE WHEN settled_at > 0 THEN settled_at ELSE finished_at END < ?)`, b.DropSpecs)
	}
	for _, d := range b.Dicts {
		w.exec("INSERT OR REPLACE INTO dicts (id, data) VALUES (?,?)", int64(d.ID), d.Data)
		w.exec("DELETE FROM dicts WHERE id <> ? AND id NOT IN (SELECT DISTINCT dict FROM job_specs)", int64(d.ID))
	}
	// Their order is that of time: which of two goes first from a cache matters
	// too little for an index, and a clock set back for nothing more.
	kept := time.Now().UnixMicro()
	for i, t := range b.Tails {
		w.exec("INSERT OR REPLACE INTO job_tails (n, failed, kept, size, start, data) VALUES (?,?,?,?,?,?)", t.N, t.Failed, kept+int64(i), t.Size, t.Start, t.Data)
	}
	for _, n := range b.DropTails {
		w.exec("DELETE FROM job_tails WHERE n = ?", n)
	}
	for _, r := range b.Requests {
		answer, refused := r.Grant, 0
		if r.Refusal != nil {
			answer, refused = r.Refusal, 1
		}
		w.exec("INSERT OR REPLACE INTO requests (owner, id, body, at, job, answer, refused) VALUES (?,?,?,?,?,?,?)",
			r.Owner, r.ID, r.Body, r.At, r.Job, text(answer), refused)
	}
	if b.DropRequests > 0 {
		w.exec("DELETE FROM requests WHERE at < ?", b.DropRequests)
	}
	for name, v := range b.Settings {
		w.exec("INSERT OR REPLACE INTO settings (name, value) VALUES (?,?)", name, v)
	}
}

// text is a document that is JSON already, nil (NULL) for none.
func text(raw json.RawMessage) any {
	if raw == nil {
		return nil
	}
	return string(raw)
}

func (w *writer) peers(b *hub.JobBatch) {
	for _, r := range b.Relays {
		states := r.States
		if states == nil {
			states = []dispatch.RunnerState{}
		}
		w.exec("INSERT OR REPLACE INTO relays (id, key, name, enrolled_at, server, reported_at, seen_at, inventory, beat, states) VALUES (?,?,?,?,?,?,?,?,?,?)",
			r.ID, []byte(r.Key), r.Name, r.Enrolled, r.Server, r.Reported, r.Seen, doc(w, r.Inventory), doc(w, r.Beat), doc(w, &states))
	}
	for _, r := range b.DropRelays {
		w.exec("DELETE FROM relays WHERE id = ?", r.Node)
		w.exec("INSERT OR REPLACE INTO relays_removed (id, key, at) VALUES (?,?,?)", r.Node, []byte(r.Key), r.At)
	}
	for _, s := range b.Servers {
		w.exec("INSERT OR REPLACE INTO servers (url, name, at, actor) VALUES (?,?,?,?)", s.URL, s.Name, s.At, s.Actor)
	}
	for _, u := range b.DropServers {
		w.exec("DELETE FROM servers WHERE url = ?", u)
	}
	for _, p := range b.Projects {
		w.exec("INSERT OR REPLACE INTO projects (instance, id, path, state, first_job, first_ref, refused, at, actor) VALUES (?,?,?,?,?,?,?,?,?)",
			p.Instance, p.ID, p.Path, string(p.State), p.FirstJob, p.FirstRef, p.Refused, p.At, p.Actor)
	}
	for _, k := range b.DropProjects {
		w.exec("DELETE FROM projects WHERE instance = ? AND id = ?", k.Instance, k.ID)
	}
	for _, name := range b.DropInstance {
		w.exec("DELETE FROM projects WHERE instance = ?", name)
	}
	for _, k := range b.Keys {
		w.exec("INSERT OR REPLACE INTO keys (hash, name, created_at, expires_at, revoked_at, doc) VALUES (?,?,?,?,?,?)",
			k.Hash, k.Name, k.Created, k.Expires, k.Revoked, doc(w, &k))
	}
	for _, h := range b.DropKeys {
		w.exec("DELETE FROM keys WHERE hash = ?", h)
	}
}

// imageDays is how long the use of an image is of interest.
const imageDays = 24 * time.Hour

func (d *DB) loadJobs(ctx context.Context, l *hub.LoadedJobs) error {
	var dicts []hub.Dict
	l.Settings = map[string]string{}
	for _, f := range []func() error{
		func() error {
			return d.query(ctx, l1(&l.Relays, scanRelay), "SELECT id, key, name, enrolled_at, server, reported_at, seen_at, inventory, beat, states FROM relays")
		},
		func() error {
			return d.query(ctx, l1(&l.Dropped, func(r *sql.Rows) (v hub.Revoked, err error) {
				var key []byte
				err = r.Scan(&v.Node, &key, &v.At)
				v.Key = ed25519.PublicKey(key)
				return v, err
			}), "SELECT id, key, at FROM relays_removed")
		},
		func() error {
			return d.query(ctx, l1(&l.Servers, func(r *sql.Rows) (s hub.Server, err error) { return s, r.Scan(&s.URL, &s.Name, &s.At, &s.Actor) }), "SELECT url, name, at, actor FROM servers")
		},
		func() error {
			return d.query(ctx, l1(&l.Projects, func(r *sql.Rows) (p hub.Project, err error) {
				return p, r.Scan(&p.Instance, &p.ID, &p.Path, &p.State, &p.FirstJob, &p.FirstRef, &p.Refused, &p.At, &p.Actor)
			}), "SELECT instance, id, path, state, first_job, first_ref, refused, at, actor FROM projects")
		},
		func() error {
			return d.query(ctx, l1(&l.Keys, func(r *sql.Rows) (k hub.Key, err error) { return k, scanDoc(r, "a key", &k) }), "SELECT doc FROM keys")
		},
		func() error {
			return d.query(ctx, l1(&l.Rules, func(r *sql.Rows) (v hub.EgressRule, err error) { return v, scanDoc(r, "an egress rule", &v) }), "SELECT doc FROM egress_rules")
		},
		func() error {
			return d.query(ctx, l1(&l.Jobs, scanJob), "SELECT doc FROM jobs WHERE settled_at = 0 ORDER BY n")
		},
		func() error {
			return d.query(ctx, l1(&l.Tails, func(r *sql.Rows) (t hub.TailSize, err error) { return t, r.Scan(&t.N, &t.Bytes) }), "SELECT n, length(data) FROM job_tails WHERE failed = 0 ORDER BY kept")
		},
		func() error {
			return d.query(ctx, l1(&l.Images, func(r *sql.Rows) (u hub.ImageUse, err error) { return u, r.Scan(&u.Key, &u.Node, &u.At) }),
				"SELECT image_key, node, max(finished_at) FROM jobs WHERE image_key <> '' AND finished_at > ? AND node <> '' GROUP BY image_key, node", time.Now().Add(-imageDays).Unix())
		},
		func() error {
			return d.query(ctx, l1(&dicts, scanDict), "SELECT id, data FROM dicts ORDER BY id DESC LIMIT 1")
		},
		func() error {
			return d.query(ctx, func(r *sql.Rows) error { return r.Scan(&l.Specs, &l.LastJob) }, "SELECT (SELECT count(*) FROM job_specs), coalesce((SELECT max(n) FROM jobs), 0)")
		},
		func() error {
			return d.query(ctx, func(r *sql.Rows) error {
				var k, v string
				err := r.Scan(&k, &v)
				l.Settings[k] = v
				return err
			}, "SELECT name, value FROM settings")
		},
	} {
		if err := f(); err != nil {
			return err
		}
	}
	if len(dicts) > 0 {
		l.Dict = dicts[0]
	}
	return nil
}

func scanDict(r *sql.Rows) (v hub.Dict, err error) { return v, r.Scan(&v.ID, &v.Data) }

func scanDoc[T any](r *sql.Rows, what string, p *T) error {
	var s string
	if err := r.Scan(&s); err != nil {
		return err
	}
	return into(what, s, p)
}

func scanJob(r *sql.Rows) (*hub.Job, error) {
	j := &hub.Job{}
	return j, scanDoc(r, "a job", j)
}

func scanRelay(rows *sql.Rows) (*hub.Relay, error) {
	r := &hub.Relay{}
	var key []byte
	var inventory, beat sql.NullString
	var states string
	if err := rows.Scan(&r.ID, &key, &r.Name, &r.Enrolled, &r.Server, &r.Reported, &r.Seen, &inventory, &beat, &states); err != nil {
		return nil, err
	}
	r.Key = ed25519.PublicKey(key)
	if err := parse("a relay's inventory", inventory, &r.Inventory); err != nil {
		return nil, err
	}
	if err := parse("a relay's heartbeat", beat, &r.Beat); err != nil {
		return nil, err
	}
	if err := into("a relay's runners", states, &r.States); err != nil {
		return nil, err
	}
	if len(r.States) == 0 {
		r.States = nil
	}
	return r, nil
}

// Job is hub.Store's.
func (d *DB) Job(ctx context.Context, id string) (*hub.Job, error) {
	var list []*hub.Job
	err := d.query(ctx, l1(&list, scanJob), "SELECT doc FROM jobs WHERE id = ?", id)
	if len(list) == 0 {
		return nil, err
	}
	return list[0], err
}

// Jobs is hub.Store's.
func (d *DB) Jobs(ctx context.Context, q hub.JobQuery) (list []*hub.Job, err error) {
	where, args := "SELECT doc FROM jobs WHERE 1", []any{}
	is := func(col, v string) {
		if v != "" {
			where, args = where+" AND "+col+" = ?", append(args, v)
		}
	}
	if q.Before > 0 {
		where, args = where+" AND n < ?", append(args, q.Before)
	}
	if q.Since > 0 {
		where, args = where+" AND submitted_at >= ?", append(args, q.Since)
	}
	if q.ID != "" {
		where, args = where+" AND id >= ? AND id < ?", append(args, q.ID, q.ID+"g") // past every hex digit
	}
	if q.Events { // as the encoder writes it; within a text the quotes would be escaped
		where += ` AND instr(doc, '"events":[') > 0`
	}
	is("owner", q.Owner)
	is("instance", q.Instance)
	if below, ok := strings.CutSuffix(q.Project, "/**"); ok {
		where, args = where+" AND substr(project, 1, ?) = ?", append(args, len([]rune(below))+1, below+"/")
	} else {
		is("project", q.Project)
	}
	is("ref", q.Ref)
	is("name", q.Name)
	is("state", string(q.State))
	is("outcome", q.Failure)
	is("node", q.Node)
	is("pool", q.Pool)
	err = d.query(ctx, l1(&list, scanJob), where+" ORDER BY n DESC LIMIT ?", append(args, q.Limit)...)
	return list, err
}

// JobsOf is hub.Store's.
func (d *DB) JobsOf(ctx context.Context, ns []int64) (list []*hub.Job, err error) {
	for some := range slices.Chunk(ns, 1000) {
		args := make([]any, len(some))
		for i, n := range some {
			args[i] = n
		}
		if err := d.query(ctx, l1(&list, scanJob), "SELECT doc FROM jobs WHERE n IN (?"+strings.Repeat(",?", len(some)-1)+")", args...); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(list, func(a, b *hub.Job) int { return int(b.N - a.N) })
	return list, nil
}

// History is hub.Store's.
func (d *DB) History(ctx context.Context, after int64, limit int) (list []hub.JobRow, err error) {
	err = d.query(ctx, l1(&list, func(r *sql.Rows) (v hub.JobRow, err error) {
		return v, r.Scan(&v.N, &v.Submitted, &v.Owner, &v.Instance, &v.Project, &v.Ref, &v.Name, &v.Node, &v.Pool, &v.Outcome, &v.StateOfJob)
	}), "SELECT n, submitted_at, owner, instance, project, ref, name, node, pool, outcome, state FROM jobs WHERE n > ? ORDER BY n LIMIT ?", after, limit)
	return list, err
}

// Request is hub.Store's.
func (d *DB) Request(ctx context.Context, owner, id string) (q *hub.Request, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		q = &hub.Request{Owner: owner, ID: id}
		var answer sql.NullString
		var refused bool
		if err := r.Scan(&q.Body, &q.At, &q.Job, &answer, &refused); err != nil {
			return err
		}
		switch {
		case refused:
			q.Refusal = json.RawMessage(answer.String)
		case answer.Valid:
			q.Grant = json.RawMessage(answer.String)
		}
		return nil
	}, "SELECT body, at, job, answer, refused FROM requests WHERE owner = ? AND id = ?", owner, id)
	return q, err
}

// Requests is hub.Store's.
func (d *DB) Requests(ctx context.Context, each func(owner, id string)) error {
	return d.query(ctx, func(r *sql.Rows) error {
		var owner, id string
		err := r.Scan(&owner, &id)
		if err == nil {
			each(owner, id)
		}
		return err
	}, "SELECT owner, id FROM requests")
}

// Spec is hub.Store's.
func (d *DB) Spec(ctx context.Context, n int64) (s *hub.Spec, dict []byte, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		s = &hub.Spec{N: n}
		return r.Scan(&s.Dict, &s.Data, &dict)
	}, "SELECT dict, job_specs.data, dicts.data FROM job_specs LEFT JOIN dicts ON dicts.id = dict WHERE n = ?", n)
	return s, dict, err
}

// Specs is hub.Store's.
func (d *DB) Specs(ctx context.Context, n int, bytes int64) (list []hub.Spec, err error) {
	var sum int64
	err = d.query(ctx, func(r *sql.Rows) error {
		var s hub.Spec
		err := r.Scan(&s.N, &s.Dict, &s.Data)
		if sum += int64(len(s.Data)); sum <= bytes {
			list = append(list, s)
		}
		return err
	}, "SELECT n, dict, data FROM job_specs ORDER BY n DESC LIMIT ?", n)
	return list, err
}

// Dict is hub.Store's.
func (d *DB) Dict(ctx context.Context, id uint32) ([]byte, error) {
	var list []hub.Dict
	err := d.query(ctx, l1(&list, scanDict), "SELECT id, data FROM dicts WHERE id = ?", int64(id))
	if len(list) == 0 {
		return nil, err
	}
	return list[0].Data, err
}

// Tail is hub.Store's.
func (d *DB) Tail(ctx context.Context, n int64) (t *hub.Tail, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		t = &hub.Tail{N: n}
		return r.Scan(&t.Failed, &t.Size, &t.Start, &t.Data)
	}, "SELECT failed, size, start, data FROM job_tails WHERE n = ?", n)
	return t, err
}

// Egress is hub.Store's.
func (d *DB) Egress(ctx context.Context, n int64) (e *hub.JobEgress, err error) {
	err = d.query(ctx, func(r *sql.Rows) error {
		e = &hub.JobEgress{N: n}
		return r.Scan(&e.Revision, &e.Data)
	}, "SELECT revision, data FROM job_egress WHERE n = ?", n)
	return e, err
}

// Old is hub.Store's.
func (d *DB) Old(ctx context.Context, keep int, unsettled int64, limit int) (list []*hub.Job, err error) {
	err = d.query(ctx, l1(&list, scanJob), `SELECT doc FROM jobs WHERE n <= coalesce((SELECT n FROM jobs ORDER BY n DESC LIMIT 1 OFFSET ?), 0)
		AND finished_at > 0 AND (settled_at > 0 OR finished_at < ?) ORDER BY n LIMIT ?`, keep, unsettled, limit)
	return list, err
}

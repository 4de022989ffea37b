// Package hubtest has what tests of a hub need: a store in memory, the suite
// that every store passes, and a node that speaks the protocol over a
// connection in memory or any other.
package hubtest

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// Memory is a hub.Store that forgets with the process. Its fields are knobs.
type Memory struct {
	mu sync.Mutex
	// Fail is what Apply returns, storing nothing, while it is set.
	fail    error
	batches int
	durable int

	hub       string
	records   map[string]*hub.Record
	beats     map[string]hub.Heartbeat
	workloads map[string]hub.Workloads
	issued    map[string]bool
	tokens    map[string]hub.Token
	commands  []hub.Command
	revoked   map[string]hub.Revoked
	audit     []hub.AuditLine

	jobs
	people
}

// NewMemory makes an empty store.
func NewMemory() *Memory {
	return &Memory{hub: wire.NewID(), records: map[string]*hub.Record{}, beats: map[string]hub.Heartbeat{}, workloads: map[string]hub.Workloads{},
		issued: map[string]bool{}, tokens: map[string]hub.Token{}, revoked: map[string]hub.Revoked{}, jobs: newJobs(), people: newPeople()}
}

// Fail makes Apply fail until it is called with nil.
func (m *Memory) Fail(err error) { m.mu.Lock(); m.fail = err; m.mu.Unlock() }

// Counts is how many batches were stored, and how many of them durably.
func (m *Memory) Counts() (batches, durable int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.batches, m.durable
}

// Copy is a backup.
func (m *Memory) Copy() *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &Memory{hub: m.hub, records: maps.Clone(m.records), beats: maps.Clone(m.beats), workloads: maps.Clone(m.workloads), issued: maps.Clone(m.issued),
		tokens: maps.Clone(m.tokens), commands: slices.Clone(m.commands), revoked: maps.Clone(m.revoked), audit: slices.Clone(m.audit), jobs: m.jobs.copy(), people: m.people.copy()}
}

// clone is v after a trip through JSON, as a database would give it.
func clone[T any](v T) (out T) {
	b, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		panic(err)
	}
	return out
}

// Load is hub.Store's.
func (m *Memory) Load(context.Context) (*hub.Loaded, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &hub.Loaded{Hub: m.hub, Heartbeats: slices.Collect(maps.Values(m.beats)), Tokens: slices.Collect(maps.Values(m.tokens)), Revoked: slices.Collect(maps.Values(m.revoked))}
	for _, r := range m.records {
		l.Records = append(l.Records, clone(r))
	}
	l.LastIssued = map[string]int64{}
	for _, c := range m.commands {
		l.LastIssued[c.Node] = max(l.LastIssued[c.Node], c.Issued)
		if c.Open() {
			l.Commands = append(l.Commands, clone(&c))
		}
	}
	if n := len(m.audit); n > 0 {
		l.LastAudit = m.audit[n-1].Seq
	}
	m.jobs.load(&l.LoadedJobs)
	m.people.load(&l.LoadedPeople)
	return l, nil
}

// Apply is hub.Store's.
func (m *Memory) Apply(_ context.Context, b *hub.Batch) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.batches++
	if b.Durable {
		m.durable++
	}
	for _, r := range b.Records {
		m.records[r.ID] = clone(r)
	}
	for _, id := range b.Removed {
		delete(m.records, id)
		delete(m.beats, id)
		delete(m.workloads, id)
		maps.DeleteFunc(m.issued, func(k string, _ bool) bool { return k[:len(id)] == id })
		m.commands = slices.DeleteFunc(m.commands, func(c hub.Command) bool { return c.Node == id })
	}
	for _, r := range b.Revoked {
		m.revoked[r.Node] = r
	}
	for _, h := range b.Heartbeats {
		m.beats[h.Node] = h
	}
	for _, w := range b.Workloads {
		m.workloads[w.Node] = clone(w)
	}
	for _, i := range b.Issued {
		m.issued[i.Node+" "+i.Desired.ID] = true
	}
	for _, t := range b.Tokens {
		m.tokens[t.Hash] = t
	}
	for _, h := range b.DropTokens {
		delete(m.tokens, h)
	}
	for _, c := range b.Commands {
		i := slices.IndexFunc(m.commands, func(o hub.Command) bool { return o.ID == c.ID })
		if i < 0 {
			m.commands = append(m.commands, clone(*c))
			continue
		}
		m.commands[i].Outcome, m.commands[i].Message, m.commands[i].Acked = c.Outcome, c.Message, c.Acked
	}
	m.prune(b.SettledBefore)
	m.jobs.apply(&b.JobBatch)
	m.people.apply(&b.PeopleBatch)
	m.audit = append(m.audit, b.Audit...)
	if n := len(m.audit) - hub.AuditKept; n > 0 {
		m.audit = slices.Clone(m.audit[n:])
	}
	return nil
}

func (m *Memory) prune(before int64) {
	if before == 0 {
		return
	}
	newer := map[string]int{}
	for i := len(m.commands) - 1; i >= 0; i-- {
		c := m.commands[i]
		if !c.Open() && c.Acked < before && newer[c.Node] >= hub.CommandsKept {
			m.commands = slices.Delete(m.commands, i, i+1)
		}
		newer[c.Node]++
	}
}

// Audit is hub.Store's.
func (m *Memory) Audit(_ context.Context, q hub.AuditQuery) (out []hub.AuditLine, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(m.audit) - 1; i >= 0 && len(out) < q.Limit; i-- {
		if l := m.audit[i]; (q.Node == "" || l.Node == q.Node) && (q.Before == 0 || l.Seq < q.Before) {
			out = append(out, l)
		}
	}
	slices.Reverse(out)
	return out, nil
}

// Workloads is hub.Store's.
func (m *Memory) Workloads(_ context.Context, node string) (*hub.Workloads, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w, ok := m.workloads[node]
	if !ok {
		return nil, nil
	}
	return &w, nil
}

// Commands is hub.Store's.
func (m *Memory) Commands(_ context.Context, node string, limit int) (out []hub.Command, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(m.commands) - 1; i >= 0 && len(out) < limit; i-- {
		if m.commands[i].Node == node {
			out = append(out, m.commands[i])
		}
	}
	return out, nil
}

// Command is hub.Store's.
func (m *Memory) Command(_ context.Context, id string) (*hub.Command, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.commands {
		if c.ID == id {
			return &c, nil
		}
	}
	return nil, nil
}

// Issued is hub.Store's.
func (m *Memory) Issued(_ context.Context, node, id string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.issued[node+" "+id], nil
}

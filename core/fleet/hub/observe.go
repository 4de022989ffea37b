package hub

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"virtkit/core/fleet/wire"
)

// pending is what a node said that is not stored yet: only the latest of each.
type pending struct {
	beat      bool
	workloads *Workloads
	inventory *wire.Inventory
}

// later has f note something for the next flush.
func (h *Hub) later(node string, f func(*pending)) {
	h.sessMu.Lock()
	defer h.sessMu.Unlock()
	p := h.dirty[node]
	if p == nil {
		p = &pending{}
		h.dirty[node] = p
	}
	f(p)
}

// again takes back what could not be stored, behind what came since: a node does
// not say again what has not changed.
func (h *Hub) again(dirty map[string]*pending) {
	h.sessMu.Lock()
	defer h.sessMu.Unlock()
	for id, p := range dirty {
		if q := h.dirty[id]; q != nil {
			p = &pending{p.beat || q.beat, cmp.Or(q.workloads, p.workloads), cmp.Or(q.inventory, p.inventory)}
		}
		h.dirty[id] = p
	}
}

// flushChange stores what is held back: all nodes' latest heartbeats and lists
// in one batch, without an fsync unless durable or an inventory is in it.
func (h *Hub) flushChange(durable bool) *change {
	return &change{done: make(chan error, 1), fn: func(t *tx) error {
		h.sessMu.Lock()
		dirty := h.dirty
		h.dirty = make(map[string]*pending, len(dirty))
		h.sessMu.Unlock()
		t.undo = append(t.undo, func() { h.again(dirty) })
		for id, p := range dirty {
			n := t.s.Nodes[id]
			if n == nil {
				continue // removed meanwhile
			}
			if b := n.Live.Beat(); p.beat && b != nil {
				t.b.Heartbeats = append(t.b.Heartbeats, *b)
			}
			if w := p.workloads; w != nil {
				t.b.Workloads = append(t.b.Workloads, *w)
				if n.VMs != len(w.List) || n.Omitted != w.Omitted {
					r := *n.Record
					r.VMs, r.Omitted = len(w.List), w.Omitted
					n = t.put(n, r)
				}
				t.event(id, "workloads", "")
			}
			if p.inventory != nil && !reflect.DeepEqual(p.inventory, n.Inventory) {
				// It costs an fsync: of one node once a heartbeat at most, which is
				// every other flush, or with one that costs it anyway.
				if !durable && time.Since(n.Live.inventory) < h.o.Heartbeat*3/4 {
					h.later(id, func(q *pending) {
						if q.inventory == nil { // none that came since
							q.inventory = p.inventory
						}
					})
					continue
				}
				n.Live.inventory = time.Now()
				r := *n.Record
				r.Inventory = p.inventory
				if p.inventory.Hostname != "" {
					r.Name = p.inventory.Hostname
				}
				t.fallback(t.put(n, r))
				t.b.Durable = true
				t.event(id, "inventory", "")
			}
		}
		t.flushRelays()
		if durable && len(dirty) > 0 {
			t.b.Durable = true
		}
		return nil
	}}
}

// beat takes a heartbeat.
func (h *Hub) beat(n *Node, m *wire.Heartbeat) {
	n.Live.beat.Store(&Heartbeat{Node: n.ID, At: h.o.Now().Unix(), Beat: m})
	h.later(n.ID, func(p *pending) { p.beat = true })
	h.jobs.beat(n.ID, m)
}

// report takes a report: its list of VMs for the next flush, its state at once
// when it changed. It returns when the state is stored.
func (h *Hub) report(ctx context.Context, id string, m *wire.Report) error {
	w := &Workloads{Node: id, At: h.o.Now().Unix(), List: m.Workloads, Omitted: m.Omitted}
	h.later(id, func(p *pending) { p.workloads = w })
	n := h.Snapshot().Nodes[id]
	if n == nil || m.State == nil || reflect.DeepEqual(n.State, m.State) {
		return nil
	}
	var reasons []string
	if n.Conflict == nil && steeringChanged(n.State, m.State) {
		var err error
		if reasons, err = h.evidence(ctx, n, m.State); err != nil {
			return fmt.Errorf("looking for what the hub has a record of: %w", err)
		}
	}
	return h.do(ctx, func(t *tx) error {
		n := t.s.Nodes[id]
		if n == nil {
			return nil
		}
		r := *n.Record
		was := r.State
		r.State, r.Reported = m.State, t.unix()
		t.observed(id, was, m.State)
		switch {
		case r.Conflict == nil && len(reasons) > 0:
			t.conflicted(&r, m.State, reasons)
		case r.Conflict != nil:
			// What the operator is shown, and may adopt, is what the node holds now.
			c := *r.Conflict
			c.Node, c.State, c.Command = m.State.Applied, m.State.Node, m.State.LastCommand
			r.Conflict = &c
		}
		t.event(id, "report", string(m.State.Node))
		t.fallback(t.put(n, r))
		return nil
	})
}

// steeringChanged says whether a state may hold what its node's last one did not.
func steeringChanged(was, now *wire.State) bool {
	if was == nil {
		return now.Applied != nil || now.LastCommand != ""
	}
	return was.LastCommand != now.LastCommand || !reflect.DeepEqual(was.Applied, now.Applied)
}

// observed writes what a node reports of what it was asked into the audit log.
func (t *tx) observed(id string, was, now *wire.State) {
	if was == nil {
		was = &wire.State{}
	}
	if was.Node != now.Node {
		t.audit(id, "node", "state "+string(now.Node), "")
	}
	if a := now.Applied; a != nil && (was.Applied == nil || *key(was.Applied) != *key(a)) {
		t.audit(id, "node", "applied", fmt.Sprintf("generation %d: %s", a.Generation, describe(a.Policy)))
	}
	for _, u := range now.Unsupported {
		if !slices.Contains(was.Unsupported, u) {
			t.audit(id, "node", "cannot comply", u)
		}
	}
	for _, p := range []struct {
		what     string
		was, now *wire.Progress
	}{{"update", was.Update, now.Update}, {"reset", was.Reset, now.Reset}, {"tools", was.Tools, now.Tools}} {
		if p.now != nil && (p.was == nil || p.was.Phase != p.now.Phase || p.was.Command != p.now.Command) {
			t.audit(id, "node", p.what+" "+string(p.now.Phase), strings.TrimSpace(p.now.Target+" "+p.now.Reason))
		}
	}
}

// applied compares two of them: Applied itself has pointers.
type applied struct {
	gen  uint64
	id   string
	cap  int
	stop bool
}

func key(a *wire.Applied) *applied {
	return &applied{a.Generation, a.ID, a.Policy.Ceiling, a.Policy.Stop}
}

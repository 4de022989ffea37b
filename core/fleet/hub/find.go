package hub

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// ServerStatus is how the hub holds a relay's server.
func (s *Snapshot) ServerStatus(relay string) dispatch.ServerStatus { return s.serverStatus(relay) }

// ServerList is all servers that were decided on, by name, then URL.
func (s *Snapshot) ServerList() []Server {
	list := slices.Collect(maps.Values(s.Servers))
	slices.SortFunc(list, func(a, b Server) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.URL, b.URL)
	})
	return list
}

// OutputLen is how much of a job's output can be read, or could.
func (h *Hub) OutputLen(j *Job) int64 { return h.outputLen(j) }

// FindJob finds a job of anybody's by its ID or 8 digits of one or more.
func (h *Hub) FindJob(ctx context.Context, id string) (*Job, error) {
	if !wire.IsHex(id, wire.IDLen) && len(id) < 8 {
		return nil, fault.Newf(fault.NotFound, "no job %q", wire.Clean(id, 80)).Hint("vk-hub jobs lists them; an ID or 8 of its digits is expected")
	}
	p := h.jobs
	p.mu.RLock()
	j := p.jobs[id]
	p.mu.RUnlock()
	if j != nil {
		return j, nil
	}
	list, err := h.store.Jobs(ctx, JobQuery{ID: id, Limit: 2})
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, fault.Newf(fault.NotFound, "no job %q", wire.Clean(id, 80)).Hint("vk-hub jobs lists them; an ID or 8 of its digits is expected")
	case len(list) > 1:
		return nil, fault.Newf(fault.Conflict, "%q means more than one job", wire.Clean(id, 80)).Hint("name it by its whole ID")
	}
	return list[0], nil
}

// EndJob ends a job of anybody's here and now, whatever its node does: it is
// canceled, with the output that is stored. A node that has it is told to stop
// it at once, now or when it is back, and what it sends of it is dropped.
func (h *Hub) EndJob(ctx context.Context, actor string, j *Job) (*Job, error) {
	err := h.do(context.WithoutCancel(ctx), func(t *tx) error {
		now := t.job(j.ID)
		if now == nil || now.State == dispatch.Finished {
			if now != nil {
				j = now
			}
			return nil
		}
		t.audit(now.Node, actor, "job ended by force", fmt.Sprintf("%s: %s %s", now.ID, now.Path, now.Name))
		if node, id := now.Node, now.ID; node != "" {
			t.after = append(t.after, func() { h.jobs.abandon(node, id) })
		}
		c := *now
		c.Cancel = wire.CancelImmediate
		t.giveUp(&c, job.Canceled, "ended by an operator, without its node's word")
		j = t.job(c.ID)
		return nil
	})
	if err != nil {
		return nil, fault.New(fault.Unavailable, "the hub cannot store it").Because(err)
	}
	return j, nil
}

// abandon tells a node that is here to stop a job that has ended without it. One
// that is away hears of it after its held.
func (p *placer) abandon(node, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sp := p.spots[node]
	if sp == nil || sp.sess == nil {
		return
	}
	sp.foreign[id] = true // it has the node's room until the node says that it is over
	sp.sum()
	sp.sess.post(&wire.Cancel{Job: id, Mode: wire.CancelImmediate})
}

// CancelJob stops a job of anybody's.
func (h *Hub) CancelJob(ctx context.Context, actor string, j *Job, mode wire.CancelMode) (*Job, error) {
	j, e := h.cancel(ctx, actor, j, mode)
	if e != nil {
		return nil, fault.New(fault.Unavailable, e.Text)
	}
	return j, nil
}

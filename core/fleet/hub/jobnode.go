package hub

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// jobMessage takes what a node says of placed jobs. What must be stored is
// before it returns.
func (h *Hub) jobMessage(ctx context.Context, s *Session, m wire.Message) error {
	p := h.jobs
	switch m := m.(type) {
	case *wire.Held:
		return h.heldBy(ctx, s, m)
	case *wire.OfferReply:
		p.offered(s, m)
	case *wire.Lease:
		if text := p.leased(m); text != "" {
			return h.do(ctx, func(t *tx) error {
				t.audit(s.node, "node", "reservation ended", text)
				return nil
			})
		}
	case *wire.JobState:
		return h.jobState(ctx, s, m)
	case *wire.Output:
		return h.output(s, m)
	case *wire.Result:
		return h.result(ctx, s, m)
	case *wire.EgressReport:
		return h.egressReport(ctx, s, m)
	default:
		h.log.Debug("message without a use", logx.Node, s.node, "type", fmt.Sprintf("%T", m))
	}
	return nil
}

// follows says whether a job is this node's and has not ended.
func (p *placer) follows(node, id string) (*liveJob, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	l := p.live[id]
	return l, l != nil && l.spot != nil && l.spot.id == node
}

// heldBy reconciles what a node holds with what the hub follows, once a session.
func (h *Hub) heldBy(ctx context.Context, s *Session, m *wire.Held) error {
	p := h.jobs
	holds := map[string]bool{}
	for _, id := range m.Jobs {
		holds[id] = true
	}
	var msgs []wire.Message
	err := h.do(ctx, func(t *tx) error {
		msgs = msgs[:0]
		for _, id := range m.Jobs {
			j := t.job(id)
			if _, ok := p.follows(s.node, id); !ok || j == nil || j.State == dispatch.Finished {
				msgs = append(msgs, &wire.Cancel{Job: id, Mode: wire.CancelImmediate})
				continue
			}
			if j.State == dispatch.Starting {
				t.accepted(j)
			}
			var acked int64
			if p.out != nil {
				var err error
				if acked, _, err = p.out.Held(id); err != nil {
					h.log.Error("an output cannot be read", logx.Job, id, logx.Err, err)
				}
			}
			msgs = append(msgs, &wire.OutputAck{Job: id, Offset: acked})
			if j.Cancel != "" {
				msgs = append(msgs, &wire.Cancel{Job: id, Mode: j.Cancel})
			}
		}
		for _, j := range p.unfinished() {
			if j = t.job(j.ID); j == nil || j.Node != s.node || holds[j.ID] {
				continue
			}
			switch j.State {
			case dispatch.Starting:
				t.again(j.ID, s.node)
			case dispatch.Running:
				t.giveUp(j, job.Lost, "its node came back without the job")
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	sp := p.spot(s.node)
	if sp.sess != s {
		return nil // superseded meanwhile
	}
	for _, id := range m.Reservations {
		if r := p.res[id]; r == nil || r.spot != sp {
			msgs = append(msgs, &wire.GiveBack{Reservation: id})
		}
	}
	clear(sp.foreign)
	for _, id := range m.Jobs {
		if l := p.live[id]; l == nil || l.spot != sp {
			sp.foreign[id] = true
		}
	}
	sp.held = true
	sp.sum()
	p.bump()
	s.post(msgs...)
	return nil
}

// accepted makes a starting job a running one: its node has journaled it.
func (t *tx) accepted(j *Job) {
	c := *j
	c.State, c.Accepted = dispatch.Running, t.unix()
	c.Revision++
	t.putJob(&c)
	p := t.h.jobs
	t.after = append(t.after, func() {
		failpoint.At(failpoint.AcceptedStored)
		p.mu.Lock()
		defer p.mu.Unlock()
		l := p.live[c.ID]
		if l == nil || l.spot == nil {
			return
		}
		l.spec, l.accepted = nil, time.Now() // its secrets are the node's now
		if !l.claim.answered {
			l.claim.answered, l.claim.beat = true, l.spot.beats
		}
		if l.image != "" {
			l.spot.images[l.image] = l.accepted
		}
		l.spot.sum()
		p.bump()
	})
}

func (h *Hub) jobState(ctx context.Context, s *Session, m *wire.JobState) error {
	p := h.jobs
	if _, ok := p.follows(s.node, m.Job); !ok {
		if m.State.State == "finished" || m.State.State == "refused" {
			p.rid(s.node, m.Job) // it has no room of the node's any more
		}
		return nil
	}
	return h.do(ctx, func(t *tx) error {
		j := t.job(m.Job)
		if j == nil || j.Node != s.node || j.State != dispatch.Starting && j.State != dispatch.Running {
			return nil
		}
		switch m.State.State {
		case "refused":
			if j.State != dispatch.Starting {
				return nil
			}
			h.log.Info("a start was refused", logx.Node, s.node, logx.Job, j.ID, "reason", m.State.Reason, logx.Err, m.State.Message)
			t.after = append(t.after, func() {
				p.mu.Lock()
				if l := p.live[j.ID]; l != nil {
					if l.refused == nil {
						l.refused = map[string]time.Time{}
					}
					l.refused[s.node] = time.Now()
				}
				p.mu.Unlock()
			})
			t.again(j.ID, s.node)
		case "accepted", "running", "finished":
			if j.State == dispatch.Starting {
				t.accepted(j)
				j = t.job(j.ID)
			}
			if m.State.State != "running" || j.Stage == m.State.Stage && (m.State.Guest == nil || j.Guest != nil && *j.Guest == *m.State.Guest) {
				return nil
			}
			durable := t.b.Durable
			c := *j
			c.Stage = m.State.Stage
			if m.State.Guest != nil {
				c.Guest = m.State.Guest
			}
			c.Revision++
			t.putJob(&c)
			// A stage is for people: it survives the process, no more.
			t.b.Durable = durable
		}
		return nil
	})
}

// output stores a piece. Its ack comes once it is synced.
func (h *Hub) output(s *Session, m *wire.Output) error {
	data, err := base64.StdEncoding.DecodeString(m.Data)
	if err != nil {
		return fmt.Errorf("%w: output that is not base64", wire.ErrProtocol)
	}
	l, ok := h.jobs.follows(s.node, m.Job)
	if !ok || h.jobs.out == nil { // given up: acked and dropped
		s.post(&wire.OutputAck{Job: m.Job, Offset: m.Offset + int64(len(data))})
		return nil
	}
	err = h.jobs.out.Append(m.Job, m.Offset, data, l.limit)
	if errors.Is(err, outstore.ErrGap) {
		return fmt.Errorf("%w: job %s: %w", wire.ErrProtocol, m.Job, err)
	}
	if err != nil {
		// The node keeps what is not acked, and sends it again in its next session.
		h.log.Error("an output cannot be stored", logx.Job, m.Job, logx.Err, err)
		return end(wire.Internal, "a job's output cannot be stored")
	}
	return nil
}

// Synced is outstore.Run's: it acks what is stored.
func (h *Hub) Synced(id string, offset int64, err error) {
	if err != nil {
		h.log.Error("an output cannot be stored", logx.Job, id, logx.Err, err)
		p := h.jobs
		p.mu.RLock()
		l := p.live[id]
		p.mu.RUnlock()
		if l != nil && l.spot != nil && l.spot.sess != nil {
			l.spot.sess.cancel(end(wire.Internal, "a job's output cannot be stored"))
		}
		return
	}
	failpoint.At(failpoint.OutputStored)
	h.jobs.tellNode(id, &wire.OutputAck{Job: id, Offset: offset})
	h.jobs.tellOutput(id)
}

// result takes how a job ended. The node repeats it until it is recorded.
func (h *Hub) result(ctx context.Context, s *Session, m *wire.Result) error {
	p := h.jobs
	if _, ok := p.follows(s.node, m.Job); ok {
		if p.out != nil {
			acked, _, err := p.out.Held(m.Job)
			if err == nil && acked < m.Result.OutputLen {
				return fmt.Errorf("%w: the result of job %s says %d bytes of output, %d are acked", wire.ErrProtocol, m.Job, m.Result.OutputLen, acked)
			}
		}
		err := h.do(ctx, func(t *tx) error {
			j := t.job(m.Job)
			if j == nil || j.State == dispatch.Finished || j.Node != s.node {
				return nil
			}
			if j.Accepted == 0 { // the answer to the start was lost
				c := *j
				c.Accepted = t.unix()
				j = &c
			}
			r := m.Result
			if t.takeReport(j, &r) {
				c := *j
				c.Reported = true
				j = &c
			}
			t.finish(j, &r)
			if f := job.Failure(r.Failure); f == job.System || f == job.ImagePull {
				t.audit(s.node, "node", "job failed", fmt.Sprintf("%s: %s %s: %s: %s", j.ID, j.Path, j.Name, f, r.Message))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	p.rid(s.node, m.Job)
	failpoint.At(failpoint.ResultStored)
	s.post(&wire.JobRecorded{Job: m.Job})
	return nil
}

// rid forgets a job that the hub had given up, and that its node is rid of.
func (p *placer) rid(node, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sp := p.spots[node]; sp != nil && sp.foreign[id] {
		delete(sp.foreign, id)
		sp.sum()
		p.bump()
	}
}

package hub

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Owner is who makes a request of the client API: a relay or an API key.
type Owner struct {
	ID   string // the relay's, or the key's hash
	Name string // for the audit log: relay ID, key NAME
	Key  *Key   // nil for a relay
}

// deny makes the error of a request.
func deny(code dispatch.Code, format string, a ...any) *dispatch.Error {
	e := &dispatch.Error{Status: dispatch.Codes[code].Status, Failure: dispatch.Failure{Text: fmt.Sprintf(format, a...), Code: code}}
	if code == dispatch.NoCapacity || code == dispatch.Unavailable {
		e.RetryAfterSecs = dispatch.PlaceRetrySecs
	}
	return e
}

// denied makes one of what a change failed with.
func denied(err error) *dispatch.Error {
	if e, ok := err.(*dispatch.Error); ok {
		return e
	}
	return deny(dispatch.Unavailable, "%v", err)
}

// may says why an owner may not name a placement, nil when it may.
func (o *Owner) may(p *dispatch.Placement) *dispatch.Error {
	if o.Key == nil {
		return nil
	}
	pool := false
	for _, k := range o.Key.Pools {
		pool = pool || k == "*" || k == p.Pool
	}
	m, e := o.Key.Max, p.Envelope
	switch {
	case !pool:
		return deny(dispatch.Forbidden, "%s may not use pool %q", o.Name, wire.Clean(p.Pool, 63))
	case m.Memory > 0 && e.Memory > m.Memory, m.CPUs > 0 && e.CPUs > m.CPUs, m.Disk > 0 && e.Disk > m.Disk:
		return deny(dispatch.Forbidden, "the envelope is larger than %s may ask for", o.Name)
	}
	return nil
}

// pkey names a placement.
func pkey(p *dispatch.Placement) string {
	return fmt.Sprintf("%q %q %d %d %d", p.Pool, p.Labels, p.Envelope.Memory, p.Envelope.CPUs, p.Envelope.Disk)
}

// Capacity counts how many envelopes fit, held until the answer's revision
// passes q.After when q asks for that.
func (h *Hub) Capacity(ctx context.Context, o Owner, q *dispatch.CapacityRequest) (*dispatch.Capacity, *dispatch.Error) {
	if e := o.may(&q.Placement); e != nil {
		return nil, e
	}
	wait := time.NewTimer(time.Duration(min(q.WaitSecs, dispatch.MaxWaitSecs)) * time.Second)
	defer wait.Stop()
	p, key := h.jobs, pkey(&q.Placement)
	for {
		p.mu.Lock()
		n, now := p.fitsNow(&q.Placement), time.Now()
		f := p.fits[key]
		if f == nil {
			p.forgetOld(now)
			f = &fitsAt{rev: p.rev, fits: n}
			p.fits[key] = f
		}
		if f.fits != n {
			// Past what was told: what was changed may not have moved p.rev yet.
			f.rev, f.fits = max(p.rev, f.rev+1), n
		}
		f.used = now
		c, moved := &dispatch.Capacity{Revision: f.rev, Fits: n}, p.moved
		p.mu.Unlock()
		// One past ours is of before a restart.
		if q.WaitSecs == 0 || c.Revision != q.After {
			return c, nil
		}
		select {
		case <-moved:
		case <-wait.C:
			return c, nil
		case <-ctx.Done():
			return nil, deny(dispatch.Unavailable, "the hub is stopping")
		}
		// Every heartbeat moves something: what a fleet of hundreds moves
		// meanwhile is counted at once.
		pause := time.NewTimer(capacityPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, deny(dispatch.Unavailable, "the hub is stopping")
		}
	}
}

// Reserve has a node set an envelope aside. body is the sha256 of the request's
// body, for its request_id.
func (h *Hub) Reserve(ctx context.Context, o Owner, q *dispatch.ReservationRequest, body string) (*dispatch.ReservationGrant, *dispatch.Error) {
	if e := o.may(&q.Placement); e != nil {
		return nil, e
	}
	done, e := h.once(ctx, o, q.RequestID)
	if e != nil {
		return nil, e
	}
	defer done()
	old, err := h.request(ctx, o.ID, q.RequestID)
	switch {
	case err != nil:
		return nil, denied(err)
	case old != nil && h.o.Now().Unix()-old.At >= dispatch.IdempotentSecs:
	case old != nil && (old.Body != body || old.Grant == nil):
		return nil, deny(dispatch.Conflict, "request_id was used for another request")
	case old != nil:
		g := new(dispatch.ReservationGrant)
		if err := json.Unmarshal(old.Grant, g); err != nil {
			return nil, deny(dispatch.Internal, "the first answer cannot be read")
		}
		return g, nil
	}
	r, lease, e := h.jobs.reserve(ctx, o, q)
	if e != nil {
		return nil, e
	}
	g := &dispatch.ReservationGrant{Reservation: r.id, Node: r.spot.id, Envelope: q.Placement.Envelope, LeaseSecs: lease}
	b, err := json.Marshal(g)
	if err == nil {
		err = h.do(context.WithoutCancel(ctx), func(t *tx) error {
			t.request(Request{Owner: o.ID, ID: q.RequestID, Body: body, At: t.unix(), Grant: b})
			return nil
		})
	}
	if err != nil {
		h.jobs.release(o, r.id)
		return nil, denied(err)
	}
	return g, nil
}

func (t *tx) request(r Request) {
	t.touched++
	t.b.Requests = append(t.b.Requests, r)
	t.h.jobs.asked.add(r.Owner, r.ID)
	t.b.Durable = true
}

// once lets one create of a request_id go on at a time. done must be called.
func (h *Hub) once(ctx context.Context, o Owner, id string) (done func(), e *dispatch.Error) {
	p, key := h.jobs, o.ID+" "+id
	for {
		p.mu.Lock()
		ch := p.flight[key]
		if ch == nil {
			ch = make(chan struct{})
			p.flight[key] = ch
			p.mu.Unlock()
			return func() {
				p.mu.Lock()
				delete(p.flight, key)
				p.mu.Unlock()
				close(ch)
			}, nil
		}
		p.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return nil, deny(dispatch.Unavailable, "the request was given up")
		}
	}
}

// reserve offers the envelope to one node at a time until one accepts it.
func (p *placer) reserve(ctx context.Context, o Owner, q *dispatch.ReservationRequest) (*reservation, int, *dispatch.Error) {
	wait := time.NewTimer(time.Duration(min(q.WaitSecs, dispatch.MaxReserveSecs)) * time.Second)
	defer wait.Stop()
	none := deny(dispatch.NoCapacity, "no node of pool %q had room and accepted within %d seconds", wire.Clean(q.Placement.Pool, 63), q.WaitSecs)
	refused := map[string]bool{}
	for {
		p.mu.Lock()
		moved := p.moved
		s := p.pick(&q.Placement, func(s *spot) bool { return refused[s.id] })
		if s == nil {
			p.mu.Unlock()
			var pause <-chan time.Time
			if len(refused) > 0 { // every node with room has refused
				pause, moved = time.After(refusedPause), nil
				clear(refused)
			}
			select {
			case <-moved:
			case <-pause:
			case <-wait.C:
				return nil, 0, none
			case <-ctx.Done():
				return nil, 0, deny(dispatch.Unavailable, "the request was given up")
			}
			continue
		}
		r := &reservation{id: wire.NewID(), owner: o.ID, spot: s, claim: claim{env: q.Placement.Envelope}, reply: make(chan wire.Answer, 1), lease: make(chan wire.LeaseState, 1)}
		r.end = time.Now().Add(offerStep + time.Duration(q.LeaseSecs)*time.Second + leaseGrace)
		p.res[r.id], s.res[r.id] = r, r
		s.sum()
		p.bump()
		sess := s.sess
		p.mu.Unlock()
		failpoint.At(failpoint.OfferSending)
		sess.post(&wire.Offer{Reservation: r.id, Envelope: q.Placement.Envelope, LeaseSecs: q.LeaseSecs})
		answer := p.answer(ctx, r)
		if answer.State == "accepted" {
			failpoint.At(failpoint.OfferAccepted)
			return r, clampLease(answer.LeaseSecs, q.LeaseSecs), nil
		}
		refused[s.id] = true
		p.h.log.Debug("an offer was not accepted", logx.Node, s.id, "answer", answer.State, "reason", answer.Reason)
		p.mu.Lock()
		if p.res[r.id] == r {
			p.drop(r)
			p.bump()
		}
		p.mu.Unlock()
		if answer.State == "" { // abandoned: should it be accepted yet, jobMessage gives it back
			sess.post(&wire.GiveBack{Reservation: r.id})
		}
		if ctx.Err() != nil {
			return nil, 0, deny(dispatch.Unavailable, "the request was given up")
		}
	}
}

func clampLease(granted, asked int) int {
	if granted <= 0 {
		return asked
	}
	return min(granted, wire.MaxLeaseSecs)
}

// answer waits for a node's reply to an offer; State "" is none in time.
func (p *placer) answer(ctx context.Context, r *reservation) wire.Answer {
	t := time.NewTimer(offerStep)
	defer t.Stop()
	select {
	case a := <-r.reply:
		return a
	case <-t.C:
	case <-ctx.Done():
	}
	return wire.Answer{}
}

// offered takes a node's reply. The claim of one that is accepted is its from
// now on.
func (p *placer) offered(sess *Session, m *wire.OfferReply) {
	accepted := m.Reply.State == "accepted"
	p.mu.Lock()
	r := p.res[m.Reservation]
	if r == nil || r.spot.sess != sess || r.claim.answered {
		p.mu.Unlock()
		if accepted && r == nil {
			sess.post(&wire.GiveBack{Reservation: m.Reservation})
		}
		return
	}
	if accepted {
		r.claim.answered, r.claim.beat = true, r.spot.beats
		r.spot.sum()
	}
	p.mu.Unlock()
	select {
	case r.reply <- m.Reply:
	default:
	}
}

// leased takes what a node says of a reservation.
func (p *placer) leased(m *wire.Lease) (audit string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.res[m.Reservation]
	if r == nil {
		return ""
	}
	select {
	case r.lease <- m.State:
	default:
	}
	if m.State.State != "held" {
		p.drop(r)
		p.bump()
		if m.State.Why != "released" && m.State.Why != "started" {
			return fmt.Sprintf("reservation %s on node %s: %s", r.id, r.spot.id, wire.Clean(m.State.Why, 64))
		}
	}
	return ""
}

// mine finds an owner's reservation.
func (p *placer) mine(o Owner, id string) (*reservation, *dispatch.Error) {
	if !wire.IsHex(id, wire.IDLen) {
		return nil, deny(dispatch.Invalid, "a reservation's ID is %d lowercase hex digits", 2*wire.IDLen)
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	r := p.res[id]
	owner, ended := p.gone[id]
	switch {
	case r != nil && r.owner != o.ID, r == nil && ended && owner != o.ID:
		return nil, deny(dispatch.NotFound, "no such reservation")
	case r == nil || !r.claim.answered:
		// One that this process has not heard of is of before a restart.
		return nil, deny(dispatch.ReservationGone, "the reservation has lapsed, was released or used, or its node was lost: reserve again")
	}
	return r, nil
}

// Renew extends a reservation's lease from now.
func (h *Hub) Renew(ctx context.Context, o Owner, id string, q *dispatch.RenewRequest) (*dispatch.ReservationGrant, *dispatch.Error) {
	p := h.jobs
	r, e := p.mine(o, id)
	if e != nil {
		return nil, e
	}
	select {
	case <-r.lease: // an old word
	default:
	}
	p.mu.Lock()
	sess := r.spot.sess
	r.end = max0(r.end, time.Now().Add(renewStep+time.Duration(q.LeaseSecs)*time.Second+leaseGrace))
	p.mu.Unlock()
	if sess == nil {
		return nil, deny(dispatch.ReservationGone, "the reservation's node was lost: reserve again")
	}
	sess.post(&wire.Renew{Reservation: id, LeaseSecs: q.LeaseSecs})
	t := time.NewTimer(renewStep)
	defer t.Stop()
	select {
	case st := <-r.lease:
		if st.State != "held" {
			return nil, deny(dispatch.ReservationGone, "the reservation is gone: reserve again")
		}
		return &dispatch.ReservationGrant{Reservation: id, Node: r.spot.id, Envelope: r.claim.env, LeaseSecs: clampLease(st.RemainingSecs, q.LeaseSecs)}, nil
	case <-t.C:
	case <-ctx.Done():
	}
	return nil, deny(dispatch.Unavailable, "the node did not answer within %v", renewStep)
}

func max0(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Release gives a reservation back. One already gone is no error.
func (h *Hub) Release(_ context.Context, o Owner, id string) *dispatch.Error {
	_, e := h.jobs.mine(o, id)
	switch {
	case e != nil && e.Code == dispatch.ReservationGone:
		return nil
	case e != nil:
		return e
	}
	h.jobs.release(o, id)
	return nil
}

func (p *placer) release(o Owner, id string) {
	p.mu.Lock()
	r := p.res[id]
	if r == nil || r.owner != o.ID {
		p.mu.Unlock()
		return
	}
	sess := r.spot.sess
	p.drop(r)
	p.bump()
	p.mu.Unlock()
	if sess != nil {
		sess.post(&wire.GiveBack{Reservation: id})
	}
}

// lapsed ends the reservations whose node has not ended them itself.
func (p *placer) lapsed(now time.Time) (audit []string) {
	p.mu.Lock()
	var late []*reservation
	for _, r := range p.res {
		if now.After(r.end) {
			late = append(late, r)
		}
	}
	var tell []func()
	for _, r := range late {
		p.drop(r)
		if sess := r.spot.sess; sess != nil {
			tell = append(tell, func() { sess.post(&wire.GiveBack{Reservation: r.id}) })
		}
		audit = append(audit, strings.TrimSpace(fmt.Sprintf("reservation %s on node %s: lapsed without the node's word", r.id, r.spot.id)))
	}
	if len(late) > 0 {
		p.bump()
	}
	p.mu.Unlock()
	for _, f := range tell {
		f()
	}
	return audit
}

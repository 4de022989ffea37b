package hub

import (
	"context"
	"fmt"
	"slices"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// A job's life: queued, starting (sent to a node), running (accepted), finished.
// Each step is a change of Run's, stored before anybody hears of it: a start
// goes out once "starting" is on the disk, the node's result is acked once the
// job's end is. A start that a node may have taken is never placed again but
// after that node's own word: a refusal, or a held without it.

// job is a record as this tx has it, nil for one that is settled or unknown.
func (t *tx) job(id string) *Job {
	if j := t.jobs[id]; j != nil {
		return j
	}
	p := t.h.jobs
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.jobs[id]
}

// putJob stores a job's new record.
func (t *tx) putJob(j *Job) {
	t.touched++
	if t.jobs == nil {
		t.jobs = map[string]*Job{}
	}
	if old := t.jobs[j.ID]; old != nil {
		if i := slices.Index(t.b.Jobs, old); i >= 0 {
			t.b.Jobs = slices.Delete(t.b.Jobs, i, i+1)
		}
	}
	t.jobs[j.ID] = j
	t.b.Jobs = append(t.b.Jobs, j)
	t.b.Durable = true
}

// merge takes over what was stored.
func (p *placer) merge(t *tx) {
	if len(t.jobs) == 0 {
		return
	}
	p.index.put(t.jobs)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastN += t.newJobs
	stale := false
	for id, j := range t.jobs {
		was := p.jobs[id]
		if j.Settled != 0 {
			delete(p.jobs, id)
		} else {
			p.jobs[id] = j
		}
		stale = stale || was != nil && was.State == dispatch.Queued || j.State == dispatch.Queued
		if j.State == dispatch.Finished {
			p.ended(id)
			p.told("output " + id)
		}
		p.told("job " + id)
	}
	if stale {
		q := p.queue[:0:0]
		for _, id := range p.queue {
			if j := p.jobs[id]; j != nil && j.State == dispatch.Queued && t.jobs[id] == nil {
				q = append(q, id)
			}
		}
		for id, j := range t.jobs {
			if j.State == dispatch.Queued {
				q = append(q, id)
			}
		}
		slices.SortFunc(q, func(a, b string) int { return int(p.jobs[a].N - p.jobs[b].N) })
		p.queue = q
	}
}

// ended gives back what a job that has ended holds. p.mu is held.
func (p *placer) ended(id string) {
	l := p.live[id]
	if l == nil {
		return
	}
	delete(p.live, id)
	if s := l.spot; s != nil {
		if l.image != "" && !l.accepted.IsZero() {
			s.images[l.image] = time.Now()
		}
		delete(s.work, id)
		s.sum()
		p.bump()
	}
}

// place sends a queued job to a node, if there is one for it.
func (t *tx) place(j *Job) bool {
	p, now := t.h.jobs, time.Now()
	var layer []byte
	var rules *policy.HubEgress
	if p.o.EgressRules {
		var err error
		rules = t.s.Layer(claimsOf(j))
		if layer, err = PackLayer(rules); err != nil {
			t.giveUp(j, job.Configuration, err.Error())
			return true
		}
	}
	p.mu.Lock()
	l := p.live[j.ID]
	if l == nil || l.spec == nil {
		p.mu.Unlock()
		return false
	}
	r := p.res[l.res]
	if r != nil && (r.owner != j.Owner || !r.claim.answered || !fitsInto(&j.Placement.Envelope, &r.claim.env)) {
		r = nil
	}
	s := p.warm(l, now)
	var give *reservation // to be released: the job starts elsewhere
	switch {
	case r != nil && (s == nil || s == r.spot):
		s = r.spot
	case r != nil:
		give, r = r, nil
	case s == nil:
		s = p.pick(&j.Placement, func(s *spot) bool { return l.refuses(s, now) })
	}
	if s == nil || s.sess == nil {
		p.mu.Unlock()
		return false
	}
	was := *l
	start := &wire.Start{Job: j.ID, Envelope: j.Placement.Envelope, Spec: l.spec, Layer: layer}
	l.spot, l.claim, l.accepted = s, claim{env: j.Placement.Envelope}, time.Time{}
	for _, o := range []*reservation{r, give} {
		if o != nil {
			delete(p.res, o.id)
			delete(o.spot.res, o.id)
			o.spot.sum()
		}
	}
	if r != nil {
		start.Reservation = r.id
		l.claim.answered, l.claim.beat = true, r.claim.beat
	}
	l.res = ""
	s.work[j.ID] = l
	s.sum()
	sess := s.sess
	p.mu.Unlock()
	t.undo = append(t.undo, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(s.work, j.ID)
		*l = was
		for _, o := range []*reservation{r, give} {
			if o != nil && o.spot.sess == sess {
				p.res[o.id], o.spot.res[o.id] = o, o
				o.spot.sum()
			}
		}
		s.sum()
	})
	c := *j
	c.State, c.Node = dispatch.Starting, s.id
	if rules != nil {
		c.Rules, c.RulesGen, c.DryRules = rules.Rules, t.s.RuleGeneration(), nil
		for _, d := range rules.DryRun {
			c.DryRules = append(c.DryRules, d.Rule)
		}
	}
	c.Revision++
	t.putJob(&c)
	t.after = append(t.after, func() {
		p.mu.Lock()
		for _, o := range []*reservation{r, give} {
			if o != nil {
				p.gone[o.id] = o.owner
			}
		}
		var giveTo *Session
		if give != nil {
			giveTo = give.spot.sess
		}
		p.bump()
		p.mu.Unlock()
		if giveTo != nil {
			giveTo.post(&wire.GiveBack{Reservation: give.id})
		}
		failpoint.At(failpoint.StartSending)
		if !sess.post(start) { // nobody can have taken it
			go func() { _ = t.h.do(context.Background(), func(t *tx) error { t.again(j.ID, s.id); return nil }) }()
		}
	})
	return true
}

func fitsInto(a, b *wire.Envelope) bool {
	return a.Memory <= b.Memory && a.CPUs <= b.CPUs && a.Disk <= b.Disk
}

// again makes a starting job queued: its node has not taken it.
func (t *tx) again(id, node string) {
	j := t.job(id)
	if j == nil || j.State != dispatch.Starting || j.Node != node {
		return
	}
	c := *j
	c.State, c.Node = dispatch.Queued, ""
	c.Revision++
	t.putJob(&c)
	p := t.h.jobs
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.live[id]
	if l == nil {
		return
	}
	s, was := l.spot, l.claim
	if s != nil {
		delete(s.work, id)
		s.sum()
	}
	l.spot = nil
	t.undo = append(t.undo, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if l.spot, l.claim = s, was; s != nil {
			s.work[id] = l
			s.sum()
		}
	})
	t.after = append(t.after, t.h.wakePlacing)
}

// placeTx places what is queued, oldest first.
func placeTx(t *tx) error {
	p := t.h.jobs
	p.mu.RLock()
	queue := p.queue
	p.mu.RUnlock()
	full := map[string]bool{}
	for _, id := range queue {
		j := t.job(id)
		if j == nil || j.State != dispatch.Queued {
			continue
		}
		p.mu.RLock()
		l := p.live[id]
		plain := l != nil && l.res == "" && len(l.refused) == 0 && l.image == ""
		p.mu.RUnlock()
		k := pkey(&j.Placement)
		if plain && full[k] {
			continue
		}
		if !t.place(j) && plain {
			full[k] = true
		}
	}
	return nil
}

// finish ends a job.
func (t *tx) finish(j *Job, r *wire.JobResult) *Job {
	c := *j
	c.State, c.Finished, c.Result = dispatch.Finished, t.unix(), r
	c.Revision++
	p := t.h.jobs
	if p.out != nil {
		_, c.OutputLen, _ = p.out.Held(j.ID)
	}
	t.putJob(&c)
	t.after = append(t.after, func() {
		if p.out != nil {
			p.out.Close(c.ID)
		}
	})
	return &c
}

// giveUp ends a job without its node's word, and says so in the audit log.
func (t *tx) giveUp(j *Job, f job.Failure, text string) {
	t.release(j)
	n := int64(0)
	if p := t.h.jobs; p.out != nil {
		_, n, _ = p.out.Held(j.ID)
	}
	t.finish(j, &wire.JobResult{Failure: string(f), Message: text, OutputLen: n, Artifacts: []wire.ArtifactResult{}})
	if f != job.Canceled {
		t.audit(j.Node, "hub", "job "+string(f), fmt.Sprintf("%s: %s %s: %s", j.ID, j.Path, j.Name, text))
	}
}

// release gives the reservation back that a queued job named.
func (t *tx) release(j *Job) {
	p := t.h.jobs
	p.mu.RLock()
	l := p.live[j.ID]
	id := ""
	if l != nil && j.State == dispatch.Queued {
		id = l.res
	}
	p.mu.RUnlock()
	if id != "" {
		t.after = append(t.after, func() { p.release(Owner{ID: j.Owner}, id) })
	}
}

// restartTx ends what a restart lost: jobs whose spec was in memory alone.
func restartTx(t *tx) error {
	for _, j := range t.h.jobs.unfinished() {
		if j.State != dispatch.Running {
			t.giveUp(j, job.Lost, "the hub was restarted before a node had accepted the job")
		}
	}
	return nil
}

// unfinished lists the jobs that have not ended, by N.
func (p *placer) unfinished() []*Job {
	p.mu.RLock()
	defer p.mu.RUnlock()
	list := make([]*Job, 0, len(p.live))
	for id := range p.live {
		if j := p.jobs[id]; j != nil {
			list = append(list, j)
		}
	}
	slices.SortFunc(list, func(a, b *Job) int { return int(a.N - b.N) })
	return list
}

// everySecondTx ends what time ends: leases, places within, lost nodes.
func everySecondTx(t *tx) error {
	p, now := t.h.jobs, time.Now()
	for _, text := range p.lapsed(now) {
		t.audit("", "hub", "reservation ended", text)
	}
	lost := wire.MissedBeats*t.h.o.Heartbeat + p.o.LostAfter
	for _, j := range p.unfinished() {
		p.mu.RLock()
		l := p.live[j.ID]
		var late, away, gone bool
		if l != nil {
			late = j.State == dispatch.Queued && now.After(l.placeBy)
			if s := l.spot; s != nil {
				away = s.sess == nil && now.Sub(s.down) >= lost
				gone = t.s.Nodes[s.id] == nil
			}
		}
		p.mu.RUnlock()
		switch {
		case t.jobs[j.ID] != nil: // changed in this batch: the next second will do
		case late:
			t.giveUp(j, job.NoCapacity, fmt.Sprintf("no node of pool %s took the job in time", j.Placement.Pool))
		case gone:
			t.giveUp(j, job.Lost, "the node was removed from the fleet")
		case away:
			t.giveUp(j, job.Lost, fmt.Sprintf("the node has been unreachable for %v", now.Sub(l.spot.down).Round(time.Second)))
		}
	}
	t.h.trim(now)
	return nil
}

// jobOf finds a job of an owner, in memory or in the history.
func (h *Hub) jobOf(ctx context.Context, o Owner, id string) (*Job, *dispatch.Error) {
	if !wire.IsHex(id, wire.IDLen) {
		return nil, deny(dispatch.Invalid, "a job's ID is %d lowercase hex digits", 2*wire.IDLen)
	}
	p := h.jobs
	p.mu.RLock()
	j := p.jobs[id]
	p.mu.RUnlock()
	if j == nil {
		var err error
		if j, err = h.store.Job(ctx, id); err != nil {
			return nil, denied(err)
		}
	}
	if j == nil || j.Owner != o.ID {
		return nil, deny(dispatch.NotFound, "no such job")
	}
	return j, nil
}

// outputLen is how much of a job's output can be read, or could.
func (h *Hub) outputLen(j *Job) int64 {
	if h.jobs.out == nil || j.State == dispatch.Finished {
		return j.OutputLen
	}
	_, n, err := h.jobs.out.Held(j.ID)
	if err != nil {
		h.log.Warn("the length of an output is not known", logx.Job, j.ID, logx.Err, err)
	}
	return n
}

// View is a job as its owner sees it, held until its revision passes after when
// wait is above 0.
func (h *Hub) View(ctx context.Context, o Owner, id string, after uint64, wait time.Duration) (*dispatch.JobView, *dispatch.Error) {
	timer := time.NewTimer(min(wait, dispatch.MaxWaitSecs*time.Second))
	defer timer.Stop()
	for {
		changed := h.jobs.watching("job " + id)
		j, e := h.jobOf(ctx, o, id)
		if e != nil {
			return nil, e
		}
		if wait <= 0 || j.Revision > after || j.State == dispatch.Finished {
			return j.View(h.outputLen(j)), nil
		}
		select {
		case <-changed:
		case <-timer.C:
			wait = 0
		case <-ctx.Done():
			return nil, deny(dispatch.Unavailable, "the hub is stopping")
		}
	}
}

// Piece is a piece of a job's output.
type Piece struct {
	Data     []byte
	Length   int64 // of the output so far
	Complete bool  // Data reaches the output's end, and no more will come
}

// Output reads from an offset, held until there is something past it when wait
// is above 0. An offset past the end is a Piece with that Length and status 416.
func (h *Hub) Output(ctx context.Context, o Owner, id string, offset int64, wait time.Duration) (*Piece, *dispatch.Error) {
	timer := time.NewTimer(min(wait, dispatch.MaxWaitSecs*time.Second))
	defer timer.Stop()
	for {
		more := h.jobs.watching("output " + id)
		j, e := h.jobOf(ctx, o, id)
		if e != nil {
			return nil, e
		}
		if j.Settled != 0 || h.jobs.out == nil || j.Finished != 0 && h.o.Now().Unix()-j.Finished >= UnsettledKept {
			return nil, deny(dispatch.NotFound, "the job's output is not kept any more")
		}
		data, length, err := h.jobs.out.Read(id, offset, dispatch.MaxRead)
		if err != nil {
			h.log.Error("an output cannot be read", logx.Job, id, logx.Err, err)
			return nil, deny(dispatch.Internal, "the output cannot be read")
		}
		pc := &Piece{Data: data, Length: length, Complete: j.State == dispatch.Finished && offset+int64(len(data)) >= length}
		switch {
		case offset > length:
			return pc, &dispatch.Error{Status: 416, Failure: dispatch.Failure{Text: fmt.Sprintf("offset %d is past the output's end at %d", offset, length), Code: dispatch.Invalid}}
		case wait <= 0 || len(data) > 0 || pc.Complete:
			return pc, nil
		}
		select {
		case <-more:
		case <-timer.C:
			wait = 0
		case <-ctx.Done():
			return nil, deny(dispatch.Unavailable, "the hub is stopping")
		}
	}
}

// Cancel stops a job of an owner's.
func (h *Hub) Cancel(ctx context.Context, o Owner, id string, mode wire.CancelMode) (*dispatch.JobView, *dispatch.Error) {
	j, e := h.jobOf(ctx, o, id)
	if e != nil {
		return nil, e
	}
	if j, e = h.cancel(ctx, o.Name, j, mode); e != nil {
		return nil, e
	}
	return j.View(h.outputLen(j)), nil
}

// cancel stops a job. One that no node has ends at once.
func (h *Hub) cancel(ctx context.Context, actor string, j *Job, mode wire.CancelMode) (*Job, *dispatch.Error) {
	if mode != wire.CancelGraceful {
		mode = wire.CancelImmediate // also what a hub does with a mode of tomorrow
	}
	err := h.do(context.WithoutCancel(ctx), func(t *tx) error {
		now := t.job(j.ID)
		if now == nil || now.State == dispatch.Finished {
			if now != nil {
				j = now
			}
			return nil
		}
		j = now
		if j.Cancel == mode || j.Cancel == wire.CancelImmediate {
			return nil
		}
		t.audit(j.Node, actor, "job canceled", fmt.Sprintf("%s: %s %s, %s", j.ID, j.Path, j.Name, mode))
		c := *j
		c.Cancel = mode
		c.Revision++
		if j.State == dispatch.Queued {
			t.giveUp(&c, job.Canceled, "canceled before it was placed")
			j = t.job(c.ID)
			return nil
		}
		t.putJob(&c)
		j = &c
		t.after = append(t.after, func() { h.jobs.tellNode(c.ID, &wire.Cancel{Job: c.ID, Mode: mode}) })
		return nil
	})
	if err != nil {
		return nil, denied(err)
	}
	return j, nil
}

// tellNode posts a message to the node that a job was sent to, if it is there.
// One that is away hears of it after its held.
func (p *placer) tellNode(id string, m wire.Message) {
	p.mu.RLock()
	var sess *Session
	if l := p.live[id]; l != nil && l.spot != nil {
		sess = l.spot.sess
	}
	p.mu.RUnlock()
	if sess != nil {
		sess.post(m)
	}
}

// Settle drops the output of a job whose outcome its producer has delivered,
// and keeps the end of it with the record.
func (h *Hub) Settle(ctx context.Context, o Owner, id string) *dispatch.Error {
	j, e := h.jobOf(ctx, o, id)
	switch {
	case e != nil:
		return e
	case j.Settled != 0:
		return nil
	case j.State != dispatch.Finished:
		return deny(dispatch.Conflict, "the job has not ended: cancel it first")
	}
	tail := h.jobs.tail(j)
	err := h.do(context.WithoutCancel(ctx), func(t *tx) error {
		now := t.job(id)
		if now == nil || now.Settled != 0 {
			return nil
		}
		c := *now
		c.Settled = t.unix()
		t.putJob(&c)
		t.keep(&c, tail)
		t.after = append(t.after, func() { h.jobs.dropOutput(id) })
		return nil
	})
	if err != nil {
		return denied(err)
	}
	failpoint.At(failpoint.Settled)
	return nil
}

// dropOutput deletes a job's output. What cannot be deleted is at the next
// start.
func (p *placer) dropOutput(id string) {
	if p.out == nil {
		return
	}
	if err := p.out.Remove(id); err != nil {
		p.h.log.Warn("an output cannot be deleted", logx.Job, id, logx.Err, err)
	}
	p.out.Forget(id)
}

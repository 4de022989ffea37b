package nodejobs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"virtkit/core/admit"
	"virtkit/core/failpoint"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// lease cuts what a hub asks for to what a node grants.
func lease(secs int) time.Duration {
	return time.Duration(min(max(secs, 1), wire.MaxLeaseSecs)) * time.Second
}

// refusal is why no new work is taken; nil = it is.
type refusal struct{ reason, message string }

// mayTakeLocked answers by everything but the room that is asked for.
func (j *Jobs) mayTakeLocked(e wire.Envelope) *refusal {
	held := j.unfinishedLocked() + len(j.reservations)
	ceiling := j.st.Policy().Ceiling
	switch {
	case j.Runner != "":
		return &refusal{"runner", "this host runs its own gitlab-runner: " + j.Runner}
	case !j.st.MayTake():
		word := string(j.st.Node)
		if j.st.Node == wire.Ready {
			word = "told to take no jobs"
		}
		return &refusal{"not_ready", "the node is " + word}
	case j.Limit > 0 && held >= j.Limit && (ceiling == 0 || j.Limit < ceiling):
		return &refusal{"concurrency", fmt.Sprintf("%d jobs and reservations reach the node's own max_concurrency of %d", held, j.Limit)}
	case ceiling > 0 && held >= ceiling:
		return &refusal{"ceiling", fmt.Sprintf("%d jobs and reservations reach the ceiling of %d", held, ceiling)}
	case j.MaxCPUs > 0 && e.CPUs > j.MaxCPUs:
		return &refusal{"cpus", fmt.Sprintf("%d vCPUs are more than the %d of a guest on this node", e.CPUs, j.MaxCPUs)}
	}
	return nil
}

func amounts(e wire.Envelope) admit.Amounts {
	return admit.Amounts{MemMiB: (e.Memory + 1<<20 - 1) >> 20, Disk: e.Disk, CPUs: e.CPUs}
}

// offer answers an offer.
func (j *Jobs) offer(ctx context.Context, m *wire.Offer) *wire.OfferReply {
	term := lease(m.LeaseSecs)
	accepted := &wire.OfferReply{Reservation: m.Reservation, Reply: wire.Answer{State: "accepted", LeaseSecs: int(term / time.Second)}}
	refused := func(reason, message string) *wire.OfferReply {
		j.Log.Info("offer refused", "reservation", m.Reservation, "reason", reason, "why", message)
		return &wire.OfferReply{Reservation: m.Reservation, Reply: wire.Answer{State: "refused", Reason: reason, Message: message}}
	}
	j.mu.Lock()
	if r := j.reservations[m.Reservation]; r != nil {
		r.expires = j.Now().Add(term)
		j.mu.Unlock()
		return accepted
	}
	no := j.mayTakeLocked(m.Envelope)
	j.mu.Unlock()
	if no != nil {
		return refused(no.reason, no.message)
	}
	held, short, err := j.Ledger.Offer(ctx, m.Reservation, amounts(m.Envelope))
	if err != nil {
		return refused("invalid", fmt.Sprintf("the node's ledger: %v", err))
	}
	if short != "" {
		return refused(short, "the node has no room for it now")
	}
	failpoint.At(failpoint.OfferClaimed)
	j.mu.Lock()
	// The state may have changed while the ledger made room.
	if no := j.mayTakeLocked(m.Envelope); no != nil {
		j.mu.Unlock()
		j.giveUp(held)
		return refused(no.reason, no.message)
	}
	j.reservations[m.Reservation] = &reservation{held: held, expires: j.Now().Add(term)}
	delete(j.why, m.Reservation)
	j.mu.Unlock()
	j.wake() // its lease is to be watched
	j.Log.Info("reservation granted", "reservation", m.Reservation, "mem_bytes", m.Envelope.Memory, "lease", term)
	return accepted
}

// renew extends a lease from now.
func (j *Jobs) renew(m *wire.Renew) *wire.Lease {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.reservations[m.Reservation]
	if r == nil {
		return gone(m.Reservation, j.whyGoneLocked(m.Reservation))
	}
	term := lease(m.LeaseSecs)
	r.expires = j.Now().Add(term)
	j.wake()
	return &wire.Lease{Reservation: m.Reservation, State: wire.LeaseState{State: "held", RemainingSecs: int(term / time.Second)}}
}

func (j *Jobs) whyGoneLocked(id string) string {
	if w := j.why[id]; w != "" {
		return w
	}
	return "unknown"
}

// giveBack ends a reservation for the hub.
func (j *Jobs) giveBack(m *wire.GiveBack) *wire.Lease {
	j.mu.Lock()
	r := j.reservations[m.Reservation]
	if r == nil {
		defer j.mu.Unlock()
		return gone(m.Reservation, j.whyGoneLocked(m.Reservation))
	}
	delete(j.reservations, m.Reservation)
	j.whyLocked(m.Reservation, "released")
	j.mu.Unlock()
	j.giveUp(r.held)
	return gone(m.Reservation, "released")
}

func state(id, word string) *wire.JobState {
	return &wire.JobState{Job: id, State: wire.StateOfJob{State: word}}
}

// start journals a job and runs its driver.
func (j *Jobs) start(ctx context.Context, m *wire.Start) *wire.JobState {
	refused := func(reason, message string) *wire.JobState {
		j.Log.Info("start refused", logx.Job, m.Job, "reason", reason, "why", message)
		out := state(m.Job, "refused")
		out.State.Reason, out.State.Message = reason, message
		return out
	}
	j.mu.Lock()
	if p := j.jobs[m.Job]; p != nil { // it came before
		out := p.stateLocked()
		if out.State.State == "running" {
			out = state(m.Job, "accepted")
		}
		j.mu.Unlock()
		return out
	}
	r := j.reservations[m.Reservation]
	var no *refusal
	if r == nil {
		no = j.mayTakeLocked(m.Envelope)
	}
	spec, err := job.Parse(m.Spec)
	if err == nil {
		err = checkLayer(m.Layer)
	}
	if err == nil && r != nil {
		r.taken = true
	}
	j.mu.Unlock()
	if err != nil {
		return refused("invalid", err.Error())
	}
	if no != nil {
		return refused(no.reason, no.message)
	}
	var held admit.Held
	if r != nil {
		held = r.held
	} else {
		var short string
		held, short, err = j.Ledger.Offer(ctx, m.Job, amounts(m.Envelope))
		switch {
		case err != nil:
			return refused("invalid", fmt.Sprintf("the node's ledger: %v", err))
		case short != "" && m.Reservation != "":
			return refused("no_reservation", "the reservation is not held here, and there is no room for the job without it: "+short)
		case short != "":
			return refused(short, "the node has no room for it now")
		}
	}
	failpoint.At(failpoint.StartReceived)
	dir, slot, err := j.journal(m, spec)
	if err != nil {
		if r == nil {
			j.giveUp(held)
		} else {
			j.mu.Lock()
			r.taken = false
			j.mu.Unlock()
		}
		return refused("invalid", err.Error())
	}
	failpoint.At(failpoint.Journaled)
	// The job is journaled: from here on it is this node's, whatever happens.
	p := &placed{dir: dir, id: m.Job, gitlab: spec.Job.ID, where: whereOf(spec), slot: slot[0], pslot: slot[1], busy: true}
	j.mu.Lock()
	j.jobs[m.Job] = p
	if r != nil {
		delete(j.reservations, m.Reservation)
		j.whyLocked(m.Reservation, "started")
	}
	if s := j.session; s != nil {
		s.ready[m.Job] = true // nothing of it can be on the hub yet
	}
	j.mu.Unlock()
	err = j.run(ctx, p, held)
	failpoint.At(failpoint.DriverStarted)
	j.mu.Lock()
	p.busy = false
	j.mu.Unlock()
	if err != nil {
		j.Log.Error("the job's driver cannot be started", logx.Job, m.Job, logx.Err, err)
		j.finish(p, job.Result{Failure: string(job.System), Message: "the node could not start the job's driver"})
	}
	j.wake()
	j.Log.Info("job accepted", logx.Job, m.Job, "gitlab_job", spec.Job.ID, "project", spec.Job.ProjectPath)
	return state(m.Job, "accepted")
}

// checkLayer says why the hub's rules for a job cannot be enforced: it does not
// run here, then.
func checkLayer(layer []byte) error {
	if len(layer) == 0 {
		return nil
	}
	if _, err := policy.ParseHubEgress(layer); err != nil {
		return fmt.Errorf("the hub's egress rules for the job: %s", wire.Clean(err.Error(), wire.MaxText))
	}
	return nil
}

func whereOf(spec *job.CiJob) string {
	return spec.ServerURL + " " + strconv.FormatInt(spec.Job.ProjectID, 10)
}

// journal writes a start down, with the lowest free concurrent ids.
func (j *Jobs) journal(m *wire.Start, spec *job.CiJob) (*jobdir.Dir, [2]int, error) {
	var slot [2]int
	j.mu.Lock()
	used, pused := map[int]bool{}, map[int]bool{}
	for _, p := range j.jobs {
		if p.result == nil {
			used[p.slot] = true
			if p.where == whereOf(spec) {
				pused[p.pslot] = true
			}
		}
	}
	j.mu.Unlock()
	for used[slot[0]] {
		slot[0]++
	}
	for pused[slot[1]] {
		slot[1]++
	}
	d, err := j.Journal.Create(jobdir.Start{Start: *m, ConcurrentID: slot[0], ConcurrentProjectID: slot[1], Accepted: time.Now().Unix()})
	if errors.Is(err, jobdir.ErrExists) {
		return nil, slot, fmt.Errorf("a job of this id is being removed")
	}
	return d, slot, err
}

// run hands the job's lock and claim to a new driver. held is used up.
func (j *Jobs) run(ctx context.Context, p *placed, held admit.Held) error {
	defer func() { j.giveUp(held) }() // what the driver inherited stays
	lock, err := p.dir.Lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	var claim *os.File
	if f := held.File(); f != nil {
		named, err := j.name(ctx, f, p)
		if err != nil {
			return fmt.Errorf("naming the job's claim: %w", err)
		}
		held.Close()
		held = kept{named} // the driver's from its start on
		claim = named.File()
	}
	gone, err := j.Drivers.Start(p.dir, lock.File(), claim)
	if err != nil {
		if k, ok := held.(kept); ok {
			held = k.Held
		}
		return err
	}
	p.gone = gone
	return nil
}

// kept is a claim that others have: only this process's hold is given up.
type kept struct{ admit.Held }

// Release implements admit.Held.
func (k kept) Release() error { return k.Held.Close() }

// name makes the claim the job's, under GitLab's number, and under a longer name
// where a job of that number of another GitLab has it.
func (j *Jobs) name(ctx context.Context, f *os.File, p *placed) (admit.Held, error) {
	id := strconv.FormatInt(p.gitlab, 10)
	h, err := j.Ledger.Name(ctx, f, id)
	if err != nil {
		return j.Ledger.Name(ctx, f, id+"-"+p.id[:8])
	}
	return h, nil
}

// cancel stops a job.
func (j *Jobs) cancel(m *wire.Cancel) *wire.JobState {
	j.mu.Lock()
	p := j.jobs[m.Job]
	j.mu.Unlock()
	if p == nil {
		out := state(m.Job, "finished")
		out.State.Message = "this node does not have the job"
		return out
	}
	mode := m.Mode
	if mode != wire.CancelGraceful {
		mode = wire.CancelImmediate // a word of a later hub's
	}
	if err := p.dir.Cancel(mode); err != nil {
		j.Log.Error("a job's cancel cannot be written", logx.Job, m.Job, logx.Err, err)
	} else {
		j.Log.Info("job cancelled", logx.Job, m.Job, "mode", string(mode))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.session; s != nil && !s.ready[m.Job] {
		// A hub that has given the job up tells no offset: what it stored, if
		// anything, it can tell from a beginning.
		s.ready[m.Job], s.sent[m.Job] = true, 0
	}
	return p.stateLocked()
}

func (p *placed) stateLocked() *wire.JobState {
	if p.result != nil {
		return state(p.id, "finished")
	}
	out := state(p.id, "running")
	out.State.Stage, out.State.Activity, out.State.Guest = p.stage.Stage, p.stage.Activity, p.stage.Guest
	return out
}

// recorded removes a job whose result the hub has stored.
func (j *Jobs) recorded(m *wire.JobRecorded) {
	j.mu.Lock()
	p := j.jobs[m.Job]
	if p != nil && p.result != nil {
		delete(j.jobs, m.Job)
	} else {
		p = nil
	}
	j.mu.Unlock()
	if p != nil {
		failpoint.At(failpoint.RecordedTold)
		j.aside.Go(func() { j.remove(p) })
	}
}

// endTime is how long a driver may take to end after it wrote its result.
const endTime = 10 * time.Minute

// remove removes a journaled job, once its driver has ended: that one may still
// be taking the secrets out of its start.
func (j *Jobs) remove(p *placed) {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	go func() {
		select {
		case <-j.stop:
			cancel() // the next start of the node goes on
		case <-ctx.Done():
		}
	}()
	err := p.dir.WaitGone(ctx)
	if err == nil {
		err = p.dir.Remove()
	}
	if err != nil {
		j.Log.Warn("a job's journal cannot be removed: the hub is told of it again after the node's next start", logx.Job, p.id, logx.Err, err)
	}
}

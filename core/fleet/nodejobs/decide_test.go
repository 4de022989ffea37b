package nodejobs_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"os"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
)

func dupOf(f *os.File) (int, error) { return unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3) }

func policy(ceiling int, stop bool) node.State {
	return node.State{Node: wire.Ready, Applied: &wire.Applied{Policy: wire.Policy{Ceiling: ceiling, Stop: stop}}}
}

// TestRefusals: why an offer and a start without a reservation are refused.
func TestRefusals(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*nodejobs.Config)
		st     node.State
		env    wire.Envelope
		before func(*rig)
		reason string
	}{
		{"runner", func(c *nodejobs.Config) { c.Runner = "gitlab-runner.service" }, node.State{Node: wire.Ready}, envelope(1), nil, "runner"},
		{"draining", nil, node.State{Node: wire.Draining}, envelope(1), nil, "not_ready"},
		{"quarantined", nil, node.State{Node: wire.Quarantined}, envelope(1), nil, "not_ready"},
		{"maintenance", nil, node.State{Node: wire.Maintenance}, envelope(1), nil, "not_ready"},
		{"told to stop", nil, policy(0, true), envelope(1), nil, "not_ready"},
		{"memory", nil, node.State{Node: wire.Ready}, envelope(4097), nil, "memory"},
		{"memory, a byte over", nil, node.State{Node: wire.Ready}, wire.Envelope{Memory: 4096<<20 + 1}, nil, "memory"},
		{"cpus", func(c *nodejobs.Config) { c.MaxCPUs = 1 }, node.State{Node: wire.Ready}, envelope(1), nil, "cpus"},
		{"ceiling", nil, policy(1, false), envelope(1), func(r *rig) { r.offer(resID(9), 1) }, "ceiling"},
		{"ceiling counts jobs", nil, policy(1, false), envelope(1), func(r *rig) { r.accepted(7, "") }, "ceiling"},
		{"concurrency", func(c *nodejobs.Config) { c.Limit = 1 }, policy(2, false), envelope(1), func(r *rig) { r.offer(resID(9), 1) }, "concurrency"},
		{"the smaller is the ceiling", func(c *nodejobs.Config) { c.Limit = 2 }, policy(1, false), envelope(1), func(r *rig) { r.offer(resID(9), 1) }, "ceiling"},
		{"both are the same", func(c *nodejobs.Config) { c.Limit = 1 }, policy(1, false), envelope(1), func(r *rig) { r.offer(resID(9), 1) }, "ceiling"},
		{"the ledger fails", nil, node.State{Node: wire.Ready}, envelope(1), func(r *rig) { r.books.fail = errors.New("broken") }, "invalid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			r.stop()
			if tt.change != nil {
				tt.change(&r.config)
				r.begin()
			}
			if tt.before != nil {
				r.before(tt.before)
			}
			r.jobs.Steer(tt.st)
			a := r.say(&wire.Offer{Reservation: resID(1), Envelope: tt.env, LeaseSecs: 90}).(*wire.OfferReply).Reply
			if a.State != "refused" || a.Reason != tt.reason || a.Message == "" {
				t.Errorf("offer: %+v, want %s", a, tt.reason)
			}
			st := r.say(&wire.Start{Job: wire.NewID(), Envelope: tt.env, Spec: spec(t, 1, 1)}).(*wire.JobState).State
			if st.State != "refused" || st.Reason != tt.reason {
				t.Errorf("start: %+v, want %s", st, tt.reason)
			}
			if ids, err := r.journal.List(); err != nil || slices.Contains(ids, "") {
				t.Error(ids, err)
			}
		})
	}
}

func (r *rig) before(f func(*rig)) {
	r.jobs.Steer(node.State{Node: wire.Ready})
	f(r)
}

func TestLeases(t *testing.T) {
	r := newRig(t)
	if a := r.offer(resID(1), 1024); a.State != "accepted" || a.LeaseSecs != 90 {
		t.Fatalf("%+v", a)
	}
	if d := cmp.Diff(map[string]int64{"reservation-" + resID(1): 1024}, r.books.names()); d != "" {
		t.Error(d)
	}
	renew := func(id string, secs int) wire.LeaseState {
		return r.say(&wire.Renew{Reservation: id, LeaseSecs: secs}).(*wire.Lease).State
	}
	if l := renew(resID(1), 10000); l.State != "held" || l.RemainingSecs != wire.MaxLeaseSecs {
		t.Errorf("a long lease: %+v", l)
	}
	// Offered again, it is renewed, and takes nothing more.
	if a := r.offer(resID(1), 1024); a.State != "accepted" || len(r.books.names()) != 1 {
		t.Errorf("offered again: %+v", a)
	}
	if h := r.connect(); !slices.Equal(h.Reservations, wire.IDs{resID(1)}) {
		t.Errorf("held: %+v", h)
	}
	r.pass(91 * time.Second)
	r.until("the lease has expired", func() bool { return len(r.books.names()) == 0 })
	if l := renew(resID(1), 90); l.State != "gone" || l.Why != "expired" {
		t.Errorf("expired: %+v", l)
	}
	if l := renew(resID(2), 90); l.State != "gone" || l.Why != "unknown" {
		t.Errorf("unknown: %+v", l)
	}
	r.offer(resID(3), 1024)
	for range 2 {
		if l := r.say(&wire.GiveBack{Reservation: resID(3)}).(*wire.Lease).State; l.State != "gone" || l.Why != "released" {
			t.Errorf("released: %+v", l)
		}
	}
	if n := len(r.books.names()); n != 0 {
		t.Errorf("%d claims are left", n)
	}
}

// TestExpiryIsTold: the hub hears of a lease that has run out.
func TestExpiryIsTold(t *testing.T) {
	r := newRig(t)
	r.say(&wire.Offer{Reservation: resID(1), Envelope: envelope(1), LeaseSecs: 1})
	r.mu.Lock()
	r.now = r.now.Add(2 * time.Second)
	r.mu.Unlock()
	l := next[*wire.Lease](r)
	if l.Reservation != resID(1) || l.State.State != "gone" || l.State.Why != "expired" {
		t.Errorf("%+v", l)
	}
}

// TestSteering: a drain lets reservations lapse, a quarantine releases them; a
// start on one that is held is taken in a drain.
func TestSteering(t *testing.T) {
	r := newRig(t)
	r.offer(resID(1), 1024)
	r.offer(resID(2), 1024)
	r.jobs.Steer(node.State{Node: wire.Draining})
	if h := r.s.Held(); len(h.Reservations) != 2 {
		t.Errorf("draining: %+v", h)
	}
	id := r.accepted(5, resID(1))
	r.jobs.Steer(node.State{Node: wire.Quarantined})
	if l := next[*wire.Lease](r); l.Reservation != resID(2) || l.State.Why != "released" {
		t.Errorf("%+v", l)
	}
	if d := cmp.Diff(map[string]int64{"5": 1024}, r.books.names()); d != "" {
		t.Error(d)
	}
	if !r.drivers.runs(id) || r.jobs.Unfinished() != 1 {
		t.Error("the quarantine ended a job")
	}
}

func TestStart(t *testing.T) {
	r := newRig(t)
	r.offer(resID(1), 1024)
	id := r.accepted(77, resID(1))
	if !r.drivers.runs(id) || !r.drivers.claimed[id] {
		t.Error("no driver, or without the claim")
	}
	if d := cmp.Diff(map[string]int64{"77": 1024}, r.books.names()); d != "" {
		t.Error(d)
	}
	if l := r.say(&wire.Renew{Reservation: resID(1), LeaseSecs: 9}).(*wire.Lease).State; l.Why != "started" {
		t.Errorf("%+v", l)
	}
	// Again: answered from the journal.
	again := r.say(&wire.Start{Job: id, Envelope: envelope(1024), Spec: spec(t, 77, 1)}).(*wire.JobState).State
	if again.State != "accepted" || len(r.drivers.locks) != 1 {
		t.Errorf("again: %+v, %d drivers", again, len(r.drivers.locks))
	}
	// The same number, of another GitLab.
	other := r.accepted(77, "")
	if n := r.books.names(); n["77"] != 1024 || n["77-"+other[:8]] != 1024 {
		t.Errorf("claims: %v", n)
	}
	// One that names a reservation that is gone is admitted like any.
	third := r.accepted(78, resID(8))
	if _, st := r.start(79, resID(8)); st.State != "accepted" {
		t.Errorf("the fourth GiB: %+v", st)
	}
	if _, st := r.start(80, resID(8)); st.State != "refused" || st.Reason != "no_reservation" {
		t.Errorf("no room, and a reservation that is gone: %+v", st)
	}
	if _, st := r.start(81, ""); st.State != "refused" || st.Reason != "memory" {
		t.Errorf("no room: %+v", st)
	}
	// Concurrent ids: the lowest free one.
	if st, err := r.of(third).Start(); err != nil || st.ConcurrentID != 2 || st.ConcurrentProjectID != 2 {
		t.Errorf("%d, %d, %v", st.ConcurrentID, st.ConcurrentProjectID, err)
	}
	r.finish(other, job.Result{})
	r.until("the job has ended", func() bool { return r.jobs.Unfinished() == 3 })
	r.books.mu.Lock()
	delete(r.books.claims, "77-"+other[:8])
	r.books.mu.Unlock()
	fifth := r.accepted(82, "")
	if st, err := r.of(fifth).Start(); err != nil || st.ConcurrentID != 1 {
		t.Errorf("%d, %v", st.ConcurrentID, err)
	}
	p := r.jobs.Placed()
	if p.Jobs != 4 || p.ReservationsPending != 0 {
		t.Errorf("%+v", p)
	}
}

// TestBadStart: what is no job is refused, and keeps its reservation.
func TestBadStart(t *testing.T) {
	r := newRig(t)
	r.offer(resID(1), 1024)
	st := r.say(&wire.Start{Job: wire.NewID(), Reservation: resID(1), Spec: []byte(`{"kind":"gitlab_ci","token":"glcbt-secret","later":1}`)}).(*wire.JobState).State
	if st.State != "refused" || st.Reason != "invalid" || st.Message == "" {
		t.Errorf("%+v", st)
	}
	if l := r.say(&wire.Renew{Reservation: resID(1), LeaseSecs: 9}).(*wire.Lease).State; l.State != "held" {
		t.Errorf("%+v", l)
	}
	if ids, err := r.journal.List(); err != nil || len(ids) != 0 {
		t.Error(ids, err)
	}
}

// TestDriverThatDoesNotStart: the job is this node's all the same, and ends.
func TestDriverThatDoesNotStart(t *testing.T) {
	r := newRig(t)
	r.drivers.fail = errors.New("no processes are left")
	id := r.accepted(1, "")
	res := next[*wire.Result](r)
	if res.Job != id || res.Result.Failure != string(job.System) {
		t.Errorf("%+v", res)
	}
	r.until("the claim is given up", func() bool { return len(r.books.names()) == 0 })
}

// Package nodejobs is the node's side of placed jobs: it answers a hub's offers
// and starts, keeps a driver running for each job, and sends what the job
// prints and how it ends.
//
// Vocabulary. A reservation is room that was set aside for a job to come: an
// entry of the host's ledger, "reservation-<id>", with a lease. A placed job is
// one that was started here; it is journaled (core/fleet/jobdir) until the hub
// has recorded its result. A driver is the process that runs it, `vk node job
// DIR`. A session is the node's connection with the hub: it pulls what there
// is to say (Session.Next), as fast as the hub takes it.
//
// Invariants:
//   - An offer is answered at once, from the ledger; it never waits in its queue.
//   - A job is journaled before it is accepted, and started once: a start that
//     comes again is answered from the journal, and a job whose driver is gone
//     without a result is never started anew, but ends as interrupted once it
//     has been cleaned up after.
//   - Reservations live in memory, their leases on the monotonic clock. Jobs
//     live on disk: a node that restarts finds its drivers running.
//   - No byte of output is sent past Window beyond what the hub has stored, and
//     a session resends a job's output from where its ack says, and nothing
//     before that ack. The result goes out when all output is acked, and again
//     every ResultEvery until the hub has recorded it.
//   - What takes long (the ledger making room, the journal's syncs) is done
//     without the lock that readers need.
//
// The driver gets two descriptors, whose numbers its environment tells: EnvLock
// is the job's lock, EnvClaim its claim in the ledger, if there is one. Both are
// held by the kernel for as long as the driver lives.
//
// Spec: gitlab-dispatch (version 3), fleet-reference (placed jobs on the node).
package nodejobs

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"virtkit/core/admit"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Figures of the contract.
const (
	Window      = 4 << 20 // bytes sent beyond the hub's ack
	ResultEvery = 15 * time.Second
	// CleanupTime is how long `vk gitlab cleanup` may take.
	CleanupTime = 5 * time.Minute
)

// Environment of a driver: the numbers of the descriptors that it inherits.
const (
	EnvLock  = "VIRTKIT_JOB_LOCK_FD"
	EnvClaim = "VIRTKIT_JOB_CLAIM_FD"
)

// Ledger is the host's admission. Its methods are called one at a time.
type Ledger interface {
	// Offer claims amounts for a reservation, at once or not at all; refused is
	// the resource that is short: memory, disk.
	Offer(ctx context.Context, id string, want admit.Amounts) (h admit.Held, refused string, err error)
	// Name makes the claim that f holds that of a job.
	Name(ctx context.Context, f *os.File, id string) (admit.Held, error)
}

// Drivers start and clean up after the processes that run jobs.
type Drivers interface {
	// Start runs a job's driver in a session of its own. lock and claim, which
	// may be nil, are passed on; the caller closes its own. gone is closed when
	// the process has ended.
	Start(dir *jobdir.Dir, lock, claim *os.File) (gone <-chan struct{}, err error)
	// Cleanup undoes what a driver that is gone has left of its job's guests,
	// and returns when ctx ends at the latest. lock is passed on as above.
	Cleanup(ctx context.Context, dir *jobdir.Dir, lock *os.File) error
}

// Config is what a node's jobs are made of.
type Config struct {
	Journal *jobdir.Store
	Ledger  Ledger
	Drivers Drivers
	// MaxCPUs is the most vCPUs that an envelope may ask for: [executor.vm]
	// max_cpus, else cpus; 0 = no check.
	MaxCPUs int
	// Limit is the node's own [executor.schedule] max_concurrency; 0 = none.
	Limit int
	// Runner tells which gitlab-runner of its own the host has, whose jobs
	// exclude placed ones; "" = none.
	Runner    string
	ImageIdle time.Duration // [executor] image_cache_idle_secs
	Log       *slog.Logger
	// Now is a clock whose differences are monotonic; nil = time.Now.
	Now func() time.Time
}

// Jobs implements node.Jobs. Steer, Held, Placed and Unfinished may be called
// from any goroutine.
type Jobs struct {
	Config

	mu           sync.Mutex
	st           node.State // as steered last
	reservations map[string]*reservation
	why          map[string]string // of reservations that are gone
	whyOrder     []string
	jobs         map[string]*placed
	session      *Session // the open one; nil = none
	changed      chan struct{}

	aside sync.WaitGroup // removals of recorded jobs, and clean-ups
	stop  chan struct{}  // closed at the end of Run
}

var _ node.Jobs = (*Jobs)(nil)

// reservation is room that is set aside.
type reservation struct {
	held    admit.Held
	expires time.Time
	taken   bool // a start is taking it over: it does not end any more
}

// placed is one journaled job.
type placed struct {
	dir    *jobdir.Dir
	id     string
	gitlab int64  // GitLab's job id
	where  string // its server and project
	slot   int    // CI_CONCURRENT_ID
	pslot  int    // CI_CONCURRENT_PROJECT_ID

	gone    <-chan struct{} // of a driver that this node started; nil = adopted
	checked time.Time       // when an adopted driver's lock was tried last
	busy    bool            // it is being started, or cleaned up after: its driver is not looked for

	length int64 // of the output on disk
	stage  jobdir.Stage
	egress []byte       // the newest report of the driver's
	told   jobdir.Stamp // of it
	result *job.Result  // nil: it runs
	acked  int64        // stored by the hub
}

// New makes the jobs of a node from its journal.
func New(c Config) (*Jobs, error) {
	if c.Log == nil {
		c.Log = logx.Discard()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	j := &Jobs{Config: c, reservations: map[string]*reservation{}, why: map[string]string{}, jobs: map[string]*placed{}, changed: make(chan struct{}, 1), stop: make(chan struct{})}
	j.st.Node = wire.Maintenance // takes nothing until it is steered
	ids, err := c.Journal.List()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		d, err := c.Journal.Job(id)
		if err != nil {
			continue // no job's any more: the sweep removes it
		}
		p := &placed{dir: d, id: id}
		if st, err := d.Start(); err != nil {
			c.Log.Warn("a job's start cannot be read", logx.Job, id, logx.Err, err)
		} else {
			p.slot, p.pslot = st.ConcurrentID, st.ConcurrentProjectID
			if spec, err := st.CiJob(); err == nil {
				p.gitlab, p.where = spec.Job.ID, whereOf(spec)
			}
		}
		j.read(p)
		j.jobs[id] = p
	}
	return j, nil
}

// wake has Run look again.
func (j *Jobs) wake() {
	select {
	case j.changed <- struct{}{}:
	default:
	}
}

// Steer tells what the node's state is. A quarantine gives every reservation
// back.
func (j *Jobs) Steer(st node.State) {
	j.mu.Lock()
	j.st = st
	var drop []admit.Held
	if st.Quarantining() {
		for id, r := range j.reservations {
			if !r.taken {
				drop = append(drop, r.held)
				j.endLocked(id, "released")
			}
		}
	}
	j.mu.Unlock()
	j.giveUp(drop...)
	j.wake()
}

// giveUp drops claims. The kernel drops what cannot be, at this process's end.
func (j *Jobs) giveUp(held ...admit.Held) {
	for _, h := range held {
		if err := h.Release(); err != nil {
			j.Log.Warn("a reservation's claim cannot be given up", logx.Err, err)
		}
	}
}

// maxWhy is how many reservations that are gone are remembered.
const maxWhy = 1024

// endLocked forgets a reservation, whose claim is the caller's now, and has the
// session tell why.
func (j *Jobs) endLocked(id, why string) {
	delete(j.reservations, id)
	j.whyLocked(id, why)
	if s := j.session; s != nil {
		s.queue = append(s.queue, gone(id, why))
		s.wake()
	}
}

func (j *Jobs) whyLocked(id, why string) {
	if _, ok := j.why[id]; !ok {
		if j.whyOrder = append(j.whyOrder, id); len(j.whyOrder) > maxWhy {
			delete(j.why, j.whyOrder[0])
			j.whyOrder = j.whyOrder[1:]
		}
	}
	j.why[id] = why
}

func gone(id, why string) *wire.Lease {
	return &wire.Lease{Reservation: id, State: wire.LeaseState{State: "gone", Why: why}}
}

// unfinishedLocked counts the jobs without a result.
func (j *Jobs) unfinishedLocked() (n int) {
	for _, p := range j.jobs {
		if p.result == nil {
			n++
		}
	}
	return n
}

// Unfinished implements node.Jobs.
func (j *Jobs) Unfinished() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unfinishedLocked()
}

// Placed implements node.Jobs.
func (j *Jobs) Placed() *wire.Placed {
	j.mu.Lock()
	defer j.mu.Unlock()
	return &wire.Placed{
		Runner: j.Runner, Limit: j.Limit, ImageCacheIdleSecs: int64(j.ImageIdle / time.Second),
		Jobs: j.unfinishedLocked(), ReservationsPending: len(j.reservations),
	}
}

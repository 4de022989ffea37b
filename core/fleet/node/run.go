package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// Times of the loop.
const (
	minRedial     = 1 * time.Second
	maxRedial     = 60 * time.Second
	goodSession   = 60 * time.Second // one that lasted this long resets the backoff
	inventoryTime = 60 * time.Second
	tuneTime      = 30 * time.Second
	drainTime     = 1 * time.Second // between two looks at what a drain waits for
	lockWait      = 10 * time.Second
	// copies is how many times in a row a session may be superseded before a
	// copy of the state dir on another host is suspected.
	copies = 3
)

// Config is what a Node is made of.
type Config struct {
	StateDir string
	Dialer   Dialer // nil = HubDialer of the enrollment
	Host     Host
	Runner   Runner
	Jobs     Jobs       // nil = this node takes no placed jobs
	Versions wire.Range // zero = wire.Spoken
	VK       string
	Log      *slog.Logger
	Now      func() time.Time // wall clock; nil = time.Now
}

// Node is one incarnation.
type Node struct {
	Config
	enrollment  *Enrollment
	incarnation string
	store       *Store
	lock        *fsx.Lock

	mu      sync.Mutex
	seen    seen
	changed chan struct{} // closed and replaced when seen changes

	// retune, of capacity 1, has the steward look at the concurrency: the VMs are
	// others than before.
	retune chan struct{}
}

// seen is what the steward saw last, for the report.
type seen struct {
	status      RunnerStatus
	drain       *wire.Drain // while draining
	concurrency *wire.Concurrency
	connected   bool
}

// Open takes the node's lock and reads its identity and state. The lock is
// held until Close: there is one node on a state dir.
func Open(ctx context.Context, c Config) (*Node, error) {
	dir, err := Own(c.StateDir, false)
	if err != nil {
		return nil, err
	}
	lock, err := Hold(ctx, dir, lockWait)
	if err != nil {
		return nil, err
	}
	if err := fsx.SweepWrites(dir); err != nil {
		lock.Close()
		return nil, fmt.Errorf("removing what a node before has left: %w", err)
	}
	n, err := open(c, dir)
	if err != nil {
		lock.Close()
		return nil, err
	}
	n.lock = lock
	return n, nil
}

func open(c Config, dir string) (*Node, error) {
	e, err := LoadEnrollment(dir)
	if err != nil {
		return nil, err
	}
	store, err := OpenStore(dir, e)
	if err != nil {
		return nil, err
	}
	if c.Dialer == nil {
		u, err := ParseHub(e.URL)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(dir, EnrollmentFile), err)
		}
		c.Dialer = &HubDialer{URL: u, CA: e.CA}
	}
	if c.Versions == (wire.Range{}) {
		c.Versions = wire.Spoken
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = logx.Discard()
	}
	c.Log = c.Log.With(logx.Node, e.Node)
	return &Node{Config: c, enrollment: e, incarnation: wire.NewID(), store: store, changed: make(chan struct{}), retune: make(chan struct{}, 1)}, nil
}

// Enrollment is what the node was enrolled as.
func (n *Node) Enrollment() *Enrollment { return n.enrollment }

// Store is the node's persisted state.
func (n *Node) Store() *Store { return n.store }

// Connected says whether there is a session.
func (n *Node) Connected() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.seen.connected }

// Close gives the lock back.
func (n *Node) Close() error { return n.lock.Close() }

// Run is the node's life. It returns when ctx ended and the runner has finished
// its jobs, or when the hub refused the node for good, after the same wait; the
// error is then the refusal. Losing the hub is no end.
func (n *Node) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	var runnerErr, sessionErr error
	runnerGone := make(chan struct{})
	wg.Go(func() {
		defer close(runnerGone)
		if runnerErr = n.Runner.Run(ctx); runnerErr != nil && ctx.Err() == nil {
			stop()
		}
	})
	// The steward outlives the session: while the runner finishes its jobs, its
	// state is still told to whoever asks, and nothing may start it again.
	stewarding, stopSteward := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSteward()
	wg.Go(func() { <-runnerGone; <-ctx.Done(); stopSteward() })
	wg.Go(func() { n.steward(stewarding, ctx) })
	var jobsErr error
	if n.Jobs != nil {
		n.Jobs.Steer(n.store.State())
		wg.Go(func() {
			if jobsErr = n.Jobs.Run(ctx); jobsErr != nil && ctx.Err() == nil {
				stop()
			}
		})
	}
	wg.Go(func() { sessionErr = n.sessions(ctx); stop() })
	wg.Wait()
	if jobsErr != nil && !errors.Is(jobsErr, context.Canceled) {
		sessionErr = errors.Join(sessionErr, fmt.Errorf("running placed jobs: %w", jobsErr))
	}
	if runnerErr != nil && !errors.Is(runnerErr, context.Canceled) {
		sessionErr = errors.Join(sessionErr, fmt.Errorf("running gitlab-runner: %w", runnerErr))
	}
	return sessionErr
}

// sessions dials again for as long as ctx lasts. It returns an error only for a
// refusal that is final.
func (n *Node) sessions(ctx context.Context) error {
	wait, superseded := minRedial, 0
	for ctx.Err() == nil {
		begin := time.Now()
		opened, err := n.session(ctx)
		n.setConnected(false)
		if ctx.Err() != nil {
			return nil
		}
		code := RefusalOf(err)
		if code.Final() {
			n.Log.Error("the hub refuses this node for good", logx.Err, err)
			return err
		}
		if opened && time.Since(begin) >= goodSession {
			wait = minRedial
		}
		if code == wire.Superseded {
			superseded++
		} else if opened {
			superseded = 0
		}
		pause := wait + time.Duration(rand.Int64N(int64(wait)/4+1))
		if superseded >= copies {
			pause = maxRedial
			if superseded == copies {
				n.Log.Warn("this node's sessions are taken over again and again: another host may hold a copy of its state dir", "times", superseded)
			}
		}
		if opened {
			n.Log.Info("the session has ended", logx.Err, err, "redial_in", pause.Round(time.Millisecond))
		} else {
			n.Log.Warn("the hub cannot be reached", logx.Err, err, "redial_in", pause.Round(time.Millisecond))
		}
		wait = min(2*wait, maxRedial)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return nil
}

// steward makes the host do what the state says, with a hub or without one. It
// is the only caller of Runner.SetAcquire and Host.Concurrency. Once run has
// ended, no runner is started any more.
func (n *Node) steward(ctx, run context.Context) {
	tune := time.NewTicker(tuneTime)
	defer tune.Stop()
	// The first pass may set any number; of the others, those of the half minute
	// alone may raise it. What the node reports having changed lowers it at once.
	raise, lower := true, false
	for ctx.Err() == nil {
		// Taken before the state is read: a change in between is not missed.
		changed := n.store.Changed()
		st := n.store.State()
		n.Runner.SetAcquire(st.MayTake() && run.Err() == nil)
		if n.Jobs != nil {
			n.Jobs.Steer(st)
		}
		status := n.Runner.Status()
		drain := n.watchDrain(ctx, st, status)
		var pass *wire.Concurrency
		if raise || lower {
			c := n.Host.Concurrency(ctx, st.Policy().Ceiling, raise)
			pass, raise, lower = &c, false, false
		}
		n.see(status, drain, pass)

		var look <-chan time.Time
		if st.Node == wire.Draining {
			look = time.After(drainTime)
		}
		select {
		case <-ctx.Done():
		case <-changed:
			lower = true
		case <-n.Runner.Changed():
			lower = true
		case <-n.retune:
			lower = true
		case <-look:
		case <-tune.C:
			raise = true
		}
	}
}

// watchDrain looks at what a drain waits for, and ends it when all of it is
// seen to be over at one time. Acquisition must have stopped before the look:
// what could still take a job proves nothing by being idle.
func (n *Node) watchDrain(ctx context.Context, st State, status RunnerStatus) *wire.Drain {
	if st.Node != wire.Draining {
		return nil
	}
	external := n.Runner.Mode() == wire.RunnerExternal
	d, err := n.Host.Drain(ctx)
	if err != nil {
		n.Log.Warn("what the drain waits for cannot be told", logx.Err, err)
		return &wire.Drain{Jobs: d.Jobs}
	}
	if !external && status.Acquisition != wire.Stopped {
		d.RunnerExited = false
	}
	if n.Jobs != nil {
		d.Jobs = max(d.Jobs, n.Jobs.Unfinished())
	}
	if d.RunnerExited && d.AdmissionIdle && d.Jobs == 0 {
		if err := n.store.Drained(); err != nil {
			n.Log.Error("the end of the drain cannot be kept", logx.Err, err)
			return &d
		}
		n.Log.Info("drained")
		return nil
	}
	return &d
}

func (n *Node) see(status RunnerStatus, drain *wire.Drain, c *wire.Concurrency) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c != nil {
		if was := n.seen.concurrency; c.Error != "" && (was == nil || was.Error != c.Error) {
			n.Log.Warn("the runner's concurrency cannot be set", logx.Err, c.Error)
		}
		n.seen.concurrency = c
	}
	n.seen.status, n.seen.drain = status, drain
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *Node) setConnected(v bool) { n.mu.Lock(); n.seen.connected = v; n.mu.Unlock() }

func (n *Node) look() (seen, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seen, n.changed
}

// state is the report's part about the node itself.
func (n *Node) state(st State) *wire.State {
	conflict := n.store.Conflict()
	s, _ := n.look()
	out := &wire.State{
		Node: st.Node, Applied: st.Applied, Acquisition: s.status.Acquisition, Runner: n.Runner.Mode(), LastCommand: st.LastCommand,
		Unsupported: s.status.Unsupported, Concurrency: s.concurrency, Conflict: conflict,
	}
	if out.Acquisition == "" { // the steward has not looked yet
		out.Acquisition = n.Runner.Status().Acquisition
	}
	if st.Node == wire.Draining {
		out.Drain = s.drain
	}
	if n.Jobs != nil {
		out.Placed = n.Jobs.Placed()
	}
	return out
}

var errSilent = fault.New(fault.Unavailable, "the hub has been silent for too long")

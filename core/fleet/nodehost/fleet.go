package nodehost

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// NodeOptions are what joins a host to the node's loop.
type NodeOptions struct {
	Host   *Host
	Runner node.Runner
	Tuner  *Tuner // nil = the host's runner has no concurrency to set
	// LocalCeiling is [executor.schedule] max_concurrency, which bounds placed
	// jobs, too; 0 = none.
	LocalCeiling int
	// Metrics is told of each reading; nil = nobody is.
	Metrics *Metrics
	// Explain replaces an error of permissions by what is behind it; nil = it is
	// told as it is.
	Explain func(error) error
	Log     *slog.Logger
}

// Joined is a Host as the node's loop takes it (node.Host). What cannot be read
// is logged once, until it is something else.
type Joined struct {
	o NodeOptions

	mu   sync.Mutex
	told map[string]string // by what was done
}

var _ node.Host = (*Joined)(nil)

// Join joins a host to the node's loop.
func Join(o NodeOptions) *Joined {
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	return &Joined{o: o, told: map[string]string{}}
}

// problems logs what could not be read, once until it changes.
func (j *Joined) problems(what string, problems ...error) {
	text := ""
	if err := errors.Join(problems...); err != nil {
		if denied(err) && j.o.Explain != nil {
			err = j.o.Explain(err)
		}
		text = err.Error()
	}
	j.mu.Lock()
	before := j.told[what]
	j.told[what] = text
	j.mu.Unlock()
	if text != "" && text != before {
		j.o.Log.Warn(what+" is incomplete", logx.Err, text)
	}
}

// Inventory implements node.Host.
func (j *Joined) Inventory(ctx context.Context) (*wire.Inventory, error) {
	i, problems := j.o.Host.Inventory(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	j.problems("the inventory", problems...)
	return &i, nil
}

// Heartbeat implements node.Host.
func (j *Joined) Heartbeat(ctx context.Context) (*wire.Heartbeat, error) {
	b, problems := j.o.Host.Heartbeat(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if j.o.Tuner != nil {
		if n := j.o.Tuner.Last().Effective; n > 0 {
			b.Concurrency = n
		}
	}
	if len(b.VMs) > wire.MaxWorkloads {
		j.bound(ctx, &b)
	}
	j.problems("the heartbeat", problems...)
	j.o.Metrics.Heartbeat(b)
	return &b, nil
}

// bound leaves the figures of those VMs alone that the report lists.
func (j *Joined) bound(ctx context.Context, b *wire.Heartbeat) {
	list, _, _ := j.o.Host.Workloads(ctx)
	kept, _ := wire.BoundWorkloads(Plain(list))
	vms := map[string]int64{}
	for _, w := range kept {
		if n, ok := b.VMs[w.ID]; ok {
			vms[w.ID] = n
		}
	}
	b.VMs = vms
}

// Workloads implements node.Host.
func (j *Joined) Workloads(ctx context.Context) (list []wire.Workload, omitted int, err error) {
	all, problems, err := j.o.Host.Workloads(ctx)
	j.problems("the list of workloads", problems...)
	if err != nil {
		return nil, 0, err
	}
	list, omitted = wire.BoundWorkloads(Plain(all))
	return list, omitted, nil
}

// Drain implements node.Host. A managed runner has exited when none runs; with
// any other there is none to wait for.
func (j *Joined) Drain(ctx context.Context) (wire.Drain, error) {
	o, err := j.o.Host.Observe(ctx)
	if err != nil {
		if denied(err) && j.o.Explain != nil {
			err = j.o.Explain(err)
		}
		j.problems("the observation of a drain", err)
		return wire.Drain{}, err
	}
	j.problems("the observation of a drain")
	d := wire.Drain{RunnerExited: true, AdmissionIdle: o.LedgerEmpty, Jobs: o.Jobs}
	if m, ok := j.o.Runner.(*ManagedRunner); ok {
		d.RunnerExited = m.m.Exited()
	}
	return d, nil
}

// Concurrency implements node.Host.
func (j *Joined) Concurrency(ctx context.Context, hubCeiling int, raise bool) wire.Concurrency {
	if j.o.Tuner == nil {
		return wire.Concurrency{HubCeiling: hubCeiling, LocalCeiling: j.o.LocalCeiling}
	}
	c := j.o.Tuner.Pass(ctx, hubCeiling, raise)
	j.o.Metrics.Concurrency(c)
	return c
}

// ManagedRunner is a Managed as the node's loop takes it.
type ManagedRunner struct {
	m       *Managed
	changed chan struct{}
}

// NewManagedRunner makes one; Changed of the options is its own.
func NewManagedRunner(o ManagedOptions) (*ManagedRunner, error) {
	r := &ManagedRunner{changed: make(chan struct{}, 1)}
	o.Changed = func() { token(r.changed) }
	m, err := NewManaged(o)
	r.m = m
	return r, err
}

func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Mode implements node.Runner.
func (r *ManagedRunner) Mode() wire.RunnerMode { return wire.RunnerManaged }

// Run implements node.Runner: ctx's end quits the runner and waits for its jobs.
func (r *ManagedRunner) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, r.m.Shutdown)
	defer stop()
	return r.m.Run(context.WithoutCancel(ctx))
}

// SetAcquire implements node.Runner.
func (r *ManagedRunner) SetAcquire(take bool) { r.m.Want(take) }

// Status implements node.Runner.
func (r *ManagedRunner) Status() node.RunnerStatus {
	s := r.m.Status()
	st := node.RunnerStatus{Acquisition: wire.Taking}
	switch {
	case s.Quitting:
		st.Acquisition = wire.Quitting
	case !s.Wanted && s.PID == 0:
		st.Acquisition = wire.Stopped
	}
	return st
}

// Changed implements node.Runner.
func (r *ManagedRunner) Changed() <-chan struct{} { return r.changed }

// Abandon implements node.Runner.
func (r *ManagedRunner) Abandon() {
	if err := r.m.Abandon(); err != nil {
		r.m.o.Log.Error("ending gitlab-runner", logx.Err, err)
	}
}

// Managed is what it wraps.
func (r *ManagedRunner) Managed() *Managed { return r.m }

// OtherRunner is the runner of a host that runs none, or one of somebody else's:
// a node.Runner that has no process.
type OtherRunner struct {
	mode    wire.RunnerMode
	found   string // the external runner that was found; "" = none
	changed chan struct{}

	mu      sync.Mutex
	told    bool // SetAcquire was called: before, nothing is taken
	stopped bool
}

// NewOtherRunner makes one of a detection whose mode is not managed.
func NewOtherRunner(d Detection) *OtherRunner {
	r := &OtherRunner{mode: wire.RunnerNone, stopped: true, changed: make(chan struct{}, 1)}
	if d.Mode == ModeExternal {
		r.mode = wire.RunnerExternal
		if d.Found != nil {
			r.found = d.Found.Found()
		}
	}
	return r
}

// Mode implements node.Runner.
func (r *OtherRunner) Mode() wire.RunnerMode { return r.mode }

// Run implements node.Runner: there is nothing to wait for.
func (r *OtherRunner) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// SetAcquire implements node.Runner.
func (r *OtherRunner) SetAcquire(take bool) {
	r.mu.Lock()
	changed := r.stopped == take
	r.stopped, r.told = !take, true
	r.mu.Unlock()
	if changed {
		token(r.changed)
	}
}

// Status implements node.Runner. Of a host without a runner, stopped acquisition
// is in force at once. An external runner that was found cannot be stopped, which
// is said for as long as it should be.
func (r *OtherRunner) Status() node.RunnerStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.stopped {
		return node.RunnerStatus{Acquisition: wire.Taking}
	}
	st := node.RunnerStatus{Acquisition: wire.Stopped}
	if r.found != "" && r.told {
		st.Unsupported = []string{"the runner may still take jobs: " + r.found + " is external, and is stopped by other means"}
	}
	return st
}

// Changed implements node.Runner.
func (r *OtherRunner) Changed() <-chan struct{} { return r.changed }

// Abandon implements node.Runner.
func (r *OtherRunner) Abandon() {}

// Package node is the loop of a host that belongs to a fleet: it holds the
// host's identity, keeps a session with its hub, applies what the hub asks
// within what the host allows, and says what it sees.
//
// Vocabulary. An enrollment is a key with the ids that a hub gave it. An
// incarnation is one run of the loop. Desired state is a policy (ceiling,
// stopped acquisition) as of a generation; a command is an operation with an
// identity (drain, undrain, quarantine, release; updates, resets and tools
// builds are refused for now). The journal is the commands that were received,
// with what became of them. The steward is the part of the loop that does
// things, hub or no hub.
//
// Invariants:
//   - A change is on disk, its directory synced, before anything acts on it and
//     before its ack or report goes out (Store). A crash between the two is
//     mended at the next start, because everything that acts is worked out from
//     what is on disk.
//   - A generation is applied at most once, and a command is carried out at most
//     once: one that is delivered again is answered from its entry; one whose
//     entry is gone is answered expired, by the time of issue of what was
//     dropped, so that a clock that moves back revives nothing.
//   - The hub only narrows. Losing it changes nothing: policy, drain and
//     quarantine stay as they were persisted.
//   - A hub that is behind what the node applied moves nothing: a generation
//     that is not newer is ignored, and reported as a conflict when it is
//     another state (fleet-design, recovery after a hub restore).
//   - drained is said only once the runner has exited, the ledger is empty and
//     no job is left, all three observed at one time after acquisition stopped.
//
// Files, below <state_dir>/node (0700, the node's user): lock (held by a run,
// shared by vk tune), key, enrollment.json, ca.pem, state.json.
//
// Time. Sessions and heartbeats are timed by the monotonic clock. Whether a
// command has expired is told by the hub's clock as the hub told it at the
// session's start, plus the time since: the node's wall clock has no part in
// it, unless the hub told none.
package node

import (
	"context"

	"virtkit/core/fleet/wire"
)

// Host is what the loop reads of its host and sets there. All methods may be
// called at any time, from several goroutines; ctx ends them early.
type Host interface {
	// Inventory are the facts. Read every minute, sent when they changed.
	Inventory(ctx context.Context) (*wire.Inventory, error)
	// Heartbeat are the readings.
	Heartbeat(ctx context.Context) (*wire.Heartbeat, error)
	// Workloads are the VMs, bounded as wire.BoundWorkloads does.
	Workloads(ctx context.Context) (list []wire.Workload, omitted int, err error)
	// Drain observes what a drain waits for, now. An error is no evidence that
	// anything is over.
	Drain(ctx context.Context) (wire.Drain, error)
	// Concurrency makes one pass: decides the number of jobs under hubCeiling
	// (0 = none) and sets it. Only a pass with raise may let it grow.
	Concurrency(ctx context.Context, hubCeiling int, raise bool) wire.Concurrency
}

// Runner is the gitlab-runner of the host, in whatever mode.
type Runner interface {
	Mode() wire.RunnerMode
	// Run supervises until ctx ends, then quits a managed runner and waits for
	// its jobs. It returns when nothing of it is left to wait for.
	Run(ctx context.Context) error
	// SetAcquire says whether jobs may be taken. It returns at once, and may be
	// called with what it was told before. Until it is first called, no runner
	// is started.
	SetAcquire(take bool)
	// Status is what is seen of it.
	Status() RunnerStatus
	// Changed gives a token after each change of Status.
	Changed() <-chan struct{}
	// Abandon ends a managed runner without waiting for its jobs.
	Abandon()
}

// RunnerStatus is a runner's state.
type RunnerStatus struct {
	Acquisition wire.Acquisition
	// Unsupported is what was asked and cannot be done, such as stopping an
	// external runner.
	Unsupported []string
}

// Jobs carries out what a hub places on this node (core/fleet/nodejobs).
type Jobs interface {
	// Run watches drivers and leases until ctx ends. Drivers outlive it.
	Run(ctx context.Context) error
	// Steer tells the node's state, before the first session and at each change.
	Steer(st State)
	// Unfinished counts the jobs without a result, which a drain waits for.
	Unfinished() int
	// Placed is what the report says of them.
	Placed() *wire.Placed
	// Open begins a session, which ends the one before.
	Open() JobSession
}

// JobSession is what a session with the hub asks of Jobs. Its methods are
// called by one goroutine.
type JobSession interface {
	// Held is everything that the node holds, sent before anything else of jobs.
	Held() *wire.Held
	// Handle does what a message of jobs asks; the answer may be nil.
	Handle(ctx context.Context, m wire.Message) (answer wire.Message)
	// Next is the next message to send; nil = none for now.
	Next() wire.Message
	// Ready gives a token when Next may have one again, and after More.
	Ready() <-chan struct{}
	More()
	// Close ends it: nothing of it is sent any more.
	Close()
}

package supervise

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"virtkit/core/machine"
)

// Deps are what the supervisor's process needs of the engines.
type Deps struct {
	// Driver boots the guest. Nil: NewDriver is asked once the spec is known,
	// as the step "driver".
	Driver machine.Driver
	// NewDriver chooses a driver for a spec and says which accelerator it
	// uses ("kvm", "tcg").
	NewDriver func(ctx context.Context, s Spec) (d machine.Driver, accel string, err error)
	// Kernel finds the kernel that s.Kernel asks for.
	Kernel func(ctx context.Context, s Spec) (machine.Kernel, error)
	// Disk makes the writable layer at path with room for size bytes.
	Disk func(path string, size int64) error
	// NewNetwork makes the job's switch; not called when s.Net.Mode is
	// "none". dir is the job's directory.
	NewNetwork func(ctx context.Context, dir string, s Spec) (Network, error)
	// Log goes to sup.log. Nil discards.
	Log *slog.Logger
	// Hook, when set, is called before each step of the start with its name,
	// and as "ready", "ending" and "removing" later. For tests.
	Hook func(step string)
	// Times overrides the supervisor's own intervals; zero fields keep them.
	Times Times
}

// Times are the supervisor's intervals.
type Times struct {
	Ping    time.Duration // between two heartbeats; default HangLimit/4 within 1 s to 10 s
	Contact time.Duration // a first contact that stays silent is tried again after this; default 10 s
	Grace   time.Duration // of a stop that names none; default 5 s
	Power   time.Duration // from the agent's goodbye to power off, then the guest is killed; default 10 s
}

// Run is the body of the supervisor's process: it runs the guest that
// <jobdir>/spec.json describes to its end. It returns nil when the guest
// ended as it was asked to, else what is also in State.Exit. SIGTERM and
// SIGINT, and the end of ctx, stop the guest in order.
func Run(ctx context.Context, jobdir string, d Deps) error {
	return errors.New("not yet")
}

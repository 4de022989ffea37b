package supervise

import (
	"context"
	"errors"

	"virtkit/core/fsx"
)

// LaunchOptions say how to start a supervisor.
type LaunchOptions struct {
	// Dir is the job's directory. It is made, unless Lock is given.
	Dir string
	// Lock is what Make (or ledger's Reserve) returned for Dir. Launch takes
	// it over.
	Lock *fsx.Lock
	Spec Spec
	// Argv re-executes this program as a supervisor; Dir is appended. Such as
	// {"/proc/self/exe", "supervise"}; Argv[0] may be a path.
	Argv []string
	// Env is added to the few variables that a supervisor inherits (see
	// InheritedEnv). It must hold no secret.
	Env []string
	// Progress, when set, hears of each change of the state until the guest
	// runs.
	Progress func(State)
}

// Make makes a job's directory with its spec, all or nothing, and returns its
// lock, held. fs.ErrExist when dir exists.
func Make(dir string, s Spec) (*fsx.Lock, error) { return nil, errors.New("not yet") }

// Launch starts a supervisor in a session of its own and returns when its
// guest runs. When that fails, or ctx ends meanwhile, nothing is left and the
// error says what went wrong, at which step, with the console's last lines in
// its text and the next step as its hint.
func Launch(ctx context.Context, o LaunchOptions) (*Client, error) {
	return nil, errors.New("not yet")
}

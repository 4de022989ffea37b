package cijob

import (
	"context"
	"io"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/guestwire"
	"virtkit/core/policy"
	"virtkit/core/runner"
)

// Transfer is what a transfer of artifacts or of a cache is given. Its streams
// are the job's own in the trace (01 O and 01 E): whole lines, as they are to
// be shown; what is secret in them is masked behind them.
type Transfer struct {
	Job     *job.CiJob
	Project string // CI_PROJECT_DIR in the guest: what paths are relative to
	User    string // that the job's commands run as in the guest; "" = root
	Work    string // a directory of the driver's on the host, 0700, for what is needed whole
	Guest   Guest
	Out     io.Writer
	Err     io.Writer
	// Lookup is one of the job's variables, expanded.
	Lookup func(name string) (value string, set bool)
	// Env is one of the environment that the job's own commands have in the guest:
	// the job's variables, what GITLAB_ENV sets, and the guest's own.
	Env func(name string) (value string, set bool)
}

// Guest is the job's running guest.
type Guest interface {
	// Exec runs a program and returns how it ended; see runner.Guest.
	Exec(ctx context.Context, r guestwire.ExecRequest, stdio runner.Stdio, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error)
}

// Artifacts moves artifacts between the job's guest and GitLab. An
// implementation tells on Err what went wrong; an error is for the driver's
// log. When ctx ends, so does the transfer. The driver itself tells, on Out,
// "Uploading artifacts..." and "Downloading artifacts for NAME (ID)..." before
// each.
type Artifacts interface {
	// Upload packs and uploads one entry of the job's artifacts, with the
	// retries that belong to an upload. The outcome is one of package job's. No
	// files to upload is job.Skipped and no error.
	Upload(ctx context.Context, t Transfer, a job.Artifact) (outcome string, err error)
	// Download fetches and unpacks the artifacts of an earlier job. direct asks
	// for GitLab's redirection to its object store: the first attempt's way.
	Download(ctx context.Context, t Transfer, d job.Dependency, direct bool) error
}

// Caches keeps a job's caches. What goes wrong is told in the trace and is no
// failure of the job's: an error is for another attempt alone. The driver
// itself tells of policies, of the warnings that come with a cache and of a
// cache without a key, and does not call for those that are not to be moved.
type Caches interface {
	// Restore looks for the key, then for the fallback keys. Nothing found is no
	// error.
	Restore(ctx context.Context, t Transfer, c job.Cache) error
	Save(ctx context.Context, t Transfer, c job.Cache) error
}

// CallKind is one of the executor's commands.
type CallKind string

// The commands.
const (
	CallConfig  CallKind = "config"
	CallPrepare CallKind = "prepare"
	CallRun     CallKind = "run"
	CallCleanup CallKind = "cleanup"
)

// Call is one call of the executor.
type Call struct {
	Kind   CallKind
	Stage  string // of run
	Script []byte // of run
	Env    []string
	// Response is the text of JOB_RESPONSE_FILE, the same for all calls.
	Response []byte
	Out      io.Writer
	Err      io.Writer
	// Now, when it is closed, shortens the grace that a call has after the end of
	// its context.
	Now <-chan struct{}
}

// Ended is how a call ended.
type Ended struct {
	Exit     int    // the process's status; -1 when a signal ended it
	FileCode string // first line of BUILD_EXIT_CODE_FILE, "" = none
	Outcome  execdrv.Outcome
	Err      error // the call could not be made, or its process was killed
}

// Executor runs the executor's commands.
type Executor interface {
	// Call runs one and waits for its end. When ctx ends, the process group gets
	// SIGTERM, and what the Grace of the cause says after that (see graceOf).
	Call(ctx context.Context, c Call) Ended
}

// Host is what the driver asks the host of its job, beside the executor's
// commands. Every method may be called at any time after prepare.
type Host interface {
	// Guest is the job's guest for a transfer, and the user of its commands.
	Guest(ctx context.Context) (g Guest, user string, err error)
	// Size is the guest's.
	Size() *wire.GuestSize
	// Usage is what the job has used so far, without the wall time; nil when no
	// VM is up to read. The events are what went wrong on the machine meanwhile.
	Usage(ctx context.Context) (*wire.JobUsage, []wire.JobEvent)
	// Egress is the job's egress report so far, whose revision is the driver's to
	// give; nil when there is none. now has it read from the switch; else what the
	// switch wrote down a few seconds ago will do, and same says that nothing was
	// since the last call that returned a report.
	Egress(ctx context.Context, now bool) (r *policy.Report, same bool)
}

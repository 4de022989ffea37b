// Package runner is the life of a GitLab job in a guest, behind the four calls
// of the custom executor (core/execdrv). It knows the order of things and
// what to tell the user; what boots guests, keeps job directories and finds
// images is given to it as interfaces.
//
// Each call is a process of its own. What one leaves for the next is in the
// job's directory: job.json (Record) beside the supervisor's files. The
// directory's name is made from the job's variables alone, so that every call
// finds it, also a cleanup after a crash.
//
// Whose fault a failure is: fault.JobFailed is the job's (a wrong MICROVM_*
// variable, a user that the image does not have) and ends the process with
// BUILD_FAILURE_EXIT_CODE; every other kind is the runner's side and ends it
// with SYSTEM_FAILURE_EXIT_CODE, which GitLab may retry.
package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"virtkit/core/admit"
	"virtkit/core/checkout"
	"virtkit/core/conf"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

// Images finds the root that a job runs in.
type Images interface {
	// Check refuses references that can never work, without any I/O beyond
	// the configuration: wrong syntax, kinds that this version does not run.
	Check(ref string) error
	// Resolve makes the image ready on this host. It may take minutes and
	// tells its progress in whole lines.
	// It is called for several images at once.
	Resolve(ctx context.Context, q ImageQuery, progress func(line string)) (Image, error)
}

// Tools makes the host's tools ready for guests ([executor] tools_dir).
type Tools interface {
	// Ready packs the directory as it is now, unless that is done already, and
	// names its programs, sorted.
	Ready(ctx context.Context, progress func(line string)) (root supervise.Image, names []string, err error)
}

// Checkouts keeps work trees on this host ([executor] host_checkout).
type Checkouts interface {
	// Take brings a tree to what the job wants and returns it held.
	Take(ctx context.Context, j checkout.Job, progress func(line string)) (*checkout.Tree, error)
	// Sweep removes trees that nobody has used for long.
	Sweep(ctx context.Context, o checkout.SweepOptions) (checkout.Swept, error)
}

// ImageQuery is what a job says of its image. Auth holds secrets.
type ImageQuery struct {
	Ref         string
	Platform    string // "" = the host's
	AuthConfig  string // the job's DOCKER_AUTH_CONFIG
	Credentials []execdrv.Credential
	// PullPolicies are the job's pull_policy, tried in order; nil = always.
	PullPolicies []string
	Service      string // the service that it is of; "" = the job's own
}

// Image is an image that is ready to boot.
type Image struct {
	Root       supervise.Image
	Env        []string
	User       string
	Workdir    string
	Entrypoint []string
	Cmd        []string
	Volumes    []string
	Ports      []int  // TCP, that it exposes
	From       string // how it came here, for the trace: "cached", "pulled 31 MB"
}

// Machines keeps job directories and runs their guests.
type Machines interface {
	// Reserve makes the directory of s.ID. fault.Conflict when it exists.
	Reserve(ctx context.Context, s supervise.Spec) (Slot, error)
	// Find is the guest of a job. supervise.ErrSupervisorGone is in the
	// error's chain when there is none (any more).
	Find(ctx context.Context, id string) (Guest, error)
	// Dir is where the job's directory is, whether or not it exists.
	Dir(id string) string
	// Remove ends what lives of the job and removes its directory. It may be
	// called in any state, many times, and by several processes at once.
	Remove(ctx context.Context, id string) error
	// Reap removes jobs whose runner is gone or whose time is over. The lines
	// say what was removed.
	Reap(ctx context.Context) []string
}

// Slot is a reserved job directory.
type Slot interface {
	// Launch starts the guest and returns once it runs. On error nothing of
	// the guest is left, but the directory may be. hold, unless it is nil, stays
	// open as long as the guest's supervisor lives.
	Launch(ctx context.Context, hold *os.File, progress func(supervise.State)) (Guest, error)
	// Release gives the directory up when Launch was never called, and removes
	// it: until then its lock is this process's, and Machines.Remove refuses.
	// After Launch it does nothing.
	Release() error
}

// Guest is a running guest.
type Guest interface {
	// State is the supervisor's last word, also after the guest's end.
	State(ctx context.Context) (supervise.State, error)
	// Exec runs a program and returns how it ended. Control messages are
	// passed on as they come. When ctx ends, or this process dies, the
	// program and all it started are killed; the guest lives on. An error
	// means that the guest or the way to it was lost.
	Exec(ctx context.Context, r guestwire.ExecRequest, stdio Stdio, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error)
	// Begin says that from now on what runs is the job's, waits until the guest
	// runs and returns its state then. Before it, a guest that falls silent is
	// booted anew, once, and what was made in it is lost: State.Retried has
	// grown by then.
	Begin(ctx context.Context) (supervise.State, error)
	// Egress is what was recorded of the guest's egress so far, also after its
	// end. stage, when not empty, names the stage that begins now.
	// fs.ErrNotExist is in the error's chain when nothing is recorded.
	Egress(ctx context.Context, stage string) (supervise.EgressRecord, error)
	// Sample makes the guest's recording reach to this moment.
	Sample(ctx context.Context) error
	// Usage is what the guest has cost so far. Of one that has ended it is not
	// known any more.
	Usage(ctx context.Context) (supervise.Usage, error)
}

// Stdio are a program's streams; nil ones are /dev/null.
type Stdio struct {
	In       io.Reader
	Out, Err io.Writer
}

// Settings are the host's, from its configuration.
type Settings struct {
	Limits    execdrv.Limits
	User      string // [executor.vm] user; "" = the image's
	Hostname  string // of the guest
	HostName  string // of this host, for "Running on … via …"
	BuildsDir string
	CacheDir  string
	Upper     int64 // bytes of the writable layer
	Nested    bool
	// Shares are directories of this host that the job's guest sees read-only
	// ([executor.share]).
	Shares  []supervise.Share
	Reclaim conf.Amount // of idle file cache: "auto", "off", or what stays
	Balloon bool        // the host gets back what a guest frees
	DAX     string      // that is asked for and cannot be had; "" = not asked for
	Kernel  string
	Accel   string
	Net     supervise.NetSpec
	Egress  Egress
	// ServiceWait is how long to wait for a service's ports; 0 = not at all.
	ServiceWait      time.Duration
	GuestServiceExec bool // jobs may run commands in their services

	// CheckoutLayer is the most memory that the writable layer above a guest's
	// work tree may take, in bytes of a guest of so many MiB; 0 puts the layer on
	// the guest's disk.
	CheckoutLayer func(memMiB int) int64

	FromHistory bool  // memory is reserved by what a job has been using
	DiskDefault int64 // bytes that an unknown job's directory is expected to hold; 0 = 8 GiB, or the filesystem's size
	// BudgetErr says why the host's memory budget is not known. No job is
	// prepared then.
	BudgetErr error

	BootLimit time.Duration
	HangLimit time.Duration
	Version   string

	RecordInterval time.Duration // between two samples of a guest; 0 = guests are not recorded
}

// Runner answers the calls.
type Runner struct {
	Images   Images
	Machines Machines
	Hub      Hub   // nil = no hub has a say
	Sites    Sites // nil = no standing lists are kept
	// Recordings keeps what guests record; nil = they record nothing.
	Recordings Recordings
	Tools      Tools      // nil = guests get none
	Checkouts  Checkouts  // nil = jobs get their sources in their guests
	Gate       admit.Gate // nil = everything is admitted
	// Prior is the claim of the reservation that the job was placed on, by its
	// descriptor; nil = the job asks for all of its own.
	Prior   *os.File
	History History // nil = nothing is remembered
	Set     Settings
	Trace   io.Writer        // gets the `virtkit: …` lines
	Now     func() time.Time // nil = time.Now
	// Parent is the process that called this one; its zero value is "unknown".
	Parent supervise.Owner

	mu sync.Mutex // over writes to Trace
}

// Shell is the one word that starts the job's shell in a guest. It reads the
// script from its standard input, so that an entrypoint that splits its
// arguments again has nothing to split.
const Shell = "/run/vk/bin/vk-shell"

// GraceAfterTimeout is how long a job may go on after its own timeout
// (after_script, uploads, cleanup) before the guest is ended as forgotten.
const GraceAfterTimeout = 30 * time.Minute

// defaultTimeout is assumed for a job whose timeout nobody tells.
const defaultTimeout = 24 * time.Hour

func (r *Runner) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

// say writes one line into the job's trace.
func (r *Runner) say(format string, a ...any) {
	r.write(fmt.Sprintf("virtkit: "+format+"\n", a...))
}

// write writes whole lines into the job's trace.
func (r *Runner) write(lines string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	io.WriteString(r.Trace, lines)
}

func (r *Runner) warn(line string) { r.say("warning: %s", line) }

// Config answers `config`: it refuses what can never work, and says where
// things are. It makes nothing.
func (r *Runner) Config(c *execdrv.Call) (execdrv.ConfigAnswer, error) {
	if _, err := Identify(c); err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	if r.Set.BudgetErr != nil {
		return execdrv.ConfigAnswer{}, r.Set.BudgetErr
	}
	resp, err := readResponse(c)
	if err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	w, err := execdrv.ReadWanted(c, resp, r.Set.Limits)
	if err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	if err := r.checkImage(w); err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	services, err := r.readServices(c, resp)
	if err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	if _, err := r.declaredEgress(c, serviceLists(services)); err != nil {
		return execdrv.ConfigAnswer{}, err
	}
	return execdrv.ConfigAnswer{
		BuildsDir: r.Set.BuildsDir, CacheDir: r.Set.CacheDir,
		Hostname: r.Set.HostName,
		Driver:   &execdrv.DriverName{Name: "virtkit", Version: r.Set.Version},
		JobEnv:   map[string]string{execdrv.EnvFirstCall: execdrv.FirstCall(c, r.Parent.PID, r.Parent.Start)},
		Shell:    "bash",
	}, nil
}

func (r *Runner) checkImage(w execdrv.Wanted) error {
	err := r.Images.Check(w.Image)
	if err == nil {
		return nil
	}
	f := fault.Newf(fault.JobFailed, "%s", w.ImageFrom).Because(err)
	if h := fault.HintOf(err); h != "" {
		return f.Hint("%s", h)
	}
	return f.Hint("name an image that this runner can boot, in %s or image:", execdrv.VarImage)
}

// readResponse reads JOB_RESPONSE_FILE. A runner too old to give one is
// served without.
func readResponse(c *execdrv.Call) (execdrv.Response, error) {
	if c.ResponseFile == "" {
		c.Warnings = append(c.Warnings, execdrv.EnvJobResponse+" is not set: the image's entrypoint and credentials of the job are unknown")
		return execdrv.Response{}, nil
	}
	resp, err := execdrv.ReadResponse(c.ResponseFile)
	if err != nil {
		return resp, fault.New(fault.System, "reading the job").Because(err).
			Hint("the runner writes this file for each job: look for errors in its own log")
	}
	return resp, nil
}

// OutcomeOf is what an error of the calls tells beside its status.
func OutcomeOf(err error) execdrv.Outcome {
	var o execdrv.Outcome
	if e, ok := errors.AsType[*StepError](err); ok {
		o.Step = e.Step
	}
	if e, ok := errors.AsType[*entriesError](err); ok {
		o.Refused = e.refused
	}
	o.Job = fault.KindOf(err) == fault.JobFailed
	return o
}

// Status is the process status for an error of Config, Prepare, Run or
// Cleanup.
func Status(c *execdrv.Call, err error) int {
	if err == nil {
		return 0
	}
	if fe, ok := errors.AsType[*fault.Error](err); ok && fe.Kind == fault.JobFailed {
		return c.BuildFailure
	}
	return c.SystemFailure
}

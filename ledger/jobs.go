// Package ledger is what one host remembers. Here: its job directories.
//
// <state_dir>/jobs holds one directory a guest, named by its id ("run-" and
// 8 hex digits, or GitLab's job id, "-" and a slug), whose files
// core/supervise describes. Beside them:
//
//	.lock       held while a name is reserved
//	.sweep      held by the one sweep that runs
//	.new-*      a directory being made; its lock is held meanwhile
//	.dead-*     a directory being removed
//
// A directory whose lock is free belongs to nobody. Whatever else is found
// there is left alone and reported.
package ledger

import (
	"context"
	"errors"
	"time"

	"virtkit/core/fsx"
	"virtkit/core/supervise"
)

// Jobs are the job directories of one state directory.
type Jobs struct {
	dir string
}

// Open returns the job directories below stateDir, which is made 0700 when
// missing.
func Open(stateDir string) (*Jobs, error) { return nil, errors.New("not yet") }

// Dir is <state_dir>/jobs.
func (j *Jobs) Dir() string { return j.dir }

// Reservation is a job directory that is ours until its lock is closed or
// handed to supervise.Launch.
type Reservation struct {
	Spec supervise.Spec // as given, with ID and Name filled in
	Dir  string
	Lock *fsx.Lock
}

// Release removes the reserved directory; harmless after a Launch took the
// lock over.
func (r *Reservation) Release() error { return nil }

// Reserve makes a directory for s. ID "" becomes a new "run-<8hex>"; Name ""
// becomes the ID. A name that a live guest has, or an ID that exists, is a
// fault.Conflict.
func (j *Jobs) Reserve(ctx context.Context, s supervise.Spec) (*Reservation, error) {
	return nil, errors.New("not yet")
}

// GitLabID is the directory name of a GitLab job.
func GitLabID(jobID int64, slug string) string { return "" }

// Job is one line of `vk list --json`; the field names are stable.
type Job struct {
	ID      string              `json:"id"`
	Name    string              `json:"name"`
	Kind    string              `json:"kind"`
	Status  string              `json:"status"` // a supervise.Phase, or "dead": its supervisor is gone
	Stage   string              `json:"stage,omitempty"`
	Image   string              `json:"image"`
	Digest  string              `json:"digest,omitempty"`
	Created time.Time           `json:"created"`
	Since   time.Time           `json:"since,omitzero"`
	CPUs    int                 `json:"cpus"`
	MemMiB  int                 `json:"mem_mib"`
	Accel   string              `json:"accel,omitempty"`
	Kernel  string              `json:"kernel,omitempty"`
	Addr    string              `json:"addr,omitempty"`
	Publish []supervise.Publish `json:"publish,omitempty"`
	PID     int                 `json:"pid,omitempty"`     // supervisor
	VMMPID  int                 `json:"vmm_pid,omitempty"` // 0 when none
	Boots   int                 `json:"boots,omitempty"`
	BootMS  int64               `json:"boot_ms,omitempty"`
	Exit    *supervise.Exit     `json:"exit,omitempty"`
	Keep    bool                `json:"keep,omitempty"`
	Dir     string              `json:"dir"`
}

// List returns all jobs, oldest first; problems are what could not be read,
// each naming its file.
func (j *Jobs) List(ctx context.Context) (jobs []Job, problems []error, err error) {
	return nil, nil, errors.New("not yet")
}

// Find returns the job with this id or, among the live ones, this name (or a
// unique prefix of an id). fault.NotFound names what exists.
func (j *Jobs) Find(ctx context.Context, idOrName string) (Job, error) {
	return Job{}, errors.New("not yet")
}

// Remove kills what a dead job left and removes its directory. fault.Conflict
// when its supervisor lives; no error when there is no such directory.
func (j *Jobs) Remove(ctx context.Context, id string) error { return errors.New("not yet") }

// SweepOptions bound a sweep.
type SweepOptions struct {
	// Retention is how long a kept directory stays after its guest's end;
	// 0 = 7 days.
	Retention time.Duration
	// Now is the clock; zero = time.Now.
	Now func() time.Time
}

// Swept is what a sweep did.
type Swept struct {
	Removed  []string // ids and staging names
	Killed   []int    // processes that had outlived their supervisor
	Skipped  []string // names that are not ours
	Problems []error  // each names its path
	Busy     bool     // another sweep runs; nothing was done
}

// Sweep removes what dead supervisors and launchers left. It never waits for
// a lock; ctx bounds it between two directories.
func (j *Jobs) Sweep(ctx context.Context, o SweepOptions) (Swept, error) {
	return Swept{}, errors.New("not yet")
}

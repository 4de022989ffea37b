// Package jobdir is a node's journal of placed jobs: a directory a job,
// <state_dir>/node/jobs/<job>/, shared by the node's loop and the job's driver
// (`vk node job <dir>`), which outlives it.
//
//	name          mode  written by  is
//	start.json    0600  node        the Start, with the job's secrets in clear
//	lock          0600  node        held by the driver (see Lock)
//	cancel        0600  node        how to stop: graceful or immediate
//	output        0600  driver      the trace as GitLab is to hold it; only ever appended to
//	stage.json    0600  driver      where the job is
//	egress.json   0600  driver      what it reached and was refused so far (policy.Report)
//	driver.log    0600  driver      its log, and what cleanup prints
//	work/         0700  driver      TMPDIR of the executor's calls, scripts, exit codes; gone before the result
//	result.json   0600  driver      how the job ended; the last thing written. For a driver that died: node
//
// # Order
//
// The node makes the directory with its start.json in one rename, and both are
// durable, before it answers accepted. It takes the lock, starts the driver
// with the lock's descriptor, and closes its own. From then on a free lock
// means that the driver is gone: with a result.json it has finished, without
// one the node cleans up after it and writes the result. Once the hub has
// recorded the result, the node removes the directory.
//
// # Durability
//
// start.json, cancel and result.json are written, synced, renamed, and their
// directory synced. The output is synced before the result is written and not
// before: after a power loss it may be shorter than what the hub has stored.
// stage.json is not synced: it is read while the driver lives. Neither is
// egress.json, which the result has the last word of.
package jobdir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// Names in a job's directory.
const (
	startFile  = "start.json"
	lockFile   = "lock"
	cancelFile = "cancel"
	outputFile = "output"
	stageFile  = "stage.json"
	egressFile = "egress.json"
	logFile    = "driver.log"
	resultFile = "result.json"
	workDir    = "work"
)

// staging begins the name of a directory that is not a job's yet.
const staging = ".new-"

// ErrExists says that the job is journaled already.
var ErrExists = errors.New("jobdir: the job is journaled already")

// ErrNone says that there is no such job.
var ErrNone = errors.New("jobdir: no such job")

// Start is a hub's start as the node journals it.
type Start struct {
	wire.Start
	ConcurrentID        int   `json:"concurrent_id"`         // CI_CONCURRENT_ID: the lowest free one among the node's jobs
	ConcurrentProjectID int   `json:"concurrent_project_id"` // CI_CONCURRENT_PROJECT_ID: the same within the project
	Accepted            int64 `json:"accepted"`              // Unix seconds of the node's clock
}

// CiJob reads the spec.
func (s Start) CiJob() (*job.CiJob, error) { return job.Parse(s.Spec) }

// Stage is where a job is: a running state's payload.
type Stage struct {
	Stage    string          `json:"stage"`              // prepare_executor, get_sources, step_script …
	Activity string          `json:"activity,omitempty"` // what of it, where the driver knows
	Guest    *wire.GuestSize `json:"guest,omitempty"`    // once prepare has sized it
}

// Store is the directory of all jobs of a node.
type Store struct{ root string }

// Open opens the journal under a state directory, makes it where it is missing,
// and removes what a crash between making a directory and naming it left.
func Open(stateDir string) (*Store, error) {
	s := &Store{filepath.Join(stateDir, "node", "jobs")}
	if err := os.MkdirAll(s.root, 0o700); err != nil {
		return nil, fmt.Errorf("making the journal of jobs: %w", err)
	}
	list, err := os.ReadDir(s.root)
	if err != nil {
		return nil, fmt.Errorf("reading the journal of jobs: %w", err)
	}
	for _, e := range list {
		if strings.HasPrefix(e.Name(), staging) {
			if err := fsx.RemoveTree(filepath.Join(s.root, e.Name())); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// Root is the path of the journal.
func (s *Store) Root() string { return s.root }

// List are the journaled jobs, sorted. Other names in the directory are none of
// ours.
func (s *Store) List() ([]string, error) {
	list, err := os.ReadDir(s.root)
	if err != nil {
		return nil, fmt.Errorf("reading the journal of jobs: %w", err)
	}
	var out []string
	for _, e := range list {
		if e.IsDir() && wire.IsHex(e.Name(), wire.IDLen) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// Create journals a start. When it returns nil the job is durable. ErrExists:
// there is one of that name, whose start may be another.
func (s *Store) Create(st Start) (*Dir, error) {
	if !wire.IsHex(st.Job, wire.IDLen) {
		return nil, errors.New("jobdir: the start has no job's ID")
	}
	b, err := json.Marshal(st)
	if err != nil {
		return nil, fmt.Errorf("journaling job %s: %w", st.Job, err)
	}
	path := filepath.Join(s.root, st.Job)
	if _, err := os.Lstat(path); err == nil {
		return nil, fmt.Errorf("%w: %s", ErrExists, st.Job)
	}
	tmp, err := os.MkdirTemp(s.root, staging)
	if err != nil {
		return nil, fmt.Errorf("journaling job %s: %w", st.Job, err)
	}
	err = fsx.WriteFile(filepath.Join(tmp, startFile), b, 0o600)
	failpoint.At(failpoint.HalfJournaled)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		fsx.RemoveTree(tmp)
		// A directory that is not empty is in the way: another Create was first.
		if errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("%w: %s", ErrExists, st.Job)
		}
		return nil, fmt.Errorf("journaling job %s: %w", st.Job, err)
	}
	if err := fsx.SyncDir(s.root); err != nil {
		return nil, fmt.Errorf("journaling job %s: %w", st.Job, err)
	}
	return &Dir{path}, nil
}

// Job opens a job's directory; ErrNone when there is none.
func (s *Store) Job(id string) (*Dir, error) {
	if !wire.IsHex(id, wire.IDLen) {
		return nil, fmt.Errorf("%w: %.64q", ErrNone, id)
	}
	return At(filepath.Join(s.root, id))
}

// Dir is one job's directory.
type Dir struct{ path string }

// At opens the directory of a job by its path; ErrNone when no job is there.
func At(path string) (*Dir, error) {
	if _, err := os.Lstat(filepath.Join(path, startFile)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %s has no %s", ErrNone, path, startFile)
		}
		return nil, err
	}
	return &Dir{filepath.Clean(path)}, nil
}

// Path is the directory.
func (d *Dir) Path() string { return d.path }

// ID is the job's.
func (d *Dir) ID() string { return filepath.Base(d.path) }

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

// Start reads what was journaled. Once there is a result, its spec is the
// redacted one.
func (d *Dir) Start() (Start, error) {
	var st Start
	b, err := os.ReadFile(d.file(startFile))
	if err != nil {
		return Start{}, err
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return Start{}, fmt.Errorf("%s is not a start that this version wrote", d.file(startFile)) // the decoder's words may hold a secret
	}
	return st, nil
}

// Lock takes the driver's lock; an error wraps fsx.ErrLocked while a driver
// lives. The node passes the lock's File to the driver (see HeldLock of fsx)
// and closes its own.
func (d *Dir) Lock() (*fsx.Lock, error) { return fsx.TryLock(d.file(lockFile), false) }

// WaitGone waits until no driver lives; what ctx ends with otherwise.
func (d *Dir) WaitGone(ctx context.Context) error {
	l, err := fsx.AcquireLock(ctx, d.file(lockFile), false)
	if err != nil {
		return err
	}
	return l.Close()
}

// Cancel asks the driver to stop the job. Immediate overrides graceful, never
// the other way.
func (d *Dir) Cancel(mode wire.CancelMode) error {
	if mode != wire.CancelGraceful && mode != wire.CancelImmediate {
		return fmt.Errorf("jobdir: no mode of cancelling: %.32q", mode)
	}
	now, err := d.Cancelled()
	if err != nil || now == mode || now == wire.CancelImmediate {
		return err
	}
	return fsx.WriteFile(d.file(cancelFile), []byte(mode+"\n"), 0o600)
}

// Cancelled is how the job is to stop, "" while it is not. A word of a later
// version reads as immediate: a job that was cancelled does not go on.
func (d *Dir) Cancelled() (wire.CancelMode, error) {
	b, err := os.ReadFile(d.file(cancelFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", err
	case strings.TrimSpace(string(b)) == string(wire.CancelGraceful):
		return wire.CancelGraceful, nil
	}
	return wire.CancelImmediate, nil
}

// OutputPath is the trace.
func (d *Dir) OutputPath() string { return d.file(outputFile) }

// AppendOutput opens the trace for the driver.
func (d *Dir) AppendOutput() (*os.File, error) {
	return os.OpenFile(d.file(outputFile), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
}

// OutputLen is how long the trace is so far, in bytes.
func (d *Dir) OutputLen() (int64, error) {
	fi, err := os.Stat(d.file(outputFile))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// ReadOutput reads at most len(p) bytes of the trace from offset; n is 0 when
// there are none yet.
func (d *Dir) ReadOutput(p []byte, offset int64) (n int, err error) {
	f, err := os.Open(d.file(outputFile))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for n < len(p) {
		m, err := f.ReadAt(p[n:], offset+int64(n))
		n += m
		if err != nil || m == 0 {
			break // the end, or it has begun to fail: what was read stands, the next call tells
		}
	}
	return n, nil
}

// WriteStage tells where the job is.
func (d *Dir) WriteStage(s Stage) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return d.replace(stageFile, b)
}

// Stage is where the job is; the zero Stage while it has not begun.
func (d *Dir) Stage() (s Stage, err error) {
	b, err := os.ReadFile(d.file(stageFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Stage{}, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	return s, err
}

// WriteEgress keeps a report of the job's egress, in place of the one before.
func (d *Dir) WriteEgress(report []byte) error { return d.replace(egressFile, report) }

// Stamp tells one report from the next. A file's time alone does not: two may
// be written within one tick of it.
type Stamp struct {
	inode uint64
	at    int64
}

// Egress is the newest report, nil for none. since is what it returned the last
// time: one that has not been replaced since is not read again, and fresh is
// false.
func (d *Dir) Egress(since Stamp) (report []byte, now Stamp, fresh bool, err error) {
	f, err := os.Open(d.file(egressFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, since, false, nil
	}
	if err != nil {
		return nil, since, false, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, since, false, err
	}
	now.at = fi.ModTime().UnixNano()
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		now.inode = st.Ino
	}
	if now == since {
		return nil, since, false, nil
	}
	report, err = io.ReadAll(f)
	return report, now, err == nil, err
}

// replace is fsx.WriteFile without the syncs.
func (d *Dir) replace(name string, b []byte) error {
	f, err := os.CreateTemp(d.path, "."+name+"-*") // 0600
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), d.file(name))
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// Log opens driver.log for appending. A driver's standard error is this file.
func (d *Dir) Log() (*os.File, error) {
	return os.OpenFile(d.file(logFile), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
}

// LogPath is driver.log.
func (d *Dir) LogPath() string { return d.file(logFile) }

// Work makes the driver's own directory, empty where it was left by another
// driver, and returns its path.
func (d *Dir) Work() (string, error) {
	if err := d.RemoveWork(); err != nil {
		return "", err
	}
	return d.file(workDir), os.Mkdir(d.file(workDir), 0o700)
}

// WorkPath is where Work is made.
func (d *Dir) WorkPath() string { return d.file(workDir) }

// RemoveWork removes it.
func (d *Dir) RemoveWork() error { return fsx.RemoveTree(d.file(workDir)) }

// Finish writes how the job ended, with the output's length filled in, and then
// takes the secrets out of the start. The first result stands: with one there,
// only the secrets are seen to. When it returns nil, the output and the result
// are durable.
func (d *Dir) Finish(r job.Result) error {
	if _, ok, err := d.Result(); err != nil {
		return err
	} else if !ok {
		n, err := d.syncOutput()
		if err != nil {
			return fmt.Errorf("syncing the output of job %s: %w", d.ID(), err)
		}
		r.OutputLen = n
		if r.Artifacts == nil {
			r.Artifacts = []wire.ArtifactResult{}
		}
		b, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := fsx.WriteFile(d.file(resultFile), b, 0o600); err != nil {
			return fmt.Errorf("writing the result of job %s: %w", d.ID(), err)
		}
		failpoint.At(failpoint.ResultWritten)
	}
	return d.forget()
}

func (d *Dir) syncOutput() (int64, error) {
	f, err := d.AppendOutput()
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return 0, err
	}
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// forget replaces the journaled spec by its redacted form.
func (d *Dir) forget() error {
	st, err := d.Start()
	if err != nil {
		return err
	}
	if j, err := st.CiJob(); err == nil {
		st.Spec, err = json.Marshal(j.Redacted())
		if err != nil {
			return err
		}
	} else {
		// What cannot be read cannot be told apart: all of it goes.
		st.Spec = json.RawMessage(`{}`)
	}
	b, err := json.Marshal(st)
	if err != nil {
		return err
	}
	return fsx.WriteFile(d.file(startFile), b, 0o600)
}

// Result is how the job ended; ok is false while it has not.
func (d *Dir) Result() (r job.Result, ok bool, err error) {
	b, err := os.ReadFile(d.file(resultFile))
	if errors.Is(err, fs.ErrNotExist) {
		return r, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return job.Result{}, false, fmt.Errorf("reading the result of job %s: %w", d.ID(), err)
	}
	return r, true, nil
}

// Remove removes the directory, its start first: a crash half-way leaves what
// At says is no job's, and SweepOld removes.
func (d *Dir) Remove() error {
	if err := os.Remove(d.file(startFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fsx.RemoveTree(d.path)
}

// SweepOld removes the directories that are no job's any more: without a
// start.json, unlocked, and unchanged since before. It returns those removed.
func (s *Store) SweepOld(before time.Time) (removed []string, err error) {
	ids, err := s.List()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, id := range ids {
		path := filepath.Join(s.root, id)
		fi, err := os.Stat(path)
		if err != nil || fi.ModTime().After(before) {
			continue
		}
		if _, err := At(path); !errors.Is(err, ErrNone) {
			continue
		}
		d := Dir{path}
		l, err := d.Lock()
		if err != nil {
			continue // a driver is still in there
		}
		err = fsx.RemoveTree(path)
		l.Close()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, id)
	}
	return slices.Clip(removed), errors.Join(errs...)
}

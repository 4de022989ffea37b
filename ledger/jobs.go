// Package ledger is what one host remembers: its job directories (Jobs), who may
// hold its memory and disk (Admissions), what jobs have been using (History), and
// what they reached (Egress).
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
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/supervise"
)

// Jobs are the job directories of one state directory.
type Jobs struct {
	dir    string
	egress *Egress // keeps what a removed directory had recorded
}

// Open returns the job directories below stateDir, which is made 0700 when
// missing.
func Open(stateDir string) (*Jobs, error) {
	dir, err := filepath.Abs(filepath.Join(stateDir, "jobs"))
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, fault.Newf(fault.System, "the state directory %s cannot be used", stateDir).
			Hint("name another one: --state-dir, VIRTKIT_STATE_DIR, or state_dir in config.toml").Because(err)
	}
	return &Jobs{dir: dir, egress: OpenEgress(filepath.Dir(dir))}, nil
}

// Dir is <state_dir>/jobs.
func (j *Jobs) Dir() string { return j.dir }

// Path is the directory of a job.
func (j *Jobs) Path(id string) string { return filepath.Join(j.dir, id) }

const (
	lockName  = ".lock"
	sweepName = ".sweep"
	maxID     = 128 // bytes of an id or name
)

// ValidName reports whether s may be an id or a name: [A-Za-z0-9._-], not
// beginning with a dot or dash.
func ValidName(s string) bool {
	if s == "" || len(s) > maxID || s[0] == '.' || s[0] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// GitLabID is the directory name of a GitLab job: its id and what of slug may
// be in a name.
func GitLabID(jobID int64, slug string) string {
	var b strings.Builder
	b.WriteString(strconv.FormatInt(jobID, 10))
	sep := true
	for _, c := range []byte(strings.ToLower(slug)) {
		if b.Len() >= 80 {
			break
		}
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' {
			if sep {
				b.WriteByte('-')
			}
			sep = false
			b.WriteByte(c)
			continue
		}
		sep = true
	}
	return b.String()
}

// Reservation is a job directory that is ours until its lock is closed or
// handed to supervise.Launch.
type Reservation struct {
	Spec supervise.Spec // as given, with ID and Name filled in
	Dir  string
	Lock *fsx.Lock
}

// Release removes the reserved directory; harmless after a Launch took the
// lock over.
func (r *Reservation) Release() error {
	if r.Lock == nil || r.Lock.File() == nil {
		return nil
	}
	defer r.Lock.Close()
	return supervise.RemoveJobDir(r.Dir)
}

// Reserve makes a directory for s. ID "" becomes a new "run-<8hex>"; Name ""
// becomes the ID. A name that a live guest has, or an ID that exists, is a
// fault.Conflict.
func (j *Jobs) Reserve(ctx context.Context, s supervise.Spec) (*Reservation, error) {
	for _, n := range []string{s.ID, s.Name} {
		if n != "" && !ValidName(n) {
			return nil, fault.Newf(fault.Usage, "%q cannot name a guest", n).
				Hint("use letters, digits, dot, dash and underscore, beginning with a letter or digit, at most %d", maxID)
		}
	}
	lock, err := fsx.AcquireLock(ctx, filepath.Join(j.dir, lockName), false)
	if err != nil {
		return nil, fmt.Errorf("reserving a name: %w", err)
	}
	defer lock.Close()
	fresh := s.ID == ""
	if err := j.nameFree(s.Name); err != nil {
		return nil, err
	}
	name := s.Name
	for try := 0; ; try++ {
		if fresh {
			s.ID = newID()
		}
		s.Name = cmp.Or(name, s.ID)
		l, err := supervise.Make(j.Path(s.ID), s)
		switch {
		case err == nil:
			return &Reservation{Spec: s, Dir: j.Path(s.ID), Lock: l}, nil
		case !errors.Is(err, fs.ErrExist):
			return nil, fault.Newf(fault.System, "no directory for a guest can be made in %s", j.dir).
				Hint("it needs space and permission to write; --state-dir or VIRTKIT_STATE_DIR name another place").Because(err)
		case !fresh || try == 10:
			return nil, fault.Newf(fault.Conflict, "there is a guest %s already", s.ID).
				Hint("`vk list` shows it, `vk stop %s` ends it", s.ID)
		}
	}
}

func newID() string {
	var b [4]byte
	rand.Read(b[:])
	return "run-" + hex.EncodeToString(b[:])
}

// nameFree looks for a live guest of that name or id.
func (j *Jobs) nameFree(name string) error {
	if name == "" {
		return nil
	}
	ids, _, err := j.scan()
	if err != nil {
		return err
	}
	for _, id := range ids {
		dir := j.Path(id)
		if !supervise.Locked(dir) {
			continue
		}
		s, err := supervise.ReadSpec(dir)
		if id == name || err == nil && s.Name == name {
			return fault.Newf(fault.Conflict, "a guest named %s runs already (%s)", name, id).
				Hint("choose another --name, or end it with `vk stop %s`", name)
		}
	}
	return nil
}

// scan lists the names that may be job directories, and the rest.
func (j *Jobs) scan() (ids, others []string, err error) {
	ents, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("listing jobs: %w", err)
	}
	for _, e := range ents {
		switch n := e.Name(); {
		case e.IsDir() && ValidName(n):
			ids = append(ids, n)
		case n == lockName || n == sweepName:
		default:
			others = append(others, n)
		}
	}
	return ids, others, nil
}

// Dead is the Status of a job whose supervisor is gone.
const Dead = "dead"

// Job is one line of `vk list --json`; the field names are stable.
type Job struct {
	ID      string              `json:"id"`
	Name    string              `json:"name"`
	Kind    string              `json:"kind"`
	Status  string              `json:"status"` // a supervise.Phase, or Dead
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

// Live reports whether the job has a supervisor, or somebody who is about to
// start one.
func (j Job) Live() bool { return j.Status != Dead && j.Status != string(supervise.Ended) }

// List returns all jobs, oldest first; problems are what could not be read,
// each naming its file.
func (j *Jobs) List(ctx context.Context) (jobs []Job, problems []error, err error) {
	ids, others, err := j.scan()
	if err != nil {
		return nil, nil, err
	}
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return jobs, problems, context.Cause(ctx)
		}
		job, err := j.read(id)
		switch {
		case errors.Is(err, fs.ErrNotExist) && !exists(j.Path(id)): // ended meanwhile
		case err != nil:
			problems = append(problems, err)
		default:
			jobs = append(jobs, job)
		}
	}
	for _, n := range others {
		if !strings.HasPrefix(n, supervise.NewPrefix) && !strings.HasPrefix(n, supervise.DeadPrefix) {
			problems = append(problems, fmt.Errorf("%s is no job directory", filepath.Join(j.dir, n)))
		}
	}
	slices.SortStableFunc(jobs, func(a, b Job) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	return jobs, problems, nil
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// read makes a Job of a directory. state.json is as fresh as the last change
// of phase, which is all that a list shows.
func (j *Jobs) read(id string) (Job, error) {
	dir := j.Path(id)
	spec, err := supervise.ReadSpec(dir)
	if err != nil {
		return Job{}, err
	}
	// The lock first: a state read after it is not older than the lock's
	// holder.
	live := supervise.Locked(dir)
	st, err := supervise.ReadState(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Job{}, err
	}
	job := Job{
		ID: id, Name: spec.Name, Kind: spec.Kind, Status: string(supervise.Starting),
		Image: spec.Image.Ref, Digest: spec.Image.Digest, Created: spec.Created,
		CPUs: spec.CPUs, MemMiB: spec.MemMiB, Keep: spec.Keep, Dir: dir,
	}
	if err == nil {
		job.Status, job.Stage, job.Since = string(st.Phase), st.Stage, st.Since
		job.Accel, job.Kernel, job.Addr, job.Publish = st.Accel, st.Kernel, st.Addr, st.Publish
		job.PID, job.VMMPID, job.Boots, job.BootMS, job.Exit = st.PID, st.VMMPID, st.Boots, st.BootMS, st.Exit
	}
	if !live {
		job.PID, job.VMMPID = 0, 0
		if job.Exit == nil {
			job.Status = Dead
		}
	}
	return job, nil
}

// Find returns the job with this id or, among the live ones, this name (or a
// unique prefix of an id). fault.NotFound names what exists.
func (j *Jobs) Find(ctx context.Context, idOrName string) (Job, error) {
	jobs, _, err := j.List(ctx)
	if err != nil {
		return Job{}, err
	}
	var named, prefixed, old []Job
	var known []string
	for _, job := range jobs {
		switch {
		case job.ID == idOrName:
			return job, nil
		case job.Name == idOrName && job.Live():
			named = append(named, job)
		case job.Name == idOrName:
			old = append(old, job)
		case idOrName != "" && strings.HasPrefix(job.ID, idOrName):
			prefixed = append(prefixed, job)
		}
		known = append(known, job.Name)
	}
	switch {
	case len(named) > 0:
		return named[0], nil
	case len(old) > 0:
		return old[len(old)-1], nil
	case len(prefixed) == 1:
		return prefixed[0], nil
	case len(prefixed) > 1:
		return Job{}, fault.Newf(fault.Usage, "%q is the beginning of %d guests' ids", idOrName, len(prefixed)).
			Hint("`vk list` shows them")
	}
	e := fault.Newf(fault.NotFound, "there is no guest %q", idOrName)
	if len(known) == 0 {
		return Job{}, e.Hint("no guest runs; `vk run` starts one")
	}
	return Job{}, e.Hint("there are: %s", strings.Join(known, ", "))
}

// Remove kills what a dead job left and removes its directory, whose egress
// record it keeps. fault.Conflict when its supervisor lives; no error when there
// is no such directory; fault.Partial when it is gone, and the record too.
func (j *Jobs) Remove(ctx context.Context, id string) error {
	if !ValidName(id) {
		return fault.Newf(fault.Usage, "%q is no guest's id", id)
	}
	dir := j.Path(id)
	fi, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return j.removeRest(id)
	}
	if err != nil {
		return err
	}
	if !fi.IsDir() {
		return fault.Newf(fault.System, "%s is no directory", dir)
	}
	lock, err := supervise.TakeOver(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return j.removeRest(id)
	case errors.Is(err, fsx.ErrLocked):
		return fault.Newf(fault.Conflict, "guest %s still runs", id).Hint("`vk stop %s` ends it", id).Because(err)
	case err != nil:
		return err
	}
	defer lock.Close()
	if _, err := supervise.KillLeftover(ctx, dir); err != nil {
		return err
	}
	kept := j.egress.keepOf(dir)
	if err := supervise.RemoveJobDir(dir); err != nil {
		return err
	}
	if err := j.removeRest(id); err != nil {
		return err
	}
	return kept
}

// removeRest ends the removals of a job's directory whose process was killed.
// One that is still at it holds the directory's lock, and goes on.
func (j *Jobs) removeRest(id string) error {
	ents, err := os.ReadDir(j.dir)
	if err != nil {
		return fmt.Errorf("listing jobs: %w", err)
	}
	for _, e := range ents {
		rest, ok := strings.CutPrefix(e.Name(), supervise.DeadPrefix+id+"-")
		if _, err := hex.DecodeString(rest); !ok || err != nil || len(rest) != 2*4 || !e.IsDir() {
			continue
		}
		path := filepath.Join(j.dir, e.Name())
		lock, err := tryExisting(path)
		switch {
		case errors.Is(err, fsx.ErrLocked):
			continue
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		}
		err = fsx.RemoveTree(path)
		lock.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fsx"
)

// Record is a job that was taken, as a runner's state file keeps it. What is
// set tells how far the job has come; each step is on disk before what follows
// from it is done. It holds the job's token, and until the hub has taken the
// job its whole spec.
type Record struct {
	ID        int64     `json:"job_id"`
	Token     string    `json:"token"`
	TakenAt   time.Time `json:"taken_at"`
	RequestID string    `json:"request_id"` // of the submission

	DebugTrace bool     `json:"debug_trace,omitempty"`
	Timestamps bool     `json:"timestamps"`
	Reasons    []string `json:"failure_reasons,omitempty"`
	Project    string   `json:"project,omitempty"` // path and ID, for texts and the log
	Head       []byte   `json:"head,omitempty"`    // what the trace has before the hub's output

	// Submission is there until the hub took it, or it was given up.
	Submission *dispatch.JobSubmission `json:"submission,omitempty"`
	HubJob     string                  `json:"hub_job,omitempty"`
	Committed  bool                    `json:"committed,omitempty"` // GitLab was told that the job runs
	// End is how the job ended when it is the relay that says so, or what the
	// relay adds to how the hub says it ended.
	End *End `json:"end,omitempty"`
	// Reported: GitLab has the outcome, or wants none. The job is to be settled.
	Reported bool `json:"reported,omitempty"`
}

// End is how a job ended, with what the relay appends to its trace.
type End struct {
	Failure  job.Failure `json:"failure"`
	ExitCode int         `json:"exit_code,omitempty"`
	Tail     []byte      `json:"tail,omitempty"`
	Unmapped bool        `json:"unmapped,omitempty"` // the reason is sent as it is
}

// stateVersion is of the file's format. Fields are only ever added.
const stateVersion = 1

type stateFile struct {
	Version int       `json:"version"`
	Relay   string    `json:"relay"`
	Hub     string    `json:"hub"`
	Jobs    []*Record `json:"jobs"`
}

// maxState is more than any state file has.
const maxState = 256 << 20

// StatePath is a runner's state file.
func StatePath(stateDir, runner string) string { return filepath.Join(stateDir, runner+".json") }

// readState reads a state file; one that is not there is empty.
func readState(path string) (*stateFile, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &stateFile{Version: stateVersion}, nil
	}
	if err != nil {
		return nil, err
	}
	if info.Size() > maxState {
		return nil, fault.Newf(fault.System, "%s has %d bytes, which is more than a state file has", path, info.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var f stateFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fault.Newf(fault.System, "%s is no state file of vk-gitlab: %s", path, plainError(err)).
			Hint("its jobs are lost; move it away to go on without them: GitLab ends them by its own timeout")
	}
	if f.Version != stateVersion {
		return nil, fault.Newf(fault.System, "%s has version %d, this vk-gitlab knows version %d", path, f.Version, stateVersion).
			Hint("a newer vk-gitlab wrote it: use that one")
	}
	for i, r := range f.Jobs {
		if r == nil || r.ID <= 0 {
			return nil, fault.Newf(fault.System, "%s: entry %d of jobs is no job: it has no job_id", path, i+1).
				Hint("take the entry out, or move the file away to go on without its jobs: GitLab ends them by its own timeout")
		}
	}
	return &f, nil
}

// HeldJobs counts the jobs that the state files below a state dir hold, by
// file. A file that cannot be read counts as one that holds some.
func HeldJobs(stateDir string) (map[string]int, error) {
	entries, err := os.ReadDir(stateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") || e.IsDir() {
			continue
		}
		f, err := readState(filepath.Join(stateDir, e.Name()))
		if err != nil {
			return nil, err
		}
		if len(f.Jobs) > 0 {
			out[e.Name()] = len(f.Jobs)
		}
	}
	return out, nil
}

// store is one runner's state file. Its methods return once the change is on
// disk.
type store struct {
	path string
	// writing is told before each write and after it, in tests.
	writing func(done bool)

	mu sync.Mutex
	f  *stateFile
}

// openStore reads a runner's state file for a relay. One that holds jobs of
// another relay is refused: its hub answers not_found for them to this one.
func openStore(stateDir, runner string, e *Enrollment) (*store, error) {
	path := StatePath(stateDir, runner)
	f, err := readState(path)
	if err != nil {
		return nil, err
	}
	if len(f.Jobs) > 0 && (f.Relay != e.Relay || f.Hub != e.Hub) {
		return nil, fault.Newf(fault.Conflict, "%s holds %d jobs of relay %s, and this is relay %s", path, len(f.Jobs), orNone(f.Relay), e.Relay).
			Hint("let the enrollment that took them finish them; removing the file gives them up to GitLab's timeout")
	}
	f.Relay, f.Hub = e.Relay, e.Hub
	return &store{path: path, f: f}, nil
}

func orNone(s string) string {
	if s == "" {
		return "(none: of before relays)"
	}
	return s
}

// records are copies of all.
func (s *store) records() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Record, 0, len(s.f.Jobs))
	for _, r := range s.f.Jobs {
		out = append(out, *r)
	}
	return out
}

func (s *store) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.f.Jobs)
}

// put adds a record, or replaces the one of the same job.
func (s *store) put(r Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := slices.Clone(s.f.Jobs)
	if i := s.indexLocked(r.ID); i >= 0 {
		next[i] = &r
	} else {
		next = append(next, &r)
	}
	return s.writeLocked(next)
}

// drop takes a record out.
func (s *store) drop(id int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.indexLocked(id)
	if i < 0 {
		return nil
	}
	return s.writeLocked(slices.Delete(slices.Clone(s.f.Jobs), i, i+1))
}

func (s *store) has(id int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.indexLocked(id) >= 0
}

func (s *store) indexLocked(id int64) int {
	return slices.IndexFunc(s.f.Jobs, func(r *Record) bool { return r.ID == id })
}

// writeLocked makes jobs the file's. When the write fails the old ones stand.
func (s *store) writeLocked(jobs []*Record) error {
	f := *s.f
	f.Jobs = jobs
	if f.Jobs == nil {
		f.Jobs = []*Record{}
	}
	b, err := json.Marshal(&f)
	if err != nil {
		return err
	}
	if s.writing != nil {
		s.writing(false)
	}
	if err := fsx.WriteFile(s.path, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("keeping the jobs that were taken: %w", err)
	}
	s.f = &f
	if s.writing != nil {
		s.writing(true)
	}
	return nil
}

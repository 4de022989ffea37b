package nodehost

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"slices"
	"strconv"
	"sync"
	"time"

	"virtkit/core/fleet/wire"
	"virtkit/core/proctree"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// WorkloadID is the id of the guest with that directory.
func WorkloadID(stateDir string) string {
	sum := sha256.Sum256([]byte(stateDir))
	return hex.EncodeToString(sum[:8])
}

// Running is a workload and the process that its memory is measured by.
type Running struct {
	wire.Workload
	Start uint64 // of PID, in clock ticks since boot
}

// Workloads are the guests that run now, unbounded (wire.BoundWorkloads), and
// what their processes are. Only what runs is read. An error means that the list
// may lack some.
func (h *Host) Workloads(ctx context.Context) (list []Running, problems []error, err error) {
	claims, guests, err := h.jobs(ctx, func(err error) { problems = append(problems, err) })
	list, more := h.workloads(claims, guests)
	return list, append(problems, more...), err
}

// Memory is the host memory of each of them by its id, in bytes, measured at
// the host's cadence.
func (h *Host) Memory(ctx context.Context, list []Running) map[string]int64 {
	return h.meter.Read(ctx, list)
}

// Plain are the workloads alone.
func Plain(list []Running) []wire.Workload {
	out := make([]wire.Workload, 0, len(list))
	for _, r := range list {
		out = append(out, r.Workload)
	}
	return out
}

func (h *Host) workloads(claims []Claim, guests []Guest) (out []Running, problems []error) {
	reserved := map[string]int64{}
	for _, c := range claims {
		reserved[c.ID] = c.Granted.MemMiB
	}
	for _, g := range guests {
		if !g.Live {
			continue
		}
		w := Running{Start: g.Start, Workload: wire.Workload{
			ID: WorkloadID(g.Dir), Kind: wire.KindRun, Image: g.Image, PID: g.PID,
			CPUs: g.CPUs, Reserved: int64(g.MemMiB) << 20, Started: g.Created.Unix(), StateDir: g.Dir,
		}}
		if g.Kind == GitLab {
			w.Kind = wire.KindJob
			if err := ofJob(&w.Workload, g); err != nil {
				problems = append(problems, err)
			}
			if mib := reserved[g.ID]; mib > 0 {
				w.Reserved = mib << 20
			}
		}
		// The process may have ended since, and its number be another's.
		if w.PID != 0 && !(supervise.Owner{PID: w.PID, Start: g.Start}).Alive() {
			w.PID, w.Start = 0, 0
		}
		out = append(out, w)
	}
	slices.SortFunc(out, func(a, b Running) int {
		return cmp.Or(cmp.Compare(a.Started, b.Started), cmp.Compare(a.ID, b.ID))
	})
	return out, problems
}

// ofJob fills in what the job's record says; a job that has none yet is its id
// alone, and so is one whose record cannot be read, which is the error.
//
// Only a placed job gets a link: everything that would name the GitLab of a job
// that the host's own gitlab-runner took (CI_SERVER_URL, CI_JOB_URL) is a
// variable that the job can set, so that it could point its link anywhere.
func ofJob(w *wire.Workload, g Guest) error {
	rec, err := runner.ReadRecord(g.Dir)
	if err != nil {
		w.JobID = digits(g.ID)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	w.Project, w.Job, w.JobURL = rec.Project, rec.Name, rec.Page
	if rec.JobID > 0 {
		w.JobID = strconv.FormatInt(rec.JobID, 10)
	}
	w.Image = cmp.Or(rec.Image, w.Image)
	return nil
}

// digits are those that a directory's name begins with: GitLab's job id.
func digits(s string) string {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return s[:i]
		}
	}
	return s
}

// DefaultMemEvery is [node] workload_mem_secs when it is not set.
const DefaultMemEvery = 30 * time.Second

// Meter measures guests' memory on the host. Reading it walks every page table
// of every process, so a guest is measured as it appears, and all of them each
// period; in between, and while a new figure is within a sixteenth of the last,
// the last figures repeat.
type Meter struct {
	every   time.Duration
	now     func() time.Time
	measure func(pid int) (int64, error)

	mu   sync.Mutex
	last time.Time
	have map[string]metered
}

type metered struct {
	pid   int
	start uint64
	bytes int64
	known bool
}

// NewMeter makes a meter; every 0 is DefaultMemEvery, a nil measure is
// proctree.Resident.
func NewMeter(every time.Duration, now func() time.Time, measure func(pid int) (int64, error)) *Meter {
	if every <= 0 {
		every = DefaultMemEvery
	}
	if measure == nil {
		measure = proctree.Resident
	}
	return &Meter{every: every, now: now, measure: measure, have: map[string]metered{}}
}

// Read is the figures of those guests, by their ids; of one that cannot be
// measured there is none.
func (m *Meter) Read(ctx context.Context, list []Running) map[string]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	// A clock that was moved back must not stop the measuring.
	all := m.last.IsZero() || now.Sub(m.last) >= m.every || now.Before(m.last)
	if all {
		m.last = now
	}
	next := map[string]metered{}
	out := map[string]int64{}
	for _, w := range list {
		old, seen := m.have[w.ID]
		if seen && (old.pid != w.PID || old.start != w.Start) {
			old, seen = metered{}, false // another boot of it
		}
		cur := old
		if w.PID != 0 && (all || !seen) && ctx.Err() == nil {
			cur = metered{pid: w.PID, start: w.Start}
			n, err := m.measure(w.PID)
			if errors.Is(err, fs.ErrNotExist) {
				continue // it ended
			}
			if err == nil {
				cur.bytes, cur.known = n, true
			}
			if seen && old.known && cur.known && near(old.bytes, n) {
				cur.bytes = old.bytes
			}
		}
		next[w.ID] = cur
		if cur.known {
			out[w.ID] = cur.bytes
		}
	}
	m.have = next
	return out
}

// near says whether a figure is within a sixteenth of the one before.
func near(before, now int64) bool {
	d := now - before
	if d < 0 {
		d = -d
	}
	return d <= before/16
}

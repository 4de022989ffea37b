package usage

import (
	"fmt"
	"slices"
	"time"
)

// How much of a job's past counts.
const (
	// Window is how old a run may be. It is in days and not in runs, because
	// what changes a job's appetite changes with the calendar.
	Window = 14 * 24 * time.Hour
	// Fewest is how many runs count however old they are, for a job too quiet
	// to have as many inside the window.
	Fewest = 5
	// MaxRuns is how many runs of a job are remembered.
	MaxRuns = 1000
	// MinReserveMiB is the least that is reserved from a history.
	MinReserveMiB = 512
)

// Run is one remembered run.
type Run struct {
	ID    string    `json:"id"` // of the job's directory: a run is remembered once
	Ended time.Time `json:"ended"`
	// CeilingMiB is the memory that the run's guests had together. Runs under
	// another ceiling say nothing about this one.
	CeilingMiB int64 `json:"ceiling_mib"`
	Figures
	JobDir *int64 `json:"job_dir,omitempty"` // bytes that its directory held at the end
	Inodes *int64 `json:"inodes,omitempty"`  // likewise
	// Images are the digests of what it booted.
	Images []string `json:"images,omitempty"`
}

// Job is what is remembered of one job of a project.
type Job struct {
	Name string // as written
	Runs []Run  // oldest first
}

// Add remembers another run: in its place by time, once by its ID, and at most
// MaxRuns of them.
func (j *Job) Add(r Run) {
	j.Runs = slices.DeleteFunc(j.Runs, func(o Run) bool { return o.ID == r.ID && r.ID != "" })
	j.Runs = append(j.Runs, r)
	slices.SortStableFunc(j.Runs, func(a, b Run) int { return a.Ended.Compare(b.Ended) })
	if n := len(j.Runs) - MaxRuns; n > 0 {
		j.Runs = j.Runs[n:]
	}
}

// Last is the latest run.
func (j Job) Last() (Run, bool) {
	if len(j.Runs) == 0 {
		return Run{}, false
	}
	return j.Runs[len(j.Runs)-1], true
}

// Lately are the largest figures of the runs that count, each its own maximum.
type Lately struct {
	Runs       int // 0 = the job is not known
	CeilingMiB int64
	Memory     int64
	Overlay    *Overlay // the fullest
	JobDir     *int64
	Inodes     *int64
	IO         *IO
	Net        *Net
}

// Lately looks at the runs under a ceiling.
func (j Job) Lately(now time.Time, ceilingMiB int64) Lately {
	l := Lately{CeilingMiB: ceilingMiB}
	var same []Run
	recent := 0
	for _, r := range j.Runs {
		if r.CeilingMiB == ceilingMiB {
			same = append(same, r)
			if now.Sub(r.Ended) <= Window {
				recent++
			}
		}
	}
	for _, r := range same[max(0, len(same)-max(recent, Fewest)):] {
		l.Runs++
		l.Memory = max(l.Memory, r.Memory)
		l.JobDir, l.Inodes = larger(l.JobDir, r.JobDir), larger(l.Inodes, r.Inodes)
		if o := r.Overlay; o != nil && (l.Overlay == nil || o.Used > l.Overlay.Used) {
			l.Overlay = new(*o)
		}
		if r.IO != nil {
			if l.IO == nil {
				l.IO = new(IO)
			}
			l.IO.Read, l.IO.Written = max(l.IO.Read, r.IO.Read), max(l.IO.Written, r.IO.Written)
		}
		if r.Net != nil {
			if l.Net == nil {
				l.Net = new(Net)
			}
			l.Net.Sent, l.Net.Received = max(l.Net.Sent, r.Net.Sent), max(l.Net.Received, r.Net.Received)
		}
	}
	return l
}

func larger(a, b *int64) *int64 {
	if a == nil || b != nil && *b > *a {
		return b
	}
	return a
}

// headroom is a figure and a quarter.
func headroom(n int64) int64 { return n + (n+3)/4 }

// ReserveMiB is the memory to reserve for the next run; false when the job is
// not known under this ceiling and its declared size has to do.
func (l Lately) ReserveMiB() (int64, bool) {
	if l.Runs == 0 {
		return l.CeilingMiB, false
	}
	mib := (headroom(l.Memory) + 1<<20 - 1) >> 20
	return min(max(mib, MinReserveMiB), l.CeilingMiB), true
}

// Disk is what the next run's directory is expected to hold, in bytes and
// inodes, as far as that is known.
func (l Lately) Disk() (bytes, inodes int64, ok bool) {
	if l.JobDir == nil {
		return 0, 0, false
	}
	if l.Inodes != nil {
		inodes = headroom(*l.Inodes)
	}
	return headroom(*l.JobDir), inodes, true
}

// ReservingLine says that a job is admitted by its history.
func ReservingLine(reserveMiB, declaredMiB int64) string {
	return fmt.Sprintf("reserving %d MiB from what this job has been using (it declares %d MiB)", reserveMiB, declaredMiB)
}

// Line tells at a job's end where it stands. reserving says that the host
// reserves by history.
func (l Lately) Line(reserving bool) string {
	s := fmt.Sprintf("most this job has used lately: memory %s%s over %d %s", Size(l.Memory), moved(l.Overlay, l.JobDir, l.IO, l.Net),
		l.Runs, plural(l.Runs, "run"))
	if mib, ok := l.ReserveMiB(); ok && reserving {
		s += "; the next run reserves " + Size(mib<<20)
	}
	return s
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

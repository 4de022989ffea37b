// Package tune makes gitlab-runner's `concurrent` follow the host. It has two
// halves, split along a line of privilege.
//
// Decide (for `vk tune`, and a node) works out how many jobs fit and writes the
// number to a file of the runner's user. Control (for vk-runnerctl, as root)
// reads that number, holds it within the administrator's range and edits one
// line of config.toml. The second half takes nothing from the first but a
// number: whoever owns the runner's user can ask for a concurrency that an
// administrator has allowed, and for no more.
//
// The number is cheap to get wrong: it decides what the runner accepts, never
// what is committed, which admission (core/admit) does.
package tune

import (
	"fmt"
	"slices"
	"strings"
)

// Input is what a decision is made of. Memory is in MiB.
type Input struct {
	Budget    int64 // of all guests together; 0 = there is none
	Committed int64 // of it, to the jobs that run
	Running   int   // jobs
	Typical   int64 // what a job on this host typically reserves
	Total     int64 // of the host; 0 = it cannot be read
	Available int64 // of the host
	Last      int   // number that was written last; 0 = none
	// Ceilings hold the number down: [executor.schedule] max_concurrency, a
	// hub's. 0 = none.
	Ceilings []int
}

// headroom is the part of a host's memory that is kept free, in percent.
const headroom = 15

// Decision is a number and how it came about.
type Decision struct {
	Concurrency int
	Estimate    int // 0 = there is no budget to estimate by
	Ceiling     int // 0 = none
	in          Input
}

// Decide makes a decision. ok is false when there is neither a budget nor a
// ceiling, and so nothing to decide.
//
// The estimate is the jobs that run and as many typical ones as both the budget
// and the host have room for. It falls at once and rises by one at a time,
// because a job that has just begun has not reached its size. Below the
// headroom nothing is added to what runs.
func Decide(in Input) (d Decision, ok bool) {
	d.in = in
	for _, c := range in.Ceilings {
		if c > 0 && (d.Ceiling == 0 || c < d.Ceiling) {
			d.Ceiling = c
		}
	}
	if in.Budget > 0 {
		typical := max(in.Typical, 1)
		room := max(0, in.Budget-in.Committed) / typical
		if in.Total > 0 {
			room = min(room, max(0, in.Available-in.Total*headroom/100)/typical)
		}
		last := in.Last
		if last <= 0 {
			last = in.Running
		}
		d.Estimate = max(1, min(in.Running+int(min(room, 1<<20)), last+1))
	}
	switch {
	case d.Estimate == 0 && d.Ceiling == 0:
		return d, false
	case d.Estimate == 0:
		d.Concurrency = d.Ceiling
	case d.Ceiling == 0:
		d.Concurrency = d.Estimate
	default:
		d.Concurrency = min(d.Estimate, d.Ceiling)
	}
	return d, true
}

// Line tells a decision.
func (d Decision) Line() string {
	word := func(n int) string {
		if n == 0 {
			return "none"
		}
		return fmt.Sprint(n)
	}
	in := d.in
	var b strings.Builder
	fmt.Fprintf(&b, "virtkit: runner concurrency %d (estimate %s, ceiling %s); ", d.Concurrency, word(d.Estimate), word(d.Ceiling))
	if in.Budget > 0 {
		fmt.Fprintf(&b, "%d of %d MiB committed by %d job(s), typical job %d MiB, ", in.Committed, in.Budget, in.Running, in.Typical)
	} else {
		fmt.Fprintf(&b, "no memory budget, %d job(s), ", in.Running)
	}
	if in.Total > 0 {
		fmt.Fprintf(&b, "%d of %d MiB host memory available", in.Available, in.Total)
	} else {
		b.WriteString("host memory unreadable")
	}
	return b.String()
}

// Typical is the median of what jobs reserved; 0 of none.
func Typical(mib []int64) int64 {
	if len(mib) == 0 {
		return 0
	}
	s := slices.Clone(mib)
	slices.Sort(s)
	return s[len(s)/2]
}

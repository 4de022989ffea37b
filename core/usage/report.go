package usage

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Project is what is remembered of a project's jobs.
type Project struct {
	Name string // <id>-<slug>
	Jobs []Job
}

// ReportJob is one line of a Report.
type ReportJob struct {
	Name        string   `json:"job"`
	Memory      int64    `json:"memory"`
	Overlay     *Overlay `json:"overlay,omitempty"`
	JobDir      *int64   `json:"job_dir,omitempty"`
	CeilingMiB  int64    `json:"ceiling_mib"`
	ReservesMiB int64    `json:"reserves_mib"`
	Runs        int      `json:"runs"`
	IO          *IO      `json:"io,omitempty"`
	Net         *Net     `json:"net,omitempty"`
}

// Report is what a project's jobs have been using lately, heaviest first.
type Report struct {
	Project     string      `json:"project"`
	Jobs        []ReportJob `json:"jobs"`
	ReservesMiB int64       `json:"reserves_mib"` // of all, were they to run at once
	BudgetMiB   int64       `json:"budget_mib"`   // 0 = the host sets none
}

// Report sums a project up. fromHistory says that the host reserves by history,
// else each job's next run claims its declared size.
func (p Project) Report(now time.Time, fromHistory bool, budgetMiB int64) Report {
	r := Report{Project: p.Name, Jobs: []ReportJob{}, BudgetMiB: budgetMiB}
	for _, j := range p.Jobs {
		last, ok := j.Last()
		if !ok {
			continue
		}
		l := j.Lately(now, last.CeilingMiB)
		line := ReportJob{Name: j.Name, Memory: l.Memory, Overlay: l.Overlay, JobDir: l.JobDir, CeilingMiB: l.CeilingMiB,
			ReservesMiB: l.CeilingMiB, Runs: l.Runs, IO: l.IO, Net: l.Net}
		if fromHistory {
			line.ReservesMiB, _ = l.ReserveMiB()
		}
		r.ReservesMiB += line.ReservesMiB
		r.Jobs = append(r.Jobs, line)
	}
	slices.SortStableFunc(r.Jobs, func(a, b ReportJob) int {
		return cmp.Or(cmp.Compare(b.Memory, a.Memory), cmp.Compare(a.Name, b.Name))
	})
	return r
}

// Lines are the report for people, without the prefix that a trace puts before
// its own lines: the first and the last are such lines, those between are the
// table's.
func (r Report) Lines() (first string, table []string, last string) {
	first = r.Project + " — what its jobs have been using lately:"
	rows := [][]string{{"job", "memory", "overlay", "job dir", "ceiling", "reserves", "runs", "read", "written", "sent", "received"}}
	for _, j := range r.Jobs {
		row := []string{clean(j.Name), Size(j.Memory), "-", "-", Size(j.CeilingMiB << 20), Size(j.ReservesMiB << 20), strconv.Itoa(j.Runs), "-", "-", "-", "-"}
		if o := j.Overlay; o != nil {
			row[2] = Size(o.Used) + " / " + Size(o.Size)
		}
		if j.JobDir != nil {
			row[3] = Size(*j.JobDir)
		}
		if j.IO != nil {
			row[7], row[8] = Size(j.IO.Read), Size(j.IO.Written)
		}
		if j.Net != nil {
			row[9], row[10] = Size(j.Net.Sent), Size(j.Net.Received)
		}
		rows = append(rows, row)
	}
	table = align(rows)
	n := len(r.Jobs)
	last = fmt.Sprintf("%d %s; all at once they would reserve %s", n, plural(n, "job"), Size(r.ReservesMiB<<20))
	if r.BudgetMiB > 0 {
		last += ", against a budget of " + Size(r.BudgetMiB<<20)
	}
	return first, table, last
}

// align sets the first column to the left and the others to the right.
func align(rows [][]string) []string {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, s := range row {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	var out []string
	for _, row := range rows {
		var b strings.Builder
		for i, s := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(s))
			b.WriteString("  ")
			if i == 0 {
				b.WriteString(s + pad)
			} else {
				b.WriteString(pad + s)
			}
		}
		out = append(out, b.String())
	}
	return out
}

// clean keeps a job's name, which its project chose, on its line.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
}

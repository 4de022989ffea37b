package hubtext

import (
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hubadmin"
)

func Placement(p *dispatch.Placement) string {
	s := fmt.Sprintf("pool %s, %s, %d CPUs", p.Pool, Bytes(p.Envelope.Memory), p.Envelope.CPUs)
	if p.Envelope.Disk > 0 {
		s += ", " + Bytes(p.Envelope.Disk) + " of disk"
	}
	if len(p.Labels) > 0 {
		s += ", labels " + strings.Join(p.Labels, " ")
	}
	return s
}

func JobState(j *hubadmin.Job) string {
	switch {
	case j.Outcome != "":
		return j.Outcome
	case j.Cancel != "":
		return string(j.State) + ", canceling"
	case j.State == dispatch.Running && j.Stage != "":
		return "running " + j.Stage
	}
	return string(j.State)
}

func span(secs int64) string { return (time.Duration(secs) * time.Second).String() }

func ran(j *hubadmin.Job, now time.Time) string {
	switch {
	case j.Accepted == 0:
		return "-"
	case j.Finished > 0:
		return span(j.Finished - j.Accepted)
	}
	return span(now.Unix() - j.Accepted)
}

func peak(j *hubadmin.Job) string {
	if j.Result == nil || j.Result.Usage == nil || j.Result.Usage.PeakMem == nil {
		return "-"
	}
	return Bytes(*j.Result.Usage.PeakMem)
}

func whatText(j *hubadmin.Job) string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s (job %d of %s)", j.What.Path, j.What.Ref, j.What.Name, j.What.GitLabJob, j.What.Instance))
}

// eventsText is each kind of event and how many times it was.
func eventsText(j *hubadmin.Job) string {
	if j.Result == nil || len(j.Result.Events) == 0 {
		return "-"
	}
	var out []string
	for _, e := range j.Result.Events {
		out = append(out, fmt.Sprintf("%s ×%d", e.Kind, e.Count))
	}
	return strings.Join(out, ", ")
}

func nodeText(j *hubadmin.Job) string {
	if j.Node == "" {
		return "-"
	}
	if j.NodeName != "" {
		return j.NodeName
	}
	return j.Node[:8]
}

// JobHeads are the columns of a table of jobs.
var JobHeads = []string{"ID", "OF", "POOL", "STATE", "NODE", "OUTPUT", "AGE", "RAN", "PEAK MEM", "EVENTS", "WHAT"}

// JobRow is a job's cells. A project may have put anything into them.
func JobRow(j *hubadmin.Job, now time.Time) []string {
	return []string{j.ID, j.Owner, j.Placement.Pool, JobState(j), nodeText(j), Bytes(j.OutputLen), units.HumanDuration(now.Sub(time.Unix(j.Submitted, 0))), ran(j, now), peak(j), eventsText(j), whatText(j)}
}

// Field is one line of a record.
type Field struct{ Key, Text string }

// JobFields are what is told of one job, but for its spec and its output.
func JobFields(j *hubadmin.Job, now time.Time) (fields []Field) {
	row := func(k, format string, args ...any) {
		fields = append(fields, Field{k, fmt.Sprintf(format, args...)})
	}
	row("job", "%s", j.ID)
	row("state", "%s", JobState(j))
	if r := j.Result; r != nil {
		if r.ExitCode != nil {
			row("exit code", "%d", *r.ExitCode)
		}
		if r.Message != "" {
			row("message", "%s", r.Message)
		}
		for _, u := range r.Artifacts {
			row("artifact", "%s: %s", Dash(u.Name), u.Outcome)
		}
	}
	row("what", "%s", whatText(j))
	if j.What.GitLabJob > 0 {
		row("page", "%s/%s/-/jobs/%d", j.What.URL, j.What.Path, j.What.GitLabJob)
	}
	row("commit", "%s", Dash(j.What.SHA))
	row("node", "%s", strings.TrimSpace(Dash(j.Node)+" "+j.NodeName))
	row("placement", "%s", Placement(&j.Placement))
	row("of", "%s, runner %s", j.Owner, Dash(j.What.Runner))
	row("submitted", "%s", Stamp(j.Submitted))
	row("started", "%s", Stamp(j.Accepted))
	row("finished", "%s", Stamp(j.Finished))
	row("settled", "%s", Stamp(j.Settled))
	row("ran", "%s", ran(j, now))
	if j.Guest != nil {
		row("VM", "%d CPUs, %s", j.Guest.CPUs, Bytes(j.Guest.MemMiB<<20))
	}
	if j.Result != nil && j.Result.Usage != nil {
		u := j.Result.Usage
		cpu := "-"
		if u.CPUMS != nil {
			cpu = (time.Duration(*u.CPUMS) * time.Millisecond).String()
		}
		row("used", "%v wall, %s CPU, %s peak memory, VM of %d CPUs and %s", time.Duration(u.WallMS)*time.Millisecond, cpu, peak(j), u.CPUs, Bytes(u.MemMiB<<20))
	}
	if r := j.Result; r != nil {
		for _, e := range r.Events {
			row("event", "%s ×%d, first %s: %s", e.Kind, e.Count, Stamp(e.At), Dash(e.First))
		}
	}
	egressRows(j, row)
	row("output", "%d bytes", j.OutputLen)
	return fields
}

package relay

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/trace"
)

// The texts that a relay itself puts into a trace. They look like
// gitlab-runner's own lines: stream 00, stdout, with a timestamp unless the job
// has those switched off.

const (
	red   = "\x1b[31;1m"
	reset = "\x1b[0;m"
	plain = "\x1b[0K"
)

// stamped writes lines as the runner's stream.
func stamped(text string, stamps bool, now time.Time) []byte {
	var b bytes.Buffer
	t := trace.New(&b, trace.Options{Timestamps: stamps, Clock: func() time.Time { return now }})
	s := t.Stream(0, trace.Stdout)
	s.Write([]byte(text)) // a bytes.Buffer takes everything
	s.Close()
	t.Close()
	return b.Bytes()
}

// headLines begin a trace.
func headLines(lines []string, stamps bool, now time.Time) []byte {
	if len(lines) == 0 {
		return nil
	}
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(plain + strings.ReplaceAll(l, "\n", " ") + reset + "\n")
	}
	return stamped(b.String(), stamps, now)
}

// errorLines end a trace.
func errorLines(text string, stamps bool, now time.Time) []byte {
	return stamped(red+"ERROR: "+text+reset+"\n", stamps, now)
}

// endOf is how a job ends that was refused before the hub had it.
func (r *refusal) end(stamps bool, now time.Time) *End {
	e := &End{Failure: r.failure, ExitCode: r.exit}
	switch {
	case r.plain:
		e.Tail = []byte(r.text)
	case r.failure == job.System:
		e.Tail = errorLines("Job failed (system failure): "+r.text, stamps, now)
	default:
		e.Tail = errorLines(r.text, stamps, now)
	}
	return e
}

// refusedBy is what a hub's refusal of a submission does to the job.
func refusedBy(err error, rec *Record, hub, instance string) *refusal {
	e := codeOf(err)
	switch e {
	case dispatch.ApprovalPending:
		return &refusal{failure: job.Configuration, text: fmt.Sprintf("project %s is waiting for approval on the fleet hub %s.\n"+
			"Retry this job once an operator has approved it (Connections > GitLab > Pending).", rec.Project, hub)}
	case dispatch.ProjectRejected:
		return &refusal{failure: job.Configuration, text: fmt.Sprintf("project %s, or its GitLab server %s, was rejected on the fleet hub %s.\n"+
			"An operator of the hub can approve it (Connections > GitLab).", rec.Project, instance, hub)}
	case dispatch.TooLarge:
		return &refusal{failure: job.Configuration, text: "the job is too large for the fleet: its scripts and variables are more than 512 KiB. " +
			"Keep long scripts in the repository, and large values in files."}
	}
	return &refusal{failure: job.System, text: "the fleet hub " + hub + " does not take the job: " + wire.Clean(err.Error(), wire.MaxReason)}
}

// tailOf is what is added to the trace of a job that the hub ended without its
// node's word, nil for any other.
func tailOf(v *dispatch.JobView, p *dispatch.Placement, midLine, stamps bool, placeSecs int, now time.Time) []byte {
	if v.Result == nil {
		return nil
	}
	text := ""
	switch f := job.Failure(v.Result.Failure); {
	case f == job.NoCapacity:
		text = fmt.Sprintf("Job failed (system failure): no node of pool %s took the job within %d seconds", p.Pool, placeSecs)
	case f == job.Lost && v.Node == "":
		text = "Job failed (system failure): the fleet hub was restarted before a node had taken the job"
	case f == job.Lost:
		text = "Job failed (system failure): the node that ran the job was lost"
	case f != "" && v.OutputLen == 0:
		// The node ended it before it could say anything.
		switch f {
		case job.Canceled:
			text = "Job failed: canceled"
		case job.Configuration:
			text = "the fleet does not run this job"
		default:
			text = "Job failed (system failure)"
			if v.Result.Message == "" {
				text += ": the job ended as " + wire.Clean(string(f), 64) + " before it began"
			}
		}
	default:
		return nil
	}
	if m := wire.Clean(v.Result.Message, wire.MaxReason); m != "" {
		text += ": " + m
	}
	out := errorLines(text, stamps, now)
	if midLine {
		out = append([]byte("\n"), out...)
	}
	return out
}

package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"golang.org/x/term"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
)

// headings are what GitLab shows above each part of a trace.
var headings = map[string]string{
	"config":                   `Preparing the "custom" executor`,
	execdrv.StagePrepare:       "Preparing environment",
	execdrv.StageSources:       "Getting source from Git repository",
	execdrv.StageBuild:         `Executing "step_script" stage of the job script`,
	execdrv.StageAfter:         "Running after_script",
	execdrv.StageCleanFileVars: "Cleaning up project directory and file based variables",
}

// trace prints a job as GitLab does: headings, the output of both streams,
// and the token masked.
type trace struct {
	w      io.Writer
	colour bool
	secret string
	last   string
}

func newTrace(f *os.File, secret string) *trace {
	return &trace{w: f, colour: term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == "", secret: secret}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*[A-Za-z]")

func (t *trace) print(s string) {
	s = strings.ReplaceAll(s, t.secret, "[MASKED]")
	if !t.colour {
		s = escapes.ReplaceAllString(s, "")
	}
	io.WriteString(t.w, s)
}

func (t *trace) heading(s string) { t.print("\x1b[0K\x1b[36;1m" + s + "\x1b[0;m\n") }

func (t *trace) output(call string, stream runnerside.Stream, p []byte) {
	if call == "config" && stream == runnerside.Stdout || call == "cleanup" {
		return // data for the runner, and its log
	}
	if call != t.last {
		if h, ok := headings[call]; ok && !(call == "config") {
			t.heading(h)
		} else if call == "prepare" || call == "config" {
			if t.last != "config" {
				t.heading(headings["config"])
			}
		}
		t.last = call
	}
	t.print(string(p))
}

// end prints the verdict and where the seconds went.
func (t *trace) end(r *runnerside.JobRun) {
	switch v := r.Verdict; {
	case v.State == "success":
		t.print("\x1b[32;1mJob succeeded\x1b[0;m\n")
	case v.Reason == "runner_system_failure":
		t.print("\x1b[31;1mERROR: Job failed (system failure): " + v.Text + "\x1b[0;m\n")
	default:
		t.print("\x1b[31;1mERROR: Job failed: " + v.Text + "\x1b[0;m\n")
	}
	var total time.Duration
	for _, c := range r.Calls {
		total += c.Took
	}
	fmt.Fprintf(t.w, "\nWhere its %.1f s went:\n", total.Seconds())
	for _, c := range r.Calls {
		bar := strings.Repeat("█", int(40*c.Took/max(total, 1)))
		fmt.Fprintf(t.w, "  %-24s %6.2f s  %s\n", c.Call, c.Took.Seconds(), bar)
	}
}

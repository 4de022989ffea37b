package cijob

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
)

// ending is why a job, or a stage of it, is to end before its time: the cause
// of a context.
type ending struct {
	verdict verdict
	status  string // CI_JOB_STATUS of what still runs
	grace   Grace
}

func (e *ending) Error() string { return e.verdict.text }

// The endings. That of the job's own time says how long that was.
var (
	endCanceled = &ending{verdict{failure: job.Canceled, text: "canceled"}, "canceled", Graceful}
	endAborted  = &ending{verdict{failure: job.Canceled, text: "canceled"}, "canceled", Immediate}
	endStopped  = &ending{verdict{failure: job.Interrupted, text: "aborted: terminated"}, "failed", Immediate}
	endScript   = &ending{verdict{failure: job.Timeout, text: "script timeout: context deadline exceeded"}, "timedout", TimedOut}
	endAfter    = &ending{verdict{failure: job.Timeout, text: "context deadline exceeded"}, "timedout", TimedOut}
)

func endTime(d time.Duration) *ending {
	return &ending{verdict{failure: job.Timeout, text: fmt.Sprintf("execution took longer than %s seconds", d)}, "timedout", TimedOut}
}

// Stop is the cause of a context of Run's that ends because the node does.
func Stop() error { return endStopped }

// endingOf is why ctx ended; what is none of the above is the node's end.
func endingOf(ctx context.Context) *ending {
	if e, ok := errors.AsType[*ending](context.Cause(ctx)); ok {
		return e
	}
	return endStopped
}

func graceOf(ctx context.Context) Grace { return endingOf(ctx).grace }

// verdict is how a job failed. A nil one is success.
type verdict struct {
	failure job.Failure
	code    *int   // of the script, where it has one
	text    string // behind "ERROR: Job failed"
}

func failed(f job.Failure, code int, text string) *verdict {
	return &verdict{failure: f, code: &code, text: text}
}

// line is the end of the trace.
func (v *verdict) line() string {
	if v == nil {
		return green + "Job succeeded" + reset
	}
	system := ""
	if v.failure == job.System {
		system = " (system failure)"
	}
	return fmt.Sprintf("%sERROR: Job failed%s: %s%s", red, system, v.text, reset)
}

// judge reads how a call ended, as gitlab-runner does; nil = well. The class of
// a failure that is not the system's is f.
func judge(e Ended, f job.Failure) *verdict {
	switch {
	case e.Err != nil:
		return &verdict{failure: job.System, text: e.Err.Error()}
	case e.Exit == 0:
		return nil
	case e.Exit == execdrv.DefaultSystemFailure:
		return &verdict{failure: job.System, text: fmt.Sprintf("exit status %d", e.Exit)}
	case e.Exit != execdrv.DefaultBuildFailure:
		return unknownExit(e.Exit, e.Exit)
	case e.Outcome.Signal != 0:
		return failed(f, -1, "signal: "+syscall.Signal(e.Outcome.Signal).String())
	case e.FileCode == "":
		return failed(f, e.Exit, fmt.Sprintf("exit status %d", e.Exit))
	}
	n, err := strconv.Atoi(e.FileCode)
	if err != nil {
		return unknownExit(execdrv.DefaultSystemFailure, e.Exit)
	}
	return failed(f, n, fmt.Sprintf("exit status %d", n))
}

func unknownExit(code, status int) *verdict {
	return &verdict{failure: job.System, text: fmt.Sprintf(
		"unknown Custom executor executable exit code %d; executable execution terminated with: exit status %d", code, status)}
}

// judgePrepare reads how config or prepare ended.
func judgePrepare(e Ended) *verdict {
	v := judge(e, job.Configuration)
	if v == nil || e.Outcome.Job {
		return v
	}
	switch e.Outcome.Step {
	case "image":
		v.failure = job.ImagePull
	case "sources":
		v.failure = job.ExternalDependency
	}
	return v
}

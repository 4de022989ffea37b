package runnerside

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"virtkit/core/execdrv"
)

// Stage is one script of a job.
type Stage struct {
	Name   string
	Script []byte
}

// Verdict is what the runner would report to GitLab.
type Verdict struct {
	State    string // "success" or "failed"
	Reason   string // "", "script_failure", "runner_system_failure", "job_canceled"
	ExitCode int    // 0 = none sent
	Text     string // what the runner prints after "ERROR: Job failed"
}

// Attempts is how often the runner tries to prepare.
const Attempts = 3

// JobRun is a job as the runner ran it.
type JobRun struct {
	Calls   []Result // in order
	Verdict Verdict
}

// Find is the last call of that name; false when it was not called.
func (j *JobRun) Find(call string) (Result, bool) {
	for i := len(j.Calls) - 1; i >= 0; i-- {
		if j.Calls[i].Call == call {
			return j.Calls[i], true
		}
	}
	return Result{}, false
}

// Names lists the calls in order.
func (j *JobRun) Names() []string {
	var out []string
	for _, c := range j.Calls {
		out = append(out, c.Call)
	}
	return out
}

// RunJob runs a whole job as the runner does: up to three attempts of config
// and prepare, the stages in order, after_script also when the script failed
// or was cancelled, and cleanup whatever happened. When cancel ends (nil =
// never), the stage that runs is ended gracefully and the job counts as
// cancelled. Stages named *_on_failure run only in a failed job, their
// success twins only in a good one.
//
// It returns an error only when a call could not be made at all.
func (s *Session) RunJob(ctx context.Context, stages []Stage, cancel context.Context) (*JobRun, error) {
	j := &JobRun{}
	ok, err := s.prepareJob(ctx, j)
	if err != nil || !ok {
		return j, err
	}
	runErr := s.runStages(ctx, j, stages, cancel)
	res, err := s.Cleanup(ctx)
	j.Calls = append(j.Calls, res)
	if runErr != nil {
		return j, runErr
	}
	return j, err
}

func (s *Session) prepareJob(ctx context.Context, j *JobRun) (bool, error) {
	for n := 1; ; n++ {
		res, _, err := s.Config(ctx)
		j.Calls = append(j.Calls, res)
		if err != nil && res.Exit == 0 {
			return false, err
		}
		if res.Exit == 0 {
			if res, err = s.Prepare(ctx); err != nil {
				return false, err
			}
			j.Calls = append(j.Calls, res)
		}
		if res.Exit == 0 && res.Signal == 0 {
			return true, nil
		}
		clean, err := s.Cleanup(ctx)
		if err != nil {
			return false, err
		}
		j.Calls = append(j.Calls, clean)
		j.Verdict = s.judge(res)
		if j.Verdict.Reason == "script_failure" || n == Attempts {
			return false, nil
		}
		if err := wait(ctx, s.d.Retry); err != nil {
			return false, err
		}
	}
}

func (s *Session) runStages(ctx context.Context, j *JobRun, stages []Stage, cancel context.Context) error {
	j.Verdict = Verdict{State: "success"}
	s.Vars["CI_JOB_STATUS"] = "running"
	failed, stop := false, false
	for _, st := range stages {
		onFailure := strings.HasSuffix(st.Name, "_on_failure")
		onSuccess := st.Name == execdrv.StageCache || st.Name == execdrv.StageUpload
		switch {
		case failed && !onFailure && st.Name != execdrv.StageAfter && st.Name != execdrv.StageCleanFileVars,
			!failed && onFailure, failed && onSuccess, stop:
			continue
		}
		if st.Name == execdrv.StageAfter {
			s.Vars["CI_JOB_STATUS"] = j.Verdict.State
			if j.Verdict.Reason == "job_canceled" {
				s.Vars["CI_JOB_STATUS"] = "canceled"
			}
		}
		sctx := ctx
		if cancel != nil && !failed && st.Name != execdrv.StageCleanFileVars {
			var end context.CancelFunc
			sctx, end = context.WithCancel(ctx)
			defer end()
			defer context.AfterFunc(cancel, end)()
		}
		res, err := s.Stage(sctx, st.Name, st.Script)
		if err != nil {
			return err
		}
		j.Calls = append(j.Calls, res)
		if sctx.Err() != nil && !failed {
			failed, j.Verdict = true, Verdict{State: "failed", Reason: "job_canceled", Text: "canceled"}
			continue
		}
		// What fails in after_script leaves the job as it was.
		if (res.Exit != 0 || res.Signal != 0) && !failed && st.Name != execdrv.StageAfter {
			failed, j.Verdict = true, s.judge(res)
			stop = st.Name == execdrv.StagePrepare
		}
	}
	return nil
}

// judge reads a call's end as the runner does.
func (s *Session) judge(r Result) Verdict {
	switch {
	case r.Exit == 0 && r.Signal == 0:
		return Verdict{State: "success"}
	case r.Exit == s.d.BuildFailure:
		v := Verdict{State: "failed", Reason: "script_failure", ExitCode: s.d.BuildFailure}
		if r.FileCode != "" {
			n, err := strconv.Atoi(r.FileCode)
			if err != nil {
				return Verdict{State: "failed", Reason: "runner_system_failure",
					Text: fmt.Sprintf("BUILD_EXIT_CODE_FILE holds %q", r.FileCode)}
			}
			v.ExitCode = n
		}
		v.Text = fmt.Sprintf("exit status %d", v.ExitCode)
		return v
	case r.Exit == s.d.SystemFailure:
		return Verdict{State: "failed", Reason: "runner_system_failure", Text: fmt.Sprintf("exit status %d", r.Exit)}
	}
	return Verdict{State: "failed", Reason: "runner_system_failure",
		Text: fmt.Sprintf("unknown Custom executor executable exit code %d", r.Exit)}
}

func wait(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

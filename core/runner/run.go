package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
)

// Run runs one stage's script in the job's guest and returns the process
// status. The script goes to the shell's standard input.
//
// sigs are the signals that this process gets. The first one is passed to the
// script as SIGTERM, whatever it is, because that is what the runner's
// scripts handle, and the script's own end is awaited; the second one kills
// all that the script started. The guest lives on either way.
func (r *Runner) Run(ctx context.Context, c *execdrv.Call, script, stage string, stdio Stdio, sigs <-chan os.Signal) (int, error) {
	id, err := Identify(c)
	if err != nil {
		return c.SystemFailure, err
	}
	f, err := os.Open(script)
	if err != nil {
		return c.SystemFailure, fault.Newf(fault.System, "opening the script of stage %s", stage).Because(err)
	}
	defer f.Close()
	rec, err := ReadRecord(r.Machines.Dir(id.ID))
	if err != nil {
		return c.SystemFailure, noJob(id, err)
	}
	g, err := r.Machines.Find(ctx, id.ID)
	if err != nil {
		if errors.Is(err, supervise.ErrSupervisorGone) {
			if st, serr := supervise.ReadState(r.Machines.Dir(id.ID)); serr == nil {
				err = lostError(st, err)
			}
			return c.SystemFailure, fault.Newf(fault.System, "stage %s cannot run", stage).Because(err)
		}
		return c.SystemFailure, err
	}
	if !execdrv.KnownStage(stage) {
		r.warn(fmt.Sprintf("stage %q is not known to this version: it runs without the image's entrypoint", stage))
	}
	for _, w := range c.Warnings {
		r.warn(w)
	}
	stdio.In = f
	if stage == execdrv.StageSources && rec.HostSources {
		if stdio.In, err = r.sourcesScript(c, rec, f); err != nil {
			return c.SystemFailure, err
		}
	}
	control, stop := passSignals(sigs)
	defer stop()
	req := request(rec, stage, execdrv.JobEnv(c))
	r.stageBegins(ctx, g, stage)
	r.tellServices(ctx, g, rec)
	stopLogs := r.followLogs(c, rec)
	ev, err := g.Exec(ctx, req, stdio, control)
	stopLogs()
	r.tellServices(ctx, g, rec)
	if err != nil {
		err = r.guestLost(ctx, g, err)
		r.stageEnded(ctx, g, r.Machines.Dir(id.ID), stage)
		r.account(ctx, g, rec)
		return c.SystemFailure, err
	}
	if endOfTrace(stage) {
		defer r.account(ctx, g, rec)
	}
	r.stageEnded(ctx, g, r.Machines.Dir(id.ID), stage)
	if stage == execdrv.StageCleanFileVars { // the last one whose words reach the trace
		r.tellUsage(ctx, c, g, rec)
	}
	if ev.Err != "" {
		return r.neverStarted(c, rec, stage, ev)
	}
	c.Tell(execdrv.Outcome{Job: true, Signal: ev.Signal})
	code, words := c.Finish(execdrv.Ended{Code: ev.Code, Signal: ev.Signal, OOM: ev.OOM})
	for _, w := range words {
		r.say("%s", w)
	}
	return code, nil
}

// neverStarted is a stage whose first program could not be started. The shell
// was tried in prepare, so what is missing is the entrypoint, which is the
// job's choice, or the job has broken its own root.
func (r *Runner) neverStarted(c *execdrv.Call, rec Record, stage string, ev guestwire.ExecEvent) (int, error) {
	code := ev.Code
	if code == 0 {
		code = 127
	}
	exit, words := c.Finish(execdrv.Ended{Code: code})
	what := "the shell"
	if execdrv.UserStage(stage) && len(rec.Entrypoint) > 0 {
		what = fmt.Sprintf("the image's entrypoint %q", rec.Entrypoint)
	}
	r.say("%s could not be started: %s", what, ev.Err)
	for _, w := range words {
		r.say("%s", w)
	}
	return exit, nil
}

func noJob(id Identity, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fault.Newf(fault.System, "job %d has no guest on this host: it was never prepared, or cleaned up already", id.JobID).
			Hint("`vk gitlab run` works between prepare and cleanup of the same job")
	}
	return fault.New(fault.System, "reading the job's record").Because(err)
}

// passSignals turns this process's signals into what the guest is told.
func passSignals(sigs <-chan os.Signal) (<-chan guestwire.ExecControl, func()) {
	out := make(chan guestwire.ExecControl, 4)
	done := make(chan struct{})
	go func() {
		first := true
		for {
			select {
			case <-done:
				return
			case _, ok := <-sigs:
				if !ok {
					return
				}
				m := guestwire.ExecControl{Kill: true}
				if first {
					m = guestwire.ExecControl{Signal: int(syscall.SIGTERM)}
					first = false
				}
				select {
				case out <- m:
				case <-done:
					return
				}
			}
		}
	}()
	return out, func() { close(done) }
}

// Cleanup ends the job's guest and removes its directory, whatever state they
// are in. It is no error when there is nothing.
func (r *Runner) Cleanup(ctx context.Context, c *execdrv.Call) error {
	id, err := Identify(c)
	if err != nil {
		return err
	}
	r.rememberLost(ctx, id.ID)
	err = r.remove(ctx, id.ID)
	if r.Gate != nil {
		err = errors.Join(err, r.Gate.Release(id.ID))
	}
	if err != nil {
		return fault.Newf(fault.System, "cleaning up job %d (%s)", id.JobID, r.Machines.Dir(id.ID)).Because(err).
			Hint("`vk gc` tries again")
	}
	return nil
}

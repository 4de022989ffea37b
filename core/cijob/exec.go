package cijob

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"virtkit/core/execdrv"
)

// Commands runs the executor's commands as processes.
type Commands struct {
	Argv []string // program and arguments before config, prepare, run and cleanup
	Env  []string // that all get, KEY=VALUE; the job's come behind it
	Work string   // TMPDIR and working directory of the calls, 0700
	// Claim is the ledger entry that the first prepare takes over, by its
	// descriptor, and is closed with it; nil = prepare asks for its own.
	Claim *os.File
}

// Names in Work.
const (
	responseName = "response.json"
	exitCodeName = "build_exit_code"
	outcomeName  = "outcome.json"
)

// EnvClaim tells a driver, and prepare, the number of the descriptor that holds
// the job's entry in the host's ledger; EnvLock tells a driver that of the job's
// lock.
const (
	EnvClaim = "VIRTKIT_JOB_CLAIM_FD"
	EnvLock  = "VIRTKIT_JOB_LOCK_FD"
)

// Call is Executor's.
func (c *Commands) Call(ctx context.Context, call Call) Ended {
	if err := ctx.Err(); err != nil && call.Kind != CallCleanup {
		return Ended{Exit: -1, Err: context.Cause(ctx)}
	}
	argv := append(slices.Clone(c.Argv), string(call.Kind))
	if call.Kind == CallRun {
		dir, err := os.MkdirTemp(c.Work, "script")
		if err != nil {
			return Ended{Exit: -1, Err: fmt.Errorf("writing the script of %s: %w", call.Stage, err)}
		}
		defer os.RemoveAll(dir) // it holds every variable of the job's
		path := filepath.Join(dir, "script")
		if err := os.WriteFile(path, call.Script, 0o700); err != nil {
			return Ended{Exit: -1, Err: fmt.Errorf("writing the script of %s: %w", call.Stage, err)}
		}
		argv = append(argv, path, call.Stage)
	}
	if err := c.ready(call.Response); err != nil {
		return Ended{Exit: -1, Err: err}
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = c.Work
	cmd.Env = slices.Concat(c.Env, call.Env, []string{
		execdrv.EnvTmpDir + "=" + c.Work,
		execdrv.EnvBuildFailure + "=" + strconv.Itoa(execdrv.DefaultBuildFailure),
		execdrv.EnvSystemFailure + "=" + strconv.Itoa(execdrv.DefaultSystemFailure),
		execdrv.EnvExitCodeFile + "=" + filepath.Join(c.Work, exitCodeName),
		execdrv.EnvJobResponse + "=" + filepath.Join(c.Work, responseName),
		execdrv.EnvOutcome + "=" + filepath.Join(c.Work, outcomeName),
	})
	if c.Claim != nil && call.Kind == CallPrepare {
		cmd.ExtraFiles = []*os.File{c.Claim}
		cmd.Env = append(cmd.Env, EnvClaim+"=3")
	}
	cmd.Stdout, cmd.Stderr = call.Out, call.Err
	ended := run(ctx, cmd, call.Now)
	if cmd.ExtraFiles != nil {
		c.Claim.Close()
		c.Claim = nil
	}
	if o, err := execdrv.TakeOutcome(filepath.Join(c.Work, outcomeName)); err == nil {
		ended.Outcome = o
	}
	ended.FileCode = firstLine(filepath.Join(c.Work, exitCodeName))
	return ended
}

// ready writes the response and takes away the last call's exit code: a stage
// that leaves none is not to be judged by an earlier one's.
func (c *Commands) ready(response []byte) error {
	path := filepath.Join(c.Work, responseName)
	if _, err := os.Lstat(path); err != nil {
		if err := os.WriteFile(path, response, 0o600); err != nil {
			return fmt.Errorf("writing the job's response: %w", err)
		}
	}
	for _, n := range []string{exitCodeName, outcomeName} {
		if err := os.Remove(filepath.Join(c.Work, n)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func firstLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	line, err := bufio.NewReader(io.LimitReader(f, 4096)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return ""
	}
	return strings.TrimSpace(line)
}

// run runs a command in a process group of its own, which dies with this
// process. A parent-death signal belongs to the thread that forked: this one
// is kept until the command has ended.
func run(ctx context.Context, cmd *exec.Cmd, now <-chan struct{}) Ended {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.WaitDelay = 10 * time.Second // a child that keeps the pipes must not hold the job
	if err := cmd.Start(); err != nil {
		return Ended{Exit: -1, Err: fmt.Errorf("starting %s: %w", cmd.Args[0], err)}
	}
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop(ctx, cmd.Process.Pid, now, done) }()
	err := cmd.Wait()
	close(done)
	<-stopped
	out := Ended{Exit: cmd.ProcessState.ExitCode()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		out.Err = fmt.Errorf("%s was ended by signal %d", filepath.Base(cmd.Args[0]), ws.Signal())
		return out
	}
	if _, isExit := errors.AsType[*exec.ExitError](err); err != nil && !isExit && !errors.Is(err, exec.ErrWaitDelay) {
		out.Err = err
	}
	return out
}

// stop ends the group when ctx does.
func stop(ctx context.Context, pid int, now, done <-chan struct{}) {
	select {
	case <-done:
		return
	case <-ctx.Done():
	}
	g := graceOf(ctx)
	syscall.Kill(-pid, syscall.SIGTERM)
	term := time.NewTimer(g.Term)
	defer term.Stop()
	select {
	case <-done:
		return
	case <-term.C:
	case <-now:
		hurry := time.NewTimer(min(g.Term, Immediate.Term))
		defer hurry.Stop()
		select {
		case <-done:
			return
		case <-hurry.C:
		}
	}
	syscall.Kill(-pid, syscall.SIGTERM)
	kill := time.NewTimer(g.Kill)
	defer kill.Stop()
	select {
	case <-done:
	case <-kill.C:
		syscall.Kill(-pid, syscall.SIGKILL)
	}
}

// Package runnerside plays gitlab-runner against a custom executor's driver:
// it makes the temporary directory, writes the script files, calls config,
// prepare, run and cleanup with the environment of a real runner, in its
// order, and judges what comes back as the runner would. `vk gitlab check`,
// the end-to-end tests and the demo use it.
//
// What a real runner does is recorded in vectors/README.md, section 5.
package runnerside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"virtkit/core/execdrv"
)

// Driver is a configured [runners.custom].
type Driver struct {
	Config, Prepare, Run, Cleanup []string      // program and arguments of each call
	Env                           []string      // the runner's own environment, KEY=VALUE
	TmpRoot                       string        // "" = the system's
	BuildFailure, SystemFailure   int           // 0 = 1 and 2
	NoExitCodeFile                bool          // as an old runner: the variable is not set
	NoCodes                       bool          // neither are the two codes
	Grace                         time.Duration // from SIGTERM to SIGKILL; 0 = 10 s
	Retry                         time.Duration // between attempts of prepare; 0 = none
}

// Streams of a call.
type Stream int

// The streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Session is one job's temporary directory and what its calls have in common.
type Session struct {
	d    Driver
	Vars map[string]string // job variables, without CUSTOM_ENV_
	Dir  string            // TMPDIR
	// On hears of every piece of output as it comes, from several goroutines
	// but one at a time.
	On func(call string, s Stream, p []byte)

	mu     sync.Mutex
	jobEnv map[string]string
	answer execdrv.ConfigAnswer
}

// Result is how one call ended.
type Result struct {
	Call           string // "config", "prepare", "cleanup", or the stage
	Exit           int    // -1 when a signal ended it
	Signal         syscall.Signal
	Stdout, Stderr []byte
	Took           time.Duration
	FileCode       string // first line of BUILD_EXIT_CODE_FILE after the call; "" when there is no file
	Killed         bool   // the grace was over
}

// Open makes the temporary directory and writes the job's response.
func (d Driver) Open(vars map[string]string, response []byte) (*Session, error) {
	if d.BuildFailure == 0 {
		d.BuildFailure = execdrv.DefaultBuildFailure
	}
	if d.SystemFailure == 0 {
		d.SystemFailure = execdrv.DefaultSystemFailure
	}
	if d.Grace == 0 {
		d.Grace = 10 * time.Second
	}
	dir, err := os.MkdirTemp(d.TmpRoot, "custom-executor")
	if err != nil {
		return nil, err
	}
	s := &Session{d: d, Vars: maps.Clone(vars), Dir: dir}
	if err := os.WriteFile(s.responseFile(), response, 0o600); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close removes the temporary directory, as the runner does after cleanup.
func (s *Session) Close() error { return os.RemoveAll(s.Dir) }

func (s *Session) responseFile() string { return filepath.Join(s.Dir, "response.json") }

// ExitCodeFile is the path of BUILD_EXIT_CODE_FILE.
func (s *Session) ExitCodeFile() string { return filepath.Join(s.Dir, "build_exit_code") }

// Environ is the environment of a call.
func (s *Session) Environ() []string {
	env := slices.Clone(s.d.Env)
	set := func(k, v string) { env = append(env, k+"="+v) }
	for _, k := range slices.Sorted(maps.Keys(s.Vars)) {
		set(execdrv.EnvPrefix+k, s.Vars[k])
	}
	s.mu.Lock()
	for _, k := range slices.Sorted(maps.Keys(s.jobEnv)) {
		set(k, s.jobEnv[k])
	}
	s.mu.Unlock()
	set(execdrv.EnvTmpDir, s.Dir)
	if !s.d.NoCodes {
		set(execdrv.EnvBuildFailure, strconv.Itoa(s.d.BuildFailure))
		set(execdrv.EnvSystemFailure, strconv.Itoa(s.d.SystemFailure))
	}
	if !s.d.NoExitCodeFile {
		set(execdrv.EnvExitCodeFile, s.ExitCodeFile())
	}
	set(execdrv.EnvJobResponse, s.responseFile())
	return env
}

// Config calls config and takes over what it answers.
func (s *Session) Config(ctx context.Context) (Result, execdrv.ConfigAnswer, error) {
	var a execdrv.ConfigAnswer
	if len(s.d.Config) == 0 {
		return Result{Call: "config"}, a, nil
	}
	res, err := s.call(ctx, "config", s.d.Config)
	if err != nil || res.Exit != 0 {
		return res, a, err
	}
	if len(bytes.TrimSpace(res.Stdout)) > 0 {
		if err := json.Unmarshal(res.Stdout, &a); err != nil {
			return res, a, fmt.Errorf("decoding config's answer: %w", err)
		}
	}
	s.mu.Lock()
	s.jobEnv, s.answer = a.JobEnv, a
	s.mu.Unlock()
	return res, a, nil
}

// AddJobEnv adds to what config answered, as a wrapper around it would.
func (s *Session) AddJobEnv(k, v string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.jobEnv == nil {
		s.jobEnv = map[string]string{}
	}
	s.jobEnv[k] = v
}

// Prepare calls prepare once.
func (s *Session) Prepare(ctx context.Context) (Result, error) {
	return s.call(ctx, "prepare", s.d.Prepare)
}

// Cleanup calls cleanup.
func (s *Session) Cleanup(ctx context.Context) (Result, error) {
	return s.call(context.WithoutCancel(ctx), "cleanup", s.d.Cleanup)
}

// WriteScript writes a stage's script as the runner does and returns its
// path. Scripts stay until Close.
func (s *Session) WriteScript(script []byte) (string, error) {
	dir, err := os.MkdirTemp(s.Dir, "script")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "script")
	return path, os.WriteFile(path, script, 0o700)
}

// Stage calls run with a script. When ctx ends, the process group gets
// SIGTERM, and SIGKILL after the grace.
func (s *Session) Stage(ctx context.Context, stage string, script []byte) (Result, error) {
	path, err := s.WriteScript(script)
	if err != nil {
		return Result{}, err
	}
	return s.call(ctx, stage, append(slices.Clone(s.d.Run), path, stage))
}

// Command is a call's process, not started: for tests that kill it.
func (s *Session) Command(argv []string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = s.Environ()
	cmd.Dir = s.Dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

func (s *Session) call(ctx context.Context, name string, argv []string) (Result, error) {
	if len(argv) == 0 {
		return Result{}, fmt.Errorf("%s: no program configured", name)
	}
	res := Result{Call: name}
	if err := ctx.Err(); err != nil {
		return res, context.Cause(ctx)
	}
	cmd := s.Command(argv)
	var out, errb bytes.Buffer
	cmd.Stdout = &tee{s: s, call: name, stream: Stdout, buf: &out}
	cmd.Stderr = &tee{s: s, call: name, stream: Stderr, buf: &errb}
	// A driver's children that keep the pipes open must not hold us.
	cmd.WaitDelay = 10 * time.Second
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return res, fmt.Errorf("starting %s: %w", name, err)
	}
	done := make(chan struct{})
	killed := make(chan bool, 1)
	go func() { killed <- endWith(ctx, cmd.Process.Pid, s.d.Grace, done) }()
	err := cmd.Wait()
	close(done)
	res.Killed = <-killed
	res.Took = time.Since(start)
	res.Stdout, res.Stderr = out.Bytes(), errb.Bytes()
	if b, e := os.ReadFile(s.ExitCodeFile()); e == nil {
		res.FileCode, _, _ = strings.Cut(string(b), "\n")
	}
	ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok {
		return res, err
	}
	res.Exit = cmd.ProcessState.ExitCode()
	if ws.Signaled() {
		res.Signal = ws.Signal()
	}
	if _, isExit := errors.AsType[*exec.ExitError](err); err != nil && !isExit {
		return res, fmt.Errorf("%s: %w", name, err)
	}
	return res, nil
}

// endWith ends the process group when ctx does, and reports whether it took
// SIGKILL.
func endWith(ctx context.Context, pid int, grace time.Duration, done <-chan struct{}) bool {
	select {
	case <-done:
		return false
	case <-ctx.Done():
	}
	_ = syscall.Kill(-pid, syscall.SIGTERM)
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-done:
		return false
	case <-t.C:
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	return true
}

type tee struct {
	s      *Session
	call   string
	stream Stream
	buf    *bytes.Buffer
}

func (t *tee) Write(p []byte) (int, error) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.buf.Write(p)
	if t.s.On != nil {
		t.s.On(t.call, t.stream, p)
	}
	return len(p), nil
}

var _ io.Writer = (*tee)(nil)

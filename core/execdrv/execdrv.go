// Package execdrv is GitLab's custom executor contract as data: the names of
// the environment, the stages, the answer of `config`, the exit codes, and the
// variables of a job that virtkit itself obeys. It touches no process and no
// guest, so everything here is tested with plain values.
//
// A runner calls a driver four ways (config, prepare, run SCRIPT STAGE,
// cleanup). Each call gets the runner's own environment, the names below,
// every variable of the job prefixed with CUSTOM_ENV_, and, but for config,
// the job_env that config answered.
package execdrv

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Names that the runner sets in the environment of every call.
const (
	EnvPrefix        = "CUSTOM_ENV_"              // of each job variable
	EnvBuildFailure  = "BUILD_FAILURE_EXIT_CODE"  // exit status that means "the job failed"
	EnvSystemFailure = "SYSTEM_FAILURE_EXIT_CODE" // exit status that means "the runner's side failed"
	EnvExitCodeFile  = "BUILD_EXIT_CODE_FILE"     // where the script's own exit code goes
	EnvJobResponse   = "JOB_RESPONSE_FILE"        // the job as GitLab sent it; holds secrets
	EnvTmpDir        = "TMPDIR"                   // one per job, also the working directory
)

// What the two failure codes are when the runner does not say.
const (
	DefaultBuildFailure  = 1
	DefaultSystemFailure = 2
)

// Call is what one call was given.
type Call struct {
	BuildFailure  int
	SystemFailure int
	ExitCodeFile  string // "" when the runner keeps none
	ResponseFile  string // "" when the runner gives none
	TmpDir        string
	Warnings      []string // for the trace

	vars map[string]string // job variables, without prefix
	rest map[string]string // everything else
}

// ReadCall reads the environment (KEY=VALUE) of a call. It never fails: what
// is missing or wrong gets its default and a warning.
func ReadCall(environ []string) Call {
	c := Call{vars: map[string]string{}, rest: map[string]string{}}
	for _, kv := range environ {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			continue
		}
		if name, isVar := strings.CutPrefix(k, EnvPrefix); isVar {
			c.vars[name] = v
		} else {
			c.rest[k] = v
		}
	}
	c.BuildFailure = c.code(EnvBuildFailure, DefaultBuildFailure)
	c.SystemFailure = c.code(EnvSystemFailure, DefaultSystemFailure)
	c.ExitCodeFile = c.rest[EnvExitCodeFile]
	c.ResponseFile = c.rest[EnvJobResponse]
	c.TmpDir = c.rest[EnvTmpDir]
	return c
}

func (c *Call) code(name string, def int) int {
	v, ok := c.rest[name]
	if !ok {
		c.Warnings = append(c.Warnings, fmt.Sprintf("%s is not set: using %d", name, def))
		return def
	}
	n, err := strconv.Atoi(strings.TrimSpace(v))
	if err != nil || n < 1 || n > 255 {
		c.Warnings = append(c.Warnings, fmt.Sprintf("%s is %q, not a number from 1 to 255: using %d", name, v, def))
		return def
	}
	return n
}

// Var is a job variable; an empty one counts as unset.
func (c *Call) Var(name string) string { return c.vars[name] }

// LookupVar is a job variable, and whether the job has it.
func (c *Call) LookupVar(name string) (value string, set bool) {
	value, set = c.vars[name]
	return value, set
}

// VarNames lists the job variables with this prefix, sorted.
func (c *Call) VarNames(prefix string) []string {
	var out []string
	for k := range c.vars {
		if strings.HasPrefix(k, prefix) {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// Env is a name of the call's environment that is no job variable.
func (c *Call) Env(name string) string { return c.rest[name] }

// Stages that the runner may ask for, in the order of a job. Between
// StageBuild and StageAfter come the job's further steps, named
// StepPrefix + name.
const (
	StagePrepare        = "prepare_script"
	StageSources        = "get_sources"
	StageClearWorktree  = "clear_worktree"
	StageRestoreCache   = "restore_cache"
	StageDownload       = "download_artifacts"
	StageBuild          = "build_script"
	StepPrefix          = "step_"
	StageAfter          = "after_script"
	StageCache          = "archive_cache"
	StageCacheFailure   = "archive_cache_on_failure"
	StageUpload         = "upload_artifacts_on_success"
	StageUploadFailure  = "upload_artifacts_on_failure"
	StageCleanFileVars  = "cleanup_file_variables"
	StageScriptNewNames = "step_script" // what build_script will be called
)

// UserStage tells whether a stage runs the user's own commands. Those go
// through the image's entrypoint, the others do not, as with GitLab's docker
// executor.
func UserStage(stage string) bool {
	return stage == StageBuild || stage == StageAfter || strings.HasPrefix(stage, StepPrefix)
}

// KnownStage tells whether this version knows the stage. An unknown one still
// runs, as a stage of the runner's own.
func KnownStage(stage string) bool {
	return UserStage(stage) || slices.Contains([]string{
		StagePrepare, StageSources, StageClearWorktree, StageRestoreCache, StageDownload,
		StageCache, StageCacheFailure, StageUpload, StageUploadFailure, StageCleanFileVars,
	}, stage)
}

// RunArgs splits what `run` was called with: the administrator's own
// run_args, then the script's path, then the stage.
func RunArgs(args []string) (extra []string, script, stage string, err error) {
	if len(args) < 2 {
		return nil, "", "", fmt.Errorf("expected SCRIPT and STAGE after the configured run_args, got %d argument(s)", len(args))
	}
	n := len(args)
	return args[:n-2], args[n-2], args[n-1], nil
}

// ConfigAnswer is what `config` prints on stdout.
type ConfigAnswer struct {
	BuildsDir         string            `json:"builds_dir,omitempty"`
	CacheDir          string            `json:"cache_dir,omitempty"`
	BuildsDirIsShared bool              `json:"builds_dir_is_shared"`
	Hostname          string            `json:"hostname,omitempty"` // of the host: "Running on GUEST via HOSTNAME..."
	Driver            *DriverName       `json:"driver,omitempty"`
	JobEnv            map[string]string `json:"job_env,omitempty"` // for prepare, run and cleanup
	Shell             string            `json:"shell,omitempty"`
}

// DriverName is shown as "Using Custom executor with driver NAME VERSION...".
type DriverName struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Ended is how a stage's script ended.
type Ended struct {
	Code   int  // exit status; 128+n for signal n
	Signal int  // 0 when it exited by itself
	OOM    bool // the guest's kernel killed it for memory
}

// Finish turns a script's end into this process's exit status and writes the
// script's own code where the runner looks for it. The words are for the
// trace and may be empty. A script that ends with the number of
// SYSTEM_FAILURE_EXIT_CODE is still a failure of the build.
func (c *Call) Finish(e Ended) (exit int, words []string) {
	if e.Code == 0 && e.Signal == 0 {
		return 0, nil
	}
	code := e.Code
	if e.Signal != 0 {
		code = 128 + e.Signal
		words = append(words, fmt.Sprintf("the script's shell was killed by signal %d (%s)", e.Signal, signalName(e.Signal)))
	}
	if e.OOM {
		words = append(words, "the guest ran out of memory (raise MICROVM_MEM)")
	}
	if e.Code == 128+sigPipe && e.Signal == 0 {
		words = append(words, "exit code 141 is that of a command that SIGPIPE ended: a pipe's reader was gone before its writer (`set -o pipefail` lets that end the script)")
	}
	if e.Code == 128+sigKill && e.Signal == 0 && !e.OOM {
		words = append(words, "exit code 137 is that of a command that signal 9 (SIGKILL) ended: often that is want of memory, and a line of a guest OOM then names it (raise MICROVM_MEM); without one something in the job sent it")
	}
	if c.ExitCodeFile != "" {
		if err := writeCode(c.ExitCodeFile, code); err != nil {
			words = append(words, fmt.Sprintf("writing exit code %d: %v", code, err))
		}
	}
	return c.BuildFailure, words
}

// Signals whose victims are silent.
const (
	sigKill = 9
	sigPipe = 13
)

// writeCode replaces the file in one step, so that a killed driver leaves the
// old code or the new one and never half a line. No fsync: the runner that
// reads it would not survive a power loss either.
func writeCode(path string, code int) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".exit_code-*")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(tmp, "%d\n", code)
	if e := tmp.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

func signalName(n int) string {
	names := map[int]string{1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE",
		9: "KILL", 11: "SEGV", 13: "PIPE", 14: "ALRM", 15: "TERM", 24: "XCPU", 25: "XFSZ", 31: "SYS"}
	if s, ok := names[n]; ok {
		return s
	}
	return "number " + strconv.Itoa(n)
}

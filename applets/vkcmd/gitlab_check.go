package vkcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/core/fault"
)

type checkOptions struct {
	image string
	print bool
}

func newGitlabCheck(a *app) *cli.Command {
	var o checkOptions
	return &cli.Command{
		Name:  "check",
		Usage: "print the runner's configuration and try it with one job",
		Description: "Prints a block for gitlab-runner's config.toml with the absolute path of this\n" +
			"program, then runs one job as gitlab-runner would: config, prepare, the stages\n" +
			"and cleanup, each as a process of its own with the environment of a real one.",
		Flags: []cli.Flag{
			cliutil.String(&o.image, "image", "REF", "image of the job instead of the default"),
			cliutil.Bool(&o.print, "print", "print the block and run nothing"),
		},
		Action: func(ctx context.Context, _ *cli.Command) error {
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("finding this program: %w", err)
			}
			before := a.globalArgs()
			if err := printRunnerConfig(a.env.Stdout, exe, before); err != nil || o.print {
				return err
			}
			ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return a.checkGitlab(ctx, o, exe, before)
		},
	}
}

// globalArgs are the flags that the runner's calls must be given too.
func (a *app) globalArgs() []string {
	var out []string
	if a.g.config != "" {
		out = append(out, "--config", a.g.config)
	}
	if a.g.stateDir != "" {
		out = append(out, "--state-dir", a.g.stateDir)
	}
	return out
}

var runnerConfig = template.Must(template.New("").Funcs(template.FuncMap{"q": strconv.Quote, "list": tomlList}).Parse(
	`# For /etc/gitlab-runner/config.toml: put in your GitLab's address and the
# token of a runner created there.
[[runners]]
  name = {{q .Name}}
  url = "https://gitlab.example.com"
  token = "glrt-…"
  executor = "custom"
  [runners.custom]
    config_exec = {{q .Exe}}
    config_args = {{list .Args "config"}}
    prepare_exec = {{q .Exe}}
    prepare_args = {{list .Args "prepare"}}
    prepare_exec_timeout = 1800   # a first pull of a large image takes a while
    run_exec = {{q .Exe}}
    run_args = {{list .Args "run"}}
    cleanup_exec = {{q .Exe}}
    cleanup_args = {{list .Args "cleanup"}}
    cleanup_exec_timeout = 180
    graceful_kill_timeout = 60    # a cancelled script has this long to end by itself
    force_kill_timeout = 10
`))

func tomlList(before []string, word string) string {
	var q []string
	for _, s := range append(append([]string{}, before...), "gitlab", word) {
		q = append(q, strconv.Quote(s))
	}
	return "[" + strings.Join(q, ", ") + "]"
}

func printRunnerConfig(w io.Writer, exe string, before []string) error {
	host, _ := os.Hostname()
	return runnerConfig.Execute(w, struct {
		Name, Exe string
		Args      []string
	}{"virtkit on " + host, exe, before})
}

// The job of the check: what it prints is shown, and its last stage proves
// that a script's own exit code comes through.
const (
	checkScript = `echo "in the guest: $(uname -sr) as $(id -un 2>/dev/null || id -u), in $(pwd)"
cd "$CHECK_DIR" && echo "can write here: $PWD" > probe && cat probe
`
	checkCode = 42
)

func (a *app) checkGitlab(ctx context.Context, o checkOptions, exe string, before []string) error {
	argv := func(word string) []string { return append(append([]string{exe}, before...), "gitlab", word) }
	d := runnerside.Driver{
		Config: argv("config"), Prepare: argv("prepare"), Run: argv("run"), Cleanup: argv("cleanup"),
		Env: a.env.Environ(), Grace: 10 * time.Second,
	}
	// The number must be no other job's on this host.
	id := time.Now().UnixNano() % 1e12
	vars := map[string]string{
		"CI_JOB_ID": strconv.FormatInt(id, 10), "CI_JOB_NAME": "check", "CI_JOB_STAGE": "test", "CI_JOB_TIMEOUT": "600",
		"CI_PROJECT_PATH": "virtkit/check", "CI_CONCURRENT_ID": "0", "CI_SERVER": "yes", "MICROVM_IMAGE": o.image,
	}
	response, err := json.Marshal(map[string]any{"id": id, "job_info": map[string]any{"name": "check"}, "runner_info": map[string]any{"timeout": 600}})
	if err != nil {
		return fmt.Errorf("encoding the job: %w", err)
	}
	s, err := d.Open(vars, response)
	if err != nil {
		return fmt.Errorf("making the job's directory: %w", err)
	}
	defer s.Close()
	s.On = func(call string, stream runnerside.Stream, p []byte) {
		if call != "config" || stream == runnerside.Stderr {
			a.env.Stderr.Write(p)
		}
	}
	start := time.Now()
	a.say("trying it: one job, as gitlab-runner would run it")
	dir := a.buildsDir()
	script := func(body string) []byte { return []byte("export CHECK_DIR=" + dir + "\n" + body) }
	job, err := s.RunJob(ctx, []runnerside.Stage{
		{Name: execdrv.StagePrepare, Script: script("echo \"Running on $(hostname 2>/dev/null || cat /proc/sys/kernel/hostname)\"\n")},
		{Name: execdrv.StageBuild, Script: script(checkScript)},
		{Name: execdrv.StageCleanFileVars, Script: script(fmt.Sprintf("exit %d\n", checkCode))},
	}, nil)
	if err != nil {
		return err
	}
	if err := judgeCheck(job); err != nil {
		return err
	}
	a.say("it works: %d calls in %.1f s, exit code %d of the last stage came through", len(job.Calls), time.Since(start).Seconds(), checkCode)
	return nil
}

// buildsDir is the builds directory of the host's configuration.
func (a *app) buildsDir() string {
	if h, err := a.host(); err == nil {
		return h.Conf.Executor.BuildsDir
	}
	return "/builds"
}

func judgeCheck(job *runnerside.JobRun) error {
	last, ran := job.Find(execdrv.StageCleanFileVars)
	build, _ := job.Find(execdrv.StageBuild)
	clean, _ := job.Find("cleanup")
	switch {
	case !ran:
		return fault.Newf(fault.System, "the job failed: %s (%s)", job.Verdict.Reason, job.Verdict.Text).
			Hint("the lines above say why; `vk check` looks at the host")
	case build.Exit != 0:
		return fault.Newf(fault.System, "the script failed with %s, expected 0", build.FileCode)
	case last.FileCode != strconv.Itoa(checkCode):
		return fault.Newf(fault.System, "a script that exits with %d came back as %q", checkCode, last.FileCode)
	case clean.Exit != 0:
		return fault.Newf(fault.System, "cleanup ended with status %d", clean.Exit)
	}
	return nil
}

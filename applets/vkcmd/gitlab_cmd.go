package vkcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/cijob"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/runner"
)

// newGitlabCmd is `vk gitlab`: the driver that gitlab-runner's custom executor
// calls. Its exit statuses are the runner's, not fault's.
func newGitlabCmd(a *app) *cli.Command {
	return &cli.Command{
		Name:  "gitlab",
		Usage: "run GitLab CI jobs: the driver of gitlab-runner's custom executor",
		Description: "gitlab-runner calls config, prepare, run and cleanup for each job; see\n" +
			"docs/gitlab.md. `vk gitlab check` prints the runner's configuration and tries it.",
		Commands: []*cli.Command{
			gitlabCall(a, "config", "answer where builds and caches are, or refuse the job early",
				"Prints one JSON object on stdout. Refuses wrong MICROVM_* variables and images\nthat this version cannot boot.", callConfig),
			gitlabCall(a, "prepare", "boot the job's guest",
				"Resolves the job's image, boots a guest from it and returns when it runs. What\nfails is undone.", callPrepare),
			gitlabRun(a),
			gitlabCall(a, "cleanup", "end the job's guest and remove all of it",
				"May be called in any state and any number of times.", callCleanup),
			newGitlabCheck(a),
			newGitlabUsage(a),
		},
	}
}

// call is one of the runner's calls after its environment was read.
type call struct {
	a   *app
	drv execdrv.Call
}

func gitlabCall(a *app, name, usage, description string, do func(context.Context, *call) error) *cli.Command {
	return gitlabExits(&cli.Command{
		Name: name, Usage: usage, Description: description,
		Action: func(ctx context.Context, _ *cli.Command) error {
			c := &call{a: a, drv: execdrv.ReadCall(a.env.Environ())}
			return c.end(do(ctx, c))
		},
	})
}

func gitlabExits(c *cli.Command) *cli.Command {
	return cliutil.Exits(c,
		cliutil.Status{Code: "$BUILD_FAILURE_EXIT_CODE", Means: "the job is at fault (1 when not set)"},
		cliutil.Status{Code: "$SYSTEM_FAILURE_EXIT_CODE", Means: "this host is at fault (2 when not set)"})
}

// end tells an error in the job's trace and turns it into the runner's number.
func (c *call) end(err error) error {
	if err == nil {
		return nil
	}
	tellTrace(c.a.env.Stderr, err)
	c.drv.Tell(runner.OutcomeOf(err))
	return cliutil.Exit(runner.Status(&c.drv, err))
}

func tellTrace(w io.Writer, err error) {
	for line := range strings.SplitSeq(strings.TrimRight(err.Error(), "\n"), "\n") {
		fmt.Fprintf(w, "virtkit: %s\n", line)
	}
	if h := fault.HintOf(err); h != "" {
		fmt.Fprintf(w, "virtkit: hint: %s\n", h)
	}
}

func callConfig(_ context.Context, c *call) error {
	r, err := c.runner(c.a.env.Stderr)
	if err != nil {
		return err
	}
	answer, err := r.Config(&c.drv)
	if err != nil {
		return err
	}
	return json.NewEncoder(c.a.env.Stdout).Encode(answer)
}

func callPrepare(ctx context.Context, c *call) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	r, err := c.runner(c.a.env.Stdout)
	if err != nil {
		return err
	}
	if r.Prior, err = inherited(c.a.env.Getenv, cijob.EnvClaim); err != nil {
		return err
	}
	return r.Prepare(ctx, &c.drv)
}

// cleanupTime bounds cleanup; a supervisor that is killed needs a few seconds
// at most.
const cleanupTime = 2 * time.Minute

func callCleanup(ctx context.Context, c *call) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	r, err := c.runner(c.a.env.Stderr)
	if err != nil {
		return err
	}
	return r.Cleanup(ctx, &c.drv)
}

func gitlabRun(a *app) *cli.Command {
	c := &cli.Command{
		Name: "run", Usage: "run one stage's script in the job's guest", ArgsUsage: "[RUN_ARGS…] SCRIPT STAGE",
		Description: "Gives the script to the guest's shell. SIGTERM is passed on and the script's end\n" +
			"awaited; a second signal kills what the script started. The guest lives on.",
		Action: func(ctx context.Context, cc *cli.Command) error {
			c := &call{a: a, drv: execdrv.ReadCall(a.env.Environ())}
			sigs := make(chan os.Signal, 8)
			signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
			defer signal.Stop(sigs)
			code, err := c.stage(ctx, cc.Args().Slice(), sigs)
			if err != nil {
				return c.end(err)
			}
			return cliutil.Exit(code)
		},
	}
	return gitlabExits(cliutil.Takes(c, cliutil.Arity{Min: 2, Max: -1}))
}

func (c *call) stage(ctx context.Context, args []string, sigs <-chan os.Signal) (int, error) {
	_, script, stage, err := execdrv.RunArgs(args)
	if err != nil {
		return 0, err
	}
	r, err := c.runner(c.a.env.Stderr)
	if err != nil {
		return 0, err
	}
	return r.Run(ctx, &c.drv, script, stage, runner.Stdio{Out: c.a.env.Stdout, Err: c.a.env.Stderr}, sigs)
}

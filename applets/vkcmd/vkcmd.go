// Package vkcmd is the program vk: one file per command.
package vkcmd

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/core/supervise"
	"virtkit/core/ui"
	"virtkit/ledger"
)

// Main runs vk.
func Main(ctx context.Context, env appenv.Env) int {
	return cliutil.Run(ctx, Command(env), env)
}

// globals are the values of the flags of every command.
type globals struct {
	color    string
	config   string
	stateDir string
	verbose  bool
}

// app is what every command's action starts from.
type app struct {
	env appenv.Env
	g   globals

	once sync.Once
	term *ui.Terminal
}

// Command is the tree of vk's commands.
func Command(env appenv.Env) *cli.Command {
	a := &app{env: env, g: globals{color: "auto"}}
	root := &cli.Command{
		Name:  "vk",
		Usage: "run commands and CI jobs in throwaway microVMs",
		Description: "vk run local/default uname -a is a good start: it boots a guest, runs the command\n" +
			"in it and leaves nothing behind. vk check tells what this host has and lacks.",
		Flags: []cli.Flag{
			cliutil.Choice(&a.g.color, "color", "colours in messages", "auto", "always", "never").Global(),
			cliutil.String(&a.g.config, "config", "FILE", "configuration file instead of the usual ones").Global(),
			cliutil.String(&a.g.stateDir, "state-dir", "DIR", "where guests, images and kernels are kept").Global(),
			cliutil.Bool(&a.g.verbose, "verbose", "tell more about what is done").Short("v").Global(),
		},
		Commands: []*cli.Command{
			newRun(a), newExec(a), newList(a), newLogs(a), newStop(a), newReboot(a), newPublish(a),
			newImages(a), newPull(a), newImage(a), newKernel(a), newGC(a),
			newEgress(a), newEgressReport(a), newAtop(a), newTune(a), newWorkloads(a),
			newNode(a), newGitlabCmd(a), newCheck(a), newConfig(a), newVersion(a), newCompletion(a), newSupervise(a),
		},
	}
	interruptible(root)
	return root
}

// ownSignals names the commands that receive signals themselves.
var ownSignals = map[string]bool{"run": true, "exec": true, "supervise": true, "gitlab": true}

// interruptible makes every other command's context end with the first signal
// that asks this process to end. A second one ends it at once.
func interruptible(c *cli.Command) {
	if ownSignals[c.Name] {
		return
	}
	for _, sub := range c.Commands {
		interruptible(sub)
	}
	action := c.Action
	if action == nil {
		return
	}
	c.Action = func(ctx context.Context, cc *cli.Command) error {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer signal.Stop(ch)
		go func() {
			select {
			case s := <-ch:
				signal.Stop(ch)
				cancel(signalled(s.(syscall.Signal)))
			case <-ctx.Done():
			}
		}()
		err := action(ctx, cc)
		if cause := context.Cause(ctx); err != nil && cause != nil && errors.Is(err, context.Canceled) {
			return cause
		}
		return err
	}
}

func (a *app) overrides() wire.Overrides {
	return wire.Overrides{ConfigFile: a.g.config, StateDir: a.g.stateDir, Log: a.log()}
}

// host opens the host, and shows the configuration's warnings.
func (a *app) host() (*wire.Host, error) {
	h, err := wire.Open(a.env, a.overrides())
	if err != nil {
		return nil, err
	}
	if a.g.verbose {
		for _, w := range h.Conf.Warnings {
			a.warn("%s", w)
		}
	}
	return h, nil
}

func (a *app) log() *slog.Logger {
	if !a.g.verbose {
		return logx.Discard()
	}
	return logx.New(a.env.Stderr, slog.LevelDebug, false)
}

// terminal is where messages and progress go. It is made at its first use,
// when the flags are known.
func (a *app) terminal() *ui.Terminal {
	a.once.Do(func() {
		a.term = ui.New(a.env.Stdout, a.env.Stderr, ui.Options{Name: "vk", Getenv: a.env.Getenv, Color: a.g.color})
	})
	return a.term
}

// say writes a line for the user to stderr.
func (a *app) say(format string, args ...any) { a.terminal().Notef(format, args...) }

func (a *app) warn(format string, args ...any) { a.terminal().Warnf(format, args...) }

// guest finds a job whose supervisor lives.
func (a *app) guest(ctx context.Context, name string) (*supervise.Client, ledger.Job, error) {
	h, err := a.host()
	if err != nil {
		return nil, ledger.Job{}, err
	}
	j, err := h.Jobs.Find(ctx, name)
	if err != nil {
		return nil, j, err
	}
	c, err := supervise.Dial(j.Dir)
	if errors.Is(err, supervise.ErrSupervisorGone) {
		return nil, j, fault.Newf(fault.Conflict, "guest %s has ended", j.Name).Because(err).
			Hint("vk list -a shows how; vk logs %s prints its console", j.ID)
	}
	return c, j, err
}

// withJob makes the action of a command about the guest that its first argument
// names, running or not.
func (a *app) withJob(f func(context.Context, *wire.Host, ledger.Job) error) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		h, err := a.host()
		if err != nil {
			return err
		}
		j, err := h.Jobs.Find(ctx, c.Args().First())
		if err != nil {
			return err
		}
		return f(ctx, h, j)
	}
}

// Package hubcmd is the program vk-hub: one file per command. serve is the hub
// itself; every other command but check reaches the running one through its
// admin socket.
package hubcmd

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubconf"
)

// Main runs vk-hub.
func Main(ctx context.Context, env appenv.Env) int {
	return cliutil.Run(ctx, Command(env), env)
}

// app is what every command's action starts from.
type app struct {
	env    appenv.Env
	config string
	now    func() time.Time
}

// Command is the tree of vk-hub's commands.
func Command(env appenv.Env) *cli.Command {
	a := &app{env: env, now: env.Now}
	if a.now == nil {
		a.now = time.Now
	}
	return &cli.Command{
		Name:  "vk-hub",
		Usage: "steer a fleet of machines that run vk node",
		Description: "vk-hub serve is the hub; the other commands ask it through <data_dir>/admin.sock,\n" +
			"as its user or as root. docs/hub.md brings up a hub and two nodes in five commands.",
		Flags: []cli.Flag{cliutil.String(&a.config, "config", "FILE", "hub.toml; every key of it is optional").Global()},
		Commands: []*cli.Command{
			interruptible(newServe(a)), newToken(a), newNodes(a), newRelays(a), newGitLabs(a), newKeys(a), newJobs(a), newEgress(a), newUI(a), newAccounts(a), newWorkloads(a), newAudit(a), newEvents(a), newStatus(a), newBackup(a), newCheck(a), newConfig(a),
		},
	}
}

// interruptible ends a command's context with the first signal that asks this
// process to end. A second one ends it at once.
func interruptible(c *cli.Command) *cli.Command {
	action := c.Action
	c.Action = func(ctx context.Context, cc *cli.Command) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, unix.SIGINT, unix.SIGTERM)
		defer signal.Stop(ch)
		go func() {
			select {
			case <-ch:
				signal.Stop(ch)
				cancel()
			case <-ctx.Done():
			}
		}()
		return action(ctx, cc)
	}
	return c
}

// load reads hub.toml: --config, $VIRTKIT_HUB_CONFIG, or none.
func (a *app) load() (*hubconf.Config, error) {
	file := cmp.Or(a.config, a.env.Getenv("VIRTKIT_HUB_CONFIG"))
	if file != "" && !filepath.IsAbs(file) {
		dir, err := a.env.Dir()
		if err != nil {
			return nil, err
		}
		file = filepath.Join(dir, file)
	}
	return hubconf.Load(file, a.env.Getenv, a.env.Getenv("HOME"))
}

// client reaches the running hub.
func (a *app) client() (*hubadmin.Client, error) {
	c, err := a.load()
	if err != nil {
		return nil, err
	}
	return hubadmin.Dial(c.AdminSocket()), nil
}

// asks makes the action of a command that asks the hub.
func (a *app) asks(f func(context.Context, *hubadmin.Client, []string) error) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		client, err := a.client()
		if err != nil {
			return err
		}
		return f(ctx, client, c.Args().Slice())
	}
}

// statuses are those of a command that asks the hub.
func statuses(c *cli.Command, more ...cliutil.Status) *cli.Command {
	return cliutil.Exits(c, append(more,
		cliutil.Status{Code: "12", Means: "this user may not use the admin socket"},
		cliutil.Status{Code: "13", Means: "no hub runs here, or it cannot write its database"})...)
}

var noSuchNode = cliutil.Status{Code: "10", Means: "there is no such node"}

// absolute makes a file's name one for the hub, whose directory is another.
func (a *app) absolute(file string) (string, error) {
	if filepath.IsAbs(file) {
		return file, nil
	}
	dir, err := a.env.Dir()
	return filepath.Join(dir, file), err
}

// isBusy says whether an address is taken.
func isBusy(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

func listenError(what, addr string, err error) error {
	if isBusy(err) {
		return fault.Newf(fault.Busy, "%s %s is taken by another program", what, addr).Because(err)
	}
	return fault.Newf(fault.System, "listening at %s %s", what, addr).Because(err)
}

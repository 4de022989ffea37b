package gitlabcmd

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/relay"
	"virtkit/core/logx"
	"virtkit/core/version"
)

func newRun(a *app) *cli.Command {
	var verbose bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:  "run",
		Usage: "take jobs from GitLab and have the fleet run them, in the foreground",
		Description: "Asks GitLab for jobs while the hub reports room and has approved the server. A first\n" +
			"SIGTERM or SIGINT stops the asking, waits for requests in flight, and gives the jobs\n" +
			"that run shutdown_timeout to end; those that do not are gone on with at the next\n" +
			"start. A second signal waits for nothing: nothing that was recorded is lost by it.",
		Flags: []cli.Flag{cliutil.Bool(&verbose, "verbose", "log more").Short("v")},
		Action: func(ctx context.Context, _ *cli.Command) error {
			return a.run(ctx, verbose)
		},
	}, cliutil.Arity{}),
		cliutil.Status{Code: "10", Means: "it is not enrolled"},
		cliutil.Status{Code: "12", Means: "the hub refuses this relay for good, or the state dir is another user's"},
		busy)
}

func (a *app) run(ctx context.Context, verbose bool) error {
	c, err := a.load()
	if err != nil {
		return err
	}
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	log := logx.New(a.env.Stderr, level, c.LogFormat == "json")
	d, err := relay.Open(ctx, relay.Options{Conf: c, Info: info(), VK: version.Version, Log: log})
	if err != nil {
		return err
	}
	defer d.Close()
	e := d.Enrollment()
	log.Info("vk-gitlab", "relay", e.Relay, "hub", e.URL, "gitlab", c.GitLab.URL, "runners", len(c.Runners), "state_dir", c.StateDir, "vk", version.String())
	sigs := make(chan os.Signal, 2)
	signal.Notify(sigs, unix.SIGINT, unix.SIGTERM)
	defer signal.Stop(sigs)
	return runUntil(ctx, d, sigs, log)
}

// runUntil is a run under signals: the first ends it in order, the second waits
// for nothing.
func runUntil(ctx context.Context, d interface{ Run(context.Context) error }, sigs <-chan os.Signal, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	for stopping := false; ; stopping = true {
		select {
		case err := <-done:
			if err != nil && !errors.Is(err, context.Canceled) {
				return err
			}
			log.Info("vk-gitlab has stopped")
			return nil
		case s := <-sigs:
			if stopping {
				return fault.Newf(fault.Interrupted, "ended by %s, waiting for nothing", s)
			}
			stop()
		}
	}
}

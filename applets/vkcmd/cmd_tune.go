package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/tune"
)

func newTune(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:  "tune",
		Usage: "set how many jobs gitlab-runner accepts to what this host has room for",
		Description: "Works out how many jobs fit the memory budget and the host's free memory, within\n" +
			"[executor.schedule] max_concurrency, and writes the number to\n" +
			"<state_dir>/" + tune.DesiredFile + ", from which vk-runnerctl sets the\n" +
			"runner's concurrent. With [node] runner_config it sets that itself, in a file that\n" +
			"this user owns. Run it every half minute, from a timer: docs/tune.md has the units.",
		Action: func(ctx context.Context, _ *cli.Command) error {
			h, err := a.host()
			if err != nil {
				return err
			}
			return a.tune(ctx, h, admit.MemInfo)
		},
	}, cliutil.Arity{}), cliutil.Status{Code: "2", Means: "wrong usage or configuration, or there is neither mem_budget nor max_concurrency"},
		cliutil.Status{Code: "12", Means: "[node] runner_config belongs to another user"})
}

// nodeLock is held by vk node run while it is up, and shared by a pass of vk
// tune.
const nodeLock = "node/lock"

func (a *app) tune(ctx context.Context, h *wire.Host, meminfo string) error {
	path := filepath.Join(h.StateDir, nodeLock)
	if _, err := os.Stat(filepath.Dir(path)); err == nil {
		l, err := fsx.TryLock(path, true)
		if errors.Is(err, fsx.ErrLocked) {
			a.say("vk node run is up: it sets the runner's concurrency itself")
			return nil
		}
		if err != nil {
			return err
		}
		defer l.Close()
	}
	in, err := h.TuneInput(ctx, meminfo, a.warn)
	if err != nil {
		return err
	}
	// A node that is down holds to what its hub asked last.
	hub, err := nodeCeiling(h.StateDir)
	if err != nil {
		return err
	}
	in.Ceilings = append(in.Ceilings, hub)
	d, ok := tune.Decide(in)
	if !ok {
		return fault.New(fault.Usage, "there is nothing to decide by: neither mem_budget nor max_concurrency is set").
			Hint(`set [executor.schedule] mem_budget = "80%%", or max_concurrency, in %s`, first(h.Conf.File, "config.toml"))
	}
	if err := tune.WriteDesired(h.StateDir, d.Concurrency); err != nil {
		return fmt.Errorf("writing the number: %w", err)
	}
	fmt.Fprintln(a.env.Stdout, d.Line())
	if file := h.Conf.Node.RunnerConfig; file != "" {
		was, err := tune.Set(file, d.Concurrency)
		if err != nil {
			return err
		}
		if was != d.Concurrency {
			fmt.Fprintf(a.env.Stdout, "virtkit: %s: concurrent %d → %d\n", file, was, d.Concurrency)
		}
	}
	return nil
}

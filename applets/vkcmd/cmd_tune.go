package vkcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

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
	}, cliutil.Arity{}), cliutil.Status{Code: "2", Means: "there is neither mem_budget nor max_concurrency"})
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
	in, err := a.tuneInput(ctx, h, meminfo)
	if err != nil {
		return err
	}
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

func (a *app) tuneInput(ctx context.Context, h *wire.Host, meminfo string) (in tune.Input, err error) {
	if in.Budget, err = h.Budget(); err != nil {
		return in, err
	}
	hub, err := nodeCeiling(h.StateDir)
	if err != nil {
		return in, err
	}
	in.Ceilings = []int{h.Conf.Executor.Schedule.MaxConcurrency, hub}
	total, terr := admit.HostMemory(meminfo, "MemTotal")
	available, aerr := admit.HostMemory(meminfo, "MemAvailable")
	if terr == nil && aerr == nil {
		in.Total, in.Available = total>>20, available>>20
	}
	gate, err := h.Gate()
	if err != nil {
		return in, err
	}
	claims, problems, err := gate.Claims(ctx)
	if err != nil {
		return in, err
	}
	for _, p := range problems {
		a.warn("%v", p)
	}
	var held []int64
	for _, c := range claims {
		in.Committed += c.Granted.MemMiB
		if !c.Waiting {
			in.Running++
			held = append(held, c.Granted.MemMiB)
		}
	}
	in.Typical = cmp.Or(tune.Typical(a.reserved(h)), tune.Typical(held), int64(h.Conf.Executor.VM.Mem>>20))
	if n, _, err := tune.ReadDesired(filepath.Join(h.StateDir, tune.DesiredFile)); err == nil {
		in.Last = n
	} else if !errors.Is(err, fs.ErrNotExist) {
		a.warn("the number that was written last is not known: %v", err)
	}
	return in, nil
}

// reserved is what the next run of each job that this host remembers would
// reserve, in MiB. A history that cannot be read is none.
func (a *app) reserved(h *wire.Host) (out []int64) {
	names, err := h.History.Projects("")
	if err != nil {
		a.warn("%v", err)
	}
	for _, n := range names {
		p, _, err := h.History.Project(n)
		if err != nil {
			continue
		}
		for _, j := range p.Report(time.Now(), h.Conf.Executor.Schedule.FromHistory, 0).Jobs {
			if j.ReservesMiB > 0 {
				out = append(out, j.ReservesMiB)
			}
		}
	}
	return out
}

package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

func newStop(a *app) *cli.Command {
	grace := 10 * time.Second
	var kill, rm bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "stop",
		Usage:     "end a guest",
		ArgsUsage: "NAME",
		Description: "Ends the guest in order: its programs get SIGTERM, after --grace SIGKILL, then it\n" +
			"powers off. Returns when nothing of it is left, but for the directory of a guest\n" +
			"that was started with --keep, which --rm removes, of one that has ended too.",
		Flags: []cli.Flag{
			cliutil.Duration(&grace, "grace", "time from SIGTERM to SIGKILL"),
			cliutil.Bool(&kill, "kill", "end it at once, without asking the guest"),
			cliutil.Bool(&rm, "rm", "remove what --keep keeps"),
		},
		Action: a.withJob(func(ctx context.Context, h *wire.Host, j ledger.Job) error {
			client, err := supervise.Dial(j.Dir)
			if errors.Is(err, supervise.ErrSupervisorGone) {
				if j.Keep && !rm {
					return nil // ended, and kept on purpose
				}
				return h.Jobs.Remove(ctx, j.ID)
			}
			if err != nil {
				return err
			}
			if kill {
				_, err = client.Kill(ctx)
			} else {
				_, err = client.Stop(ctx, grace)
			}
			if err != nil {
				return fmt.Errorf("stopping %s: %w", j.Name, err)
			}
			if rm {
				return removeStopped(ctx, h.Jobs, j.ID)
			}
			return nil
		}),
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "there is no such guest"})
}

// stoppedWait is how long a supervisor that has told its guest's end may take to
// end itself.
const stoppedWait = 10 * time.Second

// removeStopped removes the directory of a guest whose supervisor is about to
// end, which it holds until then.
func removeStopped(ctx context.Context, jobs *ledger.Jobs, id string) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for last := time.Now().Add(stoppedWait); ; {
		err := jobs.Remove(ctx, id)
		if fault.KindOf(err) != fault.Conflict || time.Now().After(last) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func newReboot(a *app) *cli.Command {
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "reboot",
		Usage:     "reboot a guest",
		ArgsUsage: "NAME",
		Description: "Reboots the guest and returns when it runs again. Its writable layer, its network\n" +
			"address and its published ports stay.",
		Action: func(ctx context.Context, c *cli.Command) error {
			client, j, err := a.guest(ctx, c.Args().First())
			if err != nil {
				return err
			}
			if _, err := client.Reboot(ctx); err != nil {
				return fmt.Errorf("rebooting %s: %w", j.Name, err)
			}
			return nil
		},
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "10", Means: "there is no such guest"})
}

func newPublish(a *app) *cli.Command {
	var remove bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "publish",
		Usage:     "make a port of a guest reachable on this host",
		ArgsUsage: "NAME [ADDR:]HOST:GUEST[/udp]",
		Description: "Opens a port of this host, on 127.0.0.1 unless an address is given, whose\n" +
			"connections go to the guest's port. Host port 0 takes any free one; the command\n" +
			"prints what was opened.",
		Flags: []cli.Flag{cliutil.Bool(&remove, "remove", "close the port again")},
		Action: func(ctx context.Context, c *cli.Command) error {
			p, err := parsePublish(c.Args().Get(1))
			if err != nil {
				return cliutil.BadOption("%v", err)
			}
			client, j, err := a.guest(ctx, c.Args().First())
			if err != nil {
				return err
			}
			if remove {
				if err := client.Unpublish(ctx, p); err != nil {
					return fmt.Errorf("closing %s of %s: %w", formatPublish(p), j.Name, err)
				}
				return nil
			}
			if p, err = client.Publish(ctx, p); err != nil {
				return fmt.Errorf("publishing %s of %s: %w", c.Args().Get(1), j.Name, err)
			}
			_, err = fmt.Fprintln(a.env.Stdout, formatPublish(p))
			return err
		},
	}, cliutil.Arity{Min: 2, Max: 2}), cliutil.Status{Code: "10", Means: "there is no such guest"})
}

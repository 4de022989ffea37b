package vkcmd

import (
	"context"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
)

// newSupervise is the body of the process that owns a guest. Only vk itself
// starts it.
func newSupervise(a *app) *cli.Command {
	return cliutil.Takes(&cli.Command{
		Name:        "supervise",
		Usage:       "own a guest for its whole life; started by vk itself",
		ArgsUsage:   "JOBDIR",
		Hidden:      true,
		Description: "Runs the guest that JOBDIR describes. vk run and vk gitlab start it.",
		Action: func(ctx context.Context, c *cli.Command) error {
			return wire.Supervise(ctx, a.env, a.overrides(), c.Args().First())
		},
	}, cliutil.Arity{Min: 1, Max: 1})
}

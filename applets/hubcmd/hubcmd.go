// Package hubcmd is the program vk-hub: it will spread jobs over many hosts.
// Nothing of it is built yet, and it says so instead of pretending.
package hubcmd

import (
	"context"
	"errors"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
)

// Main runs vk-hub.
func Main(ctx context.Context, env appenv.Env) int {
	return cliutil.Run(ctx, Command(), env)
}

// Command is the tree of vk-hub's commands.
func Command() *cli.Command {
	return cliutil.Placeholder("vk-hub", "spread jobs over many hosts (not built yet)",
		"The hub is not part of this version: there is no command to run yet. What works\n"+
			"today is one host: vk run, and vk gitlab as a custom executor of GitLab Runner.",
		errors.New("vk-hub has no commands in this version"))
}

// Package gitlabcmd is the program vk-gitlab: it will fetch jobs from GitLab by
// itself, without a GitLab Runner. Nothing of it is built yet, and it says so
// instead of pretending.
package gitlabcmd

import (
	"context"
	"errors"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
)

// Main runs vk-gitlab.
func Main(ctx context.Context, env appenv.Env) int {
	return cliutil.Run(ctx, Command(), env)
}

// Command is the tree of vk-gitlab's commands.
func Command() *cli.Command {
	return cliutil.Placeholder("vk-gitlab", "fetch jobs from GitLab without a runner (not built yet)",
		"The relay is not part of this version: there is no command to run yet. Jobs of\n"+
			"GitLab run today through GitLab Runner's custom executor: see vk gitlab --help.",
		errors.New("vk-gitlab has no commands in this version"))
}

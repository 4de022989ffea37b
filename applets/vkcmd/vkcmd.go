// Package vkcmd is the program vk: one file per command.
package vkcmd

import (
	"context"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
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
}

// Command is the tree of vk's commands.
func Command(env appenv.Env) *cli.Command {
	a := &app{env: env, g: globals{color: "auto"}}
	return &cli.Command{
		Name:  "vk",
		Usage: "run commands and CI jobs in throwaway microVMs",
		Flags: []cli.Flag{
			cliutil.Choice(&a.g.color, "color", "colours in messages", "auto", "always", "never").Global(),
			cliutil.String(&a.g.config, "config", "FILE", "configuration file instead of the usual ones").Global(),
			cliutil.String(&a.g.stateDir, "state-dir", "DIR", "where guests and images are kept").Global(),
			cliutil.Bool(&a.g.verbose, "verbose", "tell more about what is done").Short("v").Global(),
		},
		Commands: []*cli.Command{
			newVersion(a),
		},
	}
}

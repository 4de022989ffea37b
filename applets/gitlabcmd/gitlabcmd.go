// Package gitlabcmd is the program vk-gitlab: it takes jobs from GitLab, without
// a GitLab Runner, and has a fleet's hub run them. One file per command.
package gitlabcmd

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"runtime"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/gitlab"
	"virtkit/core/version"
)

// Main runs vk-gitlab.
func Main(ctx context.Context, env appenv.Env) int {
	return cliutil.Run(ctx, Command(env), env)
}

// app is what every command's action starts from.
type app struct {
	env    appenv.Env
	config string
}

// Command is the tree of vk-gitlab's commands.
func Command(env appenv.Env) *cli.Command {
	a := &app{env: env}
	return &cli.Command{
		Name:  "vk-gitlab",
		Usage: "run GitLab's jobs on a fleet, without a GitLab Runner",
		Description: "vk-gitlab holds the tokens of a GitLab server's runners. It asks GitLab for jobs\n" +
			"while the fleet has room, has the hub run each on a node, and writes its trace and\n" +
			"outcome back. docs/relay.md sets one up.",
		Flags:    []cli.Flag{cliutil.String(&a.config, "config", "FILE", "its configuration").Default(relayconf.DefaultFile).Global()},
		Commands: []*cli.Command{newJoin(a), newLeave(a), newRun(a), newCheck(a)},
	}
}

// file is the configuration's, and whether it was asked for by name.
func (a *app) file() (file string, named bool, err error) {
	file = cmp.Or(a.config, a.env.Getenv(relayconf.EnvFile))
	if file == "" {
		return relayconf.DefaultFile, false, nil
	}
	if !filepath.IsAbs(file) {
		dir, err := a.env.Dir()
		if err != nil {
			return "", true, err
		}
		file = filepath.Join(dir, file)
	}
	return file, true, nil
}

// load reads the configuration: --config, $VIRTKIT_GITLAB_CONFIG, or the
// default.
func (a *app) load() (*relayconf.Config, error) {
	file, _, err := a.file()
	if err != nil {
		return nil, err
	}
	return relayconf.Load(file, a.env.Getenv)
}

// stateDir is where join and leave work: they need no configuration, but heed
// one that is there.
func (a *app) stateDir() (string, error) {
	file, named, err := a.file()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(file); err != nil && !named {
		return relayconf.Default(a.env.Getenv).StateDir, nil
	}
	c, err := relayconf.Load(file, a.env.Getenv)
	if err != nil {
		return "", err
	}
	return c.StateDir, nil
}

// info is what GitLab is told of this program.
func info() gitlab.Info {
	return relay.Ours(version.Version, cmp.Or(version.Build, "dev"), runtime.GOOS, runtime.GOARCH)
}

// hostname names this host to the hub.
func hostname() (string, error) {
	name, err := os.Hostname()
	if err != nil {
		return "", fault.New(fault.System, "asking for the hostname").Because(err)
	}
	return name, nil
}

// Package runnerctlcmd is the program vk-runnerctl, the half of core/tune that
// runs as root. It takes no arguments and reads no variables: all that it
// touches is named in its own configuration, so that a sudoers line which
// allows it allows nothing else.
package runnerctlcmd

import (
	"context"
	"fmt"
	"time"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
	"virtkit/core/tune"
)

const name = "vk-runnerctl"

const usage = `usage: vk-runnerctl

Sets gitlab-runner's concurrent to what vk tune asks for, within the range of
%s. It is run as root and takes no arguments;
docs/tune.md tells the rest.
`

// Main runs vk-runnerctl.
func Main(ctx context.Context, env appenv.Env) int {
	if len(env.Args) > 1 {
		err := fault.Newf(fault.Usage, "unexpected argument %q: %s takes none", env.Args[1], name)
		status := cliutil.Report(env.Stderr, name, err)
		fmt.Fprintf(env.Stderr, usage, tune.ControlConfig)
		return status
	}
	const root = 0
	line, err := tune.Control(ctx, tune.ControlConfig, root, time.Now())
	if line != "" {
		fmt.Fprintln(env.Stdout, line)
	}
	if err != nil {
		return cliutil.Report(env.Stderr, name, err)
	}
	return 0
}

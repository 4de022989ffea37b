// Package agentcmd is the program vk-agent, PID 1 of a guest. It links nothing
// but the agent.
package agentcmd

import (
	"context"

	"virtkit/agent"
	"virtkit/applets/internal/appenv"
)

// Main runs vk-agent.
func Main(ctx context.Context, env appenv.Env) int {
	return agent.Main(ctx, env.Args, env.Stdin, env.Stdout, env.Stderr)
}

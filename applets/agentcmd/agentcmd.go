// Package agentcmd is the program vk-agent, PID 1 of a guest. It links nothing
// but the agent.
package agentcmd

import (
	"context"
	"fmt"

	"virtkit/applets/internal/appenv"
)

// Main runs vk-agent.
func Main(ctx context.Context, env appenv.Env) int {
	fmt.Fprintln(env.Stderr, "vk-agent: not linked in yet")
	return 1
}

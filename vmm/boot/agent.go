package boot

import (
	"embed"
	"errors"
	"io/fs"
	"os"

	"virtkit/core/fault"
)

// assets holds vk-agent, put there by `make build` before vk is linked.
//
//go:embed all:assets
var assets embed.FS

// AgentEnv names a file to be used in place of the embedded agent, for tests
// and for work on the agent.
const AgentEnv = "VIRTKIT_AGENT"

// Agent is the program that becomes the guest's /init: the file that AgentEnv
// names, else the one embedded in this vk.
func Agent() ([]byte, error) {
	if p := os.Getenv(AgentEnv); p != "" {
		b, err := os.ReadFile(p)
		if err != nil {
			return nil, fault.Newf(fault.Usage, "reading the guest agent that %s names", AgentEnv).Because(err).
				Hint("unset %s to use the agent inside vk", AgentEnv)
		}
		return b, nil
	}
	b, err := assets.ReadFile("assets/vk-agent")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.System, "this vk was built without its guest agent").
			Hint("run make build, or name an agent with %s=FILE", AgentEnv)
	}
	return b, err
}

package boot

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"virtkit/core/fault"
	"virtkit/core/version"
)

// assets holds vk-agent, put there by `make build` before vk is linked.
//
//go:embed all:assets
var assets embed.FS

// embedded is the agent's name in assets.
const embedded = "assets/vk-agent"

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
	b, err := assets.ReadFile(embedded)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.System, "this vk was built without its guest agent").
			Hint("run make build, or name an agent with %s=FILE", AgentEnv)
	}
	return b, err
}

// agent is a program for /init: what tells it from others, and its bytes, which
// are only asked for when an initramfs has to be written.
type agent struct {
	id    string
	bytes func() ([]byte, error)
}

// agentFor is the agent that o asks for. The embedded one is known by its build
// and size: reading and hashing its megabytes would cost each start some 50 ms.
func agentFor(o Options) (agent, error) {
	if o.Agent == nil && os.Getenv(AgentEnv) == "" && version.Build != "" {
		if st, err := fs.Stat(assets, embedded); err == nil {
			return agent{fmt.Sprintf("build %s, %d bytes", version.Build, st.Size()), Agent}, nil
		}
	}
	b := o.Agent
	if b == nil {
		var err error
		if b, err = Agent(); err != nil {
			return agent{}, err
		}
	}
	sum := sha256.Sum256(b)
	return agent{hex.EncodeToString(sum[:]), func() ([]byte, error) { return b, nil }}, nil
}

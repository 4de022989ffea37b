//go:build vkagent

package applets

import "virtkit/applets/agentcmd"

// In a guest this binary is /init, so every name is the agent.
const fallback = "vk-agent"

var words map[string]string

func table() map[string]applet {
	return map[string]applet{"vk-agent": agentcmd.Main, "vk-shell": agentcmd.Main}
}

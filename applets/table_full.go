//go:build !vkagent

package applets

import (
	"virtkit/applets/agentcmd"
	"virtkit/applets/gitlabcmd"
	"virtkit/applets/hubcmd"
	"virtkit/applets/runnerctlcmd"
	"virtkit/applets/vkcmd"
)

const fallback = "vk"

// words are the first arguments of vk that stand for another program. They are
// constant after the program has started.
var words = map[string]string{
	"hub":     "vk-hub",
	"gitlabd": "vk-gitlab",
	"agent":   "vk-agent",
}

// table is a function, so that no program's packages are touched before its
// name is known.
func table() map[string]applet {
	return map[string]applet{
		"vk":        vkcmd.Main,
		"vk-hub":    hubcmd.Main,
		"vk-gitlab": gitlabcmd.Main,
		"vk-agent":  agentcmd.Main,

		"vk-runnerctl": runnerctlcmd.Main,
	}
}

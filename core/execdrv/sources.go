package execdrv

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
)

// GitInfo is what GitLab says of a job's sources. RepoURL holds a token.
type GitInfo struct {
	RepoURL  string   `json:"repo_url"`
	Format   string   `json:"repo_object_format"`
	Ref      string   `json:"ref"`
	SHA      string   `json:"sha"`
	Refspecs []string `json:"refspecs"`
	Depth    int      `json:"depth"`
}

// Hook is a script that the job wants run around its sources.
type Hook struct {
	Name   string   `json:"name"` // HookBefore or HookAfter
	Script []string `json:"script"`
}

// Names of hooks.
const (
	HookBefore = "pre_get_sources_script"
	HookAfter  = "post_get_sources_script"
)

// Lines are the commands of the job's hooks of that name.
func (r Response) Lines(name string) []string {
	var out []string
	for _, h := range r.Hooks {
		if h.Name == name {
			out = append(out, h.Script...)
		}
	}
	return out
}

// Strategies of getting sources (GIT_STRATEGY).
const (
	StrategyFetch = "fetch"
	StrategyClone = "clone"
	StrategyNone  = "none"
	StrategyEmpty = "empty"
)

// Sources is how a job wants its sources.
type Sources struct {
	Strategy   string
	Submodules bool
	Checkout   bool
	CleanFlags []string // nil = no cleaning
	FetchFlags []string
	Attempts   int

	// Of Submodules alone.
	Recursive      bool
	SubmoduleDepth int      // commits; 0 = all, -1 = as the job's own repository
	SubmodulePaths []string // pathspecs of git; nil = all
	SubmoduleFlags []string // of git submodule update
	ForceHTTPS     bool
}

// ReadSources reads the job's variables as the runner does. What is no value
// of theirs is the job's fault.
func ReadSources(c *Call, r Response) (Sources, error) {
	s := Sources{Strategy: StrategyFetch, Checkout: true, CleanFlags: []string{"-ffdx"}, FetchFlags: []string{"--prune", "--quiet"}, Attempts: 1, SubmoduleDepth: -1}
	if !r.AllowFetch {
		s.Strategy = StrategyClone
	}
	bad := func(name, v, want string) error {
		return fault.Newf(fault.JobFailed, "%s is %q, expected %s", name, v, want)
	}
	if v := c.Var("GIT_STRATEGY"); v != "" {
		if s.Strategy = v; !slices.Contains([]string{StrategyFetch, StrategyClone, StrategyNone, StrategyEmpty}, v) {
			return s, bad("GIT_STRATEGY", v, "fetch, clone, none or empty")
		}
	}
	switch v := c.Var("GIT_SUBMODULE_STRATEGY"); v {
	case "", "none":
	case "normal", "recursive":
		s.Submodules, s.Recursive = true, v == "recursive"
	default:
		return s, bad("GIT_SUBMODULE_STRATEGY", v, "none, normal or recursive")
	}
	if v := c.Var("GIT_CHECKOUT"); v != "" {
		on, err := strconv.ParseBool(v)
		if err != nil {
			return s, bad("GIT_CHECKOUT", v, "true or false")
		}
		s.Checkout = on
	}
	switch v := c.Var("GIT_CLEAN_FLAGS"); v {
	case "":
	case "none":
		s.CleanFlags = nil
	default:
		s.CleanFlags = strings.Fields(v)
	}
	switch v := c.Var("GIT_FETCH_EXTRA_FLAGS"); v {
	case "":
	case "none":
		s.FetchFlags = nil
	default:
		s.FetchFlags = strings.Fields(v)
	}
	// What is no number or truth here counts as not said, as with the runner.
	if n, err := strconv.Atoi(c.Var("GIT_SUBMODULE_DEPTH")); err == nil && n >= 0 {
		s.SubmoduleDepth = n
	}
	s.ForceHTTPS, _ = strconv.ParseBool(c.Var("GIT_SUBMODULE_FORCE_HTTPS"))
	if v := strings.Fields(c.Var("GIT_SUBMODULE_PATHS")); len(v) > 0 {
		s.SubmodulePaths = v
	}
	if v := strings.Fields(c.Var("GIT_SUBMODULE_UPDATE_FLAGS")); len(v) > 0 {
		s.SubmoduleFlags = v
	}
	if v := c.Var("GET_SOURCES_ATTEMPTS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 10 {
			return s, bad("GET_SOURCES_ATTEMPTS", v, "a number from 1 to 10")
		}
		s.Attempts = n
	}
	return s, nil
}

// Quote makes s one word of a POSIX shell.
func Quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Echo is the line of a script that writes a command as the runner does before
// it runs it.
func Echo(command string) string {
	first, _, more := strings.Cut(command, "\n")
	if more {
		first += " # collapsed multi-line command"
	}
	return fmt.Sprintf("printf '%%s\\n' %s\n", Quote("\x1b[32;1m$ "+first+"\x1b[0;m"))
}

package execdrv

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	// Unknown is what GIT_SUBMODULE_STRATEGY says where that is no strategy: a job
	// that gets its sources fails of it.
	Unknown string

	// Of Submodules alone.
	Recursive      bool
	SubmoduleDepth int      // commits; 0 = all, -1 = as the job's own repository
	SubmodulePaths []string // pathspecs of git; nil = all
	SubmoduleFlags []string // of git submodule update
	ForceHTTPS     bool
}

// MaxAttempts is how often a stage is tried at most.
const MaxAttempts = 10

// ReadSources reads the job's variables as the runner does: what is no value of
// theirs counts as not said. The runner warns of it, see cijob.
func ReadSources(c *Call, r Response) Sources {
	s := Sources{Strategy: StrategyFetch, Checkout: true, CleanFlags: []string{"-ffdx"}, FetchFlags: []string{"--prune", "--quiet"}, Attempts: 1, SubmoduleDepth: -1}
	if !r.AllowFetch {
		s.Strategy = StrategyClone
	}
	if v := c.Var("GIT_STRATEGY"); IsStrategy(v) {
		s.Strategy = v
	}
	switch v := c.Var("GIT_SUBMODULE_STRATEGY"); v {
	case "", "none":
	case "normal", "recursive":
		s.Submodules, s.Recursive = true, v == "recursive"
	default:
		s.Unknown = v
	}
	if on, err := strconv.ParseBool(c.Var("GIT_CHECKOUT")); err == nil {
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
	s.Attempts = Attempts(c.Var("GET_SOURCES_ATTEMPTS"))
	return s
}

// IsStrategy tells whether v is a GIT_STRATEGY.
func IsStrategy(v string) bool {
	return slices.Contains([]string{StrategyFetch, StrategyClone, StrategyNone, StrategyEmpty}, v)
}

// Attempts reads one of the *_ATTEMPTS variables.
func Attempts(v string) int {
	n, err := strconv.Atoi(v)
	if err != nil {
		return 1
	}
	return max(1, min(n, MaxAttempts))
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

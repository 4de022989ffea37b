package nodehost

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	toml "github.com/pelletier/go-toml/v2"
)

// RunnerConfig is what a node reads of a gitlab-runner's config.toml. Tokens are
// not read.
type RunnerConfig struct {
	Path       string
	Concurrent int
	Names      []string // of its runners, in the file's order
	VK         []VKUse  // runners whose custom executor is vk
}

// VKUse is a runner whose custom executor runs vk.
type VKUse struct {
	Runner   string // its name
	Program  string
	Config   string // of a flag --config; "" = the usual one
	StateDir string // of a flag --state-dir
}

// runnerFile is the part of a config.toml that is looked at.
type runnerFile struct {
	Concurrent int `toml:"concurrent"`
	Runners    []struct {
		Name     string `toml:"name"`
		Executor string `toml:"executor"`
		Custom   struct {
			ConfigExec  string   `toml:"config_exec"`
			ConfigArgs  []string `toml:"config_args"`
			PrepareExec string   `toml:"prepare_exec"`
			PrepareArgs []string `toml:"prepare_args"`
			RunExec     string   `toml:"run_exec"`
			RunArgs     []string `toml:"run_args"`
			CleanupExec string   `toml:"cleanup_exec"`
			CleanupArgs []string `toml:"cleanup_args"`
		} `toml:"custom"`
	} `toml:"runners"`
}

// ReadRunnerConfig reads a config.toml. exe is this program: a custom executor
// that runs the same file under another name is vk, too.
func (r Root) ReadRunnerConfig(path, exe string) (*RunnerConfig, error) {
	b, err := r.read(path)
	if err != nil {
		return nil, err
	}
	var f runnerFile
	// A byte order mark is part of the text, not of the document.
	if err := toml.Unmarshal(bytes.TrimPrefix(b, []byte("\xef\xbb\xbf")), &f); err != nil {
		// The error quotes no value: a line of this file may hold a token.
		return nil, fmt.Errorf("%s cannot be read as a gitlab-runner's configuration", path)
	}
	c := &RunnerConfig{Path: path, Concurrent: f.Concurrent}
	for _, run := range f.Runners {
		c.Names = append(c.Names, run.Name)
		if run.Executor != "custom" {
			continue
		}
		cu := run.Custom
		for _, call := range []struct {
			exec string
			args []string
		}{{cu.RunExec, cu.RunArgs}, {cu.PrepareExec, cu.PrepareArgs}, {cu.ConfigExec, cu.ConfigArgs}, {cu.CleanupExec, cu.CleanupArgs}} {
			if r.isVK(call.exec, exe) && slices.Contains(call.args, "gitlab") {
				c.VK = append(c.VK, VKUse{
					Runner: run.Name, Program: call.exec,
					Config: flagOf(call.args, "--config"), StateDir: flagOf(call.args, "--state-dir"),
				})
				break
			}
		}
	}
	return c, nil
}

// isVK says whether a program of a runner's configuration is vk.
func (r Root) isVK(program, exe string) bool {
	if program == "" {
		return false
	}
	if filepath.Base(program) == "vk" {
		return true
	}
	a, err1 := os.Stat(r.Path(program))
	b, err2 := os.Stat(exe)
	if err1 == nil && err2 == nil && os.SameFile(a, b) {
		return true
	}
	to, err := filepath.EvalSymlinks(r.Path(program))
	return err == nil && filepath.Base(to) == "vk"
}

// OtherConfig says in which way the vk of a runner reads another configuration
// or state directory than this node; "" when it does not.
func (u VKUse) OtherConfig(config, stateDir string) string {
	same := func(a, b string) bool {
		if x, err := filepath.EvalSymlinks(a); err == nil {
			a = x
		}
		if y, err := filepath.EvalSymlinks(b); err == nil {
			b = y
		}
		return filepath.Clean(a) == filepath.Clean(b)
	}
	var out []string
	if u.Config != "" && !same(u.Config, config) {
		out = append(out, fmt.Sprintf("the configuration %s, and this node %s", u.Config, orNone(config)))
	}
	if u.StateDir != "" && !same(u.StateDir, stateDir) {
		out = append(out, fmt.Sprintf("the state directory %s, and this node %s", u.StateDir, stateDir))
	}
	return strings.Join(out, "; ")
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

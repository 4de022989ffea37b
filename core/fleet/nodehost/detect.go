package nodehost

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"virtkit/core/fault"
)

// Mode is how a node deals with gitlab-runner ([node] runner).
type Mode string

// The modes.
const (
	ModeManaged  Mode = "managed"  // the node runs it
	ModeExternal Mode = "external" // something else does
	ModeNone     Mode = "none"     // the host has no runner and takes placed jobs alone
)

// runnerUnit and runnerProgram are what a gitlab-runner is called.
const (
	runnerUnit    = "gitlab-runner.service"
	runnerProgram = "gitlab-runner"
)

// Runner is a gitlab-runner that was found on the host.
type Runner struct {
	Unit    *Unit  // its service, not masked; nil = a program on PATH alone
	Program string // where it is
	User    User   // that it runs as; of a program on PATH alone the node's user
	// Config is what it reads; nil when it has no such file, or ConfigErr says
	// why that cannot be read.
	Config     *RunnerConfig
	ConfigPath string
	ConfigErr  error
}

// Found says where the runner was found, for people.
func (r Runner) Found() string {
	if r.Unit != nil {
		return fmt.Sprintf("%s (%s)", r.Unit.Name, r.Unit.File)
	}
	return r.Program
}

// Detection is what was found out about the host's runner.
type Detection struct {
	Mode    Mode
	Why     string  // the mode applies
	Set     bool    // [node] runner says so
	Found   *Runner // nil = none that a node can see
	Warning string  // a runner's configuration that could not be looked at, say
}

// Look is what the detection of a runner goes by.
type Look struct {
	Root         Root
	Configured   string // [node] runner
	RunnerConfig string // [node] runner_config
	User         User   // that the node runs, or is to run, as
	Exe          string // this program
}

// DetectMode finds out how this host deals with gitlab-runner. An unset mode is
// external when the host has a gitlab-runner.service that is not masked and
// whose program is there, or a gitlab-runner on systemd's PATH; else none.
func DetectMode(l Look) (Detection, error) {
	d := Detection{}
	found, err := l.find()
	if err != nil {
		return d, fmt.Errorf("looking for a gitlab-runner: %w", err)
	}
	d.Found = found
	if found != nil && found.ConfigErr != nil {
		d.Warning = fmt.Sprintf("the configuration of %s cannot be looked at: %v", found.Found(), found.ConfigErr)
	}
	switch {
	case l.Configured != "":
		d.Mode, d.Why, d.Set = Mode(l.Configured), "[node] runner says so", true
	case found == nil:
		d.Mode, d.Why = ModeNone, "[node] runner is not set, and this host has neither a gitlab-runner.service that could run nor a gitlab-runner on "+systemdPath
	default:
		d.Mode, d.Why = ModeExternal, "[node] runner is not set, and this host has "+found.Found()
	}
	return d, nil
}

// find looks for a runner: its service, else its program.
func (l Look) find() (*Runner, error) {
	u, err := l.Root.FindUnit(runnerUnit)
	if err != nil {
		return nil, err
	}
	if u != nil && !u.Masked && len(u.Exec) > 0 {
		if p := l.Root.Program(u.Exec[0]); p != "" {
			r := &Runner{Unit: u, Program: p, User: l.unitUser(u)}
			r.ConfigPath = flagOf(u.Exec, "--config", "-c")
			if r.ConfigPath == "" {
				r.ConfigPath = defaultConfig(r.User)
			}
			l.readConfig(r)
			return r, nil
		}
	}
	p := l.Root.Program(runnerProgram)
	if p == "" {
		return nil, nil
	}
	// Nothing says who runs it: root's configuration or the node's user's.
	r := &Runner{Program: p, User: l.User}
	for _, c := range []string{l.RunnerConfig, "/etc/gitlab-runner/config.toml", defaultConfig(l.User)} {
		if c == "" {
			continue
		}
		r.ConfigPath = c
		l.readConfig(r)
		if r.Config != nil && len(r.Config.VK) > 0 {
			break
		}
	}
	return r, nil
}

// unitUser is the user of a service: root when it names none.
func (l Look) unitUser(u *Unit) User {
	name := u.User
	if name == "" {
		name = "root"
	}
	if usr, ok, err := l.Root.LookupUser(name); err == nil && ok {
		return usr
	}
	usr := User{Name: name, UID: -1, GID: -1}
	if name == "root" || name == "0" {
		return User{Name: "root", Home: "/root"}
	}
	return usr
}

// defaultConfig is the configuration of a runner that is not told one.
func defaultConfig(u User) string {
	switch {
	case u.UID == 0:
		return "/etc/gitlab-runner/config.toml"
	case u.Home == "":
		return ""
	}
	return filepath.Join(u.Home, ".gitlab-runner/config.toml")
}

func (l Look) readConfig(r *Runner) {
	r.Config, r.ConfigErr = nil, nil
	if r.ConfigPath == "" {
		return
	}
	c, err := l.Root.ReadRunnerConfig(r.ConfigPath, l.Exe)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	r.Config, r.ConfigErr = c, err
}

// vk are the runners of a configuration that run vk.
func (r *Runner) vk() []VKUse {
	if r == nil || r.Config == nil {
		return nil
	}
	return r.Config.VK
}

// Refuse is the error of `vk node join`, `vk node service install` and `vk node
// run` when the mode is none and there is a runner with the vk executor: mixing
// placed jobs with a runner's would let a reset clear the runner's job
// directories.
func (d Detection) Refuse() error {
	uses := d.Found.vk()
	if d.Mode != ModeNone || len(uses) == 0 {
		return nil
	}
	return fault.Newf(fault.Conflict, "[node] runner is %q, and %s runs jobs with vk (runner %q of %s)",
		ModeNone, d.Found.Found(), uses[0].Runner, d.Found.ConfigPath).
		Hint(`set [node] runner = "external", or "managed" for the node to run it; or remove that gitlab-runner, or its runners with the vk executor: a host takes a runner's jobs or placed ones, never both`)
}

// OwnRunner tells which gitlab-runner's jobs exclude those that a hub places on
// this host: one that the node runs, or one that runs jobs with vk; "" = none.
func (d Detection) OwnRunner(l Look) string {
	if d.Mode == ModeManaged {
		return `[node] runner is "managed"`
	}
	if uses := d.Found.vk(); len(uses) > 0 {
		return fmt.Sprintf("%s (runner %q of %s)", d.Found.Found(), uses[0].Runner, d.Found.ConfigPath)
	}
	if l.RunnerConfig == "" {
		return ""
	}
	// One that cannot be found otherwise: a unit of another user's, say.
	if c, err := l.Root.ReadRunnerConfig(l.RunnerConfig, l.Exe); err == nil && len(c.VK) > 0 {
		return fmt.Sprintf("runner %q of [node] runner_config, %s", c.VK[0].Runner, l.RunnerConfig)
	}
	return ""
}

// Warnings are what a node says at its start of a runner that it can see.
func (d Detection) Warnings(config, stateDir string) []string {
	var out []string
	if d.Warning != "" {
		out = append(out, d.Warning)
	}
	for _, u := range d.Found.vk() {
		if other := u.OtherConfig(config, stateDir); other != "" {
			out = append(out, fmt.Sprintf("runner %q of %s gives its vk %s: this node sees none of its jobs, and neither drains nor counts them",
				u.Runner, d.Found.ConfigPath, other))
		}
	}
	return out
}

// ConfigOf is the runner's configuration whose `concurrent` a node sets or at
// least reports: the configured one, else a managed runner's usual one, else
// that of the runner that was found. "" = none.
func (d Detection) ConfigOf(l Look) string {
	switch {
	case l.RunnerConfig != "":
		return l.RunnerConfig
	case d.Mode == ModeManaged && l.User.Home != "":
		return filepath.Join(l.User.Home, ".gitlab-runner/config.toml")
	case d.Mode == ModeExternal && d.Found != nil:
		return d.Found.ConfigPath
	}
	return ""
}

// Text tells a mode and why it applies, for `vk check`.
func (d Detection) Text() string {
	return fmt.Sprintf("%s: %s", d.Mode, strings.TrimSuffix(d.Why, "."))
}

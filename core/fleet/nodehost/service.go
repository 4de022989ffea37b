package nodehost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// ServiceUnit is the name of a node's service.
const ServiceUnit = "vk-node.service"

// serviceMark begins a unit that `vk node service install` wrote. Others are
// left alone.
const serviceMark = "# Written by vk node service install; running it again replaces this file."

// Systemd speaks to systemd's managers through its programs.
type Systemd interface {
	// Ctl runs systemctl, of the calling user's manager when user is set. Its
	// error holds what the program said.
	Ctl(ctx context.Context, user bool, args ...string) (stdout string, err error)
	// Linger lets a user's services run without a login session.
	Linger(ctx context.Context, user string) error
}

// Service is a node's service under systemd: a system unit of root's making, or
// a user's own.
type Service struct {
	Root    Root
	Systemd Systemd
	// Own says that it is a unit of User's own manager, and User is who asks;
	// otherwise root asks and the unit names its User=.
	Own  bool
	User User
	// ConfigHome is $XDG_CONFIG_HOME of who asks, for a unit of its own.
	ConfigHome string

	Exe         string // this program's file, resolved through links
	ConfigFile  string // that was read; "" = none
	StateDir    string
	StateFlag   bool          // the state directory was named by a flag or the environment
	StopTimeout time.Duration // 0 = no limit
	// Detection is the host's runner; RunnerProgram is [node] gitlab_runner.
	Detection     Detection
	RunnerProgram string
	IgnoreCIUser  bool
	// Note and Warn tell the one who asks what was done, and what may go wrong.
	Note, Warn func(format string, a ...any)
}

// Text is the unit.
func (s *Service) Text() (string, error) {
	argv := []string{s.Exe, "node", "run"}
	if s.ConfigFile != "" {
		argv = append(argv, "--config", s.ConfigFile)
	}
	if s.StateFlag {
		argv = append(argv, "--state-dir", s.StateDir)
	}
	exec, err := quoteExec(argv)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	line(serviceMark)
	line("[Unit]")
	line("Description=virtkit node: this host as a member of a fleet")
	if !s.Own {
		line("Wants=network-online.target")
		line("After=network-online.target")
	}
	line("# What fails on every start ends after ten of them: there is room for a release")
	line("# on trial, its attempts and its rollback.")
	line("StartLimitIntervalSec=10min")
	line("StartLimitBurst=10")
	line("")
	line("[Service]")
	line("ExecStart=%s", exec)
	if !s.Own {
		line("User=%s", s.User.Name)
	}
	line("Restart=on-failure")
	line("RestartSec=10s")
	line("# The signal to stop reaches the node alone, which quits its runner and waits for")
	line("# the jobs; at the end of the time both are killed.")
	line("KillMode=mixed")
	line("TimeoutStopSec=%s", stopText(s.StopTimeout))
	line("# A job's guest that the kernel kills for memory does not end the node.")
	line("OOMPolicy=continue")
	line("")
	line("[Install]")
	if s.Own {
		line("WantedBy=default.target")
	} else {
		line("WantedBy=multi-user.target")
	}
	return b.String(), nil
}

func stopText(d time.Duration) string {
	if d <= 0 {
		return "infinity"
	}
	return fmt.Sprintf("%ds", int64((d+time.Second-1)/time.Second))
}

// quoteExec writes a command for ExecStart= (systemd.service(5)): a word with
// anything but plain characters is quoted, and specifiers and variables are
// taken literally.
func quoteExec(argv []string) (string, error) {
	var out []string
	for i, a := range argv {
		for _, c := range a {
			if c < ' ' || c == 0x7f || c == '\uFFFD' {
				return "", fault.Newf(fault.Usage, "%q cannot stand in a unit of systemd", a).Hint("move it to a path without control characters")
			}
		}
		q := strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`, `$`, `$$`).Replace(a)
		if i == 0 {
			// Variables are not put in for the program itself.
			q = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`).Replace(a)
		}
		if a == "" || strings.ContainsAny(a, " \t\\\"'$;") {
			q = `"` + q + `"`
		}
		out = append(out, q)
	}
	return strings.Join(out, " "), nil
}

// Path is the unit's file on the host.
func (s *Service) Path() (string, error) {
	if !s.Own {
		return filepath.Join("/etc/systemd/system", ServiceUnit), nil
	}
	// su and sudo -u may carry the variable over from somebody else.
	if s.ConfigHome != "" && filepath.IsAbs(s.ConfigHome) {
		if st, err := os.Stat(s.Root.Path(s.ConfigHome)); err == nil && st.IsDir() && uidOf(st) == s.User.UID {
			return filepath.Join(s.ConfigHome, "systemd/user", ServiceUnit), nil
		}
	}
	if s.User.Home == "" {
		return "", fault.Newf(fault.System, "%s has no home directory in /etc/passwd", s.User).
			Hint("set XDG_CONFIG_HOME to a directory of this user")
	}
	return filepath.Join(s.User.Home, ".config/systemd/user", ServiceUnit), nil
}

// state is what the manager says of the unit.
type unitState struct{ active, sub string }

func (u unitState) running() bool  { return u.active == "active" }
func (u unitState) changing() bool { return u.active == "activating" || u.active == "deactivating" }

func (s *Service) state(ctx context.Context) (unitState, error) {
	out, err := s.Systemd.Ctl(ctx, s.Own, "show", "--property=ActiveState", "--property=SubState", ServiceUnit)
	if err != nil {
		return unitState{}, err
	}
	var u unitState
	for l := range strings.SplitSeq(out, "\n") {
		switch k, v, _ := strings.Cut(strings.TrimSpace(l), "="); k {
		case "ActiveState":
			u.active = v
		case "SubState":
			u.sub = v
		}
	}
	return u, nil
}

// ours says whether the unit's file was written by install; there is none when
// exists is false.
func (s *Service) ours(path string) (exists, ours bool, err error) {
	masked, err := s.Root.masked(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, false, nil
	}
	if err != nil || masked {
		return true, false, err
	}
	b, err := s.Root.read(path)
	return true, bytes.HasPrefix(b, []byte(serviceMark)), err
}

// Refuse says why the unit may not be installed. start says that it is to be
// started, held that a node holds the state directory now, and nodeOwner who
// owns <state_dir>/node; -1 = the host is not enrolled.
func (s *Service) Refuse(ctx context.Context, start, held bool, nodeOwner int) error {
	switch {
	case nodeOwner < 0:
		return fault.Newf(fault.Conflict, "this host is not enrolled: %s has no identity of a node", s.StateDir).
			Hint("enroll it first: vk node join HUB --token -")
	case nodeOwner != s.User.UID:
		who := s.Root.UserOf(nodeOwner)
		return fault.Newf(fault.Conflict, "%s enrolled this host, and the node would run as %s: %s belongs to %s", who, s.User, filepath.Join(s.StateDir, "node"), who).
			Hint("run the node as %s; or remove the node from its hub, delete %s and join again as %s", who, filepath.Join(s.StateDir, "node"), s.User)
	}
	if err := s.refuseProgram(); err != nil {
		return err
	}
	if err := s.refuseRunner(); err != nil {
		return err
	}
	path, err := s.Path()
	if err != nil {
		return err
	}
	exists, ours, err := s.ours(path)
	if err != nil {
		return fmt.Errorf("looking at the unit in place: %w", err)
	}
	if exists && !ours {
		return fault.Newf(fault.Conflict, "%s is there, and vk node service install did not write it", path).
			Hint("remove it, or keep running the node by it")
	}
	if err := s.refuseOther(); err != nil {
		return err
	}
	st, serr := s.state(ctx)
	if serr == nil && st.changing() {
		return fault.Newf(fault.Busy, "%s is %s just now (%s)", ServiceUnit, st.active, st.sub).
			Hint("wait for it: systemctl status %s", ServiceUnit)
	}
	if start && held && (serr != nil || !st.running()) {
		return fault.Newf(fault.Busy, "a vk node that is not %s holds %s", ServiceUnit, s.StateDir).
			Hint("end that vk node run, or the unit that runs it, first; or pass --no-start")
	}
	return nil
}

// refuseProgram checks that the program may be a service's.
func (s *Service) refuseProgram() error {
	releases := filepath.Join(s.StateDir, "node/releases")
	if strings.HasPrefix(s.Exe, releases+"/") {
		return fault.Newf(fault.Usage, "%s is a release of a node on trial, not an installed vk", s.Exe).
			Hint("run the installed vk: an update replaces that one")
	}
	a := Access{Root: s.Root, User: s.User}
	if s.Own {
		return nil // who asks runs it, and has read the configuration
	}
	if err := a.Can(s.Exe, accessExec); err != nil {
		return fault.Newf(fault.Denied, "%s cannot run %s", s.User, s.Exe).Because(err).Hint("install vk where everybody can run it, such as /usr/local/bin")
	}
	if err := a.Can(s.StateDir, accessWrite|accessExec|accessRead); err != nil {
		return fault.Newf(fault.Denied, "%s cannot use the state directory %s", s.User, s.StateDir).Because(err).
			Hint("vk node join --user %s hands it over", s.User)
	}
	if s.ConfigFile != "" {
		if err := a.Can(s.ConfigFile, accessRead); err != nil {
			return fault.Newf(fault.Denied, "%s cannot read the configuration %s", s.User, s.ConfigFile).Because(err)
		}
	} else if own := filepath.Join(s.User.Home, ".config/virtkit/config.toml"); s.User.Home != "" {
		if _, err := os.Stat(s.Root.Path(own)); err == nil {
			return fault.Newf(fault.Conflict, "no configuration was read here, and the node would read %s", own).
				Hint("name one: vk --config %s node service install --user %s", own, s.User)
		}
	}
	if err := a.Can(filepath.Dir(s.Exe), accessWrite); err != nil {
		s.Warn("%s cannot write %s: the node will refuse updates of vk", s.User, filepath.Dir(s.Exe))
	}
	return nil
}

// refuseRunner checks what the node would do with the host's runner.
func (s *Service) refuseRunner() error {
	if err := s.Detection.Refuse(); err != nil {
		return err
	}
	if s.Detection.Mode == ModeManaged && s.RunnerProgram == "" && s.Root.Program(runnerProgram) == "" {
		return fault.Newf(fault.Usage, "a service finds no gitlab-runner on systemd's PATH (%s)", systemdPath).
			Hint(`set [node] gitlab_runner to its absolute path`)
	}
	c := CICheck{Root: s.Root, StateDir: s.StateDir, User: s.User, Found: s.Detection.Found, Mode: s.Detection.Mode}
	ev, err := c.Evidence()
	if err != nil {
		return fmt.Errorf("looking for the user of this host's CI jobs: %w", err)
	}
	if len(ev) > 0 && s.IgnoreCIUser {
		s.Warn("%s", c.MismatchText(ev))
		return nil
	}
	return c.MismatchError(ev)
}

// refuseOther refuses a second service of the same user, by the other kind of
// manager.
func (s *Service) refuseOther() error {
	if s.Own {
		u, err := s.Root.FindUnit(ServiceUnit)
		if err != nil {
			return err
		}
		if u != nil && !u.Masked && u.User == s.User.Name {
			return fault.Newf(fault.Conflict, "the system unit %s runs a node as %s already", u.File, s.User).
				Hint("remove it first: sudo vk node service uninstall")
		}
		return nil
	}
	if s.User.Home == "" {
		return nil
	}
	own := filepath.Join(s.User.Home, ".config/systemd/user", ServiceUnit)
	masked, err := s.Root.masked(own)
	if errors.Is(err, fs.ErrNotExist) || err == nil && masked {
		return nil
	}
	if err != nil {
		return err
	}
	return fault.Newf(fault.Conflict, "%s runs a node by a unit of its own already (%s)", s.User, own).
		Hint("remove it first: as %s, vk node service uninstall", s.User)
}

// Install writes the unit, enables it and, with start, starts it or restarts a
// node that runs, waiting for the jobs of its runner. Refuse comes first. When
// the manager cannot be reached the unit is there, and the error names it.
func (s *Service) Install(ctx context.Context, start bool) error {
	path, err := s.Path()
	if err != nil {
		return err
	}
	text, err := s.Text()
	if err != nil {
		return err
	}
	at := s.Root.Path(path)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := fsx.WriteFile(at, []byte(text), 0o644); err != nil {
		return fmt.Errorf("writing the unit: %w", err)
	}
	s.Note("wrote %s", path)
	steps := [][]string{{"daemon-reload"}, {"enable", ServiceUnit}}
	for _, args := range steps {
		if _, err := s.Systemd.Ctl(ctx, s.Own, args...); err != nil {
			return s.unreachable(path, err)
		}
	}
	// There is nothing to clear of a unit that never failed.
	s.Systemd.Ctl(ctx, s.Own, "reset-failed", ServiceUnit)
	if s.Own {
		if err := s.Systemd.Linger(ctx, s.User.Name); err != nil {
			s.Warn("the node runs only while %s is logged in; an administrator mends that: sudo loginctl enable-linger %s", s.User, s.User)
		}
	}
	if !start {
		s.Note("enabled %s; it starts with the host, or by systemctl%s start %s", ServiceUnit, s.flag(), ServiceUnit)
		return nil
	}
	verb := "start"
	if st, err := s.state(ctx); err == nil && st.running() {
		verb = "restart"
		s.Note("restarting the node; this waits for the jobs of a runner that it manages")
	}
	if _, err := s.Systemd.Ctl(ctx, s.Own, verb, ServiceUnit); err != nil {
		return fault.Newf(fault.System, "%s is installed (%s) and does not %s", ServiceUnit, path, verb).Because(err).
			Hint("journalctl%s -u %s says why", s.flag(), ServiceUnit)
	}
	s.Note("%s runs as %s", ServiceUnit, s.User)
	return nil
}

func (s *Service) flag() string {
	if s.Own {
		return " --user"
	}
	return ""
}

func (s *Service) unreachable(path string, err error) error {
	return fault.Newf(fault.Unavailable, "systemd's manager cannot be reached; the unit %s is written, neither enabled nor started", path).Because(err).
		Hint("once systemd runs: systemctl%s daemon-reload && systemctl%s enable --now %s", s.flag(), s.flag(), ServiceUnit)
}

// Running says whether the node's service runs now.
func (s *Service) Running(ctx context.Context) (bool, error) {
	st, err := s.state(ctx)
	return err == nil && (st.running() || st.changing()), err
}

// Stop stops the service and waits for it, the jobs of a managed runner
// included; Start starts it.
func (s *Service) Stop(ctx context.Context) error {
	_, err := s.Systemd.Ctl(ctx, s.Own, "stop", ServiceUnit)
	return err
}

// Start starts the service.
func (s *Service) Start(ctx context.Context) error {
	_, err := s.Systemd.Ctl(ctx, s.Own, "start", ServiceUnit)
	return err
}

// Uninstall stops, disables and removes the unit. The enrollment stays.
func (s *Service) Uninstall(ctx context.Context) error {
	path, err := s.Path()
	if err != nil {
		return err
	}
	exists, ours, err := s.ours(path)
	switch {
	case err != nil:
		return err
	case !exists:
		return fault.Newf(fault.NotFound, "there is no %s", path)
	case !ours:
		return fault.Newf(fault.Conflict, "%s was not written by vk node service install and is left alone", path)
	}
	s.Note("stopping %s; this waits for the jobs of a runner that it manages", ServiceUnit)
	if _, err := s.Systemd.Ctl(ctx, s.Own, "disable", "--now", ServiceUnit); err != nil {
		return fault.Newf(fault.System, "%s cannot be stopped and disabled; %s stays", ServiceUnit, path).Because(err)
	}
	if err := os.Remove(s.Root.Path(path)); err != nil {
		return err
	}
	if err := fsx.SyncDir(filepath.Dir(s.Root.Path(path))); err != nil {
		return err
	}
	s.Note("removed %s; the host stays enrolled", path)
	if _, err := s.Systemd.Ctl(ctx, s.Own, "daemon-reload"); err != nil {
		return err
	}
	s.Systemd.Ctl(ctx, s.Own, "reset-failed", ServiceUnit) // nothing to clear is no failure
	return nil
}

package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/nodehost"
)

// systemd is a manager of values.
type systemd struct {
	active string // ActiveState of the unit
	err    error  // of every call
	fail   string // the verb that fails
	calls  []string
	linger error
}

func (s *systemd) Ctl(_ context.Context, user bool, args ...string) (string, error) {
	call := strings.Join(args, " ")
	if user {
		call = "--user " + call
	}
	if args[0] == "show" {
		return "ActiveState=" + s.active + "\nSubState=x\n", s.err
	}
	s.calls = append(s.calls, call)
	if s.err == nil && args[0] == s.fail {
		return "", errors.New("job failed")
	}
	return "", s.err
}

func (s *systemd) Linger(_ context.Context, user string) error {
	s.calls = append(s.calls, "linger "+user)
	return s.linger
}

// installable is a service that may be installed, and what it says.
func installable(t *testing.T, own bool) (*nodehost.Service, *systemd, *[]string) {
	t.Helper()
	root := tree(t, map[string]string{"etc/passwd": passwd, "etc/group": groups, "etc/virtkit/config.toml": "", "usr/local/bin/vk": ""})
	executables(t, root, "/usr/local/bin/vk")
	m := &systemd{active: "inactive"}
	var said []string
	say := func(format string, a ...any) { said = append(said, fmt.Sprintf(format, a...)) }
	state := "/var/lib/virtkit"
	if err := os.MkdirAll(root.Path(state), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{string(root), filepath.Dir(string(root)), root.Path(state)} {
		os.Chmod(d, 0o777)
	}
	return &nodehost.Service{
		Root: root, Systemd: m, Own: own, User: nodehost.User{Name: "ci", UID: 990, GID: 980, Home: "/home/ci"},
		Exe: "/usr/local/bin/vk", ConfigFile: "/etc/virtkit/config.toml", StateDir: state, StopTimeout: time.Hour,
		Detection: nodehost.Detection{Mode: nodehost.ModeNone}, Note: say, Warn: say,
	}, m, &said
}

const systemUnit = `# Written by vk node service install; running it again replaces this file.
[Unit]
Description=virtkit node: this host as a member of a fleet
Wants=network-online.target
After=network-online.target
# What fails on every start ends after ten of them: there is room for a release
# on trial, its attempts and its rollback.
StartLimitIntervalSec=10min
StartLimitBurst=10

[Service]
ExecStart=/usr/local/bin/vk node run --config /etc/virtkit/config.toml
User=ci
Restart=on-failure
RestartSec=10s
# The signal to stop reaches the node alone, which quits its runner and waits for
# the jobs; at the end of the time both are killed.
KillMode=mixed
TimeoutStopSec=3600s
# A job's guest that the kernel kills for memory does not end the node.
OOMPolicy=continue

[Install]
WantedBy=multi-user.target
`

func TestServiceText(t *testing.T) {
	s, _, _ := installable(t, false)
	got, err := s.Text()
	if err != nil || got != systemUnit {
		t.Errorf("%v\n%s\nwant\n%s", err, got, systemUnit)
	}
	s.Own, s.StopTimeout, s.ConfigFile, s.StateFlag = true, 0, "", true
	s.Exe, s.StateDir = "/opt/my vk/100%/$x/vk", `/data/a"b\c%d$e`
	got, err = s.Text()
	for _, want := range []string{`ExecStart="/opt/my vk/100%%/$x/vk" node run --state-dir "/data/a\"b\\c%%d$$e"`, "TimeoutStopSec=infinity\n", "WantedBy=default.target\n"} {
		if err != nil || !strings.Contains(got, want) {
			t.Errorf("lacks %q (%v):\n%s", want, err, got)
		}
	}
	for _, never := range []string{"User=", "network-online"} {
		if strings.Contains(got, never) {
			t.Errorf("a unit of a user's own has %q:\n%s", never, got)
		}
	}
	s.Exe = "/opt/a\nExecStart=/bin/evil/vk"
	if _, err := s.Text(); fault.KindOf(err) != fault.Usage {
		t.Errorf("a line break in a path: %v", err)
	}
}

// systemd's own word on the units.
func TestServiceVerify(t *testing.T) {
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not here: package systemd")
	}
	bin := filepath.Join(t.TempDir(), "a b", "vk") // quoted
	write(t, bin, "#!/bin/sh\n", 0o755)
	for _, own := range []bool{false, true} {
		s, _, _ := installable(t, own)
		s.Exe, s.User.Name = bin, "root"
		text, err := s.Text()
		if err != nil {
			t.Fatal(err)
		}
		unit := filepath.Join(t.TempDir(), nodehost.ServiceUnit)
		write(t, unit, text, 0o644)
		args := []string{"verify", "--man=no", unit}
		if own {
			args = append([]string{"--user"}, args...)
		}
		verify := func() ([]byte, error) {
			cmd := exec.Command(tool, args...)
			cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir())
			return cmd.CombinedOutput()
		}
		out, err := verify()
		// Other units of the machine are loaded with it, and may be broken.
		if strings.Contains(string(out), nodehost.ServiceUnit) || err != nil && len(out) == 0 {
			t.Errorf("%v: %s\n%s", err, out, text)
		}
		if own {
			continue
		}
		// Were it broken, it would be said.
		write(t, unit, strings.Replace(text, "KillMode=mixed", "KillMode=some", 1), 0o644)
		if out, _ := verify(); !strings.Contains(string(out), "kill mode") {
			t.Skipf("systemd-analyze cannot load units here: %s", out)
		}
	}
}

func TestServiceInstall(t *testing.T) {
	for _, tt := range []struct {
		own, start bool
		active     string
		calls      []string
	}{
		{false, true, "inactive", []string{"daemon-reload", "enable vk-node.service", "reset-failed vk-node.service", "start vk-node.service"}},
		{false, true, "active", []string{"daemon-reload", "enable vk-node.service", "reset-failed vk-node.service", "restart vk-node.service"}},
		{false, false, "active", []string{"daemon-reload", "enable vk-node.service", "reset-failed vk-node.service"}},
		{true, true, "failed", []string{"--user daemon-reload", "--user enable vk-node.service", "--user reset-failed vk-node.service", "linger ci", "--user start vk-node.service"}},
	} {
		s, m, said := installable(t, tt.own)
		m.active = tt.active
		if err := s.Install(t.Context(), tt.start); err != nil {
			t.Errorf("%v", err)
		}
		if !slices.Equal(m.calls, tt.calls) {
			t.Errorf("calls %q, want %q", m.calls, tt.calls)
		}
		path := "/etc/systemd/system/vk-node.service"
		if tt.own {
			path = "/home/ci/.config/systemd/user/vk-node.service"
		}
		text, _ := s.Text()
		b, err := os.ReadFile(s.Root.Path(path))
		if st, serr := os.Stat(s.Root.Path(path)); err != nil || serr != nil || string(b) != text || st.Mode() != 0o644 {
			t.Errorf("%s: %v %v\n%s", path, err, serr, b)
		}
		if !strings.Contains((*said)[0], path) {
			t.Errorf("said %q", *said)
		}
	}

	s, m, said := installable(t, true)
	m.linger = errors.New("not allowed")
	if err := s.Install(t.Context(), true); err != nil || !slices.ContainsFunc(*said, func(l string) bool { return strings.Contains(l, "sudo loginctl enable-linger ci") }) {
		t.Errorf("%v, said %q", err, *said)
	}
	s, m, _ = installable(t, false)
	m.err = errors.New("System has not been booted with systemd as init system")
	err := s.Install(t.Context(), true)
	if err == nil || !strings.Contains(err.Error(), "/etc/systemd/system/vk-node.service") || fault.KindOf(err) != fault.Unavailable {
		t.Errorf("without a manager: %v", err)
	}
	if _, err := os.Stat(s.Root.Path("/etc/systemd/system/vk-node.service")); err != nil {
		t.Error(err)
	}
	s, m, _ = installable(t, false)
	m.fail = "start"
	if err := s.Install(t.Context(), true); err == nil || !strings.Contains(fault.HintOf(err), "journalctl -u vk-node.service") {
		t.Errorf("a node that does not start: %v", err)
	}
}

func TestServicePath(t *testing.T) {
	s, _, _ := installable(t, true)
	s.User.UID = os.Getuid()
	os.MkdirAll(s.Root.Path("/home/xdg"), 0o755)
	for _, tt := range []struct {
		config string
		uid    int
		want   string
	}{
		{"/home/xdg", os.Getuid(), "/home/xdg/systemd/user/vk-node.service"},
		{"/home/xdg", os.Getuid() + 1, "/home/ci/.config/systemd/user/vk-node.service"}, // somebody else's
		{"/home/none", os.Getuid(), "/home/ci/.config/systemd/user/vk-node.service"},
		{"", os.Getuid(), "/home/ci/.config/systemd/user/vk-node.service"},
	} {
		s.ConfigHome, s.User.UID = tt.config, tt.uid
		if got, err := s.Path(); err != nil || got != tt.want {
			t.Errorf("%s of %d: %s, %v; want %s", tt.config, tt.uid, got, err, tt.want)
		}
	}
}

func TestServiceRefusals(t *testing.T) {
	ownUnit := func(path, text string) func(*nodehost.Service, *systemd) {
		return func(s *nodehost.Service, _ *systemd) { writeIn(s.Root, path, text) }
	}
	runs := func(*nodehost.Service, *systemd) {}
	for _, tt := range []struct {
		name   string
		change func(*nodehost.Service, *systemd)
		own    bool
		start  bool
		held   bool
		owner  int
		want   string // part of the error; "" = it may be installed
	}{
		{"nothing is in the way", runs, false, true, false, 990, ""},
		{"of a user's own", runs, true, true, false, 990, ""},
		{"not enrolled", runs, false, true, false, -1, "not enrolled"},
		{"enrolled by another", runs, false, true, false, 0, "root enrolled this host, and the node would run as ci"},
		{"another node holds the state directory", runs, false, true, true, 990, "a vk node that is not vk-node.service holds /var/lib/virtkit"},
		{"it may be there when nothing is started", runs, false, false, true, 990, ""},
		{"the service's own node holds it", func(_ *nodehost.Service, m *systemd) { m.active = "active" }, false, true, true, 990, ""},
		{"a node holds it and no manager runs", func(_ *nodehost.Service, m *systemd) { m.err = errors.New("no") }, false, true, true, 990, "holds"},
		{"it starts", func(_ *nodehost.Service, m *systemd) { m.active = "activating" }, false, true, false, 990, "is activating just now"},
		{"it stops", func(_ *nodehost.Service, m *systemd) { m.active = "deactivating" }, false, false, false, 990, "is deactivating just now"},
		{"a unit of the administrator's", ownUnit("/etc/systemd/system/vk-node.service", "[Service]\n"), false, true, false, 990, "did not write it"},
		{"its own unit", ownUnit("/etc/systemd/system/vk-node.service", systemUnit), false, true, false, 990, ""},
		{"the user's own unit", ownUnit("/home/ci/.config/systemd/user/vk-node.service", systemUnit), false, true, false, 990, "by a unit of its own already"},
		{"a system unit of the user", ownUnit("/etc/systemd/system/vk-node.service", systemUnit), true, true, false, 990, "runs a node as ci already"},
		{"a system unit of another user", ownUnit("/etc/systemd/system/vk-node.service", strings.Replace(systemUnit, "User=ci", "User=other", 1)), true, true, false, 990, ""},
		{"a release", func(s *nodehost.Service, _ *systemd) { s.Exe = s.StateDir + "/node/releases/abc" }, false, true, false, 990, "a release of a node on trial"},
		{"a program that the user cannot run", func(s *nodehost.Service, _ *systemd) { os.Chmod(s.Root.Path("/usr/local/bin/vk"), 0o700) }, false, true, false, 990, "ci cannot run"},
		{"a directory that it cannot pass", func(s *nodehost.Service, _ *systemd) { os.Chmod(s.Root.Path("/usr/local"), 0o700) }, false, true, false, 990, "ci cannot run"},
		{"a state directory that it cannot use", func(s *nodehost.Service, _ *systemd) { os.Chmod(s.Root.Path("/var/lib/virtkit"), 0o755) }, false, true, false, 990, "cannot use the state directory"},
		{"a configuration that it cannot read", func(s *nodehost.Service, _ *systemd) { os.Chmod(s.Root.Path("/etc/virtkit/config.toml"), 0o600) }, false, true, false, 990, "cannot read the configuration"},
		{"a configuration that it alone would read", func(s *nodehost.Service, _ *systemd) {
			s.ConfigFile = ""
			writeIn(s.Root, "/home/ci/.config/virtkit/config.toml", "")
		}, false, true, false, 990, "the node would read /home/ci/.config/virtkit/config.toml"},
		{"no gitlab-runner for a managed one", func(s *nodehost.Service, _ *systemd) { s.Detection.Mode = nodehost.ModeManaged }, false, true, false, 990, "finds no gitlab-runner on systemd's PATH"},
		{"its path is set", func(s *nodehost.Service, _ *systemd) {
			s.Detection.Mode, s.RunnerProgram = nodehost.ModeManaged, "/home/ci/bin/gitlab-runner"
		}, false, true, false, 990, ""},
		{"none beside a runner of vk", func(s *nodehost.Service, _ *systemd) { s.Detection.Found = foundVK(0) }, false, true, false, 990, `[node] runner is "none"`},
		{"another user's jobs", func(s *nodehost.Service, _ *systemd) {
			s.Detection = nodehost.Detection{Mode: nodehost.ModeExternal, Found: foundVK(0)}
		}, false, true, false, 990, "the host's CI jobs run as root"},
		{"ignored", func(s *nodehost.Service, _ *systemd) {
			s.IgnoreCIUser, s.Detection = true, nodehost.Detection{Mode: nodehost.ModeExternal, Found: foundVK(0)}
		}, false, true, false, 990, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if os.Getuid() != 0 {
				// The fakes belong to the test's user, who stands for root.
				t.Skip("only root's files are another user's: run it as root")
			}
			s, m, said := installable(t, tt.own)
			tt.change(s, m)
			err := s.Refuse(t.Context(), tt.start, tt.held, tt.owner)
			if (err != nil) != (tt.want != "") || err != nil && (!strings.Contains(err.Error(), tt.want) || fault.HintOf(err) == "" && !strings.Contains(tt.want, "cannot read")) {
				t.Errorf("%v (%s), want %q", err, fault.HintOf(err), tt.want)
			}
			if tt.name == "ignored" && !slices.ContainsFunc(*said, func(l string) bool { return strings.Contains(l, "run as root") }) {
				t.Errorf("no warning: %q", *said)
			}
			if tt.name == "nothing is in the way" && !slices.ContainsFunc(*said, func(l string) bool { return strings.Contains(l, "will refuse updates") }) {
				t.Errorf("no warning of a directory that the user cannot write: %q", *said)
			}
		})
	}
}

func foundVK(uid int) *nodehost.Runner {
	return &nodehost.Runner{
		Unit: &nodehost.Unit{Name: "gitlab-runner.service"}, User: nodehost.User{Name: "root", UID: uid}, ConfigPath: "/etc/gitlab-runner/config.toml",
		Config: &nodehost.RunnerConfig{VK: []nodehost.VKUse{{Runner: "vms"}}},
	}
}

func writeIn(r nodehost.Root, path, text string) {
	os.MkdirAll(filepath.Dir(r.Path(path)), 0o755)
	if err := os.WriteFile(r.Path(path), []byte(text), 0o644); err != nil {
		panic(err)
	}
}

func TestServiceUninstall(t *testing.T) {
	s, m, _ := installable(t, false)
	if err := s.Uninstall(t.Context()); fault.KindOf(err) != fault.NotFound {
		t.Errorf("of nothing: %v", err)
	}
	path := s.Root.Path("/etc/systemd/system/vk-node.service")
	writeIn(s.Root, "/etc/systemd/system/vk-node.service", "[Service]\n")
	if err := s.Uninstall(t.Context()); fault.KindOf(err) != fault.Conflict {
		t.Errorf("of somebody's unit: %v", err)
	}
	if len(m.calls) != 0 {
		t.Errorf("calls %q", m.calls)
	}
	if err := s.Install(t.Context(), true); err != nil && !strings.Contains(err.Error(), "x") {
		t.Fatal(err)
	}
	m.calls = nil
	m.fail = "disable"
	if err := s.Uninstall(t.Context()); err == nil {
		t.Error("a unit that does not stop was removed")
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	m.calls, m.fail = nil, ""
	if err := s.Uninstall(t.Context()); err != nil {
		t.Error(err)
	}
	if want := []string{"disable --now vk-node.service", "daemon-reload", "reset-failed vk-node.service"}; !slices.Equal(m.calls, want) {
		t.Errorf("calls %q, want %q", m.calls, want)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unit is left: %v", err)
	}
}

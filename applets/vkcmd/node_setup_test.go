package vkcmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/fsx"
)

// manager is systemd's manager as a join meets it.
type manager struct {
	active string
	calls  []string
}

func (m *manager) Ctl(_ context.Context, _ bool, args ...string) (string, error) {
	if args[0] == "show" {
		if m.active == "" {
			return "", errors.New("no manager")
		}
		return "ActiveState=" + m.active + "\n", nil
	}
	m.calls = append(m.calls, args[0])
	return "", nil
}

func (m *manager) Linger(context.Context, string) error { return nil }

// hostApp is an app of a host with that configuration, run by the test's user.
func hostApp(t *testing.T, config string) (*app, *wire.Host, *bytes.Buffer) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"HOME": dir, "VIRTKIT_STATE_DIR": filepath.Join(dir, "state"), "VIRTKIT_CONFIG": file, "XDG_CONFIG_HOME": dir}
	var errOut bytes.Buffer
	a := &app{g: globals{color: "never"}, env: appenv.Env{
		Args: []string{"vk"}, Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Stderr: &errOut, Exe: "/proc/self/exe",
		Getenv: func(k string) string { return env[k] }, LookupEnv: func(k string) (string, bool) { v, ok := env[k]; return v, ok },
		Environ: os.Environ, Dir: os.Getwd,
	}}
	h, err := a.host()
	if err != nil {
		t.Fatal(err)
	}
	return a, h, &errOut
}

func enrolled(t *testing.T, h *wire.Host) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Join(h.StateDir, "node"), 0o700), os.WriteFile(filepath.Join(h.StateDir, enrollmentFile), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestJoinHost(t *testing.T) {
	const none = "[node]\nrunner = \"none\"\n"
	for _, tt := range []struct {
		name     string
		config   string
		j        hostJoin
		active   string
		was      bool // enrolled before
		held     bool
		foreign  bool // a claim of another user's
		enroll   error
		want     string   // part of the error; "" = it works
		calls    []string // of the manager
		enrolled bool     // enroll was called
	}{
		{name: "plain", enrolled: true},
		{name: "the hub refuses", enroll: errors.New("the token has expired"), want: "expired", enrolled: true},
		{name: "a running node", held: true, want: "a running vk node holds"},
		{name: "a user, by a user", j: hostJoin{user: "ci", uid: 1000}, want: "takes root"},
		{name: "jobs of another user", foreign: true, want: "the host's CI jobs run as user 54321"},
		{name: "ignored", foreign: true, j: hostJoin{ignoreCIUser: true}, enrolled: true},
		{name: "of no matter to a managed runner", config: "[node]\nrunner = \"managed\"\n", foreign: true, enrolled: true},
		{name: "the service is not running", j: hostJoin{service: true}, active: "inactive", enroll: errors.New("no"), want: "no", enrolled: true},
		{name: "no manager", j: hostJoin{service: true}, enroll: errors.New("no"), want: "no", enrolled: true},
		{name: "the service is stopped, and stays so without its enrollment", j: hostJoin{service: true}, active: "active", enroll: errors.New("no"), want: "no", calls: []string{"stop"}, enrolled: true},
		{name: "what holds it is not the service", j: hostJoin{service: true}, active: "active", was: true, held: true, want: "holds", calls: []string{"stop"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.foreign && os.Getuid() != 0 {
				t.Skip("only root makes files of another user: run it as root")
			}
			if tt.config == "" {
				tt.config = none
			}
			a, h, _ := hostApp(t, tt.config)
			if tt.was || tt.held {
				enrolled(t, h)
			}
			if tt.held {
				l, err := fsx.TryLock(filepath.Join(h.StateDir, nodeLock), false)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			}
			if tt.foreign {
				claim := filepath.Join(h.StateDir, "admit/17-a")
				if err := errors.Join(os.MkdirAll(filepath.Dir(claim), 0o700), os.WriteFile(claim, nil, 0o600), os.Chown(claim, 54321, 54321)); err != nil {
					t.Fatal(err)
				}
			}
			m := &manager{active: tt.active}
			j := tt.j
			if j.uid == 0 {
				j.uid = os.Getuid()
			}
			called := false
			j.systemd, j.enroll = m, func(context.Context) error { called = true; return tt.enroll }
			err := a.joinHost(t.Context(), h, j)
			if (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v (%s), want %q", err, fault.HintOf(err), tt.want)
			}
			if !slices.Equal(m.calls, tt.calls) || called != tt.enrolled {
				t.Errorf("calls %q, enroll called: %v", m.calls, called)
			}
		})
	}
}

// As root the enrollment runs as the user, with the token on standard input.
func TestJoinAs(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("another user's process takes root: run it as root")
	}
	a, h, _ := hostApp(t, "[node]\nrunner = \"none\"\n")
	// Everybody may pass to what the user is to reach.
	for dir := h.StateDir; strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	exe := filepath.Join(t.TempDir(), "vk")
	for dir := filepath.Dir(exe); strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		os.Chmod(dir, 0o755)
	}
	if err := os.WriteFile(exe, []byte("#!/bin/sh\necho \"$(id -un) $* $(cat)\"\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	a.env.Exe = exe
	j := hostJoin{user: "nobody", uid: 0, systemd: &manager{}, token: "t0ken", as: []string{"node", "join", "https://hub.example.com", "--token", "-"},
		run: func(_ context.Context, argv ...string) error { return fmt.Errorf("%q was run", argv) }}
	j.kvm = filepath.Join(t.TempDir(), "none") // whatever this host's device allows
	err := a.joinHost(t.Context(), h, j)
	out := a.env.Stdout.(*bytes.Buffer).String()
	if err == nil || fault.ExitCode(err) != 7 {
		t.Errorf("%v, status %d", err, fault.ExitCode(err))
	}
	if want := fmt.Sprintf("nobody --state-dir %s --config %s node join https://hub.example.com --token - t0ken\n", h.StateDir, h.Conf.File); out != want {
		t.Errorf("%q, want %q", out, want)
	}
	if owner, err := os.Stat(filepath.Join(h.StateDir, "jobs")); err != nil || nobody(owner) {
		t.Errorf("the state directory was not handed over: %v, %v", owner, err)
	}
}

func nobody(st os.FileInfo) bool { return !strings.Contains(fmt.Sprintf("%+v", st.Sys()), "Uid:65534") }

func TestParseStop(t *testing.T) {
	for s, want := range map[string]int{"90s": 90, "10m": 600, "1h": 3600, "45": 45, "0": 0} {
		if d, err := parseStop(s); err != nil || int(d.Seconds()) != want {
			t.Errorf("%s: %v, %v", s, d, err)
		}
	}
	for _, bad := range []string{"", "-1", "-5s", "1.5s", "x", "99999999999"} {
		if d, err := parseStop(bad); err == nil {
			t.Errorf("%q is %v", bad, d)
		}
	}
}

// The unit that the command writes runs this program with what the command was
// given, and is what the command removes.
func TestServiceCommands(t *testing.T) {
	a, h, said := hostApp(t, "[node]\nrunner = \"none\"\n")
	m := &manager{active: "inactive"}
	uid := 4242 // nobody of /etc/passwd: a unit of its own
	if err := a.serviceInstall(t.Context(), h, m, uid, serviceOptions{}); err == nil || !strings.Contains(err.Error(), "not enrolled") {
		t.Errorf("%v", err)
	}
	enrolled(t, h)
	if err := a.serviceInstall(t.Context(), h, m, uid, serviceOptions{}); os.Getuid() != uid && (err == nil || !strings.Contains(err.Error(), "the node would run as")) {
		t.Errorf("%v", err)
	}
	if err := a.serviceInstall(t.Context(), h, m, uid, serviceOptions{user: "root"}); fault.KindOf(err) != fault.Usage {
		t.Errorf("--user of a user: %v", err)
	}
	if err := a.serviceInstall(t.Context(), h, m, 0, serviceOptions{user: "no-such-user"}); fault.KindOf(err) != fault.Usage {
		t.Errorf("--user of nobody: %v", err)
	}
	if len(m.calls) != 0 {
		t.Errorf("calls %q", m.calls)
	}
	if os.Getuid() != 0 {
		t.Skip("the rest is done as another user: run it as root")
	}
	for _, p := range []string{h.StateDir, filepath.Join(h.StateDir, "node"), filepath.Join(h.StateDir, "jobs")} {
		if err := os.Chown(p, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	xdg := a.env.Getenv("XDG_CONFIG_HOME")
	if err := os.Chown(xdg, uid, uid); err != nil {
		t.Fatal(err)
	}
	if err := a.serviceInstall(t.Context(), h, m, uid, serviceOptions{stopTimeout: defaultStop}); err != nil {
		t.Fatalf("%v (%s)\n%s", err, fault.HintOf(err), said)
	}
	unit := filepath.Join(xdg, "systemd/user/vk-node.service")
	b, err := os.ReadFile(unit)
	exe, _ := filepath.EvalSymlinks("/proc/self/exe")
	if want := fmt.Sprintf("\nExecStart=%s node run --config %s --state-dir %s\n", exe, h.Conf.File, h.StateDir); err != nil || !strings.Contains(string(b), want) {
		t.Errorf("%v\n%s\nlacks %s", err, b, want)
	}
	if want := []string{"daemon-reload", "enable", "reset-failed", "start"}; !slices.Equal(m.calls, want) {
		t.Errorf("calls %q, want %q", m.calls, want)
	}
	s, err := a.nodeService(nil, m, uid, serviceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Uninstall(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(unit); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unit is left: %v", err)
	}
}

package fleet_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/fleet/wire"
	"virtkit/e2e/host"
)

// managerSh stands for systemctl, as a test has no systemd: it keeps what it is
// asked, and runs the command line of the unit as the unit's user, in the
// environment that systemd gives (systemd.exec(5)). As loginctl it only keeps.
const managerSh = `#!/bin/sh
d=/mnt/fake
name=${0##*/}
call=
user=
for a; do
	case $a in
	--no-ask-password | --no-pager) continue ;;
	--user) user=1 ;;
	esac
	call="$call $a"
done
case $call in *" show "*) ;; *) echo "$name$call" >>$d/calls ;; esac
[ "$name" = systemctl ] || exit 0
[ ! -e $d/no-manager ] || { echo "System has not been booted with systemd as init system" >&2; exit 1; }
unit=/etc/systemd/system/vk-node.service
[ -z "$user" ] || unit=$HOME/.config/systemd/user/vk-node.service
alive() { [ -e $d/pid ] && kill -0 "$(cat $d/pid)" 2>/dev/null; }
stop() {
	alive || return 0
	kill -TERM "$(cat $d/pid)"
	while alive; do sleep 0.05; done
	rm $d/pid
}
begin() {
	exec=$(sed -n 's/^ExecStart=//p' "$unit")
	if [ -n "$user" ]; then
		setsid env -i HOME="$HOME" USER="$USER" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c "exec $exec" >>$d/node.log 2>&1 </dev/null &
	else
		as=$(sed -n 's/^User=//p' "$unit")
		setsid setpriv --reuid="$as" --regid="$(id -g "$as")" --init-groups --reset-env sh -c "exec $exec" >>$d/node.log 2>&1 </dev/null &
	fi
	echo $! >$d/pid
}
case $call in
*" show "*) if alive; then echo ActiveState=active; echo SubState=running; else echo ActiveState=inactive; echo SubState=dead; fi ;;
*" start "*) alive || begin ;;
*" restart "*) stop; begin ;;
*" stop "* | *" disable --now "*) stop ;;
esac
`

// onMachine runs a command where /etc, /home, /mnt and what else it changes are the
// test's own.
const onMachine = `set -e
mount --bind "$VK_TEST_DIR/etc" /etc
mount --bind "$VK_TEST_DIR/home" /home
mount --bind "$VK_TEST_KERNELS" "$VK_TEST_DIR/mnt/kernels"
mount --rbind "$VK_TEST_DIR/mnt" /mnt
mount -t tmpfs tmpfs /var/log
[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm # a device that everybody may open
unset VK_TEST_DIR VK_TEST_KERNELS
exec "$@"`

// machine is a host of its own files, with this fleet's hub.
type machine struct {
	*fleet
	root, kernels string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for a mount namespace and other users")
	}
	for _, tool := range []string{"unshare", "setpriv", "useradd", "systemd-analyze", "setsid"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s: apt-get install util-linux passwd systemd", tool)
		}
	}
	h, err := host.New("../..", filepath.Join(t.TempDir(), "host"), "")
	if host.IsMissing(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Run(t.Context(), "pull", "local/default"); err != nil {
		t.Fatal(err)
	}
	m := &machine{newFleet(t), t.TempDir(), filepath.Join(h.Base, "kernels")}
	for _, d := range []string{"home", "mnt/bin", "mnt/fake", "mnt/kernels"} {
		if err := os.MkdirAll(filepath.Join(m.root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", "/etc", filepath.Join(m.root, "etc")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), "cp", h.VK, filepath.Join(m.root, "mnt/bin/vk")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	m.put("mnt/fake/systemctl", managerSh, 0o755)
	m.put("mnt/fake/loginctl", managerSh, 0o755)
	_ = os.RemoveAll(m.at("etc/systemd/system/" + nodehost.ServiceUnit))
	t.Cleanup(func() {
		if pid := m.pid(); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if t.Failed() {
			m.show(m.at("mnt/fake/node.log"))
		}
	})
	if out, errOut, code := m.in("", "", "true"); code != 0 {
		t.Skipf("no mount namespace can be made here: %s%s", out, errOut)
	}
	return m
}

func (m *machine) at(path string) string { return filepath.Join(m.root, path) }

func (m *machine) put(path, text string, mode os.FileMode) {
	m.t.Helper()
	file := m.at(path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), mode), os.Chmod(file, mode)); err != nil {
		m.t.Fatal(err)
	}
}

// configure writes a configuration with a state directory that has kernels.
func (m *machine) configure(path, state, runner string) {
	m.t.Helper()
	text := fmt.Sprintf("[node]\nrunner = %q\n[vmm]\naccel = \"tcg\"\n", runner)
	if state != "" {
		text = fmt.Sprintf("state_dir = %q\n", state) + text
	}
	m.put(path, text, 0o644)
}

// stateDir makes a state directory of root's, and gives it the host's kernels.
func (m *machine) stateDir(path string) {
	m.t.Helper()
	if err := errors.Join(os.MkdirAll(m.at(path), 0o755), os.Symlink("/mnt/kernels", filepath.Join(m.at(path), "kernels"))); err != nil {
		m.t.Fatal(err)
	}
}

// in runs a command on the machine, as root or as a user.
func (m *machine) in(user, stdin string, argv ...string) (stdout, stderr string, code int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 3*time.Minute)
	defer cancel()
	path := "PATH=/mnt/fake:" + os.Getenv("PATH")
	if user != "" {
		argv = append([]string{"sh", "-c", `exec setpriv --reuid="$0" --regid="$(id -g "$0")" --init-groups --reset-env env "$@"`, user, path}, argv...)
	}
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", onMachine, "sh"}, argv...)...)
	cmd.Env = []string{path, "HOME=/root", "USER=root", "VK_TEST_DIR=" + m.root, "VK_TEST_KERNELS=" + m.kernels}
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errOut
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		m.t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// join runs vk node join with a new token, and returns the node's ID.
func (m *machine) join(user string, args ...string) string {
	m.t.Helper()
	out, errOut, code := m.in(user, m.must("token", "create"), append([]string{"/mnt/bin/vk", "node", "join", "http://" + m.addr, "--token", "-"}, args...)...)
	id := strings.TrimSpace(out)
	if code != 0 || !wire.IsHex(id, wire.IDLen) {
		m.t.Fatalf("join %q: status %d, printed %q\n%s", args, code, out, errOut)
	}
	return id
}

// refused runs vk, which must end so and say that.
func (m *machine) refused(user, stdin string, code int, words string, args ...string) {
	m.t.Helper()
	out, errOut, got := m.in(user, stdin, append([]string{"/mnt/bin/vk"}, args...)...)
	if got != code || !strings.Contains(strings.Join(strings.Fields(errOut), " "), words) || out != "" {
		m.t.Errorf("vk %q: status %d, printed %q\n%s\nwant status %d and %q", args, got, out, errOut, code, words)
	}
}

// calls are those of the manager since the last look.
func (m *machine) calls() []string {
	b, _ := os.ReadFile(m.at("mnt/fake/calls"))
	_ = os.Remove(m.at("mnt/fake/calls"))
	m.put("mnt/fake/calls", "", 0o666)
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// called checks them.
func (m *machine) called(want ...string) {
	m.t.Helper()
	if got := m.calls(); !slices.Equal(got, want) {
		m.t.Errorf("systemd was called\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// pid is that of the node, 0 when none runs.
func (m *machine) pid() int {
	b, _ := os.ReadFile(m.at("mnt/fake/pid"))
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	if pid > 0 && syscall.Kill(pid, 0) != nil {
		return 0
	}
	return pid
}

// ready waits for a node to be connected and ready, and checks that it runs as
// the user.
func (m *machine) ready(id, user string) {
	m.t.Helper()
	m.eventually("the node of the unit is connected and ready", func() bool { return m.node(id).Reach == hub.Connected && m.state(id) == wire.Ready })
	if out := m.must("nodes"); !strings.Contains(out, id[:8]) || !strings.Contains(out, "connected") || !strings.Contains(out, "ready") {
		m.t.Errorf("vk-hub nodes:\n%s", out)
	}
	uid, _, _ := m.in("", "", "id", "-u", user)
	groups, _, _ := m.in("", "", "id", "-G", user)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.pid()))
	if err != nil {
		m.t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		if f[0] == "Uid:" && f[1] != strings.TrimSpace(uid) || f[0] == "Groups:" && user != "root" && strings.Join(f[1:], " ") != strings.TrimSpace(groups) {
			m.t.Errorf("the node runs with %q; %s is %s and in the groups %s", l, user, uid, groups)
		}
	}
}

// verified has systemd read the unit.
func (m *machine) verified(user, unit string) {
	m.t.Helper()
	args := []string{"systemd-analyze", "verify", "--man=no", unit}
	if user != "" {
		args = []string{"systemd-analyze", "--user", "verify", "--man=no", unit}
	}
	out, errOut, _ := m.in(user, "", args...)
	if strings.Contains(out+errOut, nodehost.ServiceUnit) { // other units may be broken
		m.t.Errorf("%s%s", out, errOut)
	}
}

// gone checks that an uninstall has left nothing but the enrollment.
func (m *machine) gone(unit, enrollment string) {
	m.t.Helper()
	if m.pid() != 0 {
		m.t.Error("the node still runs")
	}
	if files, _ := filepath.Glob(m.at(filepath.Dir(unit)) + "/*vk-node*"); len(files) > 0 {
		m.t.Errorf("left: %q", files)
	}
	if _, err := os.Stat(m.at(enrollment)); err != nil {
		m.t.Errorf("the enrollment went with it: %v", err)
	}
}

const systemUnit = "etc/systemd/system/" + nodehost.ServiceUnit

// TestJoinAsService: root makes the host a node of another user's with one
// command, moves it, is refused what must not be, and takes the service away.
func TestJoinAsService(t *testing.T) {
	m := newMachine(t)
	m.configure("etc/virtkit/config.toml", "/mnt/state", "none")
	m.stateDir("mnt/state")
	m.calls()
	id := m.join("", "--user", "vkci", "--service")
	m.called("systemctl daemon-reload", "systemctl enable vk-node.service", "systemctl reset-failed vk-node.service", "systemctl start vk-node.service")
	m.ready(id, "vkci")
	if b, err := os.ReadFile(m.at(systemUnit)); err != nil || !strings.Contains(string(b), "\nExecStart=/mnt/bin/vk node run --config /etc/virtkit/config.toml\nUser=vkci\n") {
		t.Errorf("%v\n%s", err, b)
	}
	m.verified("", "/"+systemUnit)
	if out, _, _ := m.in("", "", "getent", "passwd", "vkci"); !strings.HasSuffix(strings.TrimSpace(out), ":/home/vkci:/usr/sbin/nologin") {
		t.Errorf("the user is %q", out)
	}
	if out, _, _ := m.in("", "", "find", "/mnt/state", "!", "-user", "vkci"); out != "" {
		t.Errorf("not the user's:\n%s", out)
	}

	token := func() string { return m.must("token", "create") }
	join := []string{"node", "join", "http://" + m.addr, "--token", "-", "--user", "vkci"}
	m.refused("", token(), 11, "a running vk node holds /mnt/state vk: hint: stop it first; --service stops vk-node.service, and starts it again", join...)
	// It is stopped, and started again: its enrollment is in place.
	m.calls()
	m.refused("", token(), 1, "this host is enrolled already, as node "+id+" of http://"+m.addr, append(join, "--service")...)
	m.called("systemctl stop vk-node.service", "systemctl start vk-node.service")
	m.ready(id, "vkci")
	// Moved to another enrollment, by one command.
	old := id
	id = m.join("", "--user", "vkci", "--service", "--replace")
	m.called("systemctl stop vk-node.service", "systemctl daemon-reload", "systemctl enable vk-node.service", "systemctl reset-failed vk-node.service", "systemctl start vk-node.service")
	m.ready(id, "vkci")
	if id == old {
		t.Error("it is the same node")
	}
	if kept, _ := filepath.Glob(m.at("mnt/state/node.replaced-*")); len(kept) != 1 {
		t.Errorf("the old identity: %q", kept)
	}
	// Installing again restarts it.
	if out, errOut, code := m.in("", "", "/mnt/bin/vk", "node", "service", "install", "--user", "vkci", "--stop-timeout", "90s"); code != 0 {
		t.Errorf("%s%s", out, errOut)
	}
	m.called("systemctl daemon-reload", "systemctl enable vk-node.service", "systemctl reset-failed vk-node.service", "systemctl restart vk-node.service")
	if b, _ := os.ReadFile(m.at(systemUnit)); !strings.Contains(string(b), "\nTimeoutStopSec=90s\n") {
		t.Errorf("%s", b)
	}
	m.ready(id, "vkci")

	install := []string{"node", "service", "install", "--user", "vkci"}
	m.refused("", "", 1, "vkci enrolled this host, and the node would run as root: /mnt/state/node belongs to vkci", "node", "service", "install")
	m.refused("", "", 2, "--user nobody-here: /etc/passwd has no such user", "node", "service", "install", "--user", "nobody-here")
	m.refused("vkci", "", 2, "--user is for root alone", append([]string{"--state-dir", "/mnt/state"}, install...)...)
	m.refused("vkci", "", 1, "the system unit /etc/systemd/system/vk-node.service runs a node as vkci already", "node", "service", "install")
	change := func(path string, mode, back os.FileMode, code int, words string) {
		t.Helper()
		if err := os.Chmod(m.at(path), mode); err != nil {
			t.Fatal(err)
		}
		m.refused("", "", code, words, install...)
		if err := os.Chmod(m.at(path), back); err != nil {
			t.Fatal(err)
		}
	}
	change("mnt/bin", 0o700, 0o755, 12, "vkci cannot run /mnt/bin/vk")
	change("mnt/state", 0o000, 0o755, 12, "vkci cannot use the state directory /mnt/state")
	change("etc/virtkit/config.toml", 0o600, 0o644, 12, "vkci cannot read the configuration /etc/virtkit/config.toml")
	m.put("mnt/state/jobs/another/x", "", 0o600)
	m.refused("", "", 1, "the host's CI jobs run as root", install...)
	if err := os.RemoveAll(m.at("mnt/state/jobs/another")); err != nil {
		t.Fatal(err)
	}
	m.configure("etc/virtkit/config.toml", "/mnt/state", "managed")
	m.refused("", "", 2, "finds no gitlab-runner on systemd's PATH (/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)", install...)
	m.configure("etc/virtkit/config.toml", "/mnt/state", "none")
	m.calls()

	if out, errOut, code := m.in("", "", "/mnt/bin/vk", "node", "service", "uninstall"); code != 0 {
		t.Errorf("status %d: %s%s", code, out, errOut)
	}
	m.called("systemctl disable --now vk-node.service", "systemctl daemon-reload", "systemctl reset-failed vk-node.service")
	m.gone(systemUnit, "mnt/state/node/enrollment.json")
	m.eventually("the hub misses it", func() bool { return m.node(id).Reach == hub.Unreachable })
	m.refused("", "", 10, "there is no /etc/systemd/system/vk-node.service", "node", "service", "uninstall")
	// Without a manager the unit is written, and named.
	m.put("mnt/fake/no-manager", "", 0o644)
	m.refused("", "", 13, "the unit /etc/systemd/system/vk-node.service is written, neither enabled nor started", install...)
	if _, err := os.Stat(m.at(systemUnit)); err != nil {
		t.Error(err)
	}
}

// TestJoinForOneself: a user's own node, with a unit of its own manager's, and
// root's own.
func TestJoinForOneself(t *testing.T) {
	m := newMachine(t)
	if out, errOut, code := m.in("", "", "useradd", "--create-home", "vkself"); code != 0 {
		t.Fatalf("%s%s", out, errOut)
	}
	const state = "home/vkself/.local/state/virtkit"
	m.configure("home/vkself/.config/virtkit/config.toml", "", "none")
	m.stateDir(state)
	if out, errOut, code := m.in("", "", "chown", "-hR", "vkself:", "/home/vkself"); code != 0 {
		t.Fatalf("%s%s", out, errOut)
	}
	m.put("mnt/fake/calls", "", 0o666)
	if err := os.Chmod(m.at("mnt/fake"), 0o777); err != nil {
		t.Fatal(err)
	}
	const unit = "home/vkself/.config/systemd/user/" + nodehost.ServiceUnit
	m.refused("vkself", m.must("token", "create"), 2, "--user sets the host up, which takes root", "node", "join", "http://"+m.addr, "--token", "-", "--user", "vkself")
	id := m.join("vkself", "--service")
	m.called("systemctl --user daemon-reload", "systemctl --user enable vk-node.service", "systemctl --user reset-failed vk-node.service",
		"loginctl enable-linger vkself", "systemctl --user start vk-node.service")
	m.ready(id, "vkself")
	b, err := os.ReadFile(m.at(unit))
	if err != nil || !strings.Contains(string(b), "\nExecStart=/mnt/bin/vk node run --config /home/vkself/.config/virtkit/config.toml\nRestart=") || !strings.Contains(string(b), "\nWantedBy=default.target\n") {
		t.Errorf("%v\n%s", err, b)
	}
	m.verified("vkself", "/"+unit)
	m.refused("", "", 1, "vkself runs a node by a unit of its own already (/home/vkself/.config/systemd/user/vk-node.service)",
		"--config", "/home/vkself/.config/virtkit/config.toml", "--state-dir", "/"+state, "node", "service", "install", "--user", "vkself")
	if out, errOut, code := m.in("vkself", "", "/mnt/bin/vk", "node", "service", "uninstall"); code != 0 {
		t.Errorf("status %d: %s%s", code, out, errOut)
	}
	m.called("systemctl --user disable --now vk-node.service", "systemctl --user daemon-reload", "systemctl --user reset-failed vk-node.service")
	m.gone(unit, state+"/node/enrollment.json")

	// Root, for itself.
	m.configure("etc/virtkit/config.toml", "/mnt/own", "none")
	m.stateDir("mnt/own")
	id = m.join("", "--service")
	m.ready(id, "root")
	if b, err := os.ReadFile(m.at(systemUnit)); err != nil || !strings.Contains(string(b), "\nUser=root\n") {
		t.Errorf("%v\n%s", err, b)
	}
	m.verified("", "/"+systemUnit)
	if out, errOut, code := m.in("", "", "/mnt/bin/vk", "node", "service", "uninstall"); code != 0 {
		t.Errorf("status %d: %s%s", code, out, errOut)
	}
	m.gone(systemUnit, "mnt/own/node/enrollment.json")
}

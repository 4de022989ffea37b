package nodehost_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/fleet/nodehost"
)

const (
	passwd = "root:x:0:0:root:/root:/bin/bash\nci:x:990:980::/home/ci:/usr/sbin/nologin\nother:x:991:981::/home/other:/bin/sh\nbroken:x\n"
	groups = "root:x:0:\nci:x:980:\nother:x:981:\nkvm:x:108:ci,x\n"

	packaged = "# comment\n[Unit]\nDescription=GitLab Runner\nUser=nobody\n[Service]\nStartLimitInterval=5\nExecStart=/usr/bin/gitlab-runner \"run\" \"--config\" \"/etc/gitlab-runner/config.toml\" \\\n  \"--service\" \"gitlab-runner\" \"--user\" \"gitlab-runner\"\n"
	vkRunner = "concurrent = 4\n[[runners]]\nname = \"shell\"\nexecutor = \"shell\"\n[[runners]]\nname = \"vms\"\nexecutor = \"custom\"\n[runners.custom]\nrun_exec = \"/usr/local/bin/vk\"\nrun_args = [\"--config\", \"/etc/virtkit/ci.toml\", \"--state-dir=/data/vk\", \"gitlab\", \"run\"]\n"
)

// executables marks files of a root as programs.
func executables(t *testing.T, r nodehost.Root, paths ...string) {
	t.Helper()
	for _, p := range paths {
		write(t, r.Path(p), "#!/bin/sh\n", 0o755)
	}
}

func TestDetectMode(t *testing.T) {
	ci := nodehost.User{Name: "ci", UID: 990, GID: 980, Home: "/home/ci"}
	for _, tt := range []struct {
		name       string
		files      map[string]string
		programs   []string
		mask       string
		configured string
		mode       nodehost.Mode
		found      string // part of how the runner is named; "" = none is found
		user       string
		refused    bool
	}{
		{name: "an empty host", mode: nodehost.ModeNone},
		{name: "a service without its program", files: map[string]string{"lib/systemd/system/gitlab-runner.service": packaged}, mode: nodehost.ModeNone},
		{name: "a service, whatever its configuration", files: map[string]string{"lib/systemd/system/gitlab-runner.service": packaged}, programs: []string{"/usr/bin/gitlab-runner"}, mode: nodehost.ModeExternal, found: "gitlab-runner.service", user: "root"},
		{name: "a masked service, and its program on PATH", files: map[string]string{"lib/systemd/system/gitlab-runner.service": packaged}, mask: "etc/systemd/system/gitlab-runner.service", programs: []string{"/usr/bin/gitlab-runner"}, mode: nodehost.ModeExternal, found: "/usr/bin/gitlab-runner", user: "ci"},
		{name: "a masked service, its program elsewhere", files: map[string]string{"lib/systemd/system/gitlab-runner.service": strings.ReplaceAll(packaged, "/usr/bin", "/opt")}, mask: "etc/systemd/system/gitlab-runner.service", programs: []string{"/opt/gitlab-runner"}, mode: nodehost.ModeNone},
		{name: "an empty unit masks, too", files: map[string]string{"lib/systemd/system/gitlab-runner.service": strings.ReplaceAll(packaged, "/usr/bin", "/opt"), "run/systemd/system/gitlab-runner.service": ""}, programs: []string{"/opt/gitlab-runner"}, mode: nodehost.ModeNone},
		{name: "a program on PATH", programs: []string{"/usr/local/sbin/gitlab-runner"}, mode: nodehost.ModeExternal, found: "/usr/local/sbin/gitlab-runner", user: "ci"},
		{name: "a program in a home", programs: []string{"/home/ci/.local/bin/gitlab-runner"}, mode: nodehost.ModeNone},
		{name: "said so", programs: []string{"/usr/bin/gitlab-runner"}, configured: "managed", mode: nodehost.ModeManaged, found: "/usr/bin/gitlab-runner", user: "ci"},
		{name: "none beside a runner of other jobs", files: map[string]string{"lib/systemd/system/gitlab-runner.service": packaged, "etc/gitlab-runner/config.toml": "concurrent = 1\n[[runners]]\nexecutor = \"docker\"\n"}, programs: []string{"/usr/bin/gitlab-runner"}, configured: "none", mode: nodehost.ModeNone, found: "gitlab-runner.service", user: "root"},
		{name: "none beside a runner of vk", files: map[string]string{"lib/systemd/system/gitlab-runner.service": packaged, "etc/gitlab-runner/config.toml": vkRunner}, programs: []string{"/usr/bin/gitlab-runner"}, configured: "none", mode: nodehost.ModeNone, found: "gitlab-runner.service", user: "root", refused: true},
		{name: "none beside the user's own runner of vk", files: map[string]string{"home/ci/.gitlab-runner/config.toml": vkRunner}, programs: []string{"/usr/bin/gitlab-runner"}, configured: "none", mode: nodehost.ModeNone, found: "/usr/bin/gitlab-runner", user: "ci", refused: true},
		{name: "drop-ins", files: map[string]string{
			"lib/systemd/system/gitlab-runner.service":                    packaged,
			"etc/systemd/system/gitlab-runner.service.d/10-user.conf":     "[Service]\nUser=other\n",
			"etc/systemd/system/gitlab-.service.d/20-user.conf":           "[Service]\nUser=ci\n",
			"run/systemd/system/gitlab-runner.service.d/30-masked.conf":   "[Service]\nUser=root\n",
			"etc/systemd/system/gitlab-runner.service.d/40-exec.conf":     "[Service]\nExecStart=\nExecStart=-/opt/gitlab-runner run -c '/srv/my config.toml'\n",
			"usr/lib/systemd/system/gitlab-runner.service.d/10-user.conf": "[Service]\nUser=root\n",
			"srv/my config.toml": vkRunner,
		}, mask: "etc/systemd/system/gitlab-runner.service.d/30-masked.conf", programs: []string{"/opt/gitlab-runner"}, configured: "none", mode: nodehost.ModeNone, found: "gitlab-runner.service", user: "ci", refused: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, tt.files)
			write(t, root.Path("/etc/passwd"), passwd, 0o644)
			executables(t, root, tt.programs...)
			if tt.mask != "" {
				at := filepath.Join(string(root), tt.mask)
				os.MkdirAll(filepath.Dir(at), 0o755)
				if err := os.Symlink("/dev/null", at); err != nil {
					t.Fatal(err)
				}
			}
			d, err := nodehost.DetectMode(nodehost.Look{Root: root, Configured: tt.configured, User: ci, Exe: "/nonexistent"})
			if err != nil {
				t.Fatal(err)
			}
			if d.Mode != tt.mode || (d.Found != nil) != (tt.found != "") || d.Set != (tt.configured != "") || d.Why == "" {
				t.Fatalf("%+v", d)
			}
			if tt.found != "" && (!strings.Contains(d.Found.Found(), tt.found) || d.Found.User.Name != tt.user) {
				t.Errorf("found %s of %s, want %s of %s", d.Found.Found(), d.Found.User, tt.found, tt.user)
			}
			err = d.Refuse()
			if (err != nil) != tt.refused {
				t.Errorf("refused: %v", err)
			}
			if tt.refused && (fault.KindOf(err) != fault.Conflict || !strings.Contains(err.Error(), `"vms"`) || !strings.Contains(fault.HintOf(err), "never both")) {
				t.Errorf("%v (%s)", err, fault.HintOf(err))
			}
		})
	}
}

func TestRunnerConfig(t *testing.T) {
	root := tree(t, map[string]string{"c.toml": "\ufeff" + vkRunner + "[[runners]]\nname = \"own\"\nexecutor = \"custom\"\n[runners.custom]\nprepare_exec = \"/opt/renamed\"\nprepare_args = [\"gitlab\", \"prepare\"]\n[[runners]]\nname = \"else\"\nexecutor = \"custom\"\n[runners.custom]\nrun_exec = \"/opt/driver\"\nrun_args = [\"gitlab\"]\n"})
	executables(t, root, "/opt/renamed", "/opt/driver")
	c, err := root.ReadRunnerConfig("/c.toml", root.Path("/opt/renamed"))
	if err != nil {
		t.Fatal(err)
	}
	want := &nodehost.RunnerConfig{Path: "/c.toml", Concurrent: 4, Names: []string{"shell", "vms", "own", "else"}, VK: []nodehost.VKUse{
		{Runner: "vms", Program: "/usr/local/bin/vk", Config: "/etc/virtkit/ci.toml", StateDir: "/data/vk"},
		{Runner: "own", Program: "/opt/renamed"},
	}}
	if d := cmp.Diff(want, c); d != "" {
		t.Error(d)
	}
	d := nodehost.Detection{Found: &nodehost.Runner{Program: "x", Config: c, ConfigPath: "/c.toml"}}
	if w := d.Warnings("/etc/virtkit/ci.toml", "/data/vk/"); len(w) != 0 {
		t.Errorf("of the same configuration: %q", w)
	}
	w := d.Warnings("", "/var/lib/virtkit")
	if len(w) != 1 || !strings.Contains(w[0], `runner "vms"`) || !strings.Contains(w[0], "/etc/virtkit/ci.toml, and this node none") || !strings.Contains(w[0], "/data/vk, and this node /var/lib/virtkit") {
		t.Errorf("of others: %q", w)
	}
}

func TestWords(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want []string
	}{
		{`/bin/a  b	c`, []string{"/bin/a", "b", "c"}},
		{`/bin/a "b c" 'd "e' "" f\ g`, []string{"/bin/a", "b c", `d "e`, "", "f g"}},
		{`/bin/a \x 100%% \"q ; /bin/b`, []string{"/bin/a", "x", "100%", `"q`}},
		{``, nil},
	} {
		if got := nodehost.Words(tt.in); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestConfigOf(t *testing.T) {
	l := nodehost.Look{User: nodehost.User{Home: "/home/ci"}}
	found := &nodehost.Runner{ConfigPath: "/etc/gitlab-runner/config.toml"}
	for _, tt := range []struct {
		d    nodehost.Detection
		set  string
		want string
	}{
		{nodehost.Detection{Mode: nodehost.ModeManaged, Found: found}, "", "/home/ci/.gitlab-runner/config.toml"},
		{nodehost.Detection{Mode: nodehost.ModeManaged}, "/x", "/x"},
		{nodehost.Detection{Mode: nodehost.ModeExternal, Found: found}, "", "/etc/gitlab-runner/config.toml"},
		{nodehost.Detection{Mode: nodehost.ModeNone, Found: found}, "", ""},
	} {
		l.RunnerConfig = tt.set
		if got := tt.d.ConfigOf(l); got != tt.want {
			t.Errorf("%v: %q, want %q", tt.d.Mode, got, tt.want)
		}
	}
}

// Signs of another user of CI jobs. As another user than root the test's own
// files are the other user's.
func TestCIUser(t *testing.T) {
	state := t.TempDir()
	for _, f := range []string{"admit/.lock", "admit/reservation-1", "admit/17-a", "jobs/.lock", "jobs/17-a/spec.json", "jobs/18-b/spec.json"} {
		write(t, filepath.Join(state, f), "", 0o600)
	}
	root := tree(t, map[string]string{"etc/passwd": passwd, "lib/systemd/system/gitlab-runner.service": packaged, "etc/gitlab-runner/config.toml": vkRunner})
	executables(t, root, "/usr/bin/gitlab-runner")
	d, err := nodehost.DetectMode(nodehost.Look{Root: root, Exe: "/nonexistent"})
	if err != nil {
		t.Fatal(err)
	}
	me := root.UserOf(os.Getuid())
	ci := nodehost.User{Name: "ci", UID: 990}
	if os.Getuid() == 990 {
		ci.UID = 989
	}
	evidence := func(c nodehost.CICheck) []string {
		t.Helper()
		c.Root = root
		ev, err := c.Evidence()
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, e := range ev {
			out = append(out, e.Sign)
		}
		return out
	}
	claim := "the claim " + filepath.Join(state, "admit/17-a") + " belongs to " + me.String()
	job := "the job directory " + filepath.Join(state, "jobs/17-a") + " belongs to " + me.String()
	service := "gitlab-runner.service sets no User= and so runs as root, and /etc/gitlab-runner/config.toml has a custom executor that runs vk"
	for _, tt := range []struct {
		name string
		c    nodehost.CICheck
		want []string
	}{
		{"the jobs' own user", nodehost.CICheck{StateDir: state, User: me}, nil},
		{"another", nodehost.CICheck{StateDir: state, User: ci}, []string{claim, job}},
		{"an empty state directory", nodehost.CICheck{StateDir: t.TempDir(), User: ci}, nil},
		{"a former user's placed job", nodehost.CICheck{StateDir: state, User: ci, OwnIDs: func(id string) bool { return id == "17-a" }}, []string{strings.ReplaceAll(job, "17-a", "18-b")}},
		{"a service of another user", nodehost.CICheck{StateDir: t.TempDir(), User: ci, Found: d.Found, Mode: nodehost.ModeExternal}, []string{service}},
		{"a managed runner runs as the node's user", nodehost.CICheck{StateDir: t.TempDir(), User: ci, Found: d.Found, Mode: nodehost.ModeManaged}, nil},
		{"a service of the same user", nodehost.CICheck{StateDir: t.TempDir(), User: nodehost.User{Name: "root"}, Found: d.Found, Mode: nodehost.ModeExternal}, nil},
	} {
		if got := evidence(tt.c); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	c := nodehost.CICheck{Root: root, StateDir: state, User: ci}
	ev, _ := c.Evidence()
	err = c.MismatchError(ev)
	for _, want := range []string{"run as ci", "run as " + me.String(), claim, "systemctl edit gitlab-runner", "User=ci", "chown -R ci: /etc/gitlab-runner", "--user " + me.String(), "--ignore-ci-user"} {
		if text := err.Error() + " " + fault.HintOf(err); !strings.Contains(text, want) {
			t.Errorf("the refusal lacks %q: %s", want, text)
		}
	}
	if c.MismatchError(nil) != nil {
		t.Error("refused without evidence")
	}
}

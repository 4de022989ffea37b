package relayconf_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/conf"
	"virtkit/core/fleet/relayconf"
)

func none(string) string { return "" }

const whole = `
concurrent = 12
check_interval = 5
shutdown_timeout = 600
state_dir = "/srv/vk-gitlab"
log_format = "json"

[gitlab]
url = "https://gitlab.example.com/git/"
tls_ca_file = "/etc/vk-gitlab/ca.pem"

[[runners]]
name = "ci"
token_file = "/etc/vk-gitlab/runner-ci.token"
pool = "ci"
labels = ["large-memory"]
envelope = { mem = "16G", cpus = 8, disk = "16G" }
request_concurrency = 2
limit = 4
output_limit = 8192

[[runners]]
token_file = "/etc/vk-gitlab/runner-b.token"
pool = "small"
[runners.envelope]
mem = "2G"
cpus = 1
`

func TestWhole(t *testing.T) {
	c, err := relayconf.Parse("c.toml", []byte(whole), none)
	if err != nil {
		t.Fatal(err)
	}
	want := &relayconf.Config{
		File: "c.toml", Concurrent: 12, CheckInterval: 5, ShutdownTimeout: 600, StateDir: "/srv/vk-gitlab", LogFormat: "json",
		GitLab: relayconf.GitLab{URL: "https://gitlab.example.com/git", TLSCAFile: "/etc/vk-gitlab/ca.pem"},
		Runners: []relayconf.Runner{
			{Name: "ci", TokenFile: "/etc/vk-gitlab/runner-ci.token", Pool: "ci", Labels: []string{"large-memory"},
				Envelope: relayconf.Envelope{Mem: "16G", CPUs: 8, Disk: "16G", Memory: 16 << 30, DiskBytes: 16 << 30},
				Limit:    4, RequestConcurrency: 2, Output: int64(8192), OutputLimit: 8 << 20},
			{TokenFile: "/etc/vk-gitlab/runner-b.token", Pool: "small", Envelope: relayconf.Envelope{Mem: "2G", CPUs: 1, Memory: 2 << 30},
				RequestConcurrency: 1, OutputLimit: relayconf.DefaultOutput},
		},
	}
	if d := cmp.Diff(want, c); d != "" {
		t.Error(d)
	}
}

func TestDefaults(t *testing.T) {
	c := relayconf.Default(none)
	if c.StateDir != "/var/lib/vk-gitlab" || c.Check().Seconds() != 3 || c.Shutdown().Seconds() != 30 {
		t.Errorf("%+v", c)
	}
	if c := relayconf.Default(func(string) string { return "/x" }); c.StateDir != "/x/vk-gitlab" {
		t.Errorf("with VIRTKIT_STATE_DIR: %s", c.StateDir)
	}
}

// Every problem is said, each with its file, line and key.
func TestProblems(t *testing.T) {
	runner := func(lines string) string {
		return "[gitlab]\nurl = \"https://h\"\n[[runners]]\n" + lines
	}
	ok := "token_file = \"/t\"\npool = \"p\"\nenvelope = { mem = \"1G\", cpus = 1 }\n"
	for _, c := range []struct {
		text string
		want []string // line:key: beginning of the text
	}{
		{"", []string{"0:gitlab.url: is missing", "0:runners: there is none"}},
		{"concurrent = -1\ncheck_interval = 0\nshutdown_timeout = -2\nstate_dir = \"x\"\nlog_format = \"xml\"\n" + runner(ok),
			[]string{"1:concurrent: -1 is not", "2:check_interval: 0 is not", "3:shutdown_timeout: -2 is not", `4:state_dir: "x" is not an abs`, `5:log_format: "xml" is`}},
		{"concurrent = \"x\"\n" + runner(ok), []string{"1:concurrent: cannot decode"}},
		{"concurrent = = 1\n", []string{"1:: "}},
		{runner(ok + "tokn_file = 1\n"), []string{"7:runners.tokn_file: is no key"}},
		{runner(ok + "url = \"https://x\"\ntoken = \"glrt-secret\"\n"), []string{"7:runners.url: is no key of a runner: the one", "8:runners.token: is no key: a token is in a file"}},
		{runner(""), []string{"3:runners[0].token_file: is missing", "3:runners[0].pool: is missing", "3:runners[0].envelope.mem: is missing", "3:runners[0].envelope.cpus: is missing"}},
		{runner(ok + "[[runners]]\n" + ok), []string{"8:runners[1].token_file: is that of runners[0]"}},
		{runner("name = \"a\"\n" + ok + "[[runners]]\nname = \"a\"\n" + strings.Replace(ok, "/t", "/u", 1)), []string{`9:runners[1].name: "a" is the name of runners[0]`}},
		{runner("name = \"../a\"\n" + ok), []string{`4:runners[0].name: "../a" is no name`}},
		{runner(ok + "labels = [\"a b\", \"c\"]\n"), []string{`7:runners[0].labels: "a b" is no name`}},
		{runner("token_file = \"t\"\npool = \".\"\nenvelope = { mem = \"1\", cpus = 2000, disk = \"0G\" }\n"),
			[]string{`4:runners[0].token_file: "t" is not an abs`, `5:runners[0].pool: "." is no name`, `6:runners[0].envelope.mem: "1" is not a size`,
				"6:runners[0].envelope.cpus: 2000 is not", `6:runners[0].envelope.disk: "0G" is nothing`}},
		{runner("token_file = \"/t\"\npool = \"p\"\n[runners.envelope]\nmem = \"x\"\ncpus = 1\n"), []string{`7:runners[0].envelope.mem: "x" is not a size`}},
		{runner(ok + "limit = -1\nrequest_concurrency = 0\n"), []string{"7:runners[0].limit: -1", "8:runners[0].request_concurrency: 0 is not"}},
		{runner(ok + "output_limit = 65537\n"), []string{"7:runners[0].output_limit: is not between 1 KiB and 64M"}},
		{runner(ok + "output_limit = 9007199254740993000\n"), []string{"7:runners[0].output_limit: is not between"}},
		{runner(ok + "output_limit = true\n"), []string{"7:runners[0].output_limit: is neither"}},
		{runner(ok + "output_limit = \"4\"\n"), []string{`7:runners[0].output_limit: "4" is not a size`}},
		{"[gitlab]\nurl = \"https://u:secret@h\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: holds a user or password"}},
		{"[gitlab]\nurl = \"https://u:secret@h:port\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: is not a URL"}},
		{"[gitlab]\nurl = \"ftp://h\"\ntls_ca_file = \"ca\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: is not http", `3:gitlab.tls_ca_file: "ca" is not`}},
		{"[gitlab]\nurl = \"https://h/?q\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: has a query"}},
		{"[gitlab]\nurl = \"https://h/é\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: holds a character"}},
		{"[gitlab]\nurl = \"https://h/" + strings.Repeat("x", 256) + "\"\n[[runners]]\n" + ok, []string{"2:gitlab.url: has 266 characters"}},
	} {
		_, err := relayconf.Parse("c.toml", []byte(c.text), none)
		var got []string
		for _, p := range conf.ProblemsOf(err) {
			got = append(got, fmt.Sprintf("%d:%s: %s", p.Line, p.Key, p.Text))
			if p.File != "c.toml" {
				t.Errorf("%q: %v names no file", c.text, p)
			}
		}
		if len(got) != len(c.want) {
			t.Errorf("%q: %q, expected %q (%v)", c.text, got, c.want, err)
			continue
		}
		for i := range got {
			if !strings.HasPrefix(got[i], c.want[i]) {
				t.Errorf("%q: %q, expected %q", c.text, got[i], c.want[i])
			}
		}
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows a secret: %v", err)
		}
	}
}

func TestReadToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	r := relayconf.Runner{TokenFile: file}
	if _, err := r.ReadToken(); err == nil {
		t.Error("a file that is missing is read")
	}
	for text, want := range map[string]string{
		"glrt-abc\n": "glrt-abc", "  glrt-abc": "glrt-abc", "": "", "glrt-a\nglrt-b\n": "", "glrt-a b": "", "glrt-a\x00b": "", strings.Repeat("x", 600): "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := r.ReadToken()
		if got.Reveal() != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got.Reveal(), err)
		}
		if err != nil && strings.Contains(err.Error(), "glrt-a") {
			t.Errorf("%q: the error shows the token: %v", text, err)
		}
	}
}

func TestShort(t *testing.T) {
	for token, want := range map[string]string{
		"glrt-peertoken0123456789ab": "peertoken", "glrt-t1_abcdefghijkl": "abcdefghi", "glrtr-abcdefghijkl": "abcdefghi", "abc": "abc", "": "",
		"glrt-t1_x": "x",
	} {
		if got := relayconf.Short(token); got != want {
			t.Errorf("Short(%q) = %q, expected %q", token, got, want)
		}
	}
}

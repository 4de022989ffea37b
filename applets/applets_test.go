package applets_test

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"virtkit/applets"
)

var update = flag.Bool("update", false, "write golden files and docs/commands.md")

// program runs an applet in this process, as main does.
func program() {
	os.Exit(applets.Main(context.Background(), applets.FromOS()))
}

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"vk": program, "vk-hub": program, "vk-gitlab": program, "vk-agent": program, "vk-runnerctl": program, "renamed": program,
	})
}

// TestScripts runs testdata/script: each command there is this test's binary
// under the applet's name, so that argv[0], exit status, stdout and stderr are
// those of a real process.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "../testdata/script",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("HOME", e.WorkDir+"/home")
			e.Setenv("VIRTKIT_STATE_DIR", e.WorkDir+"/state")
			e.Setenv("VIRTKIT_CONFIG", "")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"status": status, "until": until},
	})
}

// status N CMD… runs a command and wants that exit status.
func status(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status N CMD...")
	}
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	if err != nil {
		ee, ok := err.(*exec.ExitError)
		if !ok {
			ts.Fatalf("%s: %v", args[1], err)
		}
		code = ee.ExitCode()
	}
	if want := args[0]; want != strconv.Itoa(code) {
		ts.Fatalf("%s: status %d, want %s", strings.Join(args[1:], " "), code, want)
	}
}

// until CMD… runs a command again and again, until it ends well: for what a
// process in the background has yet to do.
func until(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: until CMD...")
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := ts.Exec(args[0], args[1:]...)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("%s: still %v after 2 minutes", strings.Join(args, " "), err)
		}
	}
}

// guestPackages are all that the guest's agent may link of this module. What
// is in it stays in every guest's memory.
var guestPackages = []string{"virtkit", "virtkit/agent", "virtkit/applets", "virtkit/core/guestwire", "virtkit/core/version",
	"virtkit/core/guestclient", "virtkit/core/fault", // of vk-agent exec
	"virtkit/core/atop",    // of the recorder
	"virtkit/core/archive", // of vk-agent archive and extract
}

// maxAgent is the size that the agent must stay below, in bytes.
const maxAgent = 8 << 20

func TestAgentLinksOnlyItself(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the agent; left out with -short")
	}
	list := exec.Command("go", "list", "-deps", "-tags", "vkagent,netgo,osusergo", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "virtkit")
	list.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	allowed := map[string]bool{"github.com/hashicorp/yamux": true, "golang.org/x/sys/unix": true, "github.com/bmatcuk/doublestar/v4": true, "virtkit/applets/agentcmd": true, "virtkit/applets/internal/appenv": true}
	for _, p := range guestPackages {
		allowed[p] = true
	}
	deps := strings.Fields(string(out))
	sort.Strings(deps)
	for _, d := range deps {
		if !allowed[d] && !strings.HasPrefix(d, "virtkit/agent/") && !strings.HasPrefix(d, "github.com/mdlayher/") && !strings.HasPrefix(d, "golang.org/x/") {
			t.Errorf("the agent links %s", d)
		}
	}
	std := exec.Command("go", "list", "-deps", "-tags", "vkagent,netgo,osusergo", "virtkit")
	std.Env = list.Env
	all, err := std.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for _, heavy := range []string{"net/http", "crypto/tls", "html/template", "text/template"} {
		if strings.Contains("\n"+string(all), "\n"+heavy+"\n") {
			t.Errorf("the agent links %s", heavy)
		}
	}
	bin := filepath.Join(t.TempDir(), "vk-agent")
	build := exec.Command("go", "build", "-trimpath", "-tags", "vkagent,netgo,osusergo", "-ldflags", "-s -w", "-o", bin, "virtkit")
	build.Env = list.Env
	if b, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, b)
	}
	st, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the agent is %.2f MiB, %d packages", float64(st.Size())/(1<<20), len(strings.Fields(string(all))))
	if st.Size() > maxAgent {
		t.Errorf("the agent is %d bytes, more than %d", st.Size(), maxAgent)
	}
}

func TestCommandsDocument(t *testing.T) {
	got := commandsDocument(t)
	const path = "../docs/commands.md"
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("docs/commands.md is out of date; go test ./applets -run TestCommandsDocument -update\n%s", d)
	}
}

// commandsDocument is docs/commands.md: the help of every command, as the
// programs print it.
func commandsDocument(t *testing.T) []byte {
	var b bytes.Buffer
	b.WriteString("# Commands\n\nThe help texts of all commands, written by a test from the programs themselves.\n" +
		"Every flag can also be given by the environment variable named in its line; a\nrepeatable one then takes one value a line.\n")
	var walk func(words ...string)
	walk = func(words ...string) {
		text := help(t, words...)
		b.WriteString("\n" + strings.Repeat("#", min(len(words)+1, 4)) + " " + strings.Join(words, " ") + "\n\n```text\n" + text + "```\n")
		for _, sub := range subcommands(text) {
			walk(append(words[:len(words):len(words)], sub)...)
		}
	}
	walk("vk")
	walk("vk-hub")
	walk("vk-gitlab")
	return b.Bytes()
}

func help(t *testing.T, words ...string) string {
	t.Helper()
	var out, stderr bytes.Buffer
	env := applets.FromOS()
	env.Args = append(words[:len(words):len(words)], "--help")
	env.Stdout, env.Stderr = &out, &stderr
	env.LookupEnv = func(string) (string, bool) { return "", false }
	if code := applets.Main(t.Context(), env); code != 0 || stderr.Len() > 0 {
		t.Fatalf("%q --help: status %d, stderr %q", words, code, stderr.String())
	}
	return out.String()
}

func subcommands(help string) []string {
	_, rest, ok := strings.Cut(help, "\nCOMMANDS\n")
	if !ok {
		return nil
	}
	rest, _, _ = strings.Cut(rest, "\n\n")
	var out []string
	for line := range strings.SplitSeq(strings.TrimRight(rest, "\n"), "\n") {
		out = append(out, strings.Fields(line)[0])
	}
	return out
}

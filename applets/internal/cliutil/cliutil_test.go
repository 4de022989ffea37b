package cliutil_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/core/fault"
)

// got is what a run of the test program did.
type got struct {
	code        int
	out, err    string
	env         []string
	name        string
	n           int
	on, verbose bool
	args        []string
	ran         bool
}

// try runs a program with one of everything.
func try(t *testing.T, vars map[string]string, fail error, args ...string) got {
	t.Helper()
	g := got{}
	var out, stderr bytes.Buffer
	env := appenv.Env{
		Args: append([]string{"prog"}, args...), Stdin: strings.NewReader(""), Stdout: &out, Stderr: &stderr,
		LookupEnv: func(k string) (string, bool) { v, ok := vars[k]; return v, ok },
	}
	root := &cli.Command{
		Name: "prog", Usage: "test",
		Flags: []cli.Flag{cliutil.Bool(&g.verbose, "verbose", "more").Short("v").Global()},
		Commands: []*cli.Command{
			cliutil.Exits(cliutil.Takes(&cli.Command{
				Name: "do", Usage: "do it", ArgsUsage: "WHAT [MORE…]", UseShortOptionHandling: true,
				Flags: []cli.Flag{
					cliutil.Strings(&g.env, "env", "K=V", "set").Short("e"),
					cliutil.String(&g.name, "name", "NAME", "name"),
					cliutil.Int(&g.n, "number", "N", "number", 1, 9),
					cliutil.Bool(&g.on, "on", "switch").Short("o"),
				},
				Action: func(_ context.Context, c *cli.Command) error {
					g.ran, g.args = true, c.Args().Slice()
					return fail
				},
			}, cliutil.Arity{Min: 1, Max: -1, Tail: 1}), cliutil.Status{Code: "7", Means: "seven"}),
			{Name: "both", Usage: "with and without", Action: func(context.Context, *cli.Command) error { g.ran = true; return fail },
				Commands: []*cli.Command{{Name: "sub", Usage: "sub", Action: func(context.Context, *cli.Command) error { g.name = "sub"; return nil }}}},
			{Name: "none", Usage: "no arguments", Action: func(context.Context, *cli.Command) error { g.ran = true; return fail }},
		},
	}
	g.code = cliutil.Run(t.Context(), root, env)
	g.out, g.err = out.String(), stderr.String()
	return g
}

func TestUsageErrors(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "no command given"},
		{[]string{"dou"}, `unknown command "dou"; did you mean "do"?`},
		{[]string{"elephant"}, `unknown command "elephant"`},
		{[]string{"none", "x"}, `unexpected argument "x"`},
		{[]string{"none", "--", "x"}, `unexpected argument "x"`},
		{[]string{"do"}, "argument WHAT is missing"},
		{[]string{"do", "--nmae", "x", "y"}, "unknown flag --nmae; did you mean --name?"},
		{[]string{"do", "--num", "1", "y"}, "unknown flag --num; did you mean --number?"},
		{[]string{"help", "dou"}, `unknown command "dou"; did you mean "do"?`},
		{[]string{"do", "-z", "y"}, "unknown flag -z"},
		{[]string{"do", "-oz", "y"}, "unknown flag"},
		{[]string{"--wrong", "do", "x"}, "unknown flag --wrong"},
		{[]string{"do", "--name"}, "flag --name needs a value"},
		{[]string{"do", "--name", "a", "--name", "b", "x"}, "flag --name: given twice"},
		{[]string{"do", "--on", "-o", "x"}, "flag --on: given twice"},
		{[]string{"-v", "do", "-v", "x"}, "flag --verbose: given twice"},
		{[]string{"do", "--number", "ten", "x"}, `flag --number: "ten" is not a whole number`},
		{[]string{"do", "--number", "10", "x"}, "flag --number: 10 is not between 1 and 9"},
		{[]string{"do", "--on=maybe", "x"}, `flag --on: "maybe" is neither true nor false`},
	} {
		g := try(t, nil, nil, tc.args...)
		if g.code != 2 || g.ran || g.out != "" {
			t.Errorf("%q: status %d, ran %v, stdout %q; want 2, false, nothing", tc.args, g.code, g.ran, g.out)
		}
		for _, want := range []string{"prog: " + tc.want, "\nusage: prog", "\nprog: hint: "} {
			if !strings.Contains(g.err, want) {
				t.Errorf("%q: stderr %q lacks %q", tc.args, g.err, want)
			}
		}
	}
}

func TestValuesArriveByteForByte(t *testing.T) {
	g := try(t, nil, nil, "do", "--env", "A=1,2", "-e", " B= x ", "--name=", "-v", "what", "--env", "C", "--", "-v", "")
	if g.code != 0 {
		t.Fatalf("status %d: %s", g.code, g.err)
	}
	if d := cmp.Diff([]string{"A=1,2", " B= x "}, g.env); d != "" {
		t.Errorf("env: %s", d)
	}
	// Flags end with the first argument: what follows is another program's.
	if d := cmp.Diff([]string{"what", "--env", "C", "--", "-v", ""}, g.args); d != "" {
		t.Errorf("args: %s", d)
	}
	if !g.verbose || g.name != "" {
		t.Errorf("verbose %v, name %q", g.verbose, g.name)
	}
}

// TestGroupThatRuns: a command may have commands and do something without one.
func TestGroupThatRuns(t *testing.T) {
	if g := try(t, nil, nil, "both"); g.code != 0 || !g.ran {
		t.Errorf("both: status %d, ran %v, %s", g.code, g.ran, g.err)
	}
	if g := try(t, nil, nil, "both", "sub"); g.code != 0 || g.ran || g.name != "sub" {
		t.Errorf("both sub: status %d, ran %v, %s", g.code, g.ran, g.err)
	}
	if g := try(t, nil, nil, "both", "sup"); g.code != 2 || g.ran || !strings.Contains(g.err, `did you mean "sub"?`) {
		t.Errorf("both sup: status %d, ran %v, %s", g.code, g.ran, g.err)
	}
	if g := try(t, nil, nil, "both", "--help"); !strings.Contains(g.out, "USAGE\n  prog both [flags] [COMMAND …]") {
		t.Errorf("help:\n%s", g.out)
	}
}

func TestDoubleDashEndsFlags(t *testing.T) {
	g := try(t, nil, nil, "do", "-o", "--", "--name", "x")
	if d := cmp.Diff([]string{"--name", "x"}, g.args); g.code != 0 || d != "" || !g.on {
		t.Errorf("status %d, on %v, args %s %s", g.code, g.on, d, g.err)
	}
}

func TestEnvironment(t *testing.T) {
	vars := map[string]string{"VK_NAME": "from-env", "VK_ENV": "A=1,2\nB=3\n", "VK_ON": "true", "VK_NUMBER": "3", "VK_HELP": "true"}
	g := try(t, vars, nil, "do", "--number", "4", "x")
	if g.code != 0 || g.name != "from-env" || !g.on || g.n != 4 {
		t.Errorf("%+v", g)
	}
	if d := cmp.Diff([]string{"A=1,2", "B=3"}, g.env); d != "" {
		t.Error(d)
	}
	if g := try(t, map[string]string{"VK_NUMBER": "ten"}, nil, "do", "x"); g.code != 2 || !strings.Contains(g.err, "variable VK_NUMBER:") {
		t.Errorf("wrong variable: status %d, %q", g.code, g.err)
	}
	if g := try(t, map[string]string{"VK_NUMBER": "ten"}, nil, "none"); g.code != 0 {
		t.Errorf("another command's variable: status %d, %q", g.code, g.err)
	}
}

func TestHelp(t *testing.T) {
	g := try(t, nil, nil, "do", "--help")
	if g.code != 0 || g.ran || g.err != "" {
		t.Errorf("status %d, ran %v, stderr %q", g.code, g.ran, g.err)
	}
	for _, want := range []string{"prog do: do it", "USAGE\n  prog do [flags] WHAT [MORE…]", "-e, --env K=V", "$VK_ENV", "repeatable", "EXIT STATUS", "  7     seven", "-v, --verbose"} {
		if !strings.Contains(g.out, want) {
			t.Errorf("help lacks %q:\n%s", want, g.out)
		}
	}
	if h := try(t, nil, nil, "help", "do"); h.code != 0 || h.out != g.out {
		t.Errorf("help do: status %d, %q; want what do --help prints", h.code, h.out)
	}
	if g := try(t, nil, nil, "--help"); g.code != 0 || !strings.Contains(g.out, "COMMANDS\n  do") {
		t.Errorf("help of the program: status %d\n%s", g.code, g.out)
	}
}

func TestErrorsBecomeStatus(t *testing.T) {
	child := exec.Command("sh", "-c", "exit 42").Run()
	for _, tc := range []struct {
		err  error
		code int
		text string
	}{
		{errors.New("plain"), 1, "prog: plain\n"},
		{fmt.Errorf("doing x: %w", fault.New(fault.NotFound, "no y").Hint("make one")), 10, "prog: doing x: no y\nprog: hint: make one\n"},
		{fault.New(fault.Busy, "busy"), 11, "prog: busy\n"},
		{fault.New(fault.System, "own").WithExit(125), 125, "prog: own\n"},
		{cliutil.Exit(42), 42, ""},
		{cliutil.Exit(0), 0, ""},
		{cliutil.Silent(fault.New(fault.Denied, "said already")), 12, ""},
		{context.Canceled, 130, "prog: context canceled\n"},
		// The library would exit with the child's status by itself.
		{fmt.Errorf("running a child: %w", child), 1, "prog: running a child: exit status 42\n"},
		{errors.Join(errors.New("one"), errors.New("two")), 1, "prog: one\nprog: two\n"},
		{errors.New("evil \x1b[2J"), 1, "prog: evil \\x1b[2J\n"},
	} {
		g := try(t, nil, tc.err, "none")
		if g.code != tc.code || g.err != tc.text {
			t.Errorf("%v: status %d, %q; want %d, %q", tc.err, g.code, g.err, tc.code, tc.text)
		}
	}
	g := try(t, nil, cliutil.BadOption("--a and --b exclude each other"), "none")
	if g.code != 2 || !strings.Contains(g.err, "usage: prog none") {
		t.Errorf("BadOption: status %d, %q", g.code, g.err)
	}
}

func TestJSON(t *testing.T) {
	var b bytes.Buffer
	if err := cliutil.JSON(&b, "vk.x/1", struct{ A int }{1}); err != nil {
		t.Fatal(err)
	}
	if want := "{\n  \"schema\": \"vk.x/1\",\n  \"A\": 1\n}\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
	b.Reset()
	if err := cliutil.JSON(&b, "vk.x/1", struct{}{}); err != nil || b.String() != "{\n  \"schema\": \"vk.x/1\"}\n" {
		t.Errorf("empty: %q, %v", b.String(), err)
	}
	if cliutil.JSON(&b, "vk.x/1", []int{1}) == nil {
		t.Error("a list was accepted")
	}
}

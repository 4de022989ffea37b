package vkcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/image"
	"virtkit/core/supervise"
)

func testApp(t *testing.T, vars map[string]string) (*app, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	var out, stderr bytes.Buffer
	dir := t.TempDir()
	return &app{env: appenv.Env{
		Stdin: strings.NewReader(""), Stdout: &out, Stderr: &stderr,
		Getenv:    func(k string) string { return vars[k] },
		LookupEnv: func(k string) (string, bool) { v, ok := vars[k]; return v, ok },
		Environ:   func() []string { return nil },
		Dir:       func() (string, error) { return dir, nil },
	}}, &out, &stderr
}

// fakeHost is a guestHost with no guest in it.
type fakeHost struct {
	img      image.Config
	startErr error
	spec     supervise.Spec
	prog     *script
	st       supervise.State
	ends     []bool
	execErr  error
	onStart  func()
	record   supervise.EgressRecord
}

func (f *fakeHost) resolve(context.Context, *runOptions) (*image.Image, error) {
	return &image.Image{Ref: "local/x", Digest: "sha256:1", Path: "/p", FSType: "ext4", LockPath: "/l", Config: f.img}, nil
}

func (f *fakeHost) start(ctx context.Context, s supervise.Spec) (guest, error) {
	f.spec = s
	if f.onStart != nil {
		f.onStart()
		<-ctx.Done()
		return nil, fmt.Errorf("starting: %w", context.Cause(ctx))
	}
	return f, f.startErr
}

func (f *fakeHost) id() string                            { return f.spec.ID }
func (f *fakeHost) state(context.Context) supervise.State { return f.st }
func (f *fakeHost) exec() execFunc {
	if f.execErr != nil {
		return func(context.Context, guestwire.ExecRequest, guestclient.Stdio, <-chan guestwire.ExecControl) (guestclient.ExecResult, error) {
			return guestclient.ExecResult{}, f.execErr
		}
	}
	return f.prog.exec
}

func (f *fakeHost) egress(context.Context) (supervise.EgressRecord, error) { return f.record, nil }

func (f *fakeHost) end(_ context.Context, inOrder bool) error {
	f.ends = append(f.ends, inOrder)
	return nil
}

func runFake(t *testing.T, o *runOptions, f *fakeHost, signals chan os.Signal) (int, string, string) {
	t.Helper()
	a, out, stderr := testApp(t, nil)
	if o.cpus == 0 {
		o.cpus, o.mem = 1, 512<<20
	}
	if err := o.validate(a); err != nil {
		t.Fatal(err)
	}
	s := &session{stdout: out, stderr: stderr, signals: signals, say: a.say}
	err := own125(a.runIn(t.Context(), o, f, &wire.Host{Conf: conf.Default()}, s))
	return cliutil.Report(stderr, "vk", err), out.String(), stderr.String()
}

func TestRunPassesTheExitCode(t *testing.T) {
	f := &fakeHost{
		img:  image.Config{Entrypoint: []string{"/e"}, Cmd: []string{"c"}, Env: []string{"A=1"}, User: "u", WorkingDir: "/w", Volumes: []string{"/v"}},
		prog: &script{res: guestclient.ExecResult{Code: 42}},
	}
	code, out, stderr := runFake(t, &runOptions{image: "x", args: []string{"a", ""}, env: []string{"B=2"}, name: "n"}, f, nil)
	if code != 42 || out != "out" || stderr != "err" {
		t.Errorf("status %d, stdout %q, stderr %q", code, out, stderr)
	}
	want := guestwire.ExecRequest{Argv: []string{"/e", "a", ""}, Env: []string{"B=2"}, User: "u", Dir: "/w", MkDir: true}
	got := f.prog.req
	got.ID = ""
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("request: %s", d)
	}
	if f.spec.Name != "n" || f.spec.Hostname != "n" || f.spec.Owner.PID != os.Getpid() || f.spec.Owner.Start == 0 || f.spec.MemMiB != 512 {
		t.Errorf("spec: %+v", f.spec)
	}
	if d := cmp.Diff([]supervise.Dir{{Path: "/v"}}, f.spec.Dirs); d != "" {
		t.Errorf("volumes: %s", d)
	}
	for _, e := range f.spec.Env {
		if strings.HasPrefix(e, "B=") {
			t.Errorf("the user's variable is in the spec, which is written to disk: %q", f.spec.Env)
		}
	}
	if d := cmp.Diff([]bool{false}, f.ends); d != "" {
		t.Errorf("end: %s", d)
	}
}

func TestRunEndsInOrderWhatIsToBeKept(t *testing.T) {
	dir := t.TempDir()
	for _, o := range []*runOptions{
		{image: "x", args: []string{"a"}, keep: true},
		{image: "x", args: []string{"a"}, shares: []string{dir + ":/s"}},
	} {
		f := &fakeHost{prog: &script{}}
		if code, _, stderr := runFake(t, o, f, nil); code != 0 || !cmp.Equal(f.ends, []bool{true}) {
			t.Errorf("%+v: status %d, ends %v, %s", o, code, f.ends, stderr)
		}
	}
	f := &fakeHost{prog: &script{}}
	runFake(t, &runOptions{image: "x", args: []string{"a"}, shares: []string{dir + ":/s:ro"}}, f, nil)
	if !cmp.Equal(f.ends, []bool{false}) {
		t.Errorf("read-only share: ends %v", f.ends)
	}
}

func TestBootedAgainIsToldOnce(t *testing.T) {
	a, _, stderr := testApp(t, nil)
	hear := a.bootProgress()
	for _, why := range [][]string{nil, {"no \x1b life"}, {"no \x1b life"}, {"no \x1b life", "reset"}} {
		hear(supervise.State{Stage: "boot", Retried: why})
	}
	want := "vk: warning: the guest was booted again: no \\x1b life\nvk: warning: the guest was booted again: reset\n"
	if stderr.String() != want {
		t.Errorf("told %q, want %q", stderr, want)
	}
}

func TestRunDetached(t *testing.T) {
	f := &fakeHost{img: image.Config{User: "u"}}
	code, out, _ := runFake(t, &runOptions{image: "x", args: []string{"a"}, detach: true}, f, nil)
	if code != 0 || out != f.spec.ID+"\n" || f.spec.Owner.PID != 0 || len(f.ends) > 0 {
		t.Errorf("status %d, stdout %q, owner %+v, ends %v", code, out, f.spec.Owner, f.ends)
	}
	if c := f.spec.Command; c == nil || c.User != "u" || !cmp.Equal(c.Argv, []string{"a"}) {
		t.Errorf("command %+v", c)
	}
}

func TestRunOwnFailuresAre125(t *testing.T) {
	f := &fakeHost{startErr: fault.New(fault.System, "no QEMU").Hint("install it")}
	code, _, stderr := runFake(t, &runOptions{image: "x", args: []string{"a"}}, f, nil)
	if code != 125 || !strings.Contains(stderr, "vk: no QEMU\nvk: hint: install it\n") {
		t.Errorf("status %d, %q", code, stderr)
	}
	// An image without a command and none given.
	code, _, stderr = runFake(t, &runOptions{image: "x"}, &fakeHost{}, nil)
	if code != 125 || !strings.Contains(stderr, "has no command of its own") {
		t.Errorf("no command: status %d, %q", code, stderr)
	}
}

func TestRunTellsWhyTheGuestWent(t *testing.T) {
	f := &fakeHost{execErr: fmt.Errorf("running a: %w", guestclient.ErrGuestGone), st: supervise.State{
		Exit: &supervise.Exit{Reason: "panic", Detail: "Kernel panic", Console: []string{"last", "words"}},
	}}
	code, _, stderr := runFake(t, &runOptions{image: "x", args: []string{"a"}}, f, nil)
	if code != 125 {
		t.Errorf("status %d, want 125", code)
	}
	for _, w := range []string{"panic: Kernel panic", "vk:   last", "vk:   words"} {
		if !strings.Contains(stderr, w) {
			t.Errorf("%q lacks %q", stderr, w)
		}
	}
	if !cmp.Equal(f.ends, []bool{false}) {
		t.Errorf("ends %v", f.ends)
	}
}

func TestRunInterruptedWhileBooting(t *testing.T) {
	sig := make(chan os.Signal, 1)
	f := &fakeHost{onStart: func() { sig <- unix.SIGTERM }}
	code, _, stderr := runFake(t, &runOptions{image: "x", args: []string{"a"}}, f, sig)
	if code != 143 || !strings.Contains(stderr, "signal 15 (SIGTERM)") {
		t.Errorf("status %d, %q; want 143", code, stderr)
	}
}

func TestArgv(t *testing.T) {
	ptr := func(s string) *string { return &s }
	full := image.Config{Entrypoint: []string{"e", "1"}, Cmd: []string{"c"}}
	for _, tc := range []struct {
		o    runOptions
		c    image.Config
		want []string
	}{
		{runOptions{}, full, []string{"e", "1", "c"}},
		{runOptions{args: []string{"a"}}, full, []string{"e", "1", "a"}},
		{runOptions{entrypoint: ptr("p")}, full, []string{"p"}},
		{runOptions{entrypoint: ptr("p"), args: []string{"a"}}, full, []string{"p", "a"}},
		{runOptions{entrypoint: ptr(""), args: []string{"a"}}, full, []string{"a"}},
		{runOptions{}, image.Config{Cmd: []string{"c"}}, []string{"c"}},
	} {
		got, err := tc.o.argv(tc.c)
		if err != nil || !cmp.Equal(tc.want, got) {
			t.Errorf("%+v: %q, %v; want %q", tc.o, got, err, tc.want)
		}
	}
	for _, o := range []runOptions{{}, {entrypoint: ptr("")}} {
		if got, err := o.argv(image.Config{}); err == nil {
			t.Errorf("%+v: %q, want an error", o, got)
		}
	}
	if full.Entrypoint[0] != "e" || len(full.Entrypoint) != 2 {
		t.Error("the image's entrypoint was changed")
	}
}

func TestRunOptionsThatExclude(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    runOptions
		want string
	}{
		{runOptions{rm: true, keep: true}, "--rm and --keep"},
		{runOptions{detach: true, tty: true}, "--detach"},
		{runOptions{tty: true, stdin: true}, "not a terminal"},
		{runOptions{net: "none", publish: []string{"1:2"}}, "--net none"},
		{runOptions{name: "-x"}, "--name"},
		{runOptions{shares: []string{"/nonexistent-dir:/x"}}, "/nonexistent-dir"},
		{runOptions{shares: []string{file + ":/x"}}, "not a directory"},
		{runOptions{shares: []string{filepath.Dir(file) + ":/x", "/:/x/:ro"}}, "both to be /x"},
		{runOptions{publish: []string{"x"}}, "--publish"},
		{runOptions{env: []string{"=x"}}, "--env"},
	} {
		a, _, _ := testApp(t, nil)
		err := tc.o.validate(a)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !cliutil.Settled(err) {
			t.Errorf("%+v: %v, want a usage error with %q", tc.o, err, tc.want)
		}
	}
}

func TestSpecTakesTheConfiguredNetwork(t *testing.T) {
	c := conf.Default()
	c.Net.HostLoopback = []int{8080}
	for _, tc := range []struct {
		mode, flag, want string
		loopback         int
	}{
		{"switch", "", "switch", 1}, {"tap", "", "tap", 0}, {"pool", "", "pool", 0}, {"tap", "none", "none", 0}, {"tap", "switch", "switch", 1},
	} {
		c.Net.Mode = tc.mode
		o := runOptions{cpus: 1, mem: 1 << 30, net: tc.flag}
		s, err := o.spec(c, supervise.Image{}, image.Config{}, time.Time{})
		if err != nil || s.Net.Mode != tc.want || len(s.Net.Loopback) != tc.loopback {
			t.Errorf("mode %s, flag %q: %+v, %v; want %s with %d ports", tc.mode, tc.flag, s.Net, err, tc.want, tc.loopback)
		}
	}
}

func TestTermOfTheCaller(t *testing.T) {
	lookup := func(string) (string, bool) { return "vt100", true }
	if got := withTerm([]string{"A=1"}, lookup); !cmp.Equal(got, []string{"A=1", "TERM=vt100"}) {
		t.Errorf("%q", got)
	}
	if got := withTerm([]string{"TERM=mine"}, lookup); !cmp.Equal(got, []string{"TERM=mine"}) {
		t.Errorf("%q", got)
	}
	if !errors.Is(lost(guestclient.ErrGuestGone, 1, func() supervise.State { return supervise.State{} }), guestclient.ErrGuestGone) {
		t.Error("an unexplained loss must stay what it is")
	}
}

// A supervisor that was killed has written no reason, and its directory is
// there without a holder; one that ended by itself has written one.
func TestKilledSupervisorIsTold(t *testing.T) {
	dir := t.TempDir()
	put := func(st supervise.State) {
		b, err := json.Marshal(st)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, supervise.StateFile), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if st := killedState(dir, supervise.State{Boots: 3}); st.Exit != nil || st.Boots != 3 {
		t.Errorf("no state was written: %+v, want what was known", st)
	}
	put(supervise.State{Phase: supervise.Running})
	err := lost(guestclient.ErrGuestGone, 1, func() supervise.State { return killedState(dir, supervise.State{}) })
	if !strings.Contains(err.Error(), "supervisor was killed") || fault.HintOf(err) == "" {
		t.Errorf("%v, hint %q", err, fault.HintOf(err))
	}
	put(supervise.State{Phase: supervise.Ended, Exit: &supervise.Exit{Reason: "panic"}})
	if st := killedState(dir, supervise.State{}); st.Exit == nil || st.Exit.Reason != "panic" {
		t.Errorf("%+v, want the reason it wrote", st.Exit)
	}
}

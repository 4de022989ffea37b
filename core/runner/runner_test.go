package runner_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
	"virtkit/core/runner/runnertest"
	"virtkit/core/supervise"
)

type world struct {
	t     *testing.T
	host  *runnertest.Host
	run   *runner.Runner
	trace bytes.Buffer
	env   []string
	tmp   string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, tmp: t.TempDir()}
	w.host = &runnertest.Host{Root: t.TempDir(), Images: map[string]runner.Image{
		"local/default": {Root: supervise.Image{Ref: "local/default", Digest: "sha256:0123456789abcdef", Path: "/img"}, Env: []string{"A=image"}, From: "cached"},
		"entry":         {Entrypoint: []string{"/entry.sh", "-v"}, User: "app", Workdir: "/srv"},
	}}
	w.run = &runner.Runner{
		Images: w.host, Machines: w.host, Trace: &w.trace, Parent: supervise.Owner{PID: 4242, Start: 7},
		Now: func() time.Time { return time.Unix(1_800_000_000, 0) },
		Set: runner.Settings{
			Limits:   execdrv.Limits{CPUs: 2, MaxCPUs: 4, MemMiB: 2048, MaxMemMiB: 4096, Image: "local/default"},
			Hostname: "runner", HostName: "host1", BuildsDir: "/builds", CacheDir: "/cache", Version: "1.2.3",
			Net: supervise.NetSpec{Mode: "switch"},
		},
	}
	w.response(`{"id":77,"job_info":{"name":"test unit"},"runner_info":{"timeout":60}}`)
	w.env = []string{"TMPDIR=" + w.tmp, "JOB_RESPONSE_FILE=" + filepath.Join(w.tmp, "response.json"),
		"BUILD_EXIT_CODE_FILE=" + filepath.Join(w.tmp, "code"), "BUILD_FAILURE_EXIT_CODE=1", "SYSTEM_FAILURE_EXIT_CODE=2",
		"CUSTOM_ENV_CI_JOB_ID=77", "CUSTOM_ENV_CI_JOB_NAME=test unit", "CUSTOM_ENV_CI_PROJECT_PATH=acme/web",
		"CUSTOM_ENV_CI_BUILDS_DIR=/builds", "CUSTOM_ENV_CI_PROJECT_DIR=/builds/acme/web", "CUSTOM_ENV_CI_JOB_TOKEN=glcbt-s3cr3t"}
	return w
}

func (w *world) response(s string) {
	if err := os.WriteFile(filepath.Join(w.tmp, "response.json"), []byte(s), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) call(more ...string) *execdrv.Call {
	c := execdrv.ReadCall(append(append([]string{}, w.env...), more...))
	return &c
}

func (w *world) id() string {
	id, err := runner.Identify(w.call())
	if err != nil {
		w.t.Fatal(err)
	}
	return id.ID
}

func (w *world) prepare(more ...string) {
	w.t.Helper()
	if err := w.run.Prepare(context.Background(), w.call(more...)); err != nil {
		w.t.Fatalf("Prepare: %v", err)
	}
}

func (w *world) stage(stage, script string, sigs <-chan os.Signal, more ...string) (int, string, error) {
	w.t.Helper()
	path := filepath.Join(w.tmp, "script")
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		w.t.Fatal(err)
	}
	var out bytes.Buffer
	code, err := w.run.Run(context.Background(), w.call(more...), path, stage, runner.Stdio{Out: &out, Err: &out}, sigs)
	return code, out.String(), err
}

func (w *world) wantTrace(parts ...string) {
	w.t.Helper()
	for _, p := range parts {
		if !strings.Contains(w.trace.String(), p) {
			w.t.Errorf("trace lacks %q:\n%s", p, w.trace.String())
		}
	}
}

func TestConfigAnswer(t *testing.T) {
	w := newWorld(t)
	a, err := w.run.Config(w.call())
	if err != nil {
		t.Fatal(err)
	}
	if a.BuildsDir != "/builds" || a.CacheDir != "/cache" || a.BuildsDirIsShared || a.Hostname != "host1" || a.Driver.Version != "1.2.3" || a.Shell != "bash" {
		t.Errorf("Config = %+v", a)
	}
	if len(w.host.Launched) != 0 {
		t.Error("config started a guest")
	}
}

func TestConfigRefusesEarly(t *testing.T) {
	w := newWorld(t)
	c := w.call("CUSTOM_ENV_MICROVM_CPUS=lots")
	_, err := w.run.Config(c)
	if runner.Status(c, err) != 1 || !strings.Contains(err.Error(), "MICROVM_CPUS") {
		t.Errorf("bad variable: %v", err)
	}
	w.host.CheckErr = fault.New(fault.Usage, "dockerfile: images are not built yet")
	c = w.call("CUSTOM_ENV_MICROVM_IMAGE=dockerfile:x")
	_, err = w.run.Config(c)
	if runner.Status(c, err) != 1 || !strings.Contains(err.Error(), "MICROVM_IMAGE") || !strings.Contains(err.Error(), "not built yet") {
		t.Errorf("bad image: %v", err)
	}
	w.host.CheckErr = nil
	w.response(`{"id":`)
	c = w.call()
	_, err = w.run.Config(c)
	if runner.Status(c, err) != 2 {
		t.Errorf("a broken response is the runner's fault: %v", err)
	}
	c = w.call("CUSTOM_ENV_CI_JOB_ID=")
	if _, err = w.run.Config(c); runner.Status(c, err) != 2 || fault.HintOf(err) == "" {
		t.Errorf("no job id: %v", err)
	}
}

func TestPrepare(t *testing.T) {
	w := newWorld(t)
	w.prepare("CUSTOM_ENV_MICROVM_CPUS=9", "CUSTOM_ENV_MICROVM_TYPO=1")
	w.wantTrace("virtkit: image local/default (sha256:0123456789ab, cached) in", "virtkit: booted in", "4 CPUs, 2G memory, kernel 6.12, tcg",
		"virtkit: ready after", "virtkit: MICROVM_CPUS 9 is over", "virtkit: warning: MICROVM_TYPO")
	s := w.host.Launched[0]
	if s.CPUs != 4 || s.Kind != "gitlab" || !s.Keep || s.Name != "" || !cmp.Equal(s.Env, []string{"A=image"}) {
		t.Errorf("spec: %+v", s)
	}
	if want := time.Unix(1_800_000_000, 0).Add(time.Minute + runner.GraceAfterTimeout); !s.Deadline.Equal(want) {
		t.Errorf("deadline %v, want %v", s.Deadline, want)
	}
	var dirs []string
	for _, d := range s.Dirs {
		dirs = append(dirs, d.Path)
	}
	if !cmp.Equal(dirs, []string{"/builds", "/builds/acme", "/cache"}) {
		t.Errorf("dirs: %q", dirs)
	}
	if s.Owner.PID != 0 {
		t.Error("an owner was taken though config's caller is unknown")
	}
	b, err := os.ReadFile(filepath.Join(w.host.Root, w.id(), runner.RecordFile))
	if err != nil || strings.Contains(string(b), "s3cr3t") {
		t.Errorf("job.json: %v\n%s", err, b)
	}
	if st, _ := os.Stat(filepath.Join(w.host.Root, w.id(), runner.RecordFile)); st.Mode().Perm() != 0o600 {
		t.Errorf("job.json has mode %v", st.Mode())
	}
}

func TestOwnerIsTheCommonParent(t *testing.T) {
	w := newWorld(t)
	a, err := w.run.Config(w.call())
	if err != nil {
		t.Fatal(err)
	}
	env := execdrv.EnvFirstCall + "=" + a.JobEnv[execdrv.EnvFirstCall]
	w.prepare(env)
	if got := w.host.Launched[0].Owner; got != w.run.Parent {
		t.Errorf("owner %v, want %v", got, w.run.Parent)
	}
	w.run.Parent.Start++
	w.prepare(env)
	if got := w.host.Launched[1].Owner; got.PID != 0 {
		t.Errorf("owner %v though the parent changed", got)
	}
}

func TestPrepareFailures(t *testing.T) {
	for _, tt := range []struct {
		name   string
		break_ func(*world)
		env    string
		status int
		want   string
	}{
		{"no image", func(*world) {}, "CUSTOM_ENV_MICROVM_IMAGE=local/none", 2, "image: MICROVM_IMAGE local/none: no image"},
		{"no boot", func(w *world) { w.host.LaunchErr = fault.New(fault.System, "the agent did not answer in 2m") }, "", 2, "boot: the agent did not answer"},
		{"no user", func(w *world) { w.host.LaunchErr = errors.New(`guest setup, stage dirs: user "nosuch" is unknown`) }, "CUSTOM_ENV_MICROVM_USER=nosuch", 1, `MICROVM_USER: the image has no user "nosuch"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			tt.break_(w)
			c := w.call(tt.env)
			err := w.run.Prepare(context.Background(), c)
			if runner.Status(c, err) != tt.status || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("status %d, error %v", runner.Status(c, err), err)
			}
			if left, _ := os.ReadDir(w.host.Root); len(left) != 0 || w.host.Alive() != 0 {
				t.Errorf("left behind: %v, %d guests", left, w.host.Alive())
			}
		})
	}
}

func TestPrepareAgainAfterFailure(t *testing.T) {
	w := newWorld(t)
	w.host.LaunchErr = errors.New("boom")
	for range 2 {
		if err := w.run.Prepare(context.Background(), w.call()); err == nil {
			t.Fatal("no error")
		}
		if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
			t.Fatal(err)
		}
	}
	w.host.LaunchErr = nil
	w.prepare()
	w.prepare() // without a cleanup between: the first guest goes
	if w.host.Alive() != 1 {
		t.Errorf("%d guests", w.host.Alive())
	}
}

func TestCancelledPrepareLeavesNothing(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("terminated"))
	if err := w.run.Prepare(ctx, w.call()); err == nil || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("Prepare = %v", err)
	}
	if w.host.Alive() != 0 {
		t.Error("a guest is left")
	}
}

func exits(code, signal int) runnertest.Shell {
	return func(_ context.Context, _ guestwire.ExecRequest, script string, out, _ io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		io.WriteString(out, "ran "+script)
		return guestwire.ExecEvent{Exited: true, Code: code, Signal: signal}, nil
	}
}

func TestRunExitCodes(t *testing.T) {
	for _, tt := range []struct {
		code, signal, exit int
		file               string
	}{
		{0, 0, 0, ""}, {50, 0, 1, "50\n"}, {1, 0, 1, "1\n"}, {2, 0, 1, "2\n"}, {255, 0, 1, "255\n"}, {137, 9, 1, "137\n"},
	} {
		w := newWorld(t)
		w.host.Shell = exits(tt.code, tt.signal)
		w.prepare()
		code, out, err := w.stage("build_script", "echo", nil)
		b, _ := os.ReadFile(filepath.Join(w.tmp, "code"))
		if err != nil || code != tt.exit || out != "ran echo" || string(b) != tt.file {
			t.Errorf("%+v: %d %q %q %v", tt, code, out, b, err)
		}
	}
}

func TestEntrypointAndEnv(t *testing.T) {
	w := newWorld(t)
	var got []guestwire.ExecRequest
	w.host.Shell = func(_ context.Context, r guestwire.ExecRequest, _ string, _, _ io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		got = append(got, r)
		return guestwire.ExecEvent{Exited: true}, nil
	}
	w.env = append(w.env, "CUSTOM_ENV_MICROVM_IMAGE=entry", "HOSTSECRET=x")
	a, err := w.run.Config(w.call())
	if err != nil {
		t.Fatal(err)
	}
	w.env = append(w.env, execdrv.EnvFirstCall+"="+a.JobEnv[execdrv.EnvFirstCall], "FROM_JOB_ENV=v")
	w.prepare()
	for _, s := range []string{"get_sources", "build_script", "step_release", "after_script"} {
		if _, _, err := w.stage(s, "x", nil); err != nil {
			t.Fatal(err)
		}
	}
	with := []string{"/entry.sh", "-v", runner.Shell}
	for i, want := range [][]string{{runner.Shell}, with, with, with} {
		if !cmp.Equal(got[i].Argv, want) || got[i].User != "app" || got[i].Dir != "/srv" || !cmp.Equal(got[i].Env, []string{"FROM_JOB_ENV=v"}) {
			t.Errorf("exec %d: %+v", i, got[i])
		}
	}
	// entrypoint: [""] of the job switches it off.
	w.response(`{"id":77,"image":{"name":"entry","entrypoint":[""]}}`)
	w.prepare("CUSTOM_ENV_MICROVM_USER=0")
	w.stage("build_script", "x", nil)
	if last := got[len(got)-1]; !cmp.Equal(last.Argv, []string{runner.Shell}) || last.User != "0" {
		t.Errorf("override: %+v", last)
	}
}

func TestEntrypointThatCannotStart(t *testing.T) {
	w := newWorld(t)
	w.host.Shell = func(context.Context, guestwire.ExecRequest, string, io.Writer, io.Writer, <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		return guestwire.ExecEvent{Exited: true, Code: 127, Err: "/entry.sh: no such file"}, nil
	}
	w.prepare("CUSTOM_ENV_MICROVM_IMAGE=entry")
	code, _, err := w.stage("build_script", "x", nil)
	b, _ := os.ReadFile(filepath.Join(w.tmp, "code"))
	if code != 1 || err != nil || string(b) != "127\n" {
		t.Errorf("%d %v %q", code, err, b)
	}
	w.wantTrace("the image's entrypoint", "/entry.sh: no such file")
}

func TestSignals(t *testing.T) {
	w := newWorld(t)
	sigs := make(chan os.Signal, 2)
	var got []guestwire.ExecControl
	w.host.Shell = func(_ context.Context, _ guestwire.ExecRequest, _ string, _, _ io.Writer, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		sigs <- os.Interrupt
		got = append(got, <-control)
		sigs <- syscall.SIGTERM
		got = append(got, <-control)
		return guestwire.ExecEvent{Exited: true, Code: 137, Signal: 9}, nil
	}
	w.prepare()
	code, _, err := w.stage("build_script", "x", sigs)
	if code != 1 || err != nil || !cmp.Equal(got, []guestwire.ExecControl{{Signal: 15}, {Kill: true}}) {
		t.Errorf("%d %v %+v", code, err, got)
	}
}

func TestGuestDies(t *testing.T) {
	w := newWorld(t)
	w.host.EndWith = &supervise.Exit{Reason: "panic", Detail: "Kernel panic - not syncing: sysrq", Console: []string{"one", "two"}}
	w.host.Shell = func(ctx context.Context, _ guestwire.ExecRequest, _ string, _, _ io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		w.host.KillGuest(w.id())
		select {}
	}
	w.prepare()
	code, _, err := w.stage("build_script", "x", nil)
	if code != 2 || err == nil || !strings.Contains(err.Error(), "panic: Kernel panic") || !strings.Contains(err.Error(), "two") {
		t.Errorf("%d %v", code, err)
	}
	if _, err := os.Stat(filepath.Join(w.tmp, "code")); err == nil {
		t.Error("a code was written for a script that did not end")
	}
	code, _, err = w.stage("after_script", "x", nil)
	if code != 2 || err == nil || !strings.Contains(err.Error(), "after_script") {
		t.Errorf("later stage: %d %v", code, err)
	}
}

func TestRunWithoutPrepare(t *testing.T) {
	w := newWorld(t)
	code, _, err := w.stage("build_script", "x", nil)
	if code != 2 || err == nil || fault.HintOf(err) == "" {
		t.Errorf("%d %v", code, err)
	}
}

func TestCleanupFromAnyState(t *testing.T) {
	w := newWorld(t)
	for range 2 { // nothing there
		if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
			t.Fatal(err)
		}
	}
	w.prepare()
	w.response("{broken") // cleanup needs no response
	for range 2 {
		if err := w.run.Cleanup(context.Background(), w.call()); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(w.host.Root); len(left) != 0 || w.host.Alive() != 0 {
		t.Errorf("left: %v", left)
	}
	w.host.RemoveErr = errors.New("device busy")
	c := w.call()
	if err := w.run.Cleanup(context.Background(), c); runner.Status(c, err) != 2 || !strings.Contains(err.Error(), w.id()) {
		t.Errorf("Cleanup = %v", err)
	}
}

func TestIdentityTellsJobsApart(t *testing.T) {
	w := newWorld(t)
	base := w.id()
	if !strings.HasPrefix(base, "77-acme-web-test_unit-") {
		t.Errorf("id %q", base)
	}
	for _, kv := range []string{"CUSTOM_ENV_CI_SERVER_URL=https://other.example", "CUSTOM_ENV_CI_CONCURRENT_ID=1", "CUSTOM_ENV_CI_RUNNER_SHORT_TOKEN=abc", "TMPDIR=/other"} {
		id, err := runner.Identify(w.call(kv))
		if err != nil || id.ID == base {
			t.Errorf("%s: %q %v", kv, id.ID, err)
		}
	}
	// What changes during a job must not change the name.
	id, _ := runner.Identify(w.call("CUSTOM_ENV_CI_JOB_STATUS=failed", "FROM_JOB_ENV=x", "CUSTOM_ENV_CI_PROJECT_DIR="))
	if id.ID != base {
		t.Errorf("%q is not %q", id.ID, base)
	}
	long, _ := runner.Identify(w.call("CUSTOM_ENV_CI_JOB_NAME=../../" + strings.Repeat("ü/", 300)))
	if strings.ContainsAny(long.ID, "/") || len(long.ID) > 100 || strings.HasPrefix(long.ID, ".") {
		t.Errorf("id %q", long.ID)
	}
}

func TestRunSteps(t *testing.T) {
	var log []string
	step := func(name string, err error) runner.Step {
		return runner.Step{Name: name, Do: func(context.Context) error { log = append(log, name); return err },
			Undo: func(ctx context.Context) error { log = append(log, "-"+name); return ctx.Err() }}
	}
	boom := errors.New("boom")
	err, left := runner.RunSteps(context.Background(), []runner.Step{step("a", nil), {Name: "b", Do: func(context.Context) error { return nil }}, step("c", boom), step("d", nil)}, time.Now, nil)
	if !errors.Is(err, boom) || !strings.HasPrefix(err.Error(), "c: ") || len(left) != 0 || !cmp.Equal(log, []string{"a", "c", "-c", "-a"}) {
		t.Errorf("%v %v %v", err, left, log)
	}
}

// A prepare that is told to end after it has reserved the job's directory, or
// that cannot go on with it, leaves none.
func TestPrepareGivesUpAReservedDirectory(t *testing.T) {
	for name, stop := range map[string]func(w *world, end context.CancelFunc){
		"told to end": func(_ *world, end context.CancelFunc) { end() },
		"no record": func(w *world, _ context.CancelFunc) {
			os.Mkdir(filepath.Join(w.host.Dir(w.id()), runner.RecordFile), 0o700)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			ctx, end := context.WithCancel(t.Context())
			defer end()
			w.host.Reserved = func() { stop(w, end) }
			if err := w.run.Prepare(ctx, w.call()); err == nil {
				t.Fatal("Prepare succeeded")
			}
			if len(w.host.Launched) != 0 {
				t.Error("a guest was launched")
			}
			if strings.Contains(w.trace.String(), "undoing") {
				t.Errorf("trace:\n%s", w.trace.String())
			}
			if _, err := os.Lstat(w.host.Dir(w.id())); !os.IsNotExist(err) {
				t.Errorf("the directory is left: %v", err)
			}
		})
	}
}

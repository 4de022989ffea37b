package runner_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/checkout"
	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
)

// fakeCheckouts fetches nothing.
type fakeCheckouts struct {
	jobs  []checkout.Job
	swept []checkout.SweepOptions
	err   error // of Take; nil = that nothing can be reached
}

func (f *fakeCheckouts) Take(_ context.Context, j checkout.Job, _ func(string)) (*checkout.Tree, error) {
	f.jobs = append(f.jobs, j)
	if f.err != nil {
		return nil, f.err
	}
	return nil, fault.New(fault.Unavailable, "fetching the sources")
}

func (f *fakeCheckouts) Sweep(_ context.Context, o checkout.SweepOptions) (checkout.Swept, error) {
	f.swept = append(f.swept, o)
	return checkout.Swept{}, nil
}

const sourcesResponse = `{"id":77,"token":"glcbt-s3cr3t","allow_git_fetch":true,"job_info":{"name":"test unit","project_id":7},
"git_info":{"repo_url":"http://gitlab-ci-token:glcbt-s3cr3t@git.example.com:8080/acme/web.git","ref":"main","sha":"f400d9d34482185362e87552bcc47c5e5a468e2c","refspecs":["+refs/heads/main:refs/remotes/origin/main"],"depth":20},
"variables":[{"key":"FILEV","value":"x","file":true}]`

// What the host is asked to fetch is what the job says; a failure is the
// runner's side and leaves nothing.
func TestSourcesAreAskedFor(t *testing.T) {
	w := newWorld(t)
	f := &fakeCheckouts{}
	w.run.Checkouts = f
	w.response(sourcesResponse + "}")
	err := w.run.Prepare(t.Context(), w.call("CUSTOM_ENV_CI_RUNNER_SHORT_TOKEN=tok/en", "CUSTOM_ENV_CI_CONCURRENT_PROJECT_ID=3", "CUSTOM_ENV_CI_RUNNER_VERSION=19.4.0",
		"CUSTOM_ENV_CI_RUNNER_EXECUTABLE_ARCH=linux/amd64", "CUSTOM_ENV_GIT_CLEAN_FLAGS=-ffdx -e keep", "CUSTOM_ENV_GET_SOURCES_ATTEMPTS=2"))
	if fault.KindOf(err) != fault.Unavailable || !strings.HasPrefix(err.Error(), "sources: ") || w.host.Alive() != 0 {
		t.Errorf("Prepare = %v", err)
	}
	want := []checkout.Job{{
		Slot: "tok-en-3", Project: "7-acme-web", URL: "http://gitlab-ci-token:glcbt-s3cr3t@git.example.com:8080/acme/web.git", User: "gitlab-ci-token", Token: "glcbt-s3cr3t",
		SHA: "f400d9d34482185362e87552bcc47c5e5a468e2c", Ref: "main", Refspecs: []string{"+refs/heads/main:refs/remotes/origin/main"}, Depth: 20,
		CleanFlags: []string{"-ffdx", "-e", "keep"}, FetchFlags: []string{"--prune", "--quiet"}, Dir: "/builds/acme/web",
		UserAgent: "gitlab-runner 19.4.0 linux/amd64", Attempts: 2,
	}}
	if d := cmp.Diff(want, f.jobs); d != "" {
		t.Error(d)
	}
	if len(f.swept) != 1 || f.swept[0].Idle >= 0 {
		t.Errorf("swept %+v, want once, by the configured time", f.swept)
	}
}

// Where the host does not fetch, the guest does, and the trace says so.
func TestSourcesInTheGuest(t *testing.T) {
	for name, tt := range map[string]struct {
		env      string
		response string
		say      string
	}{
		"no info": {"", `{"id":77}`, "virtkit: the sources are cloned in the guest: the job does not say what to fetch and where to\n"},
		"none":    {"CUSTOM_ENV_GIT_STRATEGY=none", sourcesResponse + "}", ""},
		"empty":   {"CUSTOM_ENV_GIT_STRATEGY=empty", sourcesResponse + "}", ""},
	} {
		w := newWorld(t)
		f := &fakeCheckouts{}
		w.run.Checkouts = f
		w.response(tt.response)
		w.prepare(tt.env)
		if len(f.jobs) != 0 || w.host.Launched[0].Checkout != nil {
			t.Errorf("%s: the host was asked for %+v", name, f.jobs)
		}
		if got := strings.Contains(w.trace.String(), "sources"); got != (tt.say != "") || !strings.Contains(w.trace.String(), tt.say) {
			t.Errorf("%s: the trace is\n%s", name, w.trace.String())
		}
	}
	w := newWorld(t)
	w.run.Checkouts = &fakeCheckouts{}
	w.response(sourcesResponse + "}")
	if _, err := w.run.Config(w.call("CUSTOM_ENV_GIT_STRATEGY=pull")); err != nil {
		t.Errorf("config looks at the sources: %v", err)
	}
}

// Submodules are asked for with the sources, unless a flag changes what they
// are; what the host finds to be the guest's is cloned there.
func TestSubmodules(t *testing.T) {
	sub := func(vars ...string) (*fakeCheckouts, string) {
		w := newWorld(t)
		f := &fakeCheckouts{err: &checkout.GuestOnly{Why: "the submodule \"lib\" comes from elsewhere than the job's server"}}
		w.run.Checkouts = f
		w.response(sourcesResponse + "}")
		w.prepare(append(vars, "CUSTOM_ENV_GIT_SUBMODULE_STRATEGY=recursive")...)
		if w.host.Launched[0].Checkout != nil {
			t.Errorf("%q: the guest has a tree of the host's", vars)
		}
		return f, w.trace.String()
	}
	f, trace := sub("CUSTOM_ENV_GIT_SUBMODULE_PATHS=lib :(exclude)x", "CUSTOM_ENV_GIT_SUBMODULE_FORCE_HTTPS=true", "CUSTOM_ENV_GIT_SUBMODULE_UPDATE_FLAGS=--jobs 4 -j2 --force")
	if len(f.jobs) != 1 {
		t.Fatalf("the host was asked %d times", len(f.jobs))
	}
	if d := cmp.Diff(&checkout.Submodules{Recursive: true, Depth: 20, Paths: []string{"lib", ":(exclude)x"}, ForceHTTPS: true}, f.jobs[0].Submodules); d != "" {
		t.Error(d)
	}
	if want := "virtkit: the sources are cloned in the guest: the submodule \"lib\" comes from elsewhere than the job's server\n"; !strings.Contains(trace, want) {
		t.Errorf("the trace is\n%s", trace)
	}
	if f, _ := sub("CUSTOM_ENV_GIT_SUBMODULE_DEPTH=1"); f.jobs[0].Submodules.Depth != 1 {
		t.Errorf("a depth of their own: %+v", f.jobs[0].Submodules)
	}
	f, trace = sub("CUSTOM_ENV_GIT_SUBMODULE_UPDATE_FLAGS=--jobs 4 --remote")
	if len(f.jobs) != 0 || !strings.Contains(trace, "virtkit: the sources are cloned in the guest: the host does not take --remote of GIT_SUBMODULE_UPDATE_FLAGS\n") {
		t.Errorf("--remote: the host was asked for %+v\n%s", f.jobs, trace)
	}
}

// get_sources of a job whose sources are there runs its hooks around what the
// host's git told, and leaves the credentials for git in a file of the job's.
func TestSourcesStage(t *testing.T) {
	w := newWorld(t)
	project := filepath.Join(t.TempDir(), "it's", "web")
	if err := os.MkdirAll(project, 0o755); err != nil {
		t.Fatal(err)
	}
	hooks, _ := json.Marshal([]map[string]any{
		{"name": "pre_get_sources_script", "script": []string{`echo "before $FROM in $(basename "$PWD"), $(cat "$FILEV")"`}},
		{"name": "post_get_sources_script", "script": []string{"echo one\necho two"}},
	})
	w.response(sourcesResponse + `,"hooks":` + string(hooks) + "}")
	w.prepare()
	dir := w.host.Dir(w.id())
	rec, err := runner.ReadRecord(dir)
	if err != nil {
		t.Fatal(err)
	}
	rec.HostSources = true
	if err := runner.WriteRecord(dir, rec); err != nil {
		t.Fatal(err)
	}
	told := "Fetching 100%s 'quoted' $HOME\n"
	if err := os.WriteFile(filepath.Join(dir, "sources.log"), []byte(told), 0o600); err != nil {
		t.Fatal(err)
	}
	w.host.Shell = func(ctx context.Context, _ guestwire.ExecRequest, script string, out, errw io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
		cmd := exec.CommandContext(ctx, "/bin/sh")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), out, errw
		cmd.Env = []string{"PATH=/usr/bin:/bin"}
		err := cmd.Run()
		return guestwire.ExecEvent{Exited: true, Code: cmd.ProcessState.ExitCode()}, ignoreExit(err)
	}
	script := filepath.Join(t.TempDir(), "script")
	os.WriteFile(script, []byte(`eval $'echo \'\x1b[32;1m$ pre\' ; echo \'\x1b[32;1m$ a\'; echo \'[32;1m$ b\' [32;1m$ c [32;1m$ d'`), 0o700)
	var out, errs bytes.Buffer
	code, err := w.run.Run(t.Context(), w.call("CUSTOM_ENV_CI_PROJECT_DIR="+project, "CUSTOM_ENV_FROM=a  b", "CUSTOM_ENV_FILEV=content of\nfile", "CUSTOM_ENV_BAD-NAME=x"),
		script, "get_sources", runner.Stdio{Out: &out, Err: &errs}, nil)
	if err != nil || code != 0 {
		t.Fatalf("%d %v\n%s%s", code, err, out.String(), errs.String())
	}
	want := "\x1b[32;1m$ echo \"before $FROM in $(basename \"$PWD\"), $(cat \"$FILEV\")\"\x1b[0;m\nbefore a  b in web, content of\nfile\n" + told +
		"\x1b[32;1m$ echo one # collapsed multi-line command\x1b[0;m\none\ntwo\n"
	if got := strings.Replace(out.String(), "\n\n\x1b", "\n\x1b", 1); got != want { // git-lfs, where this host has it, adds an empty line
		t.Errorf("the stage says\n%q\nwant\n%q", got, want)
	}
	conf := project + ".tmp/.gitlab-runner.ext.conf"
	b, err := os.ReadFile(conf)
	if w := "[url \"http://gitlab-ci-token:glcbt-s3cr3t@git.example.com:8080\"]\n\tinsteadOf = \"http://git.example.com:8080\"\n"; err != nil || string(b) != w {
		t.Errorf("%s is %q, %v", conf, b, err)
	}
	if fi, err := os.Stat(conf); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("others may read the token: %v %v", fi, err)
	}
	w.wantTrace("pre_get_sources_script and post_get_sources_script of the runner's own configuration do not run")
}

// TestLFSOfHostSources: the guest pulls the LFS files of a tree that the host
// fetched, unless the job wants none, or no tree.
func TestLFSOfHostSources(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "git"), []byte("#!/bin/sh\n[ \"$2\" = version ] || echo \"asked: $*\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		told, variable, want string
	}{
		{"fetched\n", "", "asked: lfs pull\n\n"},
		{"fetched\n", "GIT_LFS_SKIP_SMUDGE=maybe", "asked: lfs pull\n\n"},
		{"fetched\n", "GIT_LFS_SKIP_SMUDGE=1", ""},
		{"fetched\n", "GIT_CHECKOUT=false", ""},
		{checkout.SubmodulesTold + "\n", "", "asked: lfs pull\n\n\x1b[32;1mPulling LFS files...\x1b[0;m\nasked: submodule foreach --recursive git lfs pull\n"},
		{checkout.SubmodulesTold + "\n", "GIT_LFS_SKIP_SMUDGE=true", ""},
	} {
		w := newWorld(t)
		project := filepath.Join(t.TempDir(), "web")
		if err := os.MkdirAll(project, 0o755); err != nil {
			t.Fatal(err)
		}
		w.response(sourcesResponse + "}")
		w.prepare()
		dir := w.host.Dir(w.id())
		rec, err := runner.ReadRecord(dir)
		if err != nil {
			t.Fatal(err)
		}
		rec.HostSources = true
		if err := errors.Join(runner.WriteRecord(dir, rec), os.WriteFile(filepath.Join(dir, "sources.log"), []byte(c.told), 0o600)); err != nil {
			t.Fatal(err)
		}
		w.host.Shell = func(ctx context.Context, _ guestwire.ExecRequest, script string, out, errw io.Writer, _ <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
			cmd := exec.CommandContext(ctx, "/bin/sh")
			cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = strings.NewReader(script), out, errw, []string{"PATH=" + bin + ":/usr/bin:/bin"}
			err := cmd.Run()
			return guestwire.ExecEvent{Exited: true, Code: cmd.ProcessState.ExitCode()}, ignoreExit(err)
		}
		script := filepath.Join(t.TempDir(), "script")
		if err := os.WriteFile(script, nil, 0o700); err != nil {
			t.Fatal(err)
		}
		vars := []string{"CUSTOM_ENV_CI_PROJECT_DIR=" + project}
		if c.variable != "" {
			vars = append(vars, "CUSTOM_ENV_"+c.variable)
		}
		var out, errs bytes.Buffer
		if code, err := w.run.Run(t.Context(), w.call(vars...), script, "get_sources", runner.Stdio{Out: &out, Err: &errs}, nil); err != nil || code != 0 || out.String() != c.told+c.want {
			t.Errorf("%s: %d, %v\n%q\nwant\n%q\n%s", c.variable, code, err, out.String(), c.told+c.want, errs.String())
		}
	}
}

func ignoreExit(err error) error {
	if _, ok := err.(*exec.ExitError); ok {
		return nil
	}
	return err
}

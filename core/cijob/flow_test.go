package cijob_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// scripted is an executor whose calls end as the test says.
type scripted struct {
	ends map[string][]cijob.Ended // by kind or stage, in order; the last one stays
	on   func(ctx context.Context, name string, c cijob.Call)

	mu     sync.Mutex
	calls  []string
	status map[string]string // CI_JOB_STATUS of each stage
}

func (s *scripted) Call(ctx context.Context, c cijob.Call) cijob.Ended {
	name := string(c.Kind)
	if c.Kind == cijob.CallRun {
		name = c.Stage
	}
	s.mu.Lock()
	s.calls = append(s.calls, name)
	for _, kv := range c.Env {
		if v, ok := strings.CutPrefix(kv, "CUSTOM_ENV_CI_JOB_STATUS="); ok {
			s.status[name] = v
		}
	}
	var e cijob.Ended
	if l := s.ends[name]; len(l) > 0 {
		e = l[0]
		if len(l) > 1 {
			s.ends[name] = l[1:]
		}
	}
	s.mu.Unlock()
	if s.on != nil {
		s.on(ctx, name, c)
	}
	return e
}

// moves are transfers that remember what was asked of them.
type moves struct {
	mu   sync.Mutex
	did  []string
	fail map[string]error
	once map[string]error // the first time alone
}

func (m *moves) note(format string, a ...any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	what := fmt.Sprintf(format, a...)
	m.did = append(m.did, what)
	if err := m.once[what]; err != nil {
		delete(m.once, what)
		return err
	}
	return m.fail[what]
}

func (m *moves) Upload(_ context.Context, t cijob.Transfer, a job.Artifact) (string, error) {
	if err := m.note("upload %s", transfer.Words(t, a.Name)); err != nil {
		return job.TooLarge, err
	}
	return job.Uploaded, nil
}

func (m *moves) Download(_ context.Context, _ cijob.Transfer, d job.Dependency, direct bool) error {
	return m.note("download %d %v", d.ID, direct)
}

func (m *moves) Restore(_ context.Context, _ cijob.Transfer, c job.Cache) error {
	return m.note("restore %s", c.Key)
}

func (m *moves) Save(_ context.Context, _ cijob.Transfer, c job.Cache) error {
	return m.note("save %s", c.Key)
}

// aGuest is a host whose guest is there.
type aGuest struct{ noHost }

func (aGuest) Guest(context.Context) (cijob.Guest, string, error) { return nil, "me", nil }

func (aGuest) Usage(context.Context) (*wire.JobUsage, []wire.JobEvent) {
	return &wire.JobUsage{CPUs: 2}, []wire.JobEvent{{Kind: "oom_kill", Count: 2, First: "glcbt-64_tokenoftheJob"}}
}

type flow struct {
	j     *job.CiJob
	exec  *scripted
	moves *moves
	dir   *jobdir.Dir
	host  cijob.Host
	layer []byte // of the hub's egress rules
}

func newFlow() *flow {
	return &flow{
		j: &job.CiJob{Kind: job.KindGitLabCI, ServerURL: "https://gitlab.example.com", Token: "glcbt-64_tokenoftheJob", TimeoutSecs: 60,
			Job:     job.Info{ID: 1, Name: "n", ProjectID: 2, ProjectPath: "group/project"},
			Sources: job.Sources{AllowFetch: true},
			Steps: []job.Step{{Name: job.StepScript, Script: []string{"true"}, When: job.OnSuccess},
				{Name: job.StepAfter, Script: []string{"true"}, When: job.Always}}},
		exec:  &scripted{ends: map[string][]cijob.Ended{}, status: map[string]string{}},
		moves: &moves{fail: map[string]error{}},
		host:  aGuest{},
	}
}

func (f *flow) set(key, value string) {
	f.j.Variables = append(f.j.Variables, job.Variable{Key: key, Value: value, Public: true})
}

func (f *flow) run(t *testing.T) (job.Result, string) {
	t.Helper()
	s, err := jobdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	spec, err := f.j.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if f.dir, err = s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: spec, Layer: f.layer}}); err != nil {
		t.Fatal(err)
	}
	err = cijob.Run(t.Context(), cijob.Options{
		Dir: f.dir, Executor: f.exec, Host: f.host, Artifacts: f.moves, Caches: f.moves, Log: logx.ForTest(t), Version: "1",
		Poll: time.Millisecond, Tell: time.Millisecond, Wait: func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) },
	})
	if err != nil {
		t.Fatal(err)
	}
	res, ok, err := f.dir.Result()
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	out, err := os.ReadFile(f.dir.OutputPath())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(f.dir.WorkPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the work directory is left: %v", err)
	}
	return res, string(out)
}

func exit(code string) cijob.Ended {
	return cijob.Ended{Exit: execdrv.DefaultBuildFailure, FileCode: code, Outcome: execdrv.Outcome{Job: true}}
}

var systemFails = cijob.Ended{Exit: execdrv.DefaultSystemFailure}

func all() (a []job.Artifact, c []job.Cache) {
	for _, w := range []job.When{job.OnSuccess, job.OnFailure, job.Always} {
		a = append(a, job.Artifact{Name: string(w), Paths: []string{"x"}, When: w, Format: job.Zip})
		c = append(c, job.Cache{Key: string(w), Paths: []string{"x"}, When: w, Policy: job.PullPush})
	}
	return a, c
}

// TestOrder: the stages of a job that has everything.
func TestOrder(t *testing.T) {
	f := newFlow()
	f.j.Artifacts, f.j.Caches = all()
	f.j.Caches = append(f.j.Caches, job.Cache{Key: "pulled", Paths: []string{"x"}, When: job.Always, Policy: job.Pull},
		job.Cache{Key: "pushed", Paths: []string{"x"}, When: job.Always, Policy: job.Push},
		job.Cache{Paths: []string{"x"}, When: job.Always, Policy: job.PullPush, Warnings: []string{`cache key ".." could not be sanitized`}},
		job.Cache{Key: "of nothing", When: job.Always, Policy: job.PullPush})
	f.j.Dependencies = []job.Dependency{{ID: 901, Name: "build", Filename: "artifacts.zip"}, {ID: 902, Name: "has none"}}
	f.j.Steps = slices.Insert(f.j.Steps, 1, job.Step{Name: job.StepRelease, Script: []string{"true"}, When: job.OnSuccess})
	res, out := f.run(t)
	// What moves files begins with a script too, which tells the environment.
	want := []string{"config", "prepare", "prepare_script", "get_sources", "restore_cache", "download_artifacts", "step_script", "step_release", "after_script",
		"archive_cache", "upload_artifacts_on_success", "cleanup_file_variables", "cleanup"}
	if d := cmp.Diff(want, f.exec.calls); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"restore on_success", "restore on_failure", "restore always", "restore pulled", "download 901 true",
		"save on_success", "save always", "save pushed", "upload on_success", "upload always"}, f.moves.did); d != "" {
		t.Error(d)
	}
	if res.Failure != "" || res.ExitCode != nil || len(res.Artifacts) != 2 || res.Artifacts[0] != (wire.ArtifactResult{Name: "on_success", Outcome: job.Uploaded}) {
		t.Errorf("%+v", res)
	}
	if res.Usage == nil || res.Usage.CPUs != 2 {
		t.Errorf("usage: %+v", res.Usage)
	}
	for _, line := range []string{"Not downloading cache pushed due to policy", "Not uploading cache pulled due to policy",
		`cache key ".." could not be sanitized`, "Skipping cache extraction due to empty cache key", "Skipping cache archiving due to empty cache key",
		"Downloading artifacts for build (901)...", "Uploading artifacts for successful job", "Job succeeded"} {
		if !strings.Contains(out, line) {
			t.Errorf("the trace lacks %q", line)
		}
	}
	if s, _ := f.dir.Stage(); s.Stage != "cleanup_file_variables" || s.Guest == nil {
		t.Errorf("the last stage told of: %+v", s)
	}
}

// TestFailures: what a job ends with, by what fails.
func TestFailures(t *testing.T) {
	killed := exit("137")
	killed.Outcome.Signal = 9
	pull := cijob.Ended{Exit: execdrv.DefaultSystemFailure, Outcome: execdrv.Outcome{Step: "image"}}
	three, one, minus, seven := 3, 1, -1, 7
	for name, c := range map[string]struct {
		ends     map[string][]cijob.Ended
		moves    map[string]error
		once     map[string]error
		vars     map[string]string
		failure  job.Failure
		code     *int
		last     string // of the trace
		not      string // stage that is not called
		calls    string // how often prepare was
		uploaded string
	}{
		"script":             {ends: map[string][]cijob.Ended{"step_script": {exit("3")}}, failure: job.Script, code: &three, last: "ERROR: Job failed: exit status 3", uploaded: "upload on_failure,upload always"},
		"script's shell":     {ends: map[string][]cijob.Ended{"step_script": {killed}}, failure: job.Script, code: &minus, last: "ERROR: Job failed: signal: killed"},
		"system in script":   {ends: map[string][]cijob.Ended{"step_script": {systemFails}}, failure: job.System, last: "ERROR: Job failed (system failure): exit status 2"},
		"unknown status":     {ends: map[string][]cijob.Ended{"step_script": {{Exit: 77}}}, failure: job.System, last: "exit code 77; executable execution terminated with: exit status 77"},
		"odd code":           {ends: map[string][]cijob.Ended{"step_script": {exit("abc")}}, failure: job.System, last: "exit code 2; executable execution terminated with: exit status 1"},
		"clone":              {ends: map[string][]cijob.Ended{"get_sources": {exit("128")}}, failure: job.Script, not: "step_script", last: "exit status 128"}, // nothing says that it was the clone
		"prepare_script":     {ends: map[string][]cijob.Ended{"prepare_script": {systemFails}}, failure: job.System, not: "cleanup_file_variables"},
		"prepare, the job's": {ends: map[string][]cijob.Ended{"prepare": {exit("")}}, failure: job.Configuration, code: &one, not: "prepare_script", calls: "1"},
		"config, the job's":  {ends: map[string][]cijob.Ended{"config": {exit("")}}, failure: job.Configuration, code: &one, not: "prepare", calls: "0"},
		"prepare":            {ends: map[string][]cijob.Ended{"prepare": {systemFails}}, failure: job.System, not: "prepare_script", calls: "3"},
		"prepare, at last":   {ends: map[string][]cijob.Ended{"prepare": {systemFails, systemFails, {}}}, calls: "3", last: "Job succeeded"},
		"image":              {ends: map[string][]cijob.Ended{"prepare": {pull}}, failure: job.ImagePull, not: "prepare_script", calls: "1"},
		"download":           {moves: map[string]error{"download 901 true": errors.New("x"), "download 901 false": errors.New("x")}, vars: map[string]string{"ARTIFACT_DOWNLOAD_ATTEMPTS": "2"}, failure: job.ExternalDependency, code: &one, not: "step_script", last: "exit status 1"},
		"download, at last":  {once: map[string]error{"download 901 true": errors.New("x")}, vars: map[string]string{"ARTIFACT_DOWNLOAD_ATTEMPTS": "2"}, last: "Job succeeded"},
		"upload":             {moves: map[string]error{"upload on_success": errors.New("x")}, failure: job.ExternalDependency, code: &one, last: "exit status 1", uploaded: "upload on_success"},
		"script and upload":  {ends: map[string][]cijob.Ended{"step_script": {exit("3")}}, moves: map[string]error{"upload on_failure": errors.New("x")}, failure: job.Script, code: &three},
		"caches":             {moves: map[string]error{"restore always": errors.New("x"), "save always": errors.New("x")}, last: "Job succeeded"},
		"after_script":       {ends: map[string][]cijob.Ended{"after_script": {exit("7")}}, last: "Job succeeded"},
		"after_script, told": {ends: map[string][]cijob.Ended{"after_script": {exit("7")}}, vars: map[string]string{"AFTER_SCRIPT_IGNORE_ERRORS": "false"}, failure: job.Script, code: &seven, last: "exit status 7"},
		"cleaning files":     {ends: map[string][]cijob.Ended{"cleanup_file_variables": {exit("1")}}, last: "Job succeeded"},
		"cleanup":            {ends: map[string][]cijob.Ended{"cleanup": {systemFails}}, last: "Job succeeded"},
		"strategy":           {vars: map[string]string{"GIT_STRATEGY": "steal"}, last: "Job succeeded"},
		"clone path":         {vars: map[string]string{"GIT_CLONE_PATH": "/elsewhere"}, failure: job.Configuration, not: "prepare_script", last: "setting GIT_CLONE_PATH is not allowed, enable `custom_build_dir` feature"},
		"submodules":         {vars: map[string]string{"GIT_SUBMODULE_STRATEGY": "steal"}, failure: job.System, not: "get_sources", last: "unknown GIT_SUBMODULE_STRATEGY"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFlow()
			f.j.Artifacts, f.j.Caches = all()
			f.j.Dependencies = []job.Dependency{{ID: 901, Name: "build", Filename: "artifacts.zip"}}
			for k, v := range c.vars {
				f.set(k, v)
			}
			for k, v := range c.ends {
				f.exec.ends[k] = v
			}
			f.moves.once = c.once
			for k, v := range c.moves {
				f.moves.fail[k] = v
			}
			res, out := f.run(t)
			if res.Failure != string(c.failure) {
				t.Errorf("failure %q, want %q", res.Failure, c.failure)
			}
			if d := cmp.Diff(c.code, res.ExitCode); d != "" && c.failure != job.Script || c.code != nil && d != "" {
				t.Errorf("exit code: %s", d)
			}
			if !strings.Contains(out, c.last) {
				t.Errorf("the trace lacks %q:\n%s", c.last, out)
			}
			if c.not != "" && slices.Contains(f.exec.calls, c.not) {
				t.Errorf("%s was called: %v", c.not, f.exec.calls)
			}
			if f.exec.calls[len(f.exec.calls)-1] != "cleanup" {
				t.Errorf("the last call is not cleanup: %v", f.exec.calls)
			}
			if n := fmt.Sprint(count(f.exec.calls, "prepare")); c.calls != "" && n != c.calls {
				t.Errorf("prepare was called %s times, want %s", n, c.calls)
			}
			if c.uploaded != "" {
				got := slices.DeleteFunc(slices.Clone(f.moves.did), func(s string) bool { return !strings.HasPrefix(s, "upload") })
				if strings.Join(got, ",") != c.uploaded {
					t.Errorf("uploaded %v, want %s", got, c.uploaded)
				}
			}
		})
	}
}

func count(list []string, what string) (n int) {
	for _, s := range list {
		if s == what {
			n++
		}
	}
	return n
}

// TestCancelWhere: what still runs, by the stage that a cancel comes in.
func TestCancelWhere(t *testing.T) {
	for name, c := range map[string]struct {
		mode wire.CancelMode
		in   string
		want string // the calls after it
	}{
		"graceful in get_sources": {wire.CancelGraceful, "get_sources", "cleanup"},
		"graceful in the script":  {wire.CancelGraceful, "step_script", "after_script archive_cache_on_failure upload_artifacts_on_failure cleanup_file_variables cleanup"},
		"graceful in prepare":     {wire.CancelGraceful, "prepare", "cleanup"},
		"immediate in the script": {wire.CancelImmediate, "step_script", "cleanup"},
		"immediate in after":      {wire.CancelImmediate, "after_script", "cleanup"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFlow()
			f.j.Artifacts, f.j.Caches = all()
			f.exec.on = func(ctx context.Context, stage string, _ cijob.Call) {
				if stage != c.in {
					return
				}
				if err := f.dir.Cancel(c.mode); err != nil {
					t.Error(err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Minute):
					t.Error("the call was not ended")
				}
			}
			res, _ := f.run(t)
			if res.Failure != string(job.Canceled) {
				t.Errorf("failure %q", res.Failure)
			}
			i := slices.Index(f.exec.calls, c.in)
			if got := strings.Join(f.exec.calls[i+1:], " "); got != c.want {
				t.Errorf("after it came %s, want %s", got, c.want)
			}
			kept := slices.DeleteFunc(slices.Clone(f.moves.did), func(s string) bool { return !strings.HasPrefix(s, "save") && !strings.HasPrefix(s, "upload") })
			want := ""
			if c.mode == wire.CancelGraceful && c.in == "step_script" { // as of a job that failed
				want = "save on_failure save always upload on_failure upload always"
			}
			if got := strings.Join(kept, " "); got != want {
				t.Errorf("kept %q, want %q", got, want)
			}
			if s, ok := f.exec.status["after_script"]; c.in == "step_script" && ok && s != "canceled" {
				t.Errorf("CI_JOB_STATUS of after_script is %q", s)
			}
		})
	}
}

// TestMessageIsMasked: what the hub keeps of a failure has no secret in it.
func TestMessageIsMasked(t *testing.T) {
	f := newFlow()
	f.j.Variables = append(f.j.Variables, job.Variable{Key: "POLICY", Value: "s3cr3t-value", Masked: true})
	f.j.Caches = []job.Cache{{Key: "k", Policy: "$POLICY", When: job.OnSuccess, Paths: []string{"p"}}}
	res, out := f.run(t)
	if !strings.Contains(res.Message, "unknown cache policy [MASKED] for k") || strings.Contains(out, "s3cr3t") {
		t.Errorf("%s\n%s", res.Message, out)
	}
}

// TestUnreadable: a spec that this version cannot read ends the job.
func TestUnreadable(t *testing.T) {
	s, err := jobdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d, err := s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: []byte(`{"kind":"gitlab_ci","new":1}`)}})
	if err != nil {
		t.Fatal(err)
	}
	if err := cijob.Run(t.Context(), cijob.Options{Dir: d, Log: logx.ForTest(t)}); err != nil {
		t.Fatal(err)
	}
	if r, ok, err := d.Result(); !ok || err != nil || r.Failure != string(job.Configuration) || !strings.Contains(r.Message, `unknown field "new"`) {
		t.Errorf("%+v, %v, %v", r, ok, err)
	}
}

// TestEnvironment: what the executor's commands are given beside the script.
func TestEnvironment(t *testing.T) {
	f := newFlow()
	f.j.Image = &job.Image{Name: "alpine:$CI_JOB_ID", User: "1000", Platform: "linux/arm64", Entrypoint: []string{""}}
	f.j.Services = []job.Image{{Name: "redis:7", Aliases: []string{"cache", "c2"}, Entrypoint: []string{""}, Command: []string{"redis-server"},
		Variables: []job.Variable{{Key: "RV", Value: "v-$CI_JOB_ID"}}}}
	f.j.RegistryCredentials = []job.RegistryCredential{{URL: "r", Username: "u", Password: "registrypass"}}
	f.j.Steps[0].Script = []string{"echo a\n# vk: mem=2G cpus=4", "# vk: mem=8G"}
	f.set("CI_JOB_ID", "1")
	f.j.Variables = append(f.j.Variables, job.Variable{Key: "CERT", Value: "line $CI_JOB_ID", File: true})
	env, response := map[string]string{}, ""
	f.exec.on = func(_ context.Context, name string, c cijob.Call) {
		if name != "prepare" {
			return
		}
		for _, kv := range c.Env {
			k, v, _ := strings.Cut(kv, "=")
			env[k] = v
		}
		response = string(c.Response)
	}
	f.run(t)
	for k, want := range map[string]string{
		"CUSTOM_ENV_CI_JOB_IMAGE": "alpine:1", "CUSTOM_ENV_MICROVM_USER": "1000", "CUSTOM_ENV_MICROVM_MEM": "2G", "CUSTOM_ENV_MICROVM_CPUS": "4",
		"CUSTOM_ENV_CERT": "line 1", "CUSTOM_ENV_CI_PROJECT_DIR": "/builds/group/project", "CUSTOM_ENV_FF_TIMESTAMPS": "true",
		"CUSTOM_ENV_CI_JOB_SERVICES": `[{"name":"redis:7","alias":"cache,c2","entrypoint":[""],"command":["redis-server"],"variables":{"RV":"v-1"}}]`,
		"CUSTOM_ENV_CI_JOB_TOKEN":    "glcbt-64_tokenoftheJob", execdrv.EnvJobServer: "https://gitlab.example.com",
	} {
		if env[k] != want {
			t.Errorf("%s is %q, want %q", k, env[k], want)
		}
	}
	r, err := execdrv.DecodeResponse([]byte(response))
	if err != nil {
		t.Fatal(err)
	}
	if r.Image.Name != "alpine:1" || r.Image.DockerUser() != "1000" || r.Image.ExecutorOpts.Docker.Platform != "linux/arm64" ||
		len(r.Credentials) != 1 || r.Credentials[0].Password != "registrypass" || r.Services[0].Alias != "cache,c2" {
		t.Errorf("the response: %+v", r)
	}
	if strings.Contains(response, f.j.Token) {
		t.Error("the token is in the response")
	}
}

// A credential is hidden in the forms in which a request carries it: a registry
// that repeats what it was sent is shown in the trace.
func TestCredentialsAsSent(t *testing.T) {
	f := newFlow()
	f.j.RegistryCredentials = []job.RegistryCredential{{URL: "registry.example.com", Username: "user", Password: "pass+word/of=the"}}
	f.exec.on = func(_ context.Context, name string, c cijob.Call) {
		if name == "prepare" {
			fmt.Fprintln(c.Err, "denied: Basic dXNlcjpwYXNzK3dvcmQvb2Y9dGhl, password=pass%2Bword%2Fof%3Dthe&x=1, "+base64.StdEncoding.EncodeToString([]byte("gitlab-ci-token:"+f.j.Token)))
		}
	}
	_, out := f.run(t)
	if !strings.Contains(out, "denied: Basic [MASKED], password=[MASKED]&x=1, [MASKED]\n") {
		t.Errorf("the trace:\n%s", out)
	}
}

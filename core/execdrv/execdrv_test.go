package execdrv_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
)

func TestReadCall(t *testing.T) {
	c := execdrv.ReadCall([]string{"BUILD_FAILURE_EXIT_CODE=41", "SYSTEM_FAILURE_EXIT_CODE=42", "BUILD_EXIT_CODE_FILE=/t/code",
		"JOB_RESPONSE_FILE=/t/r", "TMPDIR=/t", "CUSTOM_ENV_CI_JOB_ID=7", "CUSTOM_ENV_MULTI=a\nb=c", "CUSTOM_ENV_=x", "NOVALUE", "=odd"})
	if c.BuildFailure != 41 || c.SystemFailure != 42 || c.ExitCodeFile != "/t/code" || c.ResponseFile != "/t/r" || c.TmpDir != "/t" {
		t.Errorf("ReadCall = %+v", c)
	}
	if c.Var("CI_JOB_ID") != "7" || c.Var("MULTI") != "a\nb=c" {
		t.Errorf("Var: %q %q", c.Var("CI_JOB_ID"), c.Var("MULTI"))
	}
	if len(c.Warnings) != 0 {
		t.Errorf("warnings: %q", c.Warnings)
	}
}

func TestReadCallDefaults(t *testing.T) {
	for _, env := range [][]string{nil, {"BUILD_FAILURE_EXIT_CODE=x", "SYSTEM_FAILURE_EXIT_CODE=0"}, {"BUILD_FAILURE_EXIT_CODE=256", "SYSTEM_FAILURE_EXIT_CODE="}} {
		c := execdrv.ReadCall(env)
		if c.BuildFailure != 1 || c.SystemFailure != 2 || len(c.Warnings) != 2 {
			t.Errorf("ReadCall(%q) = %d %d %q", env, c.BuildFailure, c.SystemFailure, c.Warnings)
		}
	}
}

// S01: whatever the script ends with, the process ends with the number for
// build failures, and the file holds the truth.
func TestFinish(t *testing.T) {
	for _, tt := range []struct {
		e    execdrv.Ended
		exit int
		file string
		word string
	}{
		{execdrv.Ended{}, 0, "", ""},
		{execdrv.Ended{Code: 50}, 1, "50\n", ""},
		{execdrv.Ended{Code: 1}, 1, "1\n", ""},
		{execdrv.Ended{Code: 2}, 1, "2\n", ""},
		{execdrv.Ended{Code: 105}, 1, "105\n", ""},
		{execdrv.Ended{Code: 137}, 1, "137\n", ""},
		{execdrv.Ended{Code: 141}, 1, "141\n", "SIGPIPE"},
		{execdrv.Ended{Code: 137}, 1, "137\n", "signal 9 (SIGKILL) ended"},
		{execdrv.Ended{Code: 255}, 1, "255\n", ""},
		{execdrv.Ended{Code: 137, Signal: 9}, 1, "137\n", "signal 9 (KILL)"},
		{execdrv.Ended{Code: 137, Signal: 9, OOM: true}, 1, "137\n", "MICROVM_MEM"},
		{execdrv.Ended{Signal: 9}, 1, "137\n", "signal 9 (KILL)"}, // a signal is an end in itself
		{execdrv.Ended{Code: 162, Signal: 34}, 1, "162\n", "signal 34 (number 34)"},
	} {
		for _, withFile := range []bool{true, false} {
			path := filepath.Join(t.TempDir(), "code")
			env := []string{"BUILD_FAILURE_EXIT_CODE=1", "SYSTEM_FAILURE_EXIT_CODE=2"}
			if withFile {
				env = append(env, "BUILD_EXIT_CODE_FILE="+path)
			}
			c := execdrv.ReadCall(env)
			exit, words := c.Finish(tt.e)
			if exit != tt.exit {
				t.Errorf("Finish(%+v) = %d, want %d", tt.e, exit, tt.exit)
			}
			if !strings.Contains(strings.Join(words, "\n"), tt.word) {
				t.Errorf("Finish(%+v) says %q, want %q", tt.e, words, tt.word)
			}
			if !withFile && strings.Contains(strings.Join(words, "\n"), "writing") {
				t.Errorf("Finish(%+v) without a file says %q", tt.e, words)
			}
			b, _ := os.ReadFile(path)
			want := tt.file
			if !withFile {
				want = ""
			}
			if string(b) != want {
				t.Errorf("Finish(%+v) wrote %q, want %q", tt.e, b, want)
			}
		}
	}
}

func TestFinishCannotWrite(t *testing.T) {
	c := execdrv.ReadCall([]string{"BUILD_EXIT_CODE_FILE=/nonexistent/x/code"})
	exit, words := c.Finish(execdrv.Ended{Code: 3})
	if exit != 1 || len(words) != 1 || !strings.Contains(words[0], "exit code 3") {
		t.Errorf("Finish = %d %q", exit, words)
	}
}

func TestRunArgs(t *testing.T) {
	extra, script, stage, err := execdrv.RunArgs([]string{"run-arg1", "/t/script1/script", "step_release"})
	if err != nil || script != "/t/script1/script" || stage != "step_release" || !cmp.Equal(extra, []string{"run-arg1"}) {
		t.Errorf("RunArgs = %q %q %q %v", extra, script, stage, err)
	}
	if _, _, _, err := execdrv.RunArgs([]string{"x"}); err == nil {
		t.Error("RunArgs of one word: no error")
	}
}

func TestUserStages(t *testing.T) {
	for stage, want := range map[string]bool{"build_script": true, "step_release": true, "step_script": true, "after_script": true,
		"get_sources": false, "prepare_script": false, "archive_cache": false, "new_stage": false} {
		if got := execdrv.UserStage(stage); got != want {
			t.Errorf("UserStage(%q) = %v", stage, got)
		}
	}
	if execdrv.KnownStage("new_stage") || !execdrv.KnownStage("clear_worktree") || !execdrv.KnownStage("step_x") {
		t.Error("KnownStage is wrong")
	}
}

func TestDecodeResponse(t *testing.T) {
	r, err := execdrv.DecodeResponse([]byte(`{"id":9,"token":"secret","new_field":{"a":[1]},"job_info":{"name":"j","project_full_path":"g/p"},
	  "image":{"name":"alpine:3","entrypoint":[""],"executor_opts":{"docker":{"platform":"linux/arm64","user":1000}}},
	  "services":[{"name":"redis:7","alias":"cache"}],"credentials":[{"type":"registry","url":"r.example","username":"u","password":"p"}],"runner_info":{"timeout":3600}}`))
	if err != nil {
		t.Fatal(err)
	}
	if r.ID != 9 || r.JobInfo.ProjectPath != "g/p" || r.Image.Name != "alpine:3" || r.Image.DockerUser() != "1000" ||
		r.Image.ExecutorOpts.Docker.Platform != "linux/arm64" || len(r.Services) != 1 || r.Credentials[0].Password != "p" || r.RunnerInfo.Timeout != 3600 {
		t.Errorf("DecodeResponse = %+v", r)
	}
	if r, err := execdrv.DecodeResponse([]byte(`{"image":null,"services":null}`)); err != nil || r.Image.Entrypoint != nil {
		t.Errorf("nulls: %+v %v", r, err)
	}
}

func TestDecodeResponseMalformed(t *testing.T) {
	for in, want := range map[string]string{
		"":                                   "is empty",
		"  \n":                               "is empty",
		`{"id":1,"token":"hunter2`:           "is not JSON from byte",
		`{"id":"hunter2"}`:                   "field id is a JSON string",
		`{"image":{"entrypoint":"hunter2"}}`: "field image.entrypoint is a JSON string",
		`["hunter2"]`:                        "field (top) is a JSON array",
		`{"id":31337.5}`:                     "field id is a JSON number, expected int64",
	} {
		_, err := execdrv.DecodeResponse([]byte(in))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("DecodeResponse(%q) = %v, want %q", in, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("DecodeResponse(%q) shows a value: %v", in, err)
		}
	}
}

func TestReadRecordedResponses(t *testing.T) {
	files, _ := filepath.Glob("../../../shared/vectors/custom-*/custom/JOB_RESPONSE_FILE.json")
	if len(files) == 0 {
		files, _ = filepath.Glob("../../testdata/vectors/custom-*/custom/JOB_RESPONSE_FILE.json")
	}
	if len(files) == 0 {
		t.Skip("needs recorded responses: testdata/vectors is empty")
	}
	for _, f := range files {
		r, err := execdrv.ReadResponse(f)
		if err != nil || r.ID == 0 || r.JobInfo.Name == "" {
			t.Errorf("ReadResponse(%s) = %+v, %v", f, r.JobInfo, err)
		}
	}
}

func TestEffectiveEntrypoint(t *testing.T) {
	img := []string{"/entry", "-x"}
	for _, tt := range []struct{ job, want []string }{{nil, img}, {[]string{}, img}, {[]string{""}, nil}, {[]string{"/mine"}, []string{"/mine"}}} {
		if got := execdrv.EffectiveEntrypoint(tt.job, img); !cmp.Equal(got, tt.want) {
			t.Errorf("EffectiveEntrypoint(%q) = %q, want %q", tt.job, got, tt.want)
		}
	}
}

var limits = execdrv.Limits{CPUs: 2, MaxCPUs: 4, MemMiB: 2048, MaxMemMiB: 8192, Image: "local/default"}

func wanted(t *testing.T, env ...string) (execdrv.Wanted, error) {
	t.Helper()
	for i := range env {
		env[i] = "CUSTOM_ENV_" + env[i]
	}
	c := execdrv.ReadCall(env)
	return execdrv.ReadWanted(&c, execdrv.Response{}, limits)
}

func TestWanted(t *testing.T) {
	w, err := wanted(t)
	if err != nil || w.Image != "local/default" || w.CPUs != 2 || w.MemMiB != 2048 || w.User != "" {
		t.Errorf("nothing set: %+v %v", w, err)
	}
	w, err = wanted(t, "MICROVM_IMAGE=", "MICROVM_CPUS=", "MICROVM_MEM= ", "MICROVM_USER=", "CI_JOB_IMAGE=alpine:3")
	if err != nil || w.Image != "alpine:3" || w.CPUs != 2 || len(w.Warnings) != 0 {
		t.Errorf("empty is unset: %+v %v", w, err)
	}
	w, err = wanted(t, "MICROVM_IMAGE=local/x", "CI_JOB_IMAGE=alpine:3", "MICROVM_CPUS=3", "MICROVM_MEM=512M", "MICROVM_USER=build:users")
	if err != nil || w.Image != "local/x" || w.CPUs != 3 || w.MemMiB != 512 || w.User != "build:users" || len(w.Notes) != 0 {
		t.Errorf("all set: %+v %v", w, err)
	}
	for text, mib := range map[string]int{"3g": 3072, "1GiB": 1024, "700mb": 700, "1024M": 1024} {
		if w, err := wanted(t, "MICROVM_MEM="+text); err != nil || w.MemMiB != mib {
			t.Errorf("MICROVM_MEM=%s: %d MiB, %v, want %d", text, w.MemMiB, err, mib)
		}
	}
	r, err := execdrv.DecodeResponse([]byte(`{"image":{"name":"alpine:3.20","executor_opts":{"docker":{"user":"app"}}}}`))
	if err != nil {
		t.Fatal(err)
	}
	for own, want := range map[string][2]string{"": {"app", "image:docker:user"}, "build": {"build", "MICROVM_USER"}} {
		c := execdrv.ReadCall([]string{"CUSTOM_ENV_MICROVM_USER=" + own})
		if w, err := execdrv.ReadWanted(&c, r, limits); err != nil || w.User != want[0] || w.UserFrom != want[1] || w.Image != "alpine:3.20" || w.ImageFrom != "image:" {
			t.Errorf("MICROVM_USER %q with image:docker:user: %+v %v", own, w, err)
		}
	}
	w, err = wanted(t, "MICROVM_CPUS=64", "MICROVM_MEM=100G")
	if err != nil || w.CPUs != 4 || w.MemMiB != 8192 || len(w.Notes) != 2 || !strings.Contains(w.Notes[1], "MICROVM_MEM 100G") || !strings.Contains(w.Notes[1], "8G") {
		t.Errorf("clamped: %+v %v", w, err)
	}
}

func TestWantedRefuses(t *testing.T) {
	for _, kv := range []string{"MICROVM_CPUS=0", "MICROVM_CPUS=-1", "MICROVM_CPUS=two", "MICROVM_CPUS=1.5", "MICROVM_CPUS=99999999999999999999",
		"MICROVM_MEM=2", "MICROVM_MEM=2000T", "MICROVM_MEM=0G", "MICROVM_MEM=64M", "MICROVM_MEM=-1G", "MICROVM_MEM=1.5G", "MICROVM_USER=a b", "MICROVM_USER=-x", "MICROVM_USER=a:b:c"} {
		_, err := wanted(t, kv)
		name, value, _ := strings.Cut(kv, "=")
		if err == nil || fault.KindOf(err) != fault.JobFailed || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), value) ||
			!strings.Contains(err.Error(), "expected") || fault.HintOf(err) == "" {
			t.Errorf("%s: %v", kv, err)
		}
	}
	_, err := wanted(t, "MICROVM_CPUS=x", "MICROVM_MEM=y")
	if err == nil || !strings.Contains(err.Error(), "MICROVM_CPUS") || !strings.Contains(err.Error(), "MICROVM_MEM") {
		t.Errorf("both are to be named: %v", err)
	}
}

func TestUnknownVariables(t *testing.T) {
	w, err := wanted(t, "MICROVM_CPU=2", "MICROVM_BUILD_EGRESS_ALLOW_NAME=example.com", "MICROVM_ZZZZZZZZZZ=1", "MICROVM_EGRES_AUDIT=", "OTHER=1")
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Join(w.Warnings, "\n")
	for _, want := range []string{"MICROVM_CPU is no variable of virtkit's (did you mean MICROVM_CPUS?)", "MICROVM_BUILD_EGRESS_ALLOW_NAME is not obeyed yet", "MICROVM_ZZZZZZZZZZ is no variable of virtkit's"} {
		if !strings.Contains(got, want) {
			t.Errorf("warnings %q lack %q", got, want)
		}
	}
	if len(w.Warnings) != 3 || strings.Count(got, "did you mean") != 1 {
		t.Errorf("warnings: %q", w.Warnings)
	}
}

func TestJobEnv(t *testing.T) {
	host := []string{"PATH=/bin", "HOME=/root", "TOKEN=hostsecret", "TMPDIR=/t1"}
	c := execdrv.ReadCall(host)
	first := execdrv.FirstCall(&c, 4242, 99)
	later := execdrv.ReadCall(append(host, "VIRTKIT_GITLAB_CALL="+first, "FROM_JOB_ENV=v", "CUSTOM_ENV_X=1", "JOB_RESPONSE_FILE=/r", "SHLVL=2"))
	if got := execdrv.JobEnv(&later); !cmp.Equal(got, []string{"FROM_JOB_ENV=v"}) {
		t.Errorf("JobEnv = %q", got)
	}
	if pid, start, ok := execdrv.ReadFirstCall(&later); !ok || pid != 4242 || start != 99 {
		t.Errorf("ReadFirstCall = %d %d %v", pid, start, ok)
	}
	if got := execdrv.JobEnv(&c); got != nil {
		t.Errorf("without config's word nothing passes: %q", got)
	}
	for _, bad := range []string{"", "x", "1:2:", "0:5:", "a:b:c", "5:0:x"} {
		b := execdrv.ReadCall([]string{"VIRTKIT_GITLAB_CALL=" + bad})
		if _, _, ok := execdrv.ReadFirstCall(&b); ok {
			t.Errorf("ReadFirstCall(%q) is ok", bad)
		}
	}
}

func FuzzDecodeResponse(f *testing.F) {
	f.Add([]byte(`{"id":1,"image":{"executor_opts":{"docker":{"user":[1]}}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := execdrv.DecodeResponse(b)
		if err == nil {
			_ = r.Image.DockerUser()
		}
	})
}

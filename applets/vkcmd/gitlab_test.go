package vkcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/applets/internal/appenv"
	"virtkit/core/execdrv"
	"virtkit/core/runner"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

// gitlabEnv is the environment of a call with nothing but virtkit's own needs.
func gitlabEnv(t *testing.T, more ...string) (appenv.Env, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	dir := t.TempDir()
	resp := filepath.Join(dir, "response.json")
	if err := os.WriteFile(resp, []byte(`{"id":7,"token":"glcbt-hidden"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	vars := append([]string{"HOME=" + dir, "VIRTKIT_STATE_DIR=" + filepath.Join(dir, "state"), "TMPDIR=" + dir, "JOB_RESPONSE_FILE=" + resp,
		"BUILD_FAILURE_EXIT_CODE=41", "SYSTEM_FAILURE_EXIT_CODE=42", "CUSTOM_ENV_CI_JOB_ID=7"}, more...)
	lookup := func(k string) (string, bool) {
		for i := len(vars) - 1; i >= 0; i-- {
			if v, ok := strings.CutPrefix(vars[i], k+"="); ok {
				return v, true
			}
		}
		return "", false
	}
	var out, errb bytes.Buffer
	return appenv.Env{
		Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errb,
		Getenv: func(k string) string { v, _ := lookup(k); return v }, LookupEnv: lookup,
		Environ: func() []string { return vars }, Exe: "/proc/self/exe", Dir: os.Getwd,
	}, &out, &errb
}

func gitlab(env appenv.Env, args ...string) int {
	env.Args = append([]string{"vk", "gitlab"}, args...)
	return Main(context.Background(), env)
}

func TestGitlabConfig(t *testing.T) {
	env, out, errb := gitlabEnv(t)
	if code := gitlab(env, "config"); code != 0 {
		t.Fatalf("config: %d\n%s", code, errb)
	}
	var a execdrv.ConfigAnswer
	if err := json.Unmarshal(out.Bytes(), &a); err != nil || a.BuildsDir != "/builds" || a.CacheDir != "/cache" || a.Driver.Name != "virtkit" || a.Shell != "bash" {
		t.Errorf("config answered %s (%v)", out, err)
	}
	if strings.Contains(out.String(), "hidden") {
		t.Error("the answer holds the token")
	}
}

func TestGitlabConfigRefuses(t *testing.T) {
	for _, tt := range []struct {
		env, want string
		code      int
	}{
		{"CUSTOM_ENV_MICROVM_CPUS=lots", `MICROVM_CPUS is "lots"`, 41},
		{"CUSTOM_ENV_MICROVM_IMAGE=dockerfile:ci/Dockerfile", "not built yet", 41},
		{"CUSTOM_ENV_MICROVM_IMAGE=compose:x.yml#a", "not built yet", 41},
		{"CUSTOM_ENV_MICROVM_IMAGE=local/UPPER CASE", "MICROVM_IMAGE", 41},
		{"CUSTOM_ENV_CI_JOB_IMAGE=http://registry.example/x", "image:", 41},
		{"CUSTOM_ENV_CI_JOB_ID=none", "CI_JOB_ID", 42},
		{"JOB_RESPONSE_FILE=/nonexistent/response.json", "JOB_RESPONSE_FILE", 42},
		{"VIRTKIT_CONFIG=/nonexistent/config.toml", "/nonexistent/config.toml", 42},
	} {
		env, out, errb := gitlabEnv(t, tt.env)
		if code := gitlab(env, "config"); code != tt.code || !strings.Contains(errb.String(), tt.want) || out.Len() != 0 {
			t.Errorf("%s: %d, stdout %q\n%s", tt.env, code, out, errb)
		}
		for line := range strings.Lines(errb.String()) {
			if !strings.HasPrefix(line, "virtkit: ") {
				t.Errorf("%s: line %q of the trace", tt.env, line)
			}
		}
	}
}

func TestGitlabRunWithoutPrepare(t *testing.T) {
	env, _, errb := gitlabEnv(t)
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("echo\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if code := gitlab(env, "run", "an-arg-of-the-admin", script, "build_script"); code != 42 || !strings.Contains(errb.String(), "never prepared") {
		t.Errorf("%d\n%s", code, errb)
	}
}

func TestGitlabCleanupOfNothing(t *testing.T) {
	env, out, errb := gitlabEnv(t)
	if code := gitlab(env, "cleanup"); code != 0 || out.Len()+errb.Len() != 0 {
		t.Errorf("%d %q %q", code, out, errb)
	}
}

func TestGitlabUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"nonsense"}, {"config", "surplus"}, {"run", "one-argument"}, {"prepare", "--nonsense"}} {
		env, out, errb := gitlabEnv(t)
		if code := gitlab(env, args...); code != 2 || out.Len() != 0 || !strings.Contains(errb.String(), "usage: ") {
			t.Errorf("vk gitlab %q: %d %q %q", args, code, out, errb)
		}
	}
}

func TestGitlabCheckPrints(t *testing.T) {
	env, out, errb := gitlabEnv(t)
	env.Args = []string{"vk", "--state-dir", "/srv/vk state", "gitlab", "check", "--print"}
	if code := Main(context.Background(), env); code != 0 {
		t.Fatalf("%d %s", code, errb)
	}
	if want := `config_args = ["--state-dir", "/srv/vk state", "gitlab", "config"]`; !strings.Contains(out.String(), want) {
		t.Errorf("the block lacks %s:\n%s", want, out)
	}
}

func TestForgotten(t *testing.T) {
	self := parentProcess()
	now := time.Now()
	for _, tt := range []struct {
		name string
		rec  runner.Record
		want bool
	}{
		{"its runner lives", runner.Record{Runner: self, Deadline: now.Add(time.Hour)}, false},
		{"its runner lives, late", runner.Record{Runner: self, Deadline: now.Add(-time.Hour)}, true},
		{"another process has the number", runner.Record{Runner: supervise.Owner{PID: self.PID, Start: self.Start + 1}}, true},
		{"unknown runner, in time", runner.Record{Deadline: now.Add(time.Hour)}, false},
		{"unknown runner, late", runner.Record{Deadline: now.Add(-time.Hour)}, true},
	} {
		dir := t.TempDir()
		if err := runner.WriteRecord(dir, tt.rec); err != nil {
			t.Fatal(err)
		}
		if got := forgotten(ledger.Job{Dir: dir, Created: now}, now); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	if forgotten(ledger.Job{Dir: t.TempDir(), Created: now}, now) || !forgotten(ledger.Job{Dir: t.TempDir(), Created: now.Add(-48 * time.Hour)}, now) {
		t.Error("a directory without a record")
	}
}

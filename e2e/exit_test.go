package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/host"
)

var jobNumber atomic.Int64

// plainJob opens a session of a job that was never recorded.
func plainJob(t *testing.T, d runnerside.Driver, vars map[string]string, response map[string]any) *runnerside.Session {
	t.Helper()
	id := 500000 + jobNumber.Add(1)
	v := map[string]string{
		"CI_JOB_ID": fmt.Sprint(id), "CI_JOB_NAME": strings.ReplaceAll(t.Name(), "/", " "), "CI_PROJECT_PATH": "group/e2e",
		"CI_BUILDS_DIR": "/builds", "CI_PROJECT_DIR": "/builds/group/e2e", "CI_JOB_TIMEOUT": "600", "CI_CONCURRENT_ID": "0",
	}
	maps.Copy(v, vars)
	r := map[string]any{"id": id, "token": "glcbt-e2e", "job_info": map[string]any{"name": v["CI_JOB_NAME"]}}
	maps.Copy(r, response)
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	d.TmpRoot = t.TempDir()
	s, err := d.Open(v, b)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// cleanedUp makes the runner's last call at the test's end.
func cleanedUp(t *testing.T, s *runnerside.Session) {
	t.Helper()
	t.Cleanup(func() {
		res, err := s.Cleanup(context.Background())
		if err != nil || res.Exit != 0 {
			t.Errorf("cleanup: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
		}
	})
}

// prepared makes a job's guest and cleans it up at the test's end.
func prepared(t *testing.T, s *runnerside.Session) runnerside.Result {
	t.Helper()
	cleanedUp(t, s)
	res, _, err := s.Config(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("config: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	res, err = s.Prepare(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	return res
}

func stage(t *testing.T, s *runnerside.Session, name, script string) runnerside.Result {
	t.Helper()
	res, err := s.Stage(t.Context(), name, []byte(script))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return res
}

// nothingLeft fails when anything of this host's jobs outlives them.
func nothingLeft(t *testing.T, h *host.Host) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if left := h.Left(ctx); left != nil {
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

// S01: every exit code comes through; the process itself ends with the
// runner's numbers.
func TestExitCodes(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	d := h.Driver()
	d.BuildFailure, d.SystemFailure = 41, 42
	s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": img}, nil)
	prepared(t, s)
	for _, tt := range []struct {
		script string
		exit   int
		file   string
		stderr string
	}{
		{"exit 0", 0, "", ""},
		{"exit 50", 41, "50", ""},
		{"exit 1", 41, "1", ""},
		{"exit 2", 41, "2", ""},
		{"exit 41", 41, "41", ""},
		{"exit 42", 41, "42", ""},
		{"exit 105", 41, "105", ""},
		{"exit 137", 41, "137", ""},
		{"exit 255", 41, "255", ""},
		{"kill -9 $$", 41, "137", "killed by signal 9"},
		{"kill -15 $$", 41, "143", "killed by signal 15"},
		{"set -e; false; echo not reached", 41, "1", ""},
		{"no-such-command-anywhere", 41, "127", ""},
	} {
		res := stage(t, s, "build_script", tt.script+"\n")
		if res.Exit != tt.exit || tt.file != "" && res.FileCode != tt.file || !strings.Contains(string(res.Stderr), tt.stderr) {
			t.Errorf("%q: exit %d, file %q, stderr %q", tt.script, res.Exit, res.FileCode, res.Stderr)
		}
	}
	// Output apart, in order, all of it.
	res := stage(t, s, "build_script", "i=0; while [ $i -lt 3000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done; exit 7\n")
	if got := strings.Count(string(res.Stdout), "\n"); got != 3000 || strings.Count(string(res.Stderr), "err ") != 3000 || res.FileCode != "7" {
		t.Errorf("%d lines of stdout, %d of stderr, code %s", got, strings.Count(string(res.Stderr), "err "), res.FileCode)
	}
	// What a script leaves running holds its stage up no longer than the script
	// itself, and lives on.
	if res = stage(t, s, "build_script", "sleep 4321 & echo left; exit 3\n"); res.FileCode != "3" || string(res.Stdout) != "left\n" {
		t.Errorf("a program left running: code %q, %q", res.FileCode, res.Stdout)
	}
	if res = stage(t, s, "after_script", "ps -o args | grep -c '^[s]leep 4321'\n"); strings.TrimSpace(string(res.Stdout)) != "1" {
		t.Errorf("programs left running by the stage before: %q", res.Stdout)
	}
}

func TestExitCodesWithoutFile(t *testing.T) {
	h := guests(t)
	d := h.Driver()
	d.NoExitCodeFile, d.NoCodes = true, true
	s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	prepared(t, s)
	for script, want := range map[string]int{"exit 0": 0, "exit 50": 1, "exit 2": 1, "kill -9 $$": 1} {
		if res := stage(t, s, "build_script", script+"\n"); res.Exit != want || res.FileCode != "" {
			t.Errorf("%q: exit %d, file %q", script, res.Exit, res.FileCode)
		}
	}
}

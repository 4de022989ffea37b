package e2e_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/testimage"
)

// S11: entrypoints of the image and of the job.
func TestEntrypoints(t *testing.T) {
	h := guests(t)
	img := image(t, h, "entrypoints", testimage.Spec{
		Files: map[string]string{
			"resplit.sh": "#!/bin/sh\necho banner of resplit\nexec $@\n",
			"slow.sh":    "#!/bin/sh\necho slow banner; sleep 20; echo ready\nexec \"$@\"\n",
		},
		Config: v1.Config{Entrypoint: []string{"/resplit.sh"}, User: "build", WorkingDir: "/srv/app", Env: []string{"PATH=/bin", "FROM_IMAGE=yes"},
			Volumes: map[string]struct{}{"/data/new": {}, "/home/build": {}}},
	})
	script := "printf '%s|' \"a  b\" \"$FROM_IMAGE\" \"$HOME\" \"$(id -un)\" \"$PWD\"\necho\ncat <<'E'\ntwo\n  lines\nE\n"
	want := "a  b|yes|/home/build|build|/srv/app|\ntwo\n  lines\n"
	for _, tt := range []struct {
		name       string
		entrypoint any
		banner     string
	}{
		{"image", nil, "banner of resplit\n"},
		{"none", []string{""}, ""},
		{"slow", []string{"/slow.sh"}, "slow banner\nready\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": img}, map[string]any{"image": map[string]any{"name": "x", "entrypoint": tt.entrypoint}})
			prepared(t, s)
			if res := stage(t, s, execdrv.StageBuild, script); res.Exit != 0 || string(res.Stdout) != tt.banner+want {
				t.Errorf("build_script: %d\n%q\n%s", res.Exit, res.Stdout, res.Stderr)
			}
			// The runner's own stages do not go through it.
			if res := stage(t, s, execdrv.StageSources, script); res.Exit != 0 || string(res.Stdout) != want {
				t.Errorf("get_sources: %d\n%q\n%s", res.Exit, res.Stdout, res.Stderr)
			}
			// A VOLUME is there; one that the image has keeps its owner.
			if res := stage(t, s, execdrv.StageSources, "cd /data/new && stat -c %u /home/build\n"); res.Exit != 0 || string(res.Stdout) != "1000\n" {
				t.Errorf("volumes: %d %q %s", res.Exit, res.Stdout, res.Stderr)
			}
		})
	}
	nothingLeft(t, h)
}

func TestUsers(t *testing.T) {
	h := guests(t)
	for user, want := range map[string]string{"": "0:0 /root", "build": "1000:1000 /home/build", "1234:5678": "1234:5678 /"} {
		t.Run("user "+user, func(t *testing.T) {
			s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h), "MICROVM_USER": user}, nil)
			prepared(t, s)
			res := stage(t, s, execdrv.StageBuild, "echo $(id -u):$(id -g) $HOME; mkdir -p \"/builds/group/e2e\" && touch /builds/group/e2e/f /cache/g\n")
			if res.Exit != 0 || strings.TrimSpace(string(res.Stdout)) != want {
				t.Errorf("%d %q %s, want %q", res.Exit, res.Stdout, res.Stderr, want)
			}
		})
	}
	t.Run("unknown", func(t *testing.T) {
		s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h), "MICROVM_USER": "nosuch"}, nil)
		job, err := s.RunJob(t.Context(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		p, _ := job.Find("prepare")
		if job.Verdict.Reason != "script_failure" || !strings.Contains(string(p.Stderr), "MICROVM_USER") || !strings.Contains(string(p.Stderr), "nosuch") {
			t.Errorf("%+v\n%s", job.Verdict, p.Stderr)
		}
	})
	nothingLeft(t, h)
}

// Clamps and warnings are told in the trace, and the guest has what was told.
func TestSizesAndWarnings(t *testing.T) {
	h := guests(t)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h), "MICROVM_CPUS": "64", "MICROVM_MEM": "700G",
		"MICROVM_BUILD_EGRESS_AUDIT": "1", "MICROVM_MEMORY": "1G"}, nil)
	t.Cleanup(func() { s.Cleanup(context.Background()) })
	if res, _, err := s.Config(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("config: %+v %v", res, err)
	}
	res, err := s.Prepare(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	for _, want := range []string{"MICROVM_CPUS 64 is over this runner's ceiling: using 2", "MICROVM_MEM 700G is over this runner's ceiling: using 1G",
		"MICROVM_BUILD_EGRESS_AUDIT is not obeyed yet", "MICROVM_MEMORY is no variable of virtkit's (did you mean MICROVM_MEM?)"} {
		if !strings.Contains(string(res.Stdout), want) {
			t.Errorf("the trace lacks %q:\n%s", want, res.Stdout)
		}
	}
	got := stage(t, s, execdrv.StageBuild, "nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo\n")
	var cpus, mib int
	if _, err := fmt.Sscan(string(got.Stdout), &cpus, &mib); err != nil || cpus != 2 || mib < 850 || mib > 1024 {
		t.Errorf("the guest has %q (%v)", got.Stdout, err)
	}
}

// The reasons of a guest's end reach the trace, in the stage that it happened
// in and in those after it.
func TestGuestEnds(t *testing.T) {
	h := guests(t)
	for _, tt := range []struct{ name, script, want string }{
		{"panic", "echo c > /proc/sysrq-trigger; sleep 60\n", "panic"},
		{"poweroff", "echo o > /proc/sysrq-trigger; sleep 60\n", "poweroff"},
		// In order: the script's own trap answers SIGTERM with a code of its own,
		// which must not pass for the script's verdict.
		{"poweroff in order", "trap 'exit 1' TERM; (sleep 1; kill -USR2 1) & while :; do sleep 1; done\n", "poweroff"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
			prepared(t, s)
			res := stage(t, s, execdrv.StageBuild, tt.script)
			if res.Exit != 2 || !strings.Contains(string(res.Stderr), tt.want) || res.FileCode != "" {
				t.Errorf("build_script: %d, code %q\n%s", res.Exit, res.FileCode, res.Stderr)
			}
			res = stage(t, s, execdrv.StageAfter, "echo after\n")
			if res.Exit != 2 || !strings.Contains(string(res.Stderr), tt.want) {
				t.Errorf("after_script: %d after %v\n%s", res.Exit, res.Took, res.Stderr)
			}
		})
	}
	t.Run("supervisor killed", func(t *testing.T) {
		s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
		prepared(t, s)
		onOutput(s, execdrv.StageBuild, "going", func() {
			for _, id := range h.JobDirs() {
				if pid := h.Supervisors(id)["supervisor"]; pid > 1 {
					syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		})
		if res := stage(t, s, execdrv.StageBuild, "echo going; sleep 600\n"); res.Exit != 2 || !strings.Contains(string(res.Stderr), "supervisor") {
			t.Errorf("build_script: %d\n%s", res.Exit, res.Stderr)
		}
	})
	nothingLeft(t, h)
}

// S36: the clock is right at the first command.
func TestClock(t *testing.T) {
	h := guests(t)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	prepared(t, s)
	before := time.Now().Unix()
	res := stage(t, s, execdrv.StagePrepare, "date +%s\n")
	after := time.Now().Unix()
	var got int64
	if _, err := fmt.Sscan(string(res.Stdout), &got); err != nil || got < before-1 || got > after+1 {
		t.Errorf("the guest says %d (%v), here it is %d to %d", got, err, before, after)
	}
}

// Secrets of a job are in no file that virtkit writes and in no argument of
// any process, however they are written.
func TestSecretsStayInMemory(t *testing.T) {
	h := guests(t)
	secret := "s3cr3t/ Pa+ss%word-0123456789"
	forms := []string{secret, base64.StdEncoding.EncodeToString([]byte(secret)), base64.URLEncoding.EncodeToString([]byte(secret)), url.QueryEscape(secret), url.PathEscape(secret), "glcbt-e2e-token-9"}
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h), "SECRET": secret, "CI_JOB_TOKEN": "glcbt-e2e-token-9",
		"DOCKER_AUTH_CONFIG": `{"auths":{"r.example":{"auth":"` + base64.StdEncoding.EncodeToString([]byte("u:"+secret)) + `"}}}`},
		map[string]any{"token": "glcbt-e2e-token-9", "credentials": []any{map[string]any{"type": "registry", "url": "r.example", "username": "u", "password": secret}},
			"variables": []any{map[string]any{"key": "SECRET", "value": secret}}})
	prepared(t, s)
	found := func(where string, b []byte) {
		for _, f := range forms {
			if strings.Contains(string(b), f) {
				t.Errorf("%s holds the secret (as %q)", where, f)
			}
		}
	}
	look := func() {
		filepath.WalkDir(filepath.Join(h.State, "jobs"), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil
			}
			if i, err := d.Info(); err == nil && i.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v", path, i.Mode())
			}
			if strings.HasSuffix(path, ".img") {
				return nil // the guest's own disk holds what the job writes there
			}
			if b, err := os.ReadFile(path); err == nil {
				found(path, b)
			}
			return nil
		})
		ents, _ := os.ReadDir("/proc")
		for _, e := range ents {
			if b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && fmt.Sprint(os.Getpid()) != e.Name() {
				found("the arguments of process "+e.Name(), b)
			}
		}
		for pid, what := range h.Processes() {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && strings.Contains(what, "supervise") {
				found("the environment of "+what, b)
			}
		}
	}
	onOutput(s, execdrv.StageBuild, "running", look)
	res := stage(t, s, execdrv.StageBuild, "export SECRET='"+secret+"'; echo running; sleep 1; echo done\n")
	if res.Exit != 0 {
		t.Errorf("build_script: %d %s", res.Exit, res.Stderr)
	}
	look()
}

// Two runners with the same job id, at once.
func TestSameJobIDTwice(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	var wg sync.WaitGroup
	for i := range 2 {
		s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": img, "CI_JOB_ID": "4711", "CI_RUNNER_SHORT_TOKEN": fmt.Sprint("runner", i)}, nil)
		wg.Go(func() {
			job, err := s.RunJob(t.Context(), []runnerside.Stage{
				{Name: execdrv.StagePrepare, Script: []byte(fmt.Sprintf("echo %d > /tmp/who\n", i))},
				{Name: execdrv.StageBuild, Script: []byte("cat /tmp/who\n")}}, nil)
			if err != nil || job.Verdict.State != "success" {
				t.Errorf("job %d: %+v %v", i, job.Verdict, err)
				return
			}
			if b, _ := job.Find(execdrv.StageBuild); string(b.Stdout) != fmt.Sprintln(i) {
				t.Errorf("job %d saw %q", i, b.Stdout)
			}
		})
	}
	wg.Wait()
	nothingLeft(t, h)
}

// Cleanup from any state, twice, at once.
func TestCleanupAnyState(t *testing.T) {
	h := guests(t)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	clean := func(what string) {
		t.Helper()
		if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 || len(res.Stderr) > 0 {
			t.Errorf("cleanup %s: %d %v %s", what, res.Exit, err, res.Stderr)
		}
	}
	clean("before anything")
	prepared(t, s)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { clean("at once") })
	}
	wg.Wait()
	clean("again")
	if res := stage(t, s, execdrv.StageBuild, "echo no\n"); res.Exit != 2 || !strings.Contains(string(res.Stderr), "cleaned up already") {
		t.Errorf("a stage after cleanup: %d %s", res.Exit, res.Stderr)
	}
	// A half-made directory.
	res, err := s.Prepare(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("prepare again: %d %v %s", res.Exit, err, res.Stderr)
	}
	dirs := h.JobDirs()
	if len(dirs) != 1 {
		t.Fatalf("directories %q", dirs)
	}
	for _, f := range []string{"spec.json", "state.json", "job.json"} {
		os.Remove(filepath.Join(h.State, "jobs", dirs[0], f))
	}
	clean("half-made")
	nothingLeft(t, h)
}

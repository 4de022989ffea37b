package e2e_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/host"
)

const admissionConfig = `
[vmm]
disk = "2G"
[executor.vm]
cpus = 1
mem = "512M"
[executor.schedule]
mem_budget = "800M"
`

// matches compares text with a pattern, line by line.
func matches(t *testing.T, what, pattern, got string) {
	t.Helper()
	if !regexp.MustCompile(`\A` + strings.TrimLeft(pattern, "\n") + `\z`).MatchString(got) {
		t.Errorf("%s:\n%s\nwant\n%s", what, got, pattern)
	}
}

func admissionJob(t *testing.T, h *host.Host, vars map[string]string) *runnerside.Session {
	t.Helper()
	v := map[string]string{"MICROVM_IMAGE": busybox(t, h), "CI_JOB_NAME": "test:unit"}
	for k, s := range vars {
		v[k] = s
	}
	return plainJob(t, h.Driver(), v, map[string]any{"job_info": map[string]any{"name": v["CI_JOB_NAME"], "project_id": 42, "project_full_path": "acme"}})
}

// claimed waits for a claim that is, or is not, waiting.
func claimed(t *testing.T, h *host.Host, waiting bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		files, _ := filepath.Glob(filepath.Join(h.State, "admit", "[0-9]*"))
		for _, f := range files {
			var c struct {
				Waiting bool `json:"waiting"`
			}
			if b, err := os.ReadFile(f); err == nil && json.Unmarshal(b, &c) == nil && c.Waiting == waiting {
				return
			}
		}
	}
	t.Fatalf("no claim with waiting %t appeared", waiting)
}

// A job waits for another's memory, runs out of its own, and its end tells what
// it has cost. A claim goes with its supervisor, however that ends.
func TestAdmission(t *testing.T) {
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, "admission"), admissionConfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nothingLeft(t, h) })
	first := admissionJob(t, h, nil)
	if out := string(prepared(t, first).Stdout); strings.Contains(out, "waiting") {
		t.Errorf("alone, and it waited:\n%s", out)
	}

	second := admissionJob(t, h, map[string]string{"MICROVM_USAGE_REPORT": "1"})
	done := make(chan runnerside.Result, 1)
	go func() { done <- prepared(t, second) }()
	claimed(t, h, true)
	if res, err := first.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %+v %v", res, err)
	}
	prep := <-done
	if t.Failed() {
		t.FailNow()
	}
	matches(t, "prepare of who waited", `
virtkit: waiting for 512 MiB of the host's 800 MiB memory budget \(512 MiB reserved, 0 job\(s\) asked first\)
virtkit: admitted after waiting \d+s for memory
virtkit: image .*
virtkit: (booted|restored) .*
virtkit: ready after .*
`, string(prep.Stdout))

	res := stage(t, second, execdrv.StageBuild, "dd if=/dev/zero of=/builds/f bs=1M count=30 2>/dev/null; sync; rm /builds/f; tail /dev/zero; echo ended $?\n")
	if res.Exit != 0 || string(res.Stdout) != "ended 137\n" {
		t.Errorf("%d %q\n%s", res.Exit, res.Stdout, res.Stderr)
	}
	last := stage(t, second, execdrv.StageCleanFileVars, "true\n")
	cost, _, _ := strings.Cut(string(last.Stderr), "\x1b[0Ksection_start:") // the account of what the guest did
	matches(t, "the end of the trace", `
virtkit: names this job has contacted under unrestricted egress: .*
virtkit: guest OOM: the kernel killed tail \(pid \d+, \d+ MiB RSS\) at \+\d+s \(raise MICROVM_MEM\)
virtkit: job resource usage: cpu (\d+m)?\d+s, peak memory \d+(\.\d GiB| MiB), overlay 3\d MiB of \d+(\.\d GiB| MiB), read \d+ (B|KiB|MiB), written \d+ (B|KiB|MiB), sent \d+ (B|KiB), received \d+ (B|KiB)
virtkit: most this job has used lately: memory \d+(\.\d GiB| MiB), overlay 3\d MiB of \d+(\.\d GiB| MiB), job dir \d+ MiB, read \d+ (B|KiB|MiB), written \d+ (B|KiB|MiB), sent \d+ (B|KiB), received \d+ (B|KiB) over 2 runs
virtkit: 42-acme — what its jobs have been using lately:
  job  .*
  test:unit .*
virtkit: 1 job; all at once they would reserve 512 MiB, against a budget of 800 MiB
`, cost)
	out, err := h.Run(t.Context(), "gitlab", "usage", "acme")
	if err != nil || out != cost[strings.Index(cost, "virtkit: 42-acme"):] {
		t.Errorf("vk gitlab usage acme: %v\n%s", err, out)
	}

	// Its supervisor is killed, and its claim is free.
	pid := h.Supervisors(second.Vars["CI_JOB_ID"])["supervisor"]
	if pid == 0 {
		t.Fatal("the job has no supervisor")
	}
	syscall.Kill(pid, syscall.SIGKILL)
	third := admissionJob(t, h, nil)
	if out := string(prepared(t, third).Stdout); strings.Contains(out, "waiting") && !strings.Contains(out, "admitted after waiting") {
		t.Errorf("beside a dead job:\n%s", out)
	}

	// Who waits too long gives up, and it is not the job's fault.
	configure := func(more string) {
		if err := os.WriteFile(h.Conf, []byte(admissionConfig+more), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(vars map[string]string, want string) {
		t.Helper()
		s := admissionJob(t, h, vars)
		res, err := s.Prepare(t.Context())
		if err != nil || res.Exit != 2 || !strings.Contains(string(res.Stderr)+string(res.Stdout), want) {
			t.Errorf("prepare: %d %v\n%s%s\nwant %s", res.Exit, err, res.Stdout, res.Stderr, want)
		}
		s.Cleanup(context.Background())
	}
	configure("wait_timeout_secs = 1\n")
	refused(nil, "admission: gave up after 1s of waiting for 512 MiB of the host's 800 MiB memory budget (512 MiB reserved, 0 job(s) asked first)")
	configure("wait_timeout_secs = 1\ndisk_default = \"900000T\"\n")
	refused(map[string]string{"CI_JOB_NAME": "unknown"}, "admission: [executor.schedule] disk_default is ")
}

package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/host"
)

// sickAgent builds an agent that behaves so (see e2e/cmd/sickagent).
func sickAgent(t *testing.T, h *host.Host, what string) string {
	t.Helper()
	bin := filepath.Join(world.dir, "sickagent")
	once(t, "sickagent", func() error {
		out, err := h.Run(context.Background(), "version", "--json")
		if err != nil {
			return err
		}
		var v struct{ Version, Build string }
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			return err
		}
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags", "netgo,osusergo",
			"-ldflags", "-s -w -X virtkit/core/version.Version="+v.Version+" -X virtkit/core/version.Build="+v.Build, "-o", bin, "virtkit/e2e/cmd/sickagent")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building the agent: %w\n%s", err, b)
		}
		return nil
	})
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(path, append(b, "sick="+what...), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// variant is this host's driver with more of an environment, and with another
// configuration when toml is not "".
func variant(t *testing.T, h *host.Host, toml string, env ...string) runnerside.Driver {
	t.Helper()
	d := h.Driver()
	if toml != "" {
		file := filepath.Join(t.TempDir(), "config.toml")
		if err := os.WriteFile(file, []byte(toml), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Env = append(d.Env, "VIRTKIT_CONFIG="+file)
	}
	d.Env = append(d.Env, env...)
	return d
}

// seconds is a test's length in seconds: what the environment says, or def.
func seconds(name string, def int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return def
}

// failedPrepare runs config and prepare and returns what a failed prepare said.
func failedPrepare(t *testing.T, s *runnerside.Session) (runnerside.Result, string) {
	t.Helper()
	res, _, err := s.Config(t.Context())
	if err == nil && res.Exit == 0 {
		res, err = s.Prepare(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if res.Exit == 0 {
		s.Cleanup(context.Background())
		t.Fatalf("prepare succeeded:\n%s", res.Stdout)
	}
	t.Logf("%s: exit %d\n%s%s", res.Call, res.Exit, res.Stdout, res.Stderr)
	return res, string(res.Stdout) + string(res.Stderr)
}

// S02: a guest that never answers ends prepare well before the runner's own
// limit, as a failure of the host, and says where it was, how long it took and
// what was on its console. Nothing is left, before any cleanup.
func TestAgentNeverAnswers(t *testing.T) {
	h := guests(t)
	limit := seconds("VK_BOOT_LIMIT", 20)
	d := variant(t, h, strings.Replace(config, "boot_timeout_secs = 360", fmt.Sprintf("boot_timeout_secs = %d", limit), 1), "VIRTKIT_AGENT="+sickAgent(t, h, "silent"))
	d.BuildFailure, d.SystemFailure = 41, 42
	s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	res, said := failedPrepare(t, s)
	if res.Exit != 42 {
		t.Errorf("exit %d, expected a system failure", res.Exit)
	}
	for _, want := range []string{"stage reached: waiting for the guest's agent", "last lines of its console", "sickagent: silent", "vk check", "boot_timeout_secs"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if m := regexp.MustCompile(`not ready after ([0-9.]+)s`).FindStringSubmatch(said); m == nil {
		t.Error("it does not say how long it waited")
	} else if f, _ := strconv.ParseFloat(m[1], 64); f < float64(limit)-1 || f > 2*float64(limit) {
		t.Errorf("it says that it waited %s s of %d", m[1], limit)
	}
	nothingLeft(t, h)
}

// S02: an agent that answers late, or closes the first connection, is waited
// for.
func TestAgentAnswersAtLast(t *testing.T) {
	h := guests(t)
	for _, what := range []string{fmt.Sprintf("late:%d", seconds("VK_LATE", 12)), "closing"} {
		t.Run(what, func(t *testing.T) {
			s := plainJob(t, variant(t, h, "", "VIRTKIT_AGENT="+sickAgent(t, h, what)), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
			prepared(t, s)
			if res := stage(t, s, execdrv.StageBuild, "echo works\n"); res.Exit != 0 || string(res.Stdout) != "works\n" {
				t.Errorf("%d %q %s", res.Exit, res.Stdout, res.Stderr)
			}
			var console string
			for _, id := range h.JobDirs() {
				b, err := os.ReadFile(filepath.Join(h.State, "jobs", id, "console.log"))
				if err != nil {
					t.Error(err)
				}
				console += string(b)
			}
			if want := map[bool]string{true: "sickagent: closed after", false: "sickagent: late"}[what == "closing"]; !strings.Contains(console, want) {
				t.Errorf("the console lacks %q: the agent was not the one of the test\n%s", want, console)
			}
		})
	}
	nothingLeft(t, h)
}

// S03: the checkout's version check, `sort | head` under pipefail, again and
// again: never stopped by a broken pipe. VK_SOURCES sets how often.
func TestVersionCheckUnderPipefail(t *testing.T) {
	h := guests(t)
	defaultImage(t, h)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default"}, nil)
	prepared(t, s)
	script := `set -eo pipefail
set +o noclobber
have=$(git version | sed 's/[^0-9]*//')
first=$(printf '%s\n%s\n' 2.11.0 "$have" | sort -V | head -n1)
echo "first $first"
echo checked
`
	for i := range seconds("VK_SOURCES", 5) {
		if res := stage(t, s, execdrv.StageSources, script); res.Exit != 0 || string(res.Stdout) != "first 2.11.0\nchecked\n" {
			t.Fatalf("time %d: exit %d, code %q\n%s%s", i+1, res.Exit, res.FileCode, res.Stdout, res.Stderr)
		}
	}
	// A pipe that does break under pipefail is no silent stop.
	res := stage(t, s, execdrv.StageSources, "set -eo pipefail\n{ echo one; sleep 0.5; echo two; sleep 0.5; echo three; } | head -n1\necho not reached\n")
	if res.Exit != 1 || res.FileCode != "141" || string(res.Stdout) != "one\n" || !strings.Contains(string(res.Stderr), "SIGPIPE") || !strings.Contains(string(res.Stderr), "pipefail") {
		t.Errorf("exit %d, code %q\n%s%s", res.Exit, res.FileCode, res.Stdout, res.Stderr)
	}
}

// S36: the guest's clock is the host's again soon after a pause.
func TestClockAfterAPause(t *testing.T) {
	h := guests(t)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	prepared(t, s)
	ids := h.JobDirs()
	if len(ids) != 1 {
		t.Fatalf("jobs %q", ids)
	}
	vmm := h.Supervisors(ids[0])["vmm"]
	p, err := os.FindProcess(vmm)
	if err != nil || vmm == 0 {
		t.Fatalf("no VMM: %v", err)
	}
	pause(t, p, time.Duration(seconds("VK_PAUSE", 5))*time.Second)
	// off is how far the guest's clock is at least from the host's: its answer
	// came at some moment of the stage.
	off := func() time.Duration {
		start := time.Now()
		res := stage(t, s, execdrv.StageBuild, "date +%s; cat /proc/uptime\n")
		now := time.Now()
		var got int64
		if _, err := fmt.Sscan(string(res.Stdout), &got); err != nil {
			t.Fatalf("%d %q %s", res.Exit, res.Stdout, res.Stderr)
		}
		if behind := start.Sub(time.Unix(got+1, 0)); behind > 0 { // its seconds are cut off
			return behind
		}
		return min(now.Sub(time.Unix(got, 0)), 0)
	}
	deadline := time.Now().Add(time.Minute)
	for d := off(); d.Abs() > time.Second; d = off() {
		if time.Now().After(deadline) {
			t.Fatalf("a minute after a pause the guest is %v behind", d)
		}
		t.Logf("the guest is %v behind", d)
		time.Sleep(500 * time.Millisecond)
	}
}

// pause stops a process for d.
func pause(t *testing.T, p *os.Process, d time.Duration) {
	t.Helper()
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(d) // its length is what is tried
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

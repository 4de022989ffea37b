package fleet_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fleet/nodehost"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/host"
)

// S43 in real guests, with the unit that vk node service install writes: what
// systemd does with it to a node whose two jobs run is done here by hand, since
// a test has no systemd of its own.
//
// A node that ends without its unit (kill -9 of it alone, SIGTERM of one that
// was started by hand, another build in the program's place) leaves its jobs
// running, in the same guests, and their traces go on. KillMode=mixed ends the
// jobs with it: they are interrupted, once, and nothing is left.
func TestNodeRestartsInGuests(t *testing.T) {
	l := guestsLight(t)
	const parts = 4
	gate := func(id int64, n int) string { return fmt.Sprintf("gate-%d-%d", id, n) }
	// A guest sees no file of the host's: its gates are files of the git server.
	l.Git.Allow("*")
	for _, id := range []int64{1, 2} {
		var script []string
		for n := range parts {
			script = append(script, fmt.Sprintf("echo part %d of $CI_JOB_ID; until git ls-remote %s/%s.git >/dev/null 2>&1; do sleep 0.3; done", n,
				strings.Replace(l.URL, "://", "://gitlab-ci-token:glcbt-gate@", 1), gate(id, n)))
		}
		l.add(id, script...)
	}
	open := func(id int64, n int) {
		if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", "--bare", filepath.Join(l.Repos, gate(id, n)+".git")).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, id := range []int64{1, 2} {
		l.prints(id, fmt.Sprintf("\npart 0 of %d\n", id))
	}
	drivers, guests := l.drivers(), l.guests()
	if len(drivers) != 2 || len(guests) != 2 {
		t.Fatalf("drivers %v, guests %v", drivers, guests)
	}
	for n, step := range []struct {
		name string
		do   func()
	}{
		{"SIGTERM", func() { l.restart("node", syscall.SIGTERM) }},
		{"kill -9", func() { l.restart("node", syscall.SIGKILL) }},
		{"another build", func() { l.upgrade(); l.restart("node", syscall.SIGTERM) }},
	} {
		step.do()
		for _, id := range []int64{1, 2} {
			open(id, n)
			l.prints(id, fmt.Sprintf("\npart %d of %d\n", n+1, id))
		}
		if d, g := l.drivers(), l.guests(); d[1] != drivers[1] || d[2] != drivers[2] || !slices.Equal(g, guests) {
			t.Fatalf("after %s: drivers %v, guests %v; before: %v, %v", step.name, d, g, drivers, guests)
		}
	}
	// One ends, with all it has printed, in a guest of the build before.
	open(1, parts-1)
	got, e := l.ends(1)
	if e.State != "success" || strings.Count(string(got.Trace), "\npart ") != parts || e.Output.Checksum != gitlabtest.Checksum(got.Trace) {
		t.Errorf("%+v\n%s", e, got.Trace)
	}
	l.stopUnit()
	l.restart("node", syscall.SIGKILL)
	got, e = l.ends(2)
	if e.State != "failed" || e.Reason != "runner_interrupted" || strings.Count(string(got.Trace), "\npart ") != parts || e.Output.Checksum != gitlabtest.Checksum(got.Trace) {
		t.Errorf("%+v\n%s", e, got.Trace)
	}
	// The next job runs, in a guest of the new build.
	l.add(3, "echo well")
	if got, e := l.ends(3); e.State != "success" {
		t.Errorf("%+v\n%s", e, got.Trace)
	}
	l.left()
}

// guestsLight is a light fleet whose guests are real, and whose program can be
// replaced.
func guestsLight(t *testing.T) *light {
	t.Helper()
	if testing.Short() {
		t.Skip("needs guests, which -short leaves out")
	}
	dir, err := os.MkdirTemp("", "vkg-") // short: sockets are below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h, err := host.New("../..", filepath.Join(dir, "host"), "")
	if host.IsMissing(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Run(t.Context(), "pull", "local/default"); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(h.VK)
	if err != nil {
		t.Fatal(err)
	}
	vk := filepath.Join(dir, "vk")
	if err := os.WriteFile(vk, b, 0o700); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "fleet.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		log.Close()
		if b, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("the fleet's logs:\n%s", b[max(0, len(b)-30000):])
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	f, err := fleetup.Up(ctx, fleetup.Options{VK: vk, StateDir: h.Base, Dir: dir, Log: log, Mem: "512M", Envelopes: 2,
		NodeConfig: "[vmm]\nboot_timeout_secs = 360\n[executor.vm]\ncpus = 1\nmem = \"512M\"\n"})
	if err != nil {
		t.Fatal(err)
	}
	l := &light{t, f, filepath.Join(dir, "node"), 10 * time.Minute} // a build's first guest is made of nothing
	t.Cleanup(func() {
		if err := f.Down(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			killHost(l.state, func([]string) bool { return true })
		}
	})
	f.GitLab.Interval = 1
	if err := f.Approve(ctx, 42, "group/project"); err != nil {
		t.Fatal(err)
	}
	return l
}

// guests are the processes that hold the jobs' guests, sorted.
func (l *light) guests() []int {
	var out []int
	for pid, args := range (&host.Host{State: l.state}).Processes() {
		if strings.Contains(args, "supervise "+filepath.Join(l.state, "jobs")) {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out
}

// buildRE is how a build is told.
var buildRE = regexp.MustCompile(`\(([0-9a-f]{16})\)`)

// upgrade puts another build of vk into its place, as a package does: of the
// same length, but neither host nor guest takes it for the one before.
func (l *light) upgrade() {
	l.t.Helper()
	said, err := l.VKRun(l.t.Context(), "version")
	if err != nil {
		l.t.Fatal(err)
	}
	m := buildRE.FindStringSubmatch(said)
	if m == nil {
		l.t.Fatalf("no build in %q", said)
	}
	b, err := os.ReadFile(l.VK)
	if err != nil {
		l.t.Fatal(err)
	}
	if n := bytes.Count(b, []byte(m[1])); n < 2 {
		l.t.Fatalf("the build %s is %d times in the program, expected it in the agent too", m[1], n)
	}
	var other [8]byte
	rand.Read(other[:])
	b = bytes.ReplaceAll(b, []byte(m[1]), []byte(hex.EncodeToString(other[:])))
	if err := os.WriteFile(l.VK+".new", b, 0o700); err != nil {
		l.t.Fatal(err)
	}
	if err := os.Rename(l.VK+".new", l.VK); err != nil {
		l.t.Fatal(err)
	}
	if now, err := l.VKRun(l.t.Context(), "version"); err != nil || now == said {
		l.t.Fatalf("the new build says %q, %v", now, err)
	}
}

// stopUnit does with the node and all that is in its control group what systemd
// does by the unit of this version: SIGTERM for the node alone, then, once it has
// ended or the time is over, SIGKILL for what is left.
func (l *light) stopUnit() {
	l.t.Helper()
	unit, err := (&nodehost.Service{Exe: l.VK, StateDir: l.state, User: nodehost.User{Name: "ci"}, StopTimeout: time.Minute}).Text()
	if err != nil {
		l.t.Fatal(err)
	}
	for _, line := range []string{"\nKillMode=mixed\n", "\nTimeoutStopSec=60s\n"} {
		if !strings.Contains(unit, line) {
			l.t.Fatalf("the unit has no %q:\n%s", line, unit)
		}
	}
	if err := l.Signal("node", syscall.SIGTERM); err != nil {
		l.t.Fatal(err)
	}
	l.until("the node ends by SIGTERM", func() bool {
		for _, args := range processesOf("VIRTKIT_STATE_DIR=" + l.state) {
			if strings.Contains(strings.Join(args, " "), "node run") {
				return false
			}
		}
		return true
	})
	killHost(l.state, func(args []string) bool { return !slices.Contains(args, "gitlabd") && !slices.Contains(args, "hub") })
}

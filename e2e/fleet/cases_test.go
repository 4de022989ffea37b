package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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

// light is a whole fleet whose guests are processes (see standIn).
type light struct {
	t *testing.T
	*fleetup.Fleet
	state    string        // the node's
	patience time.Duration // that what is waited for may take
}

func newLight(t *testing.T, changes ...func(*fleetup.Options)) *light {
	t.Helper()
	dir, err := os.MkdirTemp("", "vkl-") // short: sockets are below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	exe, err := newStandIn(dir)
	if err != nil {
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
	o := fleetup.Options{VK: exe, Dir: dir, Log: log, Mem: "512M", Envelopes: 2}
	for _, change := range changes {
		change(&o)
	}
	f, err := fleetup.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	l := &light{t, f, filepath.Join(dir, "node"), 2 * time.Minute}
	t.Cleanup(func() {
		if err := f.Down(); err != nil {
			t.Error(err)
		}
		for pid := range processesOf("VIRTKIT_STATE_DIR=" + l.state) { // of a test that failed
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	f.GitLab.Interval = 1
	if err := f.Approve(ctx, 42, "group/project"); err != nil {
		t.Fatal(err)
	}
	return l
}

// add gives GitLab a job.
func (l *light) add(id int64, script ...string) {
	l.t.Helper()
	v := func(key, value string) map[string]any {
		return map[string]any{"key": key, "value": value, "public": true}
	}
	b, err := json.Marshal(map[string]any{
		"id": id, "token": fmt.Sprintf("glcbt-64_light%08dtoken", id), "allow_git_fetch": true,
		"job_info":    map[string]any{"id": id, "name": "job", "stage": "test", "pipeline_id": 500, "project_id": 42, "project_name": "project", "project_full_path": "group/project"},
		"git_info":    map[string]any{"repo_url": l.GitURL + "/group/project.git", "ref": "main", "sha": strings.Repeat("0", 40), "ref_type": "branch"},
		"runner_info": map[string]any{"timeout": 900},
		"variables":   []any{v("CI_JOB_ID", fmt.Sprint(id)), v("GIT_STRATEGY", "none"), v("FF_TIMESTAMPS", "false"), v("CI_SERVER_URL", l.URL), v("CI_PROJECT_PATH", "group/project")},
		"steps":       []any{map[string]any{"name": "script", "timeout": 900, "when": "on_success", "script": script}},
		"image":       map[string]any{"name": "local/default"},
		"features":    map[string]any{"failure_reasons": []string{"unknown_failure", "runner_system_failure", "runner_interrupted"}},
	})
	if err == nil {
		_, err = l.GitLab.AddJob(b)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

func (l *light) until(what string, ok func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(l.patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.t.Fatalf("it did not come to pass: %s", what)
		}
	}
}

func (l *light) prints(id int64, text string) {
	l.t.Helper()
	l.until(fmt.Sprintf("job %d prints %q", id, text), func() bool {
		j, _ := l.GitLab.Job(id)
		return strings.Contains(string(j.Trace), text)
	})
}

// ends waits for a job's last update.
func (l *light) ends(id int64) (gitlabtest.Job, ended) {
	l.t.Helper()
	l.until(fmt.Sprintf("job %d has ended", id), func() bool { j, _ := l.GitLab.Job(id); return j.Final != nil })
	j, _ := l.GitLab.Job(id)
	var e ended
	if err := json.Unmarshal(j.Final, &e); err != nil {
		l.t.Fatal(err)
	}
	return j, e
}

// drivers are the processes that run jobs, by GitLab's number.
func (l *light) drivers() map[int64]int {
	out := map[int64]int{}
	for pid, args := range processesOf("VIRTKIT_STATE_DIR=" + l.state) {
		if strings.Contains(strings.Join(args, " "), " node job ") {
			out[jobOfDir(args[len(args)-1])] = pid
		}
	}
	return out
}

// power takes the node's host the power: everything of it but what is on disk.
func (l *light) power() {
	killHost(l.state, func(args []string) bool { return !slices.Contains(args, "gitlabd") && !slices.Contains(args, "hub") })
}

func (l *light) restart(name string, sig syscall.Signal) {
	l.t.Helper()
	if err := l.Restart(name, sig, 0); err != nil {
		l.t.Fatal(err)
	}
}

// left ends the fleet and says what is left of its jobs.
func (l *light) left() {
	l.t.Helper()
	l.until("the node has forgotten its jobs", func() bool {
		ents, _ := os.ReadDir(filepath.Join(l.state, "node", "jobs"))
		guests, _ := os.ReadDir(guestsDir(l.state))
		return len(ents)+len(guests) == 0
	})
	if err := l.Down(); err != nil {
		l.t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if left := (&host.Host{State: l.state}).Left(ctx); len(left) > 0 {
		l.t.Errorf("left: %v", left)
	}
}

// endAsUnit ends the node by a signal to it alone, and then as systemd does with
// the unit that vk node service install writes: what is left of its processes is
// killed.
func (l *light) endAsUnit(sig syscall.Signal) {
	l.t.Helper()
	s := nodehost.Service{User: nodehost.User{Name: "root", Home: "/root"}, Exe: l.VK, StateDir: l.state, StateFlag: true}
	unit, err := s.Text()
	if err != nil {
		l.t.Fatal(err)
	}
	for _, want := range []string{" node run --state-dir " + l.state + "\n", "\nKillMode=mixed\n", "\nTimeoutStopSec=infinity\n", "\nRestart=on-failure\n"} {
		if !strings.Contains(unit, want) {
			l.t.Fatalf("the unit lacks %q, which this test does as systemd would:\n%s", want, unit)
		}
	}
	if strings.Contains(unit, "KillSignal") || strings.Contains(unit, "SendSIGKILL") {
		l.t.Fatalf("this test does not know the unit's signals:\n%s", unit)
	}
	if err := l.End("node", sig); err != nil {
		l.t.Fatal(err)
	}
	l.power()
}

// S43: a node that is restarted, killed or upgraded outside of a unit while jobs
// run finds them running, and their traces go on. Stopped as its unit stops it, or
// killed under it, it takes them with it: they then end as interrupted, once.
func TestNodeRestarts(t *testing.T) {
	l := newLight(t)
	wait := func(id int64, n int) string { return filepath.Join(l.Dir, fmt.Sprintf("go-%d-%d", id, n)) }
	release := func(id int64, n int) {
		if err := os.WriteFile(wait(id, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []int64{1, 2} {
		var script []string
		for n := range 4 {
			script = append(script, fmt.Sprintf("echo part %d of $CI_JOB_ID; while [ ! -e %s ]; do sleep 0.1; done", n, wait(id, n)))
		}
		l.add(id, script...)
	}
	l.prints(1, "\npart 0 of 1\n")
	l.prints(2, "\npart 0 of 2\n")
	before := l.drivers()
	upgrade := func() {
		// What a package does: another file under the same name.
		if err := os.Remove(l.VK); err != nil {
			t.Fatal(err)
		}
		if _, err := newStandIn(l.Dir); err != nil {
			t.Fatal(err)
		}
		l.restart("node", syscall.SIGTERM)
	}
	for n, do := range []func(){func() { l.restart("node", syscall.SIGTERM) }, func() { l.restart("node", syscall.SIGKILL) }, upgrade} {
		do()
		for _, id := range []int64{1, 2} {
			release(id, n)
			l.prints(id, fmt.Sprintf("\npart %d of %d\n", n+1, id))
		}
	}
	if after := l.drivers(); len(before) != 2 || before[1] != after[1] || before[2] != after[2] {
		t.Errorf("the drivers are %v, they were %v", after, before)
	}
	release(1, 3)
	got, e := l.ends(1)
	if e.State != "success" || strings.Count(string(got.Trace), "\npart ") != 4 || e.Output.Checksum != gitlabtest.Checksum(got.Trace) {
		t.Errorf("%+v\n%s", e, got.Trace)
	}
	for _, end := range []struct {
		id    int64
		sig   syscall.Signal
		parts int
	}{{2, syscall.SIGTERM, 4}, {3, syscall.SIGKILL, 1}} {
		if end.id == 3 {
			l.add(3, "echo part 0 of $CI_JOB_ID; sleep 300")
			l.prints(3, "\npart 0 of 3\n")
		}
		l.endAsUnit(end.sig)
		l.restart("node", syscall.SIGKILL)
		got, e = l.ends(end.id)
		if e.State != "failed" || e.Reason != "runner_interrupted" || strings.Count(string(got.Trace), "\npart ") != end.parts {
			t.Errorf("job %d, ended by %v: %+v\n%s", end.id, end.sig, e, got.Trace)
		}
	}
	l.left()
}

// S44: power lost at each step of placing a job, of the hub and the node's host
// at once. Every job has its end soon after both are back, what it held is
// there again, and an operator can end one by force at any time.
func TestPowerLoss(t *testing.T) {
	l := newLight(t)
	journaled := func(id int64) bool {
		dirs, _ := filepath.Glob(filepath.Join(l.state, "node", "jobs", "*"))
		return slices.ContainsFunc(dirs, func(d string) bool { return jobOfDir(d) == id })
	}
	id := int64(0)
	for _, step := range []struct {
		name string
		come func() bool
	}{
		{"taken", func() bool {
			b, _ := os.ReadFile(filepath.Join(l.Dir, "relay", "demo.json"))
			return strings.Contains(string(b), fmt.Sprintf(`"job_id":%d,`, id))
		}},
		{"recorded", func() bool {
			b, _ := os.ReadFile(filepath.Join(l.Dir, "relay", "demo.json"))
			return strings.Contains(string(b), `"hub_job":`)
		}},
		{"journaled", func() bool { return journaled(id) }},
		{"the guest is there", func() bool {
			_, err := os.Stat(filepath.Join(guestsDir(l.state), fmt.Sprint(id), "pid"))
			return err == nil
		}},
		{"reported", func() bool { j, _ := l.GitLab.Job(id); return j.Status == "running" }},
		{"printing", func() bool { j, _ := l.GitLab.Job(id); return strings.Contains(string(j.Trace), "begun") }},
	} {
		id++
		l.add(id, "echo begun", "sleep 8", "echo over")
		l.until(step.name, step.come)
		l.power()
		l.restart("hub", syscall.SIGKILL)
		l.restart("node", syscall.SIGKILL)
		got, e := l.ends(id)
		switch over := strings.Contains(string(got.Trace), "\nover\n"); {
		case e.State == "success" && over: // no node had it, or it was over when the power went
		case e.State == "failed" && !over && (e.Reason == "runner_interrupted" || e.Reason == "runner_system_failure"):
		default:
			t.Errorf("%s: job %d ended as %+v:\n%s", step.name, id, e, got.Trace)
		}
	}
	// What they held is free again: as many jobs run at once as before.
	l.add(100, "echo done")
	l.add(101, "echo begun; sleep 300")
	if _, e := l.ends(100); e.State != "success" {
		t.Errorf("the next job ended as %+v", e)
	}
	l.prints(101, "begun")
	out, err := l.Hub(t.Context(), "jobs", "--json")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Hub(t.Context(), "jobs", "cancel", runningJob(t, out)); err != nil {
		t.Fatal(err)
	}
	if _, e := l.ends(101); e.State != "failed" {
		t.Errorf("the job that an operator ended: %+v", e)
	}
	l.left()
}

// An operator ends a job by force while its node is gone, with its host: GitLab
// has the end at once, and the node, once it is back, is rid of the job.
func TestForcedEnd(t *testing.T) {
	l := newLight(t)
	l.add(1, "echo begun; sleep 300")
	l.prints(1, "begun")
	if err := l.Signal("node", syscall.SIGSTOP); err != nil { // it neither answers nor goes
		t.Fatal(err)
	}
	out, err := l.Hub(t.Context(), "jobs", "--json")
	if err != nil {
		t.Fatal(err)
	}
	said, err := l.Hub(t.Context(), "jobs", "cancel", "--force", runningJob(t, out))
	if err != nil || !strings.Contains(said, "finished, canceled") {
		t.Fatalf("%q, %v", said, err)
	}
	if got, e := l.ends(1); e.State != "failed" || !strings.Contains(string(got.Trace), "begun") || e.Output.Checksum != gitlabtest.Checksum(got.Trace) {
		t.Errorf("%+v\n%s", e, got.Trace)
	}
	if err := l.Signal("node", syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	l.add(2, "echo next")
	l.add(3, "echo next") // both fit beside nothing
	for _, id := range []int64{2, 3} {
		if _, e := l.ends(id); e.State != "success" {
			t.Errorf("job %d ended as %+v", id, e)
		}
	}
	l.left()
}

func runningJob(t *testing.T, list string) string {
	var all struct {
		Jobs []struct {
			ID    string `json:"id"`
			State string `json:"state"`
		} `json:"jobs"`
	}
	if err := json.Unmarshal([]byte(list), &all); err != nil {
		t.Fatalf("%v: %s", err, list)
	}
	for _, j := range all.Jobs {
		if j.State == "running" {
			return j.ID
		}
	}
	t.Fatalf("no job runs: %s", list)
	return ""
}

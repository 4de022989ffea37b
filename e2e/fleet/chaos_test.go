package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fleet/jobdir"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/host"
)

// chaosTime is how long TestChaos breaks things. VK_CHAOS_SECS is another time,
// VK_CHAOS_SEED what a run that failed has printed, and VK_GUESTS=1 runs
// the jobs in real microVMs.
const chaosTime = 12 * time.Second

func number(t *testing.T, name string, or int64) int64 {
	s := os.Getenv(name)
	if s == "" {
		return or
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// chaos is a fleet that is broken at random, and the jobs that flow through it.
type chaos struct {
	t      *testing.T
	f      *fleetup.Fleet
	rand   *rand.Rand
	state  string // the node's
	guests bool
	gitlab *unsteady
	links  map[string]*proxy
	cache  *chaosRegistry // nil = guests are no guests: no transfers
	sha    string         // of the project's commit

	between int // milliseconds at most from a mishap to the next

	mu        sync.Mutex
	jobs      map[int64]*chaosJob
	next      int64
	forgotten map[int64]bool // at the last look
	did       map[string]int
}

// chaosJob is a job, and what it does.
type chaosJob struct {
	id     int64
	token  string
	secret string
	lines  int
	exit   int
	cancel bool // a user cancels it
	why    []string

	clones  bool
	service bool      // it asks one
	stage   string    // of a pipeline: build, test; "" = of none
	needs   *chaosJob // whose artifacts it downloads; nil = none
}

// hit notes why a job may fail.
func (c *chaos) hit(id int64, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if j := c.jobs[id]; j != nil {
		j.why = append(j.why, why)
	}
}

// TestChaos has jobs flow from a stand-in GitLab through vk-gitlab, a hub and a
// node to their drivers while all of these, the jobs' guests and the
// connections between are killed, stopped, cut and slowed at random. At the end
// each job has had one outcome in GitLab, and one trace, which is what the job
// printed; and nothing of any is left. Jobs clone; in real guests there are
// pipelines as well (chaos_pipeline_test.go).
func TestChaos(t *testing.T) {
	seed := uint64(number(t, "VK_CHAOS_SEED", time.Now().UnixNano()))
	long := time.Duration(number(t, "VK_CHAOS_SECS", int64(chaosTime/time.Second))) * time.Second
	t.Logf("VK_CHAOS_SEED=%d VK_CHAOS_SECS=%d", seed, long/time.Second)
	c := newChaos(t, seed)
	until := time.Now().Add(long)
	feed, stopFeeding := context.WithCancel(t.Context())
	var feeding sync.WaitGroup
	feeding.Go(func() { c.feed(feed) })
	t.Cleanup(func() { stopFeeding(); feeding.Wait() })
	c.gitlab.set(true)
	for time.Now().Before(until) && !t.Failed() {
		c.mishap()
		c.requeue()
		time.Sleep(time.Duration(c.rand.IntN(c.between)) * time.Millisecond)
	}
	stopFeeding()
	feeding.Wait()
	c.gitlab.set(false)
	c.calm()
	t.Logf("%d jobs; %v; GitLab: %v", len(c.jobs), c.did, c.gitlab.did)
	if !t.Failed() {
		c.judge()
		c.caches()
		c.checkouts()
		c.nothingLeft()
	}
}

func newChaos(t *testing.T, seed uint64) *chaos {
	dir, err := os.MkdirTemp("", "vkc-") // short: sockets are below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	source := rand.NewPCG(seed, 0)
	c := &chaos{t: t, rand: rand.New(source), guests: os.Getenv("VK_GUESTS") == "1", links: map[string]*proxy{}, jobs: map[int64]*chaosJob{}, did: map[string]int{},
		between: 1500, state: filepath.Join(dir, "node"), gitlab: &unsteady{rand: rand.New(rand.NewPCG(seed, 1))}}
	log, err := os.Create(filepath.Join(t.ArtifactDir(), "fleet.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		log.Close()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("the fleet's logs:\n%s", b[max(0, len(b)-60000):])
		}
	})
	exe, err := newStandIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	o := fleetup.Options{VK: exe, Dir: dir, Log: log, Mem: "512M", Envelopes: 3,
		NodeConfig: "[executor.schedule]\nmax_concurrency = 4\n",
		Wrap:       func(h http.Handler) http.Handler { c.gitlab.next = h; return c.gitlab },
		Between: func(who, addr string) (string, error) {
			c.links[who] = newProxy(t, addr)
			return c.links[who].addr(), nil
		}}
	c.gitlab.befell = c.befell
	if c.guests {
		c.between = 6000 // a guest's job takes a minute: some are to come to their own end
		h, err := host.New("../..", filepath.Join(dir, "host"), "")
		if host.IsMissing(err) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		o.VK, o.StateDir = h.VK, h.Base
		c.cache = newChaosRegistry(t, filepath.Join(dir, "cache"))
		c.links["registry"] = c.cache.link
		o.NodeConfig = "[executor]\nhost_checkout = true\n[executor.schedule]\nmax_concurrency = 3\n[vmm]\nboot_timeout_secs = 360\n[executor.vm]\ncpus = 1\nmem = \"512M\"\n[registry]\nrepo = \"" + c.cache.link.addr() + "/chaos\"\n"
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if c.f, err = fleetup.Up(ctx, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.f.Down(); err != nil {
			t.Error(err)
		}
	})
	c.f.GitLab.Interval = 1
	if err := c.f.Approve(ctx, 42, "group/project"); err != nil {
		t.Fatal(err)
	}
	c.sources(ctx)
	return c
}

// feed keeps a few jobs waiting.
func (c *chaos) feed(ctx context.Context) {
	r := rand.New(rand.NewPCG(uint64(c.rand.Int64()), 2))
	for ctx.Err() == nil {
		open := 0
		c.mu.Lock()
		ids := slices.Collect(maps.Keys(c.jobs))
		c.mu.Unlock()
		for _, id := range ids {
			j, _ := c.f.GitLab.Job(id)
			if j.Final == nil && j.Status != "canceled" { // of which GitLab takes no end
				open++
			}
			own := c.jobOf(id)
			if own.cancel && j.Status == "running" && r.IntN(4) == 0 {
				c.hit(id, "a user's cancel")
				own.cancel = false
				c.f.GitLab.Cancel(id, r.IntN(2) == 0)
			}
			if own.stage == "build" && j.Status == "success" && own.needs == nil {
				own.needs = c.make(r, own)
				c.add(r, own.needs)
			}
		}
		if open < 6 {
			c.add(r, c.make(r, nil))
			continue
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (c *chaos) jobOf(id int64) *chaosJob {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.jobs[id]
}

// make makes a job: some lines over some time, a secret in each, and an end.
// It is the next one of a build's, if there is one.
func (c *chaos) make(r *rand.Rand, build *chaosJob) *chaosJob {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	j := &chaosJob{id: c.next, token: fmt.Sprintf("glcbt-64_chaos%08dtoken", c.next), secret: fmt.Sprintf("hidden%dword", r.Int64()), lines: 1 + r.IntN(40)}
	if r.IntN(4) == 0 {
		j.exit = 1 + r.IntN(90)
	}
	j.cancel = r.IntN(10) == 0
	j.clones = r.IntN(2) == 0
	switch {
	case build != nil:
		j.stage, j.needs, j.clones, j.service = "test", build, true, r.IntN(3) == 0
	case c.cache != nil && r.IntN(2) == 0:
		j.stage, j.clones, j.exit = "build", true, 0
	}
	c.jobs[j.id] = j
	return j
}

// add gives GitLab a job.
func (c *chaos) add(r *rand.Rand, j *chaosJob) {
	pad := strings.Repeat("x", r.IntN(3)*r.IntN(2000))
	v := func(key, value string, masked bool) map[string]any {
		return map[string]any{"key": key, "value": value, "public": !masked, "masked": masked}
	}
	more := c.pipeline(r, j)
	job := map[string]any{
		"id": j.id, "token": j.token, "allow_git_fetch": true,
		"job_info":    map[string]any{"id": j.id, "name": "job", "stage": "test", "pipeline_id": 500, "project_id": 42, "project_name": "project", "project_full_path": "group/project"},
		"git_info":    more.git,
		"runner_info": map[string]any{"timeout": 900},
		"variables": append([]any{v("CI_JOB_ID", fmt.Sprint(j.id), false), v("HIDDEN", j.secret, true), v("CI_JOB_TOKEN", j.token, true),
			v("FF_TIMESTAMPS", strconv.FormatBool(r.IntN(2) == 0), false), v("CI_SERVER_URL", c.f.URL, false), v("CI_PROJECT_PATH", "group/project", false)}, more.variables...),
		"steps": []any{
			map[string]any{"name": "script", "timeout": 900, "when": "on_success", "script": append(more.script,
				fmt.Sprintf("for i in $(seq 1 %d); do echo \"line $CI_JOB_ID $i $HIDDEN %s\"; [ $((i %% %d)) -ne 0 ] || sleep 0.1; done", j.lines, pad, 1+r.IntN(8)), fmt.Sprintf("(exit %d)", j.exit))},
			map[string]any{"name": "after_script", "timeout": 900, "when": "always", "allow_failure": true, "script": []string{"echo \"after $CI_JOB_ID $CI_JOB_STATUS\""}},
		},
		"image":    map[string]any{"name": "local/default"},
		"features": map[string]any{"trace_sections": r.IntN(2) == 0, "failure_reasons": []string{"unknown_failure", "runner_system_failure", "image_pull_failure", "runner_interrupted", "runner_configuration_error", "runner_external_dependency_failure", "job_canceled"}},
	}
	maps.Copy(job, more.fields)
	response, err := json.Marshal(job)
	if err == nil {
		_, err = c.f.GitLab.AddJob(response)
	}
	if err != nil {
		c.t.Error(err)
	}
}

// mishap does one bad thing, and mends it.
func (c *chaos) mishap() {
	pause := time.Duration(c.rand.IntN(3000)) * time.Millisecond
	kind := c.rand.IntN(10)
	note := func(what string) { c.did[what]++ }
	names := []string{"hub", "node", "vk-gitlab"}
	name := names[c.rand.IntN(len(names))]
	links := slices.Sorted(maps.Keys(c.links))
	link := links[c.rand.IntN(len(links))]
	switch kind {
	case 0, 1, 2: // the power of a process
		note("kill " + name)
		if name == "hub" {
			c.uncommitted("the hub was killed before a node had the job")
		}
		c.restart(name, syscall.SIGKILL, pause)
	case 3: // as an operator does
		note("restart " + name)
		if name == "hub" {
			c.uncommitted("the hub was restarted before a node had the job")
		}
		c.restart(name, syscall.SIGTERM, pause)
	case 4: // slow
		note("stop " + name)
		if err := c.f.Signal(name, syscall.SIGSTOP); err != nil {
			c.t.Error(err)
		}
		time.Sleep(pause)
		if err := c.f.Signal(name, syscall.SIGCONT); err != nil {
			c.t.Error(err)
		}
	case 5, 6:
		note("cut " + link)
		c.uncertain(link, "cut")
		c.links[link].set(true)
		time.Sleep(pause)
		c.links[link].set(false)
	case 7:
		note("slow " + link)
		c.uncertain(link, "slow")
		c.links[link].delay.Store(int64(200 * time.Millisecond))
		time.Sleep(pause)
		c.links[link].delay.Store(0)
	case 8:
		if c.cache != nil {
			note("kill registry")
			c.cache.restart(pause)
			return
		}
		c.strike(note)
	default:
		c.strike(note)
	}
}

func (c *chaos) restart(name string, sig syscall.Signal, pause time.Duration) {
	if err := c.f.Restart(name, sig, pause); err != nil {
		c.t.Error(err)
	}
}

// uncommitted notes what a hub may lose: jobs that no node is known to have.
func (c *chaos) uncommitted(why string) {
	c.mu.Lock()
	ids := slices.Collect(maps.Keys(c.jobs))
	c.mu.Unlock()
	for _, id := range ids {
		if j, ok := c.f.GitLab.Job(id); ok && j.Final == nil && !bytes.Contains(j.Trace, []byte("line ")) {
			c.hit(id, why)
		}
	}
}

// strike kills a driver, one of its calls, or a guest.
func (c *chaos) strike(note func(string)) {
	type victim struct {
		pid  int
		kind string
		job  int64
	}
	var all []victim
	for pid, args := range processesOf("VIRTKIT_STATE_DIR=" + c.state) {
		line := strings.Join(args, " ")
		switch {
		case strings.Contains(line, " node job ") && !strings.Contains(line, "--cleanup"):
			all = append(all, victim{pid, "driver", jobOfDir(args[len(args)-1])})
		case slices.Contains(args, "guest"):
			id, _ := strconv.ParseInt(filepath.Base(args[len(args)-1]), 10, 64)
			all = append(all, victim{pid, "guest", id})
		case c.guests && (strings.Contains(line, "supervise ") || strings.Contains(line, "qemu")):
			all = append(all, victim{pid, "guest", jobOfGuest(pid, c.state)})
		}
	}
	slices.SortFunc(all, func(a, b victim) int { return a.pid - b.pid })
	all = slices.DeleteFunc(all, func(v victim) bool { return v.job == 0 })
	if len(all) == 0 {
		return
	}
	v := all[c.rand.IntN(len(all))]
	note("kill " + v.kind)
	c.hit(v.job, "its "+v.kind+" was killed")
	syscall.Kill(v.pid, syscall.SIGKILL)
}

// jobOfDir is GitLab's number of a job of the node's journal; 0 = not known.
func jobOfDir(dir string) int64 {
	d, err := jobdir.At(dir)
	if err != nil {
		return 0
	}
	st, err := d.Start()
	if err != nil {
		return 0
	}
	j, err := st.CiJob()
	if err != nil {
		return 0
	}
	return j.Job.ID
}

// jobOfGuest is the same of a process of a real guest's.
func jobOfGuest(pid int, state string) int64 {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, f := range files {
		l, _ := os.Readlink(f)
		rest, ok := strings.CutPrefix(l, filepath.Join(state, "jobs")+"/")
		if name, _, _ := strings.Cut(rest, "/"); ok {
			if m := guestRE.FindStringSubmatch(name); m != nil {
				id, _ := strconv.ParseInt(m[1], 10, 64)
				return id
			}
		}
	}
	return 0
}

var guestRE = regexp.MustCompile(`^(?:[a-z]+-)*(\d+)`)

// requeue gives out again what was lost on its way to vk-gitlab, as GitLab does
// with a job that nobody commits to; twice forgotten is not on its way any more.
func (c *chaos) requeue() {
	now := map[int64]bool{}
	again := c.f.GitLab.Forgotten(func(id int64) bool {
		held := c.held(id)
		if !held {
			now[id] = true
		}
		return held || !c.forgotten[id]
	})
	for _, id := range again {
		delete(now, id)
	}
	c.forgotten = now
	c.did["given out again"] += len(again)
}

// held says whether vk-gitlab has a job on its disk.
func (c *chaos) held(id int64) bool {
	b, err := os.ReadFile(filepath.Join(c.f.Dir, "relay", "demo.json"))
	if err != nil {
		return false
	}
	var f struct {
		Jobs []struct {
			ID int64 `json:"job_id"`
		}
	}
	if err := json.Unmarshal(b, &f); err != nil {
		c.t.Errorf("vk-gitlab's state file: %v", err)
	}
	return slices.ContainsFunc(f.Jobs, func(j struct {
		ID int64 `json:"job_id"`
	}) bool {
		return j.ID == id
	})
}

// calm waits until every job has an end in GitLab.
func (c *chaos) calm() {
	deadline := time.Now().Add(10 * time.Minute)
	for {
		var open []int64
		for id := range c.jobs {
			if j, _ := c.f.GitLab.Job(id); j.Final == nil && j.Status != "canceled" {
				open = append(open, id)
			}
		}
		if len(open) == 0 {
			return
		}
		if time.Now().After(deadline) {
			slices.Sort(open)
			for _, id := range open {
				j, _ := c.f.GitLab.Job(id)
				c.t.Errorf("job %d has no end: it is %s, vk-gitlab has it: %v, what befell it: %q, its trace:\n%s", id, j.Status, c.held(id), c.jobs[id].why, j.Trace)
			}
			return
		}
		time.Sleep(time.Second)
		c.requeue()
	}
}

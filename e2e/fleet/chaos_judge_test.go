package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/host"
)

// judge looks at what GitLab has of every job.
func (c *chaos) judge() {
	finals := map[int64]map[string]bool{}
	for _, r := range c.f.GitLab.Requests() {
		if r.Endpoint != "put_final" {
			continue
		}
		var e ended
		if err := json.Unmarshal(r.Body, &e); err != nil {
			c.t.Error(err)
		}
		if finals[r.JobID] == nil {
			finals[r.JobID] = map[string]bool{}
		}
		finals[r.JobID][fmt.Sprintf("%s %s %d", e.State, e.Reason, e.ExitCode)] = true
	}
	count := map[string]int{}
	for _, j := range c.jobs {
		got, _ := c.f.GitLab.Job(j.id)
		if len(finals[j.id]) > 1 {
			c.t.Errorf("job %d was told to have ended in more than one way: %v (%q)", j.id, finals[j.id], j.why)
		}
		end, err := j.judge(got)
		count[end]++
		if j.stage != "" && end == "as it ends" {
			count[j.stage+", as it ends"]++
		}
		if err != nil {
			c.t.Errorf("job %d (%d lines, exit %d; what befell it: %q) is %s: %v; it ended as %s; its trace:\n%s", j.id, j.lines, j.exit, j.why, got.Status, err, got.Final, got.Trace)
		}
	}
	c.t.Logf("ends: %v", count)
	if count["as it ends"] == 0 {
		c.t.Error("no job came to its own end")
	}
}

// ended is a last update.
type ended struct {
	State    string
	Reason   string `json:"failure_reason"`
	ExitCode int    `json:"exit_code"`
	Output   struct {
		Checksum string
		Bytesize int
	}
}

var (
	chaosStampRE = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT[\d:.]+Z \d\d[OE][ +]`)
	chaosLineRE  = regexp.MustCompile(`(?m)^line (\d+) (\d+) (\S+) x*$`)
)

func (j *chaosJob) judge(got gitlabtest.Job) (end string, err error) {
	trace := string(got.Trace)
	if strings.Contains(trace, j.secret) || strings.Contains(trace, j.token) {
		return "bad", fmt.Errorf("its trace shows a secret")
	}
	plain := chaosStampRE.ReplaceAllString(trace, "")
	lines := chaosLineRE.FindAllStringSubmatch(plain, -1)
	for i, m := range lines {
		if m[1] != fmt.Sprint(j.id) || m[2] != fmt.Sprint(i+1) || m[3] != "[MASKED]" {
			return "bad", fmt.Errorf("line %d of its trace is %q", i+1, m[0])
		}
	}
	var e ended
	if got.Final != nil {
		if err := json.Unmarshal(got.Final, &e); err != nil {
			return "bad", err
		}
	}
	if err := j.artifacts(got); err != nil {
		return "bad", err
	}
	canceled := got.Status == "canceled"
	if !canceled && (e.Output.Checksum != gitlabtest.Checksum(got.Trace) || e.Output.Bytesize != len(got.Trace)) {
		return "bad", fmt.Errorf("it was told to have %d bytes of sum %s, and %d of %s came", e.Output.Bytesize, e.Output.Checksum, len(got.Trace), gitlabtest.Checksum(got.Trace))
	}
	state, status := "success", "success"
	if j.exit != 0 {
		state, status = "failed", "failed"
	}
	whole := len(lines) == j.lines && strings.Count(plain, fmt.Sprintf("\nafter %d %s\n", j.id, status)) == 1
	switch {
	case !canceled && e.State == state && e.ExitCode == j.exit && whole && (state == "success" || e.Reason == "script_failure"):
		return "as it ends", nil
	case len(j.why) == 0:
		return "bad", fmt.Errorf("it was to be %s, exit status %d, with %d lines and after_script; it has %d lines", state, j.exit, j.lines, len(lines))
	case canceled:
		return "canceled", nil
	case e.State == "failed" && (e.Reason == "runner_system_failure" || e.Reason == "runner_interrupted"):
		return e.Reason, nil
	case e.State == "failed" && e.Reason == "runner_external_dependency_failure" && j.transfers():
		return e.Reason, nil
	case e.State == "failed" && e.ExitCode == exitNoService && j.service:
		return "without its service", nil
	}
	return "bad", fmt.Errorf("no end that a mishap makes")
}

// nothingLeft ends the fleet in order, once all of it is at rest.
func (c *chaos) nothingLeft() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	h := &host.Host{State: c.state}
	stopped := false
	rest := func() string {
		if b, err := os.ReadFile(filepath.Join(c.f.Dir, "relay", "demo.json")); err == nil && !bytes.Contains(b, []byte(`"jobs":[]`)) {
			return "vk-gitlab's state file holds jobs"
		}
		if ents, _ := os.ReadDir(filepath.Join(c.state, "node", "jobs")); len(ents) > 0 {
			return fmt.Sprintf("the node's journal holds %v", ents)
		}
		if ents, _ := os.ReadDir(guestsDir(c.state)); len(ents) > 0 {
			return fmt.Sprintf("there are guests: %v", ents)
		}
		out, err := c.f.Hub(ctx, "jobs", "--json")
		if err != nil {
			return err.Error()
		}
		for _, w := range []string{`"running"`, `"queued"`, `"starting"`} {
			if strings.Contains(out, w) {
				return "the hub has jobs that are " + w
			}
		}
		// While it runs, vk-gitlab has a reservation for each request for a job.
		if !stopped {
			stopped = true
			if err := c.f.Signal("vk-gitlab", syscall.SIGTERM); err != nil {
				return err.Error()
			}
		}
		if claims := h.Claims(); len(claims) > 0 {
			return fmt.Sprintf("reservations are left: %v", claims)
		}
		return ""
	}
	for why := rest(); why != ""; why = rest() {
		if ctx.Err() != nil {
			c.t.Error(why)
			break
		}
		time.Sleep(300 * time.Millisecond)
	}
	if err := c.f.Down(); err != nil {
		c.t.Error(err)
	}
	if left := h.Left(ctx); len(left) > 0 {
		c.t.Errorf("left: %v", left)
	}
	c.files()
}

// kept are the files that a fleet at rest has, below its directory.
var kept = regexp.MustCompile(`^(config\.toml|gitlab\.toml|hub\.toml|runner\.token|web\.tar|stand-in-vk|hub/(admin\.sock|hub\.sqlite(\.lock)?)|` +
	`relay/(demo\.json|lock|system_id|hub/(enrollment\.json|key\.pk8))|node/node/(enrollment\.json|key|lock|state\.json)|node/(boot|images|kernels|vmm|templates)(/.*)?|` +
	`node/(checkouts|mirrors)/.*|node/jobs/\.(lock|sweep)|node/local/chaos-web/(bundle\.json|root\.ext4)|` +
	`node/admit/(\.lock|\d+(-[0-9a-f]{8})?|reservation-[0-9a-f]+)|` + // claims that nobody holds; the next admission removes them
	`node/(history|sites)/(\.lock|42-group-project/job-[0-9a-f]+(\.json)?)|node/egress/\d+-group-project-[0-9a-f]+\.json|node/atop/(\.swept|\d{4}-\d\d-\d\d/.*))$`)

// files looks for what a job, or a write that was cut short, has left on disk.
func (c *chaos) files() {
	err := filepath.WalkDir(c.f.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(c.f.Dir, path)
		switch {
		case d.IsDir() && (rel == "repos" || rel == "cache" || rel == "host"):
			return fs.SkipDir
		case !d.IsDir() && !kept.MatchString(rel):
			c.t.Errorf("the file %s is left", rel)
		}
		return nil
	})
	if err != nil {
		c.t.Error(err)
	}
}

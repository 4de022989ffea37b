package relay_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/wire"
	"virtkit/e2e/gitlabtest"
)

// finish accepts a job, lets it print and ends it.
func finish(j *relaytest.Job, output string, r wire.JobResult) {
	j.Accept()
	j.Write([]byte(output))
	j.Finish(r)
}

func code(n int) *int { return &n }

// A job goes from GitLab to the hub and back, on its reservation, and nothing
// of it is left.
func TestOneJob(t *testing.T) {
	w := newWorld(t, 1)
	w.add(response(7))
	stop := w.run()
	j := w.next(0)
	if j.Submission.Reservation == "" || j.Submission.Placement.Pool != "ci" || j.Submission.PlaceWithinSecs != dispatch.DefaultPlace {
		t.Errorf("submitted as %+v", j.Submission)
	}
	spec, err := job.Parse(j.Submission.Spec)
	if err != nil {
		t.Fatal(err)
	}
	if spec.Job.RunnerID != 7 || spec.Job.RunnerName != "ci" || spec.ServerURL != w.url || spec.Job.CorrelationID == "" || !strings.HasPrefix(spec.Job.SystemID, "r_") {
		t.Errorf("%+v", spec.Job)
	}
	if w.held() != 1 {
		t.Errorf("%d jobs are recorded", w.held())
	}
	finish(j, "hello\nworld", wire.JobResult{Failure: "script", ExitCode: code(3)})
	got, f := w.ended(7)
	if string(got.Trace) != "hello\nworld" || f.State != "failed" || f.FailureReason != "script_failure" || f.ExitCode != 3 {
		t.Errorf("trace %q, %+v", got.Trace, f)
	}
	w.until("the job is settled", j.Settled)
	// GitLab is asked again, with the next reservation.
	w.until("GitLab is asked with a reservation", func() bool { return w.hub.Held() == 1 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if w.held() != 0 || w.hub.Held() != 0 {
		t.Errorf("left: %d records, %d reservations", w.held(), w.hub.Held())
	}
	conns := map[string]bool{}
	for _, r := range w.hub.Requests() {
		if conns[r.Conn] {
			t.Errorf("two requests over one connection: %s %s", r.Method, r.Path)
		}
		conns[r.Conn] = true
	}
	inv, beats, states, _ := w.hub.Session()
	if inv == nil || inv.ServerURL != w.url || len(inv.Runners) != 1 || inv.Runners[0].ID != 7 || !inv.Runners[0].Verified || inv.ServerVersion != "19.4.0" || beats == 0 {
		t.Errorf("inventory %+v, %d beats", inv, beats)
	}
	polled := false
	for _, s := range states {
		polled = polled || s.Runner == "ci" && s.State == dispatch.Polling
	}
	if !polled {
		t.Errorf("states: %+v", states)
	}
}

// What is asked of GitLab, and in which order, when the job does not run as it
// should.
func TestEnds(t *testing.T) {
	const err = "\x1b[31;1mERROR: "
	ffOff := `"variables":[{"key":"FF_TIMESTAMPS","value":"false"}]`
	for name, c := range map[string]struct {
		job       string // fields of the response
		node      func(*relaytest.Job)
		faults    []*relaytest.Fault
		rules     []gitlabtest.Rule
		commits   bool
		trace     string // all of it, without timestamps
		reason    string
		exit      int
		submitted bool
	}{
		"no capacity": {job: ffOff, submitted: true, node: func(j *relaytest.Job) { j.Finish(wire.JobResult{Failure: "no_capacity"}) },
			trace: err + "Job failed (system failure): no node of pool ci took the job within 300 seconds\x1b[0;m\n", reason: "runner_system_failure"},
		"lost before it began": {job: ffOff, submitted: true, node: func(j *relaytest.Job) { j.Finish(wire.JobResult{Failure: "lost"}) },
			trace: err + "Job failed (system failure): the fleet hub was restarted before a node had taken the job\x1b[0;m\n", reason: "runner_system_failure"},
		"lost": {job: ffOff, submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "half a li", wire.JobResult{Failure: "lost"}) },
			trace: "half a li\n" + err + "Job failed (system failure): the node that ran the job was lost\x1b[0;m\n", reason: "runner_system_failure"},
		"image pull": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "no such image\n", wire.JobResult{Failure: "image_pull"}) },
			trace: "no such image\n", reason: "image_pull_failure"},
		"image pull, older GitLab": {job: `"features":{}`, submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "image_pull"}) },
			trace: "x\n", reason: "runner_system_failure"},
		"external, older GitLab": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "external_dependency"}) },
			trace: "x\n", reason: "runner_system_failure"},
		"timeout": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "timeout"}) }, trace: "x\n", reason: "job_execution_timeout"},
		"interrupted": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "interrupted"}) },
			trace: "x\n", reason: "unknown_failure"},
		"a class of a newer node": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "novel"}) },
			trace: "x\n", reason: "runner_system_failure"},
		"success":   {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{}) }, trace: "x\n"},
		"no output": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "", wire.JobResult{}) }},
		"killed": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{Failure: "script", ExitCode: code(-1)}) },
			trace: "x\n", reason: "script_failure", exit: -1},
		"pending project": {job: ffOff, faults: []*relaytest.Fault{{On: "POST /v1/jobs", Times: 1, Status: 403, Failure: dispatch.Failure{Code: dispatch.ApprovalPending}}},
			trace:  err + "project group/project (ID 42) is waiting for approval on the fleet hub HUB.\nRetry this job once an operator has approved it (Connections > GitLab > Pending).\x1b[0;m\n",
			reason: "script_failure"},
		"rejected project, newer GitLab": {job: ffOff + `,"features":{"failure_reasons":["runner_configuration_error"]}`,
			faults: []*relaytest.Fault{{On: "POST /v1/jobs", Times: 1, Status: 403, Failure: dispatch.Failure{Code: dispatch.ProjectRejected}}},
			trace:  err + "project group/project (ID 42), or its GitLab server GITLAB, was rejected on the fleet hub HUB.\nAn operator of the hub can approve it (Connections > GitLab).\x1b[0;m\n",
			reason: "runner_configuration_error"},
		"invalid": {job: ffOff, faults: []*relaytest.Fault{{On: "POST /v1/jobs", Times: 1, Status: 400, Failure: dispatch.Failure{Code: dispatch.Invalid, Text: "a job without a project"}}},
			trace: err + "Job failed (system failure): the fleet hub HUB does not take the job: invalid: a job without a project\x1b[0;m\n", reason: "runner_system_failure"},
		"a code that is not known": {job: ffOff, faults: []*relaytest.Fault{{On: "POST /v1/jobs", Times: 1, Status: 418, Failure: dispatch.Failure{Code: "teapot", Text: "no"}}},
			trace: err + "Job failed (system failure): the fleet hub HUB does not take the job: other: no\x1b[0;m\n", reason: "runner_system_failure"},
		"secrets": {job: ffOff + `,"secrets":{"DB":{"vault":{}}}`,
			trace: err + "the job uses secrets: of an external provider, which this runner does not support. Use CI/CD variables instead.\x1b[0;m\n", reason: "script_failure"},
		"run": {job: ffOff + `,"run":"[{\"name\":\"x\"}]"`,
			trace: err + "the job uses run:, which this runner does not support. Use script: instead.\x1b[0;m\n", reason: "script_failure"},
		"not decodable": {job: `"steps":7`, trace: err + "Job failed (system failure): the job that GitLab sent cannot be decoded: steps: a JSON number, expected []struct", reason: "runner_system_failure"},
		"executor options": {job: `"image":{"name":"a","executor_opts":{"docker":{"platform":"p","bogus":1}}}`,
			trace: "Unsupported \"image\" options [bogus] for \"docker executor\"; supported options are [platform user]\n", reason: "runner_system_failure", exit: 3},
		"too large": {job: ffOff + `,"steps":[{"name":"script","script":["` + strings.Repeat("x", 600<<10) + `"]}]`,
			trace:  err + "the job is too large for the fleet: its scripts and variables are more than 512 KiB. Keep long scripts in the repository, and large values in files.\x1b[0;m\n",
			reason: "script_failure"},
		"the hub forgets": {job: ffOff, submitted: true, commits: true, node: func(j *relaytest.Job) { j.Forget() },
			trace: err + "Job failed (system failure): the fleet hub does not know the job any more: not_found: there is no such job\x1b[0;m\n", reason: "runner_system_failure"},
		"hub in trouble": {submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{}) },
			faults: []*relaytest.Fault{
				{On: "POST /v1/capacity", Times: 2, Status: 503, Failure: dispatch.Failure{Code: dispatch.Unavailable, RetryAfterSecs: 1}},
				{On: "POST /v1/reservations", Times: 1, Status: 503, Failure: dispatch.Failure{Code: dispatch.NoCapacity, RetryAfterSecs: 5}},
				{On: "POST /v1/jobs", Times: 1, Apply: true}, // taken, and the answer lost
				{On: "POST /v1/jobs", Times: 1, Status: 500, Failure: dispatch.Failure{Code: dispatch.Internal}},
				{On: "GET /v1/jobs", Times: 3},
				{On: "GET /v1/jobs", Times: 1, Status: 502, Failure: dispatch.Failure{}},
			}, trace: "x\n"},
		"canceled when it is accepted": {submitted: true, commits: true, rules: []gitlabtest.Rule{{On: "put_running", JobStatus: "canceling"}},
			node: func(j *relaytest.Job) { j.Accept(); j.Write([]byte("never seen")) }, reason: "job_canceled"},
		"policy": {job: `"policy_options":{"execution_policy_job":true,"policy_name":"scan"}`, submitted: true, commits: true, node: func(j *relaytest.Job) { finish(j, "x\n", wire.JobResult{}) },
			trace: "\x1b[0KJob triggered by policy \"scan\".\x1b[0;m\n\x1b[0KVariables defined in the policy take precedence over matching user-defined CI/CD variables for this job.\x1b[0;m\nx\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.hub.Misbehave(c.faults...)
			w.gitlab.Misbehave(c.rules...)
			var more []string
			if c.job != "" {
				more = []string{c.job}
			}
			w.add(response(7, more...))
			w.run()
			if c.submitted {
				j := w.next(0)
				c.node(j)
				if c.reason == "job_canceled" {
					w.until("the job is canceled", func() bool { return j.View().Cancel == wire.CancelImmediate })
					j.Finish(wire.JobResult{Failure: "canceled"})
				}
			}
			got, f := w.ended(7)
			trace := unstamped(string(got.Trace))
			want := strings.NewReplacer("HUB", w.hub.URL, "GITLAB", w.url).Replace(c.trace)
			if name == "not decodable" {
				trace = trace[:min(len(trace), len(want))]
			}
			if trace != want || f.FailureReason != c.reason || f.ExitCode != c.exit || (f.State == "success") != (c.reason == "") {
				t.Errorf("%+v, trace\n%q, expected %s %d\n%q", f, trace, c.reason, c.exit, want)
			}
			if f.Output.Checksum != gitlabtest.Checksum(got.Trace) || f.Output.Bytesize != int64(len(got.Trace)) {
				t.Errorf("%+v with %d bytes", f.Output, len(got.Trace))
			}
			commits := 0
			for _, r := range w.gitlab.Requests() {
				if r.Endpoint == "put_running" {
					commits++
				}
			}
			if want := map[bool]int{true: 1}[c.commits]; commits != want {
				t.Errorf("committed %d times, expected %d", commits, want)
			}
			w.until("nothing is left", func() bool { return w.held() == 0 })
			if c.submitted && name != "the hub forgets" && !w.hub.Jobs()[0].Settled() {
				t.Error("the job is not settled")
			}
			if n := len(w.hub.Jobs()); n != map[bool]int{true: 1}[c.submitted] {
				t.Errorf("%d submissions", n)
			}
		})
	}
}

// unstamped takes the timestamps of the relay's own lines off.
func unstamped(s string) string {
	var out []string
	for _, l := range strings.SplitAfter(s, "\n") {
		if len(l) > 32 && l[4] == '-' && l[10] == 'T' && l[26] == 'Z' {
			l = l[32:]
		}
		out = append(out, l)
	}
	return strings.Join(out, "")
}

// The relay's own lines have a timestamp of stream 00 unless the job has none.
func TestTimestamps(t *testing.T) {
	w := newWorld(t, 1)
	w.add(response(7, `"secrets":{"DB":{}}`))
	w.run()
	got, _ := w.ended(7)
	line := string(got.Trace)
	if len(line) < 40 || !strings.HasPrefix(line[26:], "Z 00O \x1b[31;1mERROR: the job uses") {
		t.Errorf("%q", line)
	}
}

// No job is asked for without room, without a reservation, or of a server that
// the hub has not approved.
func TestCapacityFirst(t *testing.T) {
	w := newWorld(t, 0)
	w.hub.SetServer(dispatch.ServerStatus{Status: dispatch.Pending})
	var asked atomic.Int32
	w.before = func(r *http.Request) {
		if r.URL.Path == "/api/v4/jobs/request" {
			asked.Add(1)
			if w.hub.Held() == 0 {
				t.Error("a job is asked for without a reservation")
			}
		}
	}
	w.add(response(7))
	w.run()
	state := func(want dispatch.RunnerStateName) func() bool {
		return func() bool {
			_, _, states, _ := w.hub.Session()
			return len(states) > 0 && states[len(states)-1].State == want
		}
	}
	w.until("the server is pending", state(dispatch.ServerPending))
	if asked.Load() > 0 || len(w.hub.Requests()) > 1 {
		t.Errorf("a pending server: %d requests for a job, to the hub %+v", asked.Load(), w.hub.Requests())
	}
	w.hub.SetServer(dispatch.ServerStatus{Status: dispatch.Approved, Name: "gl"})
	w.until("there is no room", state(dispatch.WaitingCapacity))
	if asked.Load() > 0 {
		t.Error("a job is asked for without room")
	}
	w.hub.SetRoom(1)
	finish(w.next(0), "x\n", wire.JobResult{})
	w.ended(7)
	w.hub.SetServer(dispatch.ServerStatus{Status: dispatch.Rebound, Bound: "https://other"})
	w.until("the server is not approved", state(dispatch.ServerPending))
	w.until("the reservation is given back", func() bool { return w.hub.Held() == 0 })
}

// A reservation that ends while GitLab is asked leaves the job without one.
func TestReservationGone(t *testing.T) {
	w := newWorld(t, 1)
	w.opt.Pace.Lease = 1 // renewed three times a second
	held := make(chan struct{})
	var once atomic.Bool
	w.before = func(r *http.Request) {
		if r.URL.Path == "/api/v4/jobs/request" && once.CompareAndSwap(false, true) {
			w.hub.Lapse()
			w.hub.Until(within(t), "the renewal is refused", func() bool {
				for _, q := range w.hub.Requests() {
					if strings.HasSuffix(q.Path, "/renew") && q.Status == http.StatusGone {
						return true
					}
				}
				return false
			})
			w.add(response(7))
			close(held)
		}
	}
	w.run()
	<-held
	j := w.next(0)
	if j.Submission.Reservation != "" {
		t.Error("the job is submitted on a reservation that is gone")
	}
	finish(j, "x\n", wire.JobResult{})
	w.ended(7)
}

// A runner that GitLab refuses three times is left alone, and the hub told.
func TestTokenRefused(t *testing.T) {
	for on, want := range map[string]int{"verify": 0, "request": 3} {
		w := newWorld(t, 1)
		w.gitlab.Misbehave(gitlabtest.Rule{On: on, Status: 403})
		w.run()
		w.until(on+" is refused", func() bool {
			_, _, states, _ := w.hub.Session()
			return len(states) > 0 && states[len(states)-1].State == dispatch.TokenRefused
		})
		w.until("the reservation is given back", func() bool { return w.hub.Held() == 0 })
		n := 0
		for _, r := range w.gitlab.Requests() {
			if r.Endpoint == "request" {
				n++
			}
		}
		if n != want {
			t.Errorf("%s: GitLab was asked %d times, expected %d", on, n, want)
		}
	}
}

// A runner that GitLab does not answer asks again by and by.
func TestUnhealthy(t *testing.T) {
	w := newWorld(t, 1)
	w.gitlab.Misbehave(gitlabtest.Rule{On: "request", To: 4, Status: 501}) // not tried again by the transport
	w.add(response(7))
	w.run()
	finish(w.next(0), "x\n", wire.JobResult{})
	w.ended(7)
	w = newWorld(t, 1)
	w.gitlab.Misbehave(gitlabtest.Rule{On: "request", Status: 501})
	w.run()
	w.until("the hub knows", func() bool {
		_, _, states, _ := w.hub.Session()
		return len(states) > 0 && states[len(states)-1].State == dispatch.Unhealthy
	})
}

// concurrent bounds all runners' jobs and requests together, limit a runner's.
func TestSlots(t *testing.T) {
	for _, c := range []struct{ concurrent, limit, perRunner int }{{concurrent: 2, perRunner: 4}, {limit: 2, perRunner: 4}} {
		w := newWorld(t, 9)
		w.conf.Concurrent = c.concurrent
		w.conf.Runners[0].Limit, w.conf.Runners[0].RequestConcurrency = c.limit, c.perRunner
		for i := range int64(4) {
			w.add(response(10 + i))
		}
		w.run()
		a, b := w.next(0), w.next(1)
		if n := w.hub.Held(); n != 0 {
			t.Errorf("%+v: with two jobs there are %d reservations", c, n)
		}
		finish(a, "x\n", wire.JobResult{})
		w.next(2)
		if n := len(w.hub.Jobs()); n != 3 {
			t.Errorf("%+v: %d jobs", c, n)
		}
		finish(b, "x\n", wire.JobResult{})
		w.next(3)
	}
}

package relay_test

import (
	"fmt"
	"net/http"
	"testing"

	"virtkit/core/fleet/wire"
	"virtkit/e2e/gitlabtest"
)

// What GitLab's answers to the requests about a job make of it: none that says
// "not now" loses a byte or an outcome, each that says "no more" ends the job.
func TestAnswers(t *testing.T) {
	type end int
	const (
		delivered end = iota // whole, as the node ended it
		dropped              // nothing is told any more
		aborted              // told as cancelled
		untraced             // told as the node ended it, without its trace
	)
	no := map[string]string{"Retry-After": "0"}
	for _, c := range []struct {
		rule gitlabtest.Rule
		end  end
	}{
		{gitlabtest.Rule{On: "request", To: 2, Status: 500, Headers: no}, delivered},
		{gitlabtest.Rule{On: "request", To: 2, Status: 503, Headers: no}, delivered},
		{gitlabtest.Rule{On: "request", To: 2, Status: 410}, delivered},
		{gitlabtest.Rule{On: "request", To: 2, Status: 403}, delivered}, // a third would stop the asking
		{gitlabtest.Rule{On: "request", To: 4, Status: 409}, delivered},
		{gitlabtest.Rule{On: "put_running", Nth: 1, Status: 500, Headers: no}, delivered},
		{gitlabtest.Rule{On: "put_running", To: 6, Status: 503, Headers: no}, delivered},
		{gitlabtest.Rule{On: "put_running", Nth: 1, Status: 410}, delivered},
		{gitlabtest.Rule{On: "put_running", Nth: 1, Status: 403}, dropped},
		{gitlabtest.Rule{On: "put_running", Nth: 1, Status: 404}, dropped},
		{gitlabtest.Rule{On: "patch", To: 7, Status: 500, Headers: no}, delivered}, // more than the transport tries
		{gitlabtest.Rule{On: "patch", To: 7, Status: 503, Headers: no}, delivered},
		{gitlabtest.Rule{On: "patch", To: 7, Status: 503, Headers: no, Apply: true}, delivered}, // taken, and said not to be
		{gitlabtest.Rule{On: "patch", To: 3, Status: 410}, delivered},
		{gitlabtest.Rule{On: "patch", Status: 403}, aborted},
		{gitlabtest.Rule{On: "patch", Status: 410}, untraced},
		{gitlabtest.Rule{On: "patch", Status: 400}, untraced},
		{gitlabtest.Rule{On: "put_final", To: 6, Status: 500, Headers: no}, delivered},
		{gitlabtest.Rule{On: "put_final", To: 6, Status: 503, Headers: no, Apply: true}, delivered},
		{gitlabtest.Rule{On: "put_final", To: 2, Status: 410}, delivered},
		{gitlabtest.Rule{On: "put_final", To: 2, Status: 202}, delivered},
		{gitlabtest.Rule{On: "put_final", To: 2, Status: 412}, delivered},
		{gitlabtest.Rule{On: "put_final", Status: 403}, dropped},
		{gitlabtest.Rule{On: "put_final", Status: 404}, dropped},
	} {
		t.Run(fmt.Sprintf("%s %d %v", c.rule.On, c.rule.Status, c.rule.Apply), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.gitlab.Misbehave(c.rule)
			w.add(response(7))
			w.run()
			j := w.next(0)
			j.Accept()
			j.Write([]byte("one\n"))
			if c.rule.On == "patch" {
				w.gitlabUntil("the trace is refused", func() bool { return asked(w, "patch") >= max(c.rule.To, 1) })
			}
			if c.end == aborted || c.end == dropped && c.rule.On == "put_running" {
				w.until("the hub is asked to end the job", func() bool { return j.View().Cancel == wire.CancelImmediate })
				j.Finish(wire.JobResult{Failure: "canceled"})
			} else {
				j.Write([]byte("two\n"))
				j.Finish(wire.JobResult{Failure: "script", ExitCode: code(3)})
			}
			w.until("the job is settled", j.Settled)
			w.until("nothing is recorded", func() bool { return w.held() == 0 })
			got, _ := w.gitlab.Job(7)
			switch c.end {
			case delivered:
				_, f := w.ended(7)
				if string(got.Trace) != "one\ntwo\n" || f.State != "failed" || f.ExitCode != 3 || f.Output.Checksum != gitlabtest.Checksum(got.Trace) {
					t.Errorf("%+v, trace %q", f, got.Trace)
				}
			case untraced:
				if _, f := w.ended(7); f.State != "failed" || f.ExitCode != 3 || len(got.Trace) != 0 {
					t.Errorf("%+v, trace %q", f, got.Trace)
				}
			case aborted:
				if _, f := w.ended(7); f.State != "failed" || f.FailureReason != "unknown_failure" || f.ExitCode != 0 {
					t.Errorf("%+v", f)
				}
			case dropped:
				if n := asked(w, "put_final"); got.Final != nil || n > 1 {
					t.Errorf("told of its end %d times: %s", n, got.Final)
				}
			}
		})
	}
}

// asked is how often GitLab was asked for something.
func asked(w *world, endpoint string) (n int) {
	for _, r := range w.gitlab.Requests() {
		if r.Endpoint == endpoint {
			n++
		}
	}
	return n
}

// A job that GitLab gives out again, because nobody has committed to it yet, is
// not taken twice.
func TestGivenOutAgain(t *testing.T) {
	w := newWorld(t, 2)
	w.add(response(7))
	w.conf.Runners[0].RequestConcurrency = 2
	w.run()
	j := w.next(0) // and no node has it yet
	w.gitlab.Forgotten(func(int64) bool { return false })
	w.gitlabUntil("it is given out once more", func() bool {
		n := 0
		for _, r := range w.gitlab.Requests() {
			if r.Status == http.StatusCreated {
				n++
			}
		}
		return n == 2
	})
	w.add(response(8)) // the reservation of the second giving serves another
	next := w.next(1)
	finish(next, "y\n", wire.JobResult{})
	finish(j, "x\n", wire.JobResult{})
	w.ended(8)
	got, f := w.ended(7)
	if string(got.Trace) != "x\n" || f.State != "success" {
		t.Errorf("%+v, trace %q", f, got.Trace)
	}
	if n := len(w.hub.Jobs()); n != 2 || w.held() > 2 {
		t.Errorf("%d submissions, %d records", n, w.held())
	}
	for _, id := range []int64{7, 8} {
		if n := finals(w, id); n != 1 {
			t.Errorf("job %d: %d last updates", id, n)
		}
	}
}

func finals(w *world, id int64) (n int) {
	for _, r := range w.gitlab.Requests() {
		if r.Endpoint == "put_final" && r.JobID == id {
			n++
		}
	}
	return n
}

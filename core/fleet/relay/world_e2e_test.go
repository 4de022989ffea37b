package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/gitlab"
	"virtkit/core/logx"
	"virtkit/e2e/gitlabtest"
)

// fast is a pace for tests: hours are minutes, and a lease is never long.
func fast() relay.Pace {
	p := relay.DefaultPace(20 * time.Millisecond)
	p.HubMin, p.HubMax, p.LongPoll = 10*time.Millisecond, 200*time.Millisecond, 2
	p.Again = 50 * time.Millisecond
	p.Follow = gitlab.Timing{Interval: 30 * time.Millisecond, KeepAlive: time.Hour, Retry: 10 * time.Millisecond, Backoff: 10 * time.Millisecond, MaxWait: time.Second, Finals: 4}
	return p
}

// world is a stand-in GitLab, a stand-in hub and what a relay between them needs.
type world struct {
	t      *testing.T
	gitlab *gitlabtest.Server
	url    string // GitLab's
	hub    *relaytest.Hub
	conf   *relayconf.Config
	opt    relay.Options
	// before is called for each request to GitLab's API before it is answered.
	before func(*http.Request)
}

const (
	runnerToken = "glrt-relaytoken0123456789"
	jobToken    = "glcbt-64_the-token-of-the-job"
)

func newWorld(t *testing.T, room int) *world {
	t.Helper()
	w := &world{t: t, gitlab: gitlabtest.New(), hub: relaytest.New(t, room)}
	ts := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if w.before != nil {
			w.before(r)
		}
		w.gitlab.ServeHTTP(rw, r)
	}))
	t.Cleanup(ts.Close)
	w.url = ts.URL
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	w.write(token, runnerToken+"\n")
	w.conf = &relayconf.Config{StateDir: filepath.Join(dir, "state"), ShutdownTimeout: 60, CheckInterval: 1, GitLab: relayconf.GitLab{URL: w.url},
		Runners: []relayconf.Runner{{Name: "ci", TokenFile: token, Pool: "ci", Envelope: relayconf.Envelope{Memory: 1 << 30, CPUs: 1}, RequestConcurrency: 1, OutputLimit: 4 << 20}}}
	pace := fast()
	w.opt = relay.Options{Conf: w.conf, Info: relay.Ours("1.2.3", "abc", "linux", "amd64"), VK: "1.2.3", Log: logx.ForTest(t), Pace: &pace}
	w.join()
	return w
}

func (w *world) write(file, text string) {
	w.t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) join() {
	w.t.Helper()
	_, err := relay.Join(w.t.Context(), relay.JoinOptions{StateDir: w.conf.StateDir, Hub: w.hub.URL, CA: w.hub.CA, Token: w.hub.Token(), Hostname: "host", VK: "1.2.3"})
	if err != nil {
		w.t.Fatal(err)
	}
}

// run starts the relay. stop ends it in order and waits; it is called at the
// test's end in any case.
func (w *world) run() (stop func() error) {
	w.t.Helper()
	d, err := relay.Open(w.t.Context(), w.opt)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() { over <- d.Run(ctx) }()
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		err := <-over
		d.Close()
		return err
	}
	w.t.Cleanup(func() {
		w.conf.ShutdownTimeout = 0
		stop()
	})
	return stop
}

// within is the time that a condition of a test may take on a busy host.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// next waits for the nth submission.
func (w *world) next(n int) *relaytest.Job {
	w.t.Helper()
	j, err := w.hub.Next(within(w.t), n)
	if err != nil {
		w.t.Fatal(err)
	}
	return j
}

// until waits for something of the hub's.
func (w *world) until(what string, f func() bool) {
	w.t.Helper()
	if err := w.hub.Until(within(w.t), what, f); err != nil {
		w.t.Fatal(err)
	}
}

// gitlabUntil waits for something of GitLab's.
func (w *world) gitlabUntil(what string, f func() bool) {
	w.t.Helper()
	ctx := within(w.t)
	for {
		changed := w.gitlab.Changed()
		if f() {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			w.t.Fatalf("waiting until %s: %s", what, gitlabtest.Sequence(w.gitlab.Requests()))
		}
	}
}

// ended waits for the last update of a job.
func (w *world) ended(id int64) (gitlabtest.Job, final) {
	w.t.Helper()
	w.gitlabUntil(fmt.Sprintf("job %d has ended", id), func() bool { j, _ := w.gitlab.Job(id); return j.Final != nil })
	j, _ := w.gitlab.Job(id)
	var f final
	if err := json.Unmarshal(j.Final, &f); err != nil {
		w.t.Fatal(err)
	}
	return j, f
}

type final struct {
	State         string
	FailureReason string `json:"failure_reason"`
	ExitCode      int    `json:"exit_code"`
	Output        struct {
		Checksum string
		Bytesize int64
	}
}

func (w *world) add(response string) {
	w.t.Helper()
	if _, err := w.gitlab.AddJob([]byte(response)); err != nil {
		w.t.Fatal(err)
	}
}

// response is GitLab's answer for a job; more are further top-level fields.
func response(id int64, more ...string) string {
	fields := []string{fmt.Sprintf(`"id":%d,"token":%q`, id, jobToken)}
	have := strings.Join(more, ",")
	for _, f := range []string{
		`"job_info":{"name":"job","stage":"test","project_id":42,"project_name":"project","project_full_path":"group/project"}`,
		`"git_info":{"repo_url":"https://gitlab-ci-token:` + jobToken + `@gitlab.example.com/group/project.git","ref":"main","sha":"f400d9d34482185362e87552bcc47c5e5a468e2c","ref_type":"branch","refspecs":["+refs/heads/main:refs/remotes/origin/main"],"depth":20}`,
		`"runner_info":{"timeout":3600}`,
		`"steps":[{"name":"script","script":["make"],"timeout":3600,"when":"on_success"}]`,
		`"variables":[{"key":"CI_SERVER_VERSION","value":"19.4.0","public":true}]`,
		`"features":{"trace_sections":true,"failure_reasons":["unknown_failure","image_pull_failure"]}`,
	} {
		name, _, _ := strings.Cut(f, ":")
		if !strings.Contains(have, name+":") {
			fields = append(fields, f)
		}
	}
	return "{" + strings.Join(append(fields, more...), ",") + "}"
}

// held is how many jobs the state file of the runner has.
func (w *world) held() int {
	w.t.Helper()
	h, err := relay.HeldJobs(w.conf.StateDir)
	if err != nil {
		w.t.Fatal(err)
	}
	return h["ci.json"]
}

// classOf is a class that GitLab is told as reason.
func classOf(reason string, known []string) job.Failure {
	for _, f := range job.Failures {
		if job.GitLabReason(f, known) == reason {
			return f
		}
	}
	return job.Failure("no class of " + reason)
}

package cijob_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob/artifact"
	"virtkit/core/cijob/cache"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/wire"
	"virtkit/core/gitlab"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
	"virtkit/e2e/memreg"
)

var gitalyRE = regexp.MustCompile(`(Gitaly correlation ID: )srv-request-0-\w+`)

const scenarios = "../../testdata/ci-more"

// TestScenarios runs the jobs of testdata/ci-more from GitLab's answer to their
// end, with this host's bash for a guest, and compares trace, end, uploads and
// the requests for artifacts with those of a real gitlab-runner.
func TestScenarios(t *testing.T) {
	all, err := gitlabtest.Scenarios(scenarios)
	if err != nil || len(all) < 100 {
		t.Fatalf("%d scenarios in %s, %v", len(all), scenarios, err)
	}
	var com gitlabtest.Common
	readJSON(t, "common.json", &com)
	for name, sc := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := gitlabtest.New()
			g.Git = gitRepos(t)
			srv := httptest.NewServer(g)
			t.Cleanup(srv.Close)
			s := newScene(t, srv.URL)
			s.host, s.caches = here{}, &cache.Registry{Repo: memreg.Start(t).Addr + "/team"}
			s.artifacts = &artifact.Client{Agent: "vk/test", Sleep: func(context.Context, time.Duration) error { return nil }}
			for i, rec := range sc.Jobs {
				s.scenario(g, &com, sc, i, rec)
			}
		})
	}
}

// gitRepos serves the repositories of the recordings.
func gitRepos(t *testing.T) *gitsrv.Server {
	root := t.TempDir()
	srv, err := gitsrv.New(root)
	if err != nil {
		t.Skip(err)
	}
	if err := gitsrv.Recorded(root); err != nil {
		t.Fatal(err)
	}
	srv.Allow("*")
	return srv
}

func (s *scene) scenario(g *gitlabtest.Server, com *gitlabtest.Common, sc *gitlabtest.Scenario, i int, rec *gitlabtest.ScenarioJob) {
	t, nth := s.t, i+1
	raw, err := sc.Response(i, com, s.repo)
	if err != nil {
		t.Fatal(err)
	}
	j, err := relay.Spec(raw, relay.Source{ServerURL: s.repo, RunnerID: 7, RunnerName: "peer-runner", ShortToken: "peertoken", SystemID: "s_0123456789ab",
		RequestID: "srv-request-0-X", OutputLimit: 4 << 20, Info: gitlab.Info{Version: "19.4.0", Revision: "d79f3e7b", Platform: "linux", Architecture: "amd64"}})
	if err != nil {
		t.Fatalf("job %d: %v", nth, err)
	}
	g.SetRules(rec.Rules...)
	before := len(g.Requests())
	if _, err := g.AddJob(raw); err != nil {
		t.Fatal(err)
	}
	var on func(*jobdir.Dir)
	if e := rec.Expire; e != nil {
		on = func(d *jobdir.Dir) { over(time.Duration(e.Seconds)*time.Second, e.After)(s, d, nil) }
	}
	if c := rec.Cancel; c != nil {
		on = func(d *jobdir.Dir) {
			if !waitFor(d, c.After) {
				return
			}
			mode := wire.CancelImmediate
			if c.Graceful {
				mode = wire.CancelGraceful
			}
			d.Cancel(mode)
		}
	}
	_, res, out := s.run(j, t.Context(), on)
	ours, theirs := vague(s.normal(s.unmasked(out, j)), rec), vague(s.both(strings.Join(rec.Trace, "\n")), rec)
	if rec.Cancel != nil && !rec.Cancel.Graceful { // GitLab had refused the rest of the recording's trace
		theirs = strings.TrimSuffix(theirs, "\n") + "\n" + stamp + "00O section_end:0:" + rec.Cancel.Stage + "\r\x1b[0K\n" + stamp + "00O \x1b[31;1mERROR: Job failed: canceled\x1b[0;m\n"
	}
	a, b := apart(theirs), apart(ours)
	if !strings.Contains(theirs, stamp) {
		slices.Sort(a["all"])
		slices.Sort(b["all"])
	}
	if d := cmp.Diff(a, b); d != "" {
		t.Errorf("job %d: trace (-recorded +ours):\n%s", nth, d)
	}
	s.scenarioEnd(nth, rec, j, res, raw)
	if strings.Contains(out, sc.Token(i)) {
		t.Errorf("job %d: the token is in the trace", nth)
	}
	got, _ := g.Job(sc.ID(i))
	var ups []gitlabtest.Upload
	for _, a := range got.Artifacts {
		u, err := gitlabtest.Uploaded(a)
		if err != nil {
			t.Errorf("job %d: %v", nth, err)
		}
		ups = append(ups, u)
	}
	if d := cmp.Diff(rec.Uploads, ups); d != "" {
		t.Errorf("job %d: uploads (-recorded +ours):\n%s", nth, d)
	}
	if d := cmp.Diff(rec.Requests, gitlabtest.Transfers(g.Requests()[before:], sc.ID(i), rec.Dependencies()...)); d != "" {
		t.Errorf("job %d: requests for artifacts (-recorded +ours):\n%s", nth, d)
	}
}

// unmasked is a trace in which this run's own directory has its name, although a
// secret of the job's is a part of that.
func (s *scene) unmasked(out string, j *job.CiJob) string {
	dir := filepath.Join(s.dir, "builds")
	masked := dir
	var secrets []string
	for _, v := range j.Variables {
		if v.Masked && strings.TrimSpace(v.Value) != "" {
			secrets = append(secrets, strings.TrimSpace(v.Value))
		}
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	for _, v := range secrets {
		masked = strings.ReplaceAll(masked, v, "[MASKED]")
	}
	return strings.ReplaceAll(out, masked, dir)
}

// vague is a trace without what differs from run to run.
func vague(out string, rec *gitlabtest.ScenarioJob) string {
	out = comparable(out)
	out = gitalyRE.ReplaceAllString(out, "${1}srv-request-0-X")
	if len(rec.Vary) > 0 {
		out = without(rec.Vary...)(out)
	}
	return out
}

func (s *scene) scenarioEnd(nth int, rec *gitlabtest.ScenarioJob, j *job.CiJob, res job.Result, raw []byte) {
	t := s.t
	var r struct {
		Features struct {
			Reasons []string `json:"failure_reasons"`
		}
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		t.Fatal(err)
	}
	state := "success"
	if res.Failure != "" {
		state = "failed"
	}
	if rec.Final.State != "" && state != rec.Final.State {
		t.Errorf("job %d: %s (%s), recorded is %s (%s)", nth, state, res.Failure, rec.Final.State, rec.Final.Reason)
	}
	if rec.Failure != "" {
		if res.Failure != rec.Failure {
			t.Errorf("job %d: failure %q, want %q", nth, res.Failure, rec.Failure)
		}
	} else if got := job.GitLabReason(job.Failure(res.Failure), r.Features.Reasons); got != rec.Final.Reason && rec.Final.State != "" {
		t.Errorf("job %d: failure %q is GitLab's %q, recorded is %q", nth, res.Failure, got, rec.Final.Reason)
	}
	if d := cmp.Diff(rec.Final.ExitCode, res.ExitCode); d != "" && rec.Final.State != "" {
		t.Errorf("job %d: exit code (-recorded +ours): %s", nth, d)
	}
}

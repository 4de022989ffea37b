package cijob_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob"
	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
)

// recorded is a scenario of testdata/ci-jobs: what a real gitlab-runner was
// given and what trace it wrote.
type recorded struct {
	Note string
	Jobs []recordedJob
}

type recordedJob struct {
	ID             int64
	Token, Name    string
	Project, SHA   string
	Depth          int
	Timeout        int64
	Sections       bool
	Steps          []job.Step
	Hooks          []job.Hook
	Variables      []job.Variable
	Image          *job.Image
	Services       []job.Image
	FailureReasons bool `json:"failure_reasons"`
	Final          struct {
		State    string
		Reason   string `json:"failure_reason"`
		ExitCode *int   `json:"exit_code"`
	}
	Trace []string

	// Of testdata/ci-transfers: as vk-gitlab translates them.
	Caches       []job.Cache
	Artifacts    []job.Artifact
	Dependencies []job.Dependency
	Rules        []gitlabtest.Rule // how the recordings' GitLab misbehaved
	Uploads      []upload
}

type common struct {
	Server    string
	Variables []job.Variable
	Reasons   []string `json:"failure_reasons"`
}

const data = "../../testdata/ci-jobs"

func readJSON(t *testing.T, name string, to any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(data, name))
	if err == nil {
		err = json.Unmarshal(b, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// hostShell is an executor whose guest is this host.
type hostShell struct {
	t      *testing.T
	work   string
	home   string
	answer execdrv.ConfigAnswer
	// fails are statuses that calls end with, by kind or stage, in place of
	// running.
	fails map[string]int

	mu    sync.Mutex
	calls []string
}

func (h *hostShell) Call(ctx context.Context, c cijob.Call) cijob.Ended {
	name := string(c.Kind)
	if c.Kind == cijob.CallRun {
		name = c.Stage
	}
	h.mu.Lock()
	h.calls = append(h.calls, name)
	h.mu.Unlock()
	if code := h.fails[name]; code != 0 {
		fmt.Fprintf(c.Err, "driver fails at %s with %d\n", name, code)
		return cijob.Ended{Exit: code}
	}
	switch c.Kind {
	case cijob.CallConfig:
		json.NewEncoder(c.Out).Encode(h.answer)
		return cijob.Ended{}
	case cijob.CallPrepare, cijob.CallCleanup:
		return cijob.Ended{}
	}
	return h.shell(ctx, c)
}

// shell runs a script as `vk gitlab run` does, and tells of its end likewise.
func (h *hostShell) shell(ctx context.Context, c cijob.Call) cijob.Ended {
	sh := &cijob.Commands{Argv: []string{"/bin/sh", "-c", `umask 022; cd "$TMPDIR/.."; shift; exec bash < "$1"`, "sh"}, Work: h.work,
		Env: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + h.home, "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "LANG=C.UTF-8"}}
	c.Env = nil // the script exports them
	e := sh.Call(ctx, c)
	if sig := regexp.MustCompile(`signal (\d+)$`).FindStringSubmatch(fmt.Sprint(e.Err)); sig != nil {
		n, _ := strconv.Atoi(sig[1])
		return cijob.Ended{Exit: execdrv.DefaultBuildFailure, FileCode: strconv.Itoa(128 + n), Outcome: execdrv.Outcome{Signal: n}}
	}
	if e.Err == nil && e.Exit != 0 {
		return cijob.Ended{Exit: execdrv.DefaultBuildFailure, FileCode: strconv.Itoa(e.Exit)}
	}
	return e
}

// noHost has no guest to ask.
type noHost struct{}

func (noHost) Guest(context.Context) (cijob.Guest, string, error) {
	return nil, "", errors.New("no guest")
}
func (noHost) Size() *wire.GuestSize                                   { return &wire.GuestSize{CPUs: 2, MemMiB: 512} }
func (noHost) Usage(context.Context) (*wire.JobUsage, []wire.JobEvent) { return nil, nil }

func (noHost) Egress(context.Context, bool) (*policy.Report, bool) { return nil, false }

// scene is one job's surroundings.
type scene struct {
	t     *testing.T
	dir   string // of builds
	store *jobdir.Store
	shell *hostShell
	repo  string // base URL of the repositories
	com   common
	// host and the two after it are of Run.
	host      cijob.Host
	artifacts cijob.Artifacts
	caches    cijob.Caches
	// drive runs the job of a directory; nil = Run, in this process.
	drive func(ctx context.Context, d *jobdir.Dir) error

	mu     sync.Mutex
	limits map[time.Duration]context.CancelFunc // end a time that is running
}

// limit is a time that is over when the test says so.
func (s *scene) limit(parent context.Context, d time.Duration, cause error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limits[d] = func() { cancel(cause) }
	return ctx, func() { cancel(nil) }
}

// over ends the time of that length once the trace shows a text.
func over(d time.Duration, text string) func(*scene, *jobdir.Dir, context.CancelCauseFunc) {
	return func(s *scene, dir *jobdir.Dir, _ context.CancelCauseFunc) {
		if !waitFor(dir, text) {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.limits[d]()
	}
}

func newScene(t *testing.T, repo string) *scene {
	s := &scene{t: t, dir: t.TempDir(), repo: repo, host: noHost{}, limits: map[time.Duration]context.CancelFunc{}}
	readJSON(t, "common.json", &s.com)
	var err error
	if s.store, err = jobdir.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	s.shell = &hostShell{t: t, home: t.TempDir(), answer: execdrv.ConfigAnswer{BuildsDir: filepath.Join(s.dir, "builds")}, fails: map[string]int{}}
	return s
}

// spec translates a recorded job as vk-gitlab does.
func (s *scene) spec(r recordedJob, nth int) *job.CiJob {
	place := strings.NewReplacer("@TOKEN@", r.Token, "@ID@", strconv.FormatInt(r.ID, 10), "@NAME@", r.Name, s.com.Server, s.repo)
	j := &job.CiJob{
		Kind: job.KindGitLabCI, ServerURL: s.repo, Token: r.Token, TimeoutSecs: r.Timeout,
		Job: job.Info{ID: r.ID, Name: r.Name, Stage: "test", PipelineID: 500, ProjectID: 42, ProjectName: "project", ProjectPath: r.Project,
			RunnerID: 7, RunnerName: "peer-runner", SystemID: "s_0123456789ab", CorrelationID: fmt.Sprintf("srv-request-0-%d", nth)},
		Sources: job.Sources{RepoURL: s.repo + "/" + r.Project + ".git", ObjectFormat: "sha1", Ref: "main", SHA: r.SHA, RefType: "branch",
			Refspecs: []string{"+refs/pipelines/500:refs/pipelines/500", "+refs/heads/main:refs/remotes/origin/main"}, Depth: r.Depth, AllowFetch: true},
		Steps: r.Steps, Hooks: r.Hooks, Image: r.Image, Services: r.Services, Caches: r.Caches, Artifacts: r.Artifacts, Dependencies: r.Dependencies,
		RegistryCredentials: []job.RegistryCredential{{URL: "127.0.0.1:5000", Username: "gitlab-ci-token", Password: r.Token}},
		Trace:               job.Trace{Sections: r.Sections, TokenMaskPrefixes: []string{"glpat-"}},
	}
	j.Variables = append(j.Variables, job.Variable{Key: "CI_RUNNER_SHORT_TOKEN", Value: "peertoken", Public: true})
	for _, v := range slices.Concat(s.com.Variables, r.Variables) {
		v.Value = place.Replace(v.Value)
		j.Variables = append(j.Variables, v)
	}
	for k, v := range map[string]string{"CI_RUNNER_VERSION": "19.4.0", "CI_RUNNER_REVISION": "d79f3e7b", "CI_RUNNER_EXECUTABLE_ARCH": "linux/amd64"} {
		j.Variables = append(j.Variables, job.Variable{Key: k, Value: v, Public: true})
	}
	return j
}

// run runs a job; while it does, on sees its directory.
func (s *scene) run(j *job.CiJob, ctx context.Context, on func(d *jobdir.Dir)) (*jobdir.Dir, job.Result, string) {
	s.t.Helper()
	spec, err := j.Encode()
	if err != nil {
		s.t.Fatal(err)
	}
	d, err := s.store.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: spec}})
	if err != nil {
		s.t.Fatal(err)
	}
	if s.drive == nil {
		if s.shell.work, err = d.Work(); err != nil {
			s.t.Fatal(err)
		}
	}
	if on != nil {
		go on(d)
	}
	if s.drive == nil {
		err = cijob.Run(ctx, cijob.Options{
			Dir: d, Executor: s.shell, Host: s.host, Artifacts: s.artifacts, Caches: s.caches, Log: logx.ForTest(s.t), Version: "test", Poll: 20 * time.Millisecond, Limit: s.limit,
			Wait: func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) },
		})
	} else {
		err = s.drive(ctx, d)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	res, ok, err := d.Result()
	if !ok || err != nil {
		s.t.Fatal(ok, err)
	}
	out, err := os.ReadFile(d.OutputPath())
	if err != nil || int64(len(out)) != res.OutputLen {
		s.t.Fatalf("%d bytes of output, the result says %d, %v", len(out), res.OutputLen, err)
	}
	return d, res, string(out)
}

var (
	stampRE   = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z `)
	sectionRE = regexp.MustCompile(`section_(start|end):\d+:`)
	foldRE    = regexp.MustCompile(`hide_duration=\w+`)
	lineNoRE  = regexp.MustCompile(`bash: (eval: )?line \d+: `)
	viaRE     = regexp.MustCompile(`Running on vm( via peer-host)?.*\.\.\.`)
	tickRE    = regexp.MustCompile(`(?m)^(.{28})?01O tick \d+\n`)
)

const stamp = "0000-00-00T00:00:00.000000Z "

// normal makes ours comparable with a recording: other times, other places.
func (s *scene) normal(out string) string {
	host, _ := os.Hostname()
	out = stampRE.ReplaceAllString(out, stamp)
	return s.both(strings.NewReplacer(
		filepath.Join(s.dir, "builds"), "BUILDS", s.repo, s.com.Server, strings.TrimPrefix(s.repo, "http://"), strings.TrimPrefix(s.com.Server, "http://"),
		"Running on "+host, "Running on vm", "Running with vk-gitlab", "Running with gitlab-runner").Replace(out))
}

// both is what is done with ours and with a recording.
func (s *scene) both(out string) string {
	out = sectionRE.ReplaceAllString(out, "section_$1:0:")
	out = foldRE.ReplaceAllString(out, "hide_duration=X")
	out = viaRE.ReplaceAllString(out, "Running on vm$1...")
	return lineNoRE.ReplaceAllString(out, "bash: ${1}line N: ")
}

// theirs is a recording without what names the program, the executor or the
// recording's own driver.
func (s *scene) theirs(name string, lines []string) string {
	out := strings.Join(lines, "\n")
	out = strings.ReplaceAll(out, "/peer/work/"+name+"/builds/peertoken/0", "BUILDS")
	out = strings.ReplaceAll(out, "/peer/work/"+name+"/builds", "BUILDS")
	return s.both(out)
}

// apart splits a trace by stream: how they interleave is not the same twice.
// Lines that name the executor, and those of the recording's own driver, are
// left out.
func apart(out string) map[string][]string {
	by := map[string][]string{}
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\n"), "\n") {
		text, stamped := strings.CutPrefix(line, stamp)
		switch {
		case strings.Contains(text, `Preparing the "`), strings.Contains(text, "\x1b[0KUsing "),
			strings.HasSuffix(text, "config-stderr-line"), strings.HasSuffix(text, "prepare stdout"), strings.HasSuffix(text, "prepare stderr"),
			strings.Contains(text, " virtkit: "), strings.HasPrefix(text, "virtkit: "),
			strings.Contains(text, "the 'build_script' stage will be replaced"),
			strings.HasSuffix(text, "01E Terminated"): // of a command that the signal happened to find
			continue
		}
		key := "all"
		if stamped && len(text) > 3 {
			key = text[:3]
			if key == "00O" || key == "01O" {
				key = "O" // in the order in which the stages come
			}
		}
		// How much of a long line comes with one read is not the same twice.
		if n := len(by[key]); n > 0 && len(by[key][n-1]) > 1000 && stamped && strings.HasPrefix(text[2:], text[2:3]+"+") {
			by[key][n-1] += text[4:]
			continue
		}
		by[key] = append(by[key], text)
	}
	return by
}

// special is what a scenario needs beside its recording.
type special struct {
	prepare func(s *scene, j *job.CiJob)
	during  func(s *scene, d *jobdir.Dir, stop context.CancelCauseFunc)
	edit    func(theirs string) string // of the recording
	ours    func(ours string) string
	failure job.Failure // where the fleet's class is not what gitlab-runner's shell says
	code    bool        // the exit code is not compared
	// inGuest is of a recording whose end is a time that is over: in a guest the
	// clock is the driver's own, and this is the job's timeout in seconds, in place
	// of one that is too short for a guest to boot in.
	inGuest int64
	// guest compares in place of the whole, in a guest.
	guest func(t *testing.T, theirs, ours map[string][]string, out string)
}

func waitFor(d *jobdir.Dir, text string) bool {
	for range 3000 {
		if b, _ := os.ReadFile(d.OutputPath()); bytes.Contains(b, []byte(text)) {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

func without(lines ...string) func(string) string {
	return func(out string) string {
		var kept []string
		for l := range strings.SplitSeq(out, "\n") {
			if !slices.ContainsFunc(lines, func(w string) bool { return strings.Contains(l, w) }) {
				kept = append(kept, l)
			}
		}
		return strings.Join(kept, "\n")
	}
}

var lineRE = regexp.MustCompile(`01O line 34.*`)

func lastLine(out string) string { return lineRE.ReplaceAllString(out, "01O line 34") }

func noTicks(out string) string { return tickRE.ReplaceAllString(out, "") }

var specials = map[string]special{
	"section-attempts-git": {
		prepare: func(s *scene, _ *job.CiJob) { s.shell.fails["get_sources"] = 2 },
	},
	"custom-fail-prepare-1": {
		prepare: func(s *scene, _ *job.CiJob) { s.shell.fails["prepare"] = 1 },
		ours:    without("driver fails"), failure: job.Configuration,
	},
	"custom-fail-prepare-2": {
		prepare: func(s *scene, _ *job.CiJob) { s.shell.fails["prepare"] = 2 },
		ours:    without("driver fails"),
	},
	"git-fails-attempts":    {failure: job.ExternalDependency},
	"failure-reasons-empty": {failure: job.ExternalDependency},
	// The token comes from a credential helper and is in no file.
	"git-fetch-twice": {edit: without("insteadof"), ours: without("\tcredential.http")},
	// Its xtrace is not in the copy: it is of gitlab-runner's own scripts.
	"debug-trace": {ours: without(stamp + "01E")},
	// Where it is cut depends on how long the program's name is.
	"output-limit": {prepare: func(_ *scene, j *job.CiJob) { j.Trace.LimitBytes = 4096 }, edit: lastLine, ours: lastLine, guest: cutShort},
	// The recording's executor removes the repository's configuration with each
	// job, and with it what tells a fresh one.
	"custom-git-strategies": {edit: without("Created fresh repository"), ours: without("Created fresh repository")},
	"job-timeout":           {during: over(6*time.Second, "$ sleep 60"), inGuest: 55},
	"custom-timeout":        {during: over(6*time.Second, "$ sleep 50"), inGuest: 45},
	"script-timeout":        {during: over(3*time.Second, "$ sleep 60"), inGuest: 900},
	"cancel-canceling": {
		during: func(_ *scene, d *jobdir.Dir, _ context.CancelCauseFunc) {
			if waitFor(d, "tick 2") {
				d.Cancel(wire.CancelGraceful)
			}
		},
		edit: noTicks, ours: noTicks, failure: job.Canceled,
	},
	"cancel-canceled": {
		during: func(_ *scene, d *jobdir.Dir, _ context.CancelCauseFunc) {
			if waitFor(d, "tick 2") {
				d.Cancel(wire.CancelImmediate)
			}
		},
		// GitLab had refused the rest of the recording's trace.
		edit: func(out string) string {
			return noTicks(out) + stamp + "00O section_end:0:step_script\r\x1b[0K\n" + stamp + "00O \x1b[31;1mERROR: Job failed: canceled\x1b[0;m\n"
		},
		ours: func(out string) string { return without("01O got TERM")(noTicks(out)) }, failure: job.Canceled,
	},
	"custom-canceling": {
		prepare: func(s *scene, _ *job.CiJob) { s.shell.answer.Hostname = "peer-host" },
		during: func(_ *scene, d *jobdir.Dir, _ context.CancelCauseFunc) {
			if waitFor(d, "tick 1") {
				d.Cancel(wire.CancelGraceful)
			}
		},
		edit: noTicks, ours: noTicks, failure: job.Canceled,
	},
	"runner-sigterm": {
		during: func(_ *scene, d *jobdir.Dir, stop context.CancelCauseFunc) {
			if waitFor(d, "tick 1") {
				stop(cijob.Stop())
			}
		},
		// after_script, which the recording says has failed, was never run.
		edit: func(out string) string { return noTicks(without("after_script failed")(out)) }, ours: noTicks, failure: job.Interrupted,
	},
	// How the recording's driver ends is not of the scripts.
	"custom-fail-nofile": {code: true, edit: func(out string) string { return strings.ReplaceAll(out, "exit status 1", "exit status 9") }},
	"custom-fail-system": {
		prepare: func(s *scene, _ *job.CiJob) { s.shell.fails["step_script"] = 2 },
		edit:    without("driver fails", "\x1b[32;1m$ true"), ours: without("driver fails"),
	},
}

func gitServer(t *testing.T) string {
	root := t.TempDir()
	srv, err := gitsrv.New(root)
	if err != nil {
		t.Skip(err)
	}
	if err := gitsrv.Recorded(root); err != nil {
		t.Fatal(err)
	}
	srv.Allow("*")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(t.Context(), l)
	return "http://" + l.Addr().String()
}

// TestRecordings runs every recorded job with this host's bash for a guest and
// compares its trace and its end with gitlab-runner's.
func TestRecordings(t *testing.T) {
	files, err := filepath.Glob(data + "/*.json")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d recordings in %s, %v", len(files), data, err)
	}
	repo := gitServer(t)
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".json")
		if name == "common" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var rec recorded
			readJSON(t, name+".json", &rec)
			s := newScene(t, repo)
			if strings.HasPrefix(name, "custom-") || name == "section-attempts-git" {
				s.shell.answer.Hostname = "peer-host"
			}
			for i, r := range rec.Jobs {
				s.compare(name, i+1, r, specials[name])
			}
		})
	}
}

func (s *scene) compare(name string, nth int, r recordedJob, sp special) {
	t := s.t
	j := s.spec(r, nth)
	if sp.prepare != nil {
		sp.prepare(s, j)
	}
	ctx, stop := context.WithCancelCause(t.Context())
	defer stop(nil)
	var on func(*jobdir.Dir)
	recordedLimit := fmt.Sprintf("took longer than %ds", j.TimeoutSecs)
	if s.drive != nil && sp.inGuest > 0 {
		j.TimeoutSecs = sp.inGuest
	} else if sp.during != nil {
		on = func(d *jobdir.Dir) { sp.during(s, d, stop) }
	}
	d, res, out := s.run(j, ctx, on)
	ours, theirs := s.normal(out), s.theirs(name, r.Trace)
	theirs = strings.ReplaceAll(theirs, recordedLimit, fmt.Sprintf("took longer than %ds", j.TimeoutSecs))
	if s.drive != nil {
		theirs = strings.ReplaceAll(theirs, "Running on vm via peer-host...", "Running on vm...") // the recording's executor named a host
	}
	if s.drive != nil && sp.guest != nil {
		sp.guest(t, apart(theirs), apart(ours), out)
		s.compareEnd(nth, r, sp, res)
		return
	}
	if sp.edit != nil {
		theirs = sp.edit(theirs)
	}
	if sp.ours != nil {
		ours = sp.ours(ours)
	}
	a, b := apart(theirs), apart(ours)
	if !strings.Contains(theirs, stamp) {
		slices.Sort(a["all"])
		slices.Sort(b["all"])
	}
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("job %d: trace (-recorded +ours):\n%s", nth, diff)
	}
	s.compareEnd(nth, r, sp, res)
	if strings.Contains(out, r.Token) {
		t.Errorf("job %d: the token is in the trace", nth)
	}
	if b, _ := os.ReadFile(filepath.Join(d.Path(), "start.json")); bytes.Contains(b, []byte(r.Token)) {
		t.Errorf("job %d: the token is still journaled", nth)
	}
	if s.drive != nil {
		return // its guest is gone
	}
	left, err := os.ReadDir(s.dir + "/builds/" + r.Project + ".tmp")
	for _, e := range left {
		if e.Name() != "git-template" && r.Final.State == "success" {
			t.Errorf("job %d: %s is left", nth, e.Name())
		}
	}
	if err != nil && r.Final.State == "success" {
		t.Error(err)
	}
}

func (s *scene) compareEnd(nth int, r recordedJob, sp special, res job.Result) {
	t := s.t
	t.Helper()
	if sp.failure != "" {
		if res.Failure != string(sp.failure) {
			t.Errorf("job %d: failure %q, want %q", nth, res.Failure, sp.failure)
		}
	} else {
		known := s.com.Reasons
		if !r.FailureReasons {
			known = nil
		}
		if got := job.GitLabReason(job.Failure(res.Failure), known); got != r.Final.Reason {
			t.Errorf("job %d: failure %q is GitLab's %q, recorded is %q", nth, res.Failure, got, r.Final.Reason)
		}
	}
	if sp.code {
		return
	}
	if diff := cmp.Diff(r.Final.ExitCode, res.ExitCode); diff != "" {
		t.Errorf("job %d: exit code (-recorded +ours): %s", nth, diff)
	}
}

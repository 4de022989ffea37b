package fleet_test

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/job"
	"virtkit/e2e/fleetup"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
	"virtkit/e2e/host"
)

// TestRecordedJobs takes recorded jobs through a whole fleet, each in a real
// microVM: a stand-in GitLab gives them out, vk-gitlab takes them, the hub
// places them, the node runs them. GitLab then has the recorded outcome and,
// but for what names the program, its executor and its times, the recorded
// trace.
func TestRecordedJobs(t *testing.T) {
	f := up(t)
	if err := gitsrv.Recorded(f.Repos); err != nil {
		t.Fatal(err)
	}
	if err := f.Approve(t.Context(), 42, "group/project"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"simple-success", "fail-exit3"} {
		t.Run(name, func(t *testing.T) { replayInVM(t, f, name) })
	}
}

// up brings a fleet up, or says what this host lacks.
func up(t *testing.T) *fleetup.Fleet { t.Helper(); return upWith(t, "", nil) }

// upWith is up with more of a node's configuration, which comes before the rest,
// and options that edit has the last word on; nil = none.
func upWith(t *testing.T, conf string, edit func(*fleetup.Options)) *fleetup.Fleet {
	t.Helper()
	if testing.Short() {
		t.Skip("needs guests, which -short leaves out")
	}
	dir, err := os.MkdirTemp("", "vkf-") // short: sockets are below it
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
	pull := exec.CommandContext(t.Context(), h.VK, "pull", "local/default")
	pull.Env = h.Env()
	if out, err := pull.CombinedOutput(); err != nil {
		t.Fatalf("the default image: %v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	log, err := os.Create(filepath.Join(dir, "processes.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	o := fleetup.Options{VK: h.VK, StateDir: h.Base, Dir: dir, Log: io.MultiWriter(t.Output(), log), Mem: "512M", NodeConfig: "[vmm]\nboot_timeout_secs = 360\n" + conf + "[executor.vm]\ncpus = 1\nmem = \"512M\"\n"}
	if edit != nil {
		edit(&o)
	}
	f, err := fleetup.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Down(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// recordedJob is one of testdata/ci-jobs.
type recordedJob struct {
	ID           int64
	Token, Name  string
	Project, SHA string
	Depth        int
	Timeout      int64
	Sections     bool
	Steps, Hooks json.RawMessage
	Variables    []job.Variable
	HasReasons   bool `json:"failure_reasons"`
	Trace        []string
	Final        struct {
		State    string
		Reason   string `json:"failure_reason"`
		ExitCode int    `json:"exit_code"`
	}
}

func readJSON(t *testing.T, name string, to any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../testdata/ci-jobs", name))
	if err == nil {
		err = json.Unmarshal(b, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func replayInVM(t *testing.T, f *fleetup.Fleet, name string) {
	var rec struct{ Jobs []recordedJob }
	var com struct {
		Server    string
		Variables []job.Variable
		Reasons   []string `json:"failure_reasons"`
	}
	readJSON(t, name+".json", &rec)
	readJSON(t, "common.json", &com)
	r := rec.Jobs[0]
	f.Git.Allow(r.Token)
	place := strings.NewReplacer("@TOKEN@", r.Token, "@ID@", strconv.FormatInt(r.ID, 10), "@NAME@", r.Name, com.Server, f.URL)
	vars := []job.Variable{}
	for _, v := range slices.Concat(com.Variables, r.Variables) {
		v.Value = place.Replace(v.Value)
		vars = append(vars, v)
	}
	response, err := json.Marshal(map[string]any{
		"id": r.ID, "token": r.Token, "allow_git_fetch": true,
		"job_info": map[string]any{"id": r.ID, "name": r.Name, "stage": "test", "pipeline_id": 500, "project_id": 42, "project_name": "project", "project_full_path": r.Project},
		"git_info": map[string]any{"repo_url": strings.Replace(f.URL, "://", "://gitlab-ci-token:"+r.Token+"@", 1) + "/" + r.Project + ".git", "repo_object_format": "sha1",
			"ref": "main", "sha": r.SHA, "before_sha": strings.Repeat("0", 40), "ref_type": "branch", "depth": r.Depth,
			"refspecs": []string{"+refs/pipelines/500:refs/pipelines/500", "+refs/heads/main:refs/remotes/origin/main"}},
		"runner_info": map[string]any{"timeout": r.Timeout}, "variables": vars, "steps": r.Steps, "hooks": r.Hooks, "image": map[string]any{"name": "local/default"},
		"features": map[string]any{"trace_sections": r.Sections, "token_mask_prefixes": []string{"glpat-"}, "failure_reasons": com.Reasons},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.GitLab.AddJob(response); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	got, err := f.Ended(ctx, r.ID)
	if err != nil {
		t.Fatalf("%v; asked of GitLab:\n%s", err, gitlabtest.Sequence(f.GitLab.Requests()))
	}
	var end struct {
		State    string
		Reason   string `json:"failure_reason"`
		ExitCode int    `json:"exit_code"`
		Output   struct{ Checksum string }
	}
	if err := json.Unmarshal(got.Final, &end); err != nil {
		t.Fatal(err)
	}
	if end.State != r.Final.State || end.Reason != r.Final.Reason || end.ExitCode != r.Final.ExitCode || end.Output.Checksum != gitlabtest.Checksum(got.Trace) {
		t.Errorf("ended as %+v, expected %+v", end, r.Final)
	}
	ours, theirs := byStream(strings.Split(string(got.Trace), "\n")), byStream(r.Trace)
	if d := cmp.Diff(theirs, ours); d != "" {
		t.Errorf("trace, recorded (-) and ours (+):\n%s\nall of ours:\n%s", d, got.Trace)
	}
	if strings.Contains(string(got.Trace), r.Token) {
		t.Error("the trace shows the job's token")
	}
}

var (
	stampRE  = regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+Z `)
	markRE   = regexp.MustCompile(`section_(start|end):\d+:`)
	placesRE = regexp.MustCompile(`(/peer/work/[^/]+/builds/peertoken/0|/builds)/group`)
	serverRE = regexp.MustCompile(`srv-request-0-\d+`)
)

// byStream is a trace by its streams, without what names the program, the
// executor, the host and the times.
func byStream(lines []string) map[string][]string {
	by := map[string][]string{}
	report := false
	for _, l := range lines {
		l = markRE.ReplaceAllString(stampRE.ReplaceAllString(l, ""), "section_$1:0:")
		l = serverRE.ReplaceAllString(placesRE.ReplaceAllString(l, "BUILDS/group"), "srv-request-0-N")
		switch {
		case strings.Contains(l, "section_start:0:vk_atop"), strings.Contains(l, "section_end:0:vk_atop"):
			report = !report // what the recorder saw is in between
			continue
		case report, len(l) < 4, strings.Contains(l, "virtkit: "), strings.Contains(l, "Running with "), strings.Contains(l, "system ID: "),
			strings.Contains(l, `Preparing the "`), strings.Contains(l, "\x1b[0KUsing "), strings.Contains(l, "Running on "):
			continue
		}
		by[l[:3]] = append(by[l[:3]], l[3:])
	}
	return by
}

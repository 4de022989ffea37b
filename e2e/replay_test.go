package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/e2e/customdriver"
	"virtkit/e2e/host"
)

// missingHelper is what the runner's scripts say in an image without
// gitlab-runner. The recorded host had one; guests get it with [executor]
// tools_dir, whose own test has a stand-in for it (tools_test.go), since
// gitlab-runner itself is not to be had here. These are the lines of the
// recordings that are out of reach without it, and nothing else is.
var missingHelper = map[string][]string{
	execdrv.StageRestoreCache: {"\x1b[0;33mMissing gitlab-runner. Extracting cache is disabled.\x1b[0;m"},
	execdrv.StageDownload:     {"\x1b[0;33mMissing gitlab-runner. Artifacts downloading is disabled.\x1b[0;m"},
	execdrv.StageCache:        {"\x1b[0;33mMissing gitlab-runner. Creating cache is disabled.\x1b[0;m"},
	execdrv.StageUpload: {"\x1b[0;33mMissing gitlab-runner. Uploading artifacts is disabled.\x1b[0;m",
		"\x1b[0;33mMissing gitlab-runner. Uploading artifacts is disabled.\x1b[0;m"},
}

// helperFiles are what gitlab-runner would have left: the cache and the files
// of the artifact that it would have downloaded.
var helperFiles = []string{"builds/group/project/depdir", "builds/group/project/depdir/dep.txt", "builds/group/project/depdir/x.sh",
	"cache", "cache/group", "cache/group/project", "cache/group/project/ckey", "cache/group/project/ckey/cache.zip", "cache/group/project/ckey/metadata.json"}

func recording(t *testing.T, name string) *customdriver.Recording {
	t.Helper()
	dir, scripts, err := customdriver.Find(root)
	if err != nil {
		t.Skip(err)
	}
	if !scripts {
		t.Skipf("needs the recorded stage scripts, which %s does not have: put vectors/ beside the checkout as ../shared/vectors or set VIRTKIT_VECTORS", dir)
	}
	r, err := customdriver.Load(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// session opens a recorded job with its own variables, in an image of ours.
func session(t *testing.T, d runnerside.Driver, r *customdriver.Recording, j *customdriver.Job, image string) *runnerside.Session {
	t.Helper()
	d.TmpRoot = t.TempDir()
	s, err := d.Open(j.Vars, withoutServices(t, r.Response))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.Vars["MICROVM_IMAGE"] = image
	return s
}

// withoutServices is a job without its services: the recorded executor started
// none, and their images are in no registry here.
func withoutServices(t *testing.T, response []byte) []byte {
	t.Helper()
	var job map[string]json.RawMessage
	if err := json.Unmarshal(response, &job); err != nil {
		t.Fatal(err)
	}
	if _, has := job["services"]; !has {
		return response
	}
	delete(job, "services")
	b, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// images that every recording is replayed in: bash as root, and busybox's sh
// as the only shell, as another user.
func images(t *testing.T, h *host.Host) map[string]string {
	defaultImage(t, h)
	return map[string]string{"bash": "local/default", "sh-user": busyboxGit(t, h)}
}

// ready makes the guest of a recorded job, with what the recorded driver's
// config added to the environment of the calls.
func ready(t *testing.T, s *runnerside.Session, j *customdriver.Job) {
	t.Helper()
	t.Cleanup(func() {
		if res, err := s.Cleanup(context.Background()); err != nil || res.Exit != 0 {
			t.Errorf("cleanup: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
		}
	})
	res, _, err := s.Config(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("config: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	for k, v := range j.JobEnv {
		s.AddJobEnv(k, v)
	}
	res, err = s.Prepare(t.Context())
	if err != nil || res.Exit != 0 {
		t.Fatalf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	if !started.MatchString(string(res.Stdout)) {
		t.Errorf("prepare does not tell its times:\n%s", res.Stdout)
	}
}

var started = regexp.MustCompile(`(?m)^virtkit: (booted|restored from a booted template) in [0-9.]+m?s: \d CPU`)

// same compares a stage's output with the recorded trace.
func same(t *testing.T, j *customdriver.Job, res runnerside.Result, want customdriver.Output) {
	t.Helper()
	if d := cmp.Diff(want.Stdout, j.Normalise(res.Stdout)); d != "" {
		t.Errorf("%s: stdout differs from the recording (-recorded +got):\n%s", res.Call, d)
	}
	if d := cmp.Diff(want.Stderr, j.Normalise(withoutOwn(t, res))); d != "" {
		t.Errorf("%s: stderr differs from the recording (-recorded +got):\n%s", res.Call, d)
	}
}

// account is the section that virtkit ends a job's trace with.
var account = regexp.MustCompile(`(?s)\x1b\[0Ksection_start:\d+:vk_atop.*?section_end:\d+:vk_atop\r\x1b\[0K\n`)

// withoutOwn is a stage's stderr without what virtkit itself ends a job's trace
// with: the names it contacted, what it cost, what it did. The last stage has to
// have the first of these, and no other stage may.
func withoutOwn(t *testing.T, res runnerside.Result) []byte {
	t.Helper()
	const begin = "virtkit: names this job has contacted under unrestricted egress: "
	var rest []byte
	n := 0
	stderr := res.Stderr
	if res.Call == execdrv.StageCleanFileVars {
		stderr = account.ReplaceAll(stderr, nil)
	}
	for line := range bytes.Lines(stderr) {
		if res.Call == execdrv.StageCleanFileVars && (bytes.HasPrefix(line, []byte("virtkit: job resource usage: ")) || bytes.HasPrefix(line, []byte("virtkit: most this job has used lately: "))) {
			continue
		}
		if bytes.HasPrefix(line, []byte(begin)) {
			n++
			continue
		}
		rest = append(rest, line...)
	}
	if want := map[bool]int{true: 1}[res.Call == execdrv.StageCleanFileVars]; n != want {
		t.Errorf("%s: %d lines begin with %q, want %d", res.Call, n, begin, want)
	}
	return rest
}

// worktree lists the files below the recorded working folder as
// worktree.txt does, without the insides of .git, sizes of directories, and
// the folder itself.
func worktree(t *testing.T, s *runnerside.Session, j *customdriver.Job) []string {
	t.Helper()
	base := strings.TrimSuffix(j.Vars["CI_BUILDS_DIR"], "/builds")
	res := stage(t, s, execdrv.StagePrepare, "cd "+base+` && find . -name .git -prune -o -print | while read -r f; do stat -c '%n %F %a %s' "$f"; done`+"\n")
	if res.Exit != 0 {
		t.Fatalf("listing the work tree: %d\n%s%s", res.Exit, res.Stdout, res.Stderr)
	}
	var out []string
	for line := range strings.Lines(string(res.Stdout)) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "./")
		f := strings.Fields(line)
		if len(f) < 4 || f[0] == "." || f[0] == "cache" && f[1] == "directory" {
			continue
		}
		kind, mode, size := "f", f[len(f)-2], f[len(f)-1]
		switch {
		case strings.Contains(line, " directory "):
			kind, size = "d", "-"
		case strings.Contains(line, " symbolic link "):
			kind = "l"
		}
		out = append(out, fmt.Sprintf("%s %s %s %s", f[0], kind, mode, size))
	}
	slices.Sort(out)
	return out
}

func recordedTree(r *customdriver.Recording) []string {
	var out []string
	for _, line := range r.Worktree {
		f := strings.Fields(line)
		if len(f) != 4 || slices.Contains(helperFiles, f[0]) {
			continue
		}
		if f[1] == "d" {
			f[3] = "-"
		}
		out = append(out, strings.Join(f, " "))
	}
	slices.Sort(out)
	return out
}

// TestReplay replays each recorded job that ends by itself, in each image,
// and compares output, exit codes and files with the recording.
func TestReplay(t *testing.T) {
	h := guests(t)
	for _, name := range []string{"custom-simple", "custom-multiline", "custom-stage-flags", "custom-full"} {
		r := recording(t, name)
		gitServer(t)
		for kind, image := range images(t, h) {
			t.Run(name+"/"+kind, func(t *testing.T) {
				j := &r.Jobs[0]
				s := session(t, h.Driver(), r, j, image)
				ready(t, s, j)
				s.Vars["CI_JOB_STATUS"] = "running"
				for _, st := range j.Stages {
					if st.Name == execdrv.StageAfter {
						s.Vars["CI_JOB_STATUS"] = "success"
					}
					res, err := s.Stage(t.Context(), st.Name, st.Script)
					if err != nil || res.Exit != 0 || res.FileCode != "" {
						t.Fatalf("%s: exit %d, code %q, %v\n%s%s", st.Name, res.Exit, res.FileCode, err, res.Stdout, res.Stderr)
					}
					t.Logf("%s took %v", st.Name, res.Took.Round(time.Millisecond))
					want := j.Want[st.Name]
					if lines, ok := missingHelper[st.Name]; ok {
						want = customdriver.Output{Stdout: lines}
					}
					same(t, j, res, want)
				}
				if d := cmp.Diff(recordedTree(r), worktree(t, s, j)); d != "" {
					t.Errorf("files differ from the recording (-recorded +got):\n%s", d)
				}
			})
		}
	}
	nothingLeft(t, h)
}

// The recorded host kept its builds directory between the four jobs of
// custom-git-strategies; a guest does not outlive its job, so the four jobs'
// scripts run in one guest here.
func TestReplayGitStrategies(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-git-strategies")
	gitServer(t)
	for kind, image := range images(t, h) {
		t.Run(kind, func(t *testing.T) {
			first := &r.Jobs[0]
			s := session(t, h.Driver(), r, first, image)
			ready(t, s, first)
			for i := range r.Jobs {
				j := &r.Jobs[i]
				for _, st := range j.Stages {
					res, err := s.Stage(t.Context(), st.Name, st.Script)
					if err != nil || res.Exit != 0 {
						t.Fatalf("job %d %s: exit %d %v\n%s%s", i+1, st.Name, res.Exit, err, res.Stdout, res.Stderr)
					}
					same(t, j, res, j.Want[st.Name])
				}
			}
			if d := cmp.Diff(recordedTree(r), worktree(t, s, first)); d != "" {
				t.Errorf("files differ from the recording (-recorded +got):\n%s", d)
			}
		})
	}
	nothingLeft(t, h)
}

// The driver of this recording wrote no BUILD_EXIT_CODE_FILE. Ours is not
// told of one, which the runner reads the same way.
func TestReplayFailNoFile(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-fail-nofile")
	j := &r.Jobs[0]
	d := h.Driver()
	d.NoExitCodeFile = true
	s := session(t, d, r, j, busyboxGit(t, h))
	job, err := s.RunJob(t.Context(), j.Stages, nil)
	if err != nil {
		t.Fatal(err)
	}
	if v := job.Verdict; v.Reason != "script_failure" || v.ExitCode != 1 || v.Text != "exit status 1" {
		t.Errorf("verdict %+v", v)
	}
	if want := []string{"config", "prepare", "prepare_script", "get_sources", "build_script", "cleanup_file_variables", "cleanup"}; !slices.Equal(job.Names(), want) {
		t.Errorf("calls %q, recorded %q", job.Names(), want)
	}
	for _, res := range job.Calls[2 : len(job.Calls)-1] {
		same(t, j, res, j.Want[res.Call])
	}
	// With the file, the script's own code arrives.
	s = session(t, h.Driver(), r, j, busyboxGit(t, h))
	if job, err = s.RunJob(t.Context(), j.Stages, nil); err != nil || job.Verdict.ExitCode != 9 {
		t.Errorf("with the file: %+v %v", job.Verdict, err)
	}
	nothingLeft(t, h)
}

// What the recorded driver did on purpose, ours does for a reason: a bad
// variable is the job's fault, a missing image is the host's.
func TestReplayFailPrepare(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-fail-prepare-1")
	s := session(t, h.Driver(), r, &r.Jobs[0], "local/default")
	s.Vars["MICROVM_CPUS"] = "plenty"
	job, err := s.RunJob(t.Context(), r.Jobs[0].Stages, nil)
	if err != nil {
		t.Fatal(err)
	}
	if v := job.Verdict; v.Reason != "script_failure" || v.ExitCode != 1 || !slices.Equal(job.Names(), []string{"config", "cleanup"}) {
		t.Errorf("bad variable: %+v, calls %q", v, job.Names())
	}
	if !bytes.Contains(job.Calls[0].Stderr, []byte(`MICROVM_CPUS is "plenty"`)) || len(job.Calls[0].Stdout) != 0 {
		t.Errorf("config said %q and %q", job.Calls[0].Stdout, job.Calls[0].Stderr)
	}
	r = recording(t, "custom-fail-prepare-2")
	s = session(t, h.Driver(), r, &r.Jobs[0], "local/no-such-image")
	if job, err = s.RunJob(t.Context(), r.Jobs[0].Stages, nil); err != nil {
		t.Fatal(err)
	}
	if v := job.Verdict; v.Reason != "runner_system_failure" || v.Text != "exit status 2" || v.ExitCode != 0 {
		t.Errorf("missing image: %+v", v)
	}
	attempt := []string{"config", "prepare", "cleanup"}
	if want := slices.Concat(attempt, attempt, attempt); !slices.Equal(job.Names(), want) || r.Jobs[0].Attempts != 3 {
		t.Errorf("calls %q", job.Names())
	}
	nothingLeft(t, h)
}

// A guest that dies in build_script is a system failure; after_script is
// still asked for and fails fast with the same reason.
func TestReplayFailSystem(t *testing.T) {
	h := guests(t)
	r := recording(t, "custom-fail-system")
	j := &r.Jobs[0]
	s := session(t, h.Driver(), r, j, busybox(t, h))
	stages := slices.Clone(j.Stages)
	for i := range stages {
		if stages[i].Name == execdrv.StageBuild {
			stages[i].Script = []byte("echo going; sleep 1; echo c > /proc/sysrq-trigger; sleep 60\n")
		}
	}
	job, err := s.RunJob(t.Context(), stages, nil)
	if err != nil {
		t.Fatal(err)
	}
	if v := job.Verdict; v.Reason != "runner_system_failure" || v.Text != "exit status 2" || v.ExitCode != 0 {
		t.Errorf("verdict %+v", v)
	}
	b, _ := job.Find(execdrv.StageBuild)
	if b.Exit != 2 || !strings.Contains(string(b.Stderr), "panic") || string(b.Stdout) != "going\n" {
		t.Errorf("build_script: %d\n%s%s", b.Exit, b.Stdout, b.Stderr)
	}
	a, ran := job.Find(execdrv.StageAfter)
	if !ran || a.Exit != 2 || !strings.Contains(string(a.Stderr), "panic") {
		t.Errorf("after_script: %v %d %s", ran, a.Exit, a.Stderr)
	}
	nothingLeft(t, h)
}

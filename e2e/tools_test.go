package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/execdrv"
	"virtkit/e2e/host"
)

// helper stands for gitlab-runner, which is not to be had here: it notes how it
// is called. The scripts look for it by --version.
const helper = "#!/bin/sh\nif [ \"$1\" != --version ]; then echo \"helper $1\"; fi\nexit 0\n"

// TestToolsServeTheStagesOfAJob: the stages of a recorded job that want
// gitlab-runner find the host's in an image without it; the image's own git
// stays the one that is used.
func TestToolsServeTheStagesOfAJob(t *testing.T) {
	guests(t)
	dir := filepath.Join(world.dir, "tools")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"gitlab-runner", "git"} {
		if err := os.WriteFile(filepath.Join(dir, n), []byte(helper), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h, err := host.New(root, filepath.Join(world.dir, "with-tools"), strings.Replace(config, "[executor]\n", "[executor]\ntools_dir = \""+dir+"\"\n", 1))
	if err != nil {
		t.Fatal(err)
	}
	r := recording(t, "custom-full")
	gitServer(t)
	j := &r.Jobs[0]
	s := session(t, h.Driver(), r, j, busyboxGit(t, h))
	t.Cleanup(func() { nothingLeft(t, h) })
	ready(t, s, j)
	s.Vars["CI_JOB_STATUS"] = "running"
	said := map[string]string{}
	for _, st := range j.Stages {
		if st.Name == execdrv.StageAfter {
			s.Vars["CI_JOB_STATUS"] = "success"
		}
		res, err := s.Stage(t.Context(), st.Name, st.Script)
		if err != nil || res.Exit != 0 {
			t.Fatalf("%s: exit %d, %v\n%s%s", st.Name, res.Exit, err, res.Stdout, res.Stderr)
		}
		said[st.Name] = string(res.Stdout)
		if _, wants := missingHelper[st.Name]; !wants {
			same(t, j, res, j.Want[st.Name]) // what the tools do not serve is as recorded
		}
	}
	for stage, calls := range map[string]string{
		execdrv.StageRestoreCache: "helper cache-extractor\n", execdrv.StageDownload: "helper artifacts-downloader\n",
		execdrv.StageCache: "helper cache-archiver\n", execdrv.StageUpload: "helper artifacts-uploader\n",
	} {
		if out := said[stage]; strings.Contains(out, "Missing gitlab-runner") || !strings.Contains(out, calls) {
			t.Errorf("%s says %q, want %q in it", stage, out, calls)
		}
	}
	res := stage(t, s, execdrv.StagePrepare, "command -v gitlab-runner\ncommand -v git\nmount | grep /run/vk/tools\necho x > /run/vk/tools/gitlab-runner\n")
	lines := strings.Split(string(res.Stdout), "\n")
	if len(lines) < 3 || lines[0] != "/run/vk/bin/gitlab-runner" || !strings.HasSuffix(lines[1], "/git") || strings.HasPrefix(lines[1], "/run/vk") ||
		!strings.Contains(lines[2], "ro,") || !strings.Contains(string(res.Stderr), "ead-only") {
		t.Errorf("%q %q", res.Stdout, res.Stderr)
	}
}

// TestMissingToolsAreTheHostsFault: the link that a node makes with its first
// tools is not there yet.
func TestMissingToolsAreTheHostsFault(t *testing.T) {
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, "no-tools"), strings.Replace(config, "[executor]\n", "[executor]\ntools_dir = \"/nonexistent/tools/current\"\n", 1))
	if err != nil {
		t.Fatal(err)
	}
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busyboxGit(t, h)}, nil)
	if res, _, err := s.Config(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("config: %d %v", res.Exit, err)
	}
	res, err := s.Prepare(t.Context())
	if err != nil || res.Exit != 2 || !strings.Contains(string(res.Stderr), "tools: tools_dir /nonexistent/tools/current") || !strings.Contains(string(res.Stderr), "[executor] tools_dir") {
		t.Errorf("prepare: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %d %v", res.Exit, err)
	}
	nothingLeft(t, h)
}

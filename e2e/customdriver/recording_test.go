package customdriver_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/e2e/customdriver"
)

func load(t *testing.T, name string) *customdriver.Recording {
	t.Helper()
	dir, scripts, err := customdriver.Find("../..")
	if err != nil {
		t.Skip(err)
	}
	r, err := customdriver.Load(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	for _, j := range r.Jobs {
		for _, s := range j.Stages {
			if scripts && len(s.Script) == 0 {
				t.Errorf("%s: stage %s has no script", name, s.Name)
			}
		}
	}
	return r
}

func TestLoadAll(t *testing.T) {
	dir, _, err := customdriver.Find("../..")
	if err != nil {
		t.Skip(err)
	}
	names, err := customdriver.List(dir)
	if err != nil || len(names) < 11 {
		t.Fatalf("List = %q, %v", names, err)
	}
	for _, n := range names {
		if r := load(t, n); len(r.Jobs) == 0 || len(r.Response) == 0 {
			t.Errorf("%s: %d jobs", n, len(r.Jobs))
		}
	}
}

func TestFull(t *testing.T) {
	r := load(t, "custom-full")
	j := r.Jobs[0]
	var names []string
	for _, s := range j.Stages {
		names = append(names, s.Name)
	}
	want := []string{"prepare_script", "get_sources", "restore_cache", "download_artifacts", "build_script", "step_release", "after_script", "archive_cache", "upload_artifacts_on_success", "cleanup_file_variables"}
	if len(r.Jobs) != 1 || !cmp.Equal(names, want) {
		t.Errorf("jobs %d, stages %q", len(r.Jobs), names)
	}
	if j.Vars["FILEV"] != "file contents\nline2" || j.JobEnv["FROM_JOB_ENV"] != "job-env-value" || len(j.JobEnv) != 1 {
		t.Errorf("vars: %q, job_env %q", j.Vars["FILEV"], j.JobEnv)
	}
	o := j.Want["build_script"]
	if len(o.Stdout) != 3 || o.Stdout[2] != "s=[MASKED]" {
		t.Errorf("build_script: %q", o)
	}
	if got := j.Normalise([]byte("s=s3cr3t-value-0123\n")); !cmp.Equal(got, []string{"s=[MASKED]"}) {
		t.Errorf("Normalise = %q", got)
	}
}

func TestJobsOfARecording(t *testing.T) {
	if r := load(t, "custom-git-strategies"); len(r.Jobs) != 4 || len(r.Jobs[3].Stages) != 4 {
		t.Errorf("git-strategies: %d jobs", len(r.Jobs))
	}
	if r := load(t, "custom-fail-prepare-2"); len(r.Jobs) != 1 || r.Jobs[0].Attempts != 3 {
		t.Errorf("fail-prepare-2: %d jobs, %d attempts", len(r.Jobs), r.Jobs[0].Attempts)
	}
}

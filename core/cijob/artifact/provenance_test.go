package artifact_test

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/cijob/transfer/transfertest"
	"virtkit/core/fleet/job"
)

// withProvenance is a job that asks for statements.
func withProvenance(r *rig) {
	j := r.tr.Job
	j.Job.Name, j.Job.RunnerID, j.Job.RunnerName, j.Job.ProjectPath = "build", 12, "fleet", "group/project"
	j.Sources.SHA = "f400d9d34482185362e87552bcc47c5e5a468e2c"
	j.Variables = append(j.Variables, job.Variable{Key: "SECRET", Value: "s3cr3t-value", Masked: true})
	lookup := r.tr.Lookup
	r.tr.Lookup = func(name string) (string, bool) {
		switch name {
		case "RUNNER_GENERATE_ARTIFACTS_METADATA":
			return "true", true
		case "CI_JOB_STARTED_AT":
			return "2026-12-01T01:02:03+01:00", true
		}
		return lookup(name)
	}
}

// files are those of an archive.
func files(t *testing.T, content []byte) map[string]string {
	t.Helper()
	z, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range z.File {
		rc, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(rc)
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := out[f.Name]; twice {
			t.Errorf("%s is there twice", f.Name)
		}
		out[f.Name] = string(b)
	}
	return out
}

// A job that asks for it gets a statement about each file beside them, in the
// form that GitLab documents, and with no variable's value in it.
func TestProvenance(t *testing.T) {
	r := newRig(t)
	withProvenance(r)
	transfertest.File(t, r.tr, "out/one.txt", "one\n")
	transfertest.File(t, r.tr, "out/two.txt", "two\n")
	transfertest.File(t, r.tr, "bin-metadata.json", "the job's own")
	a := job.Artifact{Name: "bin", Paths: []string{"out", "bin-metadata.json"}, Type: "archive", Format: job.Zip}
	if outcome, err := r.upload(a); outcome != job.Uploaded || err != nil {
		t.Fatal(outcome, err)
	}
	j, _ := r.gitlab.Job(1046)
	got := files(t, j.Artifacts[0].Content)
	text := got["bin-metadata.json"]
	if got["out/one.txt"] != "one\n" || got["out/two.txt"] != "two\n" || strings.Contains(text, "s3cr3t") {
		t.Errorf("the archive has %q", got)
	}
	var s map[string]any
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err, text)
	}
	run := s["predicate"].(map[string]any)["runDetails"].(map[string]any)
	meta := run["metadata"].(map[string]any)
	if meta["startedOn"] != "2026-12-01T00:02:03Z" || meta["invocationId"] != "1046" || meta["finishedOn"] == "" {
		t.Errorf("metadata: %v", meta)
	}
	project := strings.TrimSuffix(r.url, "/") + "/group/project"
	if id := run["builder"].(map[string]any)["id"]; id != project+"/-/runners/12" {
		t.Errorf("the builder is %v", id)
	}
	def := s["predicate"].(map[string]any)["buildDefinition"].(map[string]any)
	ext := def["externalParameters"].(map[string]any)
	if v, ok := ext["SECRET"]; !ok || v != "" || ext["entryPoint"] != "build" || ext["source"] != project {
		t.Errorf("externalParameters: %v", ext)
	}
	want := map[string]any{
		"_type": "https://in-toto.io/Statement/v0.1", "predicateType": "https://slsa.dev/provenance/v1",
		"subject": []any{
			map[string]any{"name": "out/one.txt", "digest": map[string]any{"sha256": "2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806"}},
			map[string]any{"name": "out/two.txt", "digest": map[string]any{"sha256": "27dd8ed44a83ff94d557f9fd0412ed5a8cbca69ea04922d88c01184a07300a5a"}},
		},
		"internalParameters":   map[string]any{"architecture": "amd64", "executor": "vk", "job": "1046", "name": "fleet"},
		"resolvedDependencies": []any{map[string]any{"uri": project, "digest": map[string]any{"sha256": "f400d9d34482185362e87552bcc47c5e5a468e2c"}}},
	}
	is := map[string]any{"_type": s["_type"], "predicateType": s["predicateType"], "subject": s["subject"],
		"internalParameters": def["internalParameters"], "resolvedDependencies": def["resolvedDependencies"]}
	if d := cmp.Diff(want, is); d != "" {
		t.Error(d)
	}
}

// What has no room for a statement has none, and no files make no archive.
func TestProvenanceOfNone(t *testing.T) {
	for _, format := range []job.Format{job.Raw, job.Gzip} {
		r := newRig(t)
		withProvenance(r)
		transfertest.File(t, r.tr, "out/one.txt", "one\n")
		a := job.Artifact{Paths: []string{"out/one.txt"}, Type: "junit", Format: format}
		if outcome, err := r.upload(a); outcome != job.Uploaded || err != nil {
			t.Errorf("%s: %v %v", format, outcome, err)
		}
	}
	r := newRig(t)
	withProvenance(r)
	if outcome, err := r.upload(job.Artifact{Paths: []string{"nothing"}, Type: "archive", Format: job.Zip}); outcome != job.Skipped || err != nil {
		t.Errorf("no files: %v %v", outcome, err)
	}
	r = newRig(t)
	transfertest.File(t, r.tr, "out/one.txt", "one\n")
	r.upload(one)
	j, _ := r.gitlab.Job(1046)
	if got := files(t, j.Artifacts[0].Content); len(got) != 1 {
		t.Errorf("a job that asks for none has %q", got)
	}
}

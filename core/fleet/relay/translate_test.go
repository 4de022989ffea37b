package relay_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/relay"
)

var update = flag.Bool("update", false, "write the golden files anew")

var source = relay.Source{ServerURL: "https://gitlab.example.com", ServerCAPEM: "CA", RunnerID: 7, RunnerName: "ci", ShortToken: "shorttok", SystemID: "r_abc",
	RequestID: "req-1", OutputLimit: 4 << 20, Info: relay.Ours("1.2.3", "abcdef", "linux", "amd64")}

// Every field of GitLab's answer goes where gitlab-dispatch's table says, and
// the result is a job that a node takes.
func TestTranslate(t *testing.T) {
	raw, err := os.ReadFile("testdata/response.json")
	if err != nil {
		t.Fatal(err)
	}
	_, spec, err := relay.Translate(raw, source)
	if err != nil {
		t.Fatal(err)
	}
	b, err := spec.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := job.Parse(b); err != nil {
		t.Errorf("what is sent cannot be read: %v", err)
	}
	var got bytes.Buffer
	if err := json.Indent(&got, b, "", " "); err != nil {
		t.Fatal(err)
	}
	got.WriteByte('\n')
	golden := "testdata/spec.json"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got.String()); d != "" {
		t.Error(d)
	}
}

// What has no value in GitLab's answer gets the one that it stands for.
func TestDefaults(t *testing.T) {
	_, spec, err := relay.Translate([]byte(`{"id":1,"token":"t","job_info":{"project_id":2,"project_full_path":"g/p"},"git_info":{},"steps":[{"name":"script","script":null}],
		"artifacts":[{}],"cache":[{"key":"k"}],"image":{"name":""},"services":null}`), source)
	if err != nil {
		t.Fatal(err)
	}
	if spec.TimeoutSecs != 7200 || spec.Steps[0].When != job.OnSuccess || spec.Steps[0].Script == nil || spec.Artifacts[0].Format != job.Zip || spec.Artifacts[0].When != job.OnSuccess ||
		spec.Caches[0].Policy != job.PullPush || spec.Caches[0].When != job.OnSuccess || spec.Image != nil || spec.Sources.ObjectFormat != "sha1" || spec.Sources.AllowFetch {
		t.Errorf("%+v", spec)
	}
}

// Jobs that cannot be run are refused with a text that holds nothing secret.
func TestRefused(t *testing.T) {
	const ok = `"id":1,"token":"SECRET","job_info":{"project_id":2,"project_full_path":"g/p"},"steps":[{"name":"script"}]`
	for text, want := range map[string]string{
		`SECRET`:                            "cannot be decoded: not JSON from byte 1 on",
		`{"id":"SECRET"}`:                   "cannot be decoded: id: a JSON string, expected int64",
		`{` + ok + `,"variables":"SECRET"}`: "cannot be decoded: variables: a JSON string",
		`{` + ok + `,"git_info":{"repo_url":"https://x:SECRET@h:port/"}}`:    "git_info.repo_url is no URL",
		`{"id":1,"token":"SECRET","steps":[{"name":"script"}]}`:              "job.project_id: 0, expected at least 1",
		`{` + ok + `,"image":{"name":"i","executor_opts":{"podman":{}}}}`:    `Unsupported "image" options [podman] for "executor_opts"; supported options are [docker kubernetes]`,
		`{` + ok + `,"services":[{"executor_opts":{"kubernetes":{"x":1}}}]}`: `Unsupported "image" options [x] for "kubernetes executor"; supported options are [user]`,
		`{` + ok + `,"image":{"executor_opts":{"docker":{"user":[]}}}}`:      "cannot be decoded: executor_opts.docker.user: neither a text nor a whole number",
		`{` + ok + `,"secrets":{"A":{}}}`:                                    "the job uses secrets:",
		`{` + ok + `,"run":[{"name":"a"}]}`:                                  "the job uses run:",
	} {
		r, spec, err := relay.Translate([]byte(text), source)
		if err == nil || spec != nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: %v, expected %q", text, err, want)
		}
		if r == nil {
			t.Errorf("%s: what could be decoded is lost", text)
		}
	}
}

func TestCacheKey(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "a": "a", "feature/x": "feature/x", "../evil": "evil", "../../etc": "etc", "..": "", ".": "", "/": "", "a%2fb": "a/b", "a%2Fb": "a/b",
		"%2e%2e/x": "x", `a\..\b`: "b", "trail ": "trail", "trail \t\n": "trail", "a / ": "a", "a/b /": "a/b", " ": "", " lead": " lead", "build:arm64": "build:arm64",
		"a//b": "a/b", "a/./b": "a/b", "a%5cb": "a%5cb", strings.Repeat("k", 300): strings.Repeat("k", 300),
	} {
		if got := relay.CacheKey(in); got != want {
			t.Errorf("CacheKey(%q) = %q, expected %q", in, got, want)
		}
	}
}

// The recorded job responses translate.
func TestRecordedResponses(t *testing.T) {
	files, _ := filepath.Glob("../../../testdata/vectors/*/custom/JOB_RESPONSE_FILE.json")
	if len(files) == 0 {
		t.Fatal("no recorded responses")
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		r, spec, err := relay.Translate(raw, source)
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		if b, err := spec.Encode(); err != nil || bytes.Contains(b, []byte("gitlab-ci-token:"+spec.Token+"@127.0.0.1:8929/group/project.git\",\"repo_object")) || r == nil {
			t.Errorf("%s: %v", f, err)
		}
	}
}

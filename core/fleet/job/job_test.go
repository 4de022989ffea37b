package job_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/job"
)

var update = flag.Bool("update", false, "write the golden file")

// sample has every field set.
func sample() *job.CiJob {
	return &job.CiJob{
		Kind: job.KindGitLabCI, ServerURL: "https://gitlab.example.com", ServerCAPEM: "-----BEGIN CERTIFICATE-----\n",
		Token: "glcbt-64_tokenoftheJob", TimeoutSecs: 3600,
		Job: job.Info{ID: 1075, Name: "build", Stage: "test", PipelineID: 500, ProjectID: 42, ProjectName: "project",
			ProjectPath: "group/project", NamespaceID: 9, RootNamespaceID: 8, UserID: 1, RunnerID: 7, RunnerName: "ci",
			SystemID: "s_0123456789ab", CorrelationID: "01J"},
		Sources: job.Sources{RepoURL: "https://gitlab.example.com/group/project.git", ObjectFormat: "sha1", Ref: "main",
			SHA: "f400d9d34482185362e87552bcc47c5e5a468e2c", BeforeSHA: "0000000000000000000000000000000000000000",
			RefType: "branch", Refspecs: []string{"+refs/heads/main:refs/remotes/origin/main"}, Depth: 20, Protected: true, AllowFetch: true},
		Variables: []job.Variable{
			{Key: "CI_JOB_ID", Value: "1075", Public: true, Raw: true},
			{Key: "PASSWORD", Value: "maskedvalue", Masked: true},
			{Key: "CERT", Value: "certificate", File: true, Public: true},
			{Key: "SETTING", Value: "ofproject"},
		},
		Steps: []job.Step{
			{Name: "script", Script: []string{"make", "curl -u me:maskedvalue"}, TimeoutSecs: 3600, When: job.OnSuccess},
			{Name: "after_script", Script: []string{"true"}, TimeoutSecs: 300, When: job.Always, AllowFailure: true},
		},
		Hooks: []job.Hook{{Name: job.PreGetSources, Script: []string{"echo pre"}}},
		Image: &job.Image{Name: "alpine:3.20", Aliases: []string{"main"}, Entrypoint: []string{""}, Command: []string{"x"},
			Ports: []job.Port{{Number: 80, Protocol: "http", Name: "web"}}, Variables: []job.Variable{{Key: "I", Value: "maskedimage", Masked: true}},
			PullPolicies: []string{"always"}, Platform: "linux/amd64", User: "1000"},
		Services:            []job.Image{{Name: "postgres:16", Aliases: []string{"db", "db2"}, Variables: []job.Variable{{Key: "S", Value: "maskedservice", Masked: true}}}},
		Artifacts:           []job.Artifact{{Name: "$CI_JOB_NAME", Untracked: true, Paths: []string{"out/"}, Exclude: []string{"out/*.o"}, When: job.Always, Type: "archive", Format: job.Zip, ExpireIn: "1 week"}},
		Caches:              []job.Cache{{Key: "k", FallbackKeys: []string{"f"}, Untracked: true, Policy: job.PullPush, Paths: []string{"vendor/"}, When: job.OnSuccess, Warnings: []string{"w"}, FallbackWarnings: []string{"fw"}}},
		Dependencies:        []job.Dependency{{ID: 901, Token: "glcbt-64_dependency", Name: "earlier", Filename: "artifacts.zip", Size: 300}},
		RegistryCredentials: []job.RegistryCredential{{URL: "registry.example.com:5000", Username: "me", Password: "registrypass"}},
		Trace:               job.Trace{Sections: true, TokenMaskPrefixes: []string{"glpat-"}, LimitBytes: 4 << 20},
	}
}

// TestSampleIsWhole: the tests below see every field.
func TestSampleIsWhole(t *testing.T) {
	set := map[string]bool{}
	var walk func(v reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			walk(v.Elem())
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.Struct:
			for i := range v.NumField() {
				f := v.Type().Name() + "." + v.Type().Field(i).Name
				set[f] = set[f] || !v.Field(i).IsZero()
				walk(v.Field(i))
			}
		}
	}
	walk(reflect.ValueOf(sample()))
	for f, ok := range set {
		if !ok {
			t.Errorf("%s is not set in the sample", f)
		}
	}
	if len(set) < 70 {
		t.Errorf("only %d fields were seen", len(set))
	}
}

func TestGolden(t *testing.T) {
	for name, j := range map[string]*job.CiJob{"job.json": sample(), "redacted.json": sample().Redacted()} {
		got, err := json.MarshalIndent(j, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, '\n')
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), string(got)); d != "" {
			t.Errorf("%s (-golden +now):\n%s", path, d)
		}
		back, err := job.Parse(want)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if d := cmp.Diff(j, back); d != "" {
			t.Errorf("%s read back (-sample +got):\n%s", path, d)
		}
	}
}

func TestParseIsStrict(t *testing.T) {
	good, err := sample().Encode()
	if err != nil {
		t.Fatal(err)
	}
	edit := func(old, new string) []byte {
		out := bytes.Replace(good, []byte(old), []byte(new), 1)
		if bytes.Equal(out, good) {
			t.Fatalf("%s is not in the sample", old)
		}
		return out
	}
	for name, c := range map[string]struct {
		in   []byte
		want string
	}{
		"empty":            {nil, "not JSON from byte 0 on"},
		"unknown kind":     {edit(`"gitlab_ci"`, `"other"`), "kind: not"},
		"unknown field":    {edit(`"stage":`, `"stadium":`), `unknown field "stadium"`},
		"a second object":  {append(bytes.Clone(good), "{}"...), "not JSON from byte"},
		"wrong type":       {edit(`"token":"glcbt-64_tokenoftheJob"`, `"token":7`), "token: a JSON number, expected string"},
		"too large":        {bytes.Repeat([]byte(" "), job.MaxBytes+1), "at most 524288 are allowed"},
		"no token":         {edit(`"token":"glcbt-64_tokenoftheJob"`, `"token":""`), "token: missing"},
		"credentials":      {edit("https://gitlab.example.com/group", "https://u:secretpw@gitlab.example.com/group"), "sources.repo_url: has credentials"},
		"climbing project": {edit(`"group/project"`, `"group/../x"`), "project_path: no path"},
		"bad when":         {edit(`"when":"on_success"`, `"when":"sometimes"`), "steps[0].when: not"},
		"two of a name":    {edit(`"after_script"`, `"script"`), "a second step of that name"},
		"no timeout":       {edit(`"timeout_secs":3600`, `"timeout_secs":0`), "timeout_secs: 0"},
		"server":           {edit(`"https://gitlab.example.com"`, `"file:///etc"`), "server_url: no http"},
	} {
		_, err := job.Parse(c.in)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, expected %q", name, err, c.want)
		}
		if err != nil && (strings.Contains(err.Error(), "secretpw") || strings.Contains(err.Error(), "tokenoftheJob")) {
			t.Errorf("%s: the error has a secret: %v", name, err)
		}
	}
}

func TestRedacted(t *testing.T) {
	j := sample()
	b, err := json.Marshal(j.Redacted())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range append(j.Secrets(), "certificate", "ofproject") {
		if bytes.Contains(b, []byte(s)) {
			t.Errorf("%q is in the redacted job", s)
		}
	}
	if !bytes.Contains(b, []byte("curl -u me:"+job.Hidden)) {
		t.Error("a secret in a command is not replaced in place")
	}
	if d := cmp.Diff(sample(), j); d != "" {
		t.Errorf("redacting changed the job:\n%s", d)
	}
}

func TestSecrets(t *testing.T) {
	want := []string{"glcbt-64_tokenoftheJob", "glcbt-64_dependency", "maskedservice", "registrypass", "maskedimage", "maskedvalue"}
	if d := cmp.Diff(want, sample().Secrets()); d != "" {
		t.Error(d)
	}
}

func TestGitLabReason(t *testing.T) {
	everything := []string{"script_failure", "runner_system_failure", "job_execution_timeout", "image_pull_failure",
		"runner_configuration_error", "runner_external_dependency_failure", "runner_interrupted", "unknown_failure"}
	for _, c := range []struct {
		f          job.Failure
		new, older string
	}{
		{"", "", ""},
		{job.Script, "script_failure", "script_failure"},
		{job.Timeout, "job_execution_timeout", "job_execution_timeout"},
		{job.ImagePull, "image_pull_failure", "runner_system_failure"},
		{job.Configuration, "runner_configuration_error", "script_failure"},
		{job.ExternalDependency, "runner_external_dependency_failure", "runner_system_failure"},
		{job.System, "runner_system_failure", "runner_system_failure"},
		{job.Interrupted, "runner_interrupted", "unknown_failure"},
		{job.Canceled, "unknown_failure", "unknown_failure"},
		{job.NoCapacity, "runner_system_failure", "runner_system_failure"},
		{job.Lost, "runner_system_failure", "runner_system_failure"},
		{"of a later version", "runner_system_failure", "runner_system_failure"},
	} {
		if got := job.GitLabReason(c.f, everything); got != c.new {
			t.Errorf("GitLabReason(%q) = %q, want %q", c.f, got, c.new)
		}
		if got := job.GitLabReason(c.f, nil); got != c.older {
			t.Errorf("GitLabReason(%q) to an older GitLab = %q, want %q", c.f, got, c.older)
		}
	}
	if len(job.Failures) != 10 {
		t.Errorf("%d classes, the spec has 10", len(job.Failures))
	}
}

func FuzzParse(f *testing.F) {
	b, _ := sample().Encode()
	f.Add(b)
	f.Add([]byte(`{"kind":"gitlab_ci"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		j, err := job.Parse(in)
		if err != nil {
			return
		}
		out, err := j.Encode()
		if err != nil {
			return // grew over the limit by escapes
		}
		if _, err := job.Parse(out); err != nil {
			t.Fatalf("what was read is not read again: %v", err)
		}
		j.Redacted()
	})
}

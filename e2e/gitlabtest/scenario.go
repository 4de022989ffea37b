package gitlabtest

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Scenario is jobs that a real gitlab-runner was given one after the other, in
// one builds directory, and what came of them (testdata/ci-more, written by
// e2e/cmd/runnerrec).
type Scenario struct {
	Note string         `json:"note"`
	Jobs []*ScenarioJob `json:"jobs"`
}

// ScenarioJob is one of them: what it was given, and below it what was recorded.
type ScenarioJob struct {
	// Job is what GitLab's answer has beside what all jobs have: objects are
	// merged, variables come behind the common ones, anything else replaces.
	// @TOKEN@, @ID@, @NAME@ stand for the job's own.
	Job    map[string]any `json:"job"`
	Rules  []Rule         `json:"rules,omitempty"`
	Cancel *CancelAction  `json:"cancel,omitempty"`
	Expire *Expiry        `json:"expire,omitempty"`
	// Vary are texts whose lines differ between any two runs, or are not to be as
	// gitlab-runner has them, and are not compared. Why says the reason.
	Vary []string `json:"vary,omitempty"`
	Why  string   `json:"why,omitempty"`
	// Failure is the fleet's class where the spec has another than gitlab-runner's
	// shell executor: a clone's, a transfer's.
	Failure string `json:"failure,omitempty"`

	Trace    []string `json:"trace,omitempty"`
	Final    Final    `json:"final"`
	Uploads  []Upload `json:"uploads,omitempty"`
	Requests []string `json:"requests,omitempty"` // of artifacts, see Transfers
}

// Dependencies are the IDs of the jobs whose artifacts the job wants.
func (j *ScenarioJob) Dependencies() (out []int64) {
	list, _ := j.Job["dependencies"].([]any)
	for _, d := range list {
		if m, ok := d.(map[string]any); ok {
			if id, ok := m["id"].(float64); ok {
				out = append(out, int64(id))
			}
		}
	}
	return out
}

// CancelAction is what GitLab's button does once the trace holds After.
type CancelAction struct {
	After    string `json:"after"`
	Graceful bool   `json:"graceful,omitempty"`
	Stage    string `json:"stage,omitempty"` // that it finds, where it is not graceful
}

// Expiry is the end of a time that the job has, in a replay: once the trace
// holds After.
type Expiry struct {
	After   string `json:"after"`
	Seconds int    `json:"seconds"` // how long that time is
}

// Final is how a job ended.
type Final struct {
	State    string `json:"state"`
	Reason   string `json:"failure_reason,omitempty"`
	ExitCode *int   `json:"exit_code,omitempty"`
}

// Upload is what GitLab was sent as an artifact.
type Upload struct {
	Query    map[string]string `json:"query"`
	Filename string            `json:"filename"`
	Kind     string            `json:"kind"`              // zip, gzip, raw
	Entries  []string          `json:"entries,omitempty"` // name, size and mode of a zip's; names of a gzip's
}

// firstJob is the ID of a scenario's first job.
const firstJob = 1001

// ID and Token are those of job i, counted from 0.
func (*Scenario) ID(i int) int64 { return firstJob + int64(i) }

// Token is job i's.
func (s *Scenario) Token(i int) string { return fmt.Sprintf("glcbt-64_jobtoken%dABCDEFGHIJ", s.ID(i)) }

// Common is what the jobs of testdata/ci-jobs have in common.
type Common struct {
	Server    string
	Variables []any
	Reasons   []string `json:"failure_reasons"`
}

// Scenarios reads those of a directory, by name.
func Scenarios(dir string) (map[string]*Scenario, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]*Scenario{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		s := &Scenario{}
		if err := json.Unmarshal(b, s); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		out[strings.TrimSuffix(filepath.Base(f), ".json")] = s
	}
	return out, nil
}

// Response is GitLab's answer that gives job i out, for a server at a URL.
func (s *Scenario) Response(i int, com *Common, server string) ([]byte, error) {
	id, name := s.ID(i), "job"
	if info, ok := s.Jobs[i].Job["job_info"].(map[string]any); ok && info["name"] != nil {
		name = fmt.Sprint(info["name"])
	}
	base := map[string]any{
		"id": id, "token": "@TOKEN@", "allow_git_fetch": true,
		"job_info": map[string]any{"id": id, "name": name, "stage": "test", "pipeline_id": 500, "project_id": 42, "project_name": "project",
			"project_full_path": "group/project", "namespace_id": 9, "root_namespace_id": 9, "user_id": 1, "time_in_queue_seconds": 1,
			"project_jobs_running_on_instance_runners_count": "0", "queue_size": 0, "queue_depth": 1},
		"git_info": map[string]any{"repo_url": "http://gitlab-ci-token:@TOKEN@@127.0.0.1:8929/group/project.git", "repo_object_format": "sha1", "ref": "main",
			"sha": "f400d9d34482185362e87552bcc47c5e5a468e2c", "before_sha": "0000000000000000000000000000000000000000", "ref_type": "branch",
			"refspecs": []any{"+refs/pipelines/500:refs/pipelines/500", "+refs/heads/main:refs/remotes/origin/main"}, "depth": 20, "protected": false},
		"runner_info": map[string]any{"timeout": 3600, "runner_session_url": nil},
		"variables":   slices.Clone(com.Variables),
		"steps":       []any{}, "hooks": []any{}, "image": nil, "services": []any{}, "artifacts": []any{}, "cache": []any{}, "dependencies": []any{},
		"credentials":    []any{map[string]any{"type": "registry", "url": "127.0.0.1:5000", "username": "gitlab-ci-token", "password": "@TOKEN@"}},
		"features":       map[string]any{"trace_sections": true, "token_mask_prefixes": []any{"glpat-"}, "failure_reasons": com.Reasons},
		"policy_options": map[string]any{},
	}
	for k, v := range s.Jobs[i].Job {
		was := base[k]
		switch more := v.(type) {
		case map[string]any:
			if into, ok := was.(map[string]any); ok {
				for k, v := range more {
					into[k] = v
				}
				continue
			}
		case []any:
			if list, ok := was.([]any); ok && k == "variables" {
				base[k] = append(list, more...)
				continue
			}
		}
		base[k] = v
	}
	b, err := json.Marshal(base)
	if err != nil {
		return nil, err
	}
	return []byte(strings.NewReplacer("@TOKEN@", s.Token(i), "@ID@", strconv.FormatInt(id, 10), "@NAME@", name, com.Server, server,
		strings.TrimPrefix(com.Server, "http://"), strings.TrimPrefix(server, "http://")).Replace(string(b))), nil
}

// Transfers are a job's requests for artifacts, one line each: endpoint, method,
// target, answer, and the names of the headers.
func Transfers(all []Request, job int64, dependencies ...int64) (out []string) {
	for _, r := range all {
		if r.Endpoint == "upload" && r.JobID == job || r.Endpoint == "download" && slices.Contains(dependencies, r.JobID) {
			var names []string
			for n := range r.Header {
				names = append(names, n)
			}
			slices.Sort(names)
			out = append(out, fmt.Sprintf("%s %s %d %s", r.Method, r.Target, r.Status, strings.Join(names, ",")))
		}
	}
	return out
}

// Uploaded describes an artifact as it came.
func Uploaded(a Artifact) (Upload, error) {
	u := Upload{Query: map[string]string{}, Filename: a.Filename, Kind: "raw"}
	for k, v := range map[string][]string(url.Values(a.Query)) {
		u.Query[k] = strings.Join(v, ",")
	}
	if z, err := zip.NewReader(bytes.NewReader(a.Content), int64(len(a.Content))); err == nil {
		u.Kind = "zip"
		for _, e := range z.File {
			u.Entries = append(u.Entries, fmt.Sprintf("%s %d %o", e.Name, e.UncompressedSize64, e.ExternalAttrs>>16))
		}
		slices.Sort(u.Entries) // gitlab-runner packs several at a time
		return u, nil
	}
	in := bytes.NewReader(a.Content)
	for z, err := gzip.NewReader(in); err == nil; err = z.Reset(in) {
		z.Multistream(false)
		u.Kind = "gzip"
		n, err := io.Copy(io.Discard, z)
		if err != nil {
			return u, fmt.Errorf("reading a gzip artifact: %w", err)
		}
		u.Entries = append(u.Entries, fmt.Sprintf("%s %d", z.Name, n))
	}
	return u, nil
}

package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Parse reads a job. It is strict: one object, no field that this version does
// not know, no text behind it, at most MaxBytes; and Check passes. An error
// names the field or byte, never a value: values are secret.
func Parse(b []byte) (*CiJob, error) {
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("job: %d bytes, at most %d are allowed", len(b), MaxBytes)
	}
	var kind struct {
		Kind string `json:"kind"`
	}
	// Unmarshal, unlike the decoder below, refuses text behind the object.
	if err := json.Unmarshal(b, &kind); err != nil {
		return nil, fmt.Errorf("job: %w", plainError(err))
	}
	if kind.Kind != KindGitLabCI {
		return nil, fmt.Errorf("job: kind: not %q, which is all that this version runs", KindGitLabCI)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var j CiJob
	if err := d.Decode(&j); err != nil {
		return nil, fmt.Errorf("job: %w", plainError(err))
	}
	if err := j.Check(); err != nil {
		return nil, err
	}
	return &j, nil
}

// plainError is a decoder's error without what it read.
func plainError(err error) error {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("not JSON from byte %d on", syntax.Offset)
	case errors.As(err, &kind):
		word, _, _ := strings.Cut(kind.Value, " ")
		return fmt.Errorf("%s: a JSON %s, expected %s", kind.Field, word, kind.Type)
	}
	return err // an unknown field's name, or an unexpected end
}

// Encode writes a job. A job that fails its Check or is over MaxBytes is an
// error.
func (j *CiJob) Encode() ([]byte, error) {
	if err := j.Check(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("job: %d bytes, at most %d are allowed", len(b), MaxBytes)
	}
	return b, nil
}

// Check tells everything that is wrong, joined, each with its path.
func (j *CiJob) Check() error {
	var bad []error
	fail := func(format string, a ...any) { bad = append(bad, fmt.Errorf("job: "+format, a...)) }
	text := func(field, v string) {
		if strings.TrimSpace(v) == "" {
			fail("%s: missing", field)
		}
	}
	if j.Kind != KindGitLabCI {
		fail("kind: not %q", KindGitLabCI)
	}
	httpURL := func(field, v string) {
		switch u, err := url.Parse(v); {
		case err != nil || u.Hostname() == "" || (u.Scheme != "http" && u.Scheme != "https"):
			fail("%s: no http or https URL", field)
		case u.User != nil:
			fail("%s: has credentials", field)
		}
	}
	httpURL("server_url", j.ServerURL)
	text("token", j.Token)
	if j.TimeoutSecs < 1 {
		fail("timeout_secs: %d, expected at least 1", j.TimeoutSecs)
	}
	if j.Job.ID < 1 {
		fail("job.id: %d, expected at least 1", j.Job.ID)
	}
	if j.Job.ProjectID < 1 {
		fail("job.project_id: %d, expected at least 1", j.Job.ProjectID)
	}
	checkProjectPath(j.Job.ProjectPath, fail)
	if j.Sources.RepoURL != "" {
		httpURL("sources.repo_url", j.Sources.RepoURL)
	}
	if j.Sources.Depth < 0 {
		fail("sources.depth: %d is negative", j.Sources.Depth)
	}
	for i, v := range j.Variables {
		if v.Key == "" || strings.ContainsAny(v.Key, "=\x00") {
			fail("variables[%d].key: no name of a variable", i)
		}
	}
	if len(j.Steps) == 0 {
		fail("steps: none")
	}
	seen := map[string]bool{}
	for i, s := range j.Steps {
		if s.Name == "" || strings.ContainsAny(s.Name, "/\x00\r\n") {
			fail("steps[%d].name: no name of a step", i)
		}
		if seen[s.Name] {
			fail("steps[%d].name: a second step of that name", i)
		}
		seen[s.Name] = true
		checkWhen(fmt.Sprintf("steps[%d].when", i), s.When, fail)
	}
	for i, h := range j.Hooks {
		if h.Name != PreGetSources && h.Name != PostGetSources {
			fail("hooks[%d].name: not %s or %s", i, PreGetSources, PostGetSources)
		}
	}
	if j.Image != nil {
		text("image.name", j.Image.Name)
	}
	for i, s := range j.Services {
		text(fmt.Sprintf("services[%d].name", i), s.Name)
	}
	for i, a := range j.Artifacts {
		checkWhen(fmt.Sprintf("artifacts[%d].when", i), a.When, fail)
		text(fmt.Sprintf("artifacts[%d].artifact_format", i), string(a.Format))
	}
	for i, c := range j.Caches {
		checkWhen(fmt.Sprintf("caches[%d].when", i), c.When, fail)
		text(fmt.Sprintf("caches[%d].policy", i), string(c.Policy))
	}
	for i, d := range j.Dependencies {
		if d.ID < 1 {
			fail("dependencies[%d].id: %d, expected at least 1", i, d.ID)
		}
	}
	if j.Trace.LimitBytes < 0 {
		fail("trace.limit_bytes: %d is negative", j.Trace.LimitBytes)
	}
	return errors.Join(bad...)
}

// checkProjectPath: the path becomes part of directories and of repositories'
// names.
func checkProjectPath(p string, fail func(string, ...any)) {
	if p == "" {
		fail("job.project_path: missing")
		return
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == "" || part == "." || part == ".." || strings.ContainsFunc(part, func(r rune) bool { return r < ' ' || r == '\\' }) {
			fail("job.project_path: no path of a project")
			return
		}
	}
}

func checkWhen(field string, w When, fail func(string, ...any)) {
	switch w {
	case OnSuccess, OnFailure, Always:
	default:
		fail("%s: not %s, %s or %s", field, OnSuccess, OnFailure, Always)
	}
}

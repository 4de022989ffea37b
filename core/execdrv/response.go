package execdrv

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// Response is the part of JOB_RESPONSE_FILE that virtkit reads. The file also
// holds the job's token and every variable in clear: nothing of it is copied
// to disk. Unknown fields are ignored and absent ones stay zero, because the
// file follows the runner's version.
type Response struct {
	ID          int64        `json:"id"`
	JobInfo     JobInfo      `json:"job_info"`
	RunnerInfo  RunnerInfo   `json:"runner_info"`
	Variables   []Variable   `json:"variables"`
	Image       Image        `json:"image"`
	Services    []Image      `json:"services"`
	Credentials []Credential `json:"credentials"`
	Token       string       `json:"token"`
	GitInfo     GitInfo      `json:"git_info"`
	AllowFetch  bool         `json:"allow_git_fetch"`
	Hooks       []Hook       `json:"hooks"`
}

// JobInfo says which job it is.
type JobInfo struct {
	Name        string `json:"name"`
	Stage       string `json:"stage"`
	ProjectID   int64  `json:"project_id"`
	ProjectName string `json:"project_name"`
	ProjectPath string `json:"project_full_path"`
}

// RunnerInfo holds the job's timeout in seconds.
type RunnerInfo struct {
	Timeout int64 `json:"timeout"`
}

// Image is the job's `image:` or one of its `services:`. Entrypoint is nil
// when the job does not say; [""] means "none".
type Image struct {
	Name         string       `json:"name"`
	Alias        string       `json:"alias"`
	Entrypoint   []string     `json:"entrypoint"`
	Command      []string     `json:"command"`   // of a service
	Variables    []Variable   `json:"variables"` // of a service
	PullPolicies []string     `json:"pull_policy"`
	ExecutorOpts ExecutorOpts `json:"executor_opts"`
}

// Variable is a variable of the job, or of one of its services, as written.
type Variable struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Public bool   `json:"public"` // not one of the project's or instance's settings
	File   bool   `json:"file"`
	Raw    bool   `json:"raw"` // nothing in it is replaced
}

// ExecutorOpts are `image:docker:` of the job.
type ExecutorOpts struct {
	Docker struct {
		Platform string          `json:"platform"`
		User     json.RawMessage `json:"user"` // a string or a number
	} `json:"docker"`
}

// DockerUser is `image:docker:user`, "" when not given.
func (i Image) DockerUser() string {
	raw := i.ExecutorOpts.Docker.User
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var n json.Number
	if json.Unmarshal(raw, &n) == nil {
		return n.String()
	}
	return ""
}

// Credential lets a job's image be pulled from a registry.
type Credential struct {
	Type     string `json:"type"` // "registry"
	URL      string `json:"url"`
	Username string `json:"username"`
	Password string `json:"password"`
}

// maxResponse bounds the file, in bytes. GitLab's own limit on a job's
// variables is far below it.
const maxResponse = 64 << 20

// ReadResponse decodes the file at path.
func ReadResponse(path string) (Response, error) {
	f, err := os.Open(path)
	if err != nil {
		return Response{}, fmt.Errorf("reading %s: %w", EnvJobResponse, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxResponse+1))
	if err != nil {
		return Response{}, fmt.Errorf("reading %s %s: %w", EnvJobResponse, path, err)
	}
	if len(b) > maxResponse {
		return Response{}, fmt.Errorf("%s %s is larger than %d MiB", EnvJobResponse, path, maxResponse>>20)
	}
	r, err := DecodeResponse(b)
	if err != nil {
		return Response{}, fmt.Errorf("%s %s: %w", EnvJobResponse, path, err)
	}
	return r, nil
}

// DecodeResponse decodes the text of a JOB_RESPONSE_FILE. An error names the
// byte where the text stops being a job, never its content.
func DecodeResponse(b []byte) (Response, error) {
	var r Response
	if strings.TrimSpace(string(b)) == "" {
		return r, fmt.Errorf("is empty, expected the job as one JSON object")
	}
	if err := json.Unmarshal(b, &r); err != nil {
		switch e := err.(type) {
		case *json.SyntaxError:
			return Response{}, fmt.Errorf("is not JSON from byte %d of %d on", e.Offset, len(b))
		case *json.UnmarshalTypeError:
			return Response{}, fmt.Errorf("field %s is a JSON %s, expected %s", orTop(e.Field), kindOnly(e.Value), e.Type)
		}
		return Response{}, err
	}
	return r, nil
}

func orTop(field string) string {
	if field == "" {
		return "(top)"
	}
	return field
}

// kindOnly drops the value that the decoder puts behind a number's kind.
func kindOnly(v string) string {
	k, _, _ := strings.Cut(v, " ")
	return k
}

// EffectiveEntrypoint is what to put before the shell of a user stage: the
// job's own choice when it has one, else the image's. A job's [""] means
// none.
func EffectiveEntrypoint(job, image []string) []string {
	if len(job) == 0 {
		return image
	}
	for _, w := range job {
		if w != "" {
			return job
		}
	}
	return nil
}

package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// response is GitLab's answer to POST /jobs/request: what of it is needed, the
// rest is ignored (gitlab-dispatch, "Every field of the response").
type response struct {
	ID    int64  `json:"id"`
	Token string `json:"token"`

	AllowGitFetch bool `json:"allow_git_fetch"`

	JobInfo struct {
		Name            string `json:"name"`
		Stage           string `json:"stage"`
		PipelineID      int64  `json:"pipeline_id"`
		ProjectID       int64  `json:"project_id"`
		ProjectName     string `json:"project_name"`
		ProjectFullPath string `json:"project_full_path"`
		NamespaceID     int64  `json:"namespace_id"`
		RootNamespaceID int64  `json:"root_namespace_id"`
		UserID          int64  `json:"user_id"`

		TimeInQueue float64 `json:"time_in_queue_seconds"`
		QueueSize   int64   `json:"queue_size"`
		QueueDepth  int64   `json:"queue_depth"`
	} `json:"job_info"`

	GitInfo struct {
		RepoURL      string   `json:"repo_url"`
		ObjectFormat string   `json:"repo_object_format"`
		Ref          string   `json:"ref"`
		SHA          string   `json:"sha"`
		BeforeSHA    string   `json:"before_sha"`
		RefType      string   `json:"ref_type"`
		Refspecs     []string `json:"refspecs"`
		Depth        int      `json:"depth"`
		Protected    bool     `json:"protected"`
	} `json:"git_info"`

	RunnerInfo struct {
		Timeout int64 `json:"timeout"`
	} `json:"runner_info"`

	Variables []variable `json:"variables"`
	Steps     []struct {
		Name         string   `json:"name"`
		Script       []string `json:"script"`
		Timeout      int64    `json:"timeout"`
		When         string   `json:"when"`
		AllowFailure bool     `json:"allow_failure"`
	} `json:"steps"`
	Image     *image  `json:"image"`
	Services  []image `json:"services"`
	Artifacts []struct {
		Name      string   `json:"name"`
		Untracked bool     `json:"untracked"`
		Paths     []string `json:"paths"`
		Exclude   []string `json:"exclude"`
		When      string   `json:"when"`
		Type      string   `json:"artifact_type"`
		Format    string   `json:"artifact_format"`
		ExpireIn  string   `json:"expire_in"`
	} `json:"artifacts"`
	Cache []struct {
		Key          string   `json:"key"`
		Untracked    bool     `json:"untracked"`
		Policy       string   `json:"policy"`
		Paths        []string `json:"paths"`
		When         string   `json:"when"`
		FallbackKeys []string `json:"fallback_keys"`
	} `json:"cache"`
	Credentials []struct {
		Type     string `json:"type"`
		URL      string `json:"url"`
		Username string `json:"username"`
		Password string `json:"password"`
	} `json:"credentials"`
	Dependencies []struct {
		ID            int64  `json:"id"`
		Token         string `json:"token"`
		Name          string `json:"name"`
		ArtifactsFile struct {
			Filename string `json:"filename"`
			Size     int64  `json:"size"`
		} `json:"artifacts_file"`
	} `json:"dependencies"`
	Features struct {
		TraceSections     bool     `json:"trace_sections"`
		TokenMaskPrefixes []string `json:"token_mask_prefixes"`
		FailureReasons    []string `json:"failure_reasons"`
	} `json:"features"`
	Secrets map[string]json.RawMessage `json:"secrets"`
	Hooks   []struct {
		Name   string   `json:"name"`
		Script []string `json:"script"`
	} `json:"hooks"`
	Run    json.RawMessage `json:"run"`
	Policy policy          `json:"policy_options"`
}

type variable struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Public bool   `json:"public"`
	File   bool   `json:"file"`
	Masked bool   `json:"masked"`
	Raw    bool   `json:"raw"`
}

type image struct {
	Name         string          `json:"name"`
	Alias        string          `json:"alias"`
	Command      []string        `json:"command"`
	Entrypoint   []string        `json:"entrypoint"`
	Ports        []port          `json:"ports"`
	Variables    []variable      `json:"variables"`
	PullPolicies []string        `json:"pull_policy"`
	Options      executorOptions `json:"executor_opts"`
}

type port struct {
	Number   int    `json:"number"`
	Protocol string `json:"protocol"`
	Name     string `json:"name"`
}

// policy is policy_options: who made the job, when that was a policy.
type policy struct {
	Job        bool     `json:"execution_policy_job"`
	Name       string   `json:"policy_name"`
	Override   *bool    `json:"policy_variables_override_allowed"`
	Exceptions []string `json:"policy_variables_override_exceptions"`
}

// lines are what gitlab-runner says of a policy's job.
func (p *policy) lines() []string {
	if !p.Job {
		return nil
	}
	first := fmt.Sprintf("Job triggered by policy %q.", p.Name)
	if p.Override == nil {
		return []string{first, "Variables defined in the policy take precedence over matching user-defined CI/CD variables for this job."}
	}
	s := "User-defined CI/CD variables are ignored in this job"
	if *p.Override {
		s = "User-defined CI/CD variables are allowed in this job"
	}
	if p.Exceptions != nil {
		s += " (except for " + strings.Join(p.Exceptions, ", ") + ")"
	}
	return []string{first, s + " according to the policy."}
}

// executorOptions is image.executor_opts. What is not known is refused, as by
// gitlab-runner.
type executorOptions struct {
	Platform, User string
	unsupported    []string // one line each
}

var knownOptions = map[string][]string{"docker": {"platform", "user"}, "kubernetes": {"user"}}

func (o *executorOptions) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		return nil
	}
	var groups map[string]json.RawMessage
	if err := json.Unmarshal(b, &groups); err != nil {
		return errors.New("executor_opts is no object")
	}
	o.check("executor_opts", groups, slices.Sorted(maps.Keys(knownOptions)))
	for _, g := range []string{"docker", "kubernetes"} {
		raw := groups[g]
		if len(raw) == 0 || string(raw) == "null" {
			continue
		}
		var opts map[string]json.RawMessage
		if err := json.Unmarshal(raw, &opts); err != nil {
			return fmt.Errorf("executor_opts.%s is no object", g)
		}
		o.check(g+" executor", opts, knownOptions[g])
		user, err := textOrNumber(opts["user"])
		if err != nil {
			return fmt.Errorf("executor_opts.%s.user: %w", g, err)
		}
		if o.User == "" { // docker's before kubernetes'
			o.User = user
		}
		if p := opts["platform"]; g == "docker" && p != nil {
			if err := json.Unmarshal(p, &o.Platform); err != nil {
				return errors.New("executor_opts.docker.platform is no text")
			}
		}
	}
	return nil
}

func (o *executorOptions) check(of string, got map[string]json.RawMessage, known []string) {
	var bad []string
	for _, k := range slices.Sorted(maps.Keys(got)) {
		if !slices.Contains(known, k) {
			bad = append(bad, k)
		}
	}
	if len(bad) > 0 {
		o.unsupported = append(o.unsupported, fmt.Sprintf("Unsupported \"image\" options %v for %q; supported options are %v", bad, of, known))
	}
}

func textOrNumber(b json.RawMessage) (string, error) {
	if len(b) == 0 || string(b) == "null" {
		return "", nil
	}
	var s string
	if json.Unmarshal(b, &s) == nil {
		return s, nil
	}
	var n int64
	if json.Unmarshal(b, &n) == nil {
		return strconv.FormatInt(n, 10), nil
	}
	return "", errors.New("neither a text nor a whole number")
}

// unsupported are the options of the job's images that nothing here knows.
func (r *response) unsupported() []string {
	var out []string
	if r.Image != nil {
		out = append(out, r.Image.Options.unsupported...)
	}
	for _, s := range r.Services {
		out = append(out, s.Options.unsupported...)
	}
	return out
}

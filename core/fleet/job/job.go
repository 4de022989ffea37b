// Package job is a GitLab job as the fleet carries it: what vk-gitlab makes of
// GitLab's answer, what the hub passes on in a start, what a node runs; and how
// it ended.
//
// A CiJob is plain data with everything filled in that a node would otherwise
// have to interpret: cache keys are expanded and sanitized, an empty format is
// a word, the repository's URL has no credentials. What only concerns the
// conversation with GitLab is not in it.
//
// # Invariants
//
// Its JSON is strict (see Parse): a node that does not know a field refuses the
// job instead of running it differently. Fields are only ever added, each new
// one with omitempty, so that jobs without it run on older nodes. A CiJob holds
// secrets in clear. It is kept in memory, and on a node in the job's start file
// (core/fleet/jobdir); whatever else is written down is Redacted.
//
// Spec: gitlab-dispatch, the job spec and its table of every field.
package job

import "virtkit/core/fleet/wire"

// KindGitLabCI is the only kind of job there is.
const KindGitLabCI = "gitlab_ci"

// MaxBytes bounds a serialized job.
const MaxBytes = 512 << 10

// CiJob is a GitLab job. "GitLab" in the comments means the field of that name
// in the answer to POST /jobs/request.
type CiJob struct {
	Kind        string `json:"kind"`
	ServerURL   string `json:"server_url"`              // the runner's configured URL of GitLab
	ServerCAPEM string `json:"server_ca_pem,omitempty"` // what the runner's tls_ca_file holds; "" = none
	Token       string `json:"token"`                   // CI_JOB_TOKEN
	TimeoutSecs int64  `json:"timeout_secs"`            // of the whole job; at least 1

	Job       Info       `json:"job"`
	Sources   Sources    `json:"sources"`
	Variables []Variable `json:"variables"` // in GitLab's order, then the runner's own; a later one of a key wins
	Steps     []Step     `json:"steps"`     // after_script is the step of that name
	Hooks     []Hook     `json:"hooks,omitempty"`

	Image    *Image  `json:"image,omitempty"`
	Services []Image `json:"services,omitempty"`

	Artifacts    []Artifact   `json:"artifacts,omitempty"`
	Caches       []Cache      `json:"caches,omitempty"`
	Dependencies []Dependency `json:"dependencies,omitempty"`

	RegistryCredentials []RegistryCredential `json:"registry_credentials,omitempty"`

	Trace Trace `json:"trace"`
}

// Info says which job it is, and whose.
type Info struct {
	ID              int64  `json:"id"`
	Name            string `json:"name"`
	Stage           string `json:"stage"`
	PipelineID      int64  `json:"pipeline_id,omitempty"`
	ProjectID       int64  `json:"project_id"`
	ProjectName     string `json:"project_name"`
	ProjectPath     string `json:"project_path"` // with its namespaces: group/project
	NamespaceID     int64  `json:"namespace_id,omitempty"`
	RootNamespaceID int64  `json:"root_namespace_id,omitempty"`
	UserID          int64  `json:"user_id,omitempty"`

	RunnerID   int64  `json:"runner_id"`             // as /runners/verify told it
	RunnerName string `json:"runner_name,omitempty"` // of vk-gitlab's configuration, for the trace
	SystemID   string `json:"system_id,omitempty"`   // of vk-gitlab, for the trace
	// CorrelationID is the X-Request-Id of GitLab's answer. Git's requests carry
	// it as X-Gitaly-Correlation-ID.
	CorrelationID string `json:"correlation_id,omitempty"`
}

// Sources is what to check out.
type Sources struct {
	RepoURL      string   `json:"repo_url"` // without credentials
	ObjectFormat string   `json:"repo_object_format"`
	Ref          string   `json:"ref"`
	SHA          string   `json:"sha"`
	BeforeSHA    string   `json:"before_sha"`
	RefType      string   `json:"ref_type"` // branch, tag
	Refspecs     []string `json:"refspecs"`
	Depth        int      `json:"depth"` // 0 = everything
	Protected    bool     `json:"protected,omitempty"`
	AllowFetch   bool     `json:"allow_fetch,omitempty"` // else GIT_STRATEGY is clone where the job does not say
}

// Variable is a variable as written: what it refers to is not yet replaced.
type Variable struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Public bool   `json:"public,omitempty"` // not one of the project's or instance's settings
	File   bool   `json:"file,omitempty"`   // the job gets the path of a file that holds the value
	Masked bool   `json:"masked,omitempty"`
	Raw    bool   `json:"raw,omitempty"` // nothing in it is replaced
}

// When says whether something is done, by how the job goes.
type When string

// The whens. In an empty one GitLab means on_success; the daemon writes it out.
const (
	OnSuccess When = "on_success"
	OnFailure When = "on_failure"
	Always    When = "always"
)

// StepScript and StepAfter are the steps of every job; a release is a further
// one.
const (
	StepScript  = "script"
	StepRelease = "release"
	StepAfter   = "after_script"
)

// Step is a list of commands.
type Step struct {
	Name         string   `json:"name"`
	Script       []string `json:"script"`
	TimeoutSecs  int64    `json:"timeout"` // 0 = none of its own
	When         When     `json:"when"`
	AllowFailure bool     `json:"allow_failure,omitempty"`
}

// HookName says when a hook runs.
type HookName string

// The hooks, around the checkout.
const (
	PreGetSources  HookName = "pre_get_sources_script"
	PostGetSources HookName = "post_get_sources_script"
)

// Hook is a list of commands around the checkout.
type Hook struct {
	Name   HookName `json:"name"`
	Script []string `json:"script"`
}

// Image is the job's image or one of its services'.
type Image struct {
	Name         string     `json:"name"`
	Aliases      []string   `json:"aliases,omitempty"`    // GitLab's alias, split
	Entrypoint   []string   `json:"entrypoint,omitempty"` // nil = the image's own; [""] = none
	Command      []string   `json:"command,omitempty"`    // of a service; nil = the image's own
	Ports        []Port     `json:"ports,omitempty"`
	Variables    []Variable `json:"variables,omitempty"`
	PullPolicies []string   `json:"pull_policy,omitempty"`
	Platform     string     `json:"platform,omitempty"` // image:docker:platform
	User         string     `json:"user,omitempty"`     // image:docker:user, else image:kubernetes:user
}

// Port is one that a service's image tells of.
type Port struct {
	Number   int    `json:"number"`
	Protocol string `json:"protocol,omitempty"`
	Name     string `json:"name,omitempty"`
}

// Format is how an artifact is packed.
type Format string

// The formats. In an empty one GitLab means zip; the daemon writes it out.
const (
	Zip     Format = "zip"
	Gzip    Format = "gzip"
	Raw     Format = "raw"
	ZipZstd Format = "zipzstd"
	TarZstd Format = "tarzstd"
)

// Artifact is files that the node uploads to GitLab.
type Artifact struct {
	Name      string   `json:"name,omitempty"` // as written
	Untracked bool     `json:"untracked,omitempty"`
	Paths     []string `json:"paths,omitempty"`
	Exclude   []string `json:"exclude,omitempty"`
	When      When     `json:"when"`
	Type      string   `json:"artifact_type,omitempty"` // archive, junit, dotenv …
	Format    Format   `json:"artifact_format"`
	ExpireIn  string   `json:"expire_in,omitempty"` // GitLab's words: "1 week"
}

// Policy is what a job does with a cache.
type Policy string

// The policies. In an empty one GitLab means pull-push; the daemon writes it
// out. One that is none of these fails the job.
const (
	PullPush Policy = "pull-push"
	Pull     Policy = "pull"
	Push     Policy = "push"
)

// SkippedFallback is what Cache.FallbackWarnings hold of a fallback key of which
// nothing is left: told, and no warning.
const SkippedFallback = "Skipping cache extraction due to empty cache key"

// Cache is files kept between jobs.
type Cache struct {
	Key          string   `json:"key"`                     // expanded and sanitized; "" = there is none left to use
	FallbackKeys []string `json:"fallback_keys,omitempty"` // expanded and sanitized, CACHE_FALLBACK_KEY the last
	Untracked    bool     `json:"untracked,omitempty"`
	Policy       Policy   `json:"policy"`
	Paths        []string `json:"paths,omitempty"`
	When         When     `json:"when"`

	// Warnings are what expanding and sanitizing had to say: of the key, printed
	// when the cache is restored and when it is saved, and of the fallback keys,
	// printed when it is restored.
	Warnings         []string `json:"warnings,omitempty"`
	FallbackWarnings []string `json:"fallback_warnings,omitempty"`
}

// RegistryCredential lets the job's images be pulled.
type RegistryCredential struct {
	URL      string `json:"url"` // host[:port], or a URL
	Username string `json:"username"`
	Password string `json:"password"`
}

// Dependency is an earlier job whose artifacts this one gets.
type Dependency struct {
	ID       int64  `json:"id"`
	Token    string `json:"token"`
	Name     string `json:"name"`
	Filename string `json:"filename,omitempty"` // artifacts_file.filename; "" = it has none, nothing is downloaded
	Size     int64  `json:"size,omitempty"`     // artifacts_file.size, in bytes
}

// Trace says how the output is written.
type Trace struct {
	Sections          bool     `json:"sections,omitempty"` // GitLab folds sections
	TokenMaskPrefixes []string `json:"token_mask_prefixes,omitempty"`
	LimitBytes        int64    `json:"limit_bytes,omitempty"` // 0 = 4 MiB
}

// Result is how a job ended. Its Failure is one of this package's.
type Result = wire.JobResult

// Outcomes of an artifact's upload.
const (
	Uploaded = "uploaded"
	Skipped  = "skipped" // no files
	TooLarge = "too_large"
	Failed   = "failed"
)

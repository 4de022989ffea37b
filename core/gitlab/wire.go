package gitlab

import "slices"

// Info is what a runner says of itself with each request for a job and each
// update. The order of the fields is the order that is sent.
type Info struct {
	Name         string     `json:"name"`
	Version      string     `json:"version"`
	Revision     string     `json:"revision"`
	Platform     string     `json:"platform"`
	Architecture string     `json:"architecture"`
	Executor     string     `json:"executor"`
	Shell        string     `json:"shell"`
	Features     Features   `json:"features"`
	Config       InfoConfig `json:"config"`
}

// InfoConfig is the part of Info that GitLab shows of a runner's configuration.
type InfoConfig struct {
	GPUs string `json:"gpus"`
}

// Features are what a runner can do. GitLab gives a job only to a runner that
// has what the job needs.
type Features struct {
	Variables               bool `json:"variables"`
	Image                   bool `json:"image"`
	Services                bool `json:"services"`
	Artifacts               bool `json:"artifacts"`
	Cache                   bool `json:"cache"`
	FallbackCacheKeys       bool `json:"fallback_cache_keys"`
	Shared                  bool `json:"shared"`
	UploadMultipleArtifacts bool `json:"upload_multiple_artifacts"`
	UploadRawArtifacts      bool `json:"upload_raw_artifacts"`
	Session                 bool `json:"session"`
	Terminal                bool `json:"terminal"`
	Refspecs                bool `json:"refspecs"`
	Masking                 bool `json:"masking"`
	Proxy                   bool `json:"proxy"`
	RawVariables            bool `json:"raw_variables"`
	ArtifactsExclude        bool `json:"artifacts_exclude"`
	MultiBuildSteps         bool `json:"multi_build_steps"`
	TraceReset              bool `json:"trace_reset"`
	TraceChecksum           bool `json:"trace_checksum"`
	TraceSize               bool `json:"trace_size"`
	VaultSecrets            bool `json:"vault_secrets"`
	Cancelable              bool `json:"cancelable"`
	ReturnExitCode          bool `json:"return_exit_code"`
	ServiceVariables        bool `json:"service_variables"`
	ServiceMultipleAliases  bool `json:"service_multiple_aliases"`
	ImageExecutorOpts       bool `json:"image_executor_opts"`
	ServiceExecutorOpts     bool `json:"service_executor_opts"`
	CancelGracefully        bool `json:"cancel_gracefully"`
	NativeSteps             bool `json:"native_steps_integration"`
	TwoPhaseCommit          bool `json:"two_phase_job_commit"`
	JobInputs               bool `json:"job_inputs"`
}

// Ours are the features that vk-gitlab has (gitlab-dispatch.txt, "Features"), and
// beyond that list what its nodes' executor does: every alias of a service, and
// docker:platform and docker:user of images. GitLab gives a job that needs what is
// not said here to no runner.
func Ours() Features {
	return Features{
		Variables: true, Image: true, Services: true, Artifacts: true, Cache: true, FallbackCacheKeys: true,
		UploadMultipleArtifacts: true, UploadRawArtifacts: true, Refspecs: true, Masking: true, RawVariables: true,
		ArtifactsExclude: true, MultiBuildSteps: true, TraceReset: true, TraceChecksum: true, TraceSize: true,
		Cancelable: true, CancelGracefully: true, ReturnExitCode: true, ServiceVariables: true, TwoPhaseCommit: true,
		ServiceMultipleAliases: true, ImageExecutorOpts: true, ServiceExecutorOpts: true,
	}
}

// jobRequest is the body of POST /jobs/request, and of POST /runners/verify.
type jobRequest struct {
	Info       Info   `json:"info"`
	Token      string `json:"token"`
	SystemID   string `json:"system_id"`
	LastUpdate string `json:"last_update,omitempty"`
}

// jobUpdate is the body of PUT /jobs/:id.
type jobUpdate struct {
	Info          Info      `json:"info"`
	Token         string    `json:"token"`
	State         State     `json:"state"`
	FailureReason string    `json:"failure_reason,omitempty"`
	Checksum      string    `json:"checksum,omitempty"`
	Output        jobOutput `json:"output"`
	ExitCode      int       `json:"exit_code,omitempty"`
}

type jobOutput struct {
	Checksum string `json:"checksum,omitempty"`
	Bytesize int64  `json:"bytesize,omitempty"`
}

// State of a job, as GitLab is told.
type State string

// The states a runner reports.
const (
	Running State = "running"
	Success State = "success"
	Failed  State = "failed"
)

// MapReason is the failure reason to send to a GitLab that knows those of
// features.failure_reasons: a newer one is told as the older one it comes from,
// anything else as unknown_failure, whether that is known or not
// (vectors/README.md 6.13). Three are known to every GitLab.
func MapReason(reason string, known []string) string {
	if reason == "" {
		return "script_failure"
	}
	has := func(r string) bool {
		switch r {
		case "script_failure", "runner_system_failure", "job_execution_timeout":
			return true
		}
		return slices.Contains(known, r)
	}
	if has(reason) {
		return reason
	}
	if older := olderReason[reason]; older != "" && has(older) {
		return older
	}
	return "unknown_failure"
}

var olderReason = map[string]string{
	"image_pull_failure":                 "runner_system_failure",
	"runner_configuration_error":         "script_failure",
	"runner_external_dependency_failure": "runner_system_failure",
}

package job

import "virtkit/core/gitlab"

// Failure is the class of a failure: JobResult.failure. "" is success.
type Failure string

// The classes. A node tells all but the last two, which are the hub's.
const (
	Script             Failure = "script"              // a step's exit code is not 0
	Timeout            Failure = "timeout"             // past timeout_secs, or past RUNNER_SCRIPT_TIMEOUT
	ImagePull          Failure = "image_pull"          // the image, or a service's, was not pulled or built
	Configuration      Failure = "configuration"       // what the job asks for is not supported, or the node's policy refuses it
	ExternalDependency Failure = "external_dependency" // the clone, an artifact's or a cache's transfer
	System             Failure = "system"              // the VM, its agent or the host
	Interrupted        Failure = "interrupted"         // the node was stopped or drained hard
	Canceled           Failure = "canceled"
	NoCapacity         Failure = "no_capacity" // not placed in time
	Lost               Failure = "lost"        // the node was
)

// Failures are all classes.
var Failures = []Failure{Script, Timeout, ImagePull, Configuration, ExternalDependency, System, Interrupted, Canceled, NoCapacity, Lost}

var reasons = map[Failure]string{
	Script:             "script_failure",
	Timeout:            "job_execution_timeout",
	ImagePull:          "image_pull_failure",
	Configuration:      "runner_configuration_error",
	ExternalDependency: "runner_external_dependency_failure",
	System:             "runner_system_failure",
	Interrupted:        "runner_interrupted",
	Canceled:           "job_canceled",
	NoCapacity:         "runner_system_failure",
	Lost:               "runner_system_failure",
}

// GitLabReason is the failure_reason to send for a class to a GitLab that knows
// the reasons of features.failure_reasons; "" for success. A class that is not
// known is one of a newer node's: a system failure.
func GitLabReason(f Failure, known []string) string {
	if f == "" {
		return ""
	}
	r := reasons[f]
	if r == "" {
		r = reasons[System]
	}
	return gitlab.MapReason(r, known)
}

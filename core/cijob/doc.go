// Package cijob runs one placed GitLab job on its node, from a job.CiJob to its
// result: the driver behind `vk node job`. It runs the executor's own commands
// (config, prepare, run, cleanup) with the environment that gitlab-runner gives
// a custom executor, stage by stage in gitlab-runner's order, writes the trace
// through core/trace into the job's directory (core/fleet/jobdir), and the
// result last.
//
// # Stages
//
//	prepare_executor            config and prepare, three attempts
//	prepare_script
//	get_sources                 GET_SOURCES_ATTEMPTS, clear_worktree between them
//	restore_cache               RESTORE_CACHE_ATTEMPTS
//	download_artifacts          ARTIFACT_DOWNLOAD_ATTEMPTS
//	step_script, step_NAME …    under RUNNER_SCRIPT_TIMEOUT, until one fails
//	after_script                under RUNNER_AFTER_SCRIPT_TIMEOUT, 5 minutes
//	archive_cache               or archive_cache_on_failure
//	upload_artifacts_on_success or upload_artifacts_on_failure
//	cleanup_file_variables
//
// A stage without work is left out, but for the first three and the last. What
// fails between get_sources and the first step leaves out the steps and
// after_script; the caches and artifacts of a failed job are still kept. The
// job's timeout and an immediate cancel leave out all that is to come. A
// graceful cancel stops the stage that runs and goes on with after_script and
// with what a failed job keeps of caches and artifacts, when the steps had
// begun; what follows the steps it does not stop.
//
// The scripts are this package's own. What they do and print is what the
// recordings under vectors/ show of gitlab-runner; the tests compare.
//
// # Failures
//
// A step's exit status is the script's failure; the clone's, a dependency's and
// an upload's are the external dependency's; what the executor says is its own
// fault is the system's. Of several, the first that counts is told: the
// script's before the upload's. A cache never fails a job; a stage of caches whose
// script cannot begin, for what is in GITLAB_ENV, does.
//
// Spec: fleet-reference, "The driver" to "Cancellation and results";
// gitlab-dispatch, the stages and the failure classes; vectors/README.md.
package cijob

import "time"

// Grace is how a call that is to end is ended: SIGTERM at once, which a stage's
// script may handle; SIGTERM again after Term, which kills what the script
// started; SIGKILL after another Kill, which the guest outlives.
type Grace struct{ Term, Kill time.Duration }

// The graces: of a job that is cancelled gracefully, as gitlab-runner's shell
// executor has it; of one whose time is over; and of one that is to end now.
var (
	Graceful  = Grace{10 * time.Minute, 10 * time.Second}
	TimedOut  = Grace{time.Minute, 10 * time.Second}
	Immediate = Grace{2 * time.Second, 10 * time.Second}
)

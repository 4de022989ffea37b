package cijob

import (
	"os"
	"strconv"
	"strings"

	"virtkit/core/fleet/job"
)

// flag is a feature flag of gitlab-runner's: a job finds all of them in its
// environment, and sets one by the variable of that name.
type flag struct {
	name string
	on   bool // unless the job says otherwise
}

// flags are those of gitlab-runner 19.4, in its order.
var flags = []flag{
	{"FF_TEST_FEATURE", false},
	{"FF_NETWORK_PER_BUILD", false},
	{"FF_USE_LEGACY_KUBERNETES_EXECUTION_STRATEGY", false},
	{"FF_USE_DIRECT_DOWNLOAD", true},
	{"FF_USE_FASTZIP", true},
	{"FF_DISABLE_UMASK_FOR_DOCKER_EXECUTOR", false},
	{"FF_ENABLE_BASH_EXIT_CODE_CHECK", false},
	{"FF_USE_WINDOWS_LEGACY_PROCESS_STRATEGY", false},
	{"FF_USE_LEGACY_BASH_EVAL", false},
	{"FF_USE_POWERSHELL_PATH_RESOLVER", false},
	{"FF_USE_DYNAMIC_TRACE_FORCE_SEND_INTERVAL", false},
	{"FF_SCRIPT_SECTIONS", false},
	{"FF_ENABLE_JOB_CLEANUP", false},
	{"FF_KUBERNETES_HONOR_ENTRYPOINT", false},
	{"FF_POSIXLY_CORRECT_ESCAPES", false},
	{"FF_RESOLVE_FULL_TLS_CHAIN", false},
	{"FF_DISABLE_POWERSHELL_STDIN", false},
	{"FF_USE_POD_ACTIVE_DEADLINE_SECONDS", true},
	{"FF_USE_ADVANCED_POD_SPEC_CONFIGURATION", false},
	{"FF_SECRET_RESOLVING_FAILS_IF_MISSING", true},
	{"FF_PRINT_POD_EVENTS", false},
	{"FF_USE_GIT_BUNDLE_URIS", true},
	{"FF_USE_GIT_NATIVE_CLONE", false},
	{"FF_USE_DUMB_INIT_WITH_KUBERNETES_EXECUTOR", false},
	{"FF_USE_INIT_WITH_DOCKER_EXECUTOR", false},
	{"FF_LOG_IMAGES_CONFIGURED_FOR_JOB", false},
	{"FF_USE_DOCKER_AUTOSCALER_DIAL_STDIO", true},
	{"FF_CLEAN_UP_FAILED_CACHE_EXTRACT", false},
	{"FF_USE_WINDOWS_JOB_OBJECT", false},
	{"FF_TIMESTAMPS", true},
	{"FF_DISABLE_AUTOMATIC_TOKEN_ROTATION", false},
	{"FF_USE_LEGACY_GCS_CACHE_ADAPTER", false},
	{"FF_DISABLE_UMASK_FOR_KUBERNETES_EXECUTOR", false},
	{"FF_USE_LEGACY_S3_CACHE_ADAPTER", false},
	{"FF_GIT_URLS_WITHOUT_TOKENS", false},
	{"FF_WAIT_FOR_POD_TO_BE_REACHABLE", false},
	{"FF_MASK_ALL_DEFAULT_TOKENS", true},
	{"FF_EXPORT_HIGH_CARDINALITY_METRICS", false},
	{"FF_USE_FLEETING_ACQUIRE_HEARTBEATS", false},
	{"FF_USE_EXPONENTIAL_BACKOFF_STAGE_RETRY", true},
	{"FF_USE_ADAPTIVE_REQUEST_CONCURRENCY", true},
	{"FF_USE_GITALY_CORRELATION_ID", true},
	{"FF_USE_GIT_PROACTIVE_AUTH", false},
	{"FF_HASH_CACHE_KEYS", false},
	{"FF_ENABLE_JOB_INPUTS_INTERPOLATION", true},
	{"FF_USE_JOB_ROUTER", false},
	{"FF_SCRIPT_TO_STEP_MIGRATION", false},
	{"FF_USE_PARALLEL_CACHE_TRANSFER", false},
	{"FF_USE_PARALLEL_ARTIFACT_TRANSFER", false},
	{"FF_CONCRETE", false},
	{"FF_SUSPENDABLE_ENVIRONMENTS", false},
	{"FF_USE_NATIVE_CONTAINER_STOP", false},
}

// Flags that this package itself obeys.
const (
	flagTimestamps     = "FF_TIMESTAMPS"
	flagScriptSections = "FF_SCRIPT_SECTIONS"
	flagExitCodeCheck  = "FF_ENABLE_BASH_EXIT_CODE_CHECK"
	flagCorrelationID  = "FF_USE_GITALY_CORRELATION_ID"
	flagBundleURIs     = "FF_USE_GIT_BUNDLE_URIS"
	flagBackoff        = "FF_USE_EXPONENTIAL_BACKOFF_STAGE_RETRY"
	flagDirectDownload = "FF_USE_DIRECT_DOWNLOAD"
	flagMaskTokens     = "FF_MASK_ALL_DEFAULT_TOKENS"
)

// flagOn is a flag's value in a job. What is no truth value is the default.
func flagOn(list []job.Variable, name string) bool {
	on := false
	for _, f := range flags {
		if f.name == name {
			on = f.on
		}
	}
	for _, v := range list {
		if v.Key == name {
			if b, err := strconv.ParseBool(flagValue(list, v)); err == nil {
				on = b
			}
		}
	}
	return on
}

// flagValue is what the job says of a flag, with what that refers to replaced.
func flagValue(list []job.Variable, v job.Variable) string {
	if v.Raw || !strings.Contains(v.Value, "$") {
		return v.Value
	}
	return os.Expand(v.Value, func(name string) (to string) {
		for _, x := range list {
			if x.Key == name {
				to = x.Value
			}
		}
		return to
	})
}

// changedFlags are those that the job sets to what is not their default, as the
// trace shows them; "" when there are none.
func changedFlags(list []job.Variable) string {
	var out []string
	for _, f := range flags {
		if on := flagOn(list, f.name); on != f.on {
			out = append(out, f.name+":"+strconv.FormatBool(on))
		}
	}
	return strings.Join(out, ", ")
}

package cijob

import (
	"fmt"
	"strconv"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
)

// setting is a variable that steers the runner, and what it counts as where it
// says nothing good.
type setting struct {
	name     string
	number   bool
	standard string
}

// settings are those that are a truth or a number, in gitlab-runner's order.
var settings = []setting{
	{"CI_DEBUG_SERVICES", false, "false"},
	{"CI_DEBUG_TRACE", false, "false"},
	{"GIT_STRATEGY", false, ""},
	{"GIT_CHECKOUT", false, "true"},
	{"GIT_SUBMODULE_STRATEGY", false, ""},
	{"GIT_SUBMODULE_DEPTH", true, ""},
	{"GIT_LFS_SKIP_SMUDGE", false, "false"},
	{"GIT_SUBMODULE_FORCE_HTTPS", false, "false"},
	{"GET_SOURCES_ATTEMPTS", true, "1"},
	{"ARTIFACT_DOWNLOAD_ATTEMPTS", true, "1"},
	{"RESTORE_CACHE_ATTEMPTS", true, "1"},
	{"EXECUTOR_JOB_SECTION_ATTEMPTS", true, "1"},
	{"SECRETS_RETRIEVAL_ATTEMPTS", true, "1"},
	{"AFTER_SCRIPT_IGNORE_ERRORS", false, "true"},
	{"CACHE_REQUEST_TIMEOUT", true, "10"},
}

// attemptSettings are those that are clamped, in gitlab-runner's order.
var attemptSettings = []string{"EXECUTOR_JOB_SECTION_ATTEMPTS", "GET_SOURCES_ATTEMPTS", "ARTIFACT_DOWNLOAD_ATTEMPTS", "RESTORE_CACHE_ATTEMPTS", "SECRETS_RETRIEVAL_ATTEMPTS"}

// settingErrors are the runner's own variables that the job gave no good value,
// in gitlab-runner's words: the job goes on with what they are otherwise.
func (v variables) settingErrors(j *job.CiJob) (out []string) {
	for _, s := range settings {
		if text := s.check(v.value(s.name), j); text != "" {
			out = append(out, s.name+": "+text)
		}
	}
	for _, name := range attemptSettings {
		if n, err := strconv.Atoi(v.value(name)); err == nil && n != execdrv.Attempts(v.value(name)) {
			out = append(out, fmt.Sprintf("%s: number of attempts out of the range [1, %d], clamping to: %d", name, execdrv.MaxAttempts, execdrv.Attempts(v.value(name))))
		}
	}
	bad := badFlags(j.Variables)
	return append(append(out, bad...), bad...) // it reads them twice
}

func (s setting) check(value string, j *job.CiJob) string {
	if value == "" {
		return ""
	}
	switch s.name {
	case "GIT_STRATEGY":
		if execdrv.IsStrategy(value) {
			return ""
		}
		standard := execdrv.StrategyClone
		if j.Sources.AllowFetch {
			standard = execdrv.StrategyFetch
		}
		return fmt.Sprintf("expected either 'clone', 'fetch', 'none' or 'empty' got %q, using default value '%s'", value, standard)
	case "GIT_SUBMODULE_STRATEGY":
		if value == "none" || value == "normal" || value == "recursive" {
			return ""
		}
		return fmt.Sprintf("expected either 'normal', 'recursive' or 'none' got %q", value)
	}
	standard, kind := s.standard, "bool"
	_, err := strconv.ParseBool(value)
	if s.number {
		kind = "int"
		_, err = strconv.ParseInt(value, 10, 64)
	}
	if err == nil {
		return ""
	}
	if s.name == "GIT_SUBMODULE_DEPTH" {
		standard = strconv.Itoa(j.Sources.Depth)
	}
	return fmt.Sprintf("expected %s got %q, using default value: %s", kind, value, standard)
}

func isBool(s string) bool { _, err := strconv.ParseBool(s); return err == nil }

// badFlags are the feature flags whose value is no truth.
func badFlags(list []job.Variable) (out []string) {
	for _, f := range flags {
		for _, x := range list {
			if x.Key != f.name {
				continue
			}
			if s := flagValue(list, x); !isBool(s) {
				out = append(out, fmt.Sprintf("%s: could not parse feature flag, expected bool, got %s", f.name, s))
			}
		}
	}
	return out
}

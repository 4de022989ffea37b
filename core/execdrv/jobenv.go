package execdrv

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// EnvFirstCall is the one entry of virtkit's job_env: what config saw, for
// the calls after it. Its text is PID:START:NAME,NAME,…: the process that
// called config, and the names in config's environment.
//
// It serves two ends. A parent that config and prepare share is the runner
// itself, without which the job has no purpose. And names that a later call
// has and config had not are the job_env entries of a wrapper around `vk
// gitlab config`: they are meant for the job, while everything else in the
// environment is the host's and never enters a guest.
const EnvFirstCall = "VIRTKIT_GITLAB_CALL"

// FirstCall is the value of EnvFirstCall.
func FirstCall(c *Call, pid int, start uint64) string {
	var names []string
	for k := range c.rest {
		if !strings.ContainsAny(k, ",:\n") {
			names = append(names, k)
		}
	}
	slices.Sort(names)
	return fmt.Sprintf("%d:%d:%s", pid, start, strings.Join(names, ","))
}

// ReadFirstCall tells who called config; false when this call does not know.
func ReadFirstCall(c *Call) (pid int, start uint64, ok bool) {
	f := strings.SplitN(c.rest[EnvFirstCall], ":", 3)
	if len(f) != 3 {
		return 0, 0, false
	}
	pid, err := strconv.Atoi(f[0])
	if err != nil || pid <= 1 {
		return 0, 0, false
	}
	start, err = strconv.ParseUint(f[1], 10, 64)
	return pid, start, err == nil && start > 0
}

// contract are the names that come from the runner and not from job_env.
var contract = []string{EnvBuildFailure, EnvSystemFailure, EnvExitCodeFile, EnvJobResponse, EnvTmpDir, EnvFirstCall,
	// What shells around the calls set differently each time.
	"_", "PWD", "OLDPWD", "SHLVL"}

// JobEnv are the entries of job_env for the job, KEY=VALUE, sorted. Nil when
// this call does not know what config saw.
func JobEnv(c *Call) []string {
	f := strings.SplitN(c.rest[EnvFirstCall], ":", 3)
	if len(f) != 3 {
		return nil
	}
	had := map[string]bool{}
	for name := range strings.SplitSeq(f[2], ",") {
		had[name] = true
	}
	var out []string
	for k, v := range c.rest {
		if had[k] || slices.Contains(contract, k) || strings.HasPrefix(k, "VIRTKIT_") || strings.ContainsAny(k, ",:\n") {
			continue
		}
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out
}

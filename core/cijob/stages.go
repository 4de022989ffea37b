package cijob

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/failpoint"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// defaultAfter is how long after_script may take where nobody says.
const defaultAfter = 5 * time.Minute

// stages is the job from prepare_script to cleanup_file_variables.
func (d *driver) stages() *verdict {
	src, v := d.readSources()
	if v != nil {
		return v
	}
	if d.vars("running").value("GIT_CLONE_PATH") != "" {
		return &verdict{failure: job.Configuration, text: "setting GIT_CLONE_PATH is not allowed, enable `custom_build_dir` feature"}
	}
	v = d.exec(d.soft, execdrv.StagePrepare, "Preparing environment", "running", job.System, func(s *script) { stagePrepare(s, d.host) })
	if v != nil {
		return v
	}
	v, begun := d.work(src)
	if d.timed.Err() != nil || d.soft.Err() != nil && !begun {
		return v // neither a timeout nor an immediate cancel leaves time for more, nor any before the steps
	}
	if bad := d.exec(d.timed, execdrv.StageCleanFileVars, "Cleaning up project directory and file based variables", d.status(v), job.System,
		func(s *script) { stageCleanFiles(s) }); bad != nil && d.timed.Err() != nil && v == nil {
		return bad
	}
	return v
}

// status is CI_JOB_STATUS once the steps are over.
func (d *driver) status(v *verdict) string {
	switch {
	case v == nil:
		return "success"
	case v.failure == job.Canceled:
		return "canceled"
	case v.failure == job.Timeout:
		return "timedout"
	}
	return "failed"
}

// readSources reads how the job wants its sources.
func (d *driver) readSources() (sources, *verdict) {
	v := d.vars("running")
	r, err := response(d.j, v)
	if err == nil {
		var resp execdrv.Response
		if resp, err = execdrv.DecodeResponse(r); err == nil {
			call := execdrv.ReadCall(v.environ(d.j))
			agent := fmt.Sprintf("vk %s %s", d.o.Version, v.value("CI_RUNNER_EXECUTABLE_ARCH"))
			return sources{Sources: execdrv.ReadSources(&call, resp), j: d.j, depth: d.j.Sources.Depth, agent: strings.TrimSpace(agent)}, nil
		}
	}
	return sources{}, &verdict{failure: job.Configuration, text: err.Error()}
}

func (d *driver) scriptOptions() scriptOptions {
	return scriptOptions{sections: d.j.Trace.Sections && flagOn(d.j.Variables, flagScriptSections), check: flagOn(d.j.Variables, flagExitCodeCheck)}
}

// work is the job from get_sources to the uploads.
// begun says whether it came to the steps.
func (d *driver) work(src sources) (v *verdict, begun bool) {
	if v = d.getSources(src); v == nil {
		v = d.restoreCaches()
	}
	if v == nil {
		v = d.download()
	}
	switch {
	case v == nil:
		return d.script(), true
	case d.soft.Err() == nil: // what is there belongs to a job that failed
		d.saveCaches(v)
		d.upload(v)
	}
	return v, false
}

// script is the job from its first step to the uploads.
func (d *driver) script() *verdict {
	script, hasScript := d.limit("RUNNER_SCRIPT_TIMEOUT")
	after, hasAfter := d.limit("RUNNER_AFTER_SCRIPT_TIMEOUT")
	v := d.steps(script, hasScript)
	if d.timed.Err() != nil {
		return v
	}
	v = d.after(v, after, hasAfter)
	if d.timed.Err() != nil {
		return &endingOf(d.timed).verdict
	}
	// A graceful cancel stops the steps. What comes after them goes on: a
	// cancelled job keeps what a failed one keeps, and one whose steps were over
	// ends as they did (the recordings: vectors/README.md, 6.6, and
	// testdata/ci-more/cancel-*; fleet-reference has it otherwise).
	cached := d.saveCaches(v)
	sent := d.upload(v)
	return cmp.Or(v, cached, sent)
}

// attempts is one of the *_ATTEMPTS variables.
func (d *driver) attempts(name string) int {
	return execdrv.Attempts(d.vars("running").value(name))
}

// again waits before another attempt of a stage; false = the job is to end.
func (d *driver) again(n int) bool {
	d.out.warning("Retrying...")
	if !flagOn(d.j.Variables, flagBackoff) {
		return d.soft.Err() == nil
	}
	wait := min(5*time.Second<<min(n-1, 10), 5*time.Minute)
	return d.o.Wait(d.soft, wait) == nil
}

func (d *driver) getSources(src sources) *verdict {
	if src.Unknown != "" && src.Strategy != execdrv.StrategyNone && src.Strategy != execdrv.StrategyEmpty {
		return &verdict{failure: job.System, text: "unknown GIT_SUBMODULE_STRATEGY"}
	}
	for n := 1; ; n++ {
		v := d.exec(d.soft, execdrv.StageSources, "Getting source from Git repository", "running", job.ExternalDependency,
			func(s *script) { stageSources(s, src, d.scriptOptions()) })
		if v == nil || d.soft.Err() != nil {
			return v
		}
		if v.failure == job.ExternalDependency && !d.cloning() {
			v.failure = job.Script
		}
		if n >= src.Attempts {
			return v
		}
		if !d.again(n) {
			return &endingOf(d.soft).verdict
		}
		d.exec(d.soft, execdrv.StageClearWorktree, "Deleting all tracked and untracked files due to source fetch failure", "running", job.ExternalDependency, stageClear)
	}
}

// cloning asks the guest whether get_sources came to its end within the clone.
func (d *driver) cloning() bool {
	var out bytes.Buffer
	s := &script{p: d.p}
	s.line("if [ -f %s ]; then echo yes; fi", q(d.p.cloneFile()))
	e := d.o.Executor.Call(d.soft, d.callOf(d.vars("running"), Call{Kind: CallRun, Stage: execdrv.StagePrepare, Script: s.bytes(), Out: &out, Err: io.Discard}))
	return e.Err == nil && e.Exit == 0 && strings.TrimSpace(out.String()) == "yes"
}

func (d *driver) restoreCaches() *verdict {
	var list []job.Cache
	for _, c := range d.j.Caches {
		if len(c.Paths) > 0 || c.Untracked {
			list = append(list, c)
		}
	}
	if len(list) == 0 {
		return nil
	}
	for _, c := range list {
		switch p := d.policy(c); {
		case c.Key == "", p == job.PullPush, p == job.Pull, p == job.Push:
		default:
			return &verdict{failure: job.System, text: fmt.Sprintf("unknown cache policy %s for %s", p, c.Key)}
		}
	}
	max := d.attempts("RESTORE_CACHE_ATTEMPTS")
	for n := 1; ; n++ {
		again := false
		v := d.moving(d.soft, execdrv.StageRestoreCache, "Restoring cache", "running", func(ctx context.Context, m *moves) *verdict {
			for _, c := range list {
				if d.restore(ctx, c, m) != nil {
					again = true
				}
			}
			return nil
		})
		again = again || v != nil
		if !again || n >= max || d.soft.Err() != nil {
			return v
		}
		if !d.again(n) {
			return &endingOf(d.soft).verdict
		}
	}
}

// policy is a cache's, which may be a variable.
func (d *driver) policy(c job.Cache) job.Policy {
	return job.Policy(d.vars("running").expand(string(c.Policy)))
}

func say(w io.Writer, colour, format string, a ...any) {
	fmt.Fprint(w, colour+fmt.Sprintf(format, a...)+reset+"\n")
}

func (d *driver) restore(ctx context.Context, c job.Cache, m *moves) error {
	out := m.out
	for _, w := range c.Warnings {
		say(out, yellow, "%s", w)
	}
	switch {
	case c.Key == "":
		say(out, green, job.SkippedFallback)
		return nil
	case d.policy(c) == job.Push:
		say(out, green, "Not downloading cache %s due to policy", c.Key)
		return nil
	}
	for _, w := range c.FallbackWarnings {
		colour := yellow
		if w == job.SkippedFallback {
			colour = green
		}
		say(out, colour, "%s", w)
	}
	switch {
	case d.o.Caches == nil:
		say(out, yellow, "WARNING: this build of vk keeps no caches")
		return nil
	}
	t, err := m.transfer(ctx)
	if err == nil {
		err = d.o.Caches.Restore(ctx, t, c)
	}
	if err != nil {
		d.o.Log.Warn("restoring a cache", "err", err)
	}
	return err
}

func (d *driver) saveCaches(v *verdict) *verdict {
	var list []job.Cache
	for _, c := range d.j.Caches {
		if wanted(c.When, v) && (len(c.Paths) > 0 || c.Untracked) {
			list = append(list, c)
		}
	}
	if len(list) == 0 {
		return nil
	}
	name, heading := execdrv.StageCache, "Saving cache for successful job"
	if v != nil {
		name, heading = execdrv.StageCacheFailure, "Saving cache for failed job"
	}
	return d.moving(d.timed, name, heading, d.status(v), func(ctx context.Context, m *moves) *verdict {
		for _, c := range list {
			if err := d.save(ctx, c, m); err != nil {
				d.o.Log.Warn("saving a cache", "err", err)
			}
		}
		return nil
	})
}

func (d *driver) save(ctx context.Context, c job.Cache, m *moves) error {
	out := m.out
	for _, w := range c.Warnings {
		say(out, yellow, "%s", w)
	}
	switch {
	case c.Key == "":
		say(out, green, "Skipping cache archiving due to empty cache key")
		return nil
	case d.policy(c) == job.Pull:
		say(out, green, "Not uploading cache %s due to policy", c.Key)
		return nil
	case d.o.Caches == nil:
		return nil // restoring has told
	}
	t, err := m.transfer(ctx)
	if err != nil {
		return err
	}
	return d.o.Caches.Save(ctx, t, c)
}

// wanted tells whether something is done in a job that went so.
func wanted(w job.When, v *verdict) bool {
	switch w {
	case job.Always:
		return true
	case job.OnFailure:
		return v != nil
	}
	return v == nil
}

func (d *driver) download() *verdict {
	var list []job.Dependency
	for _, x := range d.j.Dependencies {
		if x.Filename != "" {
			list = append(list, x)
		}
	}
	if len(list) == 0 {
		return nil
	}
	max := d.attempts("ARTIFACT_DOWNLOAD_ATTEMPTS")
	for n := 1; ; n++ {
		v := d.moving(d.soft, execdrv.StageDownload, "Downloading artifacts", "running", func(ctx context.Context, m *moves) *verdict {
			for _, x := range list {
				say(m.out, green, "Downloading artifacts for %s (%d)...", x.Name, x.ID)
				if err := d.downloadOne(ctx, x, m); err != nil {
					d.o.Log.Warn("downloading artifacts", "of", x.ID, "err", err)
					return failed(job.ExternalDependency, 1, "exit status 1")
				}
			}
			return nil
		})
		if v == nil || d.soft.Err() != nil || n >= max {
			return v
		}
		if !d.again(n) {
			return &endingOf(d.soft).verdict
		}
	}
}

func (d *driver) downloadOne(ctx context.Context, x job.Dependency, m *moves) error {
	if d.o.Artifacts == nil {
		say(m.errs, red, "ERROR: %v", errNoTransfers)
		return errNoTransfers
	}
	t, err := m.transfer(ctx)
	if err != nil {
		return err
	}
	return d.o.Artifacts.Download(ctx, t, x, flagOn(d.j.Variables, flagDirectDownload))
}

// steps runs the job's own steps until one fails.
func (d *driver) steps(limit time.Duration, limited bool) *verdict {
	ctx := d.soft
	if limited {
		var cancel context.CancelFunc
		ctx, cancel = d.o.Limit(d.soft, limit, endScript)
		defer cancel()
	}
	for _, st := range d.j.Steps {
		if st.Name == job.StepAfter {
			continue
		}
		name := execdrv.StepPrefix + st.Name
		failpoint.At(failpoint.StageBegun)
		v := d.exec(ctx, name, fmt.Sprintf("Executing %q stage of the job script", name), "running", job.Script,
			func(s *script) { stageStep(s, st, d.scriptOptions()) })
		if v != nil {
			return v
		}
	}
	return nil
}

// limit is one of the job's own limits; false = it has none.
func (d *driver) limit(name string) (time.Duration, bool) {
	v := d.vars("running").value(name)
	if strings.TrimSpace(v) == "" {
		return 0, false
	}
	left := time.Duration(d.j.TimeoutSecs)*time.Second - d.o.Clock().Sub(d.began)
	switch t, err := time.ParseDuration(v); {
	case err != nil:
		d.out.warning(fmt.Sprintf("Ignoring malformed %s timeout: %s", name, v))
	case t < 0:
		d.out.warning(fmt.Sprintf("Ignoring relative %s timeout: %s", name, v))
	case t > left:
		d.out.warning(fmt.Sprintf("%s timeout: %s is longer than job timeout. Setting to job timeout", name, v))
	case t > 0:
		return t, true
	}
	return 0, false
}

// after runs after_script, whatever the steps ended with. What it ends with
// counts only where the job says so.
func (d *driver) after(v *verdict, own time.Duration, limited bool) *verdict {
	for _, st := range d.j.Steps {
		if st.Name != job.StepAfter || len(st.Script) == 0 {
			continue
		}
		limit := defaultAfter
		if st.TimeoutSecs > 0 {
			limit = min(limit, time.Duration(st.TimeoutSecs)*time.Second)
		}
		if limited {
			limit = own
		}
		ctx, cancel := d.o.Limit(d.timed, limit, endAfter)
		bad := d.exec(ctx, execdrv.StageAfter, "Running after_script", d.status(v), job.Script,
			func(s *script) { stageAfter(s, st, d.scriptOptions()) })
		cancel()
		if bad == nil || d.timed.Err() != nil {
			return v
		}
		ignore, err := strconv.ParseBool(d.vars("running").value("AFTER_SCRIPT_IGNORE_ERRORS"))
		if err == nil && !ignore {
			if v == nil {
				return bad
			}
			return v
		}
		d.out.warning("after_script failed, but job will continue unaffected: " + bad.text)
		return v
	}
	return v
}

// upload sends the artifacts that a job that went so has.
func (d *driver) upload(v *verdict) *verdict {
	var list []job.Artifact
	for _, a := range d.j.Artifacts {
		if wanted(a.When, v) && (len(a.Paths) > 0 || a.Untracked) {
			list = append(list, a)
		}
	}
	if len(list) == 0 {
		return nil
	}
	name, heading := execdrv.StageUpload, "Uploading artifacts for successful job"
	if v != nil {
		name, heading = execdrv.StageUploadFailure, "Uploading artifacts for failed job"
	}
	return d.moving(d.timed, name, heading, d.status(v), func(ctx context.Context, m *moves) *verdict {
		for _, a := range list {
			say(m.out, green, "Uploading artifacts...")
			outcome, err := d.uploadOne(ctx, a, m)
			if outcome == "" {
				outcome = job.Failed
			}
			d.result.Artifacts = append(d.result.Artifacts, wire.ArtifactResult{Name: artifactName(a), Outcome: outcome})
			if err != nil {
				d.o.Log.Warn("uploading artifacts", "name", artifactName(a), "err", err)
				return failed(job.ExternalDependency, 1, "exit status 1")
			}
		}
		return nil
	})
}

// artifactName tells one of the job's artifacts from the others.
func artifactName(a job.Artifact) string {
	if a.Name != "" {
		return a.Name
	}
	return a.Type
}

func (d *driver) uploadOne(ctx context.Context, a job.Artifact, m *moves) (string, error) {
	if d.o.Artifacts == nil {
		say(m.errs, red, "ERROR: %v", errNoTransfers)
		return job.Failed, errNoTransfers
	}
	t, err := m.transfer(ctx)
	if err != nil {
		return job.Failed, err
	}
	outcome, err := d.o.Artifacts.Upload(ctx, t, a)
	return outcome, errors.Join(err, context.Cause(ctx))
}

package runner

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fsx"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/core/usage"
)

// History remembers what jobs have been using, by the keys of SiteOf.
type History interface {
	// Job is what is remembered under a key. The error tells what of it could
	// not be read; the rest is there.
	Job(key string) (usage.Job, error)
	// Add remembers a run of the job called name; one with an ID that is known
	// takes the other's place.
	Add(key, name string, run usage.Run) error
	// Project is what is remembered of a project, by the first part of its
	// jobs' keys. problems are what of it could not be read; fs.ErrNotExist is
	// in the error's chain when nothing is remembered.
	Project(name string) (p usage.Project, problems []error, err error)
}

// usageTime bounds what is done about a job's usage.
const usageTime = 30 * time.Second

// rememberedFile says, in a job's directory, that its run is remembered.
const rememberedFile = "remembered"

// past is what is remembered of a job; what cannot be read is told.
func (r *Runner) past(site string) usage.Job {
	if r.History == nil || site == "" {
		return usage.Job{}
	}
	j, err := r.History.Job(site)
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			r.warn(line)
		}
	}
	return j
}

// tellUsage ends a job's trace with what it has cost. Of a guest that ended
// nothing is known, and nothing is said.
func (r *Runner) tellUsage(ctx context.Context, c *execdrv.Call, g Guest, rec Record) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), usageTime)
	defer cancel()
	u, err := g.Usage(ctx)
	if err == nil {
		for _, v := range u.Victims {
			r.say("%s", v.Line())
		}
		if n := u.Killed - len(u.Victims); n > 0 {
			r.say("guest OOM: the kernel killed %d more (raise MICROVM_MEM)", n)
		}
		r.say("%s", u.Line())
		r.remember(rec, u)
	}
	if past := r.past(rec.Site); len(past.Runs) > 0 {
		if l := past.Lately(r.now(), int64(rec.TotalMemMiB())); l.Runs > 0 {
			r.say("%s", l.Line(r.reserves()))
		}
	}
	if on, err := policy.ParseSwitch(execdrv.VarUsageReport, c.Var(execdrv.VarUsageReport)); on && err == nil {
		r.tellProject(rec)
	}
}

// remember adds the run to the job's history.
func (r *Runner) remember(rec Record, u supervise.Usage) {
	if r.History == nil || rec.Site == "" {
		return
	}
	dir := r.Machines.Dir(rec.ID)
	run := usage.Run{ID: rec.ID, Ended: r.now().UTC(), CeilingMiB: int64(rec.TotalMemMiB()), Figures: u.Figures, Images: rec.images()}
	if bytes, inodes, err := fsx.Taken(dir); err == nil {
		run.JobDir, run.Inodes = &bytes, &inodes
	} else {
		r.warn("what the job's directory holds is not remembered: " + err.Error())
	}
	if err := r.History.Add(rec.Site, rec.SiteJob, run); err != nil {
		r.warn(err.Error())
		return
	}
	if err := os.WriteFile(filepath.Join(dir, rememberedFile), nil, 0o600); err != nil {
		// The end of the job will remember it again, in this one's place.
		r.warn("marking the run as remembered: " + err.Error())
	}
}

// images are the digests of what the job booted.
func (r Record) images() []string {
	var out []string
	if r.Digest != "" {
		out = append(out, r.Digest)
	}
	for _, s := range r.Services {
		if s.Digest != "" {
			out = append(out, s.Digest)
		}
	}
	return out
}

// rememberLost remembers, at cleanup, a run whose last stage never came: a job
// that was cancelled, or whose time was over.
func (r *Runner) rememberLost(ctx context.Context, id string) {
	dir := r.Machines.Dir(id)
	if _, err := os.Lstat(filepath.Join(dir, rememberedFile)); err == nil || r.History == nil {
		return
	}
	rec, err := ReadRecord(dir)
	if err != nil || rec.Site == "" {
		return // never prepared
	}
	ctx, cancel := context.WithTimeout(ctx, usageTime)
	defer cancel()
	g, err := r.Machines.Find(ctx, id)
	if err != nil {
		return
	}
	if u, err := g.Usage(ctx); err == nil {
		r.remember(rec, u)
	}
}

// tellProject reports what every job of the job's project has been using. Which
// project that is, a job cannot choose: its variables are not asked.
func (r *Runner) tellProject(rec Record) {
	project, _, ok := strings.Cut(rec.Site, "/")
	if !ok || r.History == nil {
		r.warn(execdrv.VarUsageReport + ": this runner does not say which project the job is of (" + execdrv.EnvJobResponse + "), so that there is no report")
		return
	}
	p, problems, err := r.History.Project(project)
	for _, e := range problems {
		for line := range strings.SplitSeq(e.Error(), "\n") {
			r.warn(line)
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.say("nothing is remembered of %s yet", project)
		return
	case err != nil:
		r.warn(err.Error())
		return
	}
	first, table, last := p.Report(r.now(), r.Set.FromHistory, int64(r.Set.Limits.BudgetMiB)).Lines()
	r.say("%s", first)
	r.write(strings.Join(table, "\n") + "\n")
	r.say("%s", last)
}

// reserves reports whether this host reserves memory by history.
func (r *Runner) reserves() bool { return r.Set.FromHistory && r.Set.Limits.BudgetMiB > 0 }

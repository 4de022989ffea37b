package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/policy"
	"virtkit/core/supervise"
)

// Egress is the host's part of what jobs may reach: [egress] and
// [egress.build].
type Egress struct {
	Run, Build  policy.Lists
	Audit       bool
	BuildAudit  bool
	DryRun      bool
	StrictNames bool
}

// Hub knows what the host's hub says.
type Hub interface {
	// Fallback are the rules that hold the jobs of the host's own
	// gitlab-runner; nil when the hub has none, or there is no hub.
	Fallback() (*policy.HubEgress, error)
}

// Sites keeps the standing lists of jobs.
type Sites interface {
	// Contacted adds the names that a job's guests looked up under the policy of
	// that fingerprint to the list of that key, and returns it.
	Contacted(site, fingerprint string, names []string) (*policy.Standing, error)
}

// ServiceLists is where a service's own lists are written.
type ServiceLists struct {
	VM     string // its name on the switch
	Lookup func(variable string) (value string, set bool)
}

// declared is what a job's variables, and its services', say of its egress.
type declared struct {
	run, build policy.Lists
	services   []policy.Service
	audit      bool
	dryRun     bool
	warning    string
}

// declaredEgress reads the variables of both phases. Every invalid entry is
// reported, in one error of kind JobFailed.
func (r *Runner) declaredEgress(c *execdrv.Call, services []ServiceLists) (declared, error) {
	var d declared
	var bad, more []*policy.EntryError
	d.run, bad = policy.ParseVariables(policy.Run, "", c.LookupVar)
	d.build, more = policy.ParseVariables(policy.Build, "", c.LookupVar)
	bad = append(bad, more...)
	for _, s := range services {
		l, more := policy.ParseVariables(policy.Run, s.VM, s.Lookup)
		bad = append(bad, more...)
		d.services = append(d.services, policy.Service{VM: s.VM, Lists: l})
	}
	var errs [3]error
	d.audit, errs[0] = policy.AuditOn(policy.Run, r.Set.Egress.Audit, c.LookupVar)
	_, errs[1] = policy.AuditOn(policy.Build, r.Set.Egress.BuildAudit, c.LookupVar)
	d.dryRun, d.warning, errs[2] = policy.DryRunOn(r.Set.Egress.DryRun, r.Set.Egress.Run, c.LookupVar)
	if err := policy.Refuse(bad); err != nil {
		err = &entriesError{err, append(policy.Invalid(policy.Run, bad), policy.Invalid(policy.Build, bad)...)}
		return d, jobFailed(errors.Join(append([]error{err}, errs[:]...)...))
	}
	return d, jobFailed(errors.Join(errs[:]...))
}

// entriesError is an error of a job's own lists, with what a report says of it.
type entriesError struct {
	error
	refused []policy.Refusal
}

func (e *entriesError) Unwrap() error { return e.error }

// jobFailed makes the job answer for an error of what it declares.
func jobFailed(err error) error {
	if err == nil {
		return nil
	}
	return fault.New(fault.JobFailed, "").Because(err).Hint("%s", fault.HintOf(err))
}

// readEgress decides what a job may reach, and tells in the trace what of that
// people have to know before it runs.
func (r *Runner) readEgress(c *execdrv.Call, resp execdrv.Response, services []ServiceLists) (*supervise.Egress, error) {
	d, err := r.declaredEgress(c, services)
	if err != nil {
		return nil, err
	}
	var hub *policy.HubEgress
	if r.Hub != nil {
		if hub, err = r.Hub.Fallback(); err != nil {
			return nil, err
		}
	}
	if err := hub.CheckMode(r.Set.Net.Mode); err != nil {
		return nil, err
	}
	if r.Set.Net.Mode != "switch" {
		return nil, r.unenforced(d)
	}
	e := &supervise.Egress{
		Policy: policy.Policy{Phase: policy.Run, Cap: r.Set.Egress.Run, Hub: hub, Job: d.run, Services: d.services, DryRun: d.dryRun},
		Audit:  d.audit, StrictNames: r.Set.Egress.StrictNames, Site: SiteOf(c, resp),
		Cap: policy.ReportCap(r.Set.Egress.Run, r.Set.Egress.DryRun).Fingerprint,
	}
	// What the build phase is held to is told of each job: whether one builds is
	// its image's to say.
	build := &policy.Policy{Phase: policy.Build, Cap: r.Set.Egress.Build, Hub: hub, Job: d.build}
	for _, line := range policy.LayerLines(&e.Policy, build) {
		r.write(line + "\n")
	}
	if d.warning != "" {
		r.write(d.warning + "\n")
	}
	e.Refusals = append(e.Policy.Unreachable(), build.Unreachable()...)
	for _, f := range e.Refusals {
		r.write(f.Warning() + "\n")
	}
	return e, nil
}

// unenforced refuses lists that nothing would enforce under a [net] mode
// without a switch. Without a network at all there is nothing that they would
// refuse.
func (r *Runner) unenforced(d declared) error {
	mode := r.Set.Net.Mode
	const hint = `lists of what may be reached need [net] mode = "switch" on this runner`
	switch {
	case mode == "none":
	case r.Set.Egress.Run.Restricted():
		return fault.Newf(fault.System, "the allowlist of [egress] cannot be enforced under [net] mode %q", mode).Hint(hint)
	case d.run.Restricted():
		return fault.Newf(fault.JobFailed, "MICROVM_EGRESS_ALLOW_NAME and MICROVM_EGRESS_ALLOW_IP cannot be enforced under [net] mode %q of this runner", mode).Hint(hint)
	case d.audit:
		r.warn(fmt.Sprintf("MICROVM_EGRESS_AUDIT lists nothing under [net] mode %q of this runner", mode))
	}
	return nil
}

// SiteOf is the key under which a host remembers the runs of a job:
// <project id>-<slug>/<job name>-<digest>. Two projects may have one slug, and
// two job names that differ in what a file's name cannot hold are told apart
// by the digest. What the runner was told comes before variables, which a
// pipeline can set.
func SiteOf(c *execdrv.Call, resp execdrv.Response) string {
	id := resp.JobInfo.ProjectID
	if id == 0 {
		id, _ = strconv.ParseInt(c.Var("CI_PROJECT_ID"), 10, 64)
	}
	path, name := resp.JobInfo.ProjectPath, resp.JobInfo.Name
	if path == "" {
		path = c.Var("CI_PROJECT_PATH")
	}
	if name == "" {
		name = c.Var("CI_JOB_NAME")
	}
	sum := sha256.Sum256([]byte(name))
	key := func(head, slug string) string {
		if slug == "" {
			return head
		}
		return head + "-" + slug
	}
	job := hex.EncodeToString(sum[:4])
	if s := slugOf(name); s != "" {
		job = s + "-" + job
	}
	return key(strconv.FormatInt(max(id, 0), 10), slugOf(path)) + "/" + job
}

// egressTime bounds what is done about the egress record at a stage's start
// and end.
const egressTime = 15 * time.Second

// toldFile holds, in a job's directory, the record as it was when a stage last
// told of it, so that each stage tells what came since.
const toldFile = "egress-told.json"

// stageBegins names the stage to the recorder. A guest that does not answer is
// told of by what follows.
func (r *Runner) stageBegins(ctx context.Context, g Guest, stage string) {
	ctx, cancel := context.WithTimeout(ctx, egressTime)
	defer cancel()
	_, _ = g.Egress(ctx, stage)
}

// stageEnded tells what was refused since the stage before ended, and after the
// last stage what the run contacted and the job has contacted so far. That is
// cleanup_file_variables: what cleanup says does not reach the trace.
func (r *Runner) stageEnded(ctx context.Context, g Guest, dir, stage string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), egressTime)
	defer cancel()
	now, err := g.Egress(ctx, "")
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		r.warn("what this stage was refused is not known: " + err.Error())
		return
	}
	told, err := readTold(dir)
	if err != nil {
		r.warn("what earlier stages were refused may be told again: " + err.Error())
	}
	if now.Record.Revision != told.Revision {
		for _, line := range policy.DenialLines(now.Record.Since(told), hubRules(now.Egress.Policy.Hub)) {
			r.write(line + "\n")
		}
		if err := writeTold(dir, now.Record); err != nil {
			r.warn("what this stage was refused will be told again: " + err.Error())
		}
	}
	if stage == execdrv.StageCleanFileVars {
		r.endOfRun(now)
	}
}

func hubRules(h *policy.HubEgress) []string {
	if h == nil {
		return nil
	}
	return h.Rules
}

func (r *Runner) endOfRun(e supervise.EgressRecord) {
	if e.Egress.Audit {
		for _, line := range policy.AuditLines(e.Record, jobNumber(e)) {
			r.write(line + "\n")
		}
	}
	if r.Sites == nil || e.Egress.Site == "" {
		return
	}
	fp := e.Egress.Policy.Fingerprint()
	list, err := r.Sites.Contacted(e.Egress.Site, fp, e.Record.ContactedNames())
	if err != nil {
		r.warn(err.Error())
		return
	}
	r.write(list.Line(fp) + "\n")
}

// jobNumber is GitLab's number of the job, by which people know it.
func jobNumber(e supervise.EgressRecord) string { n, _, _ := strings.Cut(e.ID, "-"); return n }

func readTold(dir string) (policy.Record, error) {
	var rec policy.Record
	b, err := os.ReadFile(filepath.Join(dir, toldFile))
	if errors.Is(err, fs.ErrNotExist) {
		return rec, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	return rec, err
}

func writeTold(dir string, rec policy.Record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	return fsx.WriteFile(filepath.Join(dir, toldFile), b, 0o600)
}

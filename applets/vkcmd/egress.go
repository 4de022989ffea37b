package vkcmd

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"time"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/ledger"
)

// egressFlags are what `vk run` says of its guest's egress. Nothing of
// [egress] in the configuration holds such a guest: that is for jobs.
type egressFlags struct {
	audit    bool
	names    []string // nil = the flag was not given
	ips      []string
	restrict bool
}

// policy checks the flags; nil when none was given. A flag's value is a list as
// a job's variable is, and one without an entry allows nothing.
func (f *egressFlags) policy(net string) (*supervise.Egress, error) {
	if !f.audit && f.names == nil && f.ips == nil && !f.restrict {
		return nil, nil
	}
	if net == "none" {
		return nil, cliutil.BadOption("flag --net none: without a network there is nothing to allow or to audit")
	}
	l, bad := policy.ParseFlags(entries(f.names), entries(f.ips), f.restrict)
	if len(bad) > 0 {
		var errs []string
		for _, e := range bad {
			errs = append(errs, "flag "+e.Error())
		}
		return nil, cliutil.BadOption("%s", strings.Join(errs, "\n"))
	}
	return &supervise.Egress{Audit: f.audit, Policy: policy.Policy{Phase: policy.Run, Job: l, Flags: true}}, nil
}

func entries(values []string) []string {
	if values == nil {
		return nil
	}
	out := []string{}
	for _, v := range values {
		out = append(out, policy.SplitList(v)...)
	}
	return out
}

// egressAsk bounds what `vk run` does for its guest's record at the end.
const egressAsk = 10 * time.Second

// tellEgress says what the guest was refused, and with --audit-egress what it
// contacted.
func (a *app) tellEgress(ctx context.Context, g guest) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), egressAsk)
	defer cancel()
	r, err := g.egress(ctx)
	if err != nil {
		a.warn("what the guest was refused is not known: %v", err)
		return
	}
	lines := policy.DenialLines(r.Record, nil)
	if r.Egress.Audit {
		lines = append(lines, policy.AuditLines(r.Record, r.Name)...)
	}
	for _, line := range lines {
		a.say("%s", strings.TrimPrefix(line, "virtkit: "))
	}
}

// egress asks the supervisor; one that is gone has handed the record on, or
// left it in the directory that was to be kept.
func (g *liveGuest) egress(ctx context.Context) (supervise.EgressRecord, error) {
	r, err := g.client.Egress(ctx, "")
	if errors.Is(err, fs.ErrNotExist) {
		return g.kept.Find(ctx, g.spec.ID)
	}
	return r, err
}

// egressRecord is the record of a guest that runs, or that is over: by its id,
// name, GitLab's job id, or the beginning of its id. live says that more may
// come.
func egressRecord(ctx context.Context, h *wire.Host, job string) (r supervise.EgressRecord, live bool, err error) {
	j, found := findJob(ctx, h.Jobs, job)
	if !found {
		r, err = h.Egress.Find(ctx, job)
		return r, false, err
	}
	c, err := supervise.Dial(j.Dir)
	switch {
	case err == nil:
		r, err = c.Egress(ctx, "")
	case errors.Is(err, supervise.ErrSupervisorGone):
		r, err = supervise.ReadEgress(j.Dir)
	}
	if errors.Is(err, fs.ErrNotExist) {
		// It may have been removed just now, its record being kept.
		if r, kerr := h.Egress.Find(ctx, j.ID); kerr == nil {
			return r, false, nil
		}
		return r, false, fault.Newf(fault.NotFound, "nothing is recorded of what guest %s reaches", j.Name).
			Hint("jobs of GitLab are recorded always, guests of vk run with --audit-egress")
	}
	return r, err == nil && !r.Ended && supervise.Locked(j.Dir), err
}

func findJob(ctx context.Context, jobs *ledger.Jobs, job string) (ledger.Job, bool) {
	all, _, err := jobs.List(ctx)
	if err == nil {
		for _, j := range all {
			if strings.HasPrefix(j.ID, job+"-") && j.Kind == "gitlab" {
				return j, true
			}
		}
	}
	j, err := jobs.Find(ctx, job)
	return j, err == nil
}

// egressReportOf is the record in the form that a hub gets. Of a guest whose
// supervisor was killed the last seconds are missing.
func egressReportOf(r supervise.EgressRecord, live bool) policy.Report {
	in := &policy.PhaseInput{Record: r.Record, Cap: r.Egress.Cap, Sent: &r.Sent, Received: &r.Received}
	if !r.Ended && !live {
		in.Coverage = policy.Partial
	}
	return policy.BuildReport(policy.ReportInput{
		Revision: r.Record.Revision, Hub: r.Egress.Policy.Hub, Refusals: r.Egress.Refusals, Run: in,
	})
}

package hub

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
)

// outputSlack is what is stored of a job's output past its trace limit, for the
// line that says that it was cut.
const (
	outputSlack = 64 << 10
	outputMax   = 64 << 20
)

// outputLimit is how much of a job's output is stored.
func outputLimit(trace int64) int64 {
	if trace <= 0 {
		trace = dispatch.DefaultTraceCap
	}
	return min(trace+outputSlack, outputMax)
}

// Submit takes a job. body is the sha256 of the request's body. A refusal by
// the approval gate is kept as the answer to the request_id, as the job is.
func (h *Hub) Submit(ctx context.Context, o Owner, q *dispatch.JobSubmission, body string) (*dispatch.JobView, *dispatch.Error) {
	if o.Key != nil {
		return nil, deny(dispatch.Forbidden, "an API key submits no GitLab job: only an enrolled relay does")
	}
	if h.o.Jobs.Outputs == nil {
		return nil, deny(dispatch.Unavailable, "this hub takes no jobs")
	}
	if len(q.Spec) > dispatch.MaxSpec {
		return nil, deny(dispatch.TooLarge, "the spec has %d bytes, at most %d are allowed", len(q.Spec), dispatch.MaxSpec)
	}
	done, e := h.once(ctx, o, q.RequestID)
	if e != nil {
		return nil, e
	}
	defer done()
	if v, e, known := h.answered(ctx, o, q.RequestID, body); known {
		return v, e
	}
	var spec job.CiJob
	// Not job.Parse: a field that only newer nodes know is theirs to refuse.
	if err := json.Unmarshal(q.Spec, &spec); err != nil {
		return nil, deny(dispatch.Invalid, "the spec is no job")
	}
	if err := spec.Check(); err != nil {
		return nil, deny(dispatch.Invalid, "%s", wire.Clean(err.Error(), wire.MaxReason))
	}
	url, err := dispatch.ServerURL(spec.ServerURL)
	if err != nil {
		return nil, deny(dispatch.Invalid, "the spec's server_url is none")
	}
	packed, err := h.jobs.kept.packSpec(&spec)
	if err != nil {
		return nil, deny(dispatch.Internal, "the spec cannot be stored")
	}
	j := &Job{ID: wire.NewID(), Owner: o.ID, State: dispatch.Queued, Revision: 1, Placement: q.Placement, TraceLimit: spec.Trace.LimitBytes, What: what(&spec, url)}
	l := &liveJob{id: j.ID, spec: q.Spec, place: q.Placement, limit: outputLimit(j.TraceLimit), res: q.Reservation,
		placeBy: time.Now().Add(time.Duration(q.PlaceWithinSecs) * time.Second), refused: map[string]time.Time{}}
	var view *dispatch.JobView
	var refusal *dispatch.Error
	failpoint.At(failpoint.Submitting)
	err = h.do(context.WithoutCancel(ctx), func(t *tx) error {
		// Before anything changes: of what fails nothing must.
		e := t.h.jobs.full()
		if e != nil {
			return e
		}
		if refusal, e = t.gate(o, q.RequestID, body, j); e != nil || refusal != nil {
			if e != nil {
				return e
			}
			return nil
		}
		c := *j
		c.N, c.Submitted = t.h.jobs.lastN+t.newJobs+1, t.unix()
		c.ImageKey = imageKey(&spec, c.Instance)
		live := *l // a batch that cannot be stored is tried again
		live.image = c.ImageKey
		t.h.jobs.enter(&live)
		t.newJobs++
		t.undo = append(t.undo, func() { t.h.jobs.leave(live.id) })
		t.putJob(&c)
		t.b.Specs = append(t.b.Specs, Spec{c.N, packed.Dict, packed.Data})
		t.request(Request{Owner: o.ID, ID: q.RequestID, Body: body, At: t.unix(), Job: c.ID})
		t.audit("", o.Name, "job submitted", fmt.Sprintf("%s: %s %s, job %d of %s", c.ID, c.Path, c.Name, c.GitLabJob, c.Instance))
		t.place(&c)
		view = t.job(c.ID).View(0)
		return nil
	})
	switch {
	case err != nil:
		return nil, denied(err)
	case refusal != nil:
		return nil, refusal
	}
	failpoint.At(failpoint.Recorded)
	h.jobs.kept.learn(h)
	return view, nil
}

// answered looks whether a request_id was answered before.
func (h *Hub) answered(ctx context.Context, o Owner, id, body string) (*dispatch.JobView, *dispatch.Error, bool) {
	old, err := h.request(ctx, o.ID, id)
	switch {
	case err != nil:
		return nil, denied(err), true
	case old == nil, h.o.Now().Unix()-old.At >= dispatch.IdempotentSecs:
		return nil, nil, false
	case old.Body != body || old.Job == "" && old.Refusal == nil:
		return nil, deny(dispatch.Conflict, "request_id was used for another request"), true
	case old.Refusal != nil:
		e := &dispatch.Error{}
		if err := json.Unmarshal(old.Refusal, &e.Failure); err != nil {
			return nil, deny(dispatch.Internal, "the first answer cannot be read"), true
		}
		e.Status = dispatch.Codes[e.Code].Status
		return nil, e, true
	}
	j, e := h.jobOf(ctx, o, old.Job)
	if e != nil {
		if e.Code == dispatch.NotFound {
			e.Status = 410
			e.Text = "the job has left the hub's history"
		}
		return nil, e, true
	}
	return j.View(h.outputLen(j)), nil, true
}

// gate lets a relay's job through, or says why not: a refusal that is stored
// with its request, or an error that is not. It fills in the instance.
func (t *tx) gate(o Owner, request, body string, j *Job) (refusal, e *dispatch.Error) {
	r := t.s.Relays[o.ID]
	if r == nil {
		return nil, deny(dispatch.Unauthorized, "the relay was removed")
	}
	st := t.s.serverStatus(o.ID)
	switch {
	case st.Status == dispatch.Rebound:
		return nil, deny(dispatch.Forbidden, "%s", st.Message)
	case r.Server != "" && j.URL != r.Server:
		return nil, deny(dispatch.Forbidden, "the job is of %s, the relay is bound to %s", j.URL, r.Server)
	}
	switch st.Status {
	case dispatch.Approved:
		j.Instance = st.Name
	case dispatch.Rejected:
		refusal = deny(dispatch.ProjectRejected, "GitLab server %s was rejected on the hub", r.Server)
	default:
		refusal = deny(dispatch.ApprovalPending, "GitLab server %s is waiting for approval on the hub", cmpServer(r.Server, j.URL))
	}
	if refusal == nil {
		p := t.s.Projects[ProjectKey{j.Instance, j.Project}]
		state := p.State
		switch {
		case state == dispatch.Approved:
			if p.Path != j.Path {
				p.Path = j.Path
				t.project(p)
			}
			return nil, nil
		case state == dispatch.Rejected:
			refusal = deny(dispatch.ProjectRejected, "project %s (ID %d) was rejected on the hub", j.Path, j.Project)
		default:
			refusal = deny(dispatch.ApprovalPending, "project %s (ID %d) is waiting for approval on the hub", j.Path, j.Project)
			if state == "" {
				if len(t.s.Projects) >= MaxProjects {
					return nil, deny(dispatch.Unavailable, "too many projects are waiting for approval")
				}
				p = Project{Instance: j.Instance, ID: j.Project, State: dispatch.Pending, FirstJob: j.GitLabJob, FirstRef: wire.Clean(j.Name, wire.MaxText), At: t.unix(), Actor: o.Name}
				t.audit("", o.Name, "project pending", fmt.Sprintf("%s %d %s", p.Instance, p.ID, j.Path))
			}
		}
		p.Path, p.Refused = j.Path, p.Refused+1
		t.project(p)
	}
	b, err := json.Marshal(refusal.Failure)
	if err != nil {
		return nil, deny(dispatch.Internal, "%v", err)
	}
	t.request(Request{Owner: o.ID, ID: request, Body: body, At: t.unix(), Refusal: b})
	t.audit("", o.Name, "job refused", fmt.Sprintf("%s: %s %s, job %d", refusal.Code, j.Path, j.Name, j.GitLabJob))
	return refusal, nil
}

func cmpServer(bound, url string) string {
	if bound != "" {
		return bound
	}
	return url
}

// what is what people are told of a job.
func what(s *job.CiJob, url string) What {
	c := func(v string) string { return wire.Clean(v, wire.MaxText) }
	return What{URL: url, Project: s.Job.ProjectID, Path: c(s.Job.ProjectPath), Ref: c(s.Sources.Ref), Tag: s.Sources.RefType == "tag", Protected: s.Sources.Protected,
		Name: c(s.Job.Name), Stage: c(s.Job.Stage), GitLabJob: s.Job.ID, Pipeline: s.Job.PipelineID, SHA: c(s.Sources.SHA), Runner: c(s.Job.RunnerName)}
}

// imageKey names the images that a job's node builds from the job's checkout,
// "" for none.
func imageKey(s *job.CiJob, instance string) string {
	var refs []string
	add := func(i job.Image) {
		if strings.HasPrefix(i.Name, "dockerfile:") || strings.HasPrefix(i.Name, "compose:") {
			refs = append(refs, i.Name)
		}
	}
	if s.Image != nil {
		add(*s.Image)
	}
	for _, i := range s.Services {
		add(i)
	}
	if len(refs) == 0 {
		return ""
	}
	slices.Sort(refs)
	return strings.Join(append([]string{instance, s.Job.ProjectPath}, slices.Compact(refs)...), "\n")
}

// full says that no more jobs are taken. Only Run adds some.
func (p *placer) full() *dispatch.Error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if len(p.live) >= MaxUnfinished {
		return deny(dispatch.Unavailable, "the hub has %d jobs that have not finished", len(p.live))
	}
	return nil
}

// enter makes a job known that is not stored yet.
func (p *placer) enter(l *liveJob) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.live[l.id] = l
}

// leave forgets one that could not be stored.
func (p *placer) leave(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.live, id)
}

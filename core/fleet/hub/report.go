package hub

import (
	"context"
	"encoding/json"
	"fmt"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// A job's egress report is kept beside its record: the one with the highest
// revision that its node sent while it ran, and in the end that of its result.

// JobEgress is a report, compressed.
type JobEgress struct {
	N        int64 // of the job
	Revision uint64
	Data     []byte
}

// maxReport is what a node's report may have: policy's bound, and some room for
// a later version's.
const maxReport = 512 << 10

// packReport checks what a node sent; false: it is none.
func (p *placer) packReport(n int64, b []byte) (JobEgress, bool) {
	var r policy.Report
	if len(b) == 0 || len(b) > maxReport || json.Unmarshal(b, &r) != nil || r.Revision > 1<<53 {
		return JobEgress{}, false
	}
	return JobEgress{n, r.Revision, p.kept.plain.Compress(b)}, true
}

// egressReport takes the report of a running job. It is of use to people: it
// survives the process, no more.
func (h *Hub) egressReport(ctx context.Context, s *Session, m *wire.EgressReport) error {
	if _, ok := h.jobs.follows(s.node, m.Job); !ok {
		return nil
	}
	return h.do(ctx, func(t *tx) error {
		j := t.job(m.Job)
		if j == nil || j.Node != s.node || j.State == dispatch.Finished {
			return nil
		}
		e, ok := h.jobs.packReport(j.N, m.Report)
		if !ok {
			h.log.Warn("an egress report cannot be read", logx.Node, s.node, logx.Job, j.ID)
			return nil
		}
		t.touched++
		t.b.Egress = append(t.b.Egress, e)
		t.events = append(t.events, Event{At: t.unix(), Node: j.Node, Kind: "job", Job: j.ID, Text: "egress report"})
		return nil
	})
}

// takeReport moves the report of a result to where reports are kept.
func (t *tx) takeReport(j *Job, r *wire.JobResult) (has bool) {
	b := r.Egress
	if r.Egress = nil; len(b) == 0 {
		return false
	}
	e, ok := t.h.jobs.packReport(j.N, b)
	if !ok {
		t.h.log.Warn("an egress report cannot be read", logx.Node, j.Node, logx.Job, j.ID)
		return false
	}
	t.touched++
	t.b.Egress = append(t.b.Egress, e)
	return true
}

// Egress is a job's egress report, so far while it runs; nil when its node sent
// none.
func (h *Hub) Egress(ctx context.Context, j *Job) (*policy.Report, error) {
	e, err := h.store.Egress(ctx, j.N)
	if err != nil || e == nil {
		return nil, err
	}
	return h.shownReport(e, j.State == dispatch.Finished && !j.Reported)
}

// shownReport is a stored report; partial: its node has not had the last word.
func (h *Hub) shownReport(e *JobEgress, partial bool) (*policy.Report, error) {
	b, err := h.jobs.kept.plain.Expand(e.Data, maxReport)
	if err != nil {
		return nil, fmt.Errorf("expanding an egress report: %w", err)
	}
	if partial {
		b = policy.PartialReport(b)
	}
	r := new(policy.Report)
	return r, json.Unmarshal(b, r)
}

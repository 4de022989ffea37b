package hubadmin

import (
	"context"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
)

// NodeOf is a node as it is listed; full adds what one node alone is shown
// with.
func NodeOf(h *hub.Hub, n *hub.Node, full bool) Node {
	v := Node{ID: n.ID, Name: n.Name, Reach: n.Reach(), Enrolled: n.Enrolled, Version: n.Version, MonitorOnly: n.MonitorOnly(),
		Sync: n.Sync(), Pending: n.Pending(h.Now()), Pools: n.Pools, PlacesNot: h.PlacesNot(n), Desired: n.Desired, Reported: n.State, Conflict: n.Conflict, VMs: n.VMs, Omitted: n.Omitted, Inventory: n.Inventory}
	if t := n.Live.Seen(); !t.IsZero() {
		v.LastSeen = t.Unix()
	}
	if b := n.Live.Beat(); b != nil {
		beat := *b.Beat
		if !full {
			beat.VMs = nil
		}
		v.Heartbeat = &beat
	}
	return v
}

// JobOf is a job as it is listed.
func JobOf(h *hub.Hub, s *hub.Snapshot, j *hub.Job) Job {
	v := Job{ID: j.ID, State: j.State, Outcome: j.Outcome(), Owner: "relay " + j.Owner, Node: j.Node, Placement: j.Placement, Stage: j.Stage, Cancel: j.Cancel,
		Submitted: j.Submitted, Accepted: j.Accepted, Finished: j.Finished, Settled: j.Settled, OutputLen: h.OutputLen(j), Result: j.Result, Guest: j.Guest, What: j.What,
		Rules: j.Rules, DryRules: j.DryRules, RulesGen: j.RulesGen}
	if r := s.Relays[j.Owner]; r != nil && r.Name != "" {
		v.Owner = "relay " + r.Name
	}
	if n := s.Nodes[j.Node]; n != nil {
		v.NodeName = n.Name
	}
	return v
}

// FindJob is one job, by its ID or 8 digits of it or more, with all that the
// hub has of it.
func FindJob(ctx context.Context, h *hub.Hub, id string) (*Job, error) {
	j, err := h.FindJob(ctx, id)
	if err != nil {
		return nil, err
	}
	v := JobOf(h, h.Snapshot(), j)
	if v.Spec, err = h.Spec(ctx, j); err != nil {
		return nil, err
	}
	if v.Egress, err = h.Egress(ctx, j); err != nil {
		return nil, err
	}
	if j.State == dispatch.Finished {
		end, err := h.Ending(ctx, j)
		if err != nil {
			return nil, err
		}
		if end != nil {
			v.End = &JobEnd{Start: end.Start, Size: end.Size, Data: end.Data}
		}
	}
	return &v, nil
}

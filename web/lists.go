package web

import (
	"context"
	"encoding/json"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

func (a *Admin) workloads(ctx context.Context, c *call) (any, error) {
	nodes := a.Hub.Snapshot().Sorted()
	name := c.r.URL.Query().Get("node")
	if name != "" {
		n, err := a.Hub.Snapshot().Find(name)
		if err != nil {
			return nil, err
		}
		nodes = []*hub.Node{n}
	}
	list := hubadmin.WorkloadList{Nodes: []hubadmin.NodeWorkloads{}}
	size := 0
	for _, n := range nodes {
		w, err := a.Hub.Store().Workloads(ctx, n.ID)
		if err != nil {
			return nil, err
		}
		v := hubadmin.NodeWorkloads{Node: n.ID, Name: n.Name, Connected: n.Live.Connected(), List: []wire.Workload{}}
		if t := n.Live.Seen(); !t.IsZero() {
			v.LastSeen = t.Unix()
		}
		if w != nil {
			v.Count, v.Omitted, v.List = len(w.List), w.Omitted, w.List
		}
		if b := n.Live.Beat(); b != nil {
			v.Memory = b.Beat.VMs
		}
		b, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		size += len(b) + 1
		list.Nodes = append(list.Nodes, v)
	}
	if size > hubadmin.MaxReply-1024 && name == "" {
		for i := range list.Nodes {
			list.Nodes[i].List, list.Nodes[i].Memory = nil, nil
		}
	}
	return list, nil
}

func (a *Admin) status(context.Context, *call) (any, error) {
	h, now := a.Hub, a.Hub.Now()
	s := hubadmin.StatusReply{Hub: h.ID(), HeartbeatSecs: int(h.Heartbeat() / time.Second), Sick: h.Sick(), Reach: map[string]int{}, States: map[string]int{},
		Conflicts: []string{}, Messages: h.Stats.Messages.Load(), StoreErrors: h.Stats.StoreErrors.Load()}
	snap := h.Snapshot()
	for _, n := range snap.Sorted() {
		s.Nodes++
		s.Reach[string(n.Reach())]++
		if n.State != nil {
			s.States[string(n.State.Node)]++
		}
		if n.Desired.Policy.Stop {
			s.Stopped++
		}
		if n.Conflict != nil {
			s.Conflicts = append(s.Conflicts, n.ID)
		}
		if y := n.Sync(); y != "ok" && y != "-" && n.Conflict == nil && !n.MonitorOnly() {
			s.NotInSync++
		}
		s.Pending += n.Pending(now)
		s.VMs += n.VMs + n.Omitted
		// Of a node that is away nothing is known: its jobs are not counted as
		// running, nor as done.
		if b := n.Live.Beat(); b != nil && n.Live.Connected() {
			s.Running += b.Beat.Admission.Running
			s.Waiting += b.Beat.Admission.Waiting
		}
	}
	for _, t := range snap.Tokens {
		if t.Spent == 0 && t.Expires > now.Unix() {
			s.Tokens++
		}
	}
	if a.Status != nil {
		a.Status(&s)
	}
	return s, nil
}

package web

import (
	"context"
	"strconv"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

// The admin socket's part of placed jobs.

func (a *Admin) jobRoutes() map[hubadmin.Route]func(context.Context, *call) (any, error) {
	return map[hubadmin.Route]func(context.Context, *call) (any, error){
		hubadmin.Relays:      a.relays,
		hubadmin.RelayShow:   a.relay,
		hubadmin.RelayRemove: a.removeRelay,
		hubadmin.GitLabs:     a.gitlabs,
		hubadmin.GitLabSet:   a.setGitLab,
		hubadmin.Projects:    a.projects,
		hubadmin.ProjectSet:  a.setProjects,
		hubadmin.Keys:        a.keys,
		hubadmin.KeyCreate:   a.createKey,
		hubadmin.KeyRevoke:   a.revokeKey,
		hubadmin.Jobs:        a.jobs,
		hubadmin.JobShow:     a.job,
		hubadmin.JobOutput:   a.jobOutput,
		hubadmin.JobCancel:   a.cancelJob,
	}
}

func relayOf(s *hub.Snapshot, r *hub.RelayNode) hubadmin.Relay {
	v := hubadmin.Relay{ID: r.ID, Name: r.Name, Connected: r.Live.Connected(), LastSeen: r.Live.Seen(), Enrolled: r.Enrolled, Server: r.Server, Status: s.ServerStatus(r.ID), Inventory: r.Inventory}
	v.Heartbeat, v.States = r.Live.Now()
	return v
}

func (a *Admin) relays(context.Context, *call) (any, error) {
	s := a.Hub.Snapshot()
	list := hubadmin.RelayList{Relays: []hubadmin.Relay{}}
	for _, r := range s.RelayList() {
		list.Relays = append(list.Relays, relayOf(s, r))
	}
	return list, nil
}

func (a *Admin) relay(_ context.Context, c *call) (any, error) {
	s := a.Hub.Snapshot()
	r, err := s.FindRelay(c.node)
	if err != nil {
		return nil, err
	}
	return relayOf(s, r), nil
}

func (a *Admin) removeRelay(ctx context.Context, c *call) (any, error) {
	s := a.Hub.Snapshot()
	r, err := s.FindRelay(c.node)
	if err != nil {
		return nil, err
	}
	_, err = a.Hub.RemoveRelay(ctx, c.actor, r.ID)
	return relayOf(s, r), err
}

func (a *Admin) gitlabs(context.Context, *call) (any, error) {
	s := a.Hub.Snapshot()
	list := hubadmin.GitLabList{Instances: []hubadmin.Instance{}, Rejected: []hubadmin.Instance{}, Pending: []hubadmin.PendingServer{}, Projects: []hubadmin.Project{}}
	bound := map[string]int{}
	for _, r := range s.Relays {
		bound[r.Server]++
	}
	for _, v := range s.ServerList() {
		i := hubadmin.Instance{Name: v.Name, URL: v.URL, At: v.At, Actor: v.Actor, Relays: bound[v.URL]}
		if v.Name == "" {
			list.Rejected = append(list.Rejected, i)
		} else {
			list.Instances = append(list.Instances, i)
		}
	}
	for _, p := range s.PendingServers() {
		list.Pending = append(list.Pending, hubadmin.PendingServer{URL: p.URL, Key: p.Key, Relays: p.Relays})
	}
	for _, p := range s.ProjectList("", dispatch.Pending) {
		list.Projects = append(list.Projects, hubadmin.ProjectOf(p))
	}
	return list, nil
}

func (a *Admin) setGitLab(ctx context.Context, c *call) (any, error) {
	var q hubadmin.GitLabRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	var err error
	switch q.Action {
	case "approve":
		_, err = a.Hub.ApproveServer(ctx, c.actor, q.URL, q.Name)
	case "reject":
		err = a.Hub.RejectServer(ctx, c.actor, q.URL)
	case "forget":
		err = a.Hub.ForgetServer(ctx, c.actor, q.URL)
	case "remove":
		err = a.Hub.RemoveInstance(ctx, c.actor, q.Name)
	default:
		err = fault.Newf(fault.Usage, "%q is nothing to do with a GitLab server", wire.Clean(q.Action, 40))
	}
	return struct{}{}, err
}

func (a *Admin) projects(_ context.Context, c *call) (any, error) {
	q := c.r.URL.Query()
	s := a.Hub.Snapshot()
	if name := q.Get("instance"); name != "" {
		if _, ok := s.Instance(name); !ok {
			return nil, fault.Newf(fault.NotFound, "no GitLab instance %q", wire.Clean(name, 80)).Hint("vk-hub gitlabs lists them")
		}
	}
	list := hubadmin.ProjectList{Projects: []hubadmin.Project{}}
	for _, p := range s.ProjectList(q.Get("instance"), dispatch.Approval(q.Get("state"))) {
		list.Projects = append(list.Projects, hubadmin.ProjectOf(p))
	}
	return list, nil
}

func (a *Admin) setProjects(ctx context.Context, c *call) (any, error) {
	var q hubadmin.ProjectRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	var refs []hub.ProjectRef
	var ids []int64
	for _, p := range q.Projects {
		refs, ids = append(refs, hub.ProjectRef{ID: p.ID, Path: p.Path}), append(ids, p.ID)
	}
	switch q.Action {
	case "approve":
		return struct{}{}, a.Hub.DecideProjects(ctx, c.actor, q.Instance, refs, dispatch.Approved)
	case "reject":
		return struct{}{}, a.Hub.DecideProjects(ctx, c.actor, q.Instance, refs, dispatch.Rejected)
	case "forget":
		return struct{}{}, a.Hub.ForgetProjects(ctx, c.actor, q.Instance, ids)
	}
	return nil, fault.Newf(fault.Usage, "%q is nothing to do with a project", wire.Clean(q.Action, 40))
}

func (a *Admin) keys(context.Context, *call) (any, error) {
	list := hubadmin.KeyList{Keys: []hubadmin.Key{}}
	for _, k := range a.Hub.Snapshot().KeyList() {
		list.Keys = append(list.Keys, hubadmin.Key{Name: k.Name, Prefix: k.Prefix, Scopes: k.Scopes, Pools: k.Pools, Max: k.Max, Created: k.Created, Actor: k.Actor,
			Expires: k.Expires, Revoked: k.Revoked, Works: k.Works(a.Hub.Now().Unix()), Client: k.Client})
	}
	return list, nil
}

func (a *Admin) createKey(ctx context.Context, c *call) (any, error) {
	var q hubadmin.KeyRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	ttl := time.Duration(min(max(q.TTLSecs, 0), 1<<31)) * time.Second // no overflow; the hub refuses it
	text, err := a.Hub.CreateKey(ctx, c.actor, hub.Key{Name: q.Name, Scopes: q.Scopes, Pools: q.Pools, Max: q.Max}, ttl)
	if err != nil {
		return nil, err
	}
	return hubadmin.KeyReply{Key: text}, nil
}

func (a *Admin) revokeKey(ctx context.Context, c *call) (any, error) {
	n, err := a.Hub.RevokeKey(ctx, c.actor, c.r.URL.Query().Get("name"))
	return hubadmin.KeyRevoked{Removed: n}, err
}

// maxListed is how many jobs an answer may have.
const maxListed = 10_000

func (a *Admin) jobs(ctx context.Context, c *call) (any, error) {
	v := c.r.URL.Query()
	q := hub.JobQuery{Events: v.Get("events") == "true", Limit: 50, Instance: v.Get("gitlab"), Project: v.Get("project"), Ref: v.Get("ref"), Name: v.Get("name"), Failure: v.Get("outcome"), Pool: v.Get("pool"), State: dispatch.State(v.Get("state"))}
	for key, p := range map[string]*int64{"since": &q.Since, "before": &q.Before} {
		if s := v.Get(key); s != "" {
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				return nil, fault.Newf(fault.Usage, "%s %q is no number", key, wire.Clean(s, 40))
			}
			*p = n
		}
	}
	if s := v.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > maxListed {
			return nil, fault.Newf(fault.Usage, "limit %q is not between 1 and %d", wire.Clean(s, 40), maxListed)
		}
		q.Limit = n
	}
	s := a.Hub.Snapshot()
	if name := v.Get("node"); name != "" {
		n, err := s.Find(name)
		switch {
		case err == nil:
			q.Node = n.ID
		case wire.IsHex(name, wire.IDLen):
			q.Node = name // a removed one's jobs are kept
		default:
			return nil, err
		}
	}
	jobs, err := a.Hub.Jobs(ctx, q)
	list := hubadmin.JobList{Jobs: []hubadmin.Job{}}
	for _, j := range jobs {
		list.Jobs = append(list.Jobs, hubadmin.JobOf(a.Hub, s, j))
	}
	return list, err
}

func (a *Admin) job(ctx context.Context, c *call) (any, error) {
	return hubadmin.FindJob(ctx, a.Hub, c.node)
}

func (a *Admin) jobOutput(ctx context.Context, c *call) (any, error) {
	j, err := a.Hub.FindJob(ctx, c.node)
	if err != nil {
		return nil, err
	}
	offset, err := strconv.ParseInt(c.r.URL.Query().Get("offset"), 10, 64)
	wait, werr := strconv.Atoi(c.r.URL.Query().Get("wait"))
	if err != nil || werr != nil || offset < 0 || wait < 0 {
		return nil, fault.New(fault.Usage, "offset and wait are numbers from 0 up")
	}
	if j.Settled != 0 {
		end, err := a.Hub.Ending(ctx, j)
		if err != nil {
			return nil, err
		}
		if end == nil {
			return nil, fault.Newf(fault.NotFound, "nothing is kept of the output of job %s", j.ID)
		}
		from := min(max(0, offset-end.Start), int64(len(end.Data)))
		return hubadmin.JobPiece{Offset: end.Start + from, Length: end.Size, Complete: true, Data: end.Data[from:]}, nil
	}
	p, e := a.Hub.Output(ctx, hub.Owner{ID: j.Owner}, j.ID, offset, time.Duration(wait)*time.Second)
	if e != nil {
		return nil, fault.New(fault.NotFound, e.Text)
	}
	return hubadmin.JobPiece{Offset: offset, Length: p.Length, Complete: p.Complete, Data: p.Data}, nil
}

func (a *Admin) cancelJob(ctx context.Context, c *call) (any, error) {
	var q hubadmin.CancelJobRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	j, err := a.Hub.FindJob(ctx, c.node)
	if err != nil {
		return nil, err
	}
	if j.State == dispatch.Finished {
		return nil, fault.Newf(fault.Conflict, "job %s has ended: %s", j.ID, j.Outcome())
	}
	if q.Force {
		j, err = a.Hub.EndJob(ctx, c.actor, j)
	} else {
		j, err = a.Hub.CancelJob(ctx, c.actor, j, q.Mode)
	}
	if err != nil {
		return nil, err
	}
	return hubadmin.JobOf(a.Hub, a.Hub.Snapshot(), j), nil
}

package web

import (
	"context"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

// The admin socket's part of egress rules.

func (a *Admin) egressRoutes() map[hubadmin.Route]func(context.Context, *call) (any, error) {
	return map[hubadmin.Route]func(context.Context, *call) (any, error){
		hubadmin.EgressRules:   a.egressRules,
		hubadmin.EgressSet:     a.setEgress,
		hubadmin.EgressResolve: a.resolveEgress,
	}
}

func (a *Admin) egressRules(context.Context, *call) (any, error) {
	s := a.Hub.Snapshot()
	l := hubadmin.EgressList{On: a.Hub.EgressRulesOn(), Generation: s.RuleGeneration(), Rules: s.RuleList(), Warnings: a.Hub.RuleWarnings()}
	if l.Rules == nil {
		l.Rules = []hub.EgressRule{}
	}
	return l, nil
}

func (a *Admin) setEgress(ctx context.Context, c *call) (any, error) {
	var q hubadmin.EgressRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	switch q.Action {
	case "set":
		if q.Add == nil {
			return nil, fault.New(fault.Usage, "nothing is to be set")
		}
		return a.Hub.SetRule(ctx, c.actor, *q.Add)
	case "mode":
		return a.Hub.SetRule(ctx, c.actor, hub.RuleChange{Name: q.Name, Mode: &q.Mode, Known: true})
	case "delete":
		return struct{}{}, a.Hub.DropRule(ctx, c.actor, q.Name)
	}
	return nil, fault.Newf(fault.Usage, "%q is nothing to do with a rule", wire.Clean(q.Action, 40))
}

func (a *Admin) resolveEgress(_ context.Context, c *call) (any, error) {
	var q hub.Claims
	if err := c.body(&q); err != nil {
		return nil, err
	}
	s := a.Hub.Snapshot()
	if q.Instance != "" {
		if _, ok := s.Instance(q.Instance); !ok {
			return nil, fault.Newf(fault.NotFound, "no GitLab instance %q", wire.Clean(q.Instance, 80)).Hint("vk-hub gitlabs lists them")
		}
	}
	layer := s.Layer(q)
	if _, err := hub.PackLayer(layer); err != nil {
		return nil, fault.New(fault.Usage, "such a job would fail").Because(err)
	}
	return layer, nil
}

package hubadmin

import (
	"context"

	"virtkit/core/fleet/hub"
	"virtkit/core/policy"
)

// Routes of egress rules.
var (
	EgressRules   = Route{"GET", "/v1/egress"}
	EgressSet     = Route{"POST", "/v1/egress"}
	EgressResolve = Route{"POST", "/v1/egress/resolve"}
)

// EgressList is all rules.
type EgressList struct {
	On         bool             `json:"on"` // [jobs] egress_rules
	Generation uint64           `json:"generation"`
	Rules      []hub.EgressRule `json:"rules"`
	Warnings   []string         `json:"warnings,omitempty"`
}

// EgressRequest changes a rule. Action: set (Add), mode, delete.
type EgressRequest struct {
	Action string          `json:"action"`
	Add    *hub.RuleChange `json:"add,omitempty"`
	Name   string          `json:"name,omitempty"`
	Mode   string          `json:"mode,omitempty"`
}

// EgressRules lists the rules.
func (c *Client) EgressRules(ctx context.Context) (*EgressList, error) {
	r := new(EgressList)
	return r, c.Call(ctx, EgressRules, "", nil, nil, r)
}

// SetEgress adds a rule, or changes one.
func (c *Client) SetEgress(ctx context.Context, q EgressRequest) (*hub.EgressRule, error) {
	r := new(hub.EgressRule)
	return r, c.Call(ctx, EgressSet, "", nil, q, r)
}

// ResolveEgress is the layer that a job gets.
func (c *Client) ResolveEgress(ctx context.Context, q hub.Claims) (*policy.HubEgress, error) {
	r := new(policy.HubEgress)
	return r, c.Call(ctx, EgressResolve, "", nil, q, r)
}

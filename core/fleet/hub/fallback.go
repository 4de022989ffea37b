package hub

import (
	"encoding/json"
	"slices"

	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// The Fallback for the jobs of nodes' own gitlab-runners: their project and ref
// come from variables that they may set, so that no rule by project or ref holds
// them. With rules on, each node that says it enforces it has the layer of a job
// without claims in its desired state, and others have none. It is looked at when
// a node says what it enforces or what it applied, when the rules change, at the
// hub's start, and once a recovery conflict is resolved.

// fallback brings a node's desired state up to date; the node may be another
// afterwards. One that cannot be steered, or has not said yet what it applied, is
// left alone.
func (t *tx) fallback(n *Node) {
	if n == nil || n.State == nil || steerable(n) != nil {
		return
	}
	var want *json.RawMessage
	if t.h.EgressRulesOn() && n.Inventory != nil && slices.Contains(n.Inventory.Features, wire.FeatureEgressFallback) {
		b, err := PackLayer(t.s.Layer(Claims{}))
		if err != nil { // what the node has holds on
			t.h.log.Error("the Fallback is too large for a node", logx.Err, err)
			return
		}
		want = (*json.RawMessage)(&b)
	}
	if sameLayer(want, n.Desired.Policy.Layer) {
		return
	}
	p := n.Desired.Policy
	p.Layer = want
	t.desire(n, "hub", "egress fallback", p, nil)
}

// fallbacksTx brings all nodes' up to date.
func fallbacksTx(t *tx) error {
	for id := range t.s.Nodes {
		t.fallback(t.s.Nodes[id])
	}
	return nil
}

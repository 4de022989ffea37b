package hub

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/lazyre"
)

// PolicyChange is what an operator sets of a node's desired state. Nil leaves
// a field as it is.
type PolicyChange struct {
	Ceiling *int // 0 = none
	Stop    *bool
}

func (c PolicyChange) onto(p wire.Policy) wire.Policy {
	if c.Ceiling != nil {
		p.Ceiling = *c.Ceiling
	}
	if c.Stop != nil {
		p.Stop = *c.Stop
	}
	return p
}

// steerable says why a node cannot be asked anything.
func steerable(n *Node) error {
	if n.MonitorOnly() {
		return fault.Newf(fault.Conflict, "node %s is monitored only: its vk speaks protocol version 1", n.ID).Hint("update its vk")
	}
	if n.Conflict != nil {
		return fault.Newf(fault.Conflict, "node %s is in a recovery conflict: %s", n.ID, strings.Join(n.Conflict.Reasons, "; ")).
			Hint("vk-hub nodes recover %s shows both states; --adopt keeps the node's, --replace sends a reviewed one", n.ID[:8])
	}
	return nil
}

// SetPolicy changes a node's desired state, which is sent at once to a
// connected node, else with its next session. It returns the generation.
// Asking for what is asked already changes nothing.
func (h *Hub) SetPolicy(ctx context.Context, actor, name string, c PolicyChange) (n *Node, err error) {
	if c.Ceiling != nil && (*c.Ceiling < 0 || *c.Ceiling > 1<<20) {
		return nil, fault.Newf(fault.Usage, "ceiling %d is not between 1 and %d", *c.Ceiling, 1<<20)
	}
	err = h.do(ctx, func(t *tx) error {
		if n, err = t.node(name); err != nil {
			return err
		}
		if err := steerable(n); err != nil {
			return err
		}
		p := c.onto(n.Desired.Policy)
		if samePolicy(p, n.Desired.Policy) && n.Desired.Generation > 0 {
			return nil
		}
		n = t.desire(n, actor, "desired state", p, nil)
		return nil
	})
	return n, err
}

// desire issues a policy as the generation after both the hub's last and the
// one that the node reported.
func (t *tx) desire(n *Node, actor, event string, p wire.Policy, change func(*Record)) *Node {
	r := *n.Record
	gen := r.Desired.Generation
	if r.State != nil && r.State.Applied != nil {
		gen = max(gen, r.State.Applied.Generation)
	}
	r.Desired = wire.Desired{Generation: gen + 1, ID: wire.NewID(), Policy: p}
	if change != nil {
		change(&r)
	}
	t.b.Issued = append(t.b.Issued, Issued{n.ID, r.Desired, t.unix()})
	t.audit(n.ID, actor, event, fmt.Sprintf("generation %d: %s", r.Desired.Generation, describe(p)))
	t.event(n.ID, "desired", event)
	return t.put(n, r)
}

// Issue gives a node a command, valid for a day.
func (h *Hub) Issue(ctx context.Context, actor, name string, op wire.Op) (c *Command, err error) {
	switch op {
	case wire.OpDrain, wire.OpUndrain, wire.OpQuarantine, wire.OpRelease:
	default:
		return nil, fault.Newf(fault.Usage, "%q is no command that this hub issues", op)
	}
	err = h.do(ctx, func(t *tx) error {
		n, err := t.node(name)
		if err != nil {
			return err
		}
		if err := steerable(n); err != nil {
			return err
		}
		if len(n.Open) >= MaxOpen {
			return fault.Newf(fault.Busy, "node %s has %d commands that it has not finished", n.ID, len(n.Open)).Hint("vk-hub nodes show %s lists them", n.ID[:8])
		}
		c = &Command{Node: n.ID, Actor: actor, Command: wire.Command{ID: wire.NewID(), Op: op, Issued: t.issued(n.ID), Expires: t.now.Add(wire.CommandValid).Unix()}}
		t.command(c)
		t.open(n, append(slices.Clip(slices.Clone(n.Open)), c))
		t.audit(n.ID, actor, "command issued", fmt.Sprintf("%s %s", op, c.ID))
		t.event(n.ID, "command", string(op)+" issued")
		return nil
	})
	return c, err
}

// issued is the time of issue of a node's next command. A node whose journal has
// dropped an entry takes none that is as old (node.State), so that nothing
// completed is done again: a command issued after the clock was set back is dated
// behind the one before it, or the node would refuse it until the clock has
// caught up. Its expiry is by the clock alone.
func (t *tx) issued(node string) int64 {
	at := t.unix()
	if last := t.h.issued[node]; at < last {
		at = last + 1
	}
	t.h.issued[node] = at
	return at
}

var poolName = lazyre.New(`^[a-z0-9]([a-z0-9._-]{0,62})$`)

// SetPools sets the pools that a node is in.
func (h *Hub) SetPools(ctx context.Context, actor, name string, pools []string) (n *Node, err error) {
	pools = slices.Clone(pools)
	slices.Sort(pools)
	pools = slices.Compact(pools)
	if len(pools) > MaxPools {
		return nil, fault.Newf(fault.Usage, "%d pools are more than %d", len(pools), MaxPools)
	}
	for _, p := range pools {
		if !poolName.MatchString(p) {
			return nil, fault.Newf(fault.Usage, "%q is no pool: 1 to 63 of a-z, 0-9, dot, dash and underscore, beginning with a letter or a digit", wire.Clean(p, 80))
		}
	}
	err = h.do(ctx, func(t *tx) error {
		if n, err = t.node(name); err != nil {
			return err
		}
		if slices.Equal(pools, n.Pools) {
			return nil
		}
		r := *n.Record
		r.Pools = pools
		t.audit(n.ID, actor, "pools", strings.Join(pools, " "))
		t.event(n.ID, "pools", "")
		n = t.put(n, r)
		return nil
	})
	return n, err
}

// ack records a command's outcome. It returns once that is durable, also for a
// command that the hub does not know or that is settled: nothing changes then.
func (h *Hub) ack(ctx context.Context, node string, a *wire.Ack) error {
	h.Stats.Acks.Add(1)
	return h.do(ctx, func(t *tx) error {
		n := t.s.Nodes[node]
		if n == nil {
			return nil
		}
		i := slices.IndexFunc(n.Open, func(c *Command) bool { return c.ID == a.Command })
		if i < 0 || n.Open[i].Outcome == a.Outcome {
			return nil
		}
		c := *n.Open[i]
		c.Outcome, c.Message, c.Acked = a.Outcome, a.Message, t.unix()
		open := slices.Clone(n.Open)
		if c.Outcome.Final() {
			open = slices.Delete(open, i, i+1)
		} else {
			open[i] = &c
		}
		t.command(&c)
		t.open(n, open)
		t.audit(node, "node", "command "+string(c.Outcome), strings.TrimSpace(fmt.Sprintf("%s %s %s", c.Op, c.ID, c.Message)))
		t.event(node, "command", string(c.Outcome))
		h.Stats.Recorded.Add(1)
		return nil
	})
}

package hub

import (
	"context"
	"fmt"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

// Recovery conflicts. A hub that was restored from a backup has forgotten what
// it asked since, and its nodes have not. What a node reports that this
// database has no record of (a desired state's id, or the id of the command it
// took last) is the evidence; a generation alone is none, since a restored hub
// counts the same numbers again. While the conflict stands the node is sent
// nothing, keeps what it applied, and the operator is shown both states.

// evidence says what the hub has no record of. It is asked outside of Run, as
// it may read the store; what is found is looked at again inside.
func (h *Hub) evidence(ctx context.Context, n *Node, st *wire.State) (reasons []string, err error) {
	if a := st.Applied; a != nil && (a.ID == "" || a.ID != n.Desired.ID) {
		known := false
		if a.ID != "" {
			if known, err = h.store.Issued(ctx, n.ID, a.ID); err != nil {
				return nil, err
			}
		} else {
			// A node that keeps no ids: only its generation can tell.
			known = a.Generation < n.Desired.Generation || a.Generation == n.Desired.Generation && samePolicy(a.Policy, n.Desired.Policy)
		}
		if !known {
			reasons = append(reasons, fmt.Sprintf("it applied generation %d (%s), of which this hub has no record", a.Generation, describe(a.Policy)))
		}
	}
	if last := st.LastCommand; last != "" && last != n.LastCommand {
		c, err := h.store.Command(ctx, last)
		if err != nil {
			return nil, err
		}
		if c == nil || c.Node != n.ID {
			reasons = append(reasons, fmt.Sprintf("it took command %s, of which this hub has no record", last))
		}
	}
	return reasons, nil
}

// conflicted marks a record and writes both states into the audit log.
func (t *tx) conflicted(r *Record, st *wire.State, reasons []string) {
	r.Conflict = &Conflict{Since: t.unix(), Reasons: reasons, Node: st.Applied, Hub: r.Desired, State: st.Node, Command: st.LastCommand}
	t.audit(r.ID, "hub", "recovery conflict", strings.Join(reasons, "; "))
	t.states(r, "hub")
	t.event(r.ID, "conflict", "begun")
}

// states writes what node and hub hold, one line each.
func (t *tx) states(r *Record, actor string) {
	c := r.Conflict
	held := "nothing applied"
	if c.Node != nil {
		held = fmt.Sprintf("generation %d: %s", c.Node.Generation, describe(c.Node.Policy))
	}
	if c.Command != "" {
		held += ", last command " + c.Command
	}
	t.audit(r.ID, actor, "recovery: the node's state", fmt.Sprintf("%s, %s", c.State, held))
	asked := "nothing asked"
	if c.Hub.Generation > 0 {
		asked = fmt.Sprintf("generation %d: %s", c.Hub.Generation, describe(c.Hub.Policy))
	}
	t.audit(r.ID, actor, "recovery: the hub's state", asked)
}

// Adopt ends a conflict by making what the node applied the hub's own. Nothing
// is sent to the node; its drain or quarantine stays.
func (h *Hub) Adopt(ctx context.Context, actor, name string) (*Node, error) {
	return h.resolve(ctx, actor, name, func(t *tx, n *Node) *Node {
		r := *n.Record
		a := r.Conflict.Node
		switch {
		case a == nil && r.Desired.Generation == 0, a != nil && a.ID != "" && a.ID == r.Desired.ID && samePolicy(a.Policy, r.Desired.Policy):
			t.audit(n.ID, actor, "recovery: adopted", "the desired state is the same")
		case a == nil || a.ID == "" || a.Generation < r.Desired.Generation:
			// There is no id of the node's to take over, or it is an older
			// one: its policy is issued, which changes nothing on the node.
			var p wire.Policy
			if a != nil {
				p = a.Policy
			}
			return t.desire(n, actor, "recovery: adopted", p, t.settle(n))
		default:
			r.Desired = wire.Desired{Generation: a.Generation, ID: a.ID, Policy: a.Policy}
			t.b.Issued = append(t.b.Issued, Issued{n.ID, r.Desired, t.unix()})
			t.audit(n.ID, actor, "recovery: adopted", fmt.Sprintf("generation %d: %s", a.Generation, describe(a.Policy)))
		}
		t.settle(n)(&r)
		return t.put(n, r)
	})
}

// Replace ends a conflict by sending the node a policy that an operator has
// reviewed: the hub's, with a change. Its drain or quarantine stays.
func (h *Hub) Replace(ctx context.Context, actor, name string, c PolicyChange) (*Node, error) {
	return h.resolve(ctx, actor, name, func(t *tx, n *Node) *Node {
		return t.desire(n, actor, "recovery: replaced", c.onto(n.Desired.Policy), t.settle(n))
	})
}

// settle ends the conflict in a record: the node's last command is known now.
func (t *tx) settle(n *Node) func(*Record) {
	return func(r *Record) {
		if c := r.Conflict.Command; c != "" {
			r.LastCommand = c
		}
		r.Conflict = nil
	}
}

func (h *Hub) resolve(ctx context.Context, actor, name string, fn func(*tx, *Node) *Node) (n *Node, err error) {
	err = h.do(ctx, func(t *tx) error {
		if n, err = t.node(name); err != nil {
			return err
		}
		if n.Conflict == nil {
			return fault.Newf(fault.Conflict, "node %s is in no recovery conflict", n.ID)
		}
		t.states(n.Record, actor)
		n = fn(t, n)
		t.withdraw(n, actor)
		t.fallback(t.s.Nodes[n.ID])
		n = t.s.Nodes[n.ID]
		t.event(n.ID, "conflict", "resolved")
		return nil
	})
	return n, err
}

// withdraw settles the commands that would relax a restriction and were issued
// before the conflict was resolved, unless the node has taken them: an old
// undrain must not lift a drain that the restored hub knows nothing of.
func (t *tx) withdraw(n *Node, actor string) {
	var keep []*Command
	for _, c := range n.Open {
		if c.Outcome != "" || c.Op != wire.OpUndrain && c.Op != wire.OpRelease {
			keep = append(keep, c)
			continue
		}
		w := *c
		w.Outcome, w.Message, w.Acked = wire.Failed, "withdrawn: it was issued before a recovery", t.unix()
		t.command(&w)
		t.audit(n.ID, actor, "command withdrawn", fmt.Sprintf("%s %s", c.Op, c.ID))
	}
	if len(keep) != len(n.Open) {
		t.open(n, keep)
	}
}

package hub

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

// Find finds a node by its ID, a prefix of it of at least 8 digits, or a
// hostname that only one node has.
func (s *Snapshot) Find(name string) (*Node, error) {
	if n := s.Nodes[name]; n != nil {
		return n, nil
	}
	var found []*Node
	for _, n := range s.Nodes {
		if len(name) >= 8 && strings.HasPrefix(n.ID, name) || name != "" && n.Name == name {
			found = append(found, n)
		}
	}
	switch len(found) {
	case 0:
		return nil, fault.Newf(fault.NotFound, "no node %q", wire.Clean(name, 80)).Hint("vk-hub nodes lists them; an ID, 8 of its digits or a hostname is expected")
	case 1:
		return found[0], nil
	}
	ids := make([]string, len(found))
	for i, n := range found {
		ids[i] = n.ID
	}
	slices.Sort(ids)
	return nil, fault.Newf(fault.Conflict, "%q means %d nodes: %s", wire.Clean(name, 80), len(found), strings.Join(ids, ", ")).Hint("name one by its ID")
}

// Sorted is all nodes by name, then ID.
func (s *Snapshot) Sorted() []*Node {
	list := make([]*Node, 0, len(s.Nodes))
	for _, n := range s.Nodes {
		list = append(list, n)
	}
	slices.SortFunc(list, func(a, b *Node) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Reach says how the hub knows of a node. One that is silent is unreachable,
// not paused: nothing is known of what it does.
type Reach string

// Reaches.
const (
	Connected   Reach = "connected"
	Unreachable Reach = "unreachable"
	Never       Reach = "never" // it has not connected yet
)

// Reach of a node.
func (n *Node) Reach() Reach {
	switch {
	case n.Live.Connected():
		return Connected
	case n.Version == 0:
		return Never
	}
	return Unreachable
}

// MonitorOnly says whether the node cannot be steered: its latest session ran
// version 1.
func (n *Node) MonitorOnly() bool { return n.Version == wire.VersionMonitor }

// Sync compares what the node applied with what the hub asks, in the words of
// fleet-reference: ok, behind (2<3), ahead (4>3), differs, unknown, or "-"
// while the hub has asked nothing. A recovery conflict is conflict.
func (n *Node) Sync() string {
	if n.Conflict != nil {
		return "conflict"
	}
	if n.MonitorOnly() {
		return fmt.Sprintf("monitor only (v%d)", n.Version)
	}
	if n.State == nil {
		if n.Desired.Generation == 0 {
			return "-"
		}
		return "unknown"
	}
	var a wire.Applied
	if n.State.Applied != nil {
		a = *n.State.Applied
	}
	d := n.Desired
	switch {
	case a.Generation < d.Generation:
		return fmt.Sprintf("behind (%d<%d)", a.Generation, d.Generation)
	case a.Generation > d.Generation:
		return fmt.Sprintf("ahead (%d>%d)", a.Generation, d.Generation)
	case d.Generation == 0:
		return "-"
	case a.ID != "" && a.ID != d.ID, !samePolicy(a.Policy, d.Policy):
		return "differs"
	}
	return "ok"
}

// samePolicy compares what hubs set.
func samePolicy(a, b wire.Policy) bool {
	return a.Ceiling == b.Ceiling && a.Stop == b.Stop && sameLayer(a.Layer, b.Layer)
}

// sameLayer compares layers, however their JSON is spaced.
func sameLayer(a, b *json.RawMessage) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// Pending counts the commands that the node has not finished.
func (n *Node) Pending(now time.Time) (pending int) {
	for _, c := range n.Open {
		if c.Outcome == wire.Accepted || c.Expires > now.Unix() {
			pending++
		}
	}
	return pending
}

// describe writes a policy for people and for the audit log.
func describe(p wire.Policy) string {
	ceiling, acquire := "none", "on"
	if p.Ceiling > 0 {
		ceiling = fmt.Sprint(p.Ceiling)
	}
	if p.Stop {
		acquire = "stopped"
	}
	egress := ""
	if p.Layer != nil {
		egress = ", egress rules for its gitlab-runner"
	}
	return "ceiling " + ceiling + ", acquisition " + acquire + egress
}

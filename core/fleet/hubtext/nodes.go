package hubtext

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

func None(s string) string { return cmp.Or(s, "none") }

func Policy(p wire.Policy) string {
	acquire := "acquisition on"
	if p.Stop {
		acquire = "acquisition stopped"
	}
	return "ceiling " + Ceiling(p.Ceiling) + ", " + acquire
}

func Ceiling(n int) string {
	if n == 0 {
		return "none"
	}
	return fmt.Sprint(n)
}

func Bytes(n int64) string { return units.BytesSize(float64(n)) }

func Ago(unix int64, now time.Time) string {
	if unix == 0 {
		return "never"
	}
	return strings.ToLower(units.HumanDuration(now.Sub(time.Unix(unix, 0)))) + " ago" // it begins some with a capital
}

// State is the node's own, with what is pending.
func State(n *hubadmin.Node) string {
	s := "-"
	if n.Reported != nil {
		s = string(n.Reported.Node)
	} else if n.MonitorOnly {
		s = fmt.Sprintf("monitor only (v%d)", n.Version)
	}
	if n.Pending > 0 {
		s += fmt.Sprintf(" (%d pending)", n.Pending)
	}
	return s
}

// acquire is the hub's, and the node's where it differs.
func acquire(n *hubadmin.Node) string {
	want := wire.Taking
	if n.Desired.Policy.Stop {
		want = wire.Stopped
	}
	words := map[wire.Acquisition]string{wire.Taking: "on", wire.Stopped: "stopped", wire.Quitting: "quitting"}
	if r := n.Reported; r != nil && r.Acquisition != want {
		return fmt.Sprintf("%s [%s]", words[want], words[r.Acquisition])
	}
	return words[want]
}

func ceilings(n *hubadmin.Node) string {
	s := Ceiling(n.Desired.Policy.Ceiling)
	if n.Reported != nil {
		var has int
		if n.Reported.Applied != nil {
			has = n.Reported.Applied.Policy.Ceiling
		}
		if has != n.Desired.Policy.Ceiling {
			s += " [" + Ceiling(has) + "]"
		}
	}
	return s
}

func Dash(s string) string { return cmp.Or(s, "-") }

// Remarks are the lines under the table: what a node cannot carry out, and
// what an operator must decide.
func Remarks(n *hubadmin.Node) (out []string) {
	if n.Conflict != nil {
		out = append(out, fmt.Sprintf("recovery conflict: %s; see vk-hub nodes recover %s", strings.Join(n.Conflict.Reasons, "; "), n.ID[:8]))
	}
	if len(n.Pools) > 0 {
		line := "pools " + strings.Join(n.Pools, " ")
		if n.Inventory != nil && len(n.Inventory.Labels) > 0 {
			line += ", labels " + strings.Join(n.Inventory.Labels, " ")
		}
		if n.PlacesNot != "" {
			line += "; is given no placed jobs: " + n.PlacesNot
		}
		out = append(out, line)
	}
	r := n.Reported
	if r == nil {
		return out
	}
	if r.Runner == wire.RunnerNone {
		out = append(out, "no gitlab-runner, placed jobs only")
	}
	for _, u := range r.Unsupported {
		out = append(out, "cannot comply: "+u)
	}
	if r.Concurrency != nil && r.Concurrency.Error != "" {
		out = append(out, "cannot set its concurrency: "+r.Concurrency.Error)
	}
	if r.Node == wire.Draining {
		out = append(out, Drain(n))
	}
	return out
}

// Drain says how far a drain is.
func Drain(n *hubadmin.Node) string {
	r := n.Reported
	switch {
	case n.ID == "":
		return "the hub cannot be reached; trying again"
	case n.Reach != hub.Connected:
		return "the node is " + string(n.Reach) + "; nothing is known of its jobs"
	case r == nil || r.Drain == nil:
		return "waiting for the node"
	}
	yes := func(b bool) string {
		if b {
			return "yes"
		}
		return "no"
	}
	return fmt.Sprintf("draining: runner exited %s, admission empty %s, %d jobs left", yes(r.Drain.RunnerExited), yes(r.Drain.AdmissionIdle), r.Drain.Jobs)
}

func Stamp(unix int64) string {
	if unix == 0 {
		return "-"
	}
	return time.Unix(unix, 0).UTC().Format(time.RFC3339)
}

// NodeHeads are the columns of a table of nodes.
var NodeHeads = []string{"ID", "NAME", "REACH", "STATE", "ACQUIRE", "CEILING", "CONC", "SYNC", "LAST SEEN", "VK", "CPUS", "RAM", "ADMITTED", "VMS"}

// NodeRow is a node's cells. A node may have put anything into them.
func NodeRow(n *hubadmin.Node, now time.Time) []string {
	vk, cpus, ram, conc, admitted := "-", "-", "-", "-", "-"
	if v := n.Inventory; v != nil {
		vk, cpus, ram = Dash(v.VK), fmt.Sprint(v.CPUs), Bytes(v.RAM)
	}
	if b := n.Heartbeat; b != nil {
		if b.Concurrency > 0 {
			conc = fmt.Sprint(b.Concurrency)
		}
		admitted = Bytes(b.Admission.Committed)
		if b.Admission.Budget > 0 {
			admitted += "/" + Bytes(b.Admission.Budget)
		}
		if b.Admission.Waiting > 0 {
			admitted += fmt.Sprintf(" (+%d waiting)", b.Admission.Waiting)
		}
	}
	return []string{n.ID, Dash(n.Name), string(n.Reach), State(n), acquire(n), ceilings(n), conc, n.Sync, Ago(n.LastSeen, now), vk, cpus, ram, admitted, fmt.Sprint(n.VMs + n.Omitted)}
}

package hubcmd

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/hubtext"
	"virtkit/core/fleet/wire"
	"virtkit/core/ui"
)

// What nodes send was cleaned as it arrived (wire.Clean); ui.CleanLine keeps
// what a database may hold from a terminal.

func printNodes(w io.Writer, nodes []hubadmin.Node, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(hubtext.NodeHeads, "\t"))
	for i := range nodes {
		fmt.Fprintln(t, line(hubtext.NodeRow(&nodes[i], now)))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range nodes {
		for _, l := range hubtext.Remarks(&nodes[i]) {
			fmt.Fprintf(w, "%s: %s\n", cmp.Or(nodes[i].Name, nodes[i].ID), ui.CleanLine(l))
		}
	}
	return nil
}

// line is a table's, of cells that may hold anything.
func line(cells []string) string {
	for i := range cells {
		cells[i] = ui.CleanLine(cells[i])
	}
	return strings.Join(cells, "\t")
}

func printNode(w io.Writer, n *hubadmin.Node, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(k, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", k, ui.CleanLine(fmt.Sprintf(format, args...)))
	}
	row("node", "%s", n.ID)
	row("name", "%s", hubtext.Dash(n.Name))
	row("reach", "%s, last seen %s, protocol version %d", n.Reach, hubtext.Ago(n.LastSeen, now), n.Version)
	row("enrolled", "%s", time.Unix(n.Enrolled, 0).UTC().Format(time.RFC3339))
	row("pools", "%s", hubtext.None(strings.Join(n.Pools, " ")))
	row("state", "%s", hubtext.State(n))
	if n.Desired.Generation > 0 {
		row("asked", "generation %d: %s", n.Desired.Generation, hubtext.Policy(n.Desired.Policy))
	} else {
		row("asked", "nothing")
	}
	if r := n.Reported; r != nil {
		if r.Applied != nil {
			row("applied", "generation %d: %s", r.Applied.Generation, hubtext.Policy(r.Applied.Policy))
		} else {
			row("applied", "nothing")
		}
		row("acquisition", "%s, runner %s", r.Acquisition, r.Runner)
		if c := r.Concurrency; c != nil {
			row("concurrency", "%d (estimate %d, hub's ceiling %s, own ceiling %s)", c.Effective, c.Estimate, hubtext.Ceiling(c.HubCeiling), hubtext.Ceiling(c.LocalCeiling))
		}
	}
	row("sync", "%s", n.Sync)
	for _, l := range hubtext.Remarks(n) {
		row("note", "%s", l)
	}
	if v := n.Inventory; v != nil {
		row("host", "%d CPUs, %s RAM, %s", v.CPUs, hubtext.Bytes(v.RAM), hubtext.Dash(v.CPUModel))
		row("versions", "vk %s, host kernel %s, guest kernel %s, configuration %.12s", hubtext.Dash(v.VK), hubtext.Dash(v.HostKernel), hubtext.Dash(v.GuestKernel), hubtext.Dash(v.ConfigHash))
		if g := v.Runner; g != nil {
			row("gitlab-runner", "%s, %s, concurrent %d: %s", hubtext.Dash(g.Version), g.Config, g.Concurrent, hubtext.None(strings.Join(g.Names, " ")))
		}
		for _, c := range v.Checks {
			if !c.OK {
				row("check", "%s fails: %s", c.Name, c.Text)
			}
		}
		for _, f := range v.Filesystems {
			row("filesystem", "%s", filesystemText(n, &f))
		}
	}
	if b := n.Heartbeat; b != nil {
		row("admission", "%s of %s, %d running, %d waiting", hubtext.Bytes(b.Admission.Committed), hubtext.Bytes(b.Admission.Budget), b.Admission.Running, b.Admission.Waiting)
		if c := b.Admission.DiskClaimed; c > 0 {
			row("disk claimed", "%s", hubtext.Bytes(c))
		}
		row("memory", "%s available", hubtext.Bytes(b.MemAvailable))
		if p := b.Pressure; p != nil {
			row("pressure", "of the last 10 s, some or all waited for: CPU %s, memory %s, I/O %s", stallText(p.CPU), stallText(p.Memory), stallText(p.IO))
		}
		for _, d := range b.Disks {
			row("disk", "%s: %s, %.1f ms a read, %.1f ms a write, %.0f%% busy", d.Role, d.Device, d.ReadMS, d.WriteMS, d.Busy)
		}
		if b.Load1 != nil {
			row("load", "%.2f", *b.Load1)
		}
		if s := b.Stages; s != nil {
			row("jobs", "%d preparing, %d waiting, %d running, %d cleaning up", s.Preparing, s.Waiting, s.Running, s.Cleaning)
		}
	}
	row("VMs", "%d", n.VMs+n.Omitted)
	for _, c := range n.Commands[:min(len(n.Commands), 10)] {
		row("command", "%s %s %s by %s: %s %s", time.Unix(c.Issued, 0).UTC().Format(time.RFC3339), c.Op, c.ID, c.Actor, cmp.Or(string(c.Outcome), "no answer yet"), c.Message)
	}
	return t.Flush()
}

// filesystemText is one's facts, and what is free of it.
func filesystemText(n *hubadmin.Node, f *wire.Filesystem) string {
	s := fmt.Sprintf("%s: %s, %s, %s", f.Role, f.Device, f.FSType, hubtext.Bytes(f.Size))
	if f.Speed != "" {
		s += ", declared " + f.Speed
	}
	if n.Heartbeat != nil {
		for _, r := range n.Heartbeat.Filesystems {
			if r.Role == f.Role {
				s += fmt.Sprintf("; free: %s, %d inodes", hubtext.Bytes(r.Free), r.FreeInodes)
			}
		}
	}
	return s
}

// stallText is some and all, of a resource that could be read.
func stallText(s *wire.Stall) string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f%%/%.1f%%", s.Some10, s.Full10)
}

func printConflict(w io.Writer, n *hubadmin.Node) error {
	c := n.Conflict
	if c == nil {
		_, err := fmt.Fprintf(w, "%s is in no recovery conflict\n", n.ID)
		return err
	}
	fmt.Fprintf(w, "%s (%s) is in a recovery conflict since %s:\n", n.ID, ui.CleanLine(hubtext.Dash(n.Name)), time.Unix(c.Since, 0).UTC().Format(time.RFC3339))
	for _, r := range c.Reasons {
		fmt.Fprintf(w, "  %s\n", ui.CleanLine(r))
	}
	held, asked := "nothing applied", "nothing asked"
	if c.Node != nil {
		held = fmt.Sprintf("generation %d: %s", c.Node.Generation, hubtext.Policy(c.Node.Policy))
	}
	if n.Desired.Generation > 0 {
		asked = fmt.Sprintf("generation %d: %s", n.Desired.Generation, hubtext.Policy(n.Desired.Policy))
	}
	_, err := fmt.Fprintf(w, "the node: %s, %s\nthe hub:  %s\n--adopt keeps the node's; --replace [--ceiling N|none] [--stop|--resume] sends the hub's, changed as you say\n", c.State, held, asked)
	return err
}

func printWorkloads(w io.Writer, nodes []hubadmin.NodeWorkloads) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tKIND\tWHAT\tIMAGE\tCPUS\tRESERVED\tMEMORY\tSTARTED")
	var notes []string
	for _, n := range nodes {
		name := ui.CleanLine(cmp.Or(n.Name, n.Node))
		if !n.Connected && n.LastSeen > 0 {
			notes = append(notes, fmt.Sprintf("%s: not connected; as last seen at %s", name, time.Unix(n.LastSeen, 0).UTC().Format(time.RFC3339)))
		}
		if n.List == nil && n.Count > 0 {
			notes = append(notes, fmt.Sprintf("%s: %d VMs; vk-hub workloads --node %s lists them", name, n.Count, n.Node))
		}
		if n.Omitted > 0 {
			notes = append(notes, fmt.Sprintf("%s: %d more VMs were left out of its list", name, n.Omitted))
		}
		for _, v := range n.List {
			what := v.Project
			switch v.Kind {
			case wire.KindJob:
				what = strings.TrimSpace(strings.Join([]string{v.Project, v.Job, v.JobID}, " "))
			case wire.KindDev:
				what = strings.TrimSpace(v.Space + " " + v.Env)
			case wire.KindRun:
				what = cmp.Or(v.Dir, v.StateDir)
			}
			started := "-"
			if v.Started > 0 {
				started = time.Unix(v.Started, 0).UTC().Format(time.RFC3339)
			}
			memory := "-"
			if m, ok := n.Memory[v.ID]; ok {
				memory = hubtext.Bytes(m)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", name, v.Kind, ui.CleanLine(hubtext.Dash(what)), ui.CleanLine(hubtext.Dash(v.Image)), v.CPUs, hubtext.Bytes(v.Reserved), memory, started)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, s := range notes {
		fmt.Fprintln(w, s)
	}
	return nil
}

func printAudit(w io.Writer, lines []hub.AuditLine) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, l := range lines {
		event := l.Event
		if l.Detail != "" {
			event += ": " + l.Detail
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", time.Unix(l.At, 0).UTC().Format(time.RFC3339), hubtext.Dash(l.Node), ui.CleanLine(l.Actor), ui.CleanLine(event))
	}
	return t.Flush()
}

func counts(m map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%d %s", m[k], k))
	}
	return hubtext.None(strings.Join(out, ", "))
}

// maxShown is how many nodes' ids the status has room for.
const maxShown = 8

func printStatus(w io.Writer, s *hubadmin.StatusReply, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(k, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", k, ui.CleanLine(fmt.Sprintf(format, args...)))
	}
	tls := "TLS 1.3"
	if !s.TLS {
		tls = "plain text"
	}
	row("hub", "%s, vk-hub %s, up %s", s.Hub, s.Version, units.HumanDuration(now.Sub(time.Unix(s.Started, 0))))
	row("serves", "%s (%s), heartbeat %ds, %d not authenticated, metrics %s", s.Addr, tls, s.HeartbeatSecs, s.Unauthed, cmp.Or(s.Metrics, "off"))
	well := "ok"
	if s.Sick != "" {
		well = s.Sick
	}
	row("database", "%s: %s, log %s, %s", s.Database, hubtext.Bytes(s.DatabaseBytes), hubtext.Bytes(s.LogBytes), well)
	row("nodes", "%d: %s", s.Nodes, counts(s.Reach))
	row("states", "%s", counts(s.States))
	row("asked", "%d stopped, %d not in sync, %d commands pending", s.Stopped, s.NotInSync, s.Pending)
	row("work", "%d VMs, %d jobs running, %d waiting (of connected nodes)", s.VMs, s.Running, s.Waiting)
	row("tokens", "%d unspent", s.Tokens)
	if n := len(s.Conflicts); n > 0 { // after a restore of the database they may be all nodes
		text := strings.Join(s.Conflicts[:min(n, maxShown)], " ")
		if n > maxShown {
			text += fmt.Sprintf(" and %d more, which vk-hub nodes lists", n-maxShown)
		}
		row("conflicts", "%s; see vk-hub nodes recover", text)
	}
	return t.Flush()
}

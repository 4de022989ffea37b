package hubcmd

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

func ofID(digit string) string { return strings.Repeat(digit, 2*wire.IDLen) }

// table checks what was printed, whatever the widths of its columns.
func table(t *testing.T, got string, want ...string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
	for i := range lines {
		lines[i] = strings.Join(strings.Fields(lines[i]), " ")
	}
	if strings.Join(lines, "\n") != strings.Join(want, "\n") {
		t.Errorf("printed\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
}

// TestNodesTable: the reference's columns, and what a node has in brackets where
// it differs from what the hub asked.
func TestNodesTable(t *testing.T) {
	now := time.Unix(100_000, 0)
	one := hubadmin.Node{ID: ofID("a"), Name: "ci-1", Reach: hub.Connected, Version: 6, Sync: "behind (2<3)", LastSeen: 99_990, VMs: 3, Omitted: 1, Pending: 2,
		Desired:   wire.Desired{Generation: 3, Policy: wire.Policy{Ceiling: 4, Stop: true}},
		Reported:  &wire.State{Node: wire.Ready, Acquisition: wire.Quitting, Runner: wire.RunnerManaged, Applied: &wire.Applied{Generation: 2, Policy: wire.Policy{Ceiling: 8}}},
		Inventory: &wire.Inventory{VK: "0.1.0", CPUs: 8, RAM: 16 << 30},
		Heartbeat: &wire.Heartbeat{Concurrency: 5, Admission: wire.Admission{Committed: 1 << 30, Budget: 8 << 30, Waiting: 2}}}
	two := hubadmin.Node{ID: ofID("b"), Reach: hub.Unreachable, Version: 1, MonitorOnly: true, Sync: "monitor only (v1)"}
	three := hubadmin.Node{ID: ofID("c"), Name: "ci-3", Reach: hub.Connected, Version: 6, Sync: "ok", LastSeen: 100_000,
		Desired: wire.Desired{Generation: 1, Policy: wire.Policy{}}, Reported: &wire.State{Node: wire.Quarantined, Acquisition: wire.Taking, Runner: wire.RunnerExternal}}
	var b bytes.Buffer
	if err := printNodes(&b, []hubadmin.Node{one, two, three}, now); err != nil {
		t.Fatal(err)
	}
	table(t, b.String(),
		"ID NAME REACH STATE ACQUIRE CEILING CONC SYNC LAST SEEN VK CPUS RAM ADMITTED VMS",
		one.ID+" ci-1 connected ready (2 pending) stopped [quitting] 4 [8] 5 behind (2<3) 10 seconds ago 0.1.0 8 16GiB 1GiB/8GiB (+2 waiting) 4",
		two.ID+" - unreachable monitor only (v1) on none - monitor only (v1) never - - - - 0",
		three.ID+" ci-3 connected quarantined on none - ok less than a second ago - - - - 0")
}

// TestWorkloadsList: each node's VMs, those of a node that is away marked, and what
// does not fit replaced by its count and where it is shown.
func TestWorkloadsList(t *testing.T) {
	seen := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Unix()
	nodes := []hubadmin.NodeWorkloads{
		{Node: ofID("a"), Name: "ci-1", Connected: true, LastSeen: seen, Count: 2, Omitted: 3, Memory: map[string]int64{"0000000000000001": 1 << 30}, List: []wire.Workload{
			{ID: "0000000000000001", Kind: wire.KindJob, Project: "acme/web", Job: "test", JobID: "7", Image: "debian", CPUs: 2, Reserved: 2 << 30, Started: seen},
			{ID: "0000000000000002", Kind: wire.KindDev, Space: "web", Env: "main", CPUs: 1, Reserved: 1 << 30}}},
		{Node: ofID("b"), Name: "ci-2", LastSeen: seen, Count: 1, List: []wire.Workload{{ID: "0000000000000003", Kind: wire.KindRun, Dir: "/home/x\x1b[31m"}}},
		{Node: ofID("c"), Name: "ci-3", LastSeen: seen, List: []wire.Workload{}},
		{Node: ofID("d"), Connected: true, LastSeen: seen, Count: 200},
	}
	var b bytes.Buffer
	if err := printWorkloads(&b, nodes); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(b.String(), "\x1b") {
		t.Errorf("an escape reaches the terminal: %q", b.String())
	}
	got := strings.ReplaceAll(b.String(), "/home/x\\x1b[31m", "/home/x")
	table(t, strings.ReplaceAll(got, "/home/x[31m", "/home/x"),
		"NODE KIND WHAT IMAGE CPUS RESERVED MEMORY STARTED",
		"ci-1 job acme/web test 7 debian 2 2GiB 1GiB 2026-01-02T03:04:05Z",
		"ci-1 dev web main - 1 1GiB - -",
		"ci-2 run /home/x - 0 0B - -",
		"ci-1: 3 more VMs were left out of its list",
		"ci-2: not connected; as last seen at 2026-01-02T03:04:05Z",
		"ci-3: not connected; as last seen at 2026-01-02T03:04:05Z",
		ofID("d")+": 200 VMs; vk-hub workloads --node "+ofID("d")+" lists them")
}

// TestAuditLines: time, node, actor, event, in the order given.
func TestAuditLines(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Unix()
	var b bytes.Buffer
	if err := printAudit(&b, []hub.AuditLine{
		{Seq: 1, At: at, Node: ofID("a"), Actor: "uid 0", Event: "command issued", Detail: "drain"},
		{Seq: 2, At: at + 1, Actor: "uid 1000", Event: "token issued"},
	}); err != nil {
		t.Fatal(err)
	}
	table(t, b.String(), "2026-01-02T03:04:05Z "+ofID("a")+" uid 0 command issued: drain", "2026-01-02T03:04:06Z - uid 1000 token issued")
}

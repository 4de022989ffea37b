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

// TestShownNode: what a node reports of its host is shown to people, not to
// programs alone.
func TestShownNode(t *testing.T) {
	load := 1.5
	n := &hubadmin.Node{ID: wire.NewID(), Name: "ci-1", Reach: hub.Connected, Version: 6, Sync: "ok", VMs: 2, Omitted: 1,
		Inventory: &wire.Inventory{Hostname: "ci-1", CPUs: 4, RAM: 8 << 30, CPUModel: "model", VK: "0.1.0", HostKernel: "6.1", GuestKernel: "6.12", ConfigHash: strings.Repeat("ab", 32),
			Checks:      []wire.Check{{Name: "kvm", OK: true}, {Name: "vmm", Text: "no qemu"}},
			Runner:      &wire.Runner{Config: "/etc/gitlab-runner/config.toml", Concurrent: 9, Names: []string{"one", "two"}, Version: "17.0.0"},
			Filesystems: []wire.Filesystem{{Role: wire.RoleJobs, Device: "/dev/vda", FSType: "ext4", Size: 1 << 40, Speed: "fast"}}},
		Heartbeat: &wire.Heartbeat{Admission: wire.Admission{Committed: 1 << 30, Budget: 4 << 30, Running: 3, Waiting: 1, DiskClaimed: 2 << 30}, MemAvailable: 5 << 30, Load1: &load,
			Filesystems: []wire.FSReading{{Role: wire.RoleJobs, Free: 1 << 39, FreeInodes: 77}},
			Pressure:    &wire.Pressure{CPU: &wire.Stall{Some10: 12.5}, IO: &wire.Stall{Some10: 3, Full10: 2}},
			Disks:       []wire.DiskReading{{Role: wire.RoleJobs, Device: "vda", ReadMS: 0.4, WriteMS: 1.25, Busy: 40}},
			Stages:      &wire.Stages{Preparing: 1, Waiting: 2, Running: 3, Cleaning: 4}},
	}
	var b bytes.Buffer
	if err := printNode(&b, n, time.Now()); err != nil {
		t.Fatal(err)
	}
	shown := strings.Join(strings.Fields(b.String()), " ")
	for _, want := range []string{"connected", "4 CPUs, 8GiB RAM, model", "vk 0.1.0, host kernel 6.1, guest kernel 6.12, configuration abababababab",
		"gitlab-runner 17.0.0, /etc/gitlab-runner/config.toml, concurrent 9: one two", "check vmm fails: no qemu",
		"jobs: /dev/vda, ext4, 1TiB, declared fast; free: 512GiB, 77 inodes", "admission 1GiB of 4GiB, 3 running, 1 waiting", "disk claimed 2GiB", "memory 5GiB available",
		"CPU 12.5%/0.0%, memory -, I/O 3.0%/2.0%", "disk jobs: vda, 0.4 ms a read, 1.2 ms a write, 40% busy", "load 1.50",
		"1 preparing, 2 waiting, 3 running, 4 cleaning up", "VMs 3"} {
		if !strings.Contains(shown, want) {
			t.Errorf("it lacks %q:\n%s", want, b.String())
		}
	}
	if strings.Contains(shown, "kvm") {
		t.Errorf("a check that passes is shown:\n%s", b.String())
	}
}

// TestRemarks are the lines under the table of nodes.
func TestRemarks(t *testing.T) {
	n := hubadmin.Node{ID: wire.NewID(), Name: "ci-1", Reach: hub.Unreachable, Version: 6, Sync: "ok", Reported: &wire.State{Node: wire.Draining, Runner: wire.RunnerNone,
		Acquisition: wire.Quitting, Unsupported: []string{"the runner may still take jobs"}, Concurrency: &wire.Concurrency{Error: "its file is read-only"}}}
	m := n
	m.Reach, m.Name, m.Pools, m.PlacesNot = hub.Connected, "", []string{"ci"}, "it has a gitlab-runner"
	m.Reported = &wire.State{Node: wire.Draining, Runner: wire.RunnerManaged, Drain: &wire.Drain{AdmissionIdle: true, Jobs: 3}}
	var b bytes.Buffer
	if err := printNodes(&b, []hubadmin.Node{n, m}, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ci-1: no gitlab-runner, placed jobs only\n", "ci-1: cannot comply: the runner may still take jobs\n", "ci-1: cannot set its concurrency: its file is read-only\n",
		"ci-1: the node is unreachable; nothing is known of its jobs\n", m.ID + ": pools ci; is given no placed jobs: it has a gitlab-runner\n",
		m.ID + ": draining: runner exited no, admission empty yes, 3 jobs left\n", "[quitting]"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("it lacks %q:\n%s", want, b.String())
		}
	}
}

// TestOneScreen: the status of a fleet that is in trouble is one screen still.
func TestOneScreen(t *testing.T) {
	s := &hubadmin.StatusReply{Hub: wire.NewID(), Version: "0.1.0", Addr: "127.0.0.1:8443", Reach: map[string]int{"connected": 1999, "unreachable": 1}, States: map[string]int{"ready": 2000},
		Nodes: 2000, Sick: "hub: no space left for the database", Started: 1, HeartbeatSecs: 5}
	for range 2000 {
		s.Conflicts = append(s.Conflicts, wire.NewID())
	}
	var b bytes.Buffer
	if err := printStatus(&b, s, time.Unix(100, 0)); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(b.String(), "\n"); n > 24 || b.Len() > 24*80 || !strings.Contains(b.String(), "and 1992 more") || !strings.Contains(b.String(), "1999 connected, 1 unreachable") || !strings.Contains(b.String(), "no space left") {
		t.Errorf("%d lines:\n%s", n, b.String())
	}
}

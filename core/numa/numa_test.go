package numa_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"virtkit/core/numa"
)

// host writes a fake sysfs: for each node its processors and MiB total, free,
// and cached.
func host(t *testing.T, nodes map[int][4]any) string {
	t.Helper()
	dir := t.TempDir()
	for id, n := range nodes {
		d := filepath.Join(dir, fmt.Sprintf("node%d", id))
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		mem := fmt.Sprintf("Node %[1]d MemTotal:       %[2]d kB\nNode %[1]d MemFree:        %[3]d kB\nNode %[1]d MemUsed:        1 kB\nNode %[1]d Dirty:          0 kB\nNode %[1]d FilePages:      %[4]d kB\nNode %[1]d Shmem:          1024 kB\n",
			id, n[1].(int)<<10, n[2].(int)<<10, n[3].(int)<<10)
		for name, text := range map[string]string{"cpulist": n[0].(string) + "\n", "meminfo": mem} {
			if err := os.WriteFile(filepath.Join(d, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, other := range []string{"has_cpu", "online", "nodes"} {
		if err := os.WriteFile(filepath.Join(dir, other), []byte("0-1\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func read(t *testing.T, dir string) []numa.Node {
	t.Helper()
	n, err := numa.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRead(t *testing.T) {
	got := read(t, host(t, map[int][4]any{1: {"24-47", 65536, 1000, 2049}, 0: {"0-23,48", 65536, 40000, 1}, 10: {"", 1024, 1024, 0}}))
	if len(got) != 3 || got[0].ID != 0 || got[1].ID != 1 || got[2].ID != 10 {
		t.Fatalf("nodes %+v", got)
	}
	if n := got[1]; n.CPUList != "24-47" || len(n.CPUs) != 24 || n.CPUs[0] != 24 || n.TotalMiB != 65536 || n.FreeMiB != 1000+2048 {
		t.Errorf("node 1 = %+v", n)
	}
	if n := got[0]; len(n.CPUs) != 25 || n.CPUs[24] != 48 || n.FreeMiB != 40000 {
		t.Errorf("node 0 = %+v", n)
	}
	if n := got[2]; len(n.CPUs) != 0 {
		t.Errorf("node 10 = %+v", n)
	}
	if n, err := numa.Read(filepath.Join(t.TempDir(), "none")); n != nil || err != nil {
		t.Errorf("without nodes: %v, %v", n, err)
	}
	bad := host(t, map[int][4]any{0: {"0-", 1, 1, 1}})
	if _, err := numa.Read(bad); err == nil || !strings.Contains(err.Error(), "memory node 0") {
		t.Errorf("a broken list: %v", err)
	}
}

// Lines of meminfo that are none of a node's, or cut short, say nothing.
func TestReadOddLines(t *testing.T) {
	dir := host(t, map[int][4]any{0: {"0", 4096, 100, 0}})
	p := filepath.Join(dir, "node0", "meminfo")
	b, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	odd := string(b) + "Nude 0 MemFree:  1 kB\nNode 0 MemFree:\n\nNode\nNode 0 MemTotal: many kB\n"
	if err := os.WriteFile(p, []byte(odd), 0o644); err != nil {
		t.Fatal(err)
	}
	if n := read(t, dir); n[0].FreeMiB != 100 || n[0].TotalMiB != 4096 {
		t.Errorf("%+v", n[0])
	}
	if err := os.WriteFile(p, []byte("Node 0 MemTotal: 1 kB\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := numa.Read(dir); err == nil || !strings.Contains(err.Error(), "no MemFree") {
		t.Errorf("without MemFree: %v", err)
	}
}

func TestParseList(t *testing.T) {
	for s, want := range map[string][]int{"": nil, "7": {7}, "0-2,8,10-11": {0, 1, 2, 8, 10, 11}, "3,1-3": {1, 2, 3}, "5-5": {5}, "65536": {65536}} {
		if got, err := numa.ParseList(s); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"-1", "-3-1", "-2--1", "3-1", "1-", "a", "1,,2", ",", "0-65537", "65537", "1-2-3", " 1"} {
		if got, err := numa.ParseList(s); err == nil {
			t.Errorf("%q is %v", s, got)
		}
	}
}

func TestChoose(t *testing.T) {
	two := read(t, host(t, map[int][4]any{0: {"0-23", 65536, 20000, 0}, 1: {"24-47", 65536, 30000, 0}}))
	for _, tc := range []struct {
		name, mode string
		nodes      []numa.Node
		room       func(numa.Node) int64
		guest      numa.Guest
		want       string
	}{
		{"most room", numa.Auto, two, nil, numa.Guest{MemMiB: 8192, CPUs: 4}, "NUMA: node 1 (cpus 24-47) of 2"},
		{"room of the ledger", numa.Auto, two, func(n numa.Node) int64 { return []int64{9000, 8191}[n.ID] }, numa.Guest{MemMiB: 8192, CPUs: 4}, "NUMA: node 0 (cpus 0-23) of 2"},
		{"the first of equals", numa.Auto, two, func(numa.Node) int64 { return 9000 }, numa.Guest{MemMiB: 8192, CPUs: 4}, "NUMA: node 0 (cpus 0-23) of 2"},
		{"exactly", numa.Auto, two, nil, numa.Guest{MemMiB: 30000, CPUs: 24}, "NUMA: node 1 (cpus 24-47) of 2"},
		{"too much memory", numa.Auto, two, nil, numa.Guest{MemMiB: 30001, CPUs: 1}, "NUMA: interleaved across 2 nodes (the VM does not fit one node)"},
		{"too many processors", numa.Auto, two, nil, numa.Guest{MemMiB: 1, CPUs: 25}, "NUMA: interleaved across 2 nodes (the VM does not fit one node)"},
		{"asked for", numa.Interleave, two, nil, numa.Guest{MemMiB: 1, CPUs: 1}, "NUMA: interleaved across 2 nodes"},
		{"off", numa.Off, two, nil, numa.Guest{MemMiB: 1, CPUs: 1}, ""},
		{"one node", numa.Auto, two[:1], nil, numa.Guest{MemMiB: 1, CPUs: 1}, ""},
		{"none", numa.Interleave, nil, nil, numa.Guest{MemMiB: 1, CPUs: 1}, ""},
	} {
		p := numa.Choose(tc.mode, tc.nodes, tc.room, tc.guest)
		got := ""
		if p != nil {
			got = p.Line()
			if p.Interleave != (p.CPUs == nil) || !slices.Equal(p.Nodes, []int{0, 1}) {
				t.Errorf("%s: %+v", tc.name, p)
			}
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Guests that were placed a moment ago have touched nothing, and count.
func TestBeside(t *testing.T) {
	two := read(t, host(t, map[int][4]any{0: {"0-23", 65536, 20000, 0}, 1: {"24-47", 65536, 30000, 0}}))
	var own []numa.Outstanding
	for i, want := range []string{
		"NUMA: node 1 (cpus 24-47) of 2", "NUMA: node 0 (cpus 0-23) of 2", "NUMA: node 1 (cpus 24-47) of 2",
		"NUMA: interleaved across 2 nodes (the VM does not fit one node)", // 6,000 and 6,000 are left
	} {
		p := numa.Choose(numa.Auto, two, numa.Beside(own), numa.Guest{MemMiB: []int64{12000, 14000, 12000, 7000}[i], CPUs: 1})
		if p.Line() != want {
			t.Errorf("%d: %s, want %s", i, p.Line(), want)
		}
		own = append(own, numa.Outstanding{Place: p, MemMiB: []int64{12000, 14000, 12000, 7000}[i]})
	}
	if got := numa.Beside(own)(two[0]); got != 6000-3500 {
		t.Errorf("node 0 has %d MiB left, want half of the interleaved one's less", got)
	}
}

func TestShare(t *testing.T) {
	var none *numa.Placement
	on1 := &numa.Placement{Node: 1, Nodes: []int{0, 1}}
	both := &numa.Placement{Interleave: true, Nodes: []int{0, 1}}
	for i, tc := range []struct {
		p    *numa.Placement
		node int
		want int64
	}{{none, 0, 0}, {on1, 0, 0}, {on1, 1, 1000}, {both, 0, 500}, {both, 1, 500}, {both, 2, 0}} {
		if got := tc.p.Share(tc.node, 1000); got != tc.want {
			t.Errorf("%d: %d, want %d", i, got, tc.want)
		}
	}
}

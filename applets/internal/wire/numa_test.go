package wire

import (
	"testing"

	"virtkit/core/admit"
	"virtkit/core/numa"
)

func TestANodeIsChosenByWhatWasGranted(t *testing.T) {
	nodes := []numa.Node{
		{ID: 0, CPUs: []int{0, 1, 2, 3}, CPUList: "0-3", TotalMiB: 10000, FreeMiB: 9000},
		{ID: 1, CPUs: []int{4, 5, 6, 7}, CPUList: "4-7", TotalMiB: 10000, FreeMiB: 100}, // free says nothing of those that have not touched it
	}
	at := func(node int, mib int64) admit.Claim {
		return admit.Claim{Granted: admit.Amounts{MemMiB: mib}, Place: &numa.Placement{Node: node, Nodes: []int{0, 1}}}
	}
	both := admit.Claim{Granted: admit.Amounts{MemMiB: 4000}, Place: &numa.Placement{Interleave: true, Nodes: []int{0, 1}}}
	unplaced := admit.Claim{Granted: admit.Amounts{MemMiB: 9000}}
	for _, tc := range []struct {
		others []admit.Claim
		want   string
	}{
		{nil, "NUMA: node 0 (cpus 0-3) of 2"},
		{[]admit.Claim{at(0, 1), unplaced}, "NUMA: node 1 (cpus 4-7) of 2"},
		{[]admit.Claim{at(0, 5000), at(1, 3000), at(1, 1000)}, "NUMA: node 1 (cpus 4-7) of 2"},
		{[]admit.Claim{at(0, 5000), at(1, 6000), both}, "NUMA: node 0 (cpus 0-3) of 2"},
		{[]admit.Claim{at(0, 5000), at(1, 5000), both}, "NUMA: node 0 (cpus 0-3) of 2"},
		{[]admit.Claim{at(0, 5001), at(1, 5001), both}, "NUMA: interleaved across 2 nodes (the VM does not fit one node)"},
	} {
		p := chooseByLedger(numa.Auto, nodes, admit.Ask{Amounts: admit.Amounts{MemMiB: 5000, CPUs: 9}, Guest: numa.Guest{MemMiB: 3000, CPUs: 4}}, tc.others)
		if p == nil || p.Line() != tc.want {
			t.Errorf("%+v: %+v, want %q", tc.others, p, tc.want)
		}
	}
}

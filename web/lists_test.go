package web_test

import (
	"fmt"
	"strings"
	"testing"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// TestManyWorkloads: lists that do not fit one reply together are replaced by
// their counts, and each is had by its node's name.
func TestManyWorkloads(t *testing.T) {
	b := start(t, false)
	var list []wire.Workload
	for n := range wire.MaxWorkloads {
		list = append(list, wire.Workload{ID: fmt.Sprintf("%016x", n), Kind: wire.KindRun, Dir: strings.Repeat("d", 250), StateDir: strings.Repeat("s", 250), Image: strings.Repeat("i", 250)})
	}
	var batch hub.Batch
	add := func(from, to int) {
		t.Helper()
		batch = hub.Batch{}
		for n := from; n < to; n++ {
			i := hubtest.Enroll(t, b.Hub, fmt.Sprintf("ci-%d", n))
			batch.Workloads = append(batch.Workloads, hub.Workloads{Node: i.ID, At: 1, List: list})
		}
		if err := b.Store().Apply(t.Context(), &batch); err != nil {
			t.Fatal(err)
		}
	}
	add(0, 3)
	few, err := b.admin.Workloads(t.Context(), "")
	if err != nil || len(few.Nodes) != 3 || len(few.Nodes[0].List) != len(list) {
		t.Fatalf("%v", err)
	}
	add(3, 90)
	all, err := b.admin.Workloads(t.Context(), "")
	if err != nil || len(all.Nodes) != 90 {
		t.Fatalf("%v", err)
	}
	for _, n := range all.Nodes {
		if n.Count != len(list) || len(n.List) != 0 {
			t.Errorf("%s: %d VMs, %d listed", n.Name, n.Count, len(n.List))
		}
	}
	one, err := b.admin.Workloads(t.Context(), "ci-7")
	if err != nil || len(one.Nodes) != 1 || len(one.Nodes[0].List) != len(list) {
		t.Errorf("of one node: %v", err)
	}
}

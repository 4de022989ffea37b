package ledger_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/admit"
	"virtkit/core/numa"
	"virtkit/ledger"
)

// TestANodeGoesWithItsClaim: each job's memory node is chosen with those of the
// jobs before it in sight, and kept beside its claim.
func TestANodeGoesWithItsClaim(t *testing.T) {
	jobs, err := ledger.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var seen []int // nodes of the others, at each choice
	a, err := jobs.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: 8192}, Place: func(ask admit.Ask, others []admit.Claim) *numa.Placement {
		if ask.Guest.CPUs != 2 {
			t.Errorf("the ask is %+v", ask)
		}
		seen = nil
		for _, c := range others {
			if c.Place != nil && c.Granted.MemMiB == 2048 {
				seen = append(seen, c.Place.Node)
			}
		}
		slices.Sort(seen)
		return &numa.Placement{Node: len(others), Nodes: []int{0, 1, 2}}
	}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(id string) admit.Ask {
		return admit.Ask{ID: id, Amounts: admit.Amounts{MemMiB: 2048}, Guest: numa.Guest{MemMiB: 1024, CPUs: 2}}
	}
	for i, want := range [][]int{nil, {0}, {0, 1}} {
		h := admitNow(t, a, ask("job-"+string(rune('a'+i))))
		defer h.Release()
		if d := cmp.Diff(&numa.Placement{Node: i, Nodes: []int{0, 1, 2}}, h.Place()); d != "" {
			t.Errorf("job %d (-want +got)\n%s", i, d)
		}
		if !slices.Equal(seen, want) {
			t.Errorf("job %d was placed beside nodes %v, want %v", i, seen, want)
		}
	}
	// One that is gone counts no more, for another process either.
	other, err := jobs.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: 8192}})
	if err != nil {
		t.Fatal(err)
	}
	h := admitNow(t, other, ask("job-d"))
	if h.Place() != nil {
		t.Errorf("placed where nobody places: %+v", h.Place())
	}
	if err := h.Release(); err != nil {
		t.Fatal(err)
	}
}

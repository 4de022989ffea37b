package supervise_test

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"virtkit/core/guestwire"
	"virtkit/core/numa"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

func TestPlace(t *testing.T) {
	given := &numa.Placement{Node: 0, Nodes: []int{0, 1}, CPUList: "0-3"}
	chosen := &numa.Placement{Interleave: true, Unfit: true, Nodes: []int{0, 1}}
	for _, tc := range []struct {
		name  string
		given *numa.Placement
		place func(supervise.Spec, []numa.Outstanding) (*numa.Placement, error)
		want  *numa.Placement
		line  string
	}{
		{"given", given, func(supervise.Spec, []numa.Outstanding) (*numa.Placement, error) { return chosen, nil }, given, "NUMA: node 0 (cpus 0-3) of 2"},
		{"chosen", nil, func(supervise.Spec, []numa.Outstanding) (*numa.Placement, error) { return chosen, nil }, chosen, "NUMA: interleaved across 2 nodes (the VM does not fit one node)"},
		{"no choice", nil, func(supervise.Spec, []numa.Outstanding) (*numa.Placement, error) { return nil, nil }, nil, ""},
		{"unknown", nil, func(supervise.Spec, []numa.Outstanding) (*numa.Placement, error) { return nil, errors.New("no sysfs") }, nil, ""},
		{"nobody chooses", nil, nil, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := run(t, &supervisetest.Driver{}, func(s *supervise.Spec, d *supervise.Deps) { s.Place, d.Place = tc.given, tc.place })
			st, err := w.client.State(ctxFor(t))
			if err != nil || st.NUMA != tc.line || w.driver.Last().Spec.Place != tc.want && w.driver.Last().Spec.Place.Line() != tc.line {
				t.Errorf("placed %+v, says %q, %v; want %q", w.driver.Last().Spec.Place, st.NUMA, err, tc.line)
			}
		})
	}
}

// What the host refuses is not told as if it were so.
func TestARefusedPlaceIsTakenBack(t *testing.T) {
	at := &numa.Placement{Node: 1, Nodes: []int{0, 1}, CPUs: []int{9}, CPUList: "9"}
	w := run(t, &supervisetest.Driver{PlaceErr: errors.New("running on cpus 9: invalid argument")}, func(s *supervise.Spec, _ *supervise.Deps) { s.Place = at })
	if st, err := w.client.State(ctxFor(t)); err != nil || st.NUMA != "" || w.driver.Last().Spec.Place == nil {
		t.Errorf("says %q, %v", st.NUMA, err)
	}
}

// A job's guests do not all go to the node that had the most room when the first
// of them came: none has touched its memory yet.
func TestServicesArePlacedBesideEachOther(t *testing.T) {
	nodes := []numa.Node{
		{ID: 0, CPUs: []int{0, 1}, CPUList: "0-1", TotalMiB: 1000, FreeMiB: 700},
		{ID: 1, CPUs: []int{2, 3}, CPUList: "2-3", TotalMiB: 1000, FreeMiB: 600},
	}
	for _, given := range []*numa.Placement{nil, {Node: 1, Nodes: []int{0, 1}, CPUList: "2-3"}} {
		w := run(t, &supervisetest.Driver{}, func(s *supervise.Spec, deps *supervise.Deps) {
			base := filepath.Dir(s.Image.Path)
			one, two := shell(base, "one", "exec sleep 1000"), shell(base, "two", "exec sleep 1000")
			s.MemMiB, s.Place = 400, given
			one.Spec.MemMiB, two.Spec.MemMiB = 400, 400
			s.Services = []supervise.Service{one, two}
			deps.Place = func(g supervise.Spec, others []numa.Outstanding) (*numa.Placement, error) {
				return numa.Choose(numa.Auto, nodes, numa.Beside(others), numa.Guest{MemMiB: int64(g.MemMiB), CPUs: 1}), nil
			}
			deps.Argv, deps.Env = relaunch()
		})
		var lines []string
		eventually(t, "the start of both", func() bool {
			st, err := w.client.State(ctxFor(t))
			lines = []string{st.NUMA}
			for _, v := range st.Services {
				lines = append(lines, v.NUMA)
			}
			return err == nil && !slices.Contains(lines, "")
		})
		slices.Sort(lines) // which of the three came first is not said
		want := []string{"NUMA: interleaved across 2 nodes (the VM does not fit one node)", "NUMA: node 0 (cpus 0-1) of 2", "NUMA: node 1 (cpus 2-3) of 2"}
		if !slices.Equal(lines, want) {
			t.Errorf("the job's %v: %q, want %q", given, lines, want)
		}
	}
}

// TestPressureIsAccountedWhereItIsRead: the scheduler pays for it.
func TestPressureIsAccountedWhereItIsRead(t *testing.T) {
	for _, tc := range []struct {
		reclaim *guestwire.Reclaim
		record  *supervise.Record
		want    string
	}{
		{nil, nil, "psi=0"},
		{&guestwire.Reclaim{Keep: 1}, nil, "psi=1"},
		{nil, &supervise.Record{Name: "r", Interval: time.Hour}, "psi=1"},
	} {
		w := run(t, &supervisetest.Driver{}, func(s *supervise.Spec, _ *supervise.Deps) {
			s.Reclaim, s.Record, s.NoBalloon = tc.reclaim, tc.record, true
		})
		got := w.driver.Last().Spec
		if !slices.Contains(got.Kernel.Cmdline, tc.want) || !got.NoBalloon {
			t.Errorf("%+v: command line %q, no balloon %v; want %s", tc, got.Kernel.Cmdline, got.NoBalloon, tc.want)
		}
		if r := w.driver.Last().Setups()[0].Reclaim; (r == nil) != (tc.reclaim == nil) || r != nil && *r != *tc.reclaim {
			t.Errorf("the guest is told to reclaim %+v, want %+v", r, tc.reclaim)
		}
	}
}

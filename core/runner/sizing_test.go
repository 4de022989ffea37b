package runner_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/conf"
	"virtkit/core/guestwire"
	"virtkit/core/numa"
	"virtkit/core/supervise"
)

func TestReclaimFollowsTheBalloon(t *testing.T) {
	for _, tc := range []struct {
		amount        conf.Amount
		balloon       bool
		want, service *guestwire.Reclaim
	}{
		{conf.Amount{Word: "auto"}, true, &guestwire.Reclaim{}, &guestwire.Reclaim{}},
		{conf.Amount{Word: "auto"}, false, nil, &guestwire.Reclaim{}},
		{conf.Amount{Word: "off"}, true, nil, nil},
		{conf.Amount{Bytes: 512 << 20}, true, &guestwire.Reclaim{Keep: 512 << 20}, &guestwire.Reclaim{Keep: 512 << 20}},
		{conf.Amount{Percent: 5}, true, &guestwire.Reclaim{Keep: 2048 << 20 / 20}, &guestwire.Reclaim{Keep: 1024 << 20 / 20}},
	} {
		w := newWorld(t)
		w.run.Set.Reclaim, w.run.Set.Balloon = tc.amount, tc.balloon
		w.host.Images["db"] = w.host.Images["entry"]
		w.response(`{"id":77,"job_info":{"name":"test unit"},"services":[{"name":"db"}]}`)
		w.prepare()
		s := w.host.Launched[0]
		if d := cmp.Diff(tc.want, s.Reclaim); d != "" || s.NoBalloon == tc.balloon {
			t.Errorf("%v, balloon %v: no balloon %v (-want +got)\n%s", tc.amount, tc.balloon, s.NoBalloon, d)
		}
		v := s.Services[0].Spec
		if d := cmp.Diff(tc.service, v.Reclaim); d != "" || v.NoBalloon {
			t.Errorf("service, %v, balloon %v (-want +got)\n%s", tc.amount, tc.balloon, d)
		}
	}
}

func TestTheLedgersNodeIsTheGuests(t *testing.T) {
	w := newWorld(t)
	place := &numa.Placement{Node: 1, Nodes: []int{0, 1}, CPUs: []int{4, 5}, CPUList: "4-5"}
	w.run.Gate = &gate{place: place}
	w.host.State = func(st *supervise.State) { st.NUMA = place.Line() }
	w.prepare()
	if d := cmp.Diff(place, w.host.Launched[0].Place); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	w.wantTrace("virtkit: NUMA: node 1 (cpus 4-5) of 2\n")
}

func TestAWindowThatCannotBeHadIsSaid(t *testing.T) {
	w := newWorld(t)
	w.run.Set.DAX = "8G:always"
	w.prepare()
	w.wantTrace(`virtkit: warning: [executor.vm] dax = "8G:always" has no effect`)
	w = newWorld(t)
	w.prepare()
	if strings.Contains(w.trace.String(), "dax") || strings.Contains(w.trace.String(), "NUMA") {
		t.Errorf("nobody asked for it:\n%s", w.trace.String())
	}
}

package supervise_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

func withEgress(s *supervise.Spec, _ *supervise.Deps) {
	s.Net.Egress = &supervise.Egress{Site: "1-a/b", Policy: policy.Policy{Phase: policy.Run, Cap: policy.Lists{Names: []string{}},
		Services: []policy.Service{{VM: "db", Lists: policy.Lists{Names: []string{"a.example"}}}}}}
}

// looks records a question that was refused.
func looks(n *supervisetest.Network, name string) {
	n.Recorder().Judged("", policy.Flow{Proto: policy.DNS, Name: name}, policy.Judgement{Verdict: policy.Verdict{Layer: policy.LayerNodeCap}}, false, time.Now())
}

func dests(r supervise.EgressRecord) (out []string) {
	for _, e := range r.Record.Entries {
		out = append(out, e.Dest+" in "+e.Stage)
	}
	return out
}

func TestEgressIsRecordedByStage(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, keep, withEgress)
	ask := func(stage string) supervise.EgressRecord {
		t.Helper()
		r, err := w.client.Egress(ctxFor(t), stage)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := ask("get_sources"); r.Ended || r.ID != "run-1" || r.Egress.Site != "1-a/b" || len(r.Record.Entries) != 0 || r.Egress.Policy.Services[0].VM != "db" {
		t.Errorf("at first: %+v", r)
	}
	looks(w.net, "one.example")
	if r := ask("build_script"); !cmp.Equal(dests(r), []string{"one.example in get_sources"}) || r.Sent != 7 || r.Received != 11 {
		t.Errorf("after a stage: %+v", r)
	}
	looks(w.net, "two.example")
	if _, err := w.client.Stop(ctxFor(t), 0); err != nil {
		t.Fatal(err)
	}
	w.wait()
	// What came after the last question is there too, and from the client that
	// finds no supervisor any more.
	for _, read := range []func() (supervise.EgressRecord, error){
		func() (supervise.EgressRecord, error) { return supervise.ReadEgress(w.dir) },
		func() (supervise.EgressRecord, error) { return w.client.Egress(ctxFor(t), "") },
	} {
		r, err := read()
		if err != nil || !r.Ended || !cmp.Equal(dests(r), []string{"one.example in get_sources", "two.example in build_script"}) {
			t.Errorf("at the end: %+v, %v", r, err)
		}
	}
}

// A supervisor that is killed leaves what it recorded up to a moment before.
func TestEgressIsWrittenAsItGoes(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, withEgress, func(_ *supervise.Spec, d *supervise.Deps) { d.Times.Record = 5 * time.Millisecond })
	looks(w.net, "one.example")
	eventually(t, "the record", func() bool {
		r, err := supervise.ReadEgress(w.dir)
		return err == nil && !r.Ended && cmp.Equal(dests(r), []string{"one.example in "})
	})
}

// The record of a guest whose directory is not kept is handed on.
func TestEgressOfADirectoryThatGoes(t *testing.T) {
	kept := make(chan supervise.EgressRecord, 1)
	w := run(t, &supervisetest.Driver{}, withEgress, func(_ *supervise.Spec, d *supervise.Deps) {
		d.KeepEgress = func(r supervise.EgressRecord) error { kept <- r; return nil }
	})
	looks(w.net, "one.example")
	if _, err := w.client.Stop(ctxFor(t), 0); err != nil {
		t.Fatal(err)
	}
	w.wait()
	gone(t, w.dir)
	if r := <-kept; !r.Ended || !cmp.Equal(dests(r), []string{"one.example in "}) {
		t.Errorf("%+v", r)
	}
}

func TestEgressOfAGuestWithoutAPolicy(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	if _, err := w.client.Egress(ctxFor(t), "x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Egress = %v, want fs.ErrNotExist", err)
	}
}

// plain hides that a network can hold guests to a policy.
type plain struct{ supervise.Network }

func TestEgressOnANetworkThatCannot(t *testing.T) {
	w := begin(t, &supervisetest.Driver{}, keep, withEgress, func(_ *supervise.Spec, d *supervise.Deps) {
		d.NewNetwork = func(context.Context, string, supervise.Spec) (supervise.Network, error) {
			return plain{&supervisetest.Network{}}, nil
		}
	})
	w.wait()
	if fault.KindOf(w.err) != fault.System || !strings.Contains(w.err.Error(), "egress policy") {
		t.Errorf("Run = %v; want a guest that does not start", w.err)
	}
}

// Public case S34: where the switch cannot be made, or a port of it, the guest
// does not start; it is not given another network.
func TestNetworkThatCannotBeMade(t *testing.T) {
	for what, n := range map[string]func(context.Context, string, supervise.Spec) (supervise.Network, error){
		"no switch": func(context.Context, string, supervise.Spec) (supervise.Network, error) {
			return nil, fault.New(fault.Usage, "the switch cannot be made")
		},
		"no port": func(context.Context, string, supervise.Spec) (supervise.Network, error) { return new(unpluggable), nil },
	} {
		t.Run(what, func(t *testing.T) {
			d := &supervisetest.Driver{}
			w := begin(t, d, keep, func(_ *supervise.Spec, deps *supervise.Deps) { deps.NewNetwork = n })
			w.wait()
			if w.err == nil || !strings.Contains(w.err.Error(), "cannot be made") || d.Boots() != 0 {
				t.Errorf("Run = %v after %d boots; want what is wrong, and no guest", w.err, d.Boots())
			}
		})
	}
}

// unpluggable is a network that gives no guest a place.
type unpluggable struct{ supervisetest.Network }

func (*unpluggable) Plug(context.Context, string, supervise.NetSpec) (supervise.Plugged, error) {
	return nil, errors.New("the port cannot be made")
}

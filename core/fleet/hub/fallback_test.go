package hub_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/policy"
)

// TestFallbackOfNodes: a node that enforces the Fallback has it in its desired
// state while rules are on, each change as the next generation; another has not.
func TestFallbackOfNodes(t *testing.T) {
	inFleet(t, hub.JobOptions{EgressRules: true}, func(t *testing.T, f *fleet) {
		able, old := hubtest.NewPlaced(t, f.Hub, "able", "ci", 16, 9<<30), hubtest.NewPlaced(t, f.Hub, "old", "ci", 16, 9<<30)
		able.Inventory.Features = []string{wire.FeatureEgressRules, wire.FeatureEgressFallback}
		old.Inventory.Features = []string{wire.FeatureEgressRules}
		f.connect(able)
		f.connect(old)
		gen := uint64(0)
		want := func(f *fleet, when, layer string) {
			t.Helper()
			synctest.Wait()
			d := f.Snapshot().Nodes[able.ID].Desired
			got := ""
			if d.Policy.Layer != nil {
				got = string(*d.Policy.Layer)
				if _, err := policy.ParseHubEgress(*d.Policy.Layer); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			}
			if gen++; got != layer || d.Generation != gen {
				t.Errorf("%s: generation %d with layer %s, want %d with %s", when, d.Generation, got, gen, layer)
			}
			if d := f.Snapshot().Nodes[old.ID].Desired; d.Generation != 0 {
				t.Errorf("%s: the node that cannot enforce it was asked for %+v", when, d)
			}
		}
		const none = `{"rules":[],"run":{"names":[],"ips":[]},"build":{"names":[],"ips":[]}`
		want(f, "without a Fallback", none+`}`)
		f.rule("default", "", "dry-run", lists(t, []string{"x.example"}, nil), &policy.Lists{})
		want(f, "in dry-run", none+`,"dry_run":[{"rule":"default","run":{"names":["x.example"],"ips":[]},"build":{}}]}`)
		f.rule("default", "", "enforce", nil, nil)
		enforced := `{"rules":["default"],"run":{"names":["x.example"],"ips":[]},"build":{}}`
		want(f, "enforced", enforced)
		// By what a pipeline may say of itself none of these jobs is selected.
		f.rule("all", "*", "enforce", &policy.Lists{}, &policy.Lists{})
		if gen--; true {
			want(f, "beside another rule", enforced)
		}
		stop := true
		if _, err := f.SetPolicy(t.Context(), "uid 1", able.ID, hub.PolicyChange{Stop: &stop}); err != nil {
			t.Fatal(err)
		}
		want(f, "steered otherwise", enforced)

		f = f.again(hub.JobOptions{}) // rules turned off
		defer func() { f.stop() }()
		time.Sleep(time.Second)
		want(f, "rules off", "")
		if d := f.Snapshot().Nodes[able.ID].Desired; !d.Policy.Stop {
			t.Error("the rest of the desired state is lost")
		}
		audit, err := f.store.Audit(t.Context(), hub.AuditQuery{Node: able.ID, Limit: 100})
		if n := len(slices.DeleteFunc(audit, func(l hub.AuditLine) bool { return l.Actor != "hub" || !strings.Contains(l.Event, "egress fallback") })); err != nil || n != 4 {
			t.Errorf("%d lines of the audit, %v; want 4", n, err)
		}
	})
}

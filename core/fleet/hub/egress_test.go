package hub_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/wire"
	"virtkit/core/policy"
)

func lists(t *testing.T, names, ips []string) *policy.Lists {
	t.Helper()
	l := &policy.Lists{Names: names}
	var bad []*policy.EntryError
	if ips != nil {
		l.IPs, bad = policy.ParseIPs(policy.Source{}, ips)
	}
	if err := policy.Refuse(bad); err != nil {
		t.Fatal(err)
	}
	return l
}

func p[T any](v T) *T { return &v }

func (f *fleet) rule(name, subject, mode string, run, build *policy.Lists) {
	f.t.Helper()
	q := hub.RuleChange{Name: name, Run: run, Build: build, Mode: &mode}
	if subject != "" {
		q.Subject = &subject
	}
	if _, err := f.SetRule(f.t.Context(), "uid 1", q); err != nil {
		f.t.Fatal(err)
	}
}

func layerJSON(t *testing.T, h *policy.HubEgress) string {
	t.Helper()
	b, err := hub.PackLayer(h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := policy.ParseHubEgress(b); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return string(b)
}

// TestLayer: which rules select a job, how they add up, and what comes of those
// in dry-run.
func TestLayer(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		none := lists(t, []string{}, nil)
		wab := hub.Claims{Instance: "gl", Project: 7, Path: "wab/x/y", Ref: "release/1", Protected: true}
		check := func(what string, c hub.Claims, want string) {
			t.Helper()
			if d := cmp.Diff(want, layerJSON(t, f.Snapshot().Layer(c))); d != "" {
				t.Errorf("%s:\n%s", what, d)
			}
		}
		const nothing = `{"names":[],"ips":[]}`
		check("no rules", wab, `{"rules":[],"run":`+nothing+`,"build":`+nothing+`}`)
		f.rule("default", "", "dry-run", none, &policy.Lists{})
		check("a Fallback in dry-run", wab, `{"rules":[],"run":`+nothing+`,"build":`+nothing+`,"dry_run":[{"rule":"default","run":`+nothing+`,"build":{}}]}`)
		f.rule("default", "", "enforce", none, &policy.Lists{})
		check("the Fallback", wab, `{"rules":["default"],"run":`+nothing+`,"build":{}}`)
		f.rule("wab", "gitlab gl,  projects wab/**, protected", "enforce", lists(t, []string{"corp.example.com"}, []string{"10.10.140.49/32"}), lists(t, []string{"debian.org"}, nil))
		f.rule("seven", "gitlab gl, project-id 7", "enforce", lists(t, []string{"corp.example.com", "seven.example"}, nil), &policy.Lists{})
		const both = `{"names":["corp.example.com","seven.example"],"ips":["10.10.140.49/32"]}`
		check("two add up", wab, `{"rules":["seven","wab"],"run":`+both+`,"build":{}}`)
		f.rule("rel", "gitlab gl, projects wab/**, ref release/*, protected", "dry-run", lists(t, []string{"partner.example.net"}, nil), none)
		check("one in dry-run comes as if it were enforced", wab, `{"rules":["seven","wab"],"run":`+both+`,"build":{},"dry_run":[{"rule":"rel","run":{"names":["corp.example.com","seven.example","partner.example.net"],"ips":["10.10.140.49/32"]},"build":{}}]}`)
		for what, c := range map[string]hub.Claims{
			"another instance": {Instance: "other", Project: 7, Path: "wab/x", Protected: true}, "no instance": {Path: "wab/x", Project: 7, Protected: true},
			"unprotected": {Instance: "gl", Project: 8, Path: "wab/x"}, "not below": {Instance: "gl", Project: 8, Path: "wab", Protected: true}, "a longer name": {Instance: "gl", Project: 8, Path: "wabx/y", Protected: true},
		} {
			check(what, c, `{"rules":["default"],"run":`+nothing+`,"build":{}}`)
		}
		if n := f.Snapshot().RuleGeneration(); n != 5 {
			t.Errorf("generation %d after 5 changes", n)
		}
		r, err := f.SetRule(t.Context(), "uid 1", hub.RuleChange{Name: "rel", Mode: p(hub.ModeEnforce)})
		if err != nil || r.Version != 2 || r.Mode != hub.ModeEnforce || r.Run.Names[0] != "partner.example.net" || r.Subject != "gitlab gl, projects wab/**, ref release/*, protected" {
			t.Errorf("%+v, %v", r, err)
		}
		if err := f.DropRule(t.Context(), "uid 1", "seven"); err != nil {
			t.Error(err)
		}
		// All of it is stored.
		g := f.again(hub.JobOptions{})
		defer g.stop()
		text := func(f *fleet) string {
			b, err := json.Marshal(f.Snapshot().RuleList())
			if err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		if d := cmp.Diff(text(f), text(g)); d != "" || g.Snapshot().RuleGeneration() != 7 {
			t.Errorf("generation %d, %s", g.Snapshot().RuleGeneration(), d)
		}
	})
}

func TestRulesThatAreRefused(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		free := &policy.Lists{}
		f.rule("default", "", "enforce", free, free)
		long := &policy.Lists{}
		for range 257 {
			long.Names = append(long.Names, "x.example")
		}
		for what, q := range map[string]hub.RuleChange{
			"a name": {Name: "A b", Subject: p("*"), Run: free, Build: free}, "no subject": {Name: "a", Run: free, Build: free}, "one phase": {Name: "a", Subject: p("*"), Run: free},
			"a subject of the Fallback's": {Name: "default", Subject: p("*")}, "a mode": {Name: "a", Subject: p("*"), Run: free, Build: free, Mode: p("later")},
			"projects without gitlab": {Name: "a", Subject: p("projects x"), Run: free, Build: free}, "an open ref": {Name: "a", Subject: p("gitlab gl, ref main"), Run: free, Build: free},
			"no term": {Name: "a", Subject: p("own project"), Run: free, Build: free}, "a term without a value": {Name: "a", Subject: p("gitlab"), Run: free, Build: free}, "both": {Name: "a", Subject: p("protected, unprotected"), Run: free, Build: free},
			"twice": {Name: "a", Subject: p("*"), Run: &policy.Lists{Names: []string{"x.example", "x.example"}}, Build: free}, "long": {Name: "a", Subject: p("*"), Run: long, Build: free},
		} {
			if _, err := f.SetRule(t.Context(), "uid 1", q); fault.KindOf(err) != fault.Usage {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := f.DropRule(t.Context(), "uid 1", "x"); fault.KindOf(err) != fault.NotFound {
			t.Error(err)
		}
		if len(f.RuleWarnings()) != 1 { // they restrict nothing
			t.Error(f.RuleWarnings())
		}
	})
}

// TestJobUnderRules: it goes to a node that enforces them alone, with its start,
// and its record says which they were; a layer past the bounds fails it.
func TestJobUnderRules(t *testing.T) {
	inFleet(t, hub.JobOptions{EgressRules: true}, func(t *testing.T, f *fleet) {
		if len(f.RuleWarnings()) != 1 { // no Fallback
			t.Error(f.RuleWarnings())
		}
		old := f.node("old", 9)
		q := f.submission("", nil)
		v, e := f.submit(q)
		if e != nil {
			t.Fatal(e)
		}
		f.want(v.ID, dispatch.Queued, "")
		for _, n := range f.Snapshot().Nodes {
			if !strings.Contains(f.PlacesNot(n), "egress rules") {
				t.Errorf("%q", f.PlacesNot(n))
			}
		}
		able := hubtest.NewPlaced(t, f.Hub, "able", "ci", 16, 9<<30)
		able.Inventory.Features = []string{wire.FeatureEgressRules}
		f.rule("all", "gitlab gl", "enforce", lists(t, []string{"x.example"}, nil), &policy.Lists{})
		f.connect(able)
		f.want(v.ID, dispatch.Running, "")
		if len(old.Starts) != 0 {
			t.Error("the old node was sent it")
		}
		if got, want := string(able.Start(v.ID).Layer), `{"rules":["all"],"run":{"names":["x.example"],"ips":[]},"build":{}}`; got != want {
			t.Errorf("layer %s, want %s", got, want)
		}
		j, err := f.FindJob(t.Context(), v.ID)
		if err != nil || len(j.Rules) != 1 || j.Rules[0] != "all" || j.RulesGen != 1 {
			t.Errorf("%+v, %v", j, err)
		}
		// 33 rules are more than a start may have.
		for i := range 32 {
			f.rule("r"+string(rune('a'+i%26))+string(rune('a'+i/26)), "gitlab gl", "enforce", &policy.Lists{}, &policy.Lists{})
		}
		v, e = f.submit(f.submission("", nil))
		if e != nil {
			t.Fatal(e)
		}
		f.want(v.ID, dispatch.Finished, string(job.Configuration))
	})
}

// TestEgressReports: the highest revision is kept, while the job runs and after;
// one whose node did not have the last word is partial.
func TestEgressReports(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 9)
		report := func(rev uint64) json.RawMessage {
			b, err := json.Marshal(policy.Report{Revision: rev, Rules: []string{}, Run: &policy.ReportPhase{Coverage: policy.Complete}})
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		got := func(f *fleet, id string) (uint64, policy.Coverage) {
			t.Helper()
			j, err := f.FindJob(context.Background(), id)
			if err != nil {
				t.Fatal(err)
			}
			r, err := f.Egress(context.Background(), j)
			if err != nil {
				t.Fatal(err)
			}
			if r == nil {
				return 0, ""
			}
			return r.Revision, r.Run.Coverage
		}
		is := func(f *fleet, what, id string, rev uint64, c policy.Coverage) {
			t.Helper()
			if r, have := got(f, id); r != rev || have != c {
				t.Errorf("%s: revision %d %s, want %d %s", what, r, have, rev, c)
			}
		}
		id, lost := f.mustSubmit(""), f.mustSubmit("")
		is(f, "none", id, 0, "")
		for _, rev := range []uint64{2, 1} { // one that comes late
			for _, id := range []string{id, lost} {
				if err := n.Say(&wire.EgressReport{Job: id, Report: report(rev)}); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
		}
		n.Say(&wire.EgressReport{Job: id, Report: []byte(`{"revision":"x"}`)})
		n.Say(&wire.EgressReport{Job: wire.NewID(), Report: report(9)})
		synctest.Wait()
		is(f, "while it runs", id, 2, policy.Complete)
		r := success()
		r.Egress = report(3)
		r.Events = []wire.JobEvent{{Kind: "oom_kill", Count: 2}}
		if err := n.End(id, r); err != nil {
			t.Fatal(err)
		}
		if err := n.End(lost, success()); err != nil {
			t.Fatal(err)
		}
		v := f.want(id, dispatch.Finished, "")
		if v.Result.Egress != nil {
			t.Error("the report is in the record as well")
		}
		f.want(lost, dispatch.Finished, "")
		is(f, "at the end", id, 3, policy.Complete)
		is(f, "without the last word", lost, 3, policy.Partial)
		if list, err := f.Jobs(t.Context(), hub.JobQuery{Limit: 9, Events: true}); err != nil || len(list) != 1 || list[0].ID != id {
			t.Errorf("with events: %v, %v", list, err)
		}
		g := f.again(hub.JobOptions{})
		defer g.stop()
		is(g, "after a restart", id, 3, policy.Complete)
	})
}

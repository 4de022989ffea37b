package hubtest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/policy"
)

// jobSuite is RunSuite's part of placed jobs.
var jobSuite = map[string]func(*testing.T, hub.Store, func() hub.Store){
	"peers": suitePeers, "jobs": suiteJobs, "queries": suiteQueries, "history": suiteHistory, "requests": suiteRequests, "specs": suiteSpecs, "tails": suiteTails, "old": suiteOld,
}

func batch(b hub.JobBatch) hub.Batch { return hub.Batch{Durable: true, JobBatch: b} }

func jobRecord(n int) *hub.Job {
	code := 3
	return &hub.Job{N: int64(n), ID: id(n), Owner: id(900), State: dispatch.Finished, Revision: 4, Node: id(800 + n%2), Cancel: wire.CancelGraceful,
		Placement: dispatch.Placement{Pool: "ci", Labels: []string{"big"}, Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 2}},
		Submitted: int64(1000 + n), Accepted: 2000, Finished: 3000, OutputLen: 77, Stage: "step_script", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 512},
		Result: &wire.JobResult{Failure: "script", ExitCode: &code, Artifacts: []wire.ArtifactResult{}}, TraceLimit: 4096, ImageKey: "k",
		What: hub.What{Instance: "gl", URL: "https://gitlab.example.com", Project: 12, Path: "acme/web", Ref: "main", Name: fmt.Sprint("job ", n%3), GitLabJob: int64(n)}}
}

func suitePeers(t *testing.T, s hub.Store, reopen func() hub.Store) {
	r := &hub.Relay{ID: id(1), Key: key(1), Name: "gw", Enrolled: 5, Server: "https://gitlab.example.com", Inventory: &dispatch.Inventory{Hostname: "gw", Runners: []dispatch.Runner{}}, Reported: 6, Seen: 7,
		Beat: &dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{{Name: "ci", Jobs: 2}}}, States: []dispatch.RunnerState{{Runner: "ci", State: dispatch.Polling}}}
	bare := &hub.Relay{ID: id(2), Key: key(2)}
	servers := []hub.Server{{URL: "https://a", Name: "a", At: 1, Actor: "x"}, {URL: "https://b", At: 2}}
	projects := []hub.Project{{Instance: "a", ID: 1, Path: "p/q", State: dispatch.Pending, FirstJob: 9, FirstRef: "test", Refused: 2, At: 3, Actor: "y"}, {Instance: "a", ID: 2, State: dispatch.Approved}, {Instance: "c", ID: 1, State: dispatch.Rejected}}
	keys := []hub.Key{{Hash: id(7), Name: "k", Prefix: "12345678", Scopes: []string{"jobs"}, Pools: []string{"*"}, Max: wire.Envelope{CPUs: 2}, Created: 1, Actor: "z", Expires: 9, Client: &dispatch.ClientHello{Program: "p"}}, {Hash: id(8), Name: "gone"}}
	rule := hub.EgressRule{Name: "r", Subject: "*", Mode: "enforce", Run: policy.Lists{Names: []string{}, IPs: []policy.IPRule{}}, Version: 1}
	apply(t, s, batch(hub.JobBatch{Relays: []*hub.Relay{r, bare}, Servers: servers, Projects: projects, Keys: keys, Settings: map[string]string{"history": "7"}, Rules: []hub.EgressRule{rule, {Name: "gone"}}}))
	apply(t, s, batch(hub.JobBatch{DropRelays: []hub.Revoked{{Node: id(2), Key: key(2), At: 8}}, DropServers: []string{"https://b"}, DropProjects: []hub.ProjectKey{{Instance: "a", ID: 2}}, DropInstance: []string{"c"}, DropKeys: []string{id(8)}, DropRules: []string{"gone"}}))
	for _, get := range []func() hub.Store{func() hub.Store { return s }, reopen} {
		l := load(t, get())
		want := hub.LoadedJobs{Relays: []*hub.Relay{r}, Dropped: []hub.Revoked{{Node: id(2), Key: key(2), At: 8}}, Servers: servers[:1], Projects: projects[:1], Keys: keys[:1], Settings: map[string]string{"history": "7"}, Rules: []hub.EgressRule{rule}}
		if !reflect.DeepEqual(l.LoadedJobs, want) {
			t.Errorf("loaded\n%+v\nwant\n%+v", l.LoadedJobs, want)
		}
	}
}

func suiteJobs(t *testing.T, s hub.Store, reopen func() hub.Store) {
	a, b, c := jobRecord(1), jobRecord(2), jobRecord(3)
	b.State, b.Result, b.Finished, b.ImageKey = dispatch.Running, nil, 0, ""
	c.Finished = time.Now().Unix()
	apply(t, s, batch(hub.JobBatch{Jobs: []*hub.Job{a, b, c}}))
	settled := *a
	settled.Settled, settled.Revision = 4000, 5
	apply(t, s, batch(hub.JobBatch{Jobs: []*hub.Job{&settled}}))
	for _, again := range []bool{false, true} {
		if again {
			s = reopen()
		}
		l := load(t, s)
		if !reflect.DeepEqual(l.Jobs, []*hub.Job{b, c}) || l.LastJob != 3 {
			t.Errorf("loaded %+v up to %d", l.Jobs, l.LastJob)
		}
		if want := []hub.ImageUse{{Key: "k", Node: c.Node, At: c.Finished}}; !slices.Equal(l.Images, want) {
			t.Errorf("images %+v, want %+v", l.Images, want)
		}
		if got, err := s.Job(t.Context(), a.ID); err != nil || !reflect.DeepEqual(got, &settled) {
			t.Errorf("job %+v, %v, want %+v", got, err, settled)
		}
		if got, err := s.Job(t.Context(), id(99)); err != nil || got != nil {
			t.Errorf("a job that is not: %+v, %v", got, err)
		}
	}
	for _, e := range []hub.JobEgress{{N: 1, Revision: 2, Data: []byte("two")}, {N: 1, Revision: 1, Data: []byte("one")}} {
		apply(t, s, batch(hub.JobBatch{Egress: []hub.JobEgress{e}}))
	}
	if e, err := s.Egress(t.Context(), 1); err != nil || e == nil || e.Revision != 2 || string(e.Data) != "two" {
		t.Errorf("egress %+v, %v", e, err)
	}
	apply(t, s, batch(hub.JobBatch{DropJobs: []int64{1}}))
	if got, _ := s.Job(t.Context(), a.ID); got != nil {
		t.Errorf("a dropped job is %+v", got)
	}
	if e, err := s.Egress(t.Context(), 1); err != nil || e != nil {
		t.Errorf("the egress of a dropped job is %+v, %v", e, err)
	}
}

func suiteQueries(t *testing.T, s hub.Store, _ func() hub.Store) {
	var list []*hub.Job
	for n := 1; n <= 12; n++ {
		j := jobRecord(n)
		switch {
		case n%4 == 0:
			j.State, j.Result, j.Finished = dispatch.Running, nil, 0
		case n%4 == 1:
			j.Result = &wire.JobResult{Artifacts: []wire.ArtifactResult{}}
		case n == 7: // letters of two bytes
			j.Path = "größe/web"
			j.Result.Events = []wire.JobEvent{{Kind: "oom_kill", Count: 1}}
		case n == 6:
			j.Path, j.Ref, j.Instance, j.Placement.Pool, j.Owner = "acme/web/sub", "v1", "other", "gpu", id(901)
		}
		list = append(list, j)
	}
	apply(t, s, batch(hub.JobBatch{Jobs: list}))
	for _, tc := range []struct {
		q    hub.JobQuery
		want string
	}{
		{hub.JobQuery{}, "[12 11 10 9 8 7 6 5 4 3 2 1]"},
		{hub.JobQuery{Limit: 2, Before: 11}, "[10 9]"},
		{hub.JobQuery{State: dispatch.Running}, "[12 8 4]"},
		{hub.JobQuery{Failure: "success"}, "[9 5 1]"},
		{hub.JobQuery{Failure: "script", Name: "job 2"}, "[11 2]"},
		{hub.JobQuery{Node: id(800), Since: 1008}, "[12 10 8]"},
		{hub.JobQuery{Project: "acme/web/sub"}, "[6]"},
		{hub.JobQuery{Project: "acme/web/**"}, "[6]"},
		{hub.JobQuery{Project: "acme/**", Limit: 1}, "[12]"},
		{hub.JobQuery{Project: "größe/**"}, "[7]"},
		{hub.JobQuery{Ref: "v1", Instance: "other", Pool: "gpu", Owner: id(901)}, "[6]"},
		{hub.JobQuery{ID: id(7)[:31]}, "[9 8 7 6 5 4 3 2 1]"},
		{hub.JobQuery{ID: id(7)}, "[7]"},
		{hub.JobQuery{Pool: "none"}, "[]"},
		{hub.JobQuery{Events: true}, "[7]"},
	} {
		if tc.q.Limit == 0 {
			tc.q.Limit = 100
		}
		got := []int64{}
		jobs, err := s.Jobs(t.Context(), tc.q)
		for _, j := range jobs {
			got = append(got, j.N)
		}
		// id(10) to id(12) end in a, b, c: they have the prefix, too.
		if tc.q.ID == id(7)[:31] {
			got = slices.DeleteFunc(got, func(n int64) bool { return n > 9 })
		}
		again, aerr := s.JobsOf(t.Context(), slices.Clone(got))
		if aerr != nil || len(again) != len(got) || len(got) > 0 && again[0].N != got[0] {
			t.Errorf("JobsOf(%v) = %d jobs, %v", got, len(again), aerr)
		}
		if err != nil || fmt.Sprint(got) != tc.want {
			t.Errorf("Jobs(%+v) = %v, %v, want %s", tc.q, got, err, tc.want)
		}
	}
}

func suiteHistory(t *testing.T, s hub.Store, _ func() hub.Store) {
	var b hub.JobBatch
	var want []hub.JobRow
	for n := 1; n <= 5; n++ {
		b.Jobs = append(b.Jobs, jobRecord(n))
		want = append(want, jobRecord(n).Row())
	}
	apply(t, s, batch(b))
	if got, err := s.History(t.Context(), 0, 10); err != nil || !slices.Equal(got, want) {
		t.Errorf("history %+v, %v, want %+v", got, err, want)
	}
	if got, err := s.History(t.Context(), 2, 2); err != nil || !slices.Equal(got, want[2:4]) {
		t.Errorf("two after the second: %+v, %v", got, err)
	}
	if got, err := s.JobsOf(t.Context(), nil); err != nil || len(got) != 0 {
		t.Errorf("no records: %v, %v", got, err)
	}
}

func suiteRequests(t *testing.T, s hub.Store, reopen func() hub.Store) {
	list := []hub.Request{
		{Owner: id(1), ID: id(5), Body: "b", At: 10, Grant: json.RawMessage(`{"reservation":"x"}`)},
		{Owner: id(1), ID: id(6), Body: "c", At: 11, Job: id(9)},
		{Owner: id(2), ID: id(5), Body: "d", At: 12, Refusal: json.RawMessage(`{"code":"forbidden"}`)},
	}
	apply(t, s, batch(hub.JobBatch{Requests: list}))
	s = reopen()
	for _, want := range list {
		if got, err := s.Request(t.Context(), want.Owner, want.ID); err != nil || !reflect.DeepEqual(got, &want) {
			t.Errorf("request %+v, %v, want %+v", got, err, want)
		}
	}
	if got, err := s.Request(t.Context(), id(2), id(6)); err != nil || got != nil {
		t.Errorf("another owner's: %+v, %v", got, err)
	}
	apply(t, s, batch(hub.JobBatch{DropRequests: 12}))
	one, _ := s.Request(t.Context(), id(1), id(6))
	two, _ := s.Request(t.Context(), id(2), id(5))
	if one != nil || two == nil {
		t.Errorf("after the sweep: %+v, %+v; want the newest alone", one, two)
	}
}

func suiteSpecs(t *testing.T, s hub.Store, reopen func() hub.Store) {
	b := hub.JobBatch{Dicts: []hub.Dict{{ID: 1, Data: []byte("one")}}}
	for n := 1; n <= 3; n++ {
		j := jobRecord(n)
		j.Settled = int64(100 * n)
		b.Jobs = append(b.Jobs, j)
		b.Specs = append(b.Specs, hub.Spec{N: int64(n), Dict: 1, Data: []byte{byte(n), 0, 0}})
	}
	apply(t, s, batch(b))
	apply(t, s, batch(hub.JobBatch{Dicts: []hub.Dict{{ID: 2, Data: []byte("two")}}}))
	s = reopen()
	l := load(t, s)
	if l.Dict.ID != 2 || string(l.Dict.Data) != "two" || l.Specs != 3 {
		t.Errorf("dictionary %+v, %d specs", l.Dict, l.Specs)
	}
	spec, dict, err := s.Spec(t.Context(), 2)
	if err != nil || spec == nil || string(dict) != "one" || spec.Data[0] != 2 || spec.Dict != 1 {
		t.Errorf("spec %+v with %q, %v", spec, dict, err)
	}
	if spec, _, err := s.Spec(t.Context(), 9); err != nil || spec != nil {
		t.Errorf("a spec that is not: %+v, %v", spec, err)
	}
	if list, err := s.Specs(t.Context(), 10, 6); err != nil || len(list) != 2 || list[0].N != 3 {
		t.Errorf("the newest of 6 bytes: %+v, %v", list, err)
	}
	apply(t, s, batch(hub.JobBatch{DropSpecs: 250}))
	if list, _ := s.Specs(t.Context(), 10, 100); len(list) != 1 || list[0].N != 3 {
		t.Errorf("specs %+v are left, want the newest", list)
	}
	if d, err := s.Dict(t.Context(), 1); err != nil || string(d) != "one" {
		t.Errorf("the dictionary of a spec that is left: %q, %v", d, err)
	}
}

func suiteTails(t *testing.T, s hub.Store, reopen func() hub.Store) {
	var b hub.JobBatch
	for n := 1; n <= 4; n++ {
		b.Jobs = append(b.Jobs, jobRecord(n))
		b.Tails = append(b.Tails, hub.Tail{N: int64(n), Failed: n == 2, Size: 100, Start: int64(n), Data: make([]byte, n)})
	}
	apply(t, s, batch(b))
	apply(t, s, batch(hub.JobBatch{DropTails: []int64{1}, DropJobs: []int64{4}}))
	s = reopen()
	if l := load(t, s); !slices.Equal(l.Tails, []hub.TailSize{{N: 3, Bytes: 3}}) {
		t.Errorf("the cache holds %+v", l.Tails)
	}
	for n, want := range map[int64]bool{1: false, 2: true, 3: true, 4: false} {
		got, err := s.Tail(t.Context(), n)
		if err != nil || (got != nil) != want || want && (got.Start != n || got.Size != 100 || got.Failed != (n == 2) || int64(len(got.Data)) != n) {
			t.Errorf("tail %d: %+v, %v", n, got, err)
		}
	}
}

func suiteOld(t *testing.T, s hub.Store, _ func() hub.Store) {
	var b hub.JobBatch
	for n := 1; n <= 8; n++ {
		j := jobRecord(n)
		j.Settled = 4000
		switch n {
		case 2:
			j.State, j.Finished, j.Settled = dispatch.Running, 0, 0
		case 3:
			j.Settled = 0 // and finished at 3000
		}
		b.Jobs = append(b.Jobs, j)
	}
	apply(t, s, batch(b))
	check := func(keep int, unsettled int64, limit int, want string) {
		t.Helper()
		list, err := s.Old(t.Context(), keep, unsettled, limit)
		got := []int64{}
		for _, j := range list {
			got = append(got, j.N)
		}
		if err != nil || fmt.Sprint(got) != want {
			t.Errorf("Old(%d, %d, %d) = %v, %v, want %s", keep, unsettled, limit, got, err, want)
		}
	}
	check(4, 3000, 100, "[1 4]")
	check(4, 3001, 100, "[1 3 4]")
	check(0, 3001, 2, "[1 3]")
	check(8, 9000, 100, "[]")
}

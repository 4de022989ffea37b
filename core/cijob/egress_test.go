package cijob_test

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/cijob"
	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/policy"
)

// watched is a host whose guest has asked for as many names as the test says.
type watched struct {
	aGuest
	mu    sync.Mutex
	names []string
	told  int // len(names) when a report was returned last
}

func (w *watched) ask(name string) { w.mu.Lock(); w.names = append(w.names, name); w.mu.Unlock() }

func (w *watched) Egress(_ context.Context, now bool) (*policy.Report, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.names) == 0 {
		return nil, false
	}
	if !now && w.told == len(w.names) {
		return nil, true
	}
	w.told = len(w.names)
	rec := policy.NewRecorder(policy.Run)
	for _, n := range w.names {
		rec.Judged("", policy.Flow{Proto: policy.DNS, Name: n}, policy.Judgement{Verdict: policy.Verdict{Layer: policy.LayerHub}}, false, time.Unix(1, 0))
	}
	r := policy.BuildReport(policy.ReportInput{Run: &policy.PhaseInput{Record: rec.Snapshot()}})
	return &r, false
}

func reportOf(t *testing.T, b []byte) policy.Report {
	t.Helper()
	var r policy.Report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatalf("%q: %v", b, err)
	}
	return r
}

// TestEgressIsToldWhileTheJobRuns: at each change, and with the result once
// more, as the highest.
func TestEgressIsToldWhileTheJobRuns(t *testing.T) {
	f := newFlow()
	host := &watched{}
	f.host = host
	wait := func(want int) {
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			b, _, _, err := f.dir.Egress(jobdir.Stamp{})
			if err == nil && len(b) > 0 && len(reportOf(t, b).Blocked) == want {
				return
			}
			if time.Now().After(end) {
				t.Errorf("no report of %d: %q, %v", want, b, err)
				return
			}
		}
	}
	f.exec.on = func(_ context.Context, name string, _ cijob.Call) {
		if name == execdrv.StepPrefix+job.StepScript {
			host.ask("one.example")
			wait(1)
			host.ask("two.example")
			wait(2)
		}
	}
	res, _ := f.run(t)
	if len(res.Events) != 1 || res.Events[0].Count != 2 || res.Events[0].First != "[MASKED]" {
		t.Errorf("events %+v", res.Events)
	}
	r := reportOf(t, res.Egress)
	if len(r.Blocked) != 2 || r.Blocked[1].Destination.Domain != "two.example" || r.Blocked[1].Layer != policy.LayerHub {
		t.Errorf("%+v", r)
	}
	b, _, fresh, err := f.dir.Egress(jobdir.Stamp{})
	if last := reportOf(t, b); err != nil || !fresh || last.Revision == 0 || last.Revision >= r.Revision {
		t.Errorf("revision %d while it ran, %d with the result; %v", last.Revision, r.Revision, err)
	}
}

// TestEgressEntriesThatFailTheJob: its report names them, though it had no
// guest.
func TestEgressEntriesThatFailTheJob(t *testing.T) {
	f := newFlow()
	f.layer = []byte(`{"rules":["wab"],"run":{},"build":{"names":[]},"dry_run":[{"rule":"dry","run":{"names":[]},"build":{}}]}`)
	f.exec.ends["prepare"] = []cijob.Ended{{Exit: execdrv.DefaultBuildFailure, Outcome: execdrv.Outcome{Job: true, Refused: []policy.Refusal{
		{Variable: "MICROVM_EGRESS_ALLOW_NAME", Entry: "*.example", Dimension: policy.DimName, Phase: policy.Run, Reason: policy.InvalidEntry}}}}}
	var layer string
	f.exec.on = func(_ context.Context, name string, c cijob.Call) {
		for _, kv := range c.Env {
			if path, ok := strings.CutPrefix(kv, execdrv.EnvEgressLayer+"="); ok && name == "prepare" {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Error(err)
				}
				layer = string(b)
			}
		}
	}
	res, _ := f.run(t)
	r := reportOf(t, res.Egress)
	if len(r.Refusals) != 1 || r.Refusals[0].Entry != "*.example" || r.Run != nil || len(r.Rules) != 1 || len(r.DryRunRules) != 1 {
		t.Errorf("%+v", r)
	}
	if layer != string(f.layer) {
		t.Errorf("prepare was given %q", layer)
	}
}

package hub_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/policy"
)

// fuzzID stands for the ID of what a fuzz target made for its peer to speak of.
var fuzzID = strings.Repeat("0", 2*wire.IDLen)

// FuzzPlaced has the node of a running job send anything, a message a line: what
// the hub then holds of the job can be shown, and the job can still be ended.
func FuzzPlaced(f *testing.F) {
	report, err := json.Marshal(policy.Report{Revision: 2, Rules: []string{"web"}, Run: &policy.ReportPhase{Coverage: policy.Complete}})
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range []wire.Message{
		&wire.Output{Job: fuzzID, Offset: 0, Data: base64.StdEncoding.EncodeToString([]byte("hello"))},
		&wire.JobState{Job: fuzzID, State: wire.StateOfJob{State: "running", Stage: "build_script", Guest: &wire.GuestSize{CPUs: 1, MemMiB: 512}}},
		&wire.EgressReport{Job: fuzzID, Report: report},
		&wire.Result{Job: fuzzID, Result: wire.JobResult{Egress: report, Artifacts: []wire.ArtifactResult{}, Events: []wire.JobEvent{{Kind: "oom_kill", Count: 1}}}},
		&wire.Result{Job: fuzzID, Result: wire.JobResult{Failure: "script", Message: "exit 1", Artifacts: []wire.ArtifactResult{}}},
		&wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{fuzzID}},
		&wire.Lease{Reservation: fuzzID, State: wire.LeaseState{State: "gone", Why: "expired"}},
		&wire.OfferReply{Reservation: fuzzID, Reply: wire.Answer{State: "refused", Reason: "full"}},
	} {
		b, err := wire.Encode(wire.VersionEgress, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(b, '\n'))
		f.Add(append(append(bytes.Clone(b), '\n'), b...)) // repeated
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		inFleet(t, hub.JobOptions{}, func(t *testing.T, b *fleet) {
			n := hubtest.NewPlaced(t, b.Hub, "a", "ci", 16, 4<<30)
			hang := b.connect(n)
			id := b.mustSubmit("")
			b.want(id, dispatch.Running, "")
			for line := range bytes.SplitSeq(bytes.ReplaceAll(data, []byte(fuzzID), []byte(id)), []byte("\n")) {
				if n.Raw(line) != nil {
					break
				}
			}
			synctest.Wait()
			look := func() *hub.Job {
				t.Helper()
				j, err := b.FindJob(t.Context(), id)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := b.Egress(t.Context(), j); err != nil {
					t.Errorf("its egress report: %v", err)
				}
				if _, e := b.Output(t.Context(), b.relay, id, 0, 0); e != nil {
					t.Errorf("its output: %v", e)
				}
				if v, e := b.View(t.Context(), b.relay, id, 0, 0); e != nil {
					t.Errorf("its view: %v", e)
				} else if _, err := json.Marshal(v); err != nil {
					t.Errorf("its view: %v", err)
				}
				return j
			}
			j := look()
			hang()
			if j.State != dispatch.Finished {
				b.connect(n)
				if _, err := b.CancelJob(t.Context(), "test", j, wire.CancelImmediate); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
			}
			if j = look(); j.State != dispatch.Finished {
				// What it said may be more output than it has: then an
				// operator ends the job.
				if j, err = b.EndJob(t.Context(), "test", j); err != nil || j.State != dispatch.Finished {
					t.Errorf("the job cannot be ended: %+v, %v", j, err)
				}
			}
		})
	})
}

// FuzzEgressReport stores anything for a job's egress report: what is taken can
// be shown, while the job runs, once it has ended, and when its node did not have
// the last word.
func FuzzEgressReport(f *testing.F) {
	n := uint64(7)
	b, err := json.Marshal(policy.Report{Revision: 3, Rules: []string{"web"}, DryRunRules: []string{"next"},
		Blocked:    []policy.ReportEntry{{Protocol: policy.TCP, Destination: policy.ReportDestination{Domain: "example.com", Port: 443}, Phase: policy.Run, Count: 2, Layer: "hub", FirstSeen: time.Unix(1, 0).UTC()}},
		WouldBlock: []policy.ReportEntry{{Protocol: policy.DNS, Destination: policy.ReportDestination{Text: "_x"}, Phase: policy.Build, Rule: "next"}},
		Observed:   []policy.ReportEntry{}, Refusals: []policy.Refusal{{}}, RefusalsOmitted: 1,
		Run: &policy.ReportPhase{Coverage: policy.Complete, Sent: &n}, Build: &policy.ReportPhase{Coverage: policy.Unavailable}})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{string(b), `null`, `{}`, `{"revision":9007199254740993}`, `{"revision":-1}`, `{"run":{"coverage":"complete"}}`, `{"blocked":[null]}`, `[]`, ``} {
		f.Add([]byte(s))
	}
	h := lone(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		r, partial, ok, err := h.ShownReport(data)
		if err != nil {
			t.Fatalf("taken, and cannot be shown: %v", err)
		}
		if !ok {
			return
		}
		if r.Revision > 1<<53 || partial.Revision != r.Revision+1 {
			t.Errorf("revision %d, %d once its node is gone", r.Revision, partial.Revision)
		}
		for _, p := range []*policy.ReportPhase{partial.Run, partial.Build} {
			if p != nil && p.Coverage == policy.Complete {
				t.Error("a report without its node's last word is complete")
			}
		}
		if _, err := json.Marshal(r); err != nil {
			t.Errorf("taken, and cannot be sent: %v", err)
		}
	})
}

// FuzzRelay has an enrolled relay send anything, a message a line: its session
// may end, the hub goes on, and its relays can be shown.
func FuzzRelay(f *testing.F) {
	for _, m := range []dispatch.Message{
		&dispatch.Inventory{Version: "1", Hostname: "gw", ServerURL: gitlab, Runners: []dispatch.Runner{{Name: "a", Placement: small, Limit: 3}}},
		&dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{{Name: "a", Requests: 3, Jobs: 1, LastStatus: 204, LastAt: 9}}},
		&dispatch.RunnerState{Runner: "a", State: dispatch.ServerPending, Message: "x"},
	} {
		b, err := dispatch.Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(append(bytes.Clone(b), '\n'), b...))
	}
	h := lone(f)
	o, key, err := hubtest.MakeRelay(context.Background(), h, gitlab, "gl")
	if err != nil {
		f.Fatal(err)
	}
	i := hubtest.Identity{ID: o.ID, Key: key}
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		near, far := hubtest.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- h.ServeRelay(ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) }()
		if _, err := i.Dial(ctx, near, wire.Plaintext, wire.NewID(), dispatch.Versions); err != nil {
			t.Fatalf("the hub does not take its relay any more: %v", err)
		}
		read := sayLines(ctx, near, data)
		near.CloseNow()
		<-read
		if err := <-ended; errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		s := h.Snapshot()
		for _, r := range s.RelayList() {
			beat, states := r.Live.Now()
			if _, err := json.Marshal([]any{r.Relay, s.ServerStatus(r.ID), beat, states}); err != nil {
				t.Errorf("the relay cannot be shown: %v", err)
			}
		}
		if _, _, e := h.ByRelay(o.ID); e != nil {
			t.Errorf("the relay is not known any more: %v", e)
		}
	})
}

// FuzzSubject reads anything for whom an egress rule selects: what is taken is
// shown as what reads as the same.
func FuzzSubject(f *testing.F) {
	for _, s := range []string{"*", "gitlab gl, projects acme/**, protected", `gitlab "gl", project-id 7, ref release/*, protected`, "unprotected", "ref main", "*,*", " , "} {
		f.Add(s, "acme/web")
	}
	f.Fuzz(func(t *testing.T, subject, path string) {
		shown, selects, err := hub.ReadSubject(subject, path)
		if err != nil {
			return
		}
		again, same, err := hub.ReadSubject(shown, path)
		if err != nil || again != shown || same != selects {
			t.Errorf("%q is shown as %q, which reads as %q, %v; it selects %v, then %v", subject, shown, again, err, selects, same)
		}
	})
}

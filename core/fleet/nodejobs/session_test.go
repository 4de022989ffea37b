package nodejobs_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
	rules "virtkit/core/policy"
)

// take plays a hub that stores output and acks it, until the result.
func (r *rig) take(id, have string) (output string, res *wire.Result) {
	r.t.Helper()
	end := time.After(time.Minute)
	for {
		m := r.s.Next()
		if m == nil {
			select {
			case <-r.s.Ready():
			case <-end:
				log, _ := os.ReadFile(r.of(id).LogPath())
				r.t.Fatalf("no result within a minute, after %d bytes; driver.log:\n%s", len(have), log)
			}
			continue
		}
		switch m := m.(type) {
		case *wire.Output:
			if m.Job != id {
				continue
			}
			if m.Offset > int64(len(have)) {
				r.t.Fatalf("a gap: %d bytes are stored, the chunk is at %d", len(have), m.Offset)
			}
			have = have[:m.Offset] + data(r.t, m)
			r.say(&wire.OutputAck{Job: id, Offset: int64(len(have))})
		case *wire.Result:
			if m.Job == id {
				return have, m
			}
		}
	}
}

func TestOutputAndResult(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	if err := r.of(id).WriteStage(jobdir.Stage{Stage: "step_script", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 1024}}); err != nil {
		t.Fatal(err)
	}
	st := next[*wire.JobState](r)
	want := wire.StateOfJob{State: "running", Stage: "step_script", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 1024}}
	if d := cmp.Diff(want, st.State); d != "" {
		t.Error(d)
	}
	text := strings.Repeat("a line\n", 100000)
	r.print(id, text)
	seven := 7
	r.finish(id, job.Result{Failure: string(job.Script), ExitCode: &seven})
	got, res := r.take(id, "")
	if got != text || res.Result.OutputLen != int64(len(text)) || res.Result.Failure != "script" || *res.Result.ExitCode != 7 {
		t.Errorf("%d bytes, %+v", len(got), res.Result)
	}
	// Until it is recorded it comes again, no sooner than every 15 seconds.
	if m, ok := nextWithin[*wire.Result](r, 50*time.Millisecond); ok {
		t.Errorf("again at once: %+v", m)
	}
	r.mu.Lock()
	r.now = r.now.Add(nodejobs.ResultEvery)
	r.mu.Unlock()
	next[*wire.Result](r)
	if r.jobs.Unfinished() != 0 || len(r.s.Held().Jobs) != 1 {
		t.Error("a job whose result is not recorded is held, and finished")
	}
	r.say(&wire.JobRecorded{Job: id})
	r.until("the journal is empty", func() bool { ids, err := r.journal.List(); return err == nil && len(ids) == 0 })
	if h := r.s.Held(); len(h.Jobs) != 0 {
		t.Errorf("%+v", h)
	}
}

// TestResultAfterOutput: how a job ended is not told before its output is stored.
func TestResultAfterOutput(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	r.print(id, "a line\n")
	r.finish(id, job.Result{})
	next[*wire.Output](r)
	r.say(&wire.OutputAck{Job: id, Offset: 3})
	if m, ok := nextWithin[*wire.Result](r, 300*time.Millisecond); ok {
		t.Fatalf("a result with 3 of 7 bytes stored: %+v", m)
	}
	r.say(&wire.OutputAck{Job: id, Offset: 7})
	if m := next[*wire.Result](r); m.Result.OutputLen != 7 {
		t.Errorf("%+v", m.Result)
	}
}

// TestWindow: no byte is sent 4 MiB beyond what is stored, in chunks of 256 KiB.
func TestWindow(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	r.print(id, strings.Repeat("x", 5<<20))
	var sent int64
	for range nodejobs.Window / wire.MaxOutput {
		m := next[*wire.Output](r)
		if m.Offset != sent || len(data(t, m)) != wire.MaxOutput {
			t.Fatalf("a chunk of %d bytes at %d, %d were sent", len(data(t, m)), m.Offset, sent)
		}
		sent += wire.MaxOutput
	}
	if m, ok := nextWithin[*wire.Output](r, 300*time.Millisecond); ok {
		t.Fatalf("beyond the window: %d bytes at %d", len(m.Data), m.Offset)
	}
	r.say(&wire.OutputAck{Job: id, Offset: 100})
	if m := next[*wire.Output](r); m.Offset != sent || len(data(t, m)) != 100 {
		t.Errorf("%d bytes at %d", len(data(t, m)), m.Offset)
	}
}

// TestReconnect: nothing is sent before the hub has said what it holds.
func TestReconnect(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	r.print(id, "0123456789")
	next[*wire.Output](r)
	h := r.connect()
	if !slices.Equal(h.Jobs, wire.IDs{id}) {
		t.Errorf("%+v", h)
	}
	if m, ok := nextWithin[*wire.Output](r, 300*time.Millisecond); ok {
		t.Fatalf("before the ack: %+v", m)
	}
	r.say(&wire.OutputAck{Job: id, Offset: 4})
	if m := next[*wire.Output](r); m.Offset != 4 || data(t, m) != "456789" {
		t.Errorf("%+v", m)
	}
	// A hub that lost what it had acked is sent it again.
	r.say(&wire.OutputAck{Job: id, Offset: 10})
	r.say(&wire.OutputAck{Job: id, Offset: 2})
	if m := next[*wire.Output](r); m.Offset != 2 || data(t, m) != "23456789" {
		t.Errorf("%+v", m)
	}
}

// TestTurns: a job that prints much does not keep another's output back.
func TestTurns(t *testing.T) {
	r := newRig(t)
	loud, quiet := r.accepted(1, ""), r.accepted(2, "")
	// Who sees the loud one's output sees the other's: it was there before.
	r.print(quiet, "hello")
	r.print(loud, strings.Repeat("x", 3<<20))
	r.connect()
	r.say(&wire.OutputAck{Job: quiet})
	r.say(&wire.OutputAck{Job: loud})
	seen := 0
	for {
		m := next[*wire.Output](r)
		if m.Job == quiet {
			break
		}
		if seen++; seen > 5 {
			t.Fatalf("%d chunks of one job before the other's", seen)
		}
	}
}

func TestCancel(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	if st := r.say(&wire.Cancel{Job: id, Mode: wire.CancelGraceful}).(*wire.JobState).State; st.State != "running" {
		t.Errorf("%+v", st)
	}
	if m, err := r.of(id).Cancelled(); m != wire.CancelGraceful || err != nil {
		t.Error(m, err)
	}
	r.say(&wire.Cancel{Job: id, Mode: "later"})
	if m, err := r.of(id).Cancelled(); m != wire.CancelImmediate || err != nil {
		t.Error(m, err)
	}
	r.print(id, "so far")
	r.finish(id, job.Result{Failure: string(job.Canceled)})
	r.until("it has ended", func() bool { return r.jobs.Unfinished() == 0 })
	// A hub that has given the job up tells no offset in the next session.
	r.connect()
	if st := r.say(&wire.Cancel{Job: id, Mode: wire.CancelImmediate}).(*wire.JobState).State; st.State != "finished" {
		t.Errorf("%+v", st)
	}
	if got, res := r.take(id, ""); got != "so far" || res.Result.Failure != "canceled" {
		t.Errorf("%q, %+v", got, res)
	}
	if st := r.say(&wire.Cancel{Job: wire.NewID(), Mode: wire.CancelGraceful}).(*wire.JobState).State; st.State != "finished" || st.Message == "" {
		t.Errorf("a job that is not there: %+v", st)
	}
}

// TestDeadDriver: a driver that is killed is cleaned up after, then its job has
// ended.
func TestDeadDriver(t *testing.T) {
	r := newRig(t)
	block := make(chan struct{})
	r.drivers.block = block
	id := r.accepted(1, "")
	r.print(id, "so far")
	r.drivers.kill(id)
	if got := data(t, next[*wire.Output](r)); got != "so far" {
		t.Errorf("%q", got)
	}
	r.say(&wire.OutputAck{Job: id, Offset: 6})
	if m, ok := nextWithin[*wire.Result](r, 300*time.Millisecond); ok {
		t.Errorf("before the clean-up: %+v", m)
	}
	close(block)
	if res := next[*wire.Result](r); res.Result.Failure != string(job.Interrupted) || res.Result.OutputLen != 6 {
		t.Errorf("%+v", res)
	}
	if !slices.Equal(r.drivers.cleanups(), []string{id}) {
		t.Errorf("cleaned up after %v", r.drivers.cleanups())
	}
}

// TestRestart: what a node finds that was killed at each step of a job's life.
func TestRestart(t *testing.T) {
	r := newRig(t)
	r.offer(resID(1), 512)
	running, ended := r.accepted(1, ""), r.accepted(2, "")
	r.print(running, "still here\n")
	r.print(ended, "done\n")
	if err := r.of(ended).Finish(job.Result{}); err != nil {
		t.Fatal(err)
	}
	r.drivers.kill(ended)
	died := r.accepted(3, "")
	r.stop()
	r.drivers.kill(died) // while there is no node
	// Journaled, and nothing else yet.
	bare := wire.NewID()
	if _, err := r.journal.Create(jobdir.Start{Start: wire.Start{Job: bare, Spec: spec(t, 9, 1)}}); err != nil {
		t.Fatal(err)
	}
	// Half made, half removed.
	if err := os.Mkdir(filepath.Join(r.journal.Root(), ".new-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	half := wire.NewID()
	if err := os.Mkdir(filepath.Join(r.journal.Root(), half), 0o700); err != nil {
		t.Fatal(err)
	}

	r.begin()
	h := r.connect()
	all := wire.IDs{running, ended, died, bare}
	slices.Sort(all)
	if d := cmp.Diff(&wire.Held{Reservations: wire.IDs{}, Jobs: all}, h); d != "" {
		t.Error(d)
	}
	for _, id := range all {
		r.say(&wire.OutputAck{Job: id, Offset: 0})
	}
	got := map[string]string{}
	out := map[string]string{}
	for len(got) < 3 {
		switch m := r.anything().(type) {
		case *wire.Output:
			out[m.Job] += data(t, m)
			r.say(&wire.OutputAck{Job: m.Job, Offset: int64(len(out[m.Job]))})
		case *wire.Result:
			got[m.Job] = m.Result.Failure
			r.say(&wire.JobRecorded{Job: m.Job})
		}
	}
	if d := cmp.Diff(map[string]string{ended: "", died: "interrupted", bare: "interrupted"}, got); d != "" {
		t.Error(d)
	}
	r.until("what is running has been sent", func() bool {
		if m, ok := nextWithin[*wire.Output](r, time.Millisecond); ok {
			out[m.Job] += data(t, m)
		}
		return out[running] == "still here\n"
	})
	if out[ended] != "done\n" {
		t.Errorf("%q", out[ended])
	}
	if !r.drivers.runs(running) || r.jobs.Unfinished() != 1 {
		t.Error("the running job was not adopted")
	}
	r.finish(running, job.Result{})
	if res := func() *wire.Result { _, m := r.take(running, out[running]); return m }(); res.Result.Failure != "" {
		t.Errorf("%+v", res)
	}
	r.say(&wire.JobRecorded{Job: running})
	r.until("nothing is left", func() bool {
		list, err := os.ReadDir(r.journal.Root())
		return err == nil && len(list) == 0
	})
	cleaned := r.drivers.cleanups()
	slices.Sort(cleaned)
	want := []string{died, bare}
	slices.Sort(want)
	if !slices.Equal(cleaned, want) {
		t.Errorf("cleaned up after %v, want %v", cleaned, want)
	}
}

func (r *rig) anything() wire.Message {
	r.t.Helper()
	end := time.After(time.Minute)
	for {
		if m := r.s.Next(); m != nil {
			return m
		}
		select {
		case <-r.s.Ready():
		case <-end:
			r.t.Fatal("nothing for a minute")
		}
	}
}

// TestStopWhileCleaning: a node that is stopped in a clean-up leaves the job to
// its next start.
func TestStopWhileCleaning(t *testing.T) {
	r := newRig(t)
	r.drivers.block = make(chan struct{})
	id := r.accepted(1, "")
	r.drivers.kill(id)
	r.until("the clean-up has begun", func() bool {
		l, err := r.of(id).Lock()
		if err != nil {
			return true
		}
		l.Close()
		return false
	})
	r.stop()
	if _, ok, err := r.of(id).Result(); ok || err != nil {
		t.Error("a result was written for a clean-up that was stopped", err)
	}
	r.drivers.mu.Lock()
	close(r.drivers.block)
	r.drivers.mu.Unlock()
	r.begin()
	r.say(&wire.OutputAck{Job: id})
	if res := next[*wire.Result](r); res.Result.Failure != string(job.Interrupted) {
		t.Errorf("%+v", res)
	}
}

// TestShorterThanStored: a power loss may take output that the hub has.
func TestShorterThanStored(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	r.print(id, "1234567890")
	r.stop()
	r.drivers.kill(id)
	if err := os.Truncate(r.of(id).OutputPath(), 3); err != nil {
		t.Fatal(err)
	}
	r.begin()
	r.say(&wire.OutputAck{Job: id, Offset: 10})
	res := next[*wire.Result](r)
	if res.Result.OutputLen != 10 || res.Result.Failure != string(job.Interrupted) {
		t.Errorf("%+v", res.Result)
	}
}

// TestEgressReports: each is sent once a session, none before the hub's offset is
// known, and that of a driver that was killed comes with its job's end, partial.
func TestEgressReports(t *testing.T) {
	r := newRig(t)
	id := r.accepted(1, "")
	write := func(rev int) {
		t.Helper()
		if err := r.of(id).WriteEgress(fmt.Appendf(nil, `{"revision":%d,"rules":[],"blocked":[],"would_block":[],"observed":[],"run":{"coverage":"complete"}}`, rev)); err != nil {
			t.Fatal(err)
		}
	}
	rev := func(b []byte) rules.Report {
		t.Helper()
		var rep rules.Report
		if err := json.Unmarshal(b, &rep); err != nil {
			t.Fatal(err)
		}
		return rep
	}
	for n := 1; n <= 2; n++ {
		write(n)
		if m := next[*wire.EgressReport](r); m.Job != id || rev(m.Report).Revision != uint64(n) {
			t.Errorf("%+v", m)
		}
	}
	r.connect()
	r.say(&wire.OutputAck{Job: id, Offset: 0})
	if m := next[*wire.EgressReport](r); rev(m.Report).Revision != 2 {
		t.Errorf("after a reconnect: %+v", m)
	}
	r.drivers.kill(id)
	_, res := r.take(id, "")
	if rep := rev(res.Result.Egress); rep.Revision != 3 || rep.Run.Coverage != rules.Partial {
		t.Errorf("%+v", rep)
	}
}

// TestRulesThatCannotBeEnforced: a start with them is refused, and its
// reservation stays.
func TestRulesThatCannotBeEnforced(t *testing.T) {
	r := newRig(t)
	r.offer(resID(1), 512)
	for _, layer := range []string{`{"rules":[],"run":{}}`, `{"rules":[],"run":{},"build":{"later":[]}}`, `null`} {
		st := r.say(&wire.Start{Job: wire.NewID(), Reservation: resID(1), Envelope: envelope(512), Spec: spec(t, 1, 1), Layer: json.RawMessage(layer)}).(*wire.JobState).State
		if st.State != "refused" || !strings.Contains(st.Message, "egress rules") {
			t.Errorf("%s: %+v", layer, st)
		}
	}
	good := json.RawMessage(`{"rules":["wab"],"run":{},"build":{"names":[],"ips":["192.0.2.0/24"]}}`)
	id := wire.NewID()
	if st := r.say(&wire.Start{Job: id, Reservation: resID(1), Envelope: envelope(512), Spec: spec(t, 1, 1), Layer: good}).(*wire.JobState).State; st.State != "accepted" {
		t.Fatalf("%+v", st)
	}
	st, err := r.of(id).Start()
	if err != nil || string(st.Layer) != string(good) {
		t.Errorf("journaled: %s, %v", st.Layer, err)
	}
}

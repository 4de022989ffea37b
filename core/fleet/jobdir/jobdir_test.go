package jobdir_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

const secret = "glcbt-64_tokenoftheJob"

func spec(t *testing.T) json.RawMessage {
	j := job.CiJob{Kind: job.KindGitLabCI, ServerURL: "https://gitlab.example.com", Token: secret, TimeoutSecs: 60,
		Job:   job.Info{ID: 1, ProjectID: 2, ProjectPath: "group/project"},
		Steps: []job.Step{{Name: job.StepScript, Script: []string{"true"}, When: job.OnSuccess}}}
	b, err := j.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func create(t *testing.T) (*jobdir.Store, *jobdir.Dir, jobdir.Start) {
	s, err := jobdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	st := jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: spec(t), Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 2}},
		ConcurrentID: 3, ConcurrentProjectID: 1, Accepted: 1700000000}
	d, err := s.Create(st)
	if err != nil {
		t.Fatal(err)
	}
	return s, d, st
}

func TestStart(t *testing.T) {
	s, d, st := create(t)
	got, err := d.Start()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(st, got); diff != "" {
		t.Error(diff)
	}
	if _, err := s.Create(st); !errors.Is(err, jobdir.ErrExists) {
		t.Errorf("a second start: %v", err)
	}
	ids, err := s.List()
	if err != nil || len(ids) != 1 || ids[0] != st.Job {
		t.Errorf("List() = %v, %v", ids, err)
	}
	for path, mode := range map[string]os.FileMode{d.Path(): 0o700, filepath.Join(d.Path(), "start.json"): 0o600, s.Root(): 0o700} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != mode {
			t.Errorf("%s: %v, want mode %v", path, fi.Mode(), mode)
		}
	}
	for _, id := range []string{wire.NewID(), "..", "", strings.Repeat("A", 32)} {
		if _, err := s.Job(id); !errors.Is(err, jobdir.ErrNone) {
			t.Errorf("Job(%q): %v", id, err)
		}
	}
	if _, err := s.Create(jobdir.Start{Start: wire.Start{Job: "../x"}}); err == nil {
		t.Error("a job that climbs out was journaled")
	}
}

// TestCrashWhileCreating: what was not named yet is no job, and goes.
func TestCrashWhileCreating(t *testing.T) {
	s, _, st := create(t)
	left := filepath.Join(s.Root(), ".new-123")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	again, err := jobdir.Open(filepath.Dir(filepath.Dir(s.Root())))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", left, err)
	}
	if ids, _ := again.List(); len(ids) != 1 || ids[0] != st.Job {
		t.Errorf("List() = %v", ids)
	}
}

// TestLockIsPassedOn: the lock lives as long as the driver that got it.
func TestLockIsPassedOn(t *testing.T) {
	_, d, _ := create(t)
	l, err := d.Lock()
	if err != nil {
		t.Fatal(err)
	}
	driver := exec.Command("cat")
	hold, err := driver.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	driver.ExtraFiles = []*os.File{l.File()}
	if err := driver.Start(); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := d.Lock(); !errors.Is(err, fsx.ErrLocked) {
		t.Errorf("with the driver alive: %v", err)
	}
	hold.Close()
	if err := driver.Wait(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := d.WaitGone(ctx); err != nil {
		t.Errorf("with the driver gone: %v", err)
	}
}

func TestCancel(t *testing.T) {
	_, d, _ := create(t)
	want := func(mode wire.CancelMode) {
		t.Helper()
		if got, err := d.Cancelled(); got != mode || err != nil {
			t.Errorf("Cancelled() = %q, %v, want %q", got, err, mode)
		}
	}
	want("")
	if err := d.Cancel("later"); err == nil {
		t.Error("an unknown mode was written")
	}
	for _, c := range []struct{ ask, want wire.CancelMode }{
		{wire.CancelGraceful, wire.CancelGraceful}, {wire.CancelImmediate, wire.CancelImmediate}, {wire.CancelGraceful, wire.CancelImmediate},
	} {
		if err := d.Cancel(c.ask); err != nil {
			t.Fatal(err)
		}
		want(c.want)
	}
	if err := os.WriteFile(filepath.Join(d.Path(), "cancel"), []byte("of a later version\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want(wire.CancelImmediate)
}

func TestOutput(t *testing.T) {
	_, d, _ := create(t)
	if n, err := d.OutputLen(); n != 0 || err != nil {
		t.Errorf("before the driver: %d, %v", n, err)
	}
	p := make([]byte, 8)
	if n, err := d.ReadOutput(p, 0); n != 0 || err != nil {
		t.Errorf("before the driver: %d, %v", n, err)
	}
	f, err := d.AppendOutput()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString("0123456789")
	if n, err := d.ReadOutput(p, 4); string(p[:n]) != "456789" || err != nil {
		t.Errorf("from 4: %q, %v", p[:n], err)
	}
	if n, err := d.ReadOutput(p, 0); string(p[:n]) != "01234567" || err != nil {
		t.Errorf("from 0: %q, %v", p[:n], err)
	}
	if n, err := d.ReadOutput(p, 10); n != 0 || err != nil {
		t.Errorf("from the end: %d, %v", n, err)
	}
}

func TestStage(t *testing.T) {
	_, d, _ := create(t)
	if s, err := d.Stage(); s != (jobdir.Stage{}) || err != nil {
		t.Errorf("before the first: %v, %v", s, err)
	}
	want := jobdir.Stage{Stage: "step_script", Activity: "a", Guest: &wire.GuestSize{CPUs: 2, MemMiB: 512}}
	if err := d.WriteStage(want); err != nil {
		t.Fatal(err)
	}
	got, err := d.Stage()
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

// TestFinish: the result comes last and once, and takes the secrets with it.
func TestFinish(t *testing.T) {
	_, d, _ := create(t)
	f, err := d.AppendOutput()
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString("12345")
	f.Close()
	if _, ok, err := d.Result(); ok || err != nil {
		t.Errorf("before the end: %v, %v", ok, err)
	}
	three := 3
	if err := d.Finish(job.Result{Failure: string(job.Script), ExitCode: &three}); err != nil {
		t.Fatal(err)
	}
	if err := d.Finish(job.Result{Failure: string(job.Interrupted)}); err != nil {
		t.Fatal(err)
	}
	got, ok, err := d.Result()
	want := job.Result{Failure: string(job.Script), ExitCode: &three, OutputLen: 5, Artifacts: []wire.ArtifactResult{}}
	if diff := cmp.Diff(want, got); diff != "" || !ok || err != nil {
		t.Error(diff, ok, err)
	}
	list, err := os.ReadDir(d.Path())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if b, _ := os.ReadFile(filepath.Join(d.Path(), e.Name())); strings.Contains(string(b), secret) {
			t.Errorf("%s still has the token", e.Name())
		}
	}
	st, err := d.Start()
	if err != nil {
		t.Fatal(err)
	}
	if j, err := st.CiJob(); err != nil || j.Job.ProjectPath != "group/project" {
		t.Errorf("the redacted spec: %v, %v", j, err)
	}
}

// TestFinishUnreadable: a start that this version cannot read ends too, and
// keeps nothing of its spec.
func TestFinishUnreadable(t *testing.T) {
	s, err := jobdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d, err := s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: json.RawMessage(`{"kind":"new","token":"` + secret + `"}`)}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Finish(job.Result{Failure: string(job.Configuration)}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(d.Path(), "start.json")); err != nil || strings.Contains(string(b), secret) {
		t.Errorf("start.json: %s, %v", b, err)
	}
}

func TestRemoveAndSweep(t *testing.T) {
	s, d, _ := create(t)
	half, err := s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: spec(t)}})
	if err != nil {
		t.Fatal(err)
	}
	// A crash in Remove, behind its first step.
	if err := os.Remove(filepath.Join(half.Path(), "start.json")); err != nil {
		t.Fatal(err)
	}
	removed, err := s.SweepOld(time.Now().Add(-time.Hour))
	if len(removed) != 0 || err != nil {
		t.Errorf("young ones were swept: %v, %v", removed, err)
	}
	removed, err = s.SweepOld(time.Now().Add(time.Hour))
	if len(removed) != 1 || removed[0] != half.ID() || err != nil {
		t.Errorf("SweepOld: %v, %v", removed, err)
	}
	if err := d.Remove(); err != nil {
		t.Fatal(err)
	}
	if ids, err := s.List(); len(ids) != 0 || err != nil {
		t.Errorf("left: %v, %v", ids, err)
	}
}

func TestWork(t *testing.T) {
	_, d, _ := create(t)
	w, err := d.Work()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w, "left"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Work(); err != nil {
		t.Fatal(err)
	}
	if list, err := os.ReadDir(w); len(list) != 0 || err != nil {
		t.Errorf("of an earlier driver: %v, %v", list, err)
	}
	if err := d.RemoveWork(); err != nil {
		t.Fatal(err)
	}
}

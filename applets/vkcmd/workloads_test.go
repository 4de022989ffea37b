package vkcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"virtkit/core/fleet/nodehost"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/supervise"
)

// guestDir is a job directory whose supervisor is the test.
func guestDir(t *testing.T, jobs, id, kind string) (dir string, end func()) {
	t.Helper()
	dir = filepath.Join(jobs, id)
	l, err := supervise.Make(dir, supervise.Spec{ID: id, Name: id, Kind: kind, Created: time.Unix(1000, 0), CPUs: 2, MemMiB: 512,
		Image: supervise.Image{Ref: "debian:12"}, Services: []supervise.Service{{Spec: supervise.Spec{ID: "db", MemMiB: 256}}}})
	if err != nil {
		t.Fatal(err)
	}
	self := supervise.Self()
	b, err := json.Marshal(supervise.State{ID: id, Phase: supervise.Running, PID: self.PID, Start: self.Start})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "state.json"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return dir, func() { l.Close() }
}

func TestWorkloadsCommand(t *testing.T) {
	a, h, _ := hostApp(t, "")
	dir, _ := guestDir(t, h.Jobs.Dir(), "17-x", "gitlab")
	if err := a.workloads(t.Context(), h, workloadsOptions{}, time.Second); err != nil {
		t.Fatal(err)
	}
	out := a.env.Stdout.(*bytes.Buffer).Bytes()
	var got workloadsLine
	if err := json.Unmarshal(out, &got); err != nil || bytes.Count(out, []byte("\n")) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	want := fleet.Workload{ID: nodehost.WorkloadID(dir), Kind: fleet.KindJob, JobID: "17", Image: "debian:12", PID: os.Getpid(), CPUs: 2, Reserved: 768 << 20, Started: 1000, StateDir: dir}
	if got.Schema != "vk.workloads/1" || len(got.Workloads) != 1 || got.Workloads[0] != want || got.Omitted != 0 {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got.Memory[want.ID] < 1<<20 {
		t.Errorf("memory %v", got.Memory)
	}
}

// A line each time the list changes, and the end with standard input.
func TestWorkloadsWatch(t *testing.T) {
	a, h, _ := hostApp(t, "")
	stdin, hangUp := io.Pipe()
	out, write := io.Pipe()
	a.env.Stdin, a.env.Stdout = stdin, write
	ended := make(chan error, 1)
	go func() {
		err := a.workloads(context.Background(), h, workloadsOptions{watch: true, mem: 86400}, time.Millisecond)
		write.Close()
		ended <- err
	}()
	dec := json.NewDecoder(out)
	var last json.RawMessage
	// A guest's directory is there a moment before its state is.
	next := func(guests int) {
		t.Helper()
		for {
			var raw json.RawMessage
			var l workloadsLine
			err := dec.Decode(&raw)
			if err == nil {
				err = json.Unmarshal(raw, &l)
			}
			if err != nil || bytes.Equal(raw, last) {
				t.Fatalf("%v: %s after %s", err, raw, last)
			}
			if last = raw; len(l.Workloads) == guests {
				return
			}
		}
	}
	next(0)
	_, end := guestDir(t, h.Jobs.Dir(), "run-1", "run")
	next(1)
	end()
	next(0)
	hangUp.Close()
	if rest, err := io.ReadAll(io.MultiReader(dec.Buffered(), out)); err != nil || len(bytes.TrimSpace(rest)) > 0 {
		t.Errorf("and then %s, %v", rest, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

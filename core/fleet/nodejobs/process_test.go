package nodejobs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// asDriver has the test's program be a driver: "run" or "cleanup".
const asDriver = "VIRTKIT_TEST_DRIVER"

func TestMain(m *testing.M) {
	switch os.Getenv(asDriver) {
	case "":
		os.Exit(m.Run())
	case "run":
		if err := drive(os.Args[len(os.Args)-1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "cleanup":
		fmt.Fprintln(os.Stderr, "cleaned up")
	case "cleanup-hangs":
		time.Sleep(time.Hour)
	}
	os.Exit(0)
}

// drive is a driver that prints what it is, and ends when it is cancelled.
func drive(path string) error {
	d, err := jobdir.At(path)
	if err != nil {
		return err
	}
	l, err := d.Lock()
	if !errors.Is(err, fsx.ErrLocked) {
		return fmt.Errorf("the lock is free: %v, %v", l, err)
	}
	claim := "no claim"
	if v := os.Getenv(nodejobs.EnvClaim); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			return err
		}
		if _, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0); err != nil {
			return err
		}
		claim = "a claim"
	}
	sid, err := unix.Getsid(0)
	if err != nil || sid != os.Getpid() {
		return fmt.Errorf("session %d of process %d, %v", sid, os.Getpid(), err)
	}
	out, err := d.AppendOutput()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d with %s\n", os.Getpid(), claim)
	for {
		mode, err := d.Cancelled()
		if err != nil {
			return err
		}
		if mode != "" {
			return d.Finish(job.Result{Failure: string(job.Canceled), Message: string(mode)})
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func processes(t *testing.T, cleanup string) *nodejobs.Processes {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &nodejobs.Processes{Argv: []string{exe}, CleanupArgv: []string{"/usr/bin/env", asDriver + "=" + cleanup, exe}, Log: logx.ForTest(t)}
	p.Env = append(os.Environ(), asDriver+"=run", nodejobs.EnvLock+"=77")
	return p
}

// TestProcesses: a driver outlives its node, is adopted by the next, killed, and
// cleaned up after.
func TestProcesses(t *testing.T) {
	r := newRig(t, func(c *nodejobs.Config) { c.Drivers = processes(t, "cleanup") })
	r.offer(resID(1), 512)
	one, two := r.accepted(1, resID(1)), r.accepted(2, "")
	pid := map[string]int{}
	for len(pid) < 2 {
		m := next[*wire.Output](r)
		word, rest, _ := strings.Cut(data(t, m), " ")
		n, err := strconv.Atoi(word)
		if err != nil || rest != "with a claim\n" {
			t.Fatalf("%q", data(t, m))
		}
		pid[m.Job] = n
	}
	t.Cleanup(func() {
		for _, n := range pid {
			unix.Kill(n, unix.SIGKILL)
		}
	})
	r.stop() // the node's end is none of the drivers'
	r.begin()
	if r.jobs.Unfinished() != 2 {
		t.Fatalf("%d jobs were adopted", r.jobs.Unfinished())
	}
	r.say(&wire.Cancel{Job: one, Mode: wire.CancelGraceful})
	if _, res := r.take(one, ""); res.Result.Failure != "canceled" || res.Result.Message != "graceful" {
		t.Errorf("%+v", res.Result)
	}
	if err := unix.Kill(pid[two], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.say(&wire.OutputAck{Job: two, Offset: 0})
	if _, res := r.take(two, ""); res.Result.Failure != "interrupted" {
		t.Errorf("%+v", res.Result)
	}
	log, err := os.ReadFile(r.of(two).LogPath())
	if err != nil || !strings.Contains(string(log), "cleaned up") {
		t.Errorf("driver.log: %q, %v", log, err)
	}
	for _, id := range []string{one, two} {
		r.say(&wire.JobRecorded{Job: id})
	}
	r.until("the journal is empty", func() bool { ids, err := r.journal.List(); return err == nil && len(ids) == 0 })
}

// TestCleanupThatHangs: it is ended with all that it started.
func TestCleanupThatHangs(t *testing.T) {
	p := processes(t, "cleanup-hangs")
	s, err := jobdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d, err := s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: spec(t, 1, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := d.Lock()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Cleanup(ctx, d, lock.File()); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	lock.Close()
	if err := d.WaitGone(t.Context()); err != nil {
		t.Error(err)
	}
}

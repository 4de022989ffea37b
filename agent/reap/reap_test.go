package reap

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// collector is this process as PID 1 would be: all of its orphans are its.
var collector = sync.OnceValue(func() *Reaper {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	r := New(true)
	go r.Run() // to the end of the process
	return r
})

func sh(t *testing.T, r *Reaper, script string) <-chan syscall.WaitStatus {
	t.Helper()
	return shIn(t, r, 0, script)
}

func shIn(t *testing.T, r *Reaper, stdin uintptr, script string) <-chan syscall.WaitStatus {
	t.Helper()
	_, ch, err := r.Start("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{stdin, 1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func end(t *testing.T, ch <-chan syscall.WaitStatus) syscall.WaitStatus {
	t.Helper()
	select {
	case ws := <-ch:
		return ws
	case <-time.After(time.Minute):
		t.Fatal("a program's end was never told")
		return 0
	}
}

func TestEnds(t *testing.T) {
	r := collector()
	if ws := end(t, sh(t, r, "exit 7")); ws.ExitStatus() != 7 {
		t.Errorf("exit 7 is %v", ws)
	}
	if ws := end(t, sh(t, r, "kill -9 $$")); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
		t.Errorf("kill -9 is %v", ws)
	}
	if _, _, err := r.Start("/no/such", nil, &syscall.ProcAttr{}); err != syscall.ENOENT {
		t.Errorf("no such program: %v", err)
	}
}

// Each end reaches who waits for it, orphans are nobody's, and none stays.
func TestManyWithOrphans(t *testing.T) {
	r := collector()
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer hold.Close()
	var all []<-chan syscall.WaitStatus
	for range 60 {
		// Its child outlives it, as does that one's.
		all = append(all, shIn(t, r, in.Fd(), "read line; (sleep 0.05; (sleep 0.05; exit 1) & exit 2) & exit 3"))
	}
	if r.Barren() {
		t.Error("60 programs run, and none is seen")
	}
	hold.Close()
	for _, ch := range all {
		if ws := end(t, ch); ws.ExitStatus() != 3 {
			t.Errorf("exit 3 is %v", ws)
		}
	}
	for deadline := time.Now().Add(time.Minute); !r.Barren(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("some orphan was never collected")
		}
	}
	if _, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != syscall.ECHILD {
		t.Errorf("children are left: %v", err)
	}
}

// A program ends also where its descriptor tells nothing.
func TestSignalAlone(t *testing.T) {
	r := collector()
	ch := make(chan syscall.WaitStatus, 1)
	r.mu.Lock()
	pid, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", "exit 5"}, &syscall.ProcAttr{})
	if err == nil {
		r.waiters[pid] = ch
	}
	r.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if ws := end(t, ch); ws.ExitStatus() != 5 {
		t.Errorf("exit 5 is %v", ws)
	}
}

func TestTimerSlack(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 3_000_000, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0)
	out := filepath.Join(t.TempDir(), "out")
	end(t, sh(t, collector(), "cat /proc/$$/timerslack_ns >"+out))
	if b, err := os.ReadFile(out); strings.TrimSpace(string(b)) != "50000" {
		t.Errorf("a program's timers may be late by %q ns, %v", b, err)
	}
}

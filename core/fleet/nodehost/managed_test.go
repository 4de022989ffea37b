package nodehost_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fleet/nodehost"
	"virtkit/core/supervise"
)

// run runs a managed runner in this process.
func run(t *testing.T, dir string, change func(*nodehost.ManagedOptions)) (m *nodehost.Managed, ended <-chan error, kill func()) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o := options(dir, exe)
	if change != nil {
		change(&o)
	}
	if m, err = nodehost.NewManaged(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		killRunners(dir)
	})
	return m, done, cancel
}

// killRunners ends every runner that a directory's log names.
func killRunners(dir string) {
	for _, l := range said(dir, "start") {
		pid, _ := strconv.Atoi(strings.Fields(l)[1])
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && strings.Contains(string(b), "FAKE_DIR="+dir) {
			unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// TestExitedIsNotKnownAtFirst: a drain that looks before the runner that a node
// before has left was found would be over with that runner at work.
func TestExitedIsNotKnownAtFirst(t *testing.T) {
	dir := fake(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan struct{}, 1)
	o := options(dir, exe)
	o.Changed = func() {
		select {
		case told <- struct{}{}:
		default:
		}
	}
	m, err := nodehost.NewManaged(o)
	if err != nil {
		t.Fatal(err)
	}
	if m.Exited() {
		t.Error("before it has looked, no runner runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	<-told // or the drain would not look again
	if !m.Exited() {
		t.Error("it has looked, there is none, and one runs")
	}
	cancel()
	<-done
}

func TestManagedLife(t *testing.T) {
	dir := fake(t)
	var mu sync.Mutex
	changes := 0
	m, ended, _ := run(t, dir, func(o *nodehost.ManagedOptions) {
		o.Changed = func() { mu.Lock(); changes++; mu.Unlock() }
	})
	until(t, "a look for what was left running", m.Exited)
	if s := m.Status(); s.PID != 0 {
		t.Fatalf("before it is wanted: %+v", s)
	}
	m.Want(true)
	until(t, "a runner", func() bool { return len(said(dir, "ready")) == 1 })
	s := m.Status()
	if want := fmt.Sprintf("start %d run --config %s/config.toml", s.PID, dir); said(dir, "start")[0] != want {
		t.Errorf("log %q, want %q", said(dir, "start"), want)
	}
	if pg, err := unix.Getpgid(s.PID); err != nil || pg != s.PID {
		t.Errorf("its process group is %d (%v), want its own, %d", pg, err, s.PID)
	}

	// It is told to quit while a job runs: it quits, and still is there.
	write(t, filepath.Join(dir, "job"), "", 0o600)
	m.Want(false)
	until(t, "the word", func() bool { return len(said(dir, "quit")) == 1 })
	if s := m.Status(); !s.Quitting || s.PID == 0 || s.Wanted || m.Exited() {
		t.Errorf("while it quits: %+v", s)
	}
	// A resume that comes meanwhile starts a new one once the old one has gone.
	m.Want(true)
	if s := m.Status(); !s.Quitting || !s.Wanted {
		t.Errorf("wanted again while it quits: %+v", s)
	}
	if n := len(said(dir, "start")); n != 1 {
		t.Errorf("%d runners were started while one quits", n)
	}
	os.Remove(filepath.Join(dir, "job"))
	until(t, "another runner", func() bool { return len(said(dir, "ready")) == 2 })
	if ends := said(dir, "end"); len(ends) != 1 {
		t.Errorf("ends: %q", ends)
	}
	if s := m.Status(); s.Quitting || s.PID == 0 || s.Err != nil {
		t.Errorf("the new one: %+v", s)
	}

	m.Shutdown()
	if err := <-ended; err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if n := len(said(dir, "end")); n != 2 || !m.Exited() {
		t.Errorf("%d ended, status %+v", n, m.Status())
	}
	if _, err := os.Stat(filepath.Join(dir, "state", nodehost.PIDFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("runner.pid is left: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if changes < 6 {
		t.Errorf("%d changes were told of", changes)
	}
}

func TestManagedAbandon(t *testing.T) {
	dir := fake(t)
	m, ended, _ := run(t, dir, nil)
	m.Want(true)
	until(t, "a runner", func() bool { return len(said(dir, "ready")) == 1 })
	write(t, filepath.Join(dir, "job"), "", 0o600)
	m.Shutdown()
	until(t, "the word", func() bool { return len(said(dir, "quit")) == 1 })
	select {
	case err := <-ended:
		t.Fatalf("it ended with a job running: %v", err)
	default:
	}
	if err := m.Abandon(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := len(said(dir, "term")); n != 1 {
		t.Errorf("%d runners got SIGTERM", n)
	}
}

// A clock that sleeping alone moves.
type clock struct {
	mu    sync.Mutex
	at    time.Time
	slept []time.Duration
}

func (c *clock) now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.at }

func TestManagedBackoff(t *testing.T) {
	dir := fake(t)
	write(t, filepath.Join(dir, "die"), "", 0o600)
	c := &clock{at: time.Unix(1e9, 0)}
	enough := make(chan struct{})
	m, _, cancel := run(t, dir, func(o *nodehost.ManagedOptions) {
		o.Now = c.now
		o.Sleep = func(ctx context.Context, d time.Duration, wake <-chan struct{}) {
			c.mu.Lock()
			c.slept = append(c.slept, d)
			c.at = c.at.Add(d)
			n := len(c.slept)
			c.mu.Unlock()
			if n == 8 {
				close(enough)
				<-ctx.Done()
			}
		}
	})
	m.Want(true)
	<-enough
	cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	want := []time.Duration{1, 2, 4, 8, 16, 32, 60, 60}
	for i := range want {
		want[i] *= time.Second
	}
	if !slices.Equal(c.slept, want) {
		t.Errorf("waits %v, want %v", c.slept, want)
	}
	if s := m.Status(); s.Err == nil || s.PID != 0 {
		t.Errorf("of a runner that dies: %+v", s)
	}
}

func TestNextRestart(t *testing.T) {
	for _, tt := range []struct{ before, ran, want time.Duration }{
		{0, 0, time.Second}, {time.Second, 59 * time.Second, 2 * time.Second},
		{40 * time.Second, 0, time.Minute}, {time.Minute, time.Minute, time.Second},
	} {
		if got := nodehost.NextRestart(tt.before, tt.ran); got != tt.want {
			t.Errorf("after %v and a run of %v: %v, want %v", tt.before, tt.ran, got, tt.want)
		}
	}
}

func TestManagedWithoutProgram(t *testing.T) {
	dir := fake(t)
	m, ended, _ := run(t, dir, func(o *nodehost.ManagedOptions) { o.Program = filepath.Join(dir, "none") })
	m.Want(true)
	until(t, "an error", func() bool { return m.Status().Err != nil })
	if err := m.Status().Err; !strings.Contains(err.Error(), filepath.Join(dir, "none")) {
		t.Error(err)
	}
	m.Shutdown()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// nodeProcess is a node that can be killed.
func nodeProcess(t *testing.T, dir string, want bool) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "NODEHOST_CHILD=node", "NODEHOST_DIR="+dir, "NODEHOST_EXE="+exe)
	if want {
		cmd.Env = append(cmd.Env, "NODEHOST_WANT=1")
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait(); killRunners(dir) })
	return cmd
}

func TestAdoption(t *testing.T) {
	dir := fake(t)
	node := nodeProcess(t, dir, true)
	until(t, "a runner", func() bool { return len(said(dir, "ready")) == 1 })
	node.Process.Kill()
	node.Wait()

	// Whatever the node had ignored and blocked, its runner has not.
	for _, word := range []string{"SigIgn:", "SigBlk:"} {
		b, _ := os.ReadFile(filepath.Join(dir, "log"))
		if !strings.Contains(string(b), word+"\t0000000000000000\n") {
			t.Errorf("%s is not empty:\n%s", word, b)
		}
	}

	// The next node follows the runner, and starts no second.
	// What is wanted of it is not known yet: it is let alone.
	m, _, kill := run(t, dir, nil)
	until(t, "adoption", func() bool { return m.Status().Adopted })
	if s := m.Status(); s.Quitting || s.PID == 0 {
		t.Errorf("before anything is wanted: %+v", s)
	}
	m.Want(true)
	if n := len(said(dir, "start")); n != 1 {
		t.Fatalf("%d runners", n)
	}
	// It is told to quit by that one, and followed by one that follows.
	write(t, filepath.Join(dir, "job"), "", 0o600)
	m.Want(false)
	until(t, "the word", func() bool { return len(said(dir, "quit")) == 1 && m.Status().Quitting })
	kill()

	// A third node is told that it quits, although it wants a runner.
	m3, ended, _ := run(t, dir, nil)
	m3.Want(true)
	until(t, "adoption", func() bool { s := m3.Status(); return s.Adopted && s.Quitting && s.Wanted })
	if n := len(said(dir, "start")); n != 1 {
		t.Errorf("%d runners", n)
	}
	os.Remove(filepath.Join(dir, "job"))
	until(t, "a new runner", func() bool { return len(said(dir, "ready")) == 2 })
	if s := m3.Status(); s.Adopted || s.Quitting {
		t.Errorf("the new one: %+v", s)
	}
	m3.Shutdown()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A node that is killed at any moment of a start leaves a runner that the next
// finds, or none.
func TestKilledWhileStarting(t *testing.T) {
	dir := fake(t)
	for i := range 12 {
		node := nodeProcess(t, dir, true)
		// From before the start to after it.
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		node.Process.Kill()
		node.Wait()
	}
	m, ended, _ := run(t, dir, nil)
	m.Want(true)
	until(t, "a runner", func() bool { s := m.Status(); return s.PID != 0 && len(ready(dir, s.PID)) == 1 })
	pid := m.Status().PID
	for _, l := range said(dir, "start") {
		n, _ := strconv.Atoi(strings.Fields(l)[1])
		if o, err := supervise.ProcessOwner(n); err == nil && o.Alive() && n != pid {
			t.Errorf("runner %d lives beside %d", n, pid)
		}
	}
	m.Shutdown()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func ready(dir string, pid int) (out []string) {
	for _, l := range said(dir, "ready") {
		if l == fmt.Sprintf("ready %d", pid) {
			out = append(out, l)
		}
	}
	return out
}

// A record of another boot, of a process with another start, or of one that is
// gone is nobody's runner.
func TestForeignRecord(t *testing.T) {
	self := supervise.Self()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	for name, rec := range map[string]map[string]any{
		"another boot":  {"pid": self.PID, "start": self.Start, "boot_id": "other"},
		"another start": {"pid": self.PID, "start": self.Start + 1, "boot_id": strings.TrimSpace(string(boot))},
		"gone":          {"pid": 1 << 22, "start": 7, "boot_id": strings.TrimSpace(string(boot))},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fake(t)
			rec["schema"] = "vk.runner/1"
			b, _ := json.Marshal(rec)
			write(t, filepath.Join(dir, "state", nodehost.PIDFile), string(b), 0o600)
			m, ended, _ := run(t, dir, nil)
			m.Want(true)
			until(t, "a runner", func() bool { return len(said(dir, "ready")) == 1 })
			if m.Status().Adopted {
				t.Error("it was adopted")
			}
			m.Shutdown()
			<-ended
		})
	}
	dir := fake(t)
	write(t, filepath.Join(dir, "state", nodehost.PIDFile), "{", 0o600)
	_, ended, _ := run(t, dir, nil)
	if err := <-ended; err == nil || !strings.Contains(err.Error(), nodehost.PIDFile) {
		t.Errorf("a record that cannot be read: %v", err)
	}
}

package vmmtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/machine"
)

// Factory is what a driver gives to be tried by RunSuite.
type Factory struct {
	Driver machine.Driver
	// Spec is a guest that runs the mini agent; the suite sets Name and
	// Console, and whatever a test is about.
	Spec machine.Spec
	// Crash ends the VMM of m from outside. nil = SIGKILL to its PID.
	Crash func(m machine.Machine)
	// Many is how many guests to run at once.
	Many int
	// FloodKiB is how much the guest writes to its console.
	FloodKiB int
	// Limit bounds every single wait.
	Limit time.Duration
}

// RunSuite tries a driver against what core/machine promises. At the end
// nothing may be left of any guest.
func RunSuite(t *testing.T, f Factory) {
	fds, kids := openFiles(t), children(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *trial)
	}{
		{"Echo", testEcho}, {"Console", testConsole}, {"PowerOff", testPowerOff},
		{"Reboot", testReboot}, {"Panic", testPanic}, {"LastWords", testLastWords},
		{"Kill", testKill}, {"KillDuringBoot", testKillDuringBoot}, {"Hang", testHang},
		{"PauseContinue", testPause}, {"Crash", testCrash}, {"Flood", testFlood},
		{"DeafOwner", testDeafOwner}, {"Cancelled", testCancelled}, {"BadSpec", testBadSpec}, {"Many", testMany},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, &trial{t: t, f: f}) })
	}
	t.Run("NothingLeft", func(t *testing.T) {
		deadline := time.Now().Add(f.Limit)
		for {
			f2, k2 := openFiles(t), children(t)
			if len(f2) <= len(fds) && len(k2) <= len(kids) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("before: %d descriptors, children %v\nafter: %d descriptors %v\nchildren %v", len(fds), kids, len(f2), f2, k2)
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// trial is one guest of a test.
type trial struct {
	t       *testing.T
	f       Factory
	m       machine.Machine
	in      *bufio.Reader
	console syncBuffer
}

func (r *trial) ctx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(r.t.Context(), r.f.Limit)
}

func (r *trial) spec() machine.Spec {
	s := r.f.Spec
	s.Name = "suite-" + strings.ToLower(filepath.Base(r.t.Name()))
	s.Console = &r.console
	return s
}

func (r *trial) boot() {
	r.t.Helper()
	ctx, cancel := r.ctx()
	defer cancel()
	m, err := r.f.Driver.Boot(ctx, r.spec())
	if err != nil {
		r.t.Fatalf("Boot: %v", err)
	}
	r.m = m
	r.in = bufio.NewReader(m.Control())
	r.t.Cleanup(func() {
		m.Kill()
		m.Control().Close()
		if r.t.Failed() {
			r.t.Logf("console:\n%s", r.console.tail(4000))
		}
	})
}

func (r *trial) tell(line string) {
	r.t.Helper()
	r.m.Control().SetDeadline(time.Now().Add(r.f.Limit))
	if _, err := io.WriteString(r.m.Control(), line+"\n"); err != nil {
		r.t.Fatalf("writing %q: %v", line, err)
	}
}

func (r *trial) ask(line, want string) {
	r.t.Helper()
	r.tell(line)
	got, err := r.in.ReadString('\n')
	if err != nil || strings.TrimSpace(got) != want {
		r.t.Fatalf("asked %q, got %q (%v), want %q", line, got, err, want)
	}
}

func (r *trial) ends(want machine.Reason) machine.Exit {
	r.t.Helper()
	ctx, cancel := r.ctx()
	defer cancel()
	e, err := r.m.Wait(ctx)
	if err != nil {
		r.t.Fatalf("Wait: %v", err)
	}
	if e.Reason != want {
		r.t.Errorf("the guest ended by %q (%s), want %q", e.Reason, e.Detail, want)
	}
	if e.At.IsZero() {
		r.t.Error("the end has no time")
	}
	if e2, err := r.m.Wait(ctx); err != nil || e2 != e {
		r.t.Errorf("second Wait gave %+v, %v; the first %+v", e2, err, e)
	}
	if pid := r.m.PID(); pid != 0 {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			r.t.Errorf("process %d is still there after Wait: %v", pid, err)
		}
	}
	return e
}

func testEcho(t *testing.T, r *trial) {
	r.boot()
	r.ask("echo before you listen", "echo before you listen") // written long before the agent runs
	if a, b := r.m.Control(), r.m.Control(); a != b {
		t.Error("Control gave two different values")
	}
	for i := range 100 {
		s := fmt.Sprintf("echo %d", i)
		r.ask(s, s)
	}
}

func testConsole(t *testing.T, r *trial) {
	r.boot()
	r.ask("say marked words", "said")
	r.tell("poweroff")
	r.ends(machine.PowerOff)
	if !strings.Contains(r.console.String(), "marked words\r\n") {
		t.Errorf("console has no %q", "marked words")
	}
}

func testPowerOff(t *testing.T, r *trial) {
	r.boot()
	r.ask("echo up", "echo up")
	r.tell("poweroff")
	r.ends(machine.PowerOff)
	if _, err := r.in.ReadByte(); err != io.EOF {
		t.Errorf("the control channel gives %v after the end, want EOF", err)
	}
	if err := r.m.Kill(); err != nil {
		t.Errorf("Kill after the end: %v", err)
	}
	r.ends(machine.PowerOff)
	ctx, cancel := r.ctx()
	defer cancel()
	if r.m.Pause(ctx) == nil {
		t.Error("a guest that is gone was paused")
	}
}

func testReboot(t *testing.T, r *trial) {
	r.boot()
	r.tell("reboot")
	r.ends(machine.Reboot)
}

func testPanic(t *testing.T, r *trial) {
	r.boot()
	r.tell("panic")
	if e := r.ends(machine.Panic); !strings.HasPrefix(e.Detail, "Kernel panic - not syncing: sysrq triggered crash") {
		t.Errorf("detail is %q", e.Detail)
	}
}

// testLastWords has a guest end right after it wrote more than any buffer
// between holds: all of it arrives, before Wait says that the guest is gone.
func testLastWords(t *testing.T, r *trial) {
	const size = 1 << 20
	r.boot()
	r.ask("echo up", "echo up")
	got := make(chan int64, 1)
	r.tell("dump " + strconv.Itoa(size))
	go func() {
		n, _ := io.Copy(io.Discard, r.in)
		got <- n
	}()
	r.ends(machine.PowerOff)
	if n := <-got; n != size {
		t.Errorf("%d bytes of %d arrived", n, size)
	}
}

func testKill(t *testing.T, r *trial) {
	r.boot()
	r.ask("echo up", "echo up")
	for range 2 {
		if err := r.m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	r.ends(machine.Killed)
}

func testKillDuringBoot(t *testing.T, r *trial) {
	r.boot()
	if err := r.m.Kill(); err != nil {
		t.Errorf("Kill: %v", err)
	}
	r.ends(machine.Killed)
	if _, err := r.in.ReadByte(); err == nil {
		t.Error("a guest killed at once said something")
	}
}

func testHang(t *testing.T, r *trial) {
	r.boot()
	r.ask("hang", "hanging")
	r.tell("echo anybody")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if e, err := r.m.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait gave %+v, %v for a guest that hangs", e, err)
	}
	if err := r.m.Kill(); err != nil {
		t.Errorf("Kill: %v", err)
	}
	r.ends(machine.Killed)
}

func testPause(t *testing.T, r *trial) {
	r.boot()
	r.ask("echo up", "echo up")
	ctx, cancel := r.ctx()
	defer cancel()
	for range 2 {
		if err := r.m.Pause(ctx); err != nil {
			t.Fatalf("Pause: %v", err)
		}
		r.tell("echo still there")
		r.m.Control().SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if b, err := r.in.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a paused guest said %q (%v)", b, err)
		}
		r.m.Control().SetReadDeadline(time.Now().Add(r.f.Limit))
		if err := r.m.Continue(ctx); err != nil {
			t.Fatalf("Continue: %v", err)
		}
		if got, err := r.in.ReadString('\n'); got != "echo still there\n" {
			t.Fatalf("after the pause: %q, %v", got, err)
		}
	}
	// A paused guest can be killed.
	if err := r.m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	r.m.Kill()
	r.ends(machine.Killed)
}

func testCrash(t *testing.T, r *trial) {
	r.boot()
	r.ask("echo up", "echo up")
	if r.f.Crash != nil {
		r.f.Crash(r.m)
	} else if err := syscall.Kill(r.m.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := r.ends(machine.Crashed); !strings.Contains(e.Detail, "SIGKILL") {
		t.Errorf("detail %q does not name the signal", e.Detail)
	}
}

func testFlood(t *testing.T, r *trial) {
	r.boot()
	r.ask("flood "+strconv.Itoa(r.f.FloodKiB), "flooded")
	r.ask("echo up", "echo up")
	r.tell("poweroff")
	r.ends(machine.PowerOff)
	if n := r.console.Len(); n < r.f.FloodKiB<<10 {
		t.Errorf("the console brought %d bytes of %d KiB", n, r.f.FloodKiB)
	}
}

// testDeafOwner has nobody read what the guest says.
func testDeafOwner(t *testing.T, r *trial) {
	r.boot()
	r.tell("echo nobody reads this")
	r.tell("poweroff")
	r.ends(machine.PowerOff)
}

func testCancelled(t *testing.T, r *trial) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if m, err := r.f.Driver.Boot(ctx, r.spec()); err == nil {
		m.Kill()
		t.Error("Boot went on under a context that had ended")
	} else if !errors.Is(err, context.Canceled) {
		t.Errorf("Boot: %v, want context.Canceled in it", err)
	}
}

func testBadSpec(t *testing.T, r *trial) {
	for name, change := range map[string]func(*machine.Spec){
		"no name":   func(s *machine.Spec) { s.Name = "" },
		"no CPU":    func(s *machine.Spec) { s.CPUs = 0 },
		"no memory": func(s *machine.Spec) { s.MemMiB = 0 },
	} {
		s := r.spec()
		change(&s)
		if m, err := r.f.Driver.Boot(t.Context(), s); err == nil {
			m.Kill()
			t.Errorf("%s: a guest booted", name)
		}
	}
}

func testMany(t *testing.T, r *trial) {
	var wg sync.WaitGroup
	for i := range r.f.Many {
		wg.Go(func() {
			s := r.spec()
			s.Name = fmt.Sprintf("suite-many-%d", i)
			s.Console = io.Discard
			ctx, cancel := r.ctx()
			defer cancel()
			m, err := r.f.Driver.Boot(ctx, s)
			if err != nil {
				t.Errorf("guest %d: %v", i, err)
				return
			}
			defer m.Control().Close()
			defer m.Kill()
			want := fmt.Sprintf("echo I am %d\n", i)
			m.Control().SetDeadline(time.Now().Add(r.f.Limit))
			io.WriteString(m.Control(), want)
			if got, err := bufio.NewReader(m.Control()).ReadString('\n'); got != want {
				t.Errorf("guest %d said %q (%v)", i, got, err)
			}
			io.WriteString(m.Control(), "poweroff\n")
			if e, err := m.Wait(ctx); err != nil || e.Reason != machine.PowerOff {
				t.Errorf("guest %d: %+v, %v", i, e, err)
			}
		})
	}
	wg.Wait()
}

// syncBuffer is a console that tests read.
type syncBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b = append(s.b, p...)
	return len(p), nil
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.b)
}

func (s *syncBuffer) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.b)
}

func (s *syncBuffer) tail(n int) string {
	b := s.String()
	return b[max(0, len(b)-n):]
}

func openFiles(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			out = append(out, l)
		}
	}
	return out
}

// children are the processes whose parent is this one.
func children(t *testing.T) []string {
	t.Helper()
	var out []string
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, l := range lists {
		b, _ := os.ReadFile(l)
		out = append(out, strings.Fields(string(b))...)
	}
	return out
}

package vmmtest

import (
	"bufio"
	"bytes"
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
		{"DeafOwner", testDeafOwner}, {"Cancelled", testCancelled}, {"BadSpec", testBadSpec}, {"SaveRestore", testSaveRestore}, {"BadState", testBadState}, {"Many", testMany},
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

// testLastWords has a guest end while some of what it wrote is still on its
// way: all of it arrives, and Wait does not keep it from that. No more than a
// socket holds is left by then: a kernel that ends resets its devices first
// (virtio_dev_shutdown in the guest's Linux 6.12), and takes back with them what its
// host had no room for yet. A guest that has more to say waits for its host.
func testLastWords(t *testing.T, r *trial) {
	const size, last = 1 << 20, 16 << 10
	r.boot()
	r.ask("echo up", "echo up")
	got, most := make(chan int64, 1), make(chan struct{})
	r.tell("dump " + strconv.Itoa(size))
	go func() {
		n, _ := io.CopyN(io.Discard, r.in, size-last)
		close(most)
		m, _ := io.Copy(io.Discard, r.in)
		got <- n + m
	}()
	<-most
	r.tell("poweroff")
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
	if m, ok := r.m.(machine.Stander); ok {
		if at, dead := m.StandsAt(t.Context()); dead || !strings.Contains(at, "running; CPU 0 ") || strings.Contains(at, "unknown") {
			t.Errorf("StandsAt = %q, dead %v for a guest that hangs, want that it is running, and where its processor is", at, dead)
		}
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

// stateKey is the key of a guest like r's; the test ends for a driver that
// cannot save any.
func (r *trial) stateKey(s machine.Spec) string {
	r.t.Helper()
	d, ok := r.f.Driver.(machine.Restorer)
	if !ok {
		r.t.Skip("this driver saves no guests")
	}
	ctx, cancel := r.ctx()
	defer cancel()
	key, why, err := d.StateKey(ctx, s)
	if err != nil || key == "" {
		r.t.Fatalf("StateKey = %q, %q, %v", key, why, err)
	}
	return key
}

// save boots r's guest, gives it something to remember and saves it.
func (r *trial) save(path string) {
	r.t.Helper()
	r.boot()
	r.ask("keep this", "kept")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := r.ctx()
	defer cancel()
	if err := r.m.(machine.Saver).Save(ctx, f); err != nil {
		r.t.Fatalf("Save: %v", err)
	}
}

// restored is a trial of a guest that starts from the state.
func (r *trial) restored(path string) *trial {
	r.t.Helper()
	f, err := os.Open(path)
	if err != nil {
		r.t.Fatal(err)
	}
	other := &trial{t: r.t, f: r.f}
	other.f.Spec.Restore = f
	other.boot()
	return other
}

func testSaveRestore(t *testing.T, r *trial) {
	key := r.stateKey(r.spec())
	bigger := r.spec()
	bigger.MemMiB += 64
	if k := r.stateKey(bigger); k == key {
		t.Error("a guest with other memory has the same key")
	}
	renamed := r.spec()
	renamed.Name = "renamed"
	if k := r.stateKey(renamed); k != key {
		t.Error("the key depends on the guest's name")
	}
	path := filepath.Join(t.TempDir(), "state")
	r.save(path)
	r.ask("keep that", "kept") // the saved one goes on
	// Two at a time, and after the end of the one that was saved.
	a, b := r.restored(path), r.restored(path)
	a.ask("recall", "this")
	b.ask("recall", "this")
	r.ask("recall", "that")
	r.tell("poweroff")
	r.ends(machine.PowerOff)
	a.ask("keep other", "kept")
	b.ask("recall", "this")
	a.ask("say hello", "said")
	// The console has a way of its own, on which a byte takes its time.
	for deadline := time.Now().Add(r.f.Limit); !strings.Contains(a.console.String(), "hello"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("console of a restored guest: %q", a.console.String())
		}
	}
	a.tell("reboot")
	a.ends(machine.Reboot)
	b.tell("panic")
	b.ends(machine.Panic)
}

// A state that is cut or of something else fails the boot, or soon ends the
// guest, and not in peace.
func testBadState(t *testing.T, r *trial) {
	r.stateKey(r.spec())
	path := filepath.Join(t.TempDir(), "state")
	r.save(path)
	r.m.Kill()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"empty": nil, "cut": whole[:len(whole)*2/3], "rubbish": bytes.Repeat([]byte("rubbish "), 1000)} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state")
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			spec := r.spec()
			if spec.Restore, err = os.Open(path); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := r.ctx()
			defer cancel()
			m, err := r.f.Driver.Boot(ctx, spec)
			if err != nil {
				if ctx.Err() != nil {
					t.Errorf("Boot: %v", err)
				}
				return // told at once
			}
			defer m.Control().Close()
			defer m.Kill()
			x, err := m.Wait(ctx)
			if err != nil || x.Reason != machine.Crashed || x.Detail == "" {
				t.Errorf("exit = %+v, %v; want crashed, and why", x, err)
			}
		})
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

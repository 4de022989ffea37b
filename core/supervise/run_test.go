package supervise_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// world is a supervisor in this process.
type world struct {
	t      *testing.T
	dir    string
	driver *supervisetest.Driver
	net    *supervisetest.Network
	client *supervise.Client
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// begin starts a supervisor over a directory made for it, without waiting.
func begin(t *testing.T, d *supervisetest.Driver, change ...func(*supervise.Spec, *supervise.Deps)) *world {
	t.Helper()
	base := t.TempDir()
	w := &world{t: t, dir: filepath.Join(base, "run-1"), driver: d, net: &supervisetest.Network{}, done: make(chan struct{})}
	s, deps := testSpec(base), fakeDeps(d, w.net)
	for _, c := range change {
		c(&s, &deps)
	}
	l, err := supervise.Make(w.dir, s)
	if err != nil {
		t.Fatalf("Make: %v", err)
	}
	l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() {
		w.err = supervise.Run(ctx, w.dir, deps)
		close(w.done)
	}()
	t.Cleanup(func() {
		cancel()
		w.wait()
	})
	return w
}

func (w *world) wait() {
	w.t.Helper()
	select {
	case <-w.done:
	case <-time.After(time.Minute):
		w.t.Error("the supervisor did not end")
	}
}

// run is begin that waits until the guest runs.
func run(t *testing.T, d *supervisetest.Driver, change ...func(*supervise.Spec, *supervise.Deps)) *world {
	t.Helper()
	w := begin(t, d, change...)
	w.dial()
	st, err := w.client.Wait(ctxFor(t), supervise.Running, nil)
	if err != nil || st.Phase != supervise.Running {
		t.Fatalf("Wait = %+v, %v; want running; exit %+v", st, err, st.Exit)
	}
	return w
}

func (w *world) dial() {
	w.t.Helper()
	eventually(w.t, "the socket", func() bool {
		c, err := supervise.Dial(w.dir)
		w.client = c
		return err == nil
	})
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("%s: did not come", what)
}

func keep(s *supervise.Spec, _ *supervise.Deps) { s.Keep = true }

func hold(d time.Duration) func(*supervise.Spec, *supervise.Deps) {
	return func(s *supervise.Spec, _ *supervise.Deps) { s.HangLimit = d }
}

func gone(t *testing.T, dir string) {
	t.Helper()
	ents, err := os.ReadDir(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range ents {
		if !strings.HasPrefix(e.Name(), "image.") {
			t.Errorf("%s was left", e.Name())
		}
	}
}

func TestLife(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	st, err := w.client.State(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	if st.Boots != 1 || st.Addr != "10.200.0.2/24" || st.Kernel != "6.12-fake" || st.PID != os.Getpid() {
		t.Errorf("State = %+v", st)
	}
	var names []string
	for _, s := range st.Steps {
		names = append(names, s.Name)
	}
	want := []string{"socket", "image", "disk", "network", "driver", "kernel", "boot", "contact", "template", "setup", "command"}
	if !slices.Equal(names, want) {
		t.Errorf("steps = %v, want %v", names, want)
	}
	setup := w.driver.Last().Setups()[0]
	if setup.Hostname != "g1" || setup.Net == nil || len(setup.Entropy) == 0 || setup.UnixNano == 0 ||
		setup.Root.Serial != supervise.RootSerial || setup.Upper == nil {
		t.Errorf("setup = %+v", setup)
	}
	if disk, err := supervise.ReadState(w.dir); err != nil || disk.Phase != supervise.Running {
		t.Errorf("state.json = %+v, %v", disk, err)
	}
	if _, err := w.client.Stop(ctxFor(t), time.Second); err != nil {
		t.Errorf("Stop = %v", err)
	}
	w.wait()
	if w.err != nil {
		t.Errorf("Run = %v, want nil after a stop", w.err)
	}
	if !w.net.Closed() {
		t.Error("the network was not closed")
	}
	gone(t, w.dir)
	if _, err := w.client.State(ctxFor(t)); !errors.Is(err, supervise.ErrSupervisorGone) {
		t.Errorf("State after the end = %v, want ErrSupervisorGone", err)
	}
	if _, err := w.client.Stop(ctxFor(t), 0); err != nil {
		t.Errorf("second Stop = %v, want nil", err)
	}
}

func TestFirstContactIsRetried(t *testing.T) {
	garbage := bytes.Repeat([]byte{0xff}, 64)
	for name, d := range map[string]*supervisetest.Driver{
		"late":            {Late: 400 * time.Millisecond},
		"closes streams":  {CloseStreams: 3},
		"closes sessions": {CloseSessions: 2},
		"garbage first":   {Garbage: garbage},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := run(t, d)
			r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil)
			if err != nil || r.Code != 0 {
				t.Errorf("Exec = %+v, %v", r, err)
			}
		})
	}
}

func TestFailedStarts(t *testing.T) {
	other := "another-build"
	limit := func(s *supervise.Spec, _ *supervise.Deps) { s.BootLimit = 3 * time.Second } // all of which it takes
	for name, c := range map[string]struct {
		d      *supervisetest.Driver
		change func(*supervise.Spec, *supervise.Deps)
		reason string
		step   string
		detail string
	}{
		"silent":      {d: &supervisetest.Driver{Silent: true}, change: limit, reason: supervise.ReasonBootTimeout, step: "contact", detail: "waiting for the guest's agent"},
		"other build": {d: &supervisetest.Driver{Build: &other}, reason: supervise.ReasonFailed, step: "contact", detail: other},
		"setup":       {d: &supervisetest.Driver{SetupErr: "no such disk"}, reason: supervise.ReasonFailed, step: "setup", detail: "root: no such disk"},
		"boot":        {d: &supervisetest.Driver{BootErr: errors.New("no qemu")}, reason: supervise.ReasonFailed, step: "boot", detail: "no qemu"},
		"panic":       {d: &supervisetest.Driver{Silent: true, DieAtBoot: func(int) machine.Reason { return machine.Panic }}, reason: "panic", step: "contact", detail: "as told"},
		"reboots": {d: &supervisetest.Driver{Silent: true, DieAtBoot: func(int) machine.Reason { return machine.Reboot }},
			reason: "reboot", step: "contact", detail: "while starting"},
		"disk": {d: &supervisetest.Driver{}, change: func(_ *supervise.Spec, d *supervise.Deps) {
			d.Disk = func(string, int64) error { return errors.New("no space left") }
		}, reason: supervise.ReasonFailed, step: "disk", detail: "no space left"},
		"image": {d: &supervisetest.Driver{}, change: func(s *supervise.Spec, _ *supervise.Deps) { s.Image.Path += ".gone" },
			reason: supervise.ReasonFailed, step: "image", detail: "local/test"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change := c.change
			if change == nil {
				change = func(*supervise.Spec, *supervise.Deps) {}
			}
			w := begin(t, c.d, change, keep)
			w.wait()
			if w.err == nil {
				t.Error("Run = nil, want an error")
			}
			st, err := supervise.ReadState(w.dir)
			if err != nil {
				t.Fatal(err)
			}
			if st.Exit == nil || st.Exit.Reason != c.reason || st.Exit.Step != c.step || !strings.Contains(st.Exit.Detail, c.detail) {
				t.Errorf("Exit = %+v; want reason %q, step %q, detail with %q", st.Exit, c.reason, c.step, c.detail)
			}
			if c.d.Boots() > 0 && len(st.Exit.Console) == 0 {
				t.Error("no console lines in the exit")
			}
			if name == "reboots" && c.d.Boots() != 3 {
				t.Errorf("booted %d times, want 3", c.d.Boots())
			}
			for _, f := range []string{supervise.SocketFile, supervise.UpperFile, "vmm"} {
				if _, err := os.Lstat(filepath.Join(w.dir, f)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s was left: %v", f, err)
				}
			}
		})
	}
}

func TestEndings(t *testing.T) {
	for name, c := range map[string]struct {
		d      *supervisetest.Driver
		change func(*supervise.Spec, *supervise.Deps)
		do     func(*world)
		reason string
		lines  string // in the console tail
	}{
		"panic": {do: func(w *world) { w.driver.Last().End(machine.Panic, "Attempted to kill init") },
			reason: "panic", lines: "Attempted to kill init"},
		"crash":     {do: func(w *world) { w.driver.Last().End(machine.Crashed, "signal: aborted") }, reason: "crashed"},
		"poweroff":  {do: func(w *world) { w.driver.Last().End(machine.PowerOff, "") }, reason: "poweroff"},
		"hang":      {change: hold(2 * time.Second), do: func(w *world) { w.driver.Last().Hang() }, reason: supervise.ReasonHang, lines: "fake guest"},
		"cancelled": {do: func(w *world) { w.cancel() }, reason: supervise.ReasonStopped},
		"deadline": {change: func(s *supervise.Spec, _ *supervise.Deps) { s.Deadline = time.Now().Add(3 * time.Second) },
			do: func(*world) {}, reason: supervise.ReasonDeadline},
		"stop of a guest that ignores it": {d: &supervisetest.Driver{IgnoreShutdown: true},
			do: func(w *world) { w.client.Stop(ctxFor(w.t), 0) }, reason: supervise.ReasonStopped},
		"kill": {d: &supervisetest.Driver{IgnoreShutdown: true},
			do: func(w *world) { w.client.Kill(ctxFor(w.t)) }, reason: supervise.ReasonStopped},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := c.d
			if d == nil {
				d = &supervisetest.Driver{}
			}
			change := c.change
			if change == nil {
				change = func(*supervise.Spec, *supervise.Deps) {}
			}
			w := run(t, d, change, keep)
			c.do(w)
			w.wait()
			st, err := supervise.ReadState(w.dir)
			if err != nil || st.Exit == nil {
				t.Fatalf("state = %+v, %v", st, err)
			}
			if st.Exit.Reason != c.reason {
				t.Errorf("Exit = %+v, want reason %q", st.Exit, c.reason)
			}
			if !strings.Contains(strings.Join(st.Exit.Console, "\n"), c.lines) {
				t.Errorf("console tail %q lacks %q", st.Exit.Console, c.lines)
			}
			if _, err := supervise.Dial(w.dir); !errors.Is(err, supervise.ErrSupervisorGone) || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("Dial = %v, want ErrSupervisorGone with the reason", err)
			}
			if b, err := os.ReadFile(filepath.Join(w.dir, supervise.ConsoleFile)); err != nil || !bytes.Contains(b, []byte("fake guest")) {
				t.Errorf("console.log = %q, %v", b, err)
			}
		})
	}
}

// A guest without a sign of life gets another try, and only one.
func TestStillborn(t *testing.T) {
	w := run(t, &supervisetest.Driver{Stillborn: 1}, soonStillborn)
	st, err := w.client.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || w.driver.Boots() != 2 {
		t.Errorf("state = %+v, %v after %d boots; want it running after 2", st.Phase, err, w.driver.Boots())
	}
	if want := []string{"it gave no sign of life for 50ms"}; !slices.Equal(st.Retried, want) {
		t.Errorf("told of starts given up: %q, want %q", st.Retried, want)
	}
	// The second one is not watched for life: it has what is left of the limit.
	w = begin(t, &supervisetest.Driver{Stillborn: 9}, soonStillborn, keep)
	eventually(t, "the second boot", func() bool { return w.driver.Boots() == 2 })
	select {
	case <-w.done:
		t.Error("the supervisor ended long before its limit")
	case <-time.After(4 * soonLife):
	}
	if n := w.driver.Boots(); n != 2 {
		t.Errorf("%d boots, want 2", n)
	}
}

const soonLife = 50 * time.Millisecond

// soonStillborn gives up guests without a sign of life early, and no others.
func soonStillborn(s *supervise.Spec, d *supervise.Deps) {
	s.BootLimit, d.Times.Life = time.Minute, soonLife
}

func TestStopDuringBoot(t *testing.T) {
	w := begin(t, &supervisetest.Driver{Silent: true})
	w.dial()
	if _, err := w.client.Wait(ctxFor(t), supervise.Booting, nil); err != nil {
		t.Fatal(err)
	}
	st, err := w.client.Stop(ctxFor(t), 0)
	if err != nil || st.Exit == nil || st.Exit.Reason != supervise.ReasonStopped {
		t.Errorf("Stop = %+v, %v", st.Exit, err)
	}
	w.wait()
	gone(t, w.dir)
}

func TestReboot(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	first := w.driver.Last()
	st, err := w.client.Reboot(ctxFor(t))
	if err != nil || st.Boots != 2 || st.Phase != supervise.Running {
		t.Fatalf("Reboot = %+v, %v", st, err)
	}
	if w.net.Plugs() != 2 {
		t.Errorf("the guest was plugged in %d times, want 2", w.net.Plugs())
	}
	second := w.driver.Last()
	if first == second || first.Setups()[0].MachineID != second.Setups()[0].MachineID {
		t.Error("the machine id changed with a reboot")
	}
	// A reboot from inside.
	second.End(machine.Reboot, "")
	eventually(t, "the third boot", func() bool {
		st, err := w.client.State(ctxFor(t))
		return err == nil && st.Boots == 3 && st.Phase == supervise.Running
	})
	var out bytes.Buffer
	r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"echo", "hi"}}, guestclient.Stdio{Out: &out}, nil)
	if err != nil || r.Code != 0 || out.String() != "hi\n" {
		t.Errorf("Exec after reboots = %+v, %v, %q", r, err, out.String())
	}
}

func TestBrokenSessionComesBack(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, hold(time.Minute))
	w.driver.Last().BreakSession()
	eventually(t, "an exec after the break", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // one may be lost in the break
		defer cancel()
		r, err := w.client.Exec(ctx, guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil)
		return err == nil && r.Code == 0
	})
	if n := w.driver.Boots(); n != 1 {
		t.Errorf("booted %d times, want 1", n)
	}
}

func TestCommand(t *testing.T) {
	w := begin(t, &supervisetest.Driver{}, keep, func(s *supervise.Spec, _ *supervise.Deps) {
		s.Command = &supervise.Command{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}}
	})
	w.wait()
	st, err := supervise.ReadState(w.dir)
	if err != nil || st.Exit == nil || st.Exit.Code == nil || *st.Exit.Code != 7 || st.Exit.Reason != supervise.ReasonExited {
		t.Fatalf("state = %+v, %v; want code 7", st.Exit, err)
	}
	b, err := os.ReadFile(filepath.Join(w.dir, supervise.CommandFile))
	if err != nil || !strings.Contains(string(b), "out\n") || !strings.Contains(string(b), "err\n") {
		t.Errorf("command.log = %q, %v", b, err)
	}
}

func TestPublish(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, func(s *supervise.Spec, _ *supervise.Deps) {
		s.Net.Publish = []supervise.Publish{{GuestPort: 80, Proto: "tcp"}}
	})
	p, err := w.client.Publish(ctxFor(t), supervise.Publish{GuestPort: 81, Proto: "tcp"})
	if err != nil || p.HostPort == 0 {
		t.Fatalf("Publish = %+v, %v", p, err)
	}
	if _, err := w.client.Publish(ctxFor(t), p); err == nil || !strings.Contains(err.Error(), "taken") || fault.KindOf(err) != fault.Conflict || fault.HintOf(err) != "take another one" {
		t.Errorf("Publish of a taken port = %v (%s), hint %q", err, fault.KindOf(err), fault.HintOf(err))
	}
	st, _ := w.client.State(ctxFor(t))
	if len(st.Publish) != 2 || st.Publish[1] != p {
		t.Errorf("published = %+v", st.Publish)
	}
	if err := w.client.Unpublish(ctxFor(t), p); err != nil {
		t.Errorf("Unpublish = %v", err)
	}
	if st, _ = w.client.State(ctxFor(t)); len(st.Publish) != 1 {
		t.Errorf("published after Unpublish = %+v", st.Publish)
	}
	// A port closed by another writing of the same is closed in the state too.
	if _, err = w.client.Publish(ctxFor(t), supervise.Publish{HostAddr: "127.0.0.1", HostPort: 8099, GuestPort: 99, Proto: "tcp"}); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Unpublish(ctxFor(t), supervise.Publish{HostPort: 8099, GuestPort: 99}); err != nil {
		t.Errorf("Unpublish of a port whose address was left out = %v", err)
	}
	if st, _ = w.client.State(ctxFor(t)); len(st.Publish) != 1 {
		t.Errorf("published after Unpublish = %+v", st.Publish)
	}
}

func TestExec(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	for name, c := range map[string]struct {
		argv   []string
		in     string
		out    string
		err    string
		code   int
		signal int
	}{
		"code":   {argv: []string{"sh", "-c", "exit 50"}, code: 50},
		"apart":  {argv: []string{"sh", "-c", "echo o; echo e >&2"}, out: "o\n", err: "e\n"},
		"stdin":  {argv: []string{"cat"}, in: strings.Repeat("0123456789", 100_000), out: strings.Repeat("0123456789", 100_000)},
		"signal": {argv: []string{"sh", "-c", "kill -9 $$"}, code: 137, signal: 9},
		"none":   {argv: []string{"no-such-program"}, code: 127},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out, errb bytes.Buffer
			r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: c.argv},
				guestclient.Stdio{In: strings.NewReader(c.in), Out: &out, Err: &errb}, nil)
			if err != nil || r.Code != c.code || r.Signal != c.signal {
				t.Errorf("Exec = %+v, %v; want code %d, signal %d", r, err, c.code, c.signal)
			}
			if out.String() != c.out || errb.String() != c.err {
				t.Errorf("stdout %d bytes, stderr %q; want %d bytes, %q", out.Len(), errb.String(), len(c.out), c.err)
			}
		})
	}
}

func TestExecSignal(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	ctl := make(chan guestwire.ExecControl, 1)
	pr, pw := io.Pipe()
	go func() {
		io.ReadFull(pr, make([]byte, 6))
		ctl <- guestwire.ExecControl{Signal: 15}
		io.Copy(io.Discard, pr)
	}()
	r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done"}},
		guestclient.Stdio{Out: pw}, ctl)
	if err != nil || r.Code != 3 {
		t.Errorf("Exec = %+v, %v; want code 3", r, err)
	}
}

// When the client goes away, the program does.
func TestExecClientGone(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	file := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(ctxFor(t))
	done := make(chan error, 1)
	go func() {
		_, err := w.client.Exec(ctx, guestwire.ExecRequest{Argv: []string{"sh", "-c", "echo $$ > " + file + ".new; mv " + file + ".new " + file + "; exec sleep 1000"}},
			guestclient.Stdio{Out: io.Discard}, nil)
		done <- err
	}()
	var owner supervise.Owner
	eventually(t, "the program", func() bool {
		b, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		owner = ownerOf(t, string(b))
		return true
	})
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Exec = %v, want canceled", err)
	}
	eventually(t, "the program's end", func() bool { return !owner.Alive() })
}

// A guest that dies under an exec: what it had written arrives, the error
// tells why.
func TestExecGuestDies(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	pr, pw := io.Pipe()
	first := make([]byte, 6)
	go func() {
		io.ReadFull(pr, first)
		w.driver.Last().End(machine.Panic, "out of luck")
		io.Copy(io.Discard, pr)
	}()
	_, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "echo ready; exec sleep 1000"}}, guestclient.Stdio{Out: pw}, nil)
	if !errors.Is(err, supervise.ErrSupervisorGone) || !strings.Contains(err.Error(), "panic") {
		t.Errorf("Exec = %v; want ErrSupervisorGone that tells of the panic", err)
	}
	if string(first) != "ready\n" {
		t.Errorf("output = %q", first)
	}
}

func TestManyClients(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			var out bytes.Buffer
			r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"cat"}},
				guestclient.Stdio{In: strings.NewReader("in"), Out: &out}, nil)
			if err != nil || r.Code != 0 || out.String() != "in" {
				t.Errorf("Exec = %+v, %v, %q", r, err, out.String())
			}
			if _, err := w.client.State(ctxFor(t)); err != nil {
				t.Errorf("State = %v", err)
			}
		})
	}
	wg.Wait()
}

func TestLongPath(t *testing.T) {
	w := run(t, &supervisetest.Driver{}, func(s *supervise.Spec, _ *supervise.Deps) {})
	w.cancel()
	w.wait()
	base := filepath.Join(t.TempDir(), strings.Repeat("long/", 40))
	if err := os.MkdirAll(base, 0o700); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(base, "run-1")
	l, err := supervise.Make(dir, testSpec(base))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- supervise.Run(ctx, dir, fakeDeps(&supervisetest.Driver{}, &supervisetest.Network{})) }()
	eventually(t, "running", func() bool {
		c, err := supervise.Dial(dir)
		if err != nil {
			return false
		}
		st, err := c.State(ctxFor(t))
		return err == nil && st.Phase == supervise.Running
	})
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v", err)
	}
}

func TestRunRefusesASecondSupervisor(t *testing.T) {
	w := run(t, &supervisetest.Driver{})
	err := supervise.Run(ctxFor(t), w.dir, fakeDeps(&supervisetest.Driver{}, &supervisetest.Network{}))
	if err == nil || !strings.Contains(err.Error(), "supervisor already") {
		t.Errorf("second Run = %v, want a refusal", err)
	}
	if _, err := w.client.State(ctxFor(t)); err != nil {
		t.Errorf("the first one is disturbed: %v", err)
	}
}

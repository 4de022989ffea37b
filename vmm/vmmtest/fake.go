// Package vmmtest is a driver without a VMM, steered by a test, and the suite
// that it and the real drivers pass.
package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/machine"
)

// Fake is a machine.Driver whose guests are goroutines of the test. The zero
// value boots guests that never answer. Set its fields before the first Boot.
type Fake struct {
	// Serve is the agent: it gets the guest's end of the control channel and
	// the guest powers off when it returns. nil = a guest that hangs.
	Serve func(conn net.Conn)
	// Agent is Serve for tests that want all of the guest; it goes first. The
	// guest powers off when it returns, unless it ended in another way.
	Agent func(g *Guest)
	// BootDelay passes between Boot and the agent.
	BootDelay time.Duration
	// BootErr is returned by Boot.
	BootErr error
	// BootConsole is on the console before the agent runs.
	BootConsole string
	// BootPanic, when set, panics the guest in place of running its agent.
	BootPanic string

	mu     sync.Mutex
	guests []*Guest
}

var _ machine.Driver = (*Fake)(nil)

// Name is "fake".
func (f *Fake) Name() string { return "fake" }

// Guests are all that were booted, in order.
func (f *Fake) Guests() []*Guest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*Guest(nil), f.guests...)
}

// Boot implements machine.Driver.
func (f *Fake) Boot(ctx context.Context, s machine.Spec) (machine.Machine, error) {
	if s.NIC != nil && s.NIC.File != nil {
		defer s.NIC.File.Close() // taken over; a fake has no use for it
	}
	booted := false
	defer func() {
		if s.Restore != nil && !booted {
			s.Restore.Close()
		}
	}()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("booting %s: %w", s.Name, context.Cause(ctx))
	case f.BootErr != nil:
		return nil, fmt.Errorf("booting %s: %w", s.Name, f.BootErr)
	case s.Name == "" || s.CPUs < 1 || s.MemMiB < 1:
		return nil, errors.New("booting a guest: its spec has no name, CPUs or memory")
	}
	ours, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	g := &Guest{Spec: s, host: ours, over: make(chan struct{}), done: make(chan struct{})}
	g.cond = sync.NewCond(&g.mu)
	g.Control = &gated{theirs, g}
	if g.Spec.Console == nil {
		g.Spec.Console = io.Discard
	}
	f.mu.Lock()
	f.guests = append(f.guests, g)
	f.mu.Unlock()
	booted = true
	go f.life(g)
	return &fakeMachine{g}, nil
}

func (f *Fake) life(g *Guest) {
	if g.Spec.Restore != nil {
		if err := g.restore(); err != nil {
			g.Crash(err.Error())
			return
		}
	} else {
		fmt.Fprint(consoleOf{g}, f.BootConsole)
	}
	if f.BootDelay > 0 && g.Spec.Restore == nil {
		select {
		case <-time.After(f.BootDelay):
		case <-g.over:
			return
		}
	}
	switch {
	case f.BootPanic != "":
		g.Panic(f.BootPanic)
	case f.Agent != nil:
		f.Agent(g)
		g.PowerOff()
	case f.Serve != nil:
		f.Serve(g.Control)
		g.PowerOff()
	}
}

// Guest is a fake's guest as seen from inside.
type Guest struct {
	Spec    machine.Spec
	Control net.Conn // its end of the control channel; stands still while paused

	host net.Conn
	over chan struct{} // closed when the guest ends
	done chan struct{} // closed when Wait may return

	mu     sync.Mutex
	cond   *sync.Cond
	paused bool
	ended  bool
	memory string // of MiniAgent: the state that Save saves
	exit   machine.Exit

	consoleMu sync.Mutex
}

// Console writes to the guest's console.
func (g *Guest) Console() io.Writer { return consoleOf{g} }

// Over is closed when the guest has ended.
func (g *Guest) Over() <-chan struct{} { return g.over }

// PowerOff ends the guest as it would itself. Only its first end counts.
func (g *Guest) PowerOff() { g.end(machine.PowerOff, "") }

// Reboot ends the guest by a reset.
func (g *Guest) Reboot() { g.end(machine.Reboot, "") }

// Panic ends the guest by a panic of its kernel with this reason.
func (g *Guest) Panic(why string) {
	line := "Kernel panic - not syncing: " + why
	fmt.Fprintf(consoleOf{g}, "[    1.000000] %s\r\n", line)
	g.end(machine.Panic, line)
}

// Crash ends the VMM under the guest.
func (g *Guest) Crash(how string) { g.end(machine.Crashed, how) }

// Flood writes n bytes to the console.
func (g *Guest) Flood(n int64) {
	line := []byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcd\r\n")
	for ; n > 0; n -= int64(len(line)) {
		if _, err := (consoleOf{g}).Write(line[:min(n, int64(len(line)))]); err != nil {
			return
		}
	}
}

func (g *Guest) end(r machine.Reason, detail string) {
	g.mu.Lock()
	if g.ended {
		g.mu.Unlock()
		return
	}
	g.ended = true
	g.exit = machine.Exit{Reason: r, Detail: detail, At: time.Now()}
	g.mu.Unlock()
	g.cond.Broadcast()
	close(g.over)
	g.Control.Close()
	go func() {
		g.consoleMu.Lock() // the last write is through
		//lint:ignore SA2001 taken to wait for the last write
		g.consoleMu.Unlock()
		for i := 0; pending(g.host) > 0 && i < 200; i++ {
			time.Sleep(5 * time.Millisecond)
		}
		close(g.done)
	}()
}

// wait blocks while the guest is paused.
func (g *Guest) wait() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.paused && !g.ended {
		g.cond.Wait()
	}
}

func (g *Guest) setPaused(p bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return fmt.Errorf("guest %s has ended", g.Spec.Name)
	}
	g.paused = p
	g.cond.Broadcast()
	return nil
}

type consoleOf struct{ g *Guest }

func (c consoleOf) Write(p []byte) (int, error) {
	c.g.wait()
	select {
	case <-c.g.over:
		return 0, net.ErrClosed
	default:
	}
	c.g.consoleMu.Lock()
	defer c.g.consoleMu.Unlock()
	return c.g.Spec.Console.Write(p)
}

// gated is a connection that stands still while its guest is paused.
type gated struct {
	net.Conn
	g *Guest
}

func (c *gated) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.g.wait()
	return n, err
}

func (c *gated) Write(p []byte) (int, error) {
	c.g.wait()
	return c.Conn.Write(p)
}

// fakeMachine is the host's view of a Guest.
type fakeMachine struct{ g *Guest }

func (m *fakeMachine) Control() net.Conn              { return m.g.host }
func (m *fakeMachine) PID() int                       { return 0 }
func (m *fakeMachine) Pause(context.Context) error    { return m.g.setPaused(true) }
func (m *fakeMachine) Continue(context.Context) error { return m.g.setPaused(false) }

func (m *fakeMachine) Wait(ctx context.Context) (machine.Exit, error) {
	select {
	case <-m.g.done:
		return m.g.exit, nil
	default:
	}
	select {
	case <-m.g.done:
		return m.g.exit, nil
	case <-ctx.Done():
		return machine.Exit{}, context.Cause(ctx)
	}
}

func (m *fakeMachine) Kill() error {
	m.g.end(machine.Killed, "")
	return nil
}

// pair is two ends of a stream that the kernel buffers, as a VMM's is.
func pair() (net.Conn, net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var c [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		defer f.Close()
		if c[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
	}
	return c[0], c[1], nil
}

func pending(c net.Conn) int {
	rc, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	n := 0
	if rc.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }) != nil {
		return 0
	}
	return n
}

// Package supervisetest is a machine.Driver without a VMM: its guest is an
// agent in this process that speaks guestwire and runs programs of the host,
// with knobs for everything that can go wrong with a guest. Nothing here is
// safe against an untrusted caller; it is for tests alone.
package supervisetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"virtkit/core/guestwire"
	"virtkit/core/machine"
)

// Driver boots fake guests. The zero value works; the knobs are read at Boot.
type Driver struct {
	// Process gives each guest a process of the host as its VMM, which dies
	// with this process as a real one does.
	Process bool
	// Silent guests never answer.
	Silent bool
	// Stillborn is how many first boots never say a word.
	Stillborn int
	// StuckIn is a stage of Setup that a guest's first boot never ends.
	StuckIn string
	// Words are what each guest says on its console when it boots.
	Words string
	// Dead is how many first boots can never go on, as the VMM says.
	Dead int
	// Timer is what guests take their timer's rate for; the true one is 1000.
	Timer int
	// Late is how long a guest takes to answer.
	Late time.Duration
	// Ahead is how far the guest's clock is ahead from the start.
	Ahead time.Duration
	// CloseStreams is how many first streams the agent closes at once.
	CloseStreams int
	// CloseSessions is how many first sessions the agent ends.
	CloseSessions int
	// Garbage is written to the control channel before the agent speaks.
	Garbage []byte
	// Build answers Hello instead of version.Build, if not nil.
	Build *string
	// SetupErr fails Setup at its second stage, or at SetupErrStage.
	SetupErr      string
	SetupErrStage string
	// Linked is what a guest with tools says that it has linked.
	Linked []string
	// DieAtBoot ends a guest so before its agent answers; boots counts from 1.
	DieAtBoot func(boot int) machine.Reason
	// Sample makes the n-th sample of each boot, from 1. Nil: guests record
	// nothing.
	Sample func(n int) []byte
	// IgnoreShutdown makes guests that answer Shutdown and go on.
	IgnoreShutdown bool
	// BootErr fails Boot.
	BootErr error
	// PlaceErr is why this host refuses each Spec.Place; nil = it does not.
	PlaceErr error
	// Key is every guest's StateKey. A restored guest whose state is not one
	// that Save wrote ends as BadState says, or without it never answers.
	Key      string
	BadState machine.Reason
	// SaveErr fails Save, after half of the state.
	SaveErr error

	// Victims are told by every guest; UpperUsed of UpperSize is in its pulse.
	Victims              guestwire.Victims
	UpperUsed, UpperSize atomic.Int64

	mu     sync.Mutex
	guests []*Guest
}

// Name is "fake".
func (d *Driver) Name() string { return "fake" }

// Last is the guest booted last, or nil.
func (d *Driver) Last() *Guest {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.guests) == 0 {
		return nil
	}
	return d.guests[len(d.guests)-1]
}

// Boots is how many guests were booted.
func (d *Driver) Boots() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.guests)
}

// Boot starts a guest.
func (d *Driver) Boot(ctx context.Context, s machine.Spec) (machine.Machine, error) {
	if d.BootErr != nil {
		return nil, d.BootErr
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	host, guest := net.Pipe()
	g := &Guest{Spec: s, d: d, host: host, conn: guest, done: make(chan struct{}), dead: make(chan struct{}), reaped: make(chan struct{}), agent: newAgent(d)}
	if d.Process {
		pid, err := g.spawn()
		if err != nil {
			return nil, err
		}
		g.pid = pid
	}
	if d.PlaceErr != nil && s.Place != nil {
		s.Unplaced(d.PlaceErr)
	}
	d.mu.Lock()
	d.guests = append(d.guests, g)
	boot := len(d.guests)
	d.mu.Unlock()
	g.agent.g = g
	if s.Restore != nil {
		b, err := io.ReadAll(s.Restore)
		s.Restore.Close()
		switch {
		case err != nil:
			return nil, err
		case string(b) == stateOf(d.Key):
			g.Restored = true
			go g.agent.run(guest)
		case d.BadState != "":
			go g.End(d.BadState, "a state of another")
		}
		return g, nil
	}
	if boot > d.Stillborn {
		fmt.Fprintf(s.Console, "[    0.000000] fake guest %s, boot %d\r\n%s", s.Name, boot, d.Words)
	}
	if d.DieAtBoot != nil {
		if r := d.DieAtBoot(boot); r != "" {
			go g.End(r, "as told")
			return g, nil // its agent never answers: it would be ready first, now and then
		}
	}
	if boot > d.Stillborn {
		go g.agent.run(guest)
	}
	return g, nil
}

func stateOf(key string) string { return "state of " + key + ", all of it" }

// StateKey implements machine.Restorer.
func (d *Driver) StateKey(context.Context, machine.Spec) (key, why string, err error) {
	return d.Key, "the fake has no key", nil
}

// Save implements machine.Saver.
func (g *Guest) Save(_ context.Context, f *os.File) error {
	s := stateOf(g.d.Key)
	if g.d.SaveErr != nil {
		s = s[:len(s)/2]
	}
	if _, err := f.WriteString(s); err != nil {
		return err
	}
	return g.d.SaveErr
}

// TimerKHz implements machine.Saver.
func (g *Guest) TimerKHz() int { return 1000 }

// StandsAt implements machine.Stander.
func (g *Guest) StandsAt(context.Context) (string, bool) {
	if g.d.Dead == 0 {
		return "", false
	}
	return "the fake stands", g.d.Boots() <= g.d.Dead
}

// Guest is one fake machine.
type Guest struct {
	Spec     machine.Spec
	Restored bool // it began from a state

	d      *Driver
	host   net.Conn
	conn   net.Conn
	pid    int
	agent  *agent
	once   sync.Once
	exit   machine.Exit
	dead   chan struct{} // closed when it begins to end
	reaped chan struct{} // closed when the process of Driver.Process is
	done   chan struct{} // closed when all is delivered
}

// spawn starts the process that stands for the VMM.
func (g *Guest) spawn() (int, error) {
	type started struct {
		pid int
		err error
	}
	ch := make(chan started)
	go func() {
		// The parent-death signal is sent when the thread ends.
		runtime.LockOSThread()
		cmd := exec.Command("sleep", "1000")
		cmd.ExtraFiles = g.Spec.Hold
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			ch <- started{err: err}
			return
		}
		ch <- started{pid: cmd.Process.Pid}
		cmd.Wait()
		close(g.reaped)
		g.End(machine.Crashed, "the VMM's process ended")
	}()
	s := <-ch
	return s.pid, s.err
}

// Control is the host's end of the channel.
func (g *Guest) Control() net.Conn { return g.host }

// PID is the VMM's process, 0 without Driver.Process.
func (g *Guest) PID() int { return g.pid }

// Wait blocks until the guest has ended.
func (g *Guest) Wait(ctx context.Context) (machine.Exit, error) {
	select {
	case <-g.done:
		return g.exit, nil
	case <-ctx.Done():
		return machine.Exit{}, context.Cause(ctx)
	}
}

// Kill ends the guest at once.
func (g *Guest) Kill() error {
	g.End(machine.Killed, "")
	<-g.done
	return nil
}

// End ends the guest for a reason of the test's.
func (g *Guest) End(r machine.Reason, detail string) {
	g.once.Do(func() {
		close(g.dead)
		g.exit = machine.Exit{Reason: r, Detail: detail, At: time.Now()}
		if r == machine.Panic {
			fmt.Fprintf(g.Spec.Console, "Kernel panic - not syncing: %s\r\n", detail)
		}
		if g.pid != 0 {
			syscall.Kill(g.pid, syscall.SIGKILL)
			<-g.reaped // a real VMM is gone too when its guest is
		}
		if g.Spec.NIC != nil && g.Spec.NIC.File != nil {
			g.Spec.NIC.File.Close()
		}
		g.agent.stop()
		g.conn.Close()
		close(g.done)
	})
}

// Hang makes the agent fall silent.
func (g *Guest) Hang() { g.agent.hang() }

// Print writes to the console.
func (g *Guest) Print(s string) { fmt.Fprint(g.Spec.Console, s) }

// BreakSession ends the agent's session with garbage; another one follows.
func (g *Guest) BreakSession() { g.agent.breakSession() }

// Pause is not part of the fake.
func (g *Guest) Pause(context.Context) error { return errors.New("the fake cannot pause") }

// Continue is not part of the fake.
func (g *Guest) Continue(context.Context) error { return errors.New("the fake cannot continue") }

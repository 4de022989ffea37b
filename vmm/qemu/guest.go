package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/machine"
	"virtkit/vmm/internal/qmp"
	"virtkit/vmm/virtiofs"
)

// guest is one QEMU process, a machine.Machine.
type guest struct {
	name    string
	kernel  string // path, for people
	memMiB  int
	log     *slog.Logger
	sink    io.Writer
	daemons []*virtiofs.Daemon

	cmd     *exec.Cmd
	qmp     *qmp.Client
	control *channel
	words   tail
	panics  panicWatch
	deaf    atomic.Bool // the owner does not read the control channel

	exited   chan struct{} // process reaped
	consoled chan struct{} // console read to its end
	done     chan struct{} // all of it; exit is set

	mu       sync.Mutex
	killed   bool
	shutdown string
	stuck    string // why the guest can only be ended: its disk on the host failed
	status   string
	exit     machine.Exit
}

var _ machine.Machine = (*guest)(nil)

func newGuest(s machine.Spec, log *slog.Logger) *guest {
	g := &guest{name: s.Name, kernel: s.Kernel.Image, memMiB: s.MemMiB, log: log, sink: s.Console,
		exited: make(chan struct{}), consoled: make(chan struct{}), done: make(chan struct{})}
	if g.sink == nil {
		g.sink = io.Discard
	}
	return g
}

// channel is the control channel. A socket whose other end closed with bytes
// unread is reset; to its reader that is an end like any other.
type channel struct{ *net.UnixConn }

func (c *channel) Read(p []byte) (int, error) {
	n, err := c.UnixConn.Read(p)
	if errors.Is(err, unix.ECONNRESET) {
		err = io.EOF
	}
	return n, err
}

// run takes over a started QEMU and our ends of its sockets.
func (g *guest) run(cmd *exec.Cmd, mon, console, control *net.UnixConn) {
	g.cmd, g.control = cmd, &channel{control}
	g.qmp = qmp.New(mon, g.event)
	go g.pumpConsole(console)
	go func() {
		if err := g.qmp.Run(); err != nil {
			g.log.Debug("monitor ended", "err", err)
		}
	}()
	go g.reap()
	go g.finish()
}

// pumpConsole moves console bytes until QEMU is gone. It always goes on
// reading, also when the sink fails, so that the guest is never held up; its
// memory is one buffer, however much comes.
func (g *guest) pumpConsole(c *net.UnixConn) {
	defer close(g.consoled)
	defer c.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			g.panics.Write(buf[:n])
			if g.sink != nil {
				if _, werr := g.sink.Write(buf[:n]); werr != nil {
					g.log.Warn("console output is lost from here on", "err", werr)
					g.sink = nil
				}
			}
		}
		if err != nil {
			return
		}
	}
}

func (g *guest) event(e qmp.Event) {
	switch e.Name {
	case "SHUTDOWN":
	case "BLOCK_IO_ERROR":
		g.diskFailed(e.Data)
		return
	default:
		return
	}
	var d struct {
		Reason string `json:"reason"`
	}
	if err := json.Unmarshal(e.Data, &d); err != nil || d.Reason == "" {
		d.Reason = "unknown"
	}
	g.mu.Lock()
	first := g.shutdown == ""
	if first {
		g.shutdown = d.Reason
	}
	g.mu.Unlock()
	if first {
		go g.quit()
	}
}

// diskFailed ends a guest that QEMU paused because the host could not store
// what it wrote. Nobody would let it go on, and a guest that was told of an
// error would count it as one of its own.
func (g *guest) diskFailed(data json.RawMessage) {
	var d struct {
		Operation string `json:"operation"`
		Action    string `json:"action"`
		NoSpace   bool   `json:"nospace"`
		Reason    string `json:"reason"`
	}
	if err := json.Unmarshal(data, &d); err != nil || d.Action != "stop" {
		return
	}
	why := "the host failed at a " + d.Operation + " of the guest's disk: " + printable([]byte(d.Reason))
	if d.NoSpace {
		why = "the host has no space left for the guest's disk; run vk gc, or free some"
	}
	g.mu.Lock()
	g.stuck = why
	g.mu.Unlock()
	g.cmd.Process.Kill()
}

// quit ends a QEMU whose guest has ended, once nothing is left in it of what
// the guest wrote: while our side of the control channel has unread bytes,
// QEMU may hold more.
func (g *guest) quit() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for empty := 0; empty < settled && g.drained(ctx); {
		if _, err := g.qmp.Do(ctx, "query-status", nil); err != nil {
			break
		}
		n, ok := g.pending()
		if !ok {
			break
		}
		if empty++; n > 0 {
			empty = 0
		}
	}
	if _, err := g.qmp.Do(ctx, "quit", nil); err != nil && !errors.Is(err, io.EOF) {
		select {
		case <-g.exited:
		case <-time.After(2 * time.Second):
			g.cmd.Process.Kill()
		}
	}
}

// settled is after how many answers of the monitor, with the channel empty each
// time, what could be moved has been. Its answers come from the loop that moves
// the bytes, but not in one order with it: that there is room again is seen in
// one turn of the loop, and used in a later one.
const settled = 4

// pending is how many bytes of the control channel lie unread on our side.
// false = the owner closed it.
func (g *guest) pending() (int, bool) {
	rc, err := g.control.SyscallConn()
	if err != nil {
		return 0, false
	}
	n := 0
	var ierr error
	if err := rc.Control(func(fd uintptr) { n, ierr = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }); err != nil || ierr != nil {
		return 0, false
	}
	return n, true
}

// patience is how long an owner may take to read on, once its guest is gone.
const patience = 500 * time.Millisecond

// drained waits until the control channel has been read by its owner. false =
// the owner does not read, or ctx ended.
func (g *guest) drained(ctx context.Context) bool {
	if g.deaf.Load() {
		return false
	}
	last, since, wait := -1, time.Now(), time.Millisecond
	for {
		n, ok := g.pending()
		if !ok || n == 0 {
			return true
		}
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > patience {
			g.deaf.Store(true)
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
			wait = min(2*wait, 20*time.Millisecond)
		}
	}
}

// reap waits for the process.
func (g *guest) reap() {
	err := g.cmd.Wait()
	g.mu.Lock()
	g.status = "exit status 0"
	if ws, ok := g.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		g.status = "killed by " + unix.SignalName(ws.Signal())
	} else if err != nil {
		g.status = err.Error()
	}
	g.mu.Unlock()
	close(g.exited)
}

// finish gathers the end.
func (g *guest) finish() {
	<-g.exited
	for _, d := range g.daemons {
		d.Kill()
	}
	<-g.consoled
	<-g.qmp.Gone()
	// The owner reads the rest of the control channel from the kernel's
	// buffer, which outlives QEMU. One who does not read is not waited for.
	g.drained(context.Background())
	g.mu.Lock()
	e := ending{shutdown: g.shutdown, stuck: g.stuck, panicked: g.panics.last(), killed: g.killed, status: g.status, words: g.words.lines()}
	g.exit.At = time.Now()
	g.exit.Reason, g.exit.Detail = e.classify()
	g.mu.Unlock()
	close(g.done)
}

// awaitVMM returns once QEMU is set up, or says why it is not.
func (g *guest) awaitVMM(ctx context.Context) error {
	select {
	case <-g.qmp.Ready():
		return nil
	case <-g.exited:
		<-g.done
		g.mu.Lock()
		defer g.mu.Unlock()
		e := fault.New(fault.System, "QEMU did not start").Because(errors.New(g.exit.Detail))
		switch {
		case strings.Contains(g.exit.Detail, "cannot set up guest memory"):
			e = e.Hint("this host does not have %d MiB of memory for a guest: give it less", g.memMiB)
		case strings.Contains(g.exit.Detail, "kernel"):
			e = e.Hint("the guest's kernel is %s: is it whole, and one for this machine? `vk kernel list` shows what there is", g.kernel)
		}
		return e
	case <-ctx.Done():
		return fmt.Errorf("waiting for QEMU's monitor: %w", context.Cause(ctx))
	}
}

// Control implements machine.Machine.
func (g *guest) Control() net.Conn { return g.control }

// PID implements machine.Machine.
func (g *guest) PID() int { return g.cmd.Process.Pid }

// Wait implements machine.Machine.
func (g *guest) Wait(ctx context.Context) (machine.Exit, error) {
	select {
	case <-g.done:
	default:
		select {
		case <-g.done:
		case <-ctx.Done():
			return machine.Exit{}, context.Cause(ctx)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.exit, nil
}

// Kill implements machine.Machine.
func (g *guest) Kill() error {
	g.mu.Lock()
	select {
	case <-g.exited:
	default:
		g.killed = true
	}
	g.mu.Unlock()
	g.cmd.Process.Kill() // fails when it is gone, which is what is wanted
	<-g.exited
	return nil
}

// Pause implements machine.Machine.
func (g *guest) Pause(ctx context.Context) error {
	_, err := g.qmp.Do(ctx, "stop", nil)
	if err != nil {
		return fmt.Errorf("pausing %s: %w", g.name, err)
	}
	return nil
}

// Continue implements machine.Machine.
func (g *guest) Continue(ctx context.Context) error {
	_, err := g.qmp.Do(ctx, "cont", nil)
	if err != nil {
		return fmt.Errorf("continuing %s: %w", g.name, err)
	}
	return nil
}

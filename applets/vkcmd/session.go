package vkcmd

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// termGrace is how long a program has between a SIGTERM or SIGHUP that was
// passed on to it and the end of its guest.
const termGrace = 5 * time.Second

// execFunc runs a program in a guest; guestclient.Client.Exec is one.
type execFunc func(context.Context, guestwire.ExecRequest, guestclient.Stdio, <-chan guestwire.ExecControl) (guestclient.ExecResult, error)

// session joins this process's terminal and signals to a program in a guest.
type session struct {
	exec    execFunc
	stdin   io.Reader // nil = the program reads nothing
	stdout  io.Writer
	stderr  io.Writer
	signals <-chan os.Signal
	say     func(format string, a ...any)
	after   func(time.Duration) <-chan time.Time // nil = time.After
}

// watchedSignals are those that a session passes on or acts on.
var watchedSignals = []os.Signal{
	unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH, unix.SIGCONT,
}

// watch starts to receive the session's signals; stop ends it.
func watch() (ch <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, watchedSignals...)
	return c, func() { signal.Stop(c) }
}

// signalled is the error of a command that a signal ended.
func signalled(s syscall.Signal) error {
	return fault.Newf(fault.Interrupted, "ended by %s", signalName(int(s))).WithExit(128 + int(s))
}

// signalName is "signal 9 (SIGKILL)".
func signalName(n int) string {
	if name := unix.SignalName(syscall.Signal(n)); name != "" {
		return fmt.Sprintf("signal %d (%s)", n, name)
	}
	return fmt.Sprintf("signal %d", n)
}

// untilSignal is a context that ends with the first signal that asks this
// process to end. It is for the time before there is a program to pass
// signals to; release it before run takes the channel over.
func untilSignal(ctx context.Context, signals <-chan os.Signal) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-done:
				return
			case s := <-signals:
				switch s {
				case unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT:
					cancel(signalled(s.(syscall.Signal)))
				}
			}
		}
	}()
	return ctx, func() {
		close(done)
		<-stopped
	}
}

// run runs the program to its end. A first Ctrl-C goes to the program, a
// second one ends it; SIGTERM and SIGHUP go to it too and end it after
// termGrace. The error then is signalled's.
func (s *session) run(ctx context.Context, req guestwire.ExecRequest) (guestclient.ExecResult, error) {
	sio := guestclient.Stdio{In: s.stdin, Out: s.stdout, Err: s.stderr}
	var raw *rawTerminal
	if req.TTY {
		raw = terminalOf(s.stdin, s.stdout)
		req.Rows, req.Cols = raw.size()
		if err := raw.enter(); err != nil {
			return guestclient.ExecResult{}, fmt.Errorf("setting the terminal: %w", err)
		}
		defer raw.leave()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ctl := make(chan guestwire.ExecControl, 16)
	done := make(chan struct{})
	defer close(done)
	go s.passSignals(done, ctl, raw, cancel)
	return s.exec(ctx, req, sio, ctl)
}

func (s *session) passSignals(done <-chan struct{}, ctl chan<- guestwire.ExecControl, raw *rawTerminal, cancel context.CancelCauseFunc) {
	after := s.after
	if after == nil {
		after = time.After
	}
	// A guest that takes no more must not stop the second Ctrl-C from being
	// seen.
	pass := func(c guestwire.ExecControl) {
		select {
		case ctl <- c:
		default:
		}
	}
	asked := 0
	var end <-chan time.Time
	var last syscall.Signal
	for {
		select {
		case <-done:
			return
		case <-end:
			cancel(signalled(last))
			return
		case sig := <-s.signals:
			n := sig.(syscall.Signal)
			switch n {
			case unix.SIGWINCH:
				if raw != nil {
					rows, cols := raw.size()
					pass(guestwire.ExecControl{Resize: &guestwire.Resize{Rows: rows, Cols: cols}})
				}
				continue
			case unix.SIGCONT:
				if raw != nil {
					raw.enter() // a shell sets its own mode while we are stopped
				}
				continue
			case unix.SIGUSR1, unix.SIGUSR2:
				pass(guestwire.ExecControl{Signal: int(n)})
				continue
			}
			asked++
			last = n
			if asked > 1 {
				cancel(signalled(n))
				return
			}
			pass(guestwire.ExecControl{Signal: int(n)})
			if n == unix.SIGTERM || n == unix.SIGHUP {
				end = after(termGrace)
			} else {
				s.say("%s passed on to the guest; once more ends it", signalName(int(n)))
			}
		}
	}
}

// rawTerminal is this process's terminal while a program in a guest has it.
// Without a terminal it does nothing.
type rawTerminal struct {
	in, out int // descriptors; -1 = no terminal
	old     *term.State
}

func terminalOf(stdin io.Reader, stdout io.Writer) *rawTerminal {
	return &rawTerminal{in: terminalFD(stdin), out: terminalFD(stdout)}
}

// terminalFD is the descriptor of a terminal, or -1.
func terminalFD(v any) int {
	if f, ok := v.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return int(f.Fd())
	}
	return -1
}

func (r *rawTerminal) enter() error {
	if r.in < 0 {
		return nil
	}
	old, err := term.MakeRaw(r.in)
	if err != nil {
		return err
	}
	if r.old == nil {
		r.old = old
	}
	return nil
}

func (r *rawTerminal) leave() {
	if r.old != nil {
		term.Restore(r.in, r.old)
	}
}

// size is that of the terminal, or the usual one.
func (r *rawTerminal) size() (rows, cols uint16) {
	for _, fd := range []int{r.out, r.in} {
		if fd < 0 {
			continue
		}
		if c, w, err := term.GetSize(fd); err == nil && c > 0 && w > 0 {
			return uint16(w), uint16(c)
		}
	}
	return 24, 80
}

// ended tells how a program ended, in words, unless it exited by itself, and
// returns what vk exits with.
func ended(res guestclient.ExecResult, say func(format string, a ...any)) int {
	switch {
	case res.Err != "":
		say("%s", res.Err)
	case res.OOM:
		say("the program was ended by %s because the guest ran out of memory", signalName(9))
		say("hint: give the guest more memory with --mem")
	case res.Signal != 0:
		say("the program was ended by %s", signalName(res.Signal))
	}
	return res.Code
}

package supervisetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/core/guestwire"
	"virtkit/core/machine"
	"virtkit/core/version"
)

// agent answers guestwire as a guest would.
type agent struct {
	d       *Driver
	g       *Guest
	hung    chan struct{}
	once    sync.Once
	stopped chan struct{}

	mu       sync.Mutex
	sess     *yamux.Session
	ready    bool
	setups   []guestwire.Setup
	closed   int // streams closed for CloseStreams
	sessions int
	broken   bool // garbage is due
	execs    map[string]*fakeExec
	born     time.Time
	lost     time.Duration // time that passed without the guest
	shift    time.Duration // of its clock by its own
	resumes  int
	pings    int
	samples  int
}

func newAgent(d *Driver) *agent {
	return &agent{d: d, hung: make(chan struct{}), stopped: make(chan struct{}), execs: map[string]*fakeExec{}, born: time.Now(), shift: d.Ahead}
}

// Setups are the setups that the guest was sent.
func (g *Guest) Setups() []guestwire.Setup {
	g.agent.mu.Lock()
	defer g.agent.mu.Unlock()
	return g.agent.setups
}

// LoseTime makes the guest as one that was paused for d.
func (g *Guest) LoseTime(d time.Duration) {
	g.agent.mu.Lock()
	defer g.agent.mu.Unlock()
	g.agent.lost += d
}

// ShiftClock sets the guest's clock from within.
func (g *Guest) ShiftClock(d time.Duration) {
	g.agent.mu.Lock()
	defer g.agent.mu.Unlock()
	g.agent.shift += d
}

// Clock is how far the guest's clock is ahead, and how often it was set from
// outside and read.
func (g *Guest) Clock() (ahead time.Duration, set, read int) {
	g.agent.mu.Lock()
	defer g.agent.mu.Unlock()
	return g.agent.shift - g.agent.lost, g.agent.resumes, g.agent.pings
}

func (a *agent) pong() guestwire.Pong {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pings++
	now := time.Now()
	return guestwire.Pong{UnixNano: now.Add(a.shift - a.lost).UnixNano(), UptimeMS: (now.Sub(a.born) - a.lost).Milliseconds(),
		UpperUsed: a.d.UpperUsed.Load(), UpperSize: a.d.UpperSize.Load()}
}

func (a *agent) resume(body []byte) guestwire.Reply {
	var r guestwire.Resume
	if err := json.Unmarshal(body, &r); err != nil {
		return guestwire.Reply{Err: err.Error()}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.resumes++
	a.shift = a.lost + time.Until(time.Unix(0, r.UnixNano))
	return guestwire.Reply{}
}

func (a *agent) hang() { a.once.Do(func() { close(a.hung) }) }

func (a *agent) isHung() bool {
	select {
	case <-a.hung:
		return true
	default:
		return false
	}
}

func (a *agent) breakSession() {
	a.mu.Lock()
	s := a.sess
	a.broken = true
	a.mu.Unlock()
	s.Close()
}

// stop ends the agent as a power cut: what was written is delivered.
func (a *agent) stop() {
	close(a.stopped)
	a.mu.Lock()
	for _, x := range a.execs {
		x.kill()
	}
	a.mu.Unlock()
}

// sessionConn lets a session end without the pipe.
type sessionConn struct{ net.Conn }

func (s sessionConn) Close() error { return s.SetDeadline(time.Unix(1, 0)) }

func (a *agent) run(conn net.Conn) {
	if a.d.Silent {
		return
	}
	select {
	case <-time.After(a.d.Late):
	case <-a.stopped:
		return
	}
	if len(a.d.Garbage) > 0 {
		conn.Write(a.d.Garbage)
	}
	for {
		select {
		case <-a.stopped:
			return
		default:
		}
		conn.SetDeadline(time.Time{})
		sess, err := yamux.Server(sessionConn{conn}, guestwire.MuxConfig())
		if err != nil {
			return
		}
		a.mu.Lock()
		a.sess = sess
		a.sessions++
		end := a.sessions <= a.d.CloseSessions
		a.mu.Unlock()
		for {
			st, err := sess.AcceptStream()
			if err != nil {
				break
			}
			if end {
				sess.Close()
				break
			}
			go a.serve(st)
		}
		sess.Close()
		discard(conn)
		a.mu.Lock()
		broken := a.broken
		a.broken = false
		a.mu.Unlock()
		if broken {
			conn.SetDeadline(time.Time{})
			conn.Write(bytes.Repeat([]byte{0xff}, 64))
		}
	}
}

// discard throws away what had come for a session that has ended, as closing
// a virtio-serial port does: its successor must not begin within a frame.
func discard(conn net.Conn) {
	buf := make([]byte, 4096)
	for {
		conn.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
		if _, err := conn.Read(buf); err != nil {
			return
		}
	}
}

func (a *agent) serve(st *yamux.Stream) {
	a.mu.Lock()
	drop := a.closed < a.d.CloseStreams
	if drop {
		a.closed++
	}
	a.mu.Unlock()
	if drop {
		st.Close()
		return
	}
	var h guestwire.Header
	if err := guestwire.Recv(st, &h); err != nil || a.isHung() {
		return
	}
	switch h.Op {
	case guestwire.OpHello:
		b := version.Build
		if a.d.Build != nil {
			b = *a.d.Build
		}
		a.mu.Lock()
		ready := a.ready
		a.mu.Unlock()
		guestwire.Send(st, guestwire.HelloReply{Build: b, Kernel: "6.12-fake", Ready: ready, TimerKHz: a.d.Timer})
	case guestwire.OpSetup:
		a.setup(st, h.Body)
	case guestwire.OpPing:
		guestwire.Send(st, a.pong())
	case guestwire.OpVictims:
		guestwire.Send(st, a.d.Victims)
	case guestwire.OpResume:
		guestwire.Send(st, a.resume(h.Body))
	case guestwire.OpShutdown:
		var s guestwire.Shutdown
		json.Unmarshal(h.Body, &s)
		guestwire.Send(st, guestwire.Reply{})
		if !a.d.IgnoreShutdown {
			r := machine.PowerOff
			if s.Reboot {
				r = machine.Reboot
			}
			go a.g.End(r, "")
		}
	case guestwire.OpSample:
		a.sample(st)
	case guestwire.OpDial:
		a.dial(st, h.Body)
	case guestwire.OpExec:
		a.exec(st, h.Body)
		return
	case guestwire.OpStdio:
		var s guestwire.Stdio
		json.Unmarshal(h.Body, &s)
		a.execFor(s.ID).give(s.FD, st)
		return
	default:
		guestwire.Send(st, guestwire.Reply{Err: "unknown op " + h.Op})
	}
	st.Close()
}

// sample answers with what the driver's Sample makes.
func (a *agent) sample(st *yamux.Stream) {
	a.mu.Lock()
	a.samples++
	n := a.samples
	recorded := len(a.setups) > 0 && a.setups[len(a.setups)-1].Record
	a.mu.Unlock()
	if !recorded || a.d.Sample == nil {
		guestwire.Send(st, guestwire.Reply{Err: "this guest keeps no recording"})
		return
	}
	guestwire.Send(st, guestwire.Reply{})
	st.Write(a.d.Sample(n))
}

// Samples is how often the guest was asked for a sample.
func (g *Guest) Samples() int {
	g.agent.mu.Lock()
	defer g.agent.mu.Unlock()
	return g.agent.samples
}

// dial finds every port of the guest on the host's 127.0.0.1 and says whether
// it accepts.
func (a *agent) dial(st *yamux.Stream, body []byte) {
	var d guestwire.Dial
	json.Unmarshal(body, &d)
	_, port, _ := net.SplitHostPort(d.Addr)
	var rep guestwire.Reply
	if c, err := net.Dial(d.Network, "127.0.0.1:"+port); err != nil {
		rep.Err = err.Error()
	} else {
		c.Close()
	}
	guestwire.Send(st, rep)
}

// OpenStream opens a stream to the host, as a guest's agent may.
func (g *Guest) OpenStream() (net.Conn, error) {
	g.agent.mu.Lock()
	s := g.agent.sess
	g.agent.mu.Unlock()
	return s.OpenStream()
}

func (a *agent) setup(st *yamux.Stream, body []byte) {
	var s guestwire.Setup
	json.Unmarshal(body, &s)
	a.mu.Lock()
	a.setups = append(a.setups, s)
	a.mu.Unlock()
	guestwire.Send(st, guestwire.Progress{Stage: "clock"})
	guestwire.Send(st, guestwire.Progress{Stage: "root"})
	if a.d.StuckIn != "" && a.d.Boots() == 1 {
		guestwire.Send(st, guestwire.Progress{Stage: a.d.StuckIn})
		<-a.stopped
		return
	}
	if a.d.SetupErr != "" {
		if a.d.SetupErrStage != "" {
			guestwire.Send(st, guestwire.Progress{Stage: a.d.SetupErrStage})
		}
		guestwire.Send(st, guestwire.Progress{Done: true, Err: a.d.SetupErr})
		return
	}
	a.mu.Lock()
	a.ready = true
	a.mu.Unlock()
	p := guestwire.Progress{Done: true}
	if s.Tools != "" {
		p.Linked = a.d.Linked
	}
	guestwire.Send(st, p)
}

// fakeExec is a program of the host with the streams of a guest's.
type fakeExec struct {
	mu     sync.Mutex
	fds    [3]chan *yamux.Stream
	cancel context.CancelFunc
}

func (a *agent) execFor(id string) *fakeExec {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.execs[id]
	if x == nil {
		x = &fakeExec{}
		for i := range x.fds {
			x.fds[i] = make(chan *yamux.Stream, 1)
		}
		a.execs[id] = x
	}
	return x
}

func (x *fakeExec) give(fd int, st *yamux.Stream) { x.fds[fd] <- st }

func (x *fakeExec) kill() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cancel != nil {
		x.cancel()
	}
}

func (a *agent) exec(st *yamux.Stream, body []byte) {
	defer st.Close()
	var r guestwire.ExecRequest
	json.Unmarshal(body, &r)
	x := a.execFor(r.ID)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	x.mu.Lock()
	x.cancel = cancel
	x.mu.Unlock()
	cmd := exec.CommandContext(ctx, r.Argv[0], r.Argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Env = append(cmd.Environ(), r.Env...)
	var outs []*yamux.Stream
	var input io.WriteCloser
	var in *yamux.Stream
	if r.Stdin {
		in = <-x.fds[0]
		input, _ = cmd.StdinPipe()
	}
	if r.Stdout {
		s := <-x.fds[1]
		cmd.Stdout, outs = s, append(outs, s)
	}
	if r.Stderr {
		s := <-x.fds[2]
		cmd.Stderr, outs = s, append(outs, s)
	}
	if err := cmd.Start(); err != nil {
		for _, o := range outs {
			o.Close()
		}
		guestwire.Send(st, guestwire.ExecEvent{Exited: true, Code: 127, Err: err.Error()})
		return
	}
	guestwire.Send(st, guestwire.ExecEvent{PID: cmd.Process.Pid})
	if in != nil {
		go func() {
			io.Copy(input, in)
			input.Close()
			in.Close()
		}()
	}
	go func() {
		for {
			var c guestwire.ExecControl
			if err := guestwire.Recv(st, &c); err != nil {
				if !r.Detach {
					cancel()
				}
				return
			}
			if c.Signal != 0 {
				syscall.Kill(-cmd.Process.Pid, syscall.Signal(c.Signal))
			}
			if c.Kill {
				cancel()
			}
		}
	}()
	err := cmd.Wait()
	for _, o := range outs {
		o.Close()
	}
	ev := guestwire.ExecEvent{Exited: true}
	if ee, ok := errors.AsType[*exec.ExitError](err); ok {
		ws := ee.Sys().(syscall.WaitStatus)
		ev.Code = ws.ExitStatus()
		if ws.Signaled() {
			ev.Signal, ev.Code = int(ws.Signal()), 128+int(ws.Signal())
		}
	}
	guestwire.Send(st, ev)
}

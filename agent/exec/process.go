package exec

import (
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

// process is one program, from the fork to the last byte of its output.
type process struct {
	srv  *Server
	req  *guestwire.ExecRequest
	user User

	cgroup string // its directory, or ""
	child  []int  // descriptors that only the child needs

	stdin  net.Conn
	inPipe *os.File
	outs   []*output
	tty    *os.File // master

	lost     chan struct{} // closed when the host is gone
	over     chan struct{} // closed when the program has ended
	drained  chan struct{} // closed when all that it wrote until then is out
	finished chan struct{} // closed when the host is told
	filled   atomic.Int32  // outputs that are not drained
	ended    <-chan syscall.WaitStatus

	mu   sync.Mutex
	pid  int
	gone bool // the program has ended: pid may be another's
}

// wire makes the pipes or the terminal of the program.
func (p *process) wire(attr *syscall.ProcAttr, fds [3]net.Conn) (err error) {
	defer func() {
		if err != nil {
			p.abandon()
		}
	}()
	p.stdin = fds[0]
	if p.req.TTY {
		slave, err := p.openTTY(fds[1])
		if err != nil {
			return err
		}
		fd := uintptr(slave)
		attr.Files = []uintptr{fd, fd, fd}
		attr.Sys.Setctty, attr.Sys.Ctty = true, 0
		return nil
	}
	attr.Files = make([]uintptr, 3)
	null := -1
	for fd, conn := range fds {
		if conn == nil {
			if null < 0 {
				if null, err = unix.Open(inRoot(p.srv.opt.Root, "/dev/null"), unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
					return fmt.Errorf("opening /dev/null: %w", err)
				}
				p.child = append(p.child, null)
			}
			attr.Files[fd] = uintptr(null)
			continue
		}
		ours, theirs, err := p.pipe(fd == 0)
		if err != nil {
			return err
		}
		attr.Files[fd] = uintptr(theirs)
		if fd == 0 {
			p.inPipe = ours
			continue
		}
		o, err := newOutput(p, ours, conn)
		if err != nil {
			return err
		}
		p.outs = append(p.outs, o)
	}
	return nil
}

// pipeSize is how many bytes of a program's output wait for the agent.
const pipeSize = 256 << 10

// pipeEnds are a pipe; our end does not block, the program's does.
type pipeEnds struct {
	ours   *os.File
	theirs int
}

func newPipe(input bool) (*pipeEnds, error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	own, other := fd[0], fd[1]
	if input {
		own, other = fd[1], fd[0]
	} else {
		// Fewer changes between the two processes; the default will do as well.
		unix.FcntlInt(uintptr(own), unix.F_SETPIPE_SZ, pipeSize)
	}
	unix.FcntlInt(uintptr(other), unix.F_SETFL, 0)
	return &pipeEnds{os.NewFile(uintptr(own), "pipe"), other}, nil
}

// pipe is a pipe of the program's. It belongs to the program's user, so that
// /dev/stderr can be opened by name.
func (p *process) pipe(input bool) (ours *os.File, theirs int, err error) {
	var ends *pipeEnds
	if !input {
		p.srv.mu.Lock()
		ends, p.srv.pipe = p.srv.pipe, nil
		p.srv.mu.Unlock()
	}
	if ends == nil {
		if ends, err = newPipe(input); err != nil {
			return nil, -1, err
		}
	}
	p.child = append(p.child, ends.theirs)
	if os.Getuid() == 0 {
		unix.Fchown(ends.theirs, int(p.user.UID), int(p.user.GID))
	}
	return ends.ours, ends.theirs, nil
}

// abandon closes what wire has opened, for a program that never started.
func (p *process) abandon() {
	p.closeChild()
	if p.inPipe != nil {
		p.inPipe.Close()
	}
	for _, o := range p.outs {
		o.f.Close()
	}
	if p.tty != nil {
		p.tty.Close()
	}
	p.leaveCgroup()
}

func (p *process) closeChild() {
	for _, fd := range p.child {
		unix.Close(fd)
	}
	p.child = nil
}

// started takes note of the fork and sets the streams in motion.
func (p *process) started(pid int, ended <-chan syscall.WaitStatus) {
	p.mu.Lock()
	p.pid = pid
	p.mu.Unlock()
	p.ended = ended
	p.closeChild()
	g := p.srv.opt.Guard
	if p.stdin != nil {
		g("exec stdin", p.pumpIn)
	}
	p.filled.Store(int32(len(p.outs)))
	if len(p.outs) == 0 {
		close(p.drained)
	}
	for _, o := range p.outs {
		g("exec output", o.pump)
		if o.conn != nil {
			g("exec reader", o.watch)
		}
	}
	g("exec tidy", p.srv.tidy)
}

// startWait is how soon a program must end for its start not to be told apart
// from that: a message is dear in an emulated guest, and most programs are
// short. Nobody waits for a start; it tells how far one came whose end was lost.
const startWait = 500 * time.Millisecond

// serve reports on the control stream until the program's end.
func (p *process) serve(conn net.Conn, frames *guestwire.Frames, ctl *control) {
	defer close(ctl.done)
	start := time.NewTimer(startWait)
	defer start.Stop()
	lost := ctl.lost
	var kill <-chan time.Time
	for {
		select {
		case <-start.C:
			guestwire.Send(conn, guestwire.ExecEvent{PID: p.pid})
		case m := <-ctl.msgs:
			p.control(m)
		case <-lost:
			lost = nil
			p.hostLeft()
			if !p.req.Detach {
				p.signal(unix.SIGTERM)
				t := time.NewTimer(p.srv.opt.Grace)
				defer t.Stop()
				kill = t.C
			}
		case <-kill:
			p.kill()
		case ws := <-p.ended:
			p.mu.Lock()
			p.gone = true
			p.mu.Unlock()
			ev := p.finish(ws, ctl)
			// One write of the port, and one interrupt of the host's.
			frames.Hold()
			for _, o := range p.outs {
				if o.conn != nil {
					o.conn.Close()
				}
			}
			guestwire.Send(conn, ev)
			conn.Close()
			frames.Release()
			p.leaveCgroup()
			return
		}
	}
}

// finish delivers what the program has written and makes the last event.
func (p *process) finish(ws syscall.WaitStatus, ctl *control) guestwire.ExecEvent {
	if p.inPipe != nil {
		p.inPipe.Close()
	}
	if p.stdin != nil {
		p.stdin.SetReadDeadline(time.Unix(1, 0))
	}
	close(p.over)
	for _, o := range p.outs {
		o.stop()
	}
	// The host may leave while its side of a stream is full.
	lost := ctl.lost
	for waiting := true; waiting; {
		select {
		case <-p.drained:
			waiting = false
		case <-lost:
			lost = nil
			p.hostLeft()
		case <-ctl.msgs: // too late for a signal
		}
	}
	close(p.finished)
	ev := guestwire.ExecEvent{PID: p.pid, Exited: true, Code: ws.ExitStatus()}
	if ws.Signaled() {
		ev.Signal = int(ws.Signal())
		ev.Code = 128 + ev.Signal
	}
	ev.OOM = ev.Code != 0 && p.oomKills() > 0
	ev.Down = ev.Code != 0 && p.srv.down.Load() // also of a script that traps SIGTERM
	p.srv.forget(p)
	return ev
}

// hostLeft frees whoever waits for the host to read or write. Output is read
// and dropped from now on, so that a trap of the program can still print.
func (p *process) hostLeft() {
	select {
	case <-p.lost:
		return
	default:
	}
	close(p.lost)
	for _, o := range p.outs {
		if o.conn != nil {
			o.conn.SetWriteDeadline(time.Unix(1, 0))
		}
	}
	if p.stdin != nil {
		p.stdin.SetReadDeadline(time.Unix(1, 0))
	}
}

func (p *process) control(m guestwire.ExecControl) {
	if m.Resize != nil && p.tty != nil {
		setSize(p.tty, m.Resize.Rows, m.Resize.Cols)
	}
	if m.Kill {
		p.kill()
		return
	}
	if m.Signal > 0 && m.Signal < 65 {
		p.signal(syscall.Signal(m.Signal))
	}
}

// signal sends to the program's process group.
func (p *process) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pid > 0 && !p.gone {
		syscall.Kill(-p.pid, sig)
	}
}

// kill ends all that the program has started: by its control group, else by
// its session.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pid <= 0 {
		return
	}
	if p.cgroup != "" && os.WriteFile(p.cgroup+"/cgroup.kill", []byte("1"), 0) == nil {
		return
	}
	if !p.gone {
		killSession(p.pid)
		syscall.Kill(-p.pid, syscall.SIGKILL)
	}
}

// pumpIn copies the host's bytes to the program until either ends.
func (p *process) pumpIn() {
	defer p.stdin.Close()
	if p.tty != nil {
		if p.copyIn(p.tty) == nil {
			p.tty.Write([]byte{4}) // the terminal's end of file
		}
		return
	}
	if p.inPipe == nil {
		return
	}
	p.copyIn(p.inPipe)
	p.inPipe.Close()
}

// copyIn returns nil at the end of the host's input.
func (p *process) copyIn(w *os.File) error {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		n, err := p.stdin.Read(*b)
		if n > 0 {
			if _, werr := w.Write((*b)[:n]); werr != nil {
				return werr
			}
		}
		if err != nil {
			if n == 0 && isEOF(err) {
				return nil
			}
			return err
		}
	}
}

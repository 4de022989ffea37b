// Package exec runs programs for the host: it joins the streams of one
// request, starts the program as the asked user in a session, process group
// and control group of its own, moves its input and output each at its own
// pace, and tells how it ended.
package exec

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"virtkit/agent/reap"
	"virtkit/core/guestwire"
)

// Options of a Server.
type Options struct {
	Root     string                        // programs run chrooted there unless it is "/"
	Reaper   *reap.Reaper                  // starts the programs
	BaseEnv  func() []string               // under every request's; may be nil
	Hostname func() string                 // for HOSTNAME; may be nil
	LastPath string                        // directory put last into PATH; may be ""
	Cgroup   string                        // cgroup2 directory for a group per exec; "" = none
	Grace    time.Duration                 // from SIGTERM to SIGKILL once the host is gone; 0 = 10 s
	Join     time.Duration                 // for the streams of one exec to arrive; 0 = 60 s
	Guard    func(name string, f func())   // runs goroutines; nil = go f()
	Logf     func(format string, a ...any) // what no request can be told; may be nil
}

// Server runs programs. It is safe for concurrent use.
type Server struct {
	opt     Options
	down    atomic.Bool  // GoingDown
	telling atomic.Int64 // execs whose host has not been told the end
	users   users

	groups atomic.Uint64 // control groups made

	mu      sync.Mutex
	joins   map[string]*join
	running map[string]*process
	linger  []string    // control groups whose exec has ended
	spare   *group      // for the next exec; may be nil
	pipe    *pipeEnds   // for the next exec's output; may be nil
	later   *time.Timer // runs tidy; nil before the first exec's end

	tidying sync.Mutex
}

// GoingDown says that from now on programs end because the guest does: the
// host is told so, and does not take their codes for their own.
func (s *Server) GoingDown() { s.down.Store(true) }

// NewServer returns a Server.
func NewServer(o Options) *Server {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.Grace == 0 {
		o.Grace = 10 * time.Second
	}
	if o.Join == 0 {
		o.Join = 60 * time.Second
	}
	if o.Guard == nil {
		o.Guard = func(_ string, f func()) { go f() }
	}
	if o.Logf == nil {
		o.Logf = func(string, ...any) {}
	}
	return &Server{opt: o, joins: map[string]*join{}, running: map[string]*process{}}
}

// Running is how many programs have been started and not ended.
func (s *Server) Running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.running)
}

// Telling is whether a host is still to be told of an end, or of what a
// program wrote before it.
func (s *Server) Telling() bool { return s.telling.Load() > 0 }

// KillAll ends every program with SIGKILL, and what each has started.
func (s *Server) KillAll() {
	s.mu.Lock()
	var all []*process
	for _, p := range s.running {
		all = append(all, p)
	}
	s.mu.Unlock()
	for _, p := range all {
		p.kill()
	}
}

// join collects the streams of one exec, which arrive in any order.
type join struct {
	fds   [3]net.Conn
	timer *time.Timer
	ready chan struct{} // signalled when a stream arrives
}

// ServeStdio takes over the stream of an OpStdio request. frames, which may be
// nil, are those of its session.
func (s *Server) ServeStdio(conn net.Conn, frames *guestwire.Frames, body json.RawMessage) {
	var m guestwire.Stdio
	if err := json.Unmarshal(body, &m); err != nil || !validID(m.ID) || m.FD < 0 || m.FD > 2 {
		s.opt.Logf("exec: refused a stdio stream: %v, id %q, fd %d", err, m.ID, m.FD)
		conn.Close()
		return
	}
	if m.FD == 0 {
		frames.Flush() // the input may be long, and the program silent
	}
	s.mu.Lock()
	j := s.joinLocked(m.ID)
	taken := j.fds[m.FD] != nil || s.running[m.ID] != nil
	if !taken {
		j.fds[m.FD] = conn
	}
	s.mu.Unlock()
	if taken {
		conn.Close()
		return
	}
	select {
	case j.ready <- struct{}{}:
	default:
	}
}

// joinLocked is the join of id, made when there is none. A join that nobody
// asks for is dropped with its streams after Options.Join.
func (s *Server) joinLocked(id string) *join {
	j := s.joins[id]
	if j == nil {
		j = &join{ready: make(chan struct{}, 1)}
		j.timer = time.AfterFunc(s.opt.Join, func() { s.drop(id, j) })
		s.joins[id] = j
	}
	return j
}

func (s *Server) drop(id string, j *join) {
	s.mu.Lock()
	if s.joins[id] == j {
		delete(s.joins, id)
	}
	fds := j.fds
	j.fds = [3]net.Conn{}
	s.mu.Unlock()
	for _, c := range fds {
		if c != nil {
			c.Close()
		}
	}
}

// ServeExec serves an OpExec stream until its program has ended, or has been
// let go, and closes it. frames, which may be nil, are those of its session.
func (s *Server) ServeExec(conn net.Conn, frames *guestwire.Frames, body json.RawMessage) {
	s.telling.Add(1)
	defer s.telling.Add(-1)
	defer conn.Close()
	var req guestwire.ExecRequest
	if err := json.Unmarshal(body, &req); err != nil {
		guestwire.Send(conn, guestwire.ExecEvent{Exited: true, Code: 126, Err: fmt.Sprintf("decoding the request: %v", err)})
		return
	}
	if !validID(req.ID) {
		guestwire.Send(conn, guestwire.ExecEvent{Exited: true, Code: 126, Err: fmt.Sprintf("id %q is not 32 hex digits", req.ID)})
		return
	}
	ctl := s.readControl(conn)
	fds, err := s.collect(&req, ctl)
	if err != nil {
		guestwire.Send(conn, guestwire.ExecEvent{Exited: true, Code: 126, Err: err.Error()})
		return
	}
	p, err := s.start(&req, fds)
	if err != nil {
		for _, c := range fds {
			if c != nil {
				c.Close()
			}
		}
		ev := guestwire.ExecEvent{Exited: true, Code: 126, Err: err.Error()}
		if se, ok := err.(*startError); ok {
			ev.Code = se.code
		}
		guestwire.Send(conn, ev)
		return
	}
	p.serve(conn, frames, ctl)
}

// control is what the host says on an exec stream.
type control struct {
	msgs chan guestwire.ExecControl
	lost chan struct{} // closed when the stream ended
	done chan struct{} // closed by the server when it listens no more
}

func (s *Server) readControl(conn net.Conn) *control {
	c := &control{make(chan guestwire.ExecControl), make(chan struct{}), make(chan struct{})}
	s.opt.Guard("exec control", func() {
		defer close(c.lost)
		for {
			var m guestwire.ExecControl
			if guestwire.Recv(conn, &m) != nil {
				return
			}
			select {
			case c.msgs <- m:
			case <-c.done:
				return
			}
		}
	})
	return c
}

// collect waits for the streams that the request declares.
func (s *Server) collect(req *guestwire.ExecRequest, ctl *control) ([3]net.Conn, error) {
	want := [3]bool{req.Stdin, req.Stdout, req.Stderr && !req.TTY}
	s.mu.Lock()
	if s.running[req.ID] != nil {
		s.mu.Unlock()
		return [3]net.Conn{}, fmt.Errorf("exec %s is running already", req.ID)
	}
	j := s.joinLocked(req.ID)
	s.mu.Unlock()
	limit := time.NewTimer(s.opt.Join)
	defer limit.Stop()
	var early []guestwire.ExecControl
	for {
		s.mu.Lock()
		complete := s.joins[req.ID] == j
		for fd, w := range want {
			complete = complete && (!w || j.fds[fd] != nil)
		}
		if complete {
			delete(s.joins, req.ID)
			j.timer.Stop()
			fds := j.fds
			s.mu.Unlock()
			for fd, c := range fds {
				if c != nil && !want[fd] {
					c.Close()
					fds[fd] = nil
				}
			}
			if len(early) > 0 {
				s.replay(ctl, early)
			}
			return fds, nil
		}
		s.mu.Unlock()
		select {
		case <-j.ready:
		case m := <-ctl.msgs:
			early = append(early, m)
		case <-ctl.lost:
			s.drop(req.ID, j)
			return [3]net.Conn{}, fmt.Errorf("the host left before the program was started")
		case <-limit.C:
			s.drop(req.ID, j)
			return [3]net.Conn{}, fmt.Errorf("the streams of exec %s did not all arrive within %v", req.ID, s.opt.Join)
		}
	}
}

// replay hands on what was said before the program ran.
func (s *Server) replay(ctl *control, early []guestwire.ExecControl) {
	s.opt.Guard("exec early control", func() {
		for _, m := range early {
			select {
			case ctl.msgs <- m:
			case <-ctl.done:
				return
			}
		}
	})
}

func validID(id string) bool {
	if len(id) != 32 {
		return false
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// start resolves everything the request names and starts the program.
func (s *Server) start(req *guestwire.ExecRequest, fds [3]net.Conn) (*process, error) {
	if len(req.Argv) == 0 {
		return nil, notStarted(127, "no program was named")
	}
	u, err := s.users.lookup(s.opt.Root, req.User)
	if err != nil {
		return nil, notStarted(126, "%v", err)
	}
	var base []string
	if s.opt.BaseEnv != nil {
		base = s.opt.BaseEnv()
	}
	hostname := ""
	if s.opt.Hostname != nil {
		hostname = s.opt.Hostname()
	}
	env := envList{buildEnv(base, req, u, hostname, s.opt.LastPath)}
	dir, err := s.workDir(req, u)
	if err != nil {
		return nil, err
	}
	path, err := lookPath(s.opt.Root, req.Argv[0], dir, env.get("PATH"))
	if err != nil {
		return nil, err
	}
	p := &process{srv: s, req: req, user: u, lost: make(chan struct{}), over: make(chan struct{}), drained: make(chan struct{}), finished: make(chan struct{})}
	attr := &syscall.ProcAttr{Dir: dir, Env: env.kv, Sys: &syscall.SysProcAttr{Setsid: true}}
	if s.opt.Root != "/" {
		attr.Sys.Chroot = s.opt.Root
	}
	if os.Getuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	} else if int(u.UID) != os.Getuid() {
		return nil, notStarted(126, "this agent runs as uid %d and cannot start a program as uid %d", os.Getuid(), u.UID)
	}
	if err := p.wire(attr, fds); err != nil {
		return nil, fmt.Errorf("joining %s to its streams: %w", path, err)
	}
	p.enterCgroup(attr.Sys)
	s.mu.Lock()
	if s.running[req.ID] != nil {
		s.mu.Unlock()
		p.abandon()
		return nil, fmt.Errorf("exec %s is running already", req.ID)
	}
	s.running[req.ID] = p
	s.mu.Unlock()
	pid, ended, err := s.opt.Reaper.Start(path, req.Argv, attr)
	if err != nil {
		s.forget(p)
		p.abandon()
		return nil, explainStart(err, path, dir, u)
	}
	p.started(pid, ended)
	return p, nil
}

func (s *Server) workDir(req *guestwire.ExecRequest, u User) (string, error) {
	if req.Dir == "" {
		if fi, err := os.Stat(inRoot(s.opt.Root, u.Home)); err == nil && fi.IsDir() {
			return u.Home, nil
		}
		return "/", nil
	}
	if req.Dir[0] != '/' {
		return "", notStarted(126, "working directory %q is not absolute", req.Dir)
	}
	if req.MkDir {
		if err := makeDirs(s.opt.Root, req.Dir, 0o755, u); err != nil {
			return "", notStarted(126, "making the working directory: %v", err)
		}
	}
	fi, err := os.Stat(inRoot(s.opt.Root, req.Dir))
	switch {
	case err != nil && isMissing(err):
		return "", notStarted(127, "working directory %s: no such directory", req.Dir)
	case err != nil:
		return "", notStarted(126, "working directory %s: %v", req.Dir, underlying(err))
	case !fi.IsDir():
		return "", notStarted(126, "working directory %s: not a directory", req.Dir)
	}
	return req.Dir, nil
}

func (s *Server) forget(p *process) {
	s.mu.Lock()
	if s.running[p.req.ID] == p {
		delete(s.running, p.req.ID)
	}
	s.mu.Unlock()
}

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"virtkit/agent/atop"
	"virtkit/agent/exec"
	"virtkit/agent/reap"
	"virtkit/core/guestwire"
	"virtkit/core/version"
)

// System is what only an init can do. Its methods are not called at the same
// time as each other.
type System interface {
	// Setup makes the machine; progress names each stage as it begins. linked
	// is Progress.Linked.
	Setup(s *guestwire.Setup, progress func(stage string)) (linked []string, err error)
	// Resume tells the machine what has changed.
	Resume(r *guestwire.Resume) error
	// Shutdown ends all processes and makes the disks safe, then calls reply,
	// which returns once the host has read all (or does not read), and ends the
	// machine. It returns only when it could not.
	Shutdown(s *guestwire.Shutdown, reply func()) error
}

// Options of Serve. The zero value serves execs of this very machine.
type Options struct {
	Root     string                    // where files are written and programs run; "" = "/"
	Reaper   *reap.Reaper              // nil = one that leaves other children alone
	System   System                    // nil = Setup only keeps its Env, Shutdown ends Serve
	Cgroup   string                    // see exec.Options
	LastPath string                    // see exec.Options
	Grace    time.Duration             // see exec.Options
	Log      io.Writer                 // what no request can be told; nil = nowhere
	Fatal    func(v any, stack []byte) // a goroutine's panic; nil = panic on

	// Dial connects for OpDial; nil = net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// server is one agent: its state outlives sessions.
type server struct {
	opt   Options
	execs *exec.Server
	end   context.CancelCauseFunc

	timerKHz int // see checkTimer; 0 = unknown; set before the first session

	system sync.Mutex // one Setup, Resume or Shutdown at a time

	mu    sync.Mutex
	env   []string
	ready bool
	sess  *yamux.Session // the last one; nil before the first

	layer atomic.Pointer[layer] // of a work tree in memory; nil = there is none

	recording sync.Mutex
	recorder  *atop.Recorder // nil: none was asked for
	sampled   []byte         // room for the next sample
}

// errShutdown ends a Serve without a System.
var errShutdown = errors.New("agent: shutdown was asked for")

// Serve answers on every connection of ln, each a yamux session, until ctx
// ends or ln fails. Whatever a connection carries, Serve goes on with the
// next one.
func Serve(ctx context.Context, ln net.Listener, o Options) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := newServer(o, cancel)
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	var sessions sync.WaitGroup
	defer sessions.Wait()
	defer s.execs.KillAll()
	for {
		conn, err := ln.Accept()
		if err != nil {
			if errors.Is(context.Cause(ctx), errShutdown) {
				return nil
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("accepting a connection of the host: %w", err)
		}
		sessions.Add(1)
		s.guard("session", func() {
			defer sessions.Done()
			s.session(ctx, conn)
		})
	}
}

func newServer(o Options, end context.CancelCauseFunc) *server {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.Reaper == nil {
		o.Reaper = reap.New(false)
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{Timeout: 30 * time.Second}).DialContext
	}
	s := &server{opt: o, end: end}
	s.execs = exec.NewServer(exec.Options{
		Root: o.Root, Reaper: o.Reaper, BaseEnv: s.baseEnv, Hostname: hostname,
		LastPath: o.LastPath, Cgroup: o.Cgroup, Grace: o.Grace, Guard: s.guard, Logf: s.logf,
	})
	return s
}

func hostname() string {
	h, err := os.Hostname()
	if err != nil {
		return ""
	}
	return h
}

func (s *server) baseEnv() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.env
}

func (s *server) logf(format string, a ...any) {
	if s.opt.Log != nil {
		fmt.Fprintf(s.opt.Log, "vk-agent: "+format+"\n", a...)
	}
}

// guard runs f in a goroutine whose panic is told to Options.Fatal.
func (s *server) guard(_ string, f func()) {
	go func() {
		if s.opt.Fatal != nil {
			defer func() {
				if v := recover(); v != nil {
					s.opt.Fatal(v, debug.Stack())
				}
			}()
		}
		f()
	}()
}

// session serves one connection until it ends.
func (s *server) session(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	frames := guestwire.JoinFrames(conn)
	frames.HoldAccepts()
	sess, err := yamux.Server(frames, guestwire.MuxConfig())
	if err != nil {
		s.logf("session: %v", err)
		return
	}
	stop := context.AfterFunc(ctx, func() { sess.Close() })
	defer stop()
	defer sess.Close()
	s.mu.Lock()
	s.sess = sess
	s.mu.Unlock()
	var streams sync.WaitGroup
	defer streams.Wait()
	defer sess.Close() // before the wait: streams end with the session
	for {
		st, err := sess.AcceptStream()
		if err != nil {
			return
		}
		streams.Add(1)
		s.guard("stream", func() {
			defer streams.Done()
			s.stream(ctx, st, frames)
		})
	}
}

// headerLimit is how long a stream may be open before it says what it is.
const headerLimit = 60 * time.Second

// beginning reads a stream's first frame. A long one needs more of the window
// than its sender has before the stream is accepted.
type beginning struct {
	io.Reader
	frames *guestwire.Frames
}

func (b beginning) Read(p []byte) (int, error) {
	if len(p) > guestwire.OpenWindow/4 {
		b.frames.Flush()
	}
	return b.Reader.Read(p)
}

// stream serves one request.
func (s *server) stream(ctx context.Context, st *yamux.Stream, frames *guestwire.Frames) {
	st.SetReadDeadline(time.Now().Add(headerLimit))
	var h guestwire.Header
	if err := guestwire.Recv(beginning{st, frames}, &h); err != nil {
		if !errors.Is(err, io.EOF) {
			s.logf("stream: %v", err)
		}
		st.Close()
		return
	}
	st.SetReadDeadline(time.Time{})
	switch h.Op {
	case guestwire.OpStdio: // lives on with its exec
		s.execs.ServeStdio(st, frames, h.Body)
		return
	case guestwire.OpExec:
		s.execs.ServeExec(st, frames, h.Body)
		return
	}
	defer st.Close()
	switch h.Op {
	case guestwire.OpHello:
		s.hello(st)
	case guestwire.OpPing:
		guestwire.Send(st, s.pulse())
	case guestwire.OpVictims:
		v, err := s.victims()
		if err != nil {
			v.Err = err.Error()
		}
		guestwire.Send(st, v)
	case guestwire.OpSetup:
		s.setup(st, h.Body)
	case guestwire.OpResume:
		s.resume(st, h.Body)
	case guestwire.OpShutdown:
		s.shutdown(st, h.Body)
	case guestwire.OpDial:
		s.dial(ctx, st, h.Body)
	case guestwire.OpWrite:
		frames.Flush() // nothing is said until the last byte has come
		reply(st, s.writeFile(st, h.Body))
	case guestwire.OpSample:
		s.sample(st)
	default:
		reply(st, fmt.Errorf("op %q is unknown to agent build %q", h.Op, version.Build))
	}
}

func reply(w io.Writer, err error) {
	var rep guestwire.Reply
	if err != nil {
		rep.Err = err.Error()
	}
	guestwire.Send(w, rep)
}

func decode(op string, body json.RawMessage, v any) error {
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("decoding %s: %w", op, err)
	}
	return nil
}

func (s *server) hello(st net.Conn) {
	s.mu.Lock()
	ready := s.ready
	s.mu.Unlock()
	guestwire.Send(st, guestwire.HelloReply{
		Build: version.Build, Kernel: kernelRelease(), UptimeMS: uptimeMS(), Ready: ready, TimerKHz: s.timerKHz,
	})
}

func (s *server) setup(st net.Conn, body json.RawMessage) {
	s.system.Lock()
	defer s.system.Unlock()
	var m guestwire.Setup
	err := decode(guestwire.OpSetup, body, &m)
	s.mu.Lock()
	if err == nil && s.ready {
		err = errors.New("this guest has been set up already")
	}
	s.mu.Unlock()
	var linked []string
	if err == nil && s.opt.System != nil {
		linked, err = s.opt.System.Setup(&m, func(stage string) {
			guestwire.Send(st, guestwire.Progress{Stage: stage})
		})
	}
	if err == nil && m.Record {
		s.record()
	}
	p := guestwire.Progress{Done: true, Linked: linked}
	if err != nil {
		p.Err = err.Error()
	} else {
		s.mu.Lock()
		s.env, s.ready = m.Env, true
		s.mu.Unlock()
	}
	guestwire.Send(st, p)
}

func (s *server) resume(st net.Conn, body json.RawMessage) {
	s.system.Lock()
	defer s.system.Unlock()
	var m guestwire.Resume
	err := decode(guestwire.OpResume, body, &m)
	if err == nil && s.opt.System != nil {
		err = s.opt.System.Resume(&m)
	}
	reply(st, err)
}

func (s *server) shutdown(st net.Conn, body json.RawMessage) {
	s.system.Lock()
	defer s.system.Unlock()
	var m guestwire.Shutdown
	err := decode(guestwire.OpShutdown, body, &m)
	if err == nil && s.opt.System != nil {
		err = s.opt.System.Shutdown(&m, func() {
			s.lastWords(func() { reply(st, nil); st.Close() })
		})
	}
	reply(st, err)
	if err == nil && s.opt.System == nil {
		st.Close()
		s.end(errShutdown)
	}
}

// farewell is how long a guest that ends waits for its host to read on.
const farewell = 3 * time.Second

// lastWords sees to it that the host has read what the ended programs wrote,
// and what reply says, or has shown for a while that it does not read. Linux
// 6.12 resets its virtio devices at shutdown, and takes back what lies in a
// queue of a port.
func (s *server) lastWords(reply func()) {
	deadline := time.Now().Add(farewell)
	for s.execs.Telling() && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	reply()
	s.mu.Lock()
	sess := s.sess
	s.mu.Unlock()
	if sess == nil {
		return
	}
	heard := make(chan struct{})
	go func() {
		sess.Ping() // its own limit is the channel's, of minutes; an error is as good an end
		close(heard)
	}()
	select {
	case <-heard:
	case <-time.After(time.Until(deadline)):
	}
}

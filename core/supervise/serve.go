package supervise

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/logx"
)

// clients are the connections to sup.sock.
type clients struct {
	l *net.UnixListener

	telling  group // waiters that have not heard of the end yet
	draining group // splices whose guest's output may still be under way

	mu     sync.Mutex
	held   []net.Conn // closed by the supervisor's end
	joined time.Time  // when the last splice ended

	asked chan struct{} // somebody was told of the end
	came  atomic.Int64  // how many there were
}

// Limits of linger.
const (
	lingerMax  = time.Second
	lingerIdle = 100 * time.Millisecond
)

// linger gives clients whose streams ended with the guest the time to come
// back and ask why.
func (c *clients) linger() {
	c.mu.Lock()
	recent := time.Since(c.joined) < 2*time.Second
	c.mu.Unlock()
	if !recent {
		return
	}
	end := time.After(lingerMax)
	var idle <-chan time.Time // from the first that asked
	for {
		select {
		case <-c.asked:
			idle = time.After(lingerIdle)
		case <-idle:
			return
		case <-end:
			return
		}
	}
}

func (c *clients) sawEnd(s State) {
	if s.Phase == Ended {
		select {
		case c.asked <- struct{}{}:
		default:
		}
	}
}

func (c *clients) hold(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = append(c.held, conn)
}

func (c *clients) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.held {
		conn.Close()
	}
}

// group counts like a sync.WaitGroup, but may be waited for with a limit and
// added to meanwhile.
type group struct {
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed when n falls to 0; nil when nobody waits
}

func (g *group) add() {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
}

func (g *group) done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n == 0 && g.zero != nil {
		close(g.zero)
		g.zero = nil
	}
}

func (g *group) wait(limit time.Duration) bool {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return true
	}
	if g.zero == nil {
		g.zero = make(chan struct{})
	}
	zero := g.zero
	g.mu.Unlock()
	select {
	case <-zero:
		return true
	case <-time.After(limit):
		return false
	}
}

func (c *clients) told(limit time.Duration)  { c.telling.wait(limit) }
func (c *clients) drain(limit time.Duration) { c.draining.wait(limit) }

func (c *clients) stopListening() {
	if c.l != nil {
		c.l.Close()
	}
}

// serve accepts until the listener closes.
func (c *clients) serve(l *net.UnixListener, s *supervisor) {
	c.l = l
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				s.log.Warn("accepting a client", logx.Err, err)
				time.Sleep(50 * time.Millisecond) // out of descriptors: do not spin
				continue
			}
			go s.client(conn)
		}
	}()
}

// allowed tells whether the peer may command this guest.
func allowed(conn *net.UnixConn) bool {
	rc, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	rc.Control(func(fd uintptr) {
		cr, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		ok = err == nil && (cr.Uid == 0 || int(cr.Uid) == os.Geteuid())
	})
	return ok
}

// client serves one connection.
func (s *supervisor) client(conn *net.UnixConn) {
	s.clients.came.Add(1)
	if !allowed(conn) {
		s.log.Warn("refused a client of another user")
		conn.Close()
		return
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	var r request
	if err := guestwire.Recv(conn, &r); err != nil {
		conn.Close()
		return
	}
	conn.SetReadDeadline(time.Time{})
	hold := false
	switch r.Op {
	case opGuest:
		s.joinGuest(conn)
	case opState:
		st := s.board.get()
		tell(conn, answer{State: &st, Done: true}, nil)
		s.clients.sawEnd(st)
	case opWait:
		s.follow(conn, func(st State) bool { return phaseIndex(st.Phase) >= phaseIndex(r.Until) })
	case opStop, opKill:
		// The connection stays until the process ends: its closing tells so.
		hold = true
		s.clients.hold(conn)
		if r.Op == opKill {
			s.killNow()
		}
		s.end(&ending{reason: ReasonStopped, detail: r.Op, grace: r.Grace})
		s.follow(conn, func(State) bool { return false })
	case opReboot:
		s.reboot(conn, r)
	case opBegin:
		s.trial.CompareAndSwap(onTrial, trialOver)
		s.follow(conn, func(st State) bool { return phaseIndex(st.Phase) >= phaseIndex(Running) })
	case opPublish, opUnpublish:
		p, err := s.publish(r)
		tell(conn, answer{Publish: p, Done: true}, err)
	case opSample:
		tell(conn, answer{Done: true}, s.sampleNow())
	case opEgress:
		tell(conn, answer{Done: true}, s.egress.ask(r.Stage))
	case opUsage:
		u, err := s.usage()
		tell(conn, answer{Usage: u, Done: true}, err)
	default:
		tell(conn, answer{Done: true}, fault.Newf(fault.Usage, "unknown request %q", r.Op))
	}
	if hold {
		// Until the client goes; the kernel closes the rest with the process.
		io.Copy(io.Discard, conn)
	}
	conn.Close()
}

func tell(conn net.Conn, a answer, err error) error {
	if err != nil {
		a.Err, a.Kind, a.Hint, a.Done = err.Error(), string(fault.KindOf(err)), fault.HintOf(err), true
	}
	conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	defer conn.SetWriteDeadline(time.Time{})
	return guestwire.Send(conn, a)
}

// phaseIndex orders phases.
func phaseIndex(p Phase) int {
	switch p {
	case Starting:
		return 1
	case Booting:
		return 2
	case Running:
		return 3
	case Stopping:
		return 4
	case Ended:
		return 5
	}
	return 0
}

// follow sends the state at each change, until reached or the end.
func (s *supervisor) follow(conn *net.UnixConn, reached func(State) bool) {
	s.clients.telling.add()
	defer s.clients.telling.done()
	gone := make(chan struct{})
	go func() {
		if hungUp(conn) {
			close(gone)
		}
	}()
	for {
		st, changed := s.board.snapshot()
		done := st.Phase == Ended || reached(st)
		err := tell(conn, answer{State: &st, Done: done}, nil)
		s.clients.sawEnd(st)
		if err != nil || done {
			return
		}
		select {
		case <-changed:
		case <-gone:
			return
		}
	}
}

// joinGuest makes the connection a stream of the agent.
func (s *supervisor) joinGuest(conn *net.UnixConn) {
	g := s.current()
	if p := s.board.get().Phase; g == nil || p != Running && p != Stopping {
		return
	}
	st, err := g.ch.session().OpenStream()
	if err != nil {
		return
	}
	s.clients.draining.add()
	defer s.clients.draining.done()
	splice(conn, &agentStream{Stream: st})
	s.clients.mu.Lock()
	s.clients.joined = time.Now()
	s.clients.mu.Unlock()
}

// reboot asks the agent to reboot and follows until the guest runs again.
func (s *supervisor) reboot(conn *net.UnixConn, r request) {
	st := s.board.get()
	g := s.current()
	if g == nil || st.Phase != Running {
		tell(conn, answer{}, fault.Newf(fault.Conflict, "guest %s is %s, it cannot be rebooted", s.spec.Name, st.Phase))
		return
	}
	grace := r.Grace
	if grace <= 0 {
		grace = s.d.Times.Grace
	}
	ctx, cancel := contextFor(grace + s.d.Times.Power)
	defer cancel()
	err := bounded(ctx, func(ctx context.Context) error {
		return g.ch.client().Shutdown(ctx, guestwire.Shutdown{Reboot: true, Grace: grace})
	})
	if err != nil {
		tell(conn, answer{}, fault.Newf(fault.System, "asking guest %s to reboot", s.spec.Name).Because(err))
		return
	}
	s.follow(conn, func(now State) bool { return now.Phase == Running && now.Boots > st.Boots })
}

func (s *supervisor) publish(r request) (*Publish, error) {
	if r.Publish == nil {
		return nil, fault.New(fault.Usage, "no port was given")
	}
	if s.spec.Net.Mode == "none" {
		return nil, fault.Newf(fault.Conflict, "guest %s has no network", s.spec.Name).Hint("start it without --net none")
	}
	if p := s.board.get().Phase; p != Running && p != Booting {
		return nil, fault.Newf(fault.Conflict, "guest %s is %s", s.spec.Name, p)
	}
	asked := r.Publish.Filled()
	if r.Op == opUnpublish {
		if err := s.port.Unpublish(asked); err != nil {
			return nil, err
		}
		s.board.update(func(st *State) { st.Publish = without(st.Publish, asked) })
		return nil, nil
	}
	ctx, cancel := contextFor(10 * time.Second)
	defer cancel()
	p, err := s.port.Publish(ctx, asked)
	if err != nil {
		return nil, err
	}
	s.board.update(func(st *State) { st.Publish = append(st.Publish[:len(st.Publish):len(st.Publish)], p) })
	return &p, nil
}

func without(all []Publish, p Publish) []Publish {
	var out []Publish
	for _, q := range all {
		if q != p {
			out = append(out, q)
		}
	}
	return out
}

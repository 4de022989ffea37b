package hub

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Conn is a node's connection: whole messages. *wsx.Conn is one.
type Conn interface {
	Read(ctx context.Context) ([]byte, error)
	// Write may be called by several goroutines.
	Write(ctx context.Context, data []byte) error
	Close(code int, reason string) error
	CloseNow()
}

// Close codes of RFC 6455 that a session ends with.
const (
	closeNormal = 1000
	closePolicy = 1008
)

// writeStep is how long a node may take to receive a message.
const writeStep = 10 * time.Second

// Peer is who is at the other end of a Conn.
type Peer struct {
	Channel []byte // what signatures are bound to, wire.Channel
	Remote  string // address, for the log
	// Authenticated is called once the node has proved who it is; nil = not
	// wanted. A connection counts as unauthenticated until then.
	Authenticated func()
}

// Session is a node's connection after the handshake.
type Session struct {
	h       *Hub
	c       Conn
	node    string
	version int
	inc     string
	began   time.Time     // by the monotonic clock: the wall's may jump
	heard   atomic.Int64  // since began, when a message was read last
	spoke   atomic.Int64  // since began, when one was sent last
	due     atomic.Bool   // the writer is to send a ping
	wake    chan struct{} // of capacity 1
	cancel  context.CancelCauseFunc
	live    *Live

	mu       sync.Mutex
	reported bool            // the first report was taken
	desired  string          // id of the desired state that was sent
	sent     map[string]bool // commands that were sent

	outMu  sync.Mutex     // not mu, which is held while a node is written to
	outbox []wire.Message // to be sent by the writer
	ended  bool           // nothing more is taken into outbox
}

// errEnd is why the hub ends a session; its code is told to the node.
type errEnd struct{ Closing wire.Closing }

func (e *errEnd) Error() string { return string(e.Closing.Code) + ": " + e.Closing.Message }

func end(code wire.Refusal, format string, a ...any) *errEnd {
	return &errEnd{wire.Closing{Code: code, Message: fmt.Sprintf(format, a...)}}
}

// Serve runs a node's connection until it ends, and closes it. The error says
// why it ended, for the log; it is never nil.
func (h *Hub) Serve(ctx context.Context, c Conn, p Peer) error {
	defer c.CloseNow()
	s, err := h.handshake(ctx, c, p)
	if err != nil {
		h.Stats.Refused.Add(1)
		if r, ok := errors.AsType[*RefusedError](err); ok {
			h.send(ctx, c, 0, &wire.Refused{Code: r.Code, Message: r.Text})
			c.Close(closePolicy, string(r.Code))
			h.log.Warn("session refused", "remote", p.Remote, "code", r.Code, logx.Err, r.Text)
		}
		return err
	}
	if p.Authenticated != nil {
		p.Authenticated()
	}
	ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)
	if err := h.attach(ctx, s); err != nil {
		return s.finish(err)
	}
	defer h.detach(s)
	h.Stats.Sessions.Add(1)
	h.log.Info("session begun", logx.Node, s.node, "version", s.version, "remote", p.Remote)
	welcome := &wire.Welcome{Hub: h.id, HeartbeatSecs: max(1, int(h.o.Heartbeat/time.Second)), Time: h.o.Now().Unix()}
	if err := s.send(ctx, welcome); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.write(ctx)
		err = s.finish(context.Cause(ctx))
	}()
	// The connection would go with the context of a read, before the node is
	// told why: the writer ends it.
	s.cancel(s.read(context.WithoutCancel(ctx), ctx))
	<-done
	h.log.Info("session ended", logx.Node, s.node, logx.Err, err)
	return err
}

// finish tells the node why the hub ends the session, and closes the
// connection, which ends the reader. It detaches first: a node that is cut off
// does not agree to the end, and would be shown as connected until that is
// waited for in vain.
func (s *Session) finish(err error) error {
	s.h.detach(s)
	s.outMu.Lock()
	s.ended = true
	s.outMu.Unlock()
	e := endOf(err)
	if e == nil {
		s.c.CloseNow() // the connection broke
		return err
	}
	if e.Closing.Code == wire.Silent {
		s.h.Stats.Silent.Add(1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeStep)
	defer cancel()
	if s.h.send(ctx, s.c, s.version, &e.Closing) == nil {
		s.c.Close(closeNormal, string(e.Closing.Code))
	}
	s.c.CloseNow()
	return err
}

// endOf is what to tell a peer of why its session ends, nil when there is
// nobody to tell.
func endOf(err error) *errEnd {
	e, ok := errors.AsType[*errEnd](err)
	switch {
	case ok:
		return e
	case errors.Is(err, wire.ErrProtocol):
		return end(wire.ProtocolErr, "%s", wire.Clean(err.Error(), wire.MaxText))
	case errors.Is(err, context.Canceled), errors.Is(err, errStopped):
		return end(wire.Shutdown, "the hub is stopping")
	case fault.KindOf(err) == fault.Unavailable:
		return end(wire.Internal, "%s", wire.Clean(err.Error(), wire.MaxText))
	}
	return nil
}

func (h *Hub) send(ctx context.Context, c Conn, version int, m wire.Message) error {
	b, err := wire.Encode(version, m)
	if err != nil {
		return fmt.Errorf("encoding a message: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, writeStep)
	defer cancel()
	return c.Write(ctx, b)
}

// send writes to the node.
func (s *Session) send(ctx context.Context, m wire.Message) error {
	if err := s.h.send(ctx, s.c, s.version, m); err != nil {
		return err
	}
	s.spoke.Store(int64(time.Since(s.began)))
	return nil
}

// quiet is for how long the node was sent nothing.
func (s *Session) quiet() time.Duration { return time.Since(s.began) - time.Duration(s.spoke.Load()) }

// step reads one message of the handshake, within its time.
func step[M wire.Message](ctx context.Context, c Conn) (m M, err error) {
	ctx, cancel := context.WithTimeout(ctx, wire.HandshakeStep)
	defer cancel()
	b, err := c.Read(ctx)
	if err != nil {
		return m, err
	}
	msg, err := wire.Decode(wire.FromNode, 0, b)
	if err != nil {
		return m, refuse(wire.ProtocolErr, "%s", wire.Clean(err.Error(), wire.MaxText))
	}
	m, ok := msg.(M)
	if !ok {
		return m, refuse(wire.ProtocolErr, "a %T was expected", m)
	}
	return m, nil
}

// handshake proves who the node is. It changes nothing.
func (h *Hub) handshake(ctx context.Context, c Conn, p Peer) (*Session, error) {
	var live *Live
	hello, version, err := h.prove(ctx, c, p, h.o.Versions, func(id string) (ed25519.PublicKey, error) {
		snap := h.Snapshot()
		n := snap.Nodes[id]
		if n == nil {
			if rv, ok := snap.revoked[id]; ok {
				return nil, refuse(wire.Revoked, "the node was removed at %s: join with --replace", stamp(rv.At))
			}
			return nil, refuse(wire.NotEnrolled, "this hub has no node %s", id)
		}
		live = n.Live
		return n.Key, nil
	})
	if err != nil {
		return nil, err
	}
	return &Session{h: h, c: c, node: hello.Node, version: version, inc: hello.Incarnation, began: time.Now(),
		wake: make(chan struct{}, 1), live: live, sent: map[string]bool{}}, nil
}

// prove runs the handshake that every peer shares: find gives the key of an ID,
// or refuses it.
func (h *Hub) prove(ctx context.Context, c Conn, p Peer, versions wire.Range, find func(id string) (ed25519.PublicKey, error)) (*wire.Hello, int, error) {
	hello, err := step[*wire.Hello](ctx, c)
	if err != nil {
		return nil, 0, err
	}
	version, ok := wire.Negotiate(versions, hello.Versions)
	if !ok {
		return nil, 0, refuse(wire.NoVersion, "the peer speaks versions %v, this hub %v", hello.Versions, versions)
	}
	ch := &wire.Challenge{Nonce: wire.NewHex(wire.NonceLen), Versions: versions, Version: version}
	if err := h.send(ctx, c, 0, ch); err != nil {
		return nil, 0, err
	}
	auth, err := step[*wire.Auth](ctx, c)
	if err != nil {
		return nil, 0, err
	}
	key, err := find(hello.Node)
	if err != nil {
		return nil, 0, err
	}
	payload, err := wire.AuthPayload(hello, ch, p.Channel)
	if err != nil {
		return nil, 0, refuse(wire.ProtocolErr, "%v", err)
	}
	sig, err := wire.ParseHex("signature", auth.Signature, wire.SignatureLen)
	if err != nil || !ed25519.Verify(key, payload, sig) {
		return nil, 0, refuse(wire.BadSignature, "the signature is not that of the peer's key over this connection; a proxy that terminates TLS breaks it")
	}
	return hello, version, nil
}

// attach makes s its node's session; an older one is superseded.
func (h *Hub) attach(ctx context.Context, s *Session) error {
	n := h.Snapshot().Nodes[s.node]
	if n != nil && (n.Version != s.version || n.Incarnation != s.inc) {
		err := h.do(ctx, func(t *tx) error {
			n := t.s.Nodes[s.node]
			if n == nil {
				return nil
			}
			r := *n.Record
			if r.Version != s.version && (r.Version == wire.VersionMonitor || s.version == wire.VersionMonitor || r.Version == 0) {
				t.audit(n.ID, "node", "connected", fmt.Sprintf("protocol version %d", s.version))
			}
			r.Version, r.Incarnation = s.version, s.inc
			if s.version < wire.VersionSteer {
				r.State = nil // it reports none, and an old one would pass for its own
			}
			t.put(n, r)
			return nil
		})
		if err != nil {
			return err
		}
	}
	h.sessMu.Lock()
	old := h.sessions[s.node]
	h.sessions[s.node] = s
	s.live.up.Store(s)
	h.sessMu.Unlock()
	s.live.seen.Store(h.o.Now().UnixMilli())
	if old != nil {
		h.Stats.Superseded.Add(1)
		old.cancel(end(wire.Superseded, "the node has connected again"))
		h.jobs.detach(old)
	}
	h.jobs.attach(s)
	if h.Snapshot().Nodes[s.node] == nil { // removed after the handshake looked
		h.detach(s)
		return end(wire.Revoked, "the node was removed")
	}
	h.publish([]Event{{At: h.o.Now().Unix(), Node: s.node, Kind: "session", Text: "begun"}})
	return nil
}

func (h *Hub) detach(s *Session) {
	h.sessMu.Lock()
	mine := h.sessions[s.node] == s
	if mine {
		delete(h.sessions, s.node)
		s.live.up.Store(nil)
	}
	h.sessMu.Unlock()
	if mine {
		h.jobs.detach(s)
		h.publish([]Event{{At: h.o.Now().Unix(), Node: s.node, Kind: "session", Text: "ended"}})
	}
}

// forget ends the session of a removed node.
func (h *Hub) forget(node string) {
	h.sessMu.Lock()
	s := h.sessions[node]
	delete(h.dirty, node)
	h.sessMu.Unlock()
	if s != nil {
		s.cancel(end(wire.Revoked, "the node was removed"))
	}
}

// Sessions counts the nodes that are connected.
func (h *Hub) Sessions() int {
	h.sessMu.Lock()
	defer h.sessMu.Unlock()
	return len(h.sessions)
}

func (s *Session) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// read takes the node's messages until something is wrong.
func (s *Session) read(conn, ctx context.Context) error {
	for {
		b, err := s.c.Read(conn)
		if err != nil {
			return err
		}
		s.h.Stats.Messages.Add(1)
		s.h.Stats.Bytes.Add(uint64(len(b)))
		m, err := wire.Decode(wire.FromNode, s.version, b)
		if err != nil {
			return err
		}
		s.live.seen.Store(s.h.o.Now().UnixMilli())
		s.heard.Store(int64(time.Since(s.began)))
		if err := s.take(ctx, m); err != nil {
			return err
		}
	}
}

func (s *Session) take(ctx context.Context, m wire.Message) error {
	h := s.h
	switch m := m.(type) {
	case *wire.Heartbeat:
		if n := h.Snapshot().Nodes[s.node]; n != nil {
			h.beat(n, m)
		}
		// The ping of the interval goes out here: waking the writer for it costs
		// a hub of many nodes more than the ping.
		if s.quiet() >= h.o.Heartbeat*3/4 {
			if err := s.send(ctx, &wire.Ping{}); err != nil {
				return fmt.Errorf("sending a ping: %w", err)
			}
		}
	case *wire.Inventory:
		h.later(s.node, func(p *pending) { p.inventory = m })
	case *wire.Report:
		if err := h.report(ctx, s.node, m); err != nil {
			return err
		}
		s.mu.Lock()
		first := !s.reported
		s.reported = true
		s.mu.Unlock()
		if first {
			s.wakeUp()
		}
	case *wire.Ack:
		if err := h.ack(ctx, s.node, m); err != nil {
			return err
		}
		return s.send(ctx, &wire.Recorded{Command: m.Command, Outcome: m.Outcome})
	case *wire.Hello, *wire.Auth:
		return fmt.Errorf("%w: a message of the handshake in a session", wire.ErrProtocol)
	default:
		return h.jobMessage(ctx, s, m)
	}
	return nil
}

// post has the session's writer send messages, in order. It says whether the
// session was still there to do so.
func (s *Session) post(ms ...wire.Message) bool {
	s.outMu.Lock()
	ok := !s.ended
	if ok {
		s.outbox = append(s.outbox, ms...)
	}
	s.outMu.Unlock()
	s.wakeUp()
	return ok
}

// flush sends what was posted.
func (s *Session) flush(ctx context.Context) error {
	for {
		s.outMu.Lock()
		out := s.outbox
		s.outbox = nil
		s.outMu.Unlock()
		if len(out) == 0 {
			return nil
		}
		for _, m := range out {
			if err := s.send(ctx, m); err != nil {
				return err
			}
		}
	}
}

// watch ends the sessions of nodes that are silent, and has the writers of
// those that were told nothing for a while send a ping, until ctx ends.
func (h *Hub) watch(ctx context.Context) {
	tick := time.NewTicker(h.o.Heartbeat / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		h.sessMu.Lock()
		for _, s := range h.sessions {
			switch silent := time.Since(s.began) - time.Duration(s.heard.Load()); {
			case silent >= wire.MissedBeats*h.o.Heartbeat:
				s.cancel(end(wire.Silent, "nothing was heard for %d heartbeats", wire.MissedBeats))
			case s.quiet() >= h.o.Heartbeat*5/4: // later than what answers a heartbeat
				s.due.Store(true)
				s.wakeUp()
			}
		}
		h.sessMu.Unlock()
	}
}

// write sends what steers the node, and pings to one that sends no heartbeats.
func (s *Session) write(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			if s.due.Swap(false) {
				if err := s.send(ctx, &wire.Ping{}); err != nil {
					s.cancel(fmt.Errorf("sending a ping: %w", err))
					return
				}
			}
			if err := s.steer(ctx); err != nil {
				s.cancel(fmt.Errorf("steering: %w", err))
				return
			}
			if err := s.flush(ctx); err != nil {
				s.cancel(fmt.Errorf("sending what is of placed jobs: %w", err))
				return
			}
		}
	}
}

// steer sends the desired state when the node's is older, once per generation,
// and each open command once per session. Nothing goes out before the node's
// first report, below version 2, or in a recovery conflict.
func (s *Session) steer(ctx context.Context) error {
	if s.version < wire.VersionSteer {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.h.Snapshot().Nodes[s.node]
	if n == nil || !s.reported || n.Conflict != nil || n.State == nil {
		return nil
	}
	var gen uint64
	if a := n.State.Applied; a != nil {
		gen = a.Generation
	}
	if n.Desired.Generation > gen && s.desired != n.Desired.ID {
		if err := s.send(ctx, &n.Desired); err != nil {
			return err
		}
		s.desired = n.Desired.ID
	}
	now := s.h.o.Now().Unix()
	for _, c := range n.Open {
		if s.sent[c.ID] || c.Outcome == "" && c.Expires <= now || c.Op.Since() > s.version {
			continue
		}
		m := c.Command
		m.Sent = now
		if err := s.send(ctx, &m); err != nil {
			return err
		}
		s.sent[c.ID] = true
	}
	return nil
}

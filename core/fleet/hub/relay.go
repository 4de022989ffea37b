package hub

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// RelayNode is a relay of a Snapshot.
type RelayNode struct {
	*Relay
	Live *RelayLive // shared by all snapshots
}

// RelayLive is what a relay says as it says it.
type RelayLive struct {
	seen atomic.Int64 // Unix seconds
	up   atomic.Pointer[relaySession]

	mu     sync.Mutex
	beat   *dispatch.Heartbeat
	states map[string]dispatch.RunnerState
	dirty  bool
}

// Seen is when the relay was last heard of, zero for never.
func (l *RelayLive) Seen() int64 { return l.seen.Load() }

// Connected says whether the relay has a session.
func (l *RelayLive) Connected() bool { return l.up.Load() != nil }

// Now is the relay's latest heartbeat, nil for none, and its runners' states.
func (l *RelayLive) Now() (*dispatch.Heartbeat, []dispatch.RunnerState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []dispatch.RunnerState
	for _, name := range slices.Sorted(maps.Keys(l.states)) {
		out = append(out, l.states[name])
	}
	return l.beat, out
}

// loadPeers fills a snapshot with relays, servers, projects and keys.
func (h *Hub) loadPeers(s *Snapshot, l *LoadedJobs) {
	s.Relays, s.Servers, s.Projects, s.Keys, s.dropped = map[string]*RelayNode{}, map[string]Server{}, map[ProjectKey]Project{}, map[string]Key{}, map[string]Revoked{}
	s.Settings, s.Rules = l.Settings, map[string]EgressRule{}
	for _, r := range l.Rules {
		s.Rules[r.Name] = r
	}
	for _, r := range l.Relays {
		live := &RelayLive{beat: r.Beat, states: map[string]dispatch.RunnerState{}}
		live.seen.Store(r.Seen)
		for _, st := range r.States {
			live.states[st.Runner] = st
		}
		s.Relays[r.ID] = &RelayNode{r, live}
	}
	for _, v := range l.Servers {
		s.Servers[v.URL] = v
	}
	for _, p := range l.Projects {
		s.Projects[ProjectKey{p.Instance, p.ID}] = p
	}
	for _, k := range l.Keys {
		s.Keys[k.Hash] = k
	}
	for _, r := range l.Dropped {
		s.dropped[r.Node] = r
	}
	h.relays.list = map[string]*relaySession{}
}

// relaySessions are those of the relays that are connected.
type relaySessions struct {
	mu   sync.Mutex
	list map[string]*relaySession
}

// tell wakes the sessions when servers were decided on, or a relay changed.
func (r *relaySessions) tell(events []Event) {
	for _, e := range events {
		if e.Kind != "server" && e.Kind != "relay" {
			continue
		}
		r.mu.Lock()
		for _, s := range r.list {
			s.wakeUp()
		}
		r.mu.Unlock()
		return
	}
}

// relaySession is a relay's connection after the handshake.
type relaySession struct {
	h      *Hub
	c      Conn
	relay  string
	began  time.Time
	heard  atomic.Int64 // since began
	wake   chan struct{}
	cancel context.CancelCauseFunc
	live   *RelayLive

	told dispatch.ServerStatus // of the writer
	has  atomic.Bool           // an inventory was taken
}

func (s *relaySession) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// putRelay stores a relay's new record.
func (t *tx) putRelay(n *RelayNode, r Relay) *RelayNode {
	t.touched++
	own(&t.s.Relays, &t.ownRelays)
	c := &RelayNode{&r, n.Live}
	t.s.Relays[r.ID] = c
	t.b.Relays = append(t.b.Relays, &r)
	return c
}

// own makes a snapshot's map this tx's.
func own[K comparable, V any](m *map[K]V, is *bool) {
	if !*is {
		*m, *is = maps.Clone(*m), true
		if *m == nil {
			*m = map[K]V{}
		}
	}
}

// EnrollRelay pins the key of a vk-gitlab that holds a token of the kind
// gitlab. As Enroll is for nodes; refusals are *RefusedError.
func (h *Hub) EnrollRelay(ctx context.Context, r *dispatch.EnrollRequest, channel []byte, remote string) (*dispatch.EnrollReply, error) {
	if err := r.Check(); err != nil {
		return nil, refuse(wire.BadRequest, "%v", err)
	}
	key, err := proven(r.PublicKey, r.Signature, func(key ed25519.PublicKey) []byte { return wire.RelayEnrollPayload(r.Token, key, channel) })
	if err != nil {
		return nil, err
	}
	reply := &dispatch.EnrollReply{Hub: h.id}
	err = h.do(ctx, func(t *tx) error {
		tok, err := t.spendable(r.Token, TokenGitLab)
		if err != nil {
			return err
		}
		for _, rv := range t.s.dropped {
			if rv.Key.Equal(ed25519.PublicKey(key)) {
				return refuse(wire.KeyRevoked, "the key's relay %s was removed at %s: join with --replace", rv.Node, stamp(rv.At))
			}
		}
		name := wire.Clean(r.Hostname, wire.MaxText)
		rec, event := Relay{ID: wire.NewID(), Key: key, Name: name, Enrolled: t.unix()}, "relay enrolled"
		n := &RelayNode{Live: &RelayLive{states: map[string]dispatch.RunnerState{}}}
		for _, old := range t.s.Relays {
			if old.Key.Equal(ed25519.PublicKey(key)) {
				n, rec, event, reply.Again = old, *old.Relay, "relay enrolled again", true
				if name != "" {
					rec.Name = name
				}
			}
		}
		reply.Relay = rec.ID
		t.putRelay(n, rec)
		tok.Spent, tok.Node = t.unix(), rec.ID
		t.token(tok)
		t.audit("", "token "+tok.Hash[:8], event, fmt.Sprintf("relay %s, %s, from %s, token of %s", rec.ID, name, remote, tok.Actor))
		t.event("", "relay", event)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// FindRelay finds a relay by its ID, 8 digits of one or more, or its hostname.
func (s *Snapshot) FindRelay(name string) (*RelayNode, error) {
	if r := s.Relays[name]; r != nil {
		return r, nil
	}
	var found []*RelayNode
	for _, r := range s.Relays {
		if len(name) >= 8 && strings.HasPrefix(r.ID, name) || name != "" && r.Name == name {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return nil, fault.Newf(fault.NotFound, "no relay %q", wire.Clean(name, 80)).Hint("vk-hub relays lists them; an ID, 8 of its digits or a hostname is expected")
	case 1:
		return found[0], nil
	}
	return nil, fault.Newf(fault.Conflict, "%q means %d relays", wire.Clean(name, 80), len(found)).Hint("name one by its ID")
}

// RelayList is all relays by name, then ID.
func (s *Snapshot) RelayList() []*RelayNode {
	list := slices.Collect(maps.Values(s.Relays))
	slices.SortFunc(list, func(a, b *RelayNode) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// RemoveRelay unpins a relay's key and ends its session. Its jobs go on; nobody
// follows them any more.
func (h *Hub) RemoveRelay(ctx context.Context, actor, name string) (id string, err error) {
	err = h.do(ctx, func(t *tx) error {
		r, err := t.s.FindRelay(name)
		if err != nil {
			return err
		}
		id = r.ID
		t.touched++
		own(&t.s.Relays, &t.ownRelays)
		own(&t.s.dropped, &t.ownDropped)
		delete(t.s.Relays, id)
		rv := Revoked{Node: id, Key: r.Key, At: t.unix()}
		t.s.dropped[id] = rv
		t.b.Relays = slices.DeleteFunc(t.b.Relays, func(o *Relay) bool { return o.ID == id })
		t.b.DropRelays = append(t.b.DropRelays, rv)
		t.audit("", actor, "relay removed", strings.TrimSpace(id+" "+r.Name))
		t.event("", "relay", "removed")
		t.after = append(t.after, func() {
			if s := r.Live.up.Load(); s != nil {
				s.cancel(end(wire.Revoked, "the relay was removed"))
			}
		})
		return nil
	})
	return id, err
}

// ServeRelay runs a relay's connection until it ends, and closes it. The error
// says why it ended, for the log; it is never nil.
func (h *Hub) ServeRelay(ctx context.Context, c Conn, p Peer) error {
	defer c.CloseNow()
	var live *RelayLive
	hello, _, err := h.prove(ctx, c, p, dispatch.Versions, func(id string) (ed25519.PublicKey, error) {
		snap := h.Snapshot()
		r := snap.Relays[id]
		if r == nil {
			if rv, ok := snap.dropped[id]; ok {
				return nil, refuse(wire.Revoked, "the relay was removed at %s: join with --replace", stamp(rv.At))
			}
			return nil, refuse(wire.NotEnrolled, "this hub has no relay %s", id)
		}
		live = r.Live
		return r.Key, nil
	})
	if err != nil {
		h.Stats.Refused.Add(1)
		if r, ok := errors.AsType[*RefusedError](err); ok {
			h.send(ctx, c, 0, &wire.Refused{Code: r.Code, Message: r.Text})
			c.Close(closePolicy, string(r.Code))
			h.log.Warn("relay's session refused", "remote", p.Remote, "code", r.Code, logx.Err, r.Text)
		}
		return err
	}
	if p.Authenticated != nil {
		p.Authenticated()
	}
	s := &relaySession{h: h, c: c, relay: hello.Node, began: time.Now(), wake: make(chan struct{}, 1), live: live}
	ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)
	h.relays.mu.Lock()
	if old := h.relays.list[s.relay]; old != nil {
		h.Stats.Superseded.Add(1)
		old.cancel(end(wire.Superseded, "the relay has connected again"))
	}
	h.relays.list[s.relay] = s
	live.up.Store(s)
	h.relays.mu.Unlock()
	defer s.detach()
	if h.Snapshot().Relays[s.relay] == nil { // removed after the handshake looked
		return s.finish(end(wire.Revoked, "the relay was removed"))
	}
	live.seen.Store(h.o.Now().Unix())
	h.log.Info("relay's session begun", "relay", s.relay, "remote", p.Remote)
	welcome := &wire.Welcome{Hub: h.id, HeartbeatSecs: max(1, int(h.o.Heartbeat/time.Second)), Time: h.o.Now().Unix()}
	if err := h.send(ctx, c, 1, welcome); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.write(ctx)
		err = s.finish(context.Cause(ctx))
	}()
	s.cancel(s.read(context.WithoutCancel(ctx), ctx))
	<-done
	h.log.Info("relay's session ended", "relay", s.relay, logx.Err, err)
	return err
}

func (s *relaySession) send(ctx context.Context, m dispatch.Message) error {
	b, err := dispatch.Encode(m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeStep)
	defer cancel()
	return s.c.Write(ctx, b)
}

func (s *relaySession) detach() {
	s.h.relays.mu.Lock()
	defer s.h.relays.mu.Unlock()
	if s.h.relays.list[s.relay] == s {
		delete(s.h.relays.list, s.relay)
		s.live.up.Store(nil)
	}
}

// finish tells the relay why the hub ends the session, and closes it, detached
// first as a node's is.
func (s *relaySession) finish(err error) error {
	s.detach()
	e := endOf(err)
	if e == nil {
		s.c.CloseNow()
		return err
	}
	closing := dispatch.Closing(e.Closing)
	if s.send(context.Background(), &closing) == nil {
		s.c.Close(closeNormal, string(e.Closing.Code))
	}
	s.c.CloseNow()
	return err
}

func (s *relaySession) read(conn, ctx context.Context) error {
	for {
		b, err := s.c.Read(conn)
		if err != nil {
			return err
		}
		s.h.Stats.Messages.Add(1)
		s.h.Stats.Bytes.Add(uint64(len(b)))
		m, err := dispatch.Decode(dispatch.FromRelay, b)
		if err != nil {
			return err
		}
		s.live.seen.Store(s.h.o.Now().Unix())
		s.heard.Store(int64(time.Since(s.began)))
		switch m := m.(type) {
		case *dispatch.Inventory:
			if err := s.h.BindRelay(ctx, s.relay, m); err != nil {
				return err
			}
			s.has.Store(true)
			s.wakeUp()
		case *dispatch.Heartbeat:
			tidyBeat(m)
			s.live.mu.Lock()
			s.live.beat, s.live.dirty = m, true
			s.live.mu.Unlock()
		case *dispatch.RunnerState:
			st := dispatch.RunnerState{Runner: wire.Clean(m.Runner, wire.MaxText), State: dispatch.RunnerStateName(wire.Clean(string(m.State), wire.MaxText)), Message: wire.Clean(m.Message, wire.MaxReason)}
			s.live.mu.Lock()
			if _, ok := s.live.states[st.Runner]; ok || len(s.live.states) < dispatch.MaxRunners {
				s.live.states[st.Runner], s.live.dirty = st, true
			}
			s.live.mu.Unlock()
		}
	}
}

func tidyBeat(m *dispatch.Heartbeat) {
	for i := range m.Runners {
		m.Runners[i].Name = wire.Clean(m.Runners[i].Name, wire.MaxText)
	}
}

func (s *relaySession) write(ctx context.Context) {
	tick := time.NewTicker(s.h.o.Heartbeat)
	defer tick.Stop()
	for {
		var m dispatch.Message
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if silent := time.Since(s.began) - time.Duration(s.heard.Load()); silent >= wire.MissedBeats*s.h.o.Heartbeat {
				s.h.Stats.Silent.Add(1)
				s.cancel(end(wire.Silent, "nothing was heard for %d heartbeats", wire.MissedBeats))
				return
			}
			m = &dispatch.Ping{}
		case <-s.wake:
			st := s.h.Snapshot().serverStatus(s.relay)
			if !s.has.Load() || st == s.told {
				continue
			}
			s.told, m = st, &st
		}
		if err := s.send(ctx, m); err != nil {
			s.cancel(fmt.Errorf("sending to a relay: %w", err))
			return
		}
	}
}

// BindRelay takes a relay's inventory. The first binds it to its server.
func (h *Hub) BindRelay(ctx context.Context, id string, m *dispatch.Inventory) error {
	url, err := dispatch.ServerURL(m.ServerURL)
	if err != nil {
		return fmt.Errorf("%w: %w", wire.ErrProtocol, err)
	}
	tidyInventory(m)
	return h.do(ctx, func(t *tx) error {
		n := t.s.Relays[id]
		if n == nil || n.Server != "" && reflect.DeepEqual(n.Inventory, m) {
			return nil
		}
		r, was := *n.Relay, n.Rebound()
		r.Inventory, r.Reported, r.Seen = m, t.unix(), n.Live.Seen()
		if m.Hostname != "" {
			r.Name = m.Hostname
		}
		if r.Server == "" {
			r.Server = url
			t.audit("", "relay "+id, "bound to a GitLab server", url)
		}
		if r.Rebound() && !was {
			t.audit("", "relay "+id, "reports another GitLab server", url+", bound to "+r.Server)
		}
		t.putRelay(n, r)
		t.b.Durable = true
		t.event("", "relay", "inventory")
		return nil
	})
}

func tidyInventory(m *dispatch.Inventory) {
	for _, s := range []*string{&m.Version, &m.Hostname, &m.SystemID, &m.ServerVersion} {
		*s = wire.Clean(*s, wire.MaxText)
	}
	for i := range m.Runners {
		r := &m.Runners[i]
		r.Name, r.Placement.Pool = wire.Clean(r.Name, wire.MaxText), wire.Clean(r.Placement.Pool, 63)
		r.Placement.Labels = r.Placement.Labels[:min(len(r.Placement.Labels), dispatch.MaxLabels)]
		for k := range r.Placement.Labels {
			r.Placement.Labels[k] = wire.Clean(r.Placement.Labels[k], wire.MaxText)
		}
	}
}

// flushRelays stores what relays said of their runners, in a batch that goes
// to the disk anyway.
func (t *tx) flushRelays() {
	for _, n := range t.s.Relays {
		n.Live.mu.Lock()
		dirty := n.Live.dirty
		n.Live.dirty = false
		n.Live.mu.Unlock()
		if !dirty {
			continue
		}
		t.undo = append(t.undo, func() {
			n.Live.mu.Lock()
			defer n.Live.mu.Unlock()
			n.Live.dirty = true
		})
		r := *n.Relay
		r.Beat, r.States = n.Live.Now()
		r.Seen = n.Live.Seen()
		t.putRelay(n, r)
	}
}

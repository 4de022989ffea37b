// Package hub is the coordinator of a fleet: tokens and enrollment, what is
// known of each node, what is asked of it, and its sessions.
//
// One goroutine, Run, makes every change: a change is a function that looks at
// the state and fills a Batch; Run stores the batch, then replaces the
// snapshot, then publishes Events and answers. So whoever was answered finds
// the change on the disk, and whoever reads a Snapshot sees only what is
// stored. Changes that wait are stored together, with one fsync for all.
// Snapshots and all they lead to are never changed.
//
// Heartbeats and lists of VMs are no changes: they are held per node and
// stored at most once per half heartbeat, all nodes' in one batch, with one
// fsync a minute. Audit lines are part of the batch of the change that they
// record, and number without gaps.
//
// Vocabulary: desired state is what holds until it is changed (a ceiling,
// stopped acquisition), each with a generation and a random id; a command is
// done once. A node that reports a desired state or a command that this hub
// has no record of is in a recovery conflict (conflict.go).
//
// Lock order: Hub.sessMu, then Session.mu. Run holds neither while it stores.
//
// Spec: fleet-reference (Steering, the hub), fleet-design (Hub ↔ node
// protocol, Proposed recovery after a hub restore).
package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Options of a Hub. The zero value is the spec's.
type Options struct {
	Heartbeat time.Duration // asked of nodes; wire.DefaultHeartbeat
	Versions  wire.Range    // spoken; wire.Spoken
	Log       *slog.Logger
	Now       func() time.Time

	Jobs   JobOptions
	People PeopleOptions
}

// Hub holds a fleet. Make one with New, then Run it.
type Hub struct {
	o     Options
	store Store
	id    string
	log   *slog.Logger

	snap    atomic.Pointer[Snapshot]
	queue   chan *change
	stopped chan struct{}    // closed when Run has ended
	audits  uint64           // Seq of the newest line; of Run
	issued  map[string]int64 // Loaded.LastIssued; of Run

	sessMu   sync.Mutex
	sessions map[string]*Session
	dirty    map[string]*pending

	feed *Feed

	sick  atomic.Pointer[string] // why the store refuses, nil = it does not
	Stats Stats

	quiet  quiet // of Run
	jobs   *placer
	relays relaySessions
	work   chan struct{} // wakes Run for placed jobs; of capacity 1
}

// Stats count since the start. They are for metrics.
type Stats struct {
	Sessions, Refused, Superseded, Silent atomic.Uint64
	Messages, Bytes                       atomic.Uint64
	Batches, Changes, StoreErrors         atomic.Uint64
	Acks, Recorded                        atomic.Uint64
	StoreNanos                            atomic.Uint64
}

// Snapshot is the fleet at one moment. It is never changed.
type Snapshot struct {
	Rev    uint64
	Nodes  map[string]*Node
	Tokens map[string]Token // by hash

	// Of placed jobs.
	Relays   map[string]*RelayNode
	Servers  map[string]Server // by URL
	Projects map[ProjectKey]Project
	Keys     map[string]Key // by hash
	Settings map[string]string
	Rules    map[string]EgressRule // by name

	// Of the web UI.
	Grants     map[string]Grant     // by address
	Links      map[string]Link      // by hash
	UISessions map[string]UISession // by hash

	revoked map[string]Revoked // by node
	byKey   map[string]string  // public key → node
	dropped map[string]Revoked // by relay
}

// Node is a node of a Snapshot.
type Node struct {
	*Record
	Open []*Command // without a final outcome, oldest first
	Live *Live      // shared by all snapshots
}

// Live is a node's readings as they arrive.
type Live struct {
	beat atomic.Pointer[Heartbeat]
	seen atomic.Int64 // Unix milliseconds of the last sign of life
	up   atomic.Pointer[Session]

	inventory time.Time // when one was stored last; the writer's alone
}

// Beat is the latest heartbeat, nil for none.
func (l *Live) Beat() *Heartbeat { return l.beat.Load() }

// Seen is when the node was last heard of, zero for never.
func (l *Live) Seen() time.Time {
	if ms := l.seen.Load(); ms != 0 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// Connected says whether the node has a session.
func (l *Live) Connected() bool { return l.up.Load() != nil }

// New reads the store.
func New(ctx context.Context, store Store, o Options) (*Hub, error) {
	if o.Heartbeat == 0 {
		o.Heartbeat = wire.DefaultHeartbeat
	}
	if o.Versions == (wire.Range{}) {
		o.Versions = wire.Spoken
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	l, err := store.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the hub's database: %w", err)
	}
	h := &Hub{o: o, store: store, id: l.Hub, log: o.Log.With(logx.Comp, "hub"), queue: make(chan *change, 1024),
		stopped: make(chan struct{}), audits: l.LastAudit, issued: maps.Clone(l.LastIssued), sessions: map[string]*Session{}, dirty: map[string]*pending{}, feed: newFeed()}
	s := &Snapshot{Nodes: map[string]*Node{}, Tokens: map[string]Token{}, revoked: map[string]Revoked{}, byKey: map[string]string{}}
	for _, r := range l.Records {
		s.Nodes[r.ID] = &Node{Record: r, Live: &Live{}}
		s.byKey[string(r.Key)] = r.ID
	}
	for _, b := range l.Heartbeats {
		if n := s.Nodes[b.Node]; n != nil {
			n.Live.beat.Store(&b)
			n.Live.seen.Store(b.At * 1000)
		}
	}
	for _, c := range l.Commands {
		if n := s.Nodes[c.Node]; n != nil {
			n.Open = append(n.Open, c)
		}
	}
	for _, t := range l.Tokens {
		s.Tokens[t.Hash] = t
	}
	for _, r := range l.Revoked {
		s.revoked[r.Node] = r
	}
	h.loadPeers(s, &l.LoadedJobs)
	s.loadPeople(&l.LoadedPeople)
	h.snap.Store(s)
	h.work = make(chan struct{}, 1)
	if h.jobs, err = newPlacer(h, &l.LoadedJobs); err != nil {
		return nil, fmt.Errorf("reading the hub's jobs: %w", err)
	}
	for id := range s.Nodes {
		h.jobs.refresh(id)
	}
	return h, nil
}

// ID is the database's.
func (h *Hub) ID() string { return h.id }

// Now is the hub's wall clock (Options.Now).
func (h *Hub) Now() time.Time { return h.o.Now() }

// Snapshot is the fleet as it is stored.
func (h *Hub) Snapshot() *Snapshot { return h.snap.Load() }

// Heartbeat is the interval that nodes are asked for.
func (h *Hub) Heartbeat() time.Duration { return h.o.Heartbeat }

// Sick is why nothing can be stored, "" while all is well.
func (h *Hub) Sick() string {
	if s := h.sick.Load(); s != nil {
		return *s
	}
	return ""
}

// Store is where the hub keeps its state, for reading.
func (h *Hub) Store() Store { return h.store }

// change waits for Run.
type change struct {
	fn   func(*tx) error
	done chan error
}

// errStopped is what a change gets when there is no Run to make it.
var errStopped = fault.New(fault.Unavailable, "the hub is stopping")

// do has Run make a change and waits until it is stored. fn must return its
// errors before it changes anything. When ctx ends first, the change may still
// be made.
func (h *Hub) do(ctx context.Context, fn func(*tx) error) error {
	c := &change{fn, make(chan error, 1)}
	select {
	case h.queue <- c:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.stopped:
		return errStopped
	}
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.stopped:
		select { // it may have been answered as the last one
		case err := <-c.done:
			return err
		default:
			return errStopped
		}
	}
}

// together is how many changes are stored with one fsync at most.
const together = 256

// Run makes changes until ctx ends, then stores what is held back. Call it once.
func (h *Hub) Run(ctx context.Context) error {
	defer close(h.stopped)
	flush := time.NewTicker(h.o.Heartbeat / 2)
	defer flush.Stop()
	sweep := time.NewTicker(time.Minute)
	defer sweep.Stop()
	minute := h.o.Now()
	work := time.NewTicker(time.Second)
	defer work.Stop()
	h.apply([]*change{{fn: sweepTx, done: make(chan error, 1)}, {fn: restartTx, done: make(chan error, 1)}, {fn: fallbacksTx, done: make(chan error, 1)}, {fn: aboveGrantsTx, done: make(chan error, 1)}})
	h.jobs.clean()
	indexed := make(chan struct{})
	go func() { defer close(indexed); h.jobs.asked.load(ctx, h); h.jobs.index.load(ctx, h) }()
	defer func() { <-indexed }()
	watched := make(chan struct{})
	go func() { defer close(watched); h.watch(ctx) }()
	defer func() { <-watched }()
	for {
		var batch []*change
		select {
		case c := <-h.queue:
			batch = append(batch, c)
		more:
			for len(batch) < together {
				select {
				case c := <-h.queue:
					batch = append(batch, c)
				default:
					break more
				}
			}
		case <-flush.C:
			durable := h.o.Now().Sub(minute) >= time.Minute || h.o.Now().Before(minute)
			if durable {
				minute = h.o.Now()
			}
			batch = append(batch, h.flushChange(durable))
		case <-sweep.C:
			batch = append(batch, &change{fn: sweepTx, done: make(chan error, 1)})
		case <-work.C:
			batch = append(batch, &change{fn: everySecondTx, done: make(chan error, 1)}, &change{fn: placeTx, done: make(chan error, 1)})
		case <-h.work:
			batch = append(batch, &change{fn: placeTx, done: make(chan error, 1)})
		case <-ctx.Done():
			h.apply([]*change{h.flushChange(true)})
			return nil
		}
		h.apply(batch)
	}
}

// apply stores changes together, or one by one when that fails, so that one
// that the store refuses does not take the others with it.
func (h *Hub) apply(batch []*change) {
	err := h.attempt(batch)
	switch {
	case err == nil:
	case len(batch) == 1:
		batch[0].done <- err
	default:
		for _, c := range batch {
			h.apply([]*change{c})
		}
	}
}

// attempt returns the store's error, with no change answered. Otherwise every
// one is.
func (h *Hub) attempt(batch []*change) error {
	old := h.snap.Load()
	t := &tx{h: h, now: h.o.Now(), old: old, s: *old, seq: h.audits}
	errs := make([]error, len(batch))
	for i, c := range batch {
		was := t.touched
		if errs[i] = c.fn(t); errs[i] != nil && t.touched != was {
			panic("hub: a change failed after it had changed something: " + errs[i].Error())
		}
	}
	if !t.b.Empty() {
		start := time.Now()
		// Not the caller's context: a batch is of many callers.
		err := h.store.Apply(context.Background(), &t.b)
		h.Stats.StoreNanos.Add(uint64(time.Since(start)))
		h.Stats.Batches.Add(1)
		if err != nil {
			h.Stats.StoreErrors.Add(1)
			h.fell(err)
			for _, f := range slices.Backward(t.undo) {
				f()
			}
			return unwritten(err)
		}
		h.healed()
	}
	h.audits = t.seq
	h.jobs.merge(t)
	if t.touched > 0 {
		// A copy: a pointer into the tx would keep it and, through its old
		// snapshot, all that ever were.
		s := t.s
		s.Rev = old.Rev + 1
		h.snap.Store(&s)
	}
	h.Stats.Changes.Add(uint64(len(batch)))
	for i, c := range batch {
		c.done <- errs[i]
	}
	for _, f := range t.after {
		f()
	}
	h.publish(append(t.events, t.jobEvents()...))
	return nil
}

// unwritten is the error that callers of a change see when it was not stored.
func unwritten(err error) error {
	text := "the hub cannot write its database; nothing was changed"
	switch {
	case errors.Is(err, ErrFull):
		text = "the hub's disk is full; nothing was changed"
	case errors.Is(err, ErrReadOnly):
		text = "the hub's database is read-only; nothing was changed"
	case errors.Is(err, ErrBroken):
		text = "the hub's database is damaged; nothing was changed"
	}
	return fault.New(fault.Unavailable, text).Because(err).Hint("vk-hub status tells when it is well again; vk-hub check looks at the database")
}

func (h *Hub) fell(err error) {
	text := unwritten(err).Error()
	if old := h.sick.Swap(&text); old == nil || *old != text {
		h.log.Error("nothing can be stored", logx.Err, err)
	}
}

func (h *Hub) healed() {
	if h.sick.Swap(nil) != nil {
		h.log.Info("the database can be written again")
	}
}

// tx is the state that changes of one batch work on.
type tx struct {
	h       *Hub
	now     time.Time
	old     *Snapshot
	s       Snapshot
	b       Batch
	seq     uint64
	touched int
	events  []Event
	after   []func() // once it is stored
	undo    []func() // once it was not, the last one first

	jobs    map[string]*Job // that this tx changed
	newJobs int64           // how many of them are new

	ownNodes, ownNodeKeys, ownTokens, ownRevoked            bool // maps that are this tx's already
	ownRelays, ownServers, ownProjects, ownKeys, ownDropped bool
	ownRules, ownSettings                                   bool
	ownGrants, ownLinks, ownUISessions                      bool
}

func (t *tx) unix() int64 { return t.now.Unix() }

// node finds a node by its ID, a prefix of at least 8 digits, or a hostname
// that one node has.
func (t *tx) node(name string) (*Node, error) { return t.s.Find(name) }

// nodes is the map of nodes, made this tx's.
func (t *tx) nodes() map[string]*Node {
	t.touched++
	own(&t.s.Nodes, &t.ownNodes)
	return t.s.Nodes
}

// byKey is the map of keys, made this tx's.
func (t *tx) byKey() map[string]string {
	own(&t.s.byKey, &t.ownNodeKeys)
	return t.s.byKey
}

// put stores a node's new record.
func (t *tx) put(n *Node, r Record) *Node {
	c := *n
	c.Record = &r
	t.nodes()[r.ID] = &c
	if t.s.byKey[string(r.Key)] != r.ID {
		t.byKey()[string(r.Key)] = r.ID
	}
	t.b.Records = append(t.b.Records, &r)
	return &c
}

// open replaces a node's open commands.
func (t *tx) open(n *Node, open []*Command) {
	c := *n
	c.Open = open
	t.nodes()[n.ID] = &c
}

func (t *tx) token(tok Token) {
	t.touched++
	own(&t.s.Tokens, &t.ownTokens)
	t.s.Tokens[tok.Hash] = tok
	t.b.Tokens = append(t.b.Tokens, tok)
	t.b.Durable = true
}

func (t *tx) dropToken(hash string) {
	t.touched++
	own(&t.s.Tokens, &t.ownTokens)
	delete(t.s.Tokens, hash)
	t.b.DropTokens = append(t.b.DropTokens, hash)
}

func (t *tx) command(c *Command) {
	t.touched++
	t.b.Commands = append(t.b.Commands, c)
	t.b.Durable = true
}

// audit writes a line into the batch, which becomes durable.
func (t *tx) audit(node, actor, event, detail string) {
	t.touched++
	t.seq++
	t.b.Audit = append(t.b.Audit, AuditLine{Seq: t.seq, At: t.unix(), Node: node, Actor: actor, Event: event, Detail: detail})
	t.b.Durable = true
}

func (t *tx) event(node, kind, text string) {
	t.events = append(t.events, Event{At: t.unix(), Node: node, Kind: kind, Text: text})
}

// publish tells sessions and readers of the feed.
func (h *Hub) publish(events []Event) {
	if len(events) == 0 {
		return
	}
	h.sessMu.Lock()
	for _, e := range events {
		if s := h.sessions[e.Node]; s != nil && e.Kind != "job" { // placing tells a node of its jobs
			s.wakeUp()
		}
	}
	h.sessMu.Unlock()
	h.relays.tell(events)
	for _, e := range events {
		if e.Node != "" && e.Kind != "job" {
			h.jobs.refresh(e.Node)
		}
	}
	h.feed.put(events)
}

// Package nodetest has what the loop of a node is tested with: a host and a
// runner with knobs, and a hub that a test speaks for, message by message, over
// a connection in memory.
package nodetest

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
)

// HubID is the id of every fake hub.
var HubID = "00000000000000000000000000000001"

// NodeID is the id that Enroll gives.
var NodeID = "000000000000000000000000000000aa"

// Key is the key that Enroll gives.
func Key() ed25519.PrivateKey {
	seed := sha256.Sum256([]byte("nodetest"))
	return ed25519.NewKeyFromSeed(seed[:])
}

// Enroll makes the files of an enrolled node below stateDir.
func Enroll(t testing.TB, stateDir string) {
	t.Helper()
	dir := filepath.Join(stateDir, node.Dir)
	must(t, os.MkdirAll(dir, 0o700))
	b, err := json.Marshal(node.Enrollment{URL: "http://127.0.0.1:1", Hub: HubID, Node: NodeID})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, node.EnrollmentFile), b, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, node.KeyFile), []byte(hex.EncodeToString(Key().Seed())), 0o600))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Host is a node.Host whose readings are set by the test.
type Host struct {
	mu        sync.Mutex
	inventory wire.Inventory
	vms       []wire.Workload
	drain     wire.Drain
	drainErr  error
	ceilings  []int
	raises    []bool
	hang      chan struct{}
}

// NewHost is a host with nothing to drain.
func NewHost() *Host {
	return &Host{inventory: wire.Inventory{Hostname: "ci-7", CPUs: 2, RAM: 1 << 30, VK: "test"}, drain: wire.Drain{RunnerExited: true, AdmissionIdle: true}}
}

// SetDrain sets what a drain sees.
func (h *Host) SetDrain(d wire.Drain, err error) {
	h.mu.Lock()
	h.drain, h.drainErr = d, err
	h.mu.Unlock()
}

// SetVMs sets the VMs.
func (h *Host) SetVMs(l ...wire.Workload) { h.mu.Lock(); h.vms = l; h.mu.Unlock() }

// SetInventory changes the facts.
func (h *Host) SetInventory(fn func(*wire.Inventory)) { h.mu.Lock(); fn(&h.inventory); h.mu.Unlock() }

// Hang makes the next readings block until the returned function is called.
func (h *Host) Hang() (free func()) {
	c := make(chan struct{})
	h.mu.Lock()
	h.hang = c
	h.mu.Unlock()
	return func() { h.mu.Lock(); h.hang = nil; h.mu.Unlock(); close(c) }
}

// Ceilings are the hub's ceilings of the passes so far.
func (h *Host) Ceilings() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]int(nil), h.ceilings...)
}

// Raises says of each pass so far whether it might raise the number.
func (h *Host) Raises() []bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]bool(nil), h.raises...)
}

// Inventory is node.Host's.
func (h *Host) Inventory(context.Context) (*wire.Inventory, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.inventory
	return &i, nil
}

// Heartbeat is node.Host's.
func (h *Host) Heartbeat(ctx context.Context) (*wire.Heartbeat, error) {
	h.mu.Lock()
	hang := h.hang
	h.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
		}
	}
	return &wire.Heartbeat{}, nil
}

// Workloads is node.Host's.
func (h *Host) Workloads(context.Context) ([]wire.Workload, int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]wire.Workload{}, h.vms...), 0, nil
}

// Drain is node.Host's.
func (h *Host) Drain(context.Context) (wire.Drain, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.drain, h.drainErr
}

// Concurrency is node.Host's: the ceiling is the number.
func (h *Host) Concurrency(_ context.Context, hubCeiling int, raise bool) wire.Concurrency {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ceilings, h.raises = append(h.ceilings, hubCeiling), append(h.raises, raise)
	return wire.Concurrency{Estimate: 8, HubCeiling: hubCeiling, Effective: min(8, max(hubCeiling, 1))}
}

// Runner is a node.Runner. A managed one quits slowly: it is quitting until
// Exit is called, unless Quick.
type Runner struct {
	Kind  wire.RunnerMode
	Quick bool

	mu        sync.Mutex
	status    node.RunnerStatus
	take      bool
	starts    int
	abandoned bool
	changed   chan struct{}
	exit      chan struct{}
}

// NewRunner is a runner of a mode.
func NewRunner(kind wire.RunnerMode) *Runner {
	return &Runner{Kind: kind, Quick: true, status: node.RunnerStatus{Acquisition: wire.Stopped}, changed: make(chan struct{}, 1), exit: make(chan struct{}, 1)}
}

// Mode is node.Runner's.
func (r *Runner) Mode() wire.RunnerMode { return r.Kind }

// Run is node.Runner's.
func (r *Runner) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			r.SetAcquire(false)
			r.mu.Lock()
			quitting := r.status.Acquisition == wire.Quitting
			r.mu.Unlock()
			if quitting {
				<-r.exit
			}
			return nil
		case <-r.exit:
			r.set(wire.Stopped)
		}
	}
}

// SetAcquire is node.Runner's.
func (r *Runner) SetAcquire(take bool) {
	r.mu.Lock()
	was := r.take
	r.take = take
	now := r.status.Acquisition
	r.mu.Unlock()
	switch {
	case take && !was && now == wire.Stopped:
		r.mu.Lock()
		r.starts++
		r.mu.Unlock()
		r.set(wire.Taking)
	case !take && was && r.Kind == wire.RunnerExternal:
		r.mu.Lock()
		r.status.Unsupported = []string{"the runner may still take jobs"}
		r.mu.Unlock()
		r.set(wire.Stopped)
	case !take && was && now == wire.Stopped:
	case !take && was && r.Kind == wire.RunnerManaged && !r.Quick:
		r.set(wire.Quitting)
	case !take && was:
		r.set(wire.Stopped)
	}
}

func (r *Runner) set(a wire.Acquisition) {
	r.mu.Lock()
	r.status.Acquisition = a
	r.mu.Unlock()
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// Exit ends a runner that quits.
func (r *Runner) Exit() { r.exit <- struct{}{} }

// Status is node.Runner's.
func (r *Runner) Status() node.RunnerStatus { r.mu.Lock(); defer r.mu.Unlock(); return r.status }

// Changed is node.Runner's.
func (r *Runner) Changed() <-chan struct{} { return r.changed }

// Abandon is node.Runner's.
func (r *Runner) Abandon() { r.mu.Lock(); r.abandoned = true; r.mu.Unlock(); r.exit <- struct{}{} }

// Starts is how often a runner was started.
func (r *Runner) Starts() int { r.mu.Lock(); defer r.mu.Unlock(); return r.starts }

// Hub is a node.Dialer whose other end the test plays. Dial waits for Accept.
type Hub struct {
	Channel []byte     // of every connection
	Range   wire.Range // that it speaks; zero = wire.Spoken
	Beat    int        // seconds that it asks for; 0 = 5
	Time    int64      // its clock; 0 = none told

	conns chan *Link
	// Refuse makes dials fail.
	refuse error
	mu     sync.Mutex
	dials  []time.Time
}

// NewHub is a hub that waits for a dial.
func NewHub() *Hub { return &Hub{Channel: []byte("channel"), conns: make(chan *Link)} }

// Refuse makes the following dials fail with err; nil ends that.
func (h *Hub) Refuse(err error) { h.mu.Lock(); h.refuse = err; h.mu.Unlock() }

// Dials are the times of all dials so far.
func (h *Hub) Dials() []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]time.Time(nil), h.dials...)
}

// Dial is node.Dialer's.
func (h *Hub) Dial(ctx context.Context) (node.Conn, error) {
	h.mu.Lock()
	err := h.refuse
	h.dials = append(h.dials, time.Now())
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	l := &Link{hub: h, toNode: make(chan []byte, 64), toHub: make(chan []byte, 64), closed: make(chan struct{}), deaf: make(chan struct{}), slow: make(chan []byte), failed: make(chan struct{})}
	select {
	case h.conns <- l:
		return (*nodeEnd)(l), nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Accept waits for the node's dial.
func (h *Hub) Accept(t testing.TB) *Link {
	t.Helper()
	select {
	case l := <-h.conns:
		l.t = t
		return l
	case <-time.After(time.Hour): // of a fake clock
		t.Fatal("the node does not dial")
		return nil
	}
}

// Link is the hub's end of a connection.
type Link struct {
	hub     *Hub
	t       testing.TB
	Version int
	Hello   *wire.Hello
	toNode  chan []byte
	toHub   chan []byte
	closed  chan struct{}
	deaf    chan struct{} // closed: writes fail
	slow    chan []byte   // taken by a read once a write has failed
	failed  chan struct{} // closed at the first write that failed
	once    sync.Once
	once2   sync.Once
	Reason  string // that the node closed with
}

// Next is the node's next message; nil when the connection has ended.
func (l *Link) Next() wire.Message {
	l.t.Helper()
	var data []byte
	select {
	case data = <-l.toHub:
	default:
		select {
		case data = <-l.toHub:
		case <-l.closed:
			select {
			case data = <-l.toHub:
			default:
				return nil
			}
		case <-time.After(time.Hour):
			l.t.Fatal("the node says nothing")
		}
	}
	m, err := wire.Decode(wire.FromNode, l.Version, data)
	if err != nil {
		l.t.Fatalf("the node sent %s: %v", data, err)
	}
	return m
}

// Say sends a message.
func (l *Link) Say(m wire.Message) {
	l.t.Helper()
	b, err := wire.Encode(max(l.Version, 1), m)
	if err != nil {
		l.t.Fatal(err)
	}
	l.Raw(string(b))
}

// Raw sends text as it is.
func (l *Link) Raw(text string) {
	select {
	case l.toNode <- []byte(text):
	case <-l.closed:
	}
}

// Cut ends the connection as a lost network does.
func (l *Link) Cut() { l.once.Do(func() { close(l.closed) }) }

// SayAndCut sends a message that is read only after a write has failed: nothing
// can be written any more, and what was said is still to be read.
func (l *Link) SayAndCut(m wire.Message) {
	l.t.Helper()
	b, err := wire.Encode(max(l.Version, 1), m)
	if err != nil {
		l.t.Fatal(err)
	}
	close(l.deaf)
	select {
	case l.slow <- b:
	case <-l.closed:
	}
	<-l.closed
}

// Closed is closed once the connection has ended.
func (l *Link) Closed() <-chan struct{} { return l.closed }

// Open makes the handshake up to the welcome, checking the signature.
func (l *Link) Open() {
	l.t.Helper()
	hello, ok := l.Next().(*wire.Hello)
	if !ok {
		l.t.Fatal("no hello")
	}
	l.Hello = hello
	speaks := l.hub.Range
	if speaks == (wire.Range{}) {
		speaks = wire.Spoken
	}
	v, ok := wire.Negotiate(speaks, hello.Versions)
	if !ok {
		l.t.Fatalf("no version in common: %v, %v", speaks, hello.Versions)
	}
	c := &wire.Challenge{Nonce: wire.NewHex(wire.NonceLen), Versions: speaks, Version: v}
	l.Say(c)
	auth, ok := l.Next().(*wire.Auth)
	if !ok {
		l.t.Fatal("no auth")
	}
	payload, err := wire.AuthPayload(hello, c, l.hub.Channel)
	must(l.t, err)
	sig, err := hex.DecodeString(auth.Signature)
	must(l.t, err)
	if !ed25519.Verify(Key().Public().(ed25519.PublicKey), payload, sig) {
		l.t.Fatal("the signature does not verify")
	}
	l.Version = v
	beat := l.hub.Beat
	if beat == 0 {
		beat = 5
	}
	l.Say(&wire.Welcome{Hub: HubID, HeartbeatSecs: beat, Time: l.hub.Time})
}

// Find reads until a message of type T that ok likes comes.
func Find[T wire.Message](l *Link, ok func(T) bool) T {
	l.t.Helper()
	for range 10000 {
		m := l.Next()
		if m == nil {
			break
		}
		if v, is := m.(T); is && (ok == nil || ok(v)) {
			return v
		}
	}
	var zero T
	l.t.Fatalf("the connection ended, or went on and on, without the %T that was waited for", zero)
	return zero
}

// KeepAlive pings at each interval until the connection ends.
func (l *Link) KeepAlive(every time.Duration) {
	go func() {
		for {
			select {
			case <-l.closed:
				return
			case <-time.After(every):
				l.Raw(`{"type":"ping"}`)
			}
		}
	}()
}

// nodeEnd is the node's end of a Link.
type nodeEnd Link

func (c *nodeEnd) Read(ctx context.Context) ([]byte, error) {
	select {
	case b := <-c.toNode:
		return b, nil
	default:
	}
	select {
	case b := <-c.toNode:
		return b, nil
	case <-c.failed:
		select {
		case b := <-c.slow:
			return b, nil
		case <-c.closed:
			return nil, io.EOF
		}
	case <-c.closed:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (c *nodeEnd) Write(ctx context.Context, b []byte) error {
	select {
	case <-c.closed:
		return errors.New("the connection is closed")
	case <-c.deaf:
		c.once2.Do(func() { close(c.failed) })
		return errors.New("broken pipe")
	default:
	}
	select {
	case c.toHub <- append([]byte(nil), b...):
		return nil
	case <-c.closed:
		return errors.New("the connection is closed")
	case <-ctx.Done():
		return fmt.Errorf("nobody reads: %w", context.Cause(ctx))
	}
}

func (c *nodeEnd) Channel() ([]byte, error) { return c.hub.Channel, nil }
func (c *nodeEnd) Close(reason string) error {
	c.Reason = reason
	(*Link)(c).Cut()
	return nil
}
func (c *nodeEnd) CloseNow() { (*Link)(c).Cut() }

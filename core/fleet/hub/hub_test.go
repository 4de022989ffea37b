package hub_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// bench is a hub that runs in a bubble of synctest.
type bench struct {
	*hub.Hub
	t     *testing.T
	store *hubtest.Memory
	ahead atomic.Int64    // the wall clock's lead over the bubble's, ns
	ctx   context.Context // of sessions
	wg    sync.WaitGroup  // sessions
	stop  func()
}

// start runs a hub on a store.
func start(t *testing.T, store *hubtest.Memory) *bench {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b := &bench{t: t, store: store}
	h, err := hub.New(ctx, store, hub.Options{Log: logx.ForTest(t), Now: func() time.Time { return time.Now().Add(time.Duration(b.ahead.Load())) }})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	b.Hub = h
	var hangUp func()
	b.ctx, hangUp = context.WithCancel(ctx)
	b.stop = func() { hangUp(); b.wg.Wait(); cancel(); <-done }
	return b
}

func bubble(t *testing.T, f func(*testing.T, *bench)) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, hubtest.NewMemory())
		defer b.stop()
		f(t, b)
	})
}

// dial connects a node over a pipe; ended gets why the hub ended its session.
func (b *bench) dial(i hubtest.Identity, incarnation string, versions wire.Range) (c *hubtest.Client, ended chan error, err error) {
	near, far := hubtest.Pipe()
	ended = make(chan error, 1)
	b.wg.Go(func() { ended <- b.Serve(b.ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
	c, err = i.Dial(b.t.Context(), near, wire.Plaintext, incarnation, versions)
	return c, ended, err
}

// connect dials and sends a first report.
func (b *bench) connect(i hubtest.Identity, st *wire.State) (*hubtest.Client, chan error) {
	b.t.Helper()
	c, ended, err := b.dial(i, wire.NewID(), wire.Spoken)
	if err != nil {
		b.t.Fatal(err)
	}
	b.send(c, &wire.Report{State: st})
	synctest.Wait()
	return c, ended
}

// later moves the wall clock, and waits for the hub to look at it.
func (b *bench) later(d time.Duration) {
	b.ahead.Add(int64(d))
	time.Sleep(2 * time.Minute)
	synctest.Wait()
}

func (b *bench) send(c *hubtest.Client, m wire.Message) {
	b.t.Helper()
	if err := c.Send(b.t.Context(), m); err != nil {
		b.t.Fatal(err)
	}
}

func next[M wire.Message](b *bench, c *hubtest.Client) M {
	b.t.Helper()
	m, err := hubtest.Next[M](b.t.Context(), c)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bench) quiet(c *hubtest.Client) {
	b.t.Helper()
	// Heartbeats, so that the hub does not find the node silent meanwhile.
	b.send(c, &wire.Heartbeat{})
	if err := c.Quiet(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	b.send(c, &wire.Heartbeat{})
}

func (b *bench) node(i hubtest.Identity) *hub.Node {
	b.t.Helper()
	n := b.Snapshot().Nodes[i.ID]
	if n == nil {
		b.t.Fatal("no such node")
	}
	return n
}

// events are the audit lines of a node since some line, as EVENT: DETAIL.
func (b *bench) events(i hubtest.Identity) string {
	lines, err := b.store.Audit(b.t.Context(), hub.AuditQuery{Node: i.ID, Limit: 1000})
	if err != nil {
		b.t.Fatal(err)
	}
	var s []string
	for _, l := range lines {
		s = append(s, l.Actor+": "+l.Event+": "+l.Detail)
	}
	return strings.Join(s, "\n")
}

func ready(a *wire.Applied) *wire.State {
	return &wire.State{Node: wire.Ready, Acquisition: wire.Taking, Runner: wire.RunnerManaged, Applied: a}
}

func applied(d *wire.Desired) *wire.Applied {
	return &wire.Applied{Generation: d.Generation, ID: d.ID, Policy: d.Policy}
}

func ptr[T any](v T) *T { return &v }

func wantRefusal(t *testing.T, what string, err error, code wire.Refusal) {
	t.Helper()
	if r, ok := errors.AsType[*hub.RefusedError](err); !ok || r.Code != code {
		t.Errorf("%s: %v, want %s", what, err, code)
	}
}

func TestEnrollment(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		token := func(ttl time.Duration) string {
			s, err := b.CreateToken(t.Context(), "uid 0", ttl)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		enroll := func(i hubtest.Identity, token string) (*wire.EnrollReply, error) {
			return b.Enroll(t.Context(), i.EnrollRequest(token, "ci-1", wire.Plaintext), wire.Plaintext, "test")
		}
		one, two := hubtest.NewKey(), hubtest.NewKey()
		tok := token(time.Hour)
		first, err := enroll(one, tok)
		if err != nil || first.Hub != b.ID() || first.Again {
			t.Fatalf("%+v, %v", first, err)
		}
		_, err = enroll(one, tok)
		wantRefusal(t, "a spent token, by the same key", err, wire.TokenUsed)
		_, err = enroll(two, tok)
		wantRefusal(t, "a spent token, by another key", err, wire.TokenUsed)
		_, err = enroll(two, wire.NewHex(wire.TokenLen))
		wantRefusal(t, "a token of nobody", err, wire.TokenInvalid)
		again, err := enroll(one, token(time.Hour))
		if err != nil || again.Node != first.Node || !again.Again {
			t.Errorf("the same key again: %+v, %v; want node %s", again, err, first.Node)
		}
		short := token(time.Minute)
		time.Sleep(time.Minute)
		_, err = enroll(two, short)
		wantRefusal(t, "an expired token", err, wire.TokenExpired)
		_, err = b.Enroll(t.Context(), two.EnrollRequest(token(time.Hour), "x", []byte("another connection")), wire.Plaintext, "test")
		wantRefusal(t, "a signature over another connection", err, wire.BadSignature)
		if _, err := b.Remove(t.Context(), "uid 0", first.Node); err != nil {
			t.Fatal(err)
		}
		_, err = enroll(one, token(time.Hour))
		wantRefusal(t, "a removed node's key", err, wire.KeyRevoked)
		for _, ttl := range []time.Duration{0, 30*24*time.Hour + 1} {
			if _, err := b.CreateToken(t.Context(), "uid 0", ttl); fault.KindOf(err) != fault.Usage {
				t.Errorf("a token for %v: %v", ttl, err)
			}
		}
		for h, tok := range b.Snapshot().Tokens {
			if strings.Contains(short+tok.Actor, h) || h == short {
				t.Error("the token itself is kept")
			}
		}
		b.later(40 * 24 * time.Hour)
		synctest.Wait()
		if n := len(b.Snapshot().Tokens); n != 0 {
			t.Errorf("%d tokens are remembered after their time", n)
		}
	})
}

func TestHandshakeRefusals(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		one := hubtest.Enroll(t, b.Hub, "ci-1")
		_, _, err := b.dial(hubtest.Identity{ID: wire.NewID(), Key: one.Key}, wire.NewID(), wire.Spoken)
		wantRefusal(t, "a node of nobody", err, wire.NotEnrolled)
		_, _, err = b.dial(hubtest.Identity{ID: one.ID, Key: hubtest.NewKey().Key}, wire.NewID(), wire.Spoken)
		wantRefusal(t, "another key", err, wire.BadSignature)
		_, _, err = b.dial(one, wire.NewID(), wire.Range{Min: 7, Max: 9})
		wantRefusal(t, "later versions alone", err, wire.NoVersion)
		near, far := hubtest.Pipe()
		go b.Serve(b.ctx, far, hub.Peer{Channel: []byte("the hub's end"), Remote: "proxy"})
		_, err = one.Dial(t.Context(), near, []byte("the node's end"), wire.NewID(), wire.Spoken)
		wantRefusal(t, "another connection, as behind a proxy that terminates TLS", err, wire.BadSignature)
		c, ended, err := b.dial(one, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Remove(t.Context(), "uid 0", one.ID); err != nil {
			t.Fatal(err)
		}
		if m := next[*wire.Closing](b, c); m.Code != wire.Revoked {
			t.Errorf("a removed node's session ended with %+v", m)
		}
		<-ended
		_, _, err = b.dial(one, wire.NewID(), wire.Spoken)
		wantRefusal(t, "a removed node", err, wire.Revoked)
		// One who says nothing is let go after 10 seconds.
		_, far = hubtest.Pipe()
		start := time.Now()
		if err := b.Serve(b.ctx, far, hub.Peer{Channel: wire.Plaintext}); err == nil || time.Since(start) != wire.HandshakeStep {
			t.Errorf("one who says nothing: %v after %v", err, time.Since(start))
		}
	})
}

func TestVersions(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		for v := 1; v <= 6; v++ {
			i := hubtest.Enroll(t, b.Hub, fmt.Sprint("ci-", v))
			c, _, err := b.dial(i, wire.NewID(), wire.Range{Min: 1, Max: v})
			if err != nil || c.Version != v || c.Welcome.HeartbeatSecs != 5 {
				t.Fatalf("version %d: %+v, %v", v, c, err)
			}
			b.send(c, &wire.Report{State: ready(nil)})
			synctest.Wait()
			_, err = b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(3)})
			_, cerr := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
			if v == 1 {
				if fault.KindOf(err) != fault.Conflict || fault.KindOf(cerr) != fault.Conflict || !strings.Contains(fault.HintOf(err), "update its vk") {
					t.Errorf("steering a node of version 1: %v, %v", err, cerr)
				}
				if s := b.node(i).Sync(); s != "monitor only (v1)" {
					t.Errorf("it is shown as %q", s)
				}
				b.quiet(c)
			} else {
				if err != nil || cerr != nil {
					t.Fatal(err, cerr)
				}
				next[*wire.Desired](b, c)
				next[*wire.Command](b, c)
			}
			c.Close()
		}
	})
}

func TestSteering(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(3)}); err != nil {
			t.Fatal(err) // steered on trust before it has connected
		}
		c, _, err := b.dial(i, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatal(err)
		}
		b.quiet(c) // nothing goes out before the first report
		b.send(c, &wire.Report{State: ready(nil)})
		d := next[*wire.Desired](b, c)
		if d.Generation != 1 || d.Policy.Ceiling != 3 || d.Policy.Stop {
			t.Errorf("desired state %+v", d)
		}
		if s := b.node(i).Sync(); s != "behind (0<1)" {
			t.Errorf("sync is %q", s)
		}
		b.quiet(c) // once per generation
		b.send(c, &wire.Report{State: ready(applied(d))})
		synctest.Wait()
		if s := b.node(i).Sync(); s != "ok" {
			t.Errorf("sync is %q", s)
		}
		if n, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(3)}); err != nil || n.Desired.Generation != 1 {
			t.Errorf("asking for what is asked: %+v, %v", n.Desired, err)
		}
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Stop: ptr(true)}); err != nil {
			t.Fatal(err)
		}
		if d := next[*wire.Desired](b, c); d.Generation != 2 || d.Policy.Ceiling != 3 || !d.Policy.Stop {
			t.Errorf("desired state %+v", d)
		}
		if got := b.events(i); !strings.Contains(got, "uid 0: desired state: generation 2: ceiling 3, acquisition stopped") || !strings.Contains(got, "node: applied: generation 1: ceiling 3, acquisition on") {
			t.Errorf("audit:\n%s", got)
		}
		if _, err := b.SetPolicy(t.Context(), "uid 0", "nobody", hub.PolicyChange{}); fault.KindOf(err) != fault.NotFound {
			t.Errorf("a node that is none: %v", err)
		}
	})
}

func TestCommands(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		away, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpUndrain) // while it is away
		if err != nil {
			t.Fatal(err)
		}
		c, _ := b.connect(i, ready(nil))
		if m := next[*wire.Command](b, c); m.ID != away.ID || m.Expires-m.Issued != 24*3600 {
			t.Errorf("command %+v", m)
		}
		drain, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
		if err != nil {
			t.Fatal(err)
		}
		if m := next[*wire.Command](b, c); m.ID != drain.ID || m.Op != wire.OpDrain {
			t.Errorf("command %+v", m)
		}
		b.quiet(c) // once per session
		ack := func(id string, o wire.Outcome) {
			t.Helper()
			b.send(c, &wire.Ack{Command: id, Outcome: o, Message: "m"})
			if r := next[*wire.Recorded](b, c); r.Command != id || r.Outcome != o {
				t.Errorf("answer to %s of %s: %+v", o, id, r)
			}
		}
		ack(away.ID, wire.Done)
		ack(drain.ID, wire.Accepted)
		ack(drain.ID, wire.Accepted) // repeated
		c.Close()
		c, _ = b.connect(i, ready(nil))
		if m := next[*wire.Command](b, c); m.ID != drain.ID {
			t.Errorf("with the next session came %+v, want the one that is not final", m)
		}
		ack(drain.ID, wire.Done)
		ack(drain.ID, wire.Accepted) // late: reopens nothing
		ack(drain.ID, wire.Failed)   // a final outcome is never replaced
		ack(wire.NewID(), wire.Done) // not known: answered, or it comes for ever
		got, err := b.store.Command(t.Context(), drain.ID)
		if err != nil || got.Outcome != wire.Done || len(b.node(i).Open) != 0 {
			t.Errorf("the drain is %+v, %v; open %d", got, err, len(b.node(i).Open))
		}
		if n := strings.Count(b.events(i), "node: command accepted: drain"); n != 1 {
			t.Errorf("its acceptance is audited %d times:\n%s", n, b.events(i))
		}
		c.Close()
		old, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpQuarantine)
		if err != nil {
			t.Fatal(err)
		}
		b.later(25 * time.Hour)
		c, _ = b.connect(i, ready(nil))
		b.quiet(c) // past its expiry
		ack(old.ID, wire.Done)
		if got, _ := b.store.Command(t.Context(), old.ID); got.Outcome != wire.Done {
			t.Errorf("a node that had taken it before it was cut off: %+v", got)
		}
		if _, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpUpdate); fault.KindOf(err) != fault.Usage {
			t.Errorf("an update: %v", err)
		}
	})
}

func TestTooManyCommands(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		for n := range hub.MaxOpen + 1 {
			_, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
			if (fault.KindOf(err) == fault.Busy) != (n == hub.MaxOpen) {
				t.Fatalf("command %d: %v", n, err)
			}
		}
		b.later(32 * 24 * time.Hour)
		synctest.Wait()
		if n := len(b.node(i).Open); n != 0 {
			t.Errorf("%d commands that were never answered are open after a month", n)
		}
	})
}

func TestSuperseded(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		one, ended := b.connect(i, ready(nil))
		two, _ := b.connect(i, ready(nil))
		if m := next[*wire.Closing](b, one); m.Code != wire.Superseded {
			t.Errorf("the older session ended with %+v", m)
		}
		<-ended
		synctest.Wait()
		if !b.node(i).Live.Connected() || b.Sessions() != 1 {
			t.Error("the end of the older session ended the newer one's")
		}
		b.quiet(two)
	})
}

func TestSilence(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		if r := b.node(i).Reach(); r != hub.Never {
			t.Errorf("reach %q before it has connected", r)
		}
		c, ended := b.connect(i, ready(nil))
		for range 10 {
			time.Sleep(5 * time.Second)
			b.send(c, &wire.Heartbeat{})
		}
		synctest.Wait()
		if r := b.node(i).Reach(); r != hub.Connected {
			t.Errorf("reach %q with heartbeats", r)
		}
		start := time.Now()
		<-ended
		if d := time.Since(start); d < 15*time.Second || d > 21*time.Second {
			t.Errorf("a silent node's session ended after %v, want 3 heartbeats", d)
		}
		synctest.Wait()
		if n := b.node(i); n.Reach() != hub.Unreachable || n.State.Node != wire.Ready {
			t.Errorf("reach %q, state %s", n.Reach(), n.State.Node)
		}
	})
}

// TestWriteRate holds the store to the spec's rules: heartbeats and reports at
// most once per half heartbeat, made durable once a minute.
func TestWriteRate(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		var cs []*hubtest.Client
		for n := range 3 {
			c, _ := b.connect(hubtest.Enroll(t, b.Hub, fmt.Sprint("ci-", n)), ready(nil))
			cs = append(cs, c)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		batches, durable := b.store.Counts()
		for s := range 120 {
			for _, c := range cs {
				b.send(c, &wire.Heartbeat{Concurrency: s})
				b.send(c, &wire.Report{Workloads: []wire.Workload{{ID: "0123456789abcdef", Kind: wire.KindJob, PID: s}}, State: ready(nil)})
			}
			time.Sleep(time.Second)
		}
		synctest.Wait()
		nb, nd := b.store.Counts()
		if n := nb - batches; n > 120*2/5+3 {
			t.Errorf("%d batches in 120 s, at most one each 2.5 s is wanted", n)
		}
		if n := nd - durable; n < 2 || n > 5 {
			t.Errorf("%d durable batches in 120 s, want one a minute", n)
		}
		for _, n := range b.Snapshot().Nodes {
			w, err := b.store.Workloads(t.Context(), n.ID)
			if err != nil || w == nil || len(w.List) != 1 || n.VMs != 1 || n.Live.Beat().Beat.Concurrency != 119 {
				t.Errorf("node %s: %+v, %v, %+v", n.Name, w, err, n.Live.Beat())
			}
		}
	})
}

// TestInventoryRate: a node's inventory is made durable at most once a heartbeat,
// however often it changes, and the last one is stored.
func TestInventoryRate(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		c, _ := b.connect(i, ready(nil))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		_, durable := b.store.Counts()
		for s := range 600 {
			b.send(c, &wire.Inventory{Hostname: "ci-1", CPUs: 1 + s})
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		_, nd := b.store.Counts()
		if n := nd - durable; n < 12 || n > 65/5+2 {
			t.Errorf("%d durable batches in 65 s, at most one each 5 s is wanted, and one a minute", n)
		}
		if v := b.node(i).Inventory; v == nil || v.CPUs != 600 {
			t.Errorf("the last inventory: %+v", v)
		}
	})
}

func TestHostileNode(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		for what, data := range map[string]string{
			"no JSON": "{", "a type of the hub's": `{"type":"ping"}`, "a type of nobody": `{"type":"shell"}`, "a handshake": `{"type":"auth","signature":"` + strings.Repeat("ab", 64) + `"}`,
			"a state that is none": `{"type":"report","state":{"node":"root","acquisition":"taking","runner":"none"}}`,
		} {
			i := hubtest.Enroll(t, b.Hub, "ci-1")
			c, ended := b.connect(i, ready(nil))
			if err := c.C.Write(t.Context(), []byte(data)); err != nil {
				t.Fatal(err)
			}
			if m := next[*wire.Closing](b, c); m.Code != wire.ProtocolErr {
				t.Errorf("%s: ended with %+v", what, m)
			}
			if err := <-ended; !errors.Is(err, wire.ErrProtocol) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}

// TestStoreFails has the disk full: nothing is acknowledged, what was is kept,
// and the hub goes on once there is room.
func TestStoreFails(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		c, ended := b.connect(i, ready(nil))
		cmd, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
		if err != nil {
			t.Fatal(err)
		}
		next[*wire.Command](b, c)
		b.store.Fail(fmt.Errorf("%w: x", hub.ErrFull))
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(2)}); fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), "disk is full") {
			t.Errorf("SetPolicy: %v", err)
		}
		if n := b.node(i); n.Desired.Generation != 0 || b.Sick() == "" {
			t.Errorf("desired %+v, sick %q", n.Desired, b.Sick())
		}
		b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Accepted})
		if m := next[*wire.Closing](b, c); m.Code != wire.Internal {
			t.Errorf("the session ended with %+v", m)
		}
		<-ended
		b.store.Fail(nil)
		c, _ = b.connect(i, ready(nil))
		b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Accepted})
		next[*wire.Command](b, c)
		next[*wire.Recorded](b, c)
		if b.Sick() != "" {
			t.Errorf("sick: %s", b.Sick())
		}
		lines, _ := b.store.Audit(t.Context(), hub.AuditQuery{Limit: 1000})
		for n, l := range lines {
			if l.Seq != uint64(n+1) {
				t.Errorf("audit line %d has number %d", n+1, l.Seq)
			}
		}
	})
}

func TestPools(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		n, err := b.SetPools(t.Context(), "uid 0", "ci-1", []string{"big", "arm", "big"})
		if err != nil || fmt.Sprint(n.Pools) != "[arm big]" {
			t.Errorf("%v, %v", n, err)
		}
		if _, err := b.SetPools(t.Context(), "uid 0", i.ID[:8], []string{"*"}); fault.KindOf(err) != fault.Usage {
			t.Errorf("a pool named *: %v", err)
		}
		hubtest.Enroll(t, b.Hub, "ci-1")
		if _, err := b.SetPools(t.Context(), "uid 0", "ci-1", nil); fault.KindOf(err) != fault.Conflict {
			t.Errorf("a hostname of two nodes: %v", err)
		}
	})
}

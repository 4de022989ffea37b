package hub_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// TestPings holds the hub to one ping an interval, whether the node says
// something or not: a node gives up on a hub that is silent for three.
func TestPings(t *testing.T) {
	for name, beats := range map[string]time.Duration{"on time": 5 * time.Second, "late": 6 * time.Second, "seldom": 14 * time.Second, "often": time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bench) {
				c, _ := b.connect(hubtest.Enroll(t, b.Hub, "ci-1"), ready(nil))
				stop := make(chan struct{})
				var wg sync.WaitGroup
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						case <-time.After(beats):
							b.send(c, &wire.Heartbeat{})
						}
					}
				})
				start, last := time.Now(), time.Now()
				for n := 0; ; n++ {
					if m, err := c.Receive(t.Context()); err != nil {
						t.Fatal(err)
					} else if _, ok := m.(*wire.Ping); !ok {
						t.Fatalf("%+v, want pings alone", m)
					}
					next := time.Now()
					if gap := next.Sub(last); gap > 15*time.Second/2 {
						t.Errorf("nothing was sent for %v", gap)
					}
					last = next
					if d := next.Sub(start); d > 2*time.Minute {
						if n > 2*60*2/5 {
							t.Errorf("%d pings in %v", n, d)
						}
						break
					}
				}
				close(stop)
				wg.Wait()
			})
		})
	}
}

// TestOldSnapshotsGo: what a hub held before a change is not kept by what it
// holds after it, or it would grow with its history.
func TestOldSnapshotsGo(t *testing.T) {
	h, err := hub.New(t.Context(), hubtest.NewMemory(), hub.Options{Log: logx.ForTest(t)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	defer func() { cancel(); <-done }()
	i := hubtest.Enroll(t, h, "ci-1")
	old := weak.Make(h.Snapshot())
	for n := range 3 {
		if _, err := h.SetPools(ctx, "test", i.ID, []string{fmt.Sprint("p", n)}); err != nil {
			t.Fatal(err)
		}
	}
	for range 100 {
		runtime.GC()
		if old.Value() == nil {
			return
		}
	}
	t.Error("a snapshot of four changes ago is kept")
}

// TestClockMoves sets the hub's wall clock forth and back by days while nodes
// are connected and a drain is under way: sessions go on, what is acknowledged
// stays, the audit log has no gap, and heartbeats are made durable still.
func TestClockMoves(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		c, ended := b.connect(i, ready(nil))
		last := int64(0)
		issue := func(op wire.Op) *hub.Command {
			t.Helper()
			cmd, err := b.Issue(t.Context(), "uid 0", i.ID, op)
			if err != nil {
				t.Fatal(err)
			}
			m := next[*wire.Command](b, c)
			if m.ID != cmd.ID || m.Sent != b.Now().Unix() || m.Expires-m.Sent != 24*3600 || m.Issued <= last || b.Now().Unix() > last && m.Issued != b.Now().Unix() {
				t.Errorf("%s was sent as %+v, after one that was issued at %d; the clock is at %d", op, m, last, b.Now().Unix())
			}
			last = m.Issued
			return cmd
		}
		ack := func(cmd *hub.Command, o wire.Outcome) {
			t.Helper()
			b.send(c, &wire.Ack{Command: cmd.ID, Outcome: o})
			next[*wire.Recorded](b, c)
		}
		drain := issue(wire.OpDrain)
		ack(drain, wire.Accepted)
		for n, by := range []time.Duration{-72 * time.Hour, 200 * time.Hour, -128 * time.Hour} {
			b.ahead.Add(int64(by))
			_, durable := b.store.Counts()
			for range 30 { // two and a half minutes
				b.send(c, &wire.Heartbeat{Concurrency: n + 1})
				time.Sleep(5 * time.Second)
				if m, err := c.Receive(t.Context()); err != nil {
					t.Fatal(err)
				} else if _, ok := m.(*wire.Ping); !ok {
					t.Fatalf("%v: the hub sent %+v", by, m)
				}
			}
			synctest.Wait()
			if r := b.node(i).Reach(); r != hub.Connected {
				t.Fatalf("%v: the node is %s", by, r)
			}
			if _, now := b.store.Counts(); now == durable {
				t.Errorf("%v: nothing was made durable in two minutes", by)
			}
			if open := b.node(i).Open; len(open) != 1 || open[0].ID != drain.ID || open[0].Outcome != wire.Accepted {
				t.Errorf("%v: open commands %+v", by, open)
			}
			other := issue(wire.OpQuarantine)
			ack(other, wire.Done)
			ack(other, wire.Failed) // late: never replaced
			if got, err := b.store.Command(t.Context(), other.ID); err != nil || got.Outcome != wire.Done {
				t.Errorf("%v: %+v, %v", by, got, err)
			}
		}
		ack(drain, wire.Done)
		lines, err := b.store.Audit(t.Context(), hub.AuditQuery{Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for n, l := range lines {
			if l.Seq != lines[0].Seq+uint64(n) {
				t.Errorf("line %d after %d", l.Seq, lines[0].Seq+uint64(n)-1)
			}
		}
		select {
		case err := <-ended:
			t.Errorf("the session ended: %v", err)
		default:
		}
	})
}

// cutOff is a connection that may be cut: the peer hears nothing then, and the
// end is waited for as long as WebSockets do.
type cutOff struct {
	*hubtest.End
	cut atomic.Bool
}

func (c *cutOff) Write(ctx context.Context, b []byte) error {
	if c.cut.Load() {
		return nil
	}
	return c.End.Write(ctx, b)
}

func (c *cutOff) Close(code int, reason string) error {
	if c.cut.Load() {
		time.Sleep(5 * time.Second)
	}
	return c.End.Close(code, reason)
}

// TestCutOff: a node that is cut off is unreachable once it was silent for three
// heartbeats, however long it takes to see that it does not hear so.
func TestCutOff(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		near, end := hubtest.Pipe()
		far := &cutOff{End: end}
		b.wg.Go(func() { b.Serve(b.ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) })
		c, err := i.Dial(t.Context(), near, wire.Plaintext, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatal(err)
		}
		b.send(c, &wire.Report{State: ready(nil)})
		synctest.Wait()
		far.cut.Store(true)
		time.Sleep(14 * time.Second)
		if r := b.node(i).Reach(); r != hub.Connected {
			t.Errorf("%s after 14 s", r)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if r := b.node(i).Reach(); r != hub.Unreachable {
			t.Errorf("%s after 17 s", r)
		}
	})
}

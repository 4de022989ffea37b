package hub_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
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

package hub_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// lone is a hub that a target's runs share.
func lone(f *testing.F) *hub.Hub {
	ctx, cancel := context.WithCancel(context.Background())
	h, err := hub.New(ctx, hubtest.NewMemory(), hub.Options{Log: logx.Discard()})
	if err != nil {
		f.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	f.Cleanup(func() { cancel(); <-done })
	return h
}

// FuzzSession has an enrolled node send anything, a message a line: its session
// may end, the hub goes on, and what it holds can be stored and shown.
func FuzzSession(f *testing.F) {
	for _, m := range []wire.Message{
		&wire.Report{State: ready(nil), Workloads: []wire.Workload{{ID: "0123456789abcdef", Kind: wire.KindJob, PID: 1}}},
		&wire.Report{State: ready(&wire.Applied{Generation: 3, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 2}})},
		&wire.Inventory{Hostname: "ci-1"}, &wire.Heartbeat{VMs: map[string]int64{"0123456789abcdef": 1}}, &wire.Ack{Command: wire.NewID(), Outcome: wire.Done},
	} {
		b, err := wire.Encode(wire.VersionEgress, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(b, "\n"+`{"type":"job","kind":"held","jobs":["0123456789abcdef0123456789abcdef"],"reservations":[]}`...))
	}
	h := lone(f)
	i, err := hubtest.Join(context.Background(), h, "ci-1")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		near, far := hubtest.Pipe()
		ended := make(chan struct{})
		go func() { defer close(ended); h.Serve(ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) }()
		c, err := i.Dial(ctx, near, wire.Plaintext, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatalf("the hub does not take its node any more: %v", err)
		}
		read := sayLines(ctx, near, data)
		c.Close()
		<-ended
		<-read
		if _, err := h.SetPools(ctx, "test", i.ID, []string{"p" + wire.NewHex(4)}); err != nil {
			t.Fatalf("the hub changes nothing any more: %v", err)
		}
		if n := h.Snapshot().Nodes[i.ID]; n == nil || n.Sync() == "" || n.Reach() == hub.Connected {
			t.Errorf("the node is %+v", n)
		}
	})
}

// FuzzHandshake has somebody without a key say anything, a message a line: there
// is no session, and the hub goes on.
func FuzzHandshake(f *testing.F) {
	id := wire.NewID()
	for _, m := range []wire.Message{
		&wire.Hello{Node: id, Incarnation: wire.NewID(), Versions: wire.Spoken, VK: "test"}, &wire.Auth{Signature: wire.NewHex(64)}, &wire.Heartbeat{},
	} {
		b, err := wire.Encode(0, m)
		if err != nil {
			continue // not of a handshake
		}
		f.Add(append(append(b, '\n'), `{"type":"auth","signature":"`+wire.NewHex(64)+`"}`...))
	}
	h := lone(f)
	i, err := hubtest.Join(context.Background(), h, "ci-1")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		near, far := hubtest.Pipe()
		ended := make(chan struct{})
		go func() { defer close(ended); h.Serve(ctx, far, hub.Peer{Channel: wire.Plaintext, Remote: "pipe"}) }()
		read := make(chan struct{})
		go func() {
			defer close(read)
			for {
				b, err := near.Read(ctx)
				if err != nil {
					return
				}
				if bytes.Contains(b, []byte(`"welcome"`)) {
					t.Errorf("it is welcome: %s", b)
				}
			}
		}()
		// A node's own id, which is no secret.
		for line := range bytes.SplitSeq(bytes.ReplaceAll(data, []byte(id), []byte(i.ID)), []byte("\n")) {
			if near.Write(ctx, line) != nil {
				break
			}
		}
		near.CloseNow()
		<-ended
		<-read
		if n := h.Snapshot().Nodes[i.ID]; n == nil || n.Reach() != hub.Never {
			t.Errorf("the node is %+v", n)
		}
	})
}

// sayLines says each line of data, while what the hub says is read: it would
// wait otherwise. heard is closed once the connection has ended.
func sayLines(ctx context.Context, near *hubtest.End, data []byte) (heard <-chan struct{}) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		for {
			if _, err := near.Read(ctx); err != nil {
				return
			}
		}
	}()
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		if near.Write(ctx, line) != nil {
			break
		}
	}
	return read
}

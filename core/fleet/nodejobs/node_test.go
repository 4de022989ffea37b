package nodejobs_test

import (
	"context"
	"slices"
	"testing"

	"virtkit/core/fleet/job"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/nodejobs"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// TestNode: a job's life through a node's loop: the hub is told what is held,
// offers, starts, stores; a drain waits for the job.
func TestNode(t *testing.T) {
	dir := t.TempDir()
	nodetest.Enroll(t, dir)
	journal, err := jobdir.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, journal: journal, drivers: newDrivers()}
	b := newBooks()
	jobs, err := nodejobs.New(nodejobs.Config{Journal: journal, Ledger: b, Drivers: r.drivers, Log: logx.ForTest(t), Limit: 5})
	if err != nil {
		t.Fatal(err)
	}
	hub := nodetest.NewHub()
	n, err := node.Open(t.Context(), node.Config{StateDir: dir, Dialer: hub, Host: nodetest.NewHost(), Runner: nodetest.NewRunner(wire.RunnerNone), Jobs: jobs, Log: logx.ForTest(t), VK: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	l := hub.Accept(t)
	l.Open()
	rep := l.Next().(*wire.Report)
	if p := rep.State.Placed; p == nil || p.Limit != 5 {
		t.Errorf("placed: %+v", p)
	}
	if h := nodetest.Find(l, func(*wire.Held) bool { return true }); len(h.Jobs)+len(h.Reservations) > 0 {
		t.Errorf("held: %+v", h)
	}
	l.Say(&wire.Offer{Reservation: resID(1), Envelope: envelope(64), LeaseSecs: 60})
	if a := nodetest.Find(l, func(*wire.OfferReply) bool { return true }); a.Reply.State != "accepted" {
		t.Fatalf("%+v", a)
	}
	id := wire.NewID()
	l.Say(&wire.Start{Job: id, Reservation: resID(1), Envelope: envelope(64), Spec: spec(t, 3, 1)})
	if st := nodetest.Find(l, func(*wire.JobState) bool { return true }); st.State.State != "accepted" {
		t.Fatalf("%+v", st)
	}
	r.print(id, "hello\n")
	if o := nodetest.Find(l, func(*wire.Output) bool { return true }); data(t, o) != "hello\n" {
		t.Errorf("%+v", o)
	}
	l.Say(&wire.Command{ID: wire.NewID(), Op: wire.OpDrain, Expires: 1 << 40})
	nodetest.Find(l, func(m *wire.Report) bool {
		return m.State.Node == wire.Draining && m.State.Drain != nil && m.State.Drain.Jobs == 1
	})
	l.Say(&wire.Offer{Reservation: resID(2), Envelope: envelope(64), LeaseSecs: 60})
	if a := nodetest.Find(l, func(*wire.OfferReply) bool { return true }); a.Reply.Reason != "not_ready" {
		t.Errorf("%+v", a)
	}
	// The connection is lost; the job goes on.
	l.Cut()
	l = hub.Accept(t)
	l.Open()
	if h := nodetest.Find(l, func(*wire.Held) bool { return true }); !slices.Equal(h.Jobs, wire.IDs{id}) {
		t.Errorf("held: %+v", h)
	}
	l.Say(&wire.OutputAck{Job: id, Offset: 6})
	r.print(id, "bye\n")
	r.finish(id, job.Result{})
	if o := nodetest.Find(l, func(*wire.Output) bool { return true }); o.Offset != 6 || data(t, o) != "bye\n" {
		t.Errorf("%+v", o)
	}
	l.Say(&wire.OutputAck{Job: id, Offset: 10})
	if res := nodetest.Find(l, func(*wire.Result) bool { return true }); res.Job != id || res.Result.OutputLen != 10 {
		t.Errorf("%+v", res)
	}
	l.Say(&wire.JobRecorded{Job: id})
	nodetest.Find(l, func(m *wire.Report) bool { return m.State.Node == wire.Drained })
	r.until("the journal is empty", func() bool { ids, err := journal.List(); return err == nil && len(ids) == 0 })
}

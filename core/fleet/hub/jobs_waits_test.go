package hub_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// TestCapacityIsHeld: an answer waits for its revision to move, a minute at most.
func TestCapacityIsHeld(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		f.node("a", 2)
		ask := func(after uint64, wait int) (*dispatch.Capacity, time.Duration) {
			began := time.Now()
			c, e := f.Capacity(t.Context(), f.relay, &dispatch.CapacityRequest{Placement: small, After: after, WaitSecs: wait})
			if e != nil {
				t.Fatal(e)
			}
			return c, time.Since(began)
		}
		now, took := ask(0, 0)
		if now.Fits != 2 || took != 0 {
			t.Fatalf("%+v after %v, want 2 at once", now, took)
		}
		if c, took := ask(now.Revision-1, 30); took != 0 || *c != *now {
			t.Errorf("past an older revision: %+v after %v, want %+v at once", c, took, now)
		}
		if c, took := ask(now.Revision, 3600); took != 60*time.Second || *c != *now {
			t.Errorf("nothing moved: %+v after %v, want %+v after a minute", c, took, now)
		}
		time.AfterFunc(7*time.Second, func() { f.reserve(0) })
		c, took := ask(now.Revision, 30)
		if c.Fits != 1 || c.Revision <= now.Revision || took < 7*time.Second || took > 8*time.Second {
			t.Errorf("once one was reserved: %+v after %v; before it %+v", c, took, now)
		}
	})
}

// TestUnansweredOffer: a node that does not answer within five seconds is passed
// over, and what it accepts later is given back.
func TestUnansweredOffer(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		slow, other := f.node("a", 8), f.node("b", 4) // a has more room: it is asked first
		set(slow, &slow.Answer, func(m wire.Message) string {
			if _, ok := m.(*wire.Offer); ok {
				time.Sleep(7 * time.Second)
			}
			return ""
		})
		began := time.Now()
		g, e := f.reserve(30)
		if e != nil || g.Node != other.ID || time.Since(began) != 5*time.Second {
			t.Fatalf("%+v, %v after %v, want node b after 5 s", g, e, time.Since(began))
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if held, _ := slow.Holds(); len(held) != 0 || slow.Offers != 1 {
			t.Errorf("the slow node holds %v after %d offers, want nothing after one", held, slow.Offers)
		}
		if held, _ := other.Holds(); len(held) != 1 {
			t.Errorf("the other holds %v, want one", held)
		}
	})
}

// TestUnansweredRenewal: it is unavailable after ten seconds, and the
// reservation stays.
func TestUnansweredRenewal(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 4)
		g := f.mustReserve()
		set(n, &n.Answer, func(wire.Message) string { time.Sleep(12 * time.Second); return "memory" })
		go f.Reserve(context.Background(), f.relay, &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90}, "x")
		synctest.Wait() // the node is at that offer
		began := time.Now()
		if _, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 90}); code(e) != "503 unavailable" || e.RetryAfterSecs == 0 || time.Since(began) != 10*time.Second {
			t.Errorf("%v after %v, want 503 unavailable after 10 s", e, time.Since(began))
		}
		time.Sleep(10 * time.Second)
		if r, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 90}); e != nil || r.LeaseSecs != 90 {
			t.Errorf("once the node answers: %+v, %v", r, e)
		}
	})
}

// TestLeaseAsGranted: a producer is told the lease that the node gave.
func TestLeaseAsGranted(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 4)
		set(n, &n.Lease, 40)
		g := f.mustReserve()
		if g.LeaseSecs != 40 {
			t.Errorf("granted %d s, the node gave 40", g.LeaseSecs)
		}
		if r, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 90}); e != nil || r.LeaseSecs != 40 {
			t.Errorf("renewed: %+v, %v; the node gave 40", r, e)
		}
		other, _ := hubtest.NewRelay(t, f.Hub, gitlab, "gl")
		if e := f.Release(t.Context(), f.relay, g.Reservation); e != nil {
			t.Fatal(e)
		}
		if _, e := f.Renew(t.Context(), other, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 90}); code(e) != "404 not_found" {
			t.Errorf("another's reservation that has ended: %v", e)
		}
	})
}

// TestLapse: a node that never says that a lease has run out does not keep the
// room for ever.
func TestLapse(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 1)
		g := f.mustReserve()
		time.Sleep(100 * time.Second)
		if held, _ := n.Holds(); len(held) != 1 {
			t.Fatalf("the node holds %v, want the reservation: it is late to tell", held)
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if held, _ := n.Holds(); len(held) != 0 {
			t.Errorf("the node still holds %v", held)
		}
		if _, e := f.Renew(t.Context(), f.relay, g.Reservation, &dispatch.RenewRequest{LeaseSecs: 90}); code(e) != "410 reservation_gone" {
			t.Errorf("renewed: %v", e)
		}
		lines, _ := f.store.Audit(t.Context(), hub.AuditQuery{Limit: 100})
		if !slices.ContainsFunc(lines, func(l hub.AuditLine) bool {
			return l.Event == "reservation ended" && strings.Contains(l.Detail, "without the node's word")
		}) {
			t.Errorf("the audit log does not say so: %+v", lines)
		}
	})
}

// TestRequestIDLastsADay: after a day a request_id is a new one's.
func TestRequestIDLastsADay(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		n := f.node("a", 4)
		q := &dispatch.ReservationRequest{RequestID: wire.NewID(), Placement: small, LeaseSecs: 90}
		first, e := f.Reserve(t.Context(), f.relay, q, "1")
		if e != nil {
			t.Fatal(e)
		}
		hang := f.connect(n) // the reservation ends with its session
		hang()
		time.Sleep(23 * time.Hour)
		if again, e := f.Reserve(t.Context(), f.relay, q, "1"); e != nil || *again != *first {
			t.Errorf("within the day: %+v, %v, want the first answer", again, e)
		}
		time.Sleep(2 * time.Hour)
		f.connect(n)
		if again, e := f.Reserve(t.Context(), f.relay, q, "2"); e != nil || again.Reservation == first.Reservation {
			t.Errorf("a day later: %+v, %v, want another reservation", again, e)
		}
	})
}

// TestUnfinishedJobsAreBounded: 4,096 jobs that have not finished are as many as
// a hub takes, until one has.
func TestUnfinishedJobsAreBounded(t *testing.T) {
	inFleet(t, hub.JobOptions{}, func(t *testing.T, f *fleet) {
		var first string
		for n := range 4096 { // no node: they wait
			v, e := f.submit(f.submission("", nil))
			if e != nil {
				t.Fatalf("job %d: %v", n+1, e)
			}
			if n == 0 {
				first = v.ID
			}
		}
		more := f.submission("", nil)
		if _, e := f.submit(more); code(e) != "503 unavailable" {
			t.Errorf("one more: %v", e)
		}
		if _, e := f.Cancel(t.Context(), f.relay, first, wire.CancelImmediate); e != nil {
			t.Fatal(e)
		}
		synctest.Wait()
		if _, e := f.submit(more); e != nil {
			t.Errorf("one more after one has ended: %v", e)
		}
	})
}

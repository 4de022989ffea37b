package node_test

import (
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/node/nodetest"
	"virtkit/core/fleet/wire"
)

// TestHubsClock: a command's expiry is told by the hub's clock, whatever the
// node's says, and a clock of the node that is moved changes nothing.
func TestHubsClock(t *testing.T) {
	for name, off := range map[string]time.Duration{"behind": -50 * time.Hour, "ahead": 50 * time.Hour} {
		in(t, wire.RunnerNone, func(r *rig) {
			const hub = int64(1780000000)
			r.hub.Time = hub
			r.now = func() time.Time { return time.Unix(hub, 0).Add(off) }
			r.begin()
			l := r.open()
			l.KeepAlive(5 * time.Second)
			c := &wire.Command{ID: wire.NewID(), Op: wire.OpUndrain, Issued: hub, Expires: hub + 10}
			l.Say(c)
			if a := nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID }); a.Outcome != wire.Done {
				t.Errorf("%s: a fresh command is %s", name, a.Outcome)
			}
			time.Sleep(20 * time.Second)
			c = &wire.Command{ID: wire.NewID(), Op: wire.OpQuarantine, Issued: hub, Expires: hub + 10}
			l.Say(c)
			if a := nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID }); a.Outcome != wire.Expired {
				t.Errorf("%s: a command that is past its expiry is %s", name, a.Outcome)
			}
			// The hub's clock is set in the session: each command says what it is.
			for _, set := range []time.Duration{-50 * time.Hour, 100 * time.Hour} {
				now := hub + int64(set/time.Second)
				c = &wire.Command{ID: wire.NewID(), Op: wire.OpUndrain, Issued: now, Expires: now + 10, Sent: now}
				l.Say(c)
				if a := nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID }); a.Outcome != wire.Done {
					t.Errorf("%s: a fresh command of a hub whose clock was set by %v is %s: %s", name, set, a.Outcome, a.Message)
				}
				c = &wire.Command{ID: wire.NewID(), Op: wire.OpQuarantine, Issued: now - 100, Expires: now - 10, Sent: now}
				l.Say(c)
				if a := nodetest.Find(l, func(a *wire.Ack) bool { return a.Command == c.ID }); a.Outcome != wire.Expired {
					t.Errorf("%s: a command past its expiry of a hub whose clock was set by %v is %s", name, set, a.Outcome)
				}
			}
			for _, e := range r.node.Store().State().Journal {
				if e.Sent != 0 {
					t.Errorf("%s: the journal keeps a delivery's time: %+v", name, e)
				}
			}
			r.end()
		})
	}
}

// TestHostileHub: what a hub can say in a session without making the node do
// more than it may.
func TestHostileHub(t *testing.T) {
	for name, c := range map[string]struct {
		raw  string
		ends bool
	}{
		"unknown type":        {`{"type":"shell","argv":["sh"]}`, true},
		"from a node":         {`{"type":"heartbeat","admission":{}}`, true},
		"a second challenge":  {`{"type":"challenge","nonce":"` + strings.Repeat("a", 64) + `","versions":{"min":1,"max":6},"version":6}`, true},
		"huge ceiling":        {`{"type":"desired","generation":9,"policy":{"ceiling":99999999999}}`, true},
		"negative ceiling":    {`{"type":"desired","generation":9,"policy":{"ceiling":-1}}`, true},
		"generation 0":        {`{"type":"desired","generation":0,"policy":{}}`, true},
		"generation 2^60":     {`{"type":"desired","generation":1152921504606846976,"policy":{}}`, true},
		"not JSON":            {`{"type":"desired",`, true},
		"2 MiB":               {`{"type":"ping","x":"` + strings.Repeat("x", 2<<20) + `"}`, true},
		"unknown fields":      {`{"type":"ping","run":"rm -rf /"}`, false},
		"unknown op":          {`{"type":"command","id":"` + strings.Repeat("7", 32) + `","op":"shell","expires_at":9999999999}`, false},
		"update":              {`{"type":"command","id":"` + strings.Repeat("8", 32) + `","op":"update","expires_at":9999999999,"update":{"sha256":"` + strings.Repeat("a", 64) + `","size":1,"force":true}}`, false},
		"recorded of nothing": {`{"type":"recorded","command":"` + strings.Repeat("9", 32) + `","outcome":"done"}`, false},
		"an offer":            {`{"type":"job","kind":"offer","reservation":"` + strings.Repeat("9", 32) + `","envelope":{"mem_bytes":1,"cpus":1},"lease_secs":5}`, false},
		"a start":             {`{"type":"job","kind":"start","job":"` + strings.Repeat("9", 32) + `","envelope":{"mem_bytes":1,"cpus":1},"spec":{}}`, false},
	} {
		in(t, wire.RunnerNone, func(r *rig) {
			r.begin()
			l := r.open()
			// The node stands at generation 5, stopped and drained.
			l.Say(&wire.Desired{Generation: 5, ID: wire.NewID(), Policy: wire.Policy{Stop: true, Ceiling: 2}})
			nodetest.Find(l, func(m *wire.Report) bool { return m.State.Applied != nil })
			l.Raw(c.raw)
			l.KeepAlive(time.Second)
			go drainLink(l)
			time.Sleep(10 * time.Second)
			select {
			case <-l.Closed():
				if !c.ends {
					t.Errorf("%s: the session ended", name)
				}
			default:
				if c.ends {
					t.Errorf("%s: the session went on", name)
				}
			}
			st := r.node.Store().State()
			if st.Node != wire.Ready || st.Applied.Generation != 5 || !st.Policy().Stop || st.MayTake() {
				t.Errorf("%s: %+v, %+v", name, st, st.Applied)
			}
			for _, e := range st.Journal {
				if e.Outcome != wire.Declined {
					t.Errorf("%s: %s of %s", name, e.Outcome, e.Op)
				}
			}
			r.end()
		})
	}
}

// TestRestoredHub: a hub that is behind moves nothing, and the report names the
// conflict and what the node holds to.
func TestRestoredHub(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		r.begin()
		l := r.open()
		id := wire.NewID()
		l.Say(&wire.Desired{Generation: 7, ID: id, Policy: wire.Policy{Stop: true}})
		nodetest.Find(l, func(m *wire.Report) bool { return m.State.Applied != nil })
		l.Cut()
		l = r.open()
		l.Say(&wire.Desired{Generation: 3, ID: wire.NewID()})
		rep := nodetest.Find(l, func(m *wire.Report) bool { return m.State.Conflict != "" })
		if a := rep.State.Applied; a.Generation != 7 || a.ID != id || !a.Policy.Stop || rep.State.Acquisition != wire.Stopped {
			t.Errorf("%+v, %+v", rep.State, a)
		}
		// The operator's decision is a newer generation; the conflict is over.
		l.Say(&wire.Desired{Generation: 8, ID: wire.NewID(), Policy: wire.Policy{Ceiling: 1}})
		rep = nodetest.Find(l, func(m *wire.Report) bool { return m.State.Applied.Generation == 8 })
		if rep.State.Conflict != "" {
			t.Errorf("conflict %q", rep.State.Conflict)
		}
		r.end()
	})
}

// TestAnotherHub: a hub with another id than the one that enrolled the node
// gets no session.
func TestAnotherHub(t *testing.T) {
	in(t, wire.RunnerNone, func(r *rig) {
		was := nodetest.HubID
		nodetest.HubID = wire.NewID()
		defer func() { nodetest.HubID = was }()
		r.begin()
		l := r.open()
		<-l.Closed()
		for m := l.Next(); m != nil; m = l.Next() {
			t.Errorf("the node said %T", m)
		}
		r.end()
	})
}

package hub_test

import (
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hub/hubtest"
	"virtkit/core/fleet/wire"
)

// TestAudited is a node's life as the audit log has it: what operators do, with
// what it made, and what the node reports of it, each once.
func TestAudited(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		i := hubtest.NewKey()
		for range 2 { // the second time with the same key
			token, err := b.CreateToken(t.Context(), "uid 7", time.Hour)
			must(err)
			r, err := b.Enroll(t.Context(), i.EnrollRequest(token, "ci-1", wire.Plaintext), wire.Plaintext, "10.0.0.9:1")
			must(err)
			i.ID = r.Node
		}
		c, _ := b.connect(i, ready(nil))
		_, err := b.SetPolicy(t.Context(), "uid 7", i.ID, hub.PolicyChange{Ceiling: ptr(4)})
		must(err)
		_, err = b.SetPolicy(t.Context(), "uid 7", i.ID, hub.PolicyChange{Stop: ptr(true)})
		must(err)
		_, err = b.SetPolicy(t.Context(), "uid 7", i.ID, hub.PolicyChange{Stop: ptr(true)}) // changes nothing
		must(err)
		next[*wire.Desired](b, c)
		d := next[*wire.Desired](b, c)
		_, err = b.SetPools(t.Context(), "uid 7", i.ID, []string{"b", "a"})
		must(err)
		cmd, err := b.Issue(t.Context(), "uid 7", i.ID, wire.OpDrain)
		must(err)
		next[*wire.Command](b, c)
		st := ready(applied(d))
		st.Node, st.Acquisition, st.Unsupported = wire.Draining, wire.Stopped, []string{"the runner may still take jobs"}
		for range 2 { // said again, it is the same
			b.send(c, &wire.Report{State: st})
			b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Accepted})
			next[*wire.Recorded](b, c)
		}
		st2, update := *st, wire.NewID()
		st2.Node, st2.Update = wire.Drained, &wire.Progress{Command: update, Phase: "downloading", Target: strings.Repeat("ab", 32)}
		for range 2 {
			b.send(c, &wire.Report{State: &st2})
		}
		for range 2 {
			b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Done, Message: "all three hold"})
			next[*wire.Recorded](b, c)
		}
		b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Accepted}) // late
		next[*wire.Recorded](b, c)
		b.send(c, &wire.Ack{Command: wire.NewID(), Outcome: wire.Done}) // of nobody
		next[*wire.Recorded](b, c)
		c.C.CloseNow()
		synctest.Wait()
		never, err := b.Issue(t.Context(), "uid 8", i.ID, wire.OpUndrain)
		must(err)
		b.later(32 * 24 * time.Hour)
		_, err = b.Remove(t.Context(), "uid 8", i.ID)
		must(err)

		lines, err := b.store.Audit(t.Context(), hub.AuditQuery{Limit: 1000})
		must(err)
		hash := regexp.MustCompile(`token [0-9a-f]{8}`)
		until := regexp.MustCompile(`valid until \S+`)
		var got []string
		for _, l := range lines {
			node := "-"
			if l.Node == i.ID {
				node = "node"
			}
			s := strings.TrimSuffix(strings.Join([]string{node, l.Actor, l.Event, l.Detail}, "|"), "|")
			s = until.ReplaceAllString(hash.ReplaceAllString(s, "token HASH"), "valid until THEN")
			got = append(got, strings.ReplaceAll(strings.ReplaceAll(s, cmd.ID, "DRAIN"), never.ID, "UNDRAIN"))
		}
		want := []string{
			"-|uid 7|token created|token HASH…, valid until THEN",
			"node|token HASH|enrolled|ci-1, from 10.0.0.9:1, token of uid 7",
			"-|uid 7|token created|token HASH…, valid until THEN",
			"node|token HASH|enrolled again|ci-1, from 10.0.0.9:1, token of uid 7",
			"node|node|connected|protocol version 6",
			"node|node|state ready",
			"node|uid 7|desired state|generation 1: ceiling 4, acquisition on",
			"node|uid 7|desired state|generation 2: ceiling 4, acquisition stopped",
			"node|uid 7|pools|a b",
			"node|uid 7|command issued|drain DRAIN",
			"node|node|state draining",
			"node|node|applied|generation 2: ceiling 4, acquisition stopped",
			"node|node|cannot comply|the runner may still take jobs",
			"node|node|command accepted|drain DRAIN",
			"node|node|state drained",
			"node|node|update downloading|" + strings.Repeat("ab", 32),
			"node|node|command done|drain DRAIN all three hold",
			"node|uid 8|command issued|undrain UNDRAIN",
			"node|hub|command expired|undrain UNDRAIN was never answered",
			"node|uid 8|removed|ci-1",
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("the audit log:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// TestNothingBeforeTheReport: in each of its sessions a node is sent neither its
// desired state nor a command before it has reported, though the hub knows its
// state from before.
func TestNothingBeforeTheReport(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		c, _ := b.connect(i, ready(nil))
		c.C.CloseNow()
		synctest.Wait()
		if _, err := b.SetPolicy(t.Context(), "uid 0", i.ID, hub.PolicyChange{Ceiling: ptr(4)}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain); err != nil {
			t.Fatal(err)
		}
		c, _, err := b.dial(i, wire.NewID(), wire.Spoken)
		if err != nil {
			t.Fatal(err)
		}
		b.quiet(c)
		if _, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpUndrain); err != nil { // one that comes meanwhile
			t.Fatal(err)
		}
		b.quiet(c)
		b.send(c, &wire.Report{State: ready(nil)})
		next[*wire.Desired](b, c)
		next[*wire.Command](b, c)
		next[*wire.Command](b, c)
	})
}

// TestLongDrain: a command that its node has taken stays open for as long as it
// takes, past the time after which one that was never answered is settled.
func TestLongDrain(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		i := hubtest.Enroll(t, b.Hub, "ci-1")
		c, _ := b.connect(i, ready(nil))
		cmd, err := b.Issue(t.Context(), "uid 0", i.ID, wire.OpDrain)
		if err != nil {
			t.Fatal(err)
		}
		next[*wire.Command](b, c)
		b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Accepted})
		next[*wire.Recorded](b, c)
		c.C.CloseNow()
		b.later(40 * 24 * time.Hour)
		if n := b.node(i); len(n.Open) != 1 || n.Open[0].Outcome != wire.Accepted {
			t.Errorf("after 40 days it has %+v", n.Open)
		}
		c, _ = b.connect(i, ready(nil))
		next[*wire.Command](b, c) // once a session, until it has ended
		b.send(c, &wire.Ack{Command: cmd.ID, Outcome: wire.Done})
		next[*wire.Recorded](b, c)
		if n := b.node(i); len(n.Open) != 0 {
			t.Errorf("done, it is open: %+v", n.Open[0])
		}
	})
}

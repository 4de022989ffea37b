package hubtest

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// RunSuite tests what hub.Store promises. open gives an empty store, and
// reopen the same one again after it was closed, as a new process would find
// it; a store that cannot be reopened gives itself.
func RunSuite(t *testing.T, open func(*testing.T) (s hub.Store, reopen func() hub.Store)) {
	for name, f := range map[string]func(*testing.T, hub.Store, func() hub.Store){
		"records": suiteRecords, "removal": suiteRemoval, "tokens": suiteTokens, "commands": suiteCommands, "pruning": suitePruning,
		"audit": suiteAudit, "audit-kept": suiteAuditKept, "observed": suiteObserved, "people": suitePeople,
	} {
		t.Run(name, func(t *testing.T) {
			s, reopen := open(t)
			f(t, s, reopen)
		})
	}
	for name, f := range jobSuite {
		t.Run(name, func(t *testing.T) {
			s, reopen := open(t)
			f(t, s, reopen)
		})
	}
}

func apply(t *testing.T, s hub.Store, b hub.Batch) {
	t.Helper()
	if err := s.Apply(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, s hub.Store) *hub.Loaded {
	t.Helper()
	l, err := s.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func key(n byte) ed25519.PublicKey {
	k := make(ed25519.PublicKey, ed25519.PublicKeySize)
	k[0] = n
	return k
}

func id(n int) string { return fmt.Sprintf("%032x", n) }

func suiteRecords(t *testing.T, s hub.Store, reopen func() hub.Store) {
	was := load(t, s).Hub
	if !wire.IsHex(was, wire.IDLen) {
		t.Errorf("the hub's id is %q", was)
	}
	full := &hub.Record{ID: id(1), Key: key(1), Name: "ci-1", Enrolled: 7, Version: 6, Incarnation: id(9),
		Desired: wire.Desired{Generation: 1 << 52, ID: id(3), Policy: wire.Policy{Ceiling: 4, Stop: true}}, Pools: []string{"a", "b"},
		State:    &wire.State{Node: wire.Drained, Acquisition: wire.Stopped, Runner: wire.RunnerNone, Applied: &wire.Applied{Generation: 2, ID: id(4)}},
		Reported: 8, VMs: 3, Omitted: 1, Inventory: &wire.Inventory{Hostname: "ci-1", CPUs: 8}, LastCommand: id(5),
		Conflict: &hub.Conflict{Since: 1, Reasons: []string{"x"}, State: wire.Ready, Node: &wire.Applied{Generation: 9}}}
	bare := &hub.Record{ID: id(2), Key: key(2)}
	apply(t, s, hub.Batch{Records: []*hub.Record{bare, full}, Durable: true})
	check := func(s hub.Store, want ...*hub.Record) {
		t.Helper()
		l := load(t, s)
		if l.Hub != was {
			t.Errorf("the hub's id was %s, is %s", was, l.Hub)
		}
		slices.SortFunc(l.Records, func(a, b *hub.Record) int { return int(a.Key[0]) - int(b.Key[0]) })
		if !reflect.DeepEqual(l.Records, want) {
			t.Errorf("records\n%+v\nwant\n%+v", deref(l.Records), deref(want))
		}
	}
	check(s, full, bare)
	changed := *full
	changed.State, changed.Conflict, changed.Pools, changed.VMs = nil, nil, nil, 0
	apply(t, s, hub.Batch{Records: []*hub.Record{&changed}})
	check(s, &changed, bare)
	check(reopen(), &changed, bare)
}

func deref(rs []*hub.Record) (out []hub.Record) {
	for _, r := range rs {
		out = append(out, *r)
	}
	return out
}

func suiteRemoval(t *testing.T, s hub.Store, reopen func() hub.Store) {
	for n := range 2 {
		apply(t, s, hub.Batch{Records: []*hub.Record{{ID: id(n), Key: key(byte(n))}}, Heartbeats: []hub.Heartbeat{{Node: id(n), At: 1, Beat: &wire.Heartbeat{}}},
			Workloads: []hub.Workloads{{Node: id(n), At: 1}}, Issued: []hub.Issued{{Node: id(n), Desired: wire.Desired{Generation: 1, ID: id(7)}}},
			Commands: []*hub.Command{command(n, n)}, Audit: []hub.AuditLine{{Seq: uint64(n + 1), Node: id(n), Actor: "a", Event: "e"}}})
	}
	apply(t, s, hub.Batch{Removed: []string{id(0)}, Revoked: []hub.Revoked{{Node: id(0), Key: key(0), At: 5}}, Durable: true})
	for _, get := range []func() hub.Store{func() hub.Store { return s }, reopen} {
		s := get()
		l := load(t, s)
		if len(l.Records) != 1 || l.Records[0].ID != id(1) || len(l.Heartbeats) != 1 || len(l.Commands) != 1 {
			t.Errorf("after the removal: %d records, %d heartbeats, %d commands; want one of each", len(l.Records), len(l.Heartbeats), len(l.Commands))
		}
		if len(l.Revoked) != 1 || !l.Revoked[0].Key.Equal(key(0)) || l.Revoked[0].At != 5 {
			t.Errorf("revoked: %+v", l.Revoked)
		}
		for n, want := range []bool{false, true} {
			w, err := s.Workloads(t.Context(), id(n))
			known, kerr := s.Issued(t.Context(), id(n), id(7))
			if err != nil || kerr != nil || (w != nil) != want || known != want {
				t.Errorf("node %d: workloads %v, desired state known %v (%v, %v); want %v", n, w, known, err, kerr, want)
			}
		}
		if lines := audit(t, s, hub.AuditQuery{Limit: 9, Node: id(0)}); len(lines) != 1 {
			t.Errorf("%d audit lines of the removed node, want 1", len(lines))
		}
	}
}

func suiteTokens(t *testing.T, s hub.Store, reopen func() hub.Store) {
	a, b := hub.Token{Hash: id(1), Created: 1, Expires: 2, Actor: "uid 0"}, hub.Token{Hash: id(2), Expires: 3}
	apply(t, s, hub.Batch{Tokens: []hub.Token{a, b}})
	a.Spent, a.Node = 5, id(8)
	apply(t, s, hub.Batch{Tokens: []hub.Token{a}, DropTokens: []string{b.Hash}})
	if l := load(t, reopen()); !slices.Equal(l.Tokens, []hub.Token{a}) {
		t.Errorf("tokens %+v, want %+v", l.Tokens, a)
	}
}

func command(node, n int) *hub.Command {
	return &hub.Command{Command: wire.Command{ID: id(1000*node + n), Op: wire.OpDrain, Issued: 5, Expires: 6}, Node: id(node), Actor: "uid 1"}
}

func suiteCommands(t *testing.T, s hub.Store, reopen func() hub.Store) {
	a, b := command(1, 1), command(1, 2)
	a.Issued = 7 // the clock went back
	apply(t, s, hub.Batch{Commands: []*hub.Command{a, b}})
	if l := load(t, s); len(l.Commands) != 2 || l.Commands[0].ID != a.ID || !reflect.DeepEqual(l.Commands[0], a) {
		t.Errorf("open commands: %+v", l.Commands)
	}
	done := *a
	done.Outcome, done.Message, done.Acked = wire.Done, "well", 9
	taken := *b
	taken.Outcome = wire.Accepted
	apply(t, s, hub.Batch{Commands: []*hub.Command{&done, &taken}})
	for _, get := range []func() hub.Store{func() hub.Store { return s }, reopen} {
		s := get()
		if l := load(t, s); len(l.Commands) != 1 || !reflect.DeepEqual(l.Commands[0], &taken) {
			t.Errorf("open commands: %+v", l.Commands)
		} else if d := cmp.Diff(map[string]int64{id(1): 7}, l.LastIssued); d != "" {
			t.Errorf("issued last: %s", d)
		}
		list, err := s.Commands(t.Context(), id(1), 10)
		if err != nil || len(list) != 2 || !reflect.DeepEqual(list[0], taken) || !reflect.DeepEqual(list[1], done) {
			t.Errorf("commands, newest first: %+v, %v", list, err)
		}
		if list, _ := s.Commands(t.Context(), id(1), 1); len(list) != 1 {
			t.Errorf("%d commands for a limit of 1", len(list))
		}
		c, err := s.Command(t.Context(), a.ID)
		none, nerr := s.Command(t.Context(), id(3))
		if err != nil || nerr != nil || c == nil || c.Outcome != wire.Done || none != nil {
			t.Errorf("one command: %+v, %v; one that is not: %+v, %v", c, err, none, nerr)
		}
	}
}

func suitePruning(t *testing.T, s hub.Store, _ func() hub.Store) {
	var old []*hub.Command
	for n := range hub.CommandsKept + 3 {
		c := command(1, n)
		c.Outcome, c.Acked = wire.Done, 10
		if n == 1 {
			c.Outcome = wire.Accepted
		}
		old = append(old, c)
	}
	apply(t, s, hub.Batch{Commands: append(old, command(2, 1))})
	apply(t, s, hub.Batch{SettledBefore: 10})
	if list, _ := s.Commands(t.Context(), id(1), 1000); len(list) != len(old) {
		t.Errorf("%d commands are left of %d that are not old", len(list), len(old))
	}
	apply(t, s, hub.Batch{SettledBefore: 11})
	list, _ := s.Commands(t.Context(), id(1), 1000)
	if len(list) != hub.CommandsKept+1 || list[len(list)-1].ID != old[1].ID {
		t.Errorf("%d commands are left, the oldest %s; want %d, and the open one", len(list), list[len(list)-1].ID, hub.CommandsKept+1)
	}
}

func audit(t *testing.T, s hub.Store, q hub.AuditQuery) []hub.AuditLine {
	t.Helper()
	lines, err := s.Audit(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func suiteAudit(t *testing.T, s hub.Store, reopen func() hub.Store) {
	var b hub.Batch
	for n := 1; n <= 10; n++ {
		b.Audit = append(b.Audit, hub.AuditLine{Seq: uint64(n), At: int64(n), Node: id(n % 2), Actor: "uid 1", Event: "e", Detail: "d"})
	}
	apply(t, s, b)
	if got := audit(t, s, hub.AuditQuery{Limit: 1})[0]; got != b.Audit[9] {
		t.Errorf("line %+v, want %+v", got, b.Audit[9])
	}
	for _, get := range []func() hub.Store{func() hub.Store { return s }, reopen} {
		s := get()
		if l := load(t, s); l.LastAudit != 10 {
			t.Errorf("the last line is %d, want 10", l.LastAudit)
		}
		for _, tc := range []struct {
			q    hub.AuditQuery
			want string
		}{
			{hub.AuditQuery{Limit: 3}, "[8 9 10]"},
			{hub.AuditQuery{Limit: 3, Node: id(1)}, "[5 7 9]"},
			{hub.AuditQuery{Limit: 3, Before: 5}, "[2 3 4]"},
			{hub.AuditQuery{Limit: 3, Node: id(0), Before: 5}, "[2 4]"},
			{hub.AuditQuery{Limit: 3, Node: id(5)}, "[]"},
		} {
			var got []uint64
			for _, l := range audit(t, s, tc.q) {
				got = append(got, l.Seq)
			}
			if fmt.Sprint(got) != tc.want {
				t.Errorf("Audit(%+v) = %v, want %s", tc.q, got, tc.want)
			}
		}
	}
}

func suiteAuditKept(t *testing.T, s hub.Store, _ func() hub.Store) {
	var b hub.Batch
	for n := 1; n <= hub.AuditKept; n++ {
		b.Audit = append(b.Audit, hub.AuditLine{Seq: uint64(n), Node: id(1), Actor: "a", Event: "e"})
	}
	apply(t, s, b)
	apply(t, s, hub.Batch{Audit: []hub.AuditLine{{Seq: hub.AuditKept + 1, Actor: "a", Event: "e"}, {Seq: hub.AuditKept + 2, Actor: "a", Event: "e"}}})
	// By pages: a read has a limit of time, which all of it at once would meet on
	// a busy machine.
	const page = 5000
	next := uint64(hub.AuditKept + 2)
	for before := uint64(0); ; before = next + 1 {
		lines := audit(t, s, hub.AuditQuery{Limit: page, Before: before})
		for _, l := range slices.Backward(lines) {
			if l.Seq != next {
				t.Fatalf("line %d, want %d", l.Seq, next)
			}
			next--
		}
		if len(lines) < page {
			break
		}
	}
	if next != 2 {
		t.Errorf("the oldest line is %d, want %d lines from 3", next+1, hub.AuditKept)
	}
}

func suiteObserved(t *testing.T, s hub.Store, reopen func() hub.Store) {
	load1 := 1.5
	beat := hub.Heartbeat{Node: id(1), At: 5, Beat: &wire.Heartbeat{Load1: &load1, Admission: wire.Admission{Running: 2}}}
	list := hub.Workloads{Node: id(1), At: 6, Omitted: 1, List: []wire.Workload{{ID: "0123456789abcdef", Kind: wire.KindJob}}}
	apply(t, s, hub.Batch{Heartbeats: []hub.Heartbeat{{Node: id(1), At: 1, Beat: &wire.Heartbeat{}}}, Workloads: []hub.Workloads{{Node: id(1), At: 1}}})
	apply(t, s, hub.Batch{Heartbeats: []hub.Heartbeat{beat}, Workloads: []hub.Workloads{list}})
	for _, get := range []func() hub.Store{func() hub.Store { return s }, reopen} {
		s := get()
		if l := load(t, s); len(l.Heartbeats) != 1 || !reflect.DeepEqual(l.Heartbeats[0], beat) {
			t.Errorf("heartbeats %+v", l.Heartbeats)
		}
		w, err := s.Workloads(context.Background(), id(1))
		if err != nil || !reflect.DeepEqual(w, &list) {
			t.Errorf("workloads %+v, %v", w, err)
		}
		if w, err := s.Workloads(t.Context(), id(2)); w != nil || err != nil {
			t.Errorf("workloads of a node without any: %+v, %v", w, err)
		}
	}
}

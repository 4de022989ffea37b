package fleet_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
)

// killTime is how long TestKills kills; VK_FLEET_KILL_TIME is another one.
const killTime = 6 * time.Second

// model is what a node must be, worked out from the commands alone.
type model struct {
	state wire.NodeState
	was   wire.NodeState // before a quarantine
}

// step is the outcome that a command must have, and what the node is after it.
func (m *model) step(op wire.Op) wire.Outcome {
	switch {
	case op == wire.OpQuarantine:
		if m.state != wire.Quarantined {
			m.was, m.state = m.state, wire.Quarantined
		}
	case op == wire.OpRelease && m.state == wire.Quarantined:
		m.state = m.was
	case op == wire.OpRelease:
		return "" // of a node that is not quarantined: either way, nothing changes
	case m.state == wire.Quarantined:
		return wire.Declined
	case op == wire.OpDrain:
		m.state = wire.Drained
	case op == wire.OpUndrain && m.state == wire.Ready:
		return ""
	case op == wire.OpUndrain:
		m.state = wire.Ready
	}
	return wire.Done
}

// operator steers one node, command after command, and holds what becomes of
// it to the model.
type operator struct {
	f       *fleet
	t       *testing.T
	name    string
	id      string
	p       *process
	known   map[string]bool
	acked   []string // commands whose issue the hub acknowledged
	cuts    []int    // ceilings whose change the hub acknowledged
	ceiling int      // acknowledged last
	maybe   int      // asked for last, perhaps in vain
	m       model
	issued  int
}

// issue has the hub issue a command. When the hub dies meanwhile, the node's
// record tells whether it had stored it.
func (o *operator) issue(op wire.Op) (id string) {
	c, err := o.f.admin.Issue(o.t.Context(), o.id, op)
	if err == nil {
		o.known[c.ID] = true
		o.acked = append(o.acked, c.ID)
		return c.ID
	}
	if fault.KindOf(err) != fault.Unavailable {
		o.t.Errorf("%s: issuing %s: %v", o.name, op, err)
		return ""
	}
	n := o.shown()
	for _, c := range n.Commands {
		if !o.known[c.ID] {
			o.known[c.ID] = true
			return c.ID
		}
	}
	return "" // it was lost before it was stored, and nobody was told otherwise
}

// shown is the node's record, once the hub is up.
func (o *operator) shown() *hubadmin.Node {
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if n, err := o.f.admin.Node(o.t.Context(), o.id); err == nil {
			return n
		}
	}
	o.t.Errorf("%s: the hub is not back", o.name)
	return &hubadmin.Node{}
}

// outcome waits for a command's. A node that has waited long to dial again is
// killed: a new one dials at once.
func (o *operator) outcome(id string) (wire.Outcome, string) {
	began := time.Now()
	for kicked := began; time.Since(began) < 2*time.Minute; time.Sleep(20 * time.Millisecond) {
		for _, c := range o.shown().Commands {
			if c.ID == id && c.Outcome.Final() {
				return c.Outcome, c.Message
			}
		}
		if time.Since(kicked) > 5*time.Second {
			kicked = time.Now()
			o.p.restart()
		}
	}
	return "", "never"
}

func (o *operator) work(until time.Time) {
	ops := []wire.Op{wire.OpDrain, wire.OpUndrain, wire.OpQuarantine, wire.OpRelease}
	for n := 1; time.Now().Before(until) && !o.t.Failed(); n++ {
		if n%3 == 0 {
			o.maybe = n
			if _, err := o.f.admin.SetPolicy(o.t.Context(), o.id, hubadmin.PolicyRequest{Ceiling: &n}); err == nil {
				o.ceiling = n
				o.cuts = append(o.cuts, n)
			}
		}
		op := ops[rand.IntN(len(ops))]
		if !o.holds("before " + string(op)) { // whatever was delivered again meanwhile
			return
		}
		id := o.issue(op)
		if id == "" {
			continue
		}
		o.issued++
		want := o.m.step(op)
		got, message := o.outcome(id)
		if want != "" && got != want || want == "" && got != wire.Done && got != wire.Declined {
			o.t.Errorf("%s: command %d, %s %s, ended as %q (%s), want %q", o.name, o.issued, op, id, got, message, want)
			return
		}
		if !o.holds(fmt.Sprintf("after command %d, %s %s", o.issued, op, id)) {
			return
		}
	}
}

// holds says whether the node's file has the state that the model has: a
// command that was done twice, or late, has left another one.
func (o *operator) holds(when string) bool {
	st, err := persisted(strings.TrimPrefix(o.p.role, "node "))
	if err != nil && !os.IsNotExist(err) || err == nil && st.Node != o.m.state {
		o.t.Errorf("%s: %s the node holds %q, %v; its commands make it %s", o.name, when, st.Node, err, o.m.state)
		return false
	}
	return true
}

// check holds what hub and node remember to what was acknowledged.
func (o *operator) check() {
	var n *hubadmin.Node
	o.f.eventually(fmt.Sprintf("%s is in sync, and %s as its commands make it", o.name, o.m.state), func() bool {
		n = o.f.node(o.id)
		return n.Reach == hub.Connected && (n.Sync == "ok" || n.Sync == "-") && n.Reported != nil && n.Reported.Node == o.m.state
	})
	if c := n.Desired.Policy.Ceiling; c != o.ceiling && c != o.maybe {
		o.t.Errorf("%s: the hub asks for ceiling %d; %d was acknowledged last, %d asked for", o.name, c, o.ceiling, o.maybe)
	}
	if n.Conflict != nil {
		o.t.Errorf("%s: a recovery conflict without a restore: %q", o.name, n.Conflict.Reasons)
	}
	st, err := persisted(strings.TrimPrefix(o.p.role, "node "))
	if err != nil {
		o.t.Error(err)
		return
	}
	seen := map[string]int{}
	for _, e := range st.Journal {
		if seen[e.ID]++; seen[e.ID] > 1 {
			o.t.Errorf("%s: the journal has command %s twice", o.name, e.ID)
		}
	}
	for _, id := range o.acked {
		if seen[id] == 0 {
			o.t.Errorf("%s: command %s was acknowledged and is not in the node's journal", o.name, id)
		}
	}
}

// TestKills kills hub and nodes at random while operators work, and holds the
// journals to a model: no acknowledged command is lost, none is done twice,
// and the audit log has no gap and a line of each.
func TestKills(t *testing.T) {
	d := killTime
	if s := os.Getenv("VK_FLEET_KILL_TIME"); s != "" {
		var err error
		if d, err = time.ParseDuration(s); err != nil {
			t.Fatalf("VK_FLEET_KILL_TIME: %v", err)
		}
	}
	f := newFleet(t)
	r := f.record("kill -9 of hub and nodes at random")
	victims := []*process{f.hub}
	var all []*operator
	for i := range 2 {
		name := fmt.Sprint("ci-", i+1)
		p, id := f.join(name, f.addr)
		victims = append(victims, p)
		all = append(all, &operator{f: f, t: t, name: name, id: id, p: p, known: map[string]bool{}, m: model{state: wire.Ready}})
	}
	// Others, and people who look, are the load.
	for i := range 4 {
		f.join(fmt.Sprint("load-", i+1), f.addr)
	}
	f.eventually("both are ready", func() bool { return f.state(all[0].id) == wire.Ready && f.state(all[1].id) == wire.Ready })
	until := time.Now().Add(d)
	var wg sync.WaitGroup
	for _, o := range all {
		wg.Go(func() { o.work(until) })
	}
	wg.Go(func() {
		for time.Now().Before(until) && !t.Failed() {
			_, _ = f.admin.Audit(t.Context(), "", 1000)
			_, _ = f.admin.Nodes(t.Context())
			_, _ = f.admin.SetPools(t.Context(), "load-1", []string{fmt.Sprint("p", rand.IntN(100))})
			time.Sleep(50 * time.Millisecond)
		}
	})
	kills := 0
	for time.Now().Before(until) && !t.Failed() {
		time.Sleep(time.Duration(50+rand.IntN(700)) * time.Millisecond)
		v := victims[rand.IntN(len(victims))]
		r.fault("kill -9 of %s", filepath.Base(v.role))
		v.restart()
		kills++
		// Every other time all of them come back first: on a busy machine a
		// hub takes seconds to start, and one that never lives gets nothing done.
		for deadline := time.Now().Add(time.Minute); kills%2 == 0 && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			if s, err := f.admin.Status(t.Context()); err == nil && s.Reach["connected"] >= len(all) {
				break
			}
		}
	}
	wg.Wait()
	f.up()
	if t.Failed() {
		return
	}
	for _, o := range all {
		o.check()
	}
	lines := wholeAudit(t, f)
	finals := map[string]int{}
	issues := map[string]bool{}
	cuts := map[string]int{} // by node and ceiling
	for _, l := range lines {
		if _, p, ok := strings.Cut(l.Detail, ": ceiling "); ok && l.Event == "desired state" {
			n, _, _ := strings.Cut(p, ",")
			cuts[l.Node+" "+n]++
		}
		w := strings.Fields(l.Detail)
		if len(w) < 2 {
			continue
		}
		if o, ok := strings.CutPrefix(l.Event, "command "); ok && wire.Outcome(o).Final() {
			finals[w[1]]++
		}
		if l.Event == "command issued" {
			issues[w[1]] = true
		}
	}
	total, ceilings := 0, 0
	for _, o := range all {
		total += o.issued
		ceilings += len(o.cuts)
		for _, n := range o.cuts {
			if k := cuts[fmt.Sprint(o.id, " ", n)]; k != 1 {
				t.Errorf("%s: the acknowledged ceiling %d is audited %d times", o.name, n, k)
			}
		}
		for _, id := range o.acked {
			if !issues[id] || finals[id] != 1 {
				t.Errorf("%s: acknowledged command %s: issue audited %v, final outcomes audited %d times", o.name, id, issues[id], finals[id])
			}
		}
	}
	t.Logf("%d kills in %v, %d commands, %d ceilings, %d audit lines", kills, d, total, ceilings, len(lines))
	if total == 0 || !slices.ContainsFunc(all, func(o *operator) bool { return len(o.acked) > 0 }) {
		t.Error("no command was issued")
	}
}

package node_test

import (
	"testing"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
)

// step of a table: what a command does in a state. An empty to is no change.
type step struct {
	op      wire.Op
	to      wire.NodeState
	outcome wire.Outcome
}

func cmd(op wire.Op) *wire.Command {
	c := &wire.Command{ID: wire.NewID(), Op: op, Issued: 1000, Expires: 1000 + 86400}
	switch op {
	case wire.OpUpdate:
		c.Update = &wire.UpdateSpec{SHA256: wire.NewHex(32), Size: 1}
	case wire.OpReset:
		c.Reset = &wire.ResetSpec{}
	case wire.OpTools:
		c.Tools = &wire.ToolsSpec{SHA256: wire.NewHex(32), Size: 1}
	}
	return c
}

// TestEveryTransition has every pair of state and op: it fails when one is
// added to the protocol and has no answer here.
func TestEveryTransition(t *testing.T) {
	states := map[string]node.State{
		"ready":                 {Node: wire.Ready},
		"draining":              {Node: wire.Draining},
		"drained":               {Node: wire.Drained},
		"quarantined":           {Node: wire.Quarantined},
		"quarantined, drained":  {Node: wire.Quarantined, WasDrained: true},
		"draining for update":   {Node: wire.Draining, Maintenance: &node.Maintenance{Op: wire.OpUpdate}},
		"maintenance":           {Node: wire.Maintenance, Maintenance: &node.Maintenance{Op: wire.OpReset}},
		"validating":            {Node: wire.Validating, Maintenance: &node.Maintenance{Op: wire.OpUpdate}},
		"maintenance, in quar.": {Node: wire.Maintenance, Maintenance: &node.Maintenance{Op: wire.OpReset, Quarantine: true}},
	}
	no := func(op wire.Op) step { return step{op, "", wire.Declined} }
	updates := []step{no(wire.OpUpdate), no(wire.OpReset), no(wire.OpTools), no("redeploy")}
	want := map[string][]step{
		"ready":                 {{wire.OpDrain, wire.Draining, wire.Accepted}, {wire.OpUndrain, "", wire.Done}, {wire.OpQuarantine, wire.Quarantined, wire.Done}, {wire.OpRelease, "", wire.Done}},
		"draining":              {{wire.OpDrain, "", wire.Accepted}, {wire.OpUndrain, wire.Ready, wire.Done}, {wire.OpQuarantine, wire.Quarantined, wire.Done}, {wire.OpRelease, "", wire.Done}},
		"drained":               {{wire.OpDrain, "", wire.Done}, {wire.OpUndrain, wire.Ready, wire.Done}, {wire.OpQuarantine, wire.Quarantined, wire.Done}, {wire.OpRelease, "", wire.Done}},
		"quarantined":           {no(wire.OpDrain), no(wire.OpUndrain), {wire.OpQuarantine, "", wire.Done}, {wire.OpRelease, wire.Ready, wire.Done}},
		"quarantined, drained":  {no(wire.OpDrain), no(wire.OpUndrain), {wire.OpQuarantine, "", wire.Done}, {wire.OpRelease, wire.Drained, wire.Done}},
		"draining for update":   {{wire.OpDrain, "", wire.Accepted}, {wire.OpUndrain, wire.Ready, wire.Done}, {wire.OpQuarantine, wire.Quarantined, wire.Done}, {wire.OpRelease, "", wire.Done}},
		"maintenance":           {{wire.OpDrain, "", wire.Accepted}, no(wire.OpUndrain), {wire.OpQuarantine, "", wire.Done}, {wire.OpRelease, "", wire.Done}},
		"validating":            {{wire.OpDrain, "", wire.Accepted}, no(wire.OpUndrain), {wire.OpQuarantine, "", wire.Done}, {wire.OpRelease, "", wire.Done}},
		"maintenance, in quar.": {{wire.OpDrain, "", wire.Accepted}, no(wire.OpUndrain), {wire.OpQuarantine, "", wire.Done}, {wire.OpRelease, "", wire.Done}},
	}
	for name, st := range states {
		if len(want[name]) != 4 {
			t.Fatalf("%s: %d answers", name, len(want[name]))
		}
		for _, w := range append(want[name], updates...) {
			s := node.CloneState(st)
			outcome, message := node.CarryOut(&s, cmd(w.op))
			to := w.to
			if to == "" {
				to = st.Node
			}
			if s.Node != to || outcome != w.outcome {
				t.Errorf("%s, %s: %s, %s (%s); want %s, %s", name, w.op, s.Node, outcome, message, to, w.outcome)
			}
			if (outcome == wire.Declined) != (message != "") {
				t.Errorf("%s, %s: %s with message %q", name, w.op, outcome, message)
			}
			if s.Node != wire.Ready && s.MayTake() {
				t.Errorf("%s, %s: may take jobs", name, w.op)
			}
		}
	}
}

// TestMaintenance walks updates and resets from begin to end.
func TestMaintenance(t *testing.T) {
	for _, c := range []struct {
		name   string
		from   wire.NodeState
		during []wire.Op // while in maintenance
		stay   bool
		want   wire.NodeState
		then   wire.NodeState // where a release leads
	}{
		{"ready returns", wire.Ready, nil, false, wire.Ready, ""},
		{"drained returns", wire.Drained, nil, false, wire.Drained, ""},
		{"draining is joined", wire.Draining, nil, false, wire.Drained, ""},
		{"a failed reset stays", wire.Ready, nil, true, wire.Drained, ""},
		{"a drain makes it drained", wire.Ready, []wire.Op{wire.OpDrain}, false, wire.Drained, ""},
		{"a quarantine is entered", wire.Ready, []wire.Op{wire.OpQuarantine}, false, wire.Quarantined, wire.Ready},
		{"from drained", wire.Drained, []wire.Op{wire.OpQuarantine}, false, wire.Quarantined, wire.Drained},
		{"withdrawn", wire.Ready, []wire.Op{wire.OpQuarantine, wire.OpRelease}, false, wire.Ready, ""},
		{"undrain is refused", wire.Drained, []wire.Op{wire.OpUndrain}, false, wire.Drained, ""},
	} {
		st := node.State{Node: c.from}
		update := cmd(wire.OpUpdate)
		if err := st.Begin(update); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if err := st.Begin(cmd(wire.OpReset)); err == nil {
			t.Errorf("%s: a reset began beside an update", c.name)
		}
		st.DrainOver()
		if st.Node != wire.Maintenance {
			t.Fatalf("%s: %s after the drain", c.name, st.Node)
		}
		for _, op := range c.during {
			node.CarryOut(&st, cmd(op))
		}
		if err := st.Validate(); err != nil || st.Node != wire.Validating {
			t.Errorf("%s: %s, %v", c.name, st.Node, err)
		}
		if st.Validate() == nil {
			t.Errorf("%s: validated twice", c.name)
		}
		if err := st.Return(wire.Done, "", c.stay); err != nil || st.Node != c.want || st.Maintenance != nil {
			t.Errorf("%s: returned to %s, %v", c.name, st.Node, err)
		}
		if st.Return(wire.Done, "", false) == nil {
			t.Errorf("%s: returned twice", c.name)
		}
		if c.then != "" {
			if node.CarryOut(&st, cmd(wire.OpRelease)); st.Node != c.then {
				t.Errorf("%s: released to %s, want %s", c.name, st.Node, c.then)
			}
		}
	}
	quarantined := node.State{Node: wire.Quarantined}
	if quarantined.Begin(cmd(wire.OpUpdate)) == nil || quarantined.Begin(cmd(wire.OpReset)) == nil {
		t.Error("a quarantined node takes an update or a reset")
	}
}

// TestCallOff: while an update drains, an undrain and a quarantine end it, and
// every drain that waited.
func TestCallOff(t *testing.T) {
	for op, want := range map[wire.Op]wire.NodeState{wire.OpUndrain: wire.Ready, wire.OpQuarantine: wire.Quarantined} {
		st := node.State{Node: wire.Ready}
		update, drain := cmd(wire.OpUpdate), cmd(wire.OpDrain)
		if err := st.Begin(update); err != nil {
			t.Fatal(err)
		}
		st.Journal = []node.Entry{{Command: *update, Outcome: wire.Accepted}}
		o, _ := node.CarryOut(&st, drain)
		st.Journal = append(st.Journal, node.Entry{Command: *drain, Outcome: o})
		node.CarryOut(&st, cmd(op))
		if st.Node != want || st.Maintenance != nil {
			t.Errorf("%s: %s, %+v", op, st.Node, st.Maintenance)
		}
		for _, e := range st.Journal {
			if e.Outcome != wire.Failed || e.Message == "" {
				t.Errorf("%s: the %s is %s", op, e.Op, e.Outcome)
			}
		}
		st.DrainOver() // too late
		if st.Node != want {
			t.Errorf("%s: a drain's end came late and moved the node to %s", op, st.Node)
		}
	}
}

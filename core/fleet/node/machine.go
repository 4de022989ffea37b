package node

import (
	"fmt"

	"virtkit/core/fleet/wire"
)

// carryOut makes the change that a command asks for and says what became of
// it. It is the only place where commands move the node; see the table in
// docs/fleet.md. Every pair of state and op has an answer here.
func (st *State) carryOut(c *wire.Command) (wire.Outcome, string) {
	switch c.Op {
	case wire.OpDrain:
		return st.drain()
	case wire.OpUndrain:
		return st.undrain()
	case wire.OpQuarantine:
		return st.quarantine()
	case wire.OpRelease:
		return st.release()
	case wire.OpUpdate, wire.OpReset:
		if err := st.MayBegin(c.Op); err != nil {
			return wire.Declined, err.Error()
		}
		return wire.Declined, fmt.Sprintf("this vk does not carry out %s commands", c.Op)
	case wire.OpTools:
		return wire.Declined, "this vk does not carry out tools commands"
	}
	return wire.Declined, fmt.Sprintf("this vk knows no command %q", c.Op)
}

func (st *State) drain() (wire.Outcome, string) {
	switch st.Node {
	case wire.Ready:
		st.Node = wire.Draining
		return wire.Accepted, ""
	case wire.Draining:
		if st.Maintenance != nil { // its drain is joined, and outlives it
			st.Maintenance.Drained = true
		}
		return wire.Accepted, ""
	case wire.Drained:
		return wire.Done, ""
	case wire.Maintenance, wire.Validating:
		st.Maintenance.Drained = true
		return wire.Accepted, ""
	}
	return wire.Declined, "the node is quarantined: release it first"
}

func (st *State) undrain() (wire.Outcome, string) {
	switch st.Node {
	case wire.Ready:
		return wire.Done, ""
	case wire.Draining, wire.Drained:
		st.callOff("an undrain ended it")
		st.settle(wire.OpDrain, wire.Failed, "an undrain ended it")
		st.Node = wire.Ready
		return wire.Done, ""
	case wire.Maintenance, wire.Validating:
		return wire.Declined, fmt.Sprintf("the node is in %s for a %s, which runs to its end", st.Node, st.Maintenance.Op)
	}
	return wire.Declined, "the node is quarantined: release it first"
}

func (st *State) quarantine() (wire.Outcome, string) {
	switch st.Node {
	case wire.Maintenance, wire.Validating:
		// In force from now: maintenance takes no jobs. Entered at its end.
		st.Maintenance.Quarantine = true
	case wire.Ready, wire.Draining, wire.Drained:
		st.WasDrained = st.Node == wire.Drained
		st.callOff("a quarantine ended it")
		st.settle(wire.OpDrain, wire.Failed, "a quarantine ended it")
		st.Node = wire.Quarantined
	}
	return wire.Done, ""
}

func (st *State) release() (wire.Outcome, string) {
	switch st.Node {
	case wire.Maintenance, wire.Validating:
		st.Maintenance.Quarantine = false
	case wire.Quarantined:
		st.Node = wire.Ready
		if st.WasDrained {
			st.Node, st.WasDrained = wire.Drained, false
		}
	}
	return wire.Done, ""
}

// callOff ends an update or reset whose drain is not over.
func (st *State) callOff(why string) {
	if st.Maintenance == nil {
		return
	}
	st.settle(st.Maintenance.Op, wire.Failed, why)
	st.Maintenance = nil
}

// MayBegin says whether an update or a reset may be taken now.
func (st *State) MayBegin(op wire.Op) error {
	switch {
	case st.Maintenance != nil:
		return fmt.Errorf("a %s is under way", st.Maintenance.Op)
	case st.Node == wire.Quarantined:
		return fmt.Errorf("the node is quarantined: release it before a %s", op)
	case st.Node != wire.Ready && st.Node != wire.Draining && st.Node != wire.Drained:
		return fmt.Errorf("the node is in %s", st.Node)
	}
	return nil
}

// Begin takes an update or a reset: it drains first, joining a drain that is
// under way, and a drained node returns to drained.
func (st *State) Begin(c *wire.Command) error {
	if err := st.MayBegin(c.Op); err != nil {
		return err
	}
	st.Maintenance = &Maintenance{Command: c.ID, Op: c.Op, Drained: st.Node != wire.Ready}
	if st.Node == wire.Ready {
		st.Node = wire.Draining
	} else if st.Node == wire.Drained {
		st.Node = wire.Maintenance
	}
	return nil
}

// DrainOver is the end of a drain: everything that it waits for was seen to be
// over.
func (st *State) DrainOver() {
	if st.Node != wire.Draining {
		return
	}
	if st.Maintenance != nil {
		st.Node = wire.Maintenance
		return
	}
	st.Node = wire.Drained
	st.settle(wire.OpDrain, wire.Done, "")
}

// Validate is the step from maintenance to its test.
func (st *State) Validate() error {
	if st.Node != wire.Maintenance {
		return fmt.Errorf("the node is in %s, not in maintenance", st.Node)
	}
	st.Node = wire.Validating
	return nil
}

// Return ends an update or a reset: the node enters a quarantine that came
// meanwhile, is drained when it was or when stay says so, and ready otherwise.
func (st *State) Return(o wire.Outcome, message string, stay bool) error {
	m := st.Maintenance
	if m == nil || st.Node != wire.Maintenance && st.Node != wire.Validating {
		return fmt.Errorf("the node is in %s: there is nothing to return from", st.Node)
	}
	drained := m.Drained || stay
	st.settle(m.Op, o, message)
	st.Maintenance = nil
	switch {
	case m.Quarantine:
		st.Node, st.WasDrained = wire.Quarantined, drained
		st.settle(wire.OpDrain, wire.Failed, "a quarantine ended it")
	case drained:
		st.Node = wire.Drained
		st.settle(wire.OpDrain, wire.Done, "")
	default:
		st.Node = wire.Ready
	}
	return nil
}

package node

import "virtkit/core/fleet/wire"

func CarryOut(st *State, c *wire.Command) (wire.Outcome, string) { return st.carryOut(c) }

func CloneState(st State) State { return st.clone() }

// OnWrite calls fn before each write of the state.
func OnWrite(s *Store, fn func()) { s.beforeWrite = fn }

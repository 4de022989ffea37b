package node

import (
	"time"

	"virtkit/core/fleet/wire"
)

func CarryOut(st *State, c *wire.Command) (wire.Outcome, string) { return st.carryOut(c) }

func CloneState(st State) State { return st.clone() }

// OnWrite calls fn before each write of the state.
func OnWrite(s *Store, fn func()) { s.beforeWrite = fn }

// Times are the node's waits, by what they are of.
func Times() map[string]time.Duration {
	return map[string]time.Duration{"first redial": minRedial, "longest redial": maxRedial, "good session": goodSession, "inventory": inventoryTime, "concurrency": tuneTime, "lock": lockWait}
}

// Copies is how many sessions in a row may be superseded.
const Copies = copies

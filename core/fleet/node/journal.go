package node

import (
	"fmt"
	"slices"

	"virtkit/core/fleet/wire"
)

// MaxJournal bounds the journal: past it the oldest entries whose outcome is
// recorded go first; when none is, a new command is refused.
const MaxJournal = 4096

// Entry is one command, as received.
type Entry struct {
	wire.Command
	Outcome wire.Outcome `json:"outcome"`
	Message string       `json:"message,omitempty"`
	// Recorded is the last outcome that the hub has said it stored.
	Recorded wire.Outcome `json:"recorded,omitempty"`
}

// Ack is what the hub is told of the entry.
func (e Entry) Ack() *wire.Ack {
	return &wire.Ack{Command: e.ID, Outcome: e.Outcome, Message: e.Message}
}

// settled says that the hub knows how it ended.
func (e Entry) settled() bool { return e.Outcome.Final() && e.Recorded == e.Outcome }

// Receive takes a delivery of a command at hubNow, Unix seconds by the hub's
// clock, and returns its ack. When it returns, the entry and the change that
// the command makes are durable. An error is of the disk: nothing was done,
// and the command is to stay unanswered.
func (s *Store) Receive(c *wire.Command, hubNow int64) (*wire.Ack, error) {
	var ack *wire.Ack
	err := s.update(func(st *State) bool {
		if i := st.find(c.ID); i >= 0 {
			ack = st.Journal[i].Ack()
			return false
		}
		e := Entry{Command: *c}
		e.Sent = 0 // of one delivery
		switch {
		case st.isOld(c):
			e.Outcome, e.Message = wire.Expired, "older than what this node's journal still holds"
		case hubNow > c.Expires:
			e.Outcome, e.Message = wire.Expired, fmt.Sprintf("received %d seconds past its expiry", hubNow-c.Expires)
		}
		switch {
		case !st.prune(hubNow):
			ack = &wire.Ack{Command: c.ID, Outcome: wire.Declined, Message: "the node's journal is full of commands whose outcome the hub has not recorded"}
			return false
		case e.Outcome == "":
			e.Outcome, e.Message = st.carryOut(c)
		}
		st.Journal = append(st.Journal, e)
		st.LastCommand = c.ID
		ack = e.Ack()
		return true
	})
	if err != nil {
		return nil, err
	}
	return ack, nil
}

// isOld says whether c was issued when, or before, an entry that is gone was:
// it may be that entry's command. A hub that does not tell times of issue is
// judged by expiries.
func (st *State) isOld(c *wire.Command) bool {
	if c.Issued > 0 {
		return c.Issued <= st.DroppedIssued
	}
	return c.Expires <= st.DroppedExpires
}

func (st *State) find(id string) int {
	return slices.IndexFunc(st.Journal, func(e Entry) bool { return e.ID == id })
}

// prune drops entries that are settled and past their expiry, then the oldest
// settled ones beyond MaxJournal. It says whether there is room for one more.
func (st *State) prune(hubNow int64) bool {
	over := len(st.Journal) + 1 - MaxJournal
	st.Journal = slices.DeleteFunc(st.Journal, func(e Entry) bool {
		if !e.settled() || hubNow <= e.Expires && over <= 0 {
			return false
		}
		over--
		st.DroppedIssued = max(st.DroppedIssued, e.Issued)
		st.DroppedExpires = max(st.DroppedExpires, e.Expires)
		return true
	})
	return len(st.Journal) < MaxJournal
}

// Recorded notes that the hub has stored an outcome. One that is not the
// entry's of now, or of no entry, changes nothing.
func (s *Store) Recorded(r *wire.Recorded, hubNow int64) error {
	return s.update(func(st *State) bool {
		i := st.find(r.Command)
		if i < 0 || st.Journal[i].Outcome != r.Outcome || st.Journal[i].Recorded == r.Outcome {
			return false
		}
		st.Journal[i].Recorded = r.Outcome
		st.prune(hubNow)
		return true
	})
}

// Unrecorded are the acks that the hub has not recorded, oldest first.
func (st State) Unrecorded() (out []*wire.Ack) {
	for _, e := range st.Journal {
		if e.Recorded != e.Outcome {
			out = append(out, e.Ack())
		}
	}
	return out
}

// settle ends every accepted command of an op.
func (st *State) settle(op wire.Op, o wire.Outcome, message string) {
	for i := range st.Journal {
		if e := &st.Journal[i]; e.Op == op && e.Outcome == wire.Accepted {
			e.Outcome, e.Message = o, message
		}
	}
}

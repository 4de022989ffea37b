package hub

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync"

	"virtkit/core/fleet/wire"
)

// feedKept is how many events a feed holds for readers that come back.
const feedKept = 4096

// EpochLen is the length of a feed's name in bytes, two hexadecimal digits each.
const EpochLen = 8

// EventKinds are the kinds of events.
var EventKinds = []string{"command", "conflict", "desired", "egress", "enrolled", "inventory", "job", "key", "pools", "project", "relay", "removed", "report", "server", "session", "token", "workloads"}

// EventKindsText lists the kinds for people.
func EventKindsText() string { return strings.Join(EventKinds, ", ") }

// Event describes a change that was made.
type Event struct {
	At   int64  `json:"at"`             // Unix seconds
	Node string `json:"node,omitempty"` // the node's ID; "" = of the hub, or a job of none
	Kind string `json:"kind"`           // one of EventKinds
	Job  string `json:"job,omitempty"`  // its ID, for Kind job
	Text string `json:"text,omitempty"`
}

// Numbered is an event with its number, which counts from 1 without gaps.
type Numbered struct {
	N uint64
	Event
}

// Feed is what happened last: a ring of events, which readers follow at a pace
// of their own. It holds nothing for a reader; one that falls behind the ring,
// or comes back too late, has to begin with a snapshot.
type Feed struct {
	epoch string

	mu   sync.Mutex
	ring []Event // that of number n is at (n-1) % feedKept
	last uint64
	more chan struct{} // closed with the next event; nil = nobody waits
}

// ErrMissed is what a reader gets who asks for events that are not held.
var ErrMissed = errors.New("hub: events are not held any more")

// newFeed names itself anew, so that no number of another start is taken for
// one of this.
func newFeed() *Feed { return &Feed{epoch: wire.NewID()[:2*EpochLen]} }

// Epoch is the name of this start of the hub. Numbers count within it.
func (f *Feed) Epoch() string { return f.epoch }

// Last is the number of the newest event, 0 for none. A snapshot that is read
// afterwards has what the events up to it tell of.
func (f *Feed) Last() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// After gives the events after number n, at most limit, and what is closed once
// there is one more than those held. ErrMissed: some after n are dropped, or n
// is yet to come.
func (f *Feed) After(n uint64, limit int) (list []Numbered, more <-chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n > f.last || f.last-n > uint64(len(f.ring)) {
		return nil, nil, ErrMissed
	}
	for n < f.last && len(list) < limit {
		n++
		list = append(list, Numbered{n, f.ring[(n-1)%feedKept]})
	}
	if f.more == nil {
		f.more = make(chan struct{})
	}
	return list, f.more, nil
}

func (f *Feed) put(events []Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range events {
		if len(f.ring) < feedKept {
			f.ring = append(f.ring, e)
		} else {
			f.ring[f.last%feedKept] = e
		}
		f.last++
	}
	if f.more != nil {
		close(f.more)
		f.more = nil
	}
}

// Feed is what happens on this hub.
func (h *Hub) Feed() *Feed { return h.feed }

// jobEvents are the changes to jobs' records.
func (t *tx) jobEvents() []Event {
	if len(t.jobs) == 0 {
		return nil
	}
	changed := make([]*Job, 0, len(t.jobs))
	for _, j := range t.jobs {
		changed = append(changed, j)
	}
	slices.SortFunc(changed, func(a, b *Job) int { return cmp.Compare(a.N, b.N) })
	events := make([]Event, 0, len(changed))
	for _, j := range changed {
		events = append(events, Event{At: t.unix(), Node: j.Node, Kind: "job", Job: j.ID, Text: j.Step()})
	}
	return events
}

// Step is how far the job is, in a few words.
func (j *Job) Step() string {
	text := string(j.State)
	switch {
	case j.Settled != 0:
		text += ", settled"
	case j.Result != nil:
		text += ": " + cmp.Or(j.Result.Failure, "success")
	case j.Stage != "":
		text += ": " + j.Stage
	}
	if j.Cancel != "" && j.Result == nil {
		text += ", cancel " + string(j.Cancel)
	}
	return text
}

// Unsettled are the jobs whose producer has not settled them, in the order of
// their submission.
func (h *Hub) Unsettled() []*Job {
	h.jobs.mu.Lock()
	list := make([]*Job, 0, len(h.jobs.jobs))
	for _, j := range h.jobs.jobs {
		list = append(list, j)
	}
	h.jobs.mu.Unlock()
	slices.SortFunc(list, func(a, b *Job) int { return cmp.Compare(a.N, b.N) })
	return list
}

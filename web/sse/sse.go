// Package sse serves a hub's feed as server-sent events (the HTML standard,
// section 9.2): what happened after the event that a reader names in
// Last-Event-ID, exactly, as long as it is held; otherwise one "resync" event
// and a snapshot, as for a reader that names none.
//
// Nothing is kept for a reader. It is served from the feed's ring at its own
// pace; one that falls behind the ring, or takes nothing for WriteTimeout, is
// cut off, and comes back with the last ID it saw.
//
// Event IDs are EPOCH-NUMBER. The epoch is of one start of the hub, whose
// numbers begin anew.
package sse

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// Limits.
const (
	// MaxReaders at once; one more gets 503.
	MaxReaders = 256
	// Alive is how often a comment is sent to a reader that is told nothing, so
	// that what is between does not take the connection for dead.
	Alive = 15 * time.Second
	// WriteTimeout is how long a reader may take nothing.
	WriteTimeout = 30 * time.Second
	// retry is how soon a reader that was cut off should come back.
	retry = time.Second
	// pieces are how many events are written at a time.
	pieces = 256
)

// Names of events beside the kinds of hub.Event.
const (
	Snapshot = "snapshot" // how all is, which the events that follow change
	Resync   = "resync"   // what the reader has is not to be relied upon: a snapshot follows
)

// Stream serves a feed. The zero value of what is not set is the limits above.
type Stream struct {
	Feed *hub.Feed
	// Snapshot is how all is now, as JSON will have it.
	Snapshot func() any
	// Keep selects the events that are told; nil = all.
	Keep func(*hub.Event) bool

	Alive, WriteTimeout time.Duration
	// Readers counts those of several streams together; nil = they are not
	// limited.
	Readers *atomic.Int64
}

// ServeHTTP follows the feed until the reader leaves or is cut off.
func (s *Stream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.Readers != nil {
		defer s.Readers.Add(-1)
		if s.Readers.Add(1) > MaxReaders {
			w.Header().Set("Retry-After", "5")
			http.Error(w, fmt.Sprintf("%d readers follow already", MaxReaders), http.StatusServiceUnavailable)
			return
		}
	}
	c := http.NewResponseController(w)
	// The server's own limits are for requests that end.
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		http.Error(w, "this connection cannot be followed", http.StatusNotImplemented)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would hold events back
	h.Set("X-Content-Type-Options", "nosniff")
	out := &writer{w: w, c: c, timeout: or(s.WriteTimeout, WriteTimeout)}
	out.text("retry: " + strconv.FormatInt(retry.Milliseconds(), 10) + "\n\n")
	at, why := s.place(r.Header.Get("Last-Event-ID"))
	if why != nil {
		if *why != "" {
			out.event("", Resync, struct {
				Why string `json:"why"`
			}{*why})
		}
		// The number first: what happens meanwhile is told twice rather than not.
		at = s.Feed.Last()
		out.event(s.id(at), Snapshot, s.Snapshot())
	}
	s.follow(r, out, at)
}

// place finds where a reader goes on that has seen the event id. why is nil
// where all after it is held, and otherwise why it is not, "" for a reader that
// names none.
func (s *Stream) place(id string) (at uint64, why *string) {
	no := func(text string) (uint64, *string) { return 0, &text }
	if id == "" {
		return no("")
	}
	epoch, number, found := strings.Cut(id, "-")
	n, err := strconv.ParseUint(number, 10, 64)
	switch {
	case !found || err != nil || !wire.IsHex(epoch, hub.EpochLen):
		return no(fmt.Sprintf("%q is no event's ID", wire.Clean(id, 60)))
	case epoch != s.Feed.Epoch():
		return no("the hub was started anew since")
	}
	if _, _, err := s.Feed.After(n, 0); err != nil {
		if n > s.Feed.Last() {
			return no("there was no such event yet")
		}
		return no("what happened since is not held any more")
	}
	return n, nil
}

func (s *Stream) id(n uint64) string { return s.Feed.Epoch() + "-" + strconv.FormatUint(n, 10) }

func (s *Stream) follow(r *http.Request, out *writer, at uint64) {
	alive := time.NewTicker(or(s.Alive, Alive))
	defer alive.Stop()
	told := at
	for out.err == nil {
		list, more, err := s.Feed.After(at, pieces)
		if errors.Is(err, hub.ErrMissed) {
			return // it fell behind the ring
		}
		for i := range list {
			at = list[i].N
			if s.Keep == nil || s.Keep(&list[i].Event) {
				out.event(s.id(at), list[i].Kind, &list[i].Event)
				told = at
			}
		}
		if at-told >= pieces {
			told = at
			out.text("id: " + s.id(at) + "\n\n") // sets the last ID alone: what is not told need not be held
		}
		if out.flush(); len(list) > 0 || out.err != nil {
			continue
		}
		select {
		case <-more:
		case <-alive.C:
			out.text(": alive\n\n")
		case <-r.Context().Done():
			return
		}
	}
}

// writer writes events until the first failure.
type writer struct {
	w       http.ResponseWriter
	c       *http.ResponseController
	timeout time.Duration
	err     error
}

func (o *writer) text(s string) {
	if o.err == nil {
		// A reader that takes something goes on; the deadline is of one write.
		if o.err = o.c.SetWriteDeadline(time.Now().Add(o.timeout)); o.err == nil {
			_, o.err = o.w.Write([]byte(s))
		}
	}
}

// event writes one. JSON has no line ends, so data is one line.
func (o *writer) event(id, name string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		o.err = err
		return
	}
	head := "event: " + name + "\n"
	if id != "" {
		head = "id: " + id + "\n" + head
	}
	o.text(head + "data: " + string(b) + "\n\n")
}

func (o *writer) flush() {
	if o.err == nil {
		if o.err = o.c.SetWriteDeadline(time.Now().Add(o.timeout)); o.err == nil {
			o.err = o.c.Flush()
		}
	}
}

func or(d, other time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return other
}

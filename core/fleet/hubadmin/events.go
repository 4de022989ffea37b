package hubadmin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
)

// Events is the route of the hub's events, which are server-sent: see
// virtkit/web/sse. Its query: node and kind, each as often as wanted.
var Events = Route{"GET", "/v1/events"}

// EventQuery selects events. Nothing selects all.
type EventQuery struct {
	Nodes []string // an ID, 8 digits of one, or a hostname
	Kinds []string
	After string // Last-Event-ID; "" = begin with a snapshot
}

// Told is an event as it was told. One of Event, Snapshot and Resync is set.
type Told struct {
	ID       string // "" for a resync
	Event    *hub.Event
	Snapshot *FleetNow
	Resync   string // why a snapshot follows
}

// FleetNow is what events change: all nodes, and the jobs that are not settled.
type FleetNow struct {
	Nodes []NodeNow `json:"nodes"`
	Jobs  []JobNow  `json:"jobs"`
}

// NodeNow is a node of a snapshot.
type NodeNow struct {
	ID    string    `json:"id"`
	Name  string    `json:"name"`
	Reach hub.Reach `json:"reach"`
	State string    `json:"state,omitempty"`
	Sync  string    `json:"sync"`
}

// JobNow is a job of a snapshot.
type JobNow struct {
	ID   string `json:"id"`
	Node string `json:"node,omitempty"`
	Path string `json:"project_path"`
	Name string `json:"name"`
	Step string `json:"step"`
}

// maxLine is the longest line of a stream: a snapshot of all nodes and jobs.
const maxLine = MaxReply

// Follow calls tell with each event until the hub ends the stream, ctx ends or
// tell fails. Errors: as Call's; nil when the hub ended it.
func (c *Client) Follow(ctx context.Context, q EventQuery, tell func(Told) error) error {
	u := url.URL{Scheme: "http", Host: "hub", Path: Events.Path, RawQuery: url.Values{"node": q.Nodes, "kind": q.Kinds}.Encode()}
	req, err := http.NewRequestWithContext(ctx, Events.Method, u.String(), nil)
	if err != nil {
		return err
	}
	if q.After != "" {
		req.Header.Set("Last-Event-ID", q.After)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
		if err != nil {
			return fault.New(fault.Unavailable, "the hub broke off its answer").Because(err)
		}
		return failure(resp.StatusCode, b)
	}
	s := bufio.NewScanner(resp.Body)
	s.Buffer(make([]byte, 4096), maxLine)
	var id, name, data string
	for s.Scan() {
		field, value, _ := strings.Cut(s.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "id":
			id = value
		case "event":
			name = value
		case "data":
			data = value // of one line: the hub's data is JSON
		}
		if s.Text() != "" {
			continue
		}
		if data != "" {
			t := Told{ID: id}
			if err := t.read(name, data); err != nil {
				return err
			}
			if err := tell(t); err != nil {
				return err
			}
		}
		name, data = "", ""
	}
	switch err := s.Err(); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return fault.Newf(fault.System, "an event of the hub has more than %d bytes", maxLine)
	}
	return nil // broken off or ended: it is the same to who follows
}

func (t *Told) read(name, data string) error {
	var into any
	switch name {
	case "snapshot":
		t.Snapshot = new(FleetNow)
		into = t.Snapshot
	case "resync":
		var r struct{ Why string }
		if err := json.Unmarshal([]byte(data), &r); err != nil {
			return fmt.Errorf("reading the hub's events: %w", err)
		}
		t.ID, t.Resync = "", r.Why
		return nil
	default:
		t.Event = new(hub.Event)
		into = t.Event
	}
	if err := json.Unmarshal([]byte(data), into); err != nil {
		return fmt.Errorf("reading the hub's events: %w", err)
	}
	return nil
}

// failure is the error that an answer other than 200 tells of.
func failure(status int, body []byte) error {
	var f Failure
	if json.Unmarshal(body, &f) != nil || f.Message == "" {
		return fault.Newf(fault.System, "the hub answered HTTP %d", status)
	}
	return fault.New(f.Kind, f.Message).Hint("%s", f.Hint)
}

// Package relaytest is a hub for tests of a relay: the client API, enrollment
// and sessions of gitlab-dispatch, in memory, with a test as its only node.
// RunSuite is what any hub must pass that a relay is to work with.
package relaytest

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

// Hub is an http.Handler. Its nodes have room for Room envelopes.
type Hub struct {
	URL string
	CA  []byte // PEM
	ID  string

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced at each change
	revision  uint64
	room      int
	tokens    map[string]bool
	relays    map[string]*relayOf
	held      map[string]string // reservation → relay
	jobs      []*Job
	seen      map[string]seenRequest
	faults    []*Fault
	requests  []Request
	status    dispatch.ServerStatus
	inventory *dispatch.Inventory
	beats     int
	states    []dispatch.RunnerState
	sessions  int
	drops     int
}

type relayOf struct {
	key     ed25519.PublicKey
	removed bool
}

type seenRequest struct {
	body   string
	answer any
}

// Request is one that came.
type Request struct {
	Method, Path string // without the query
	Conn         string // remote address
	Status       int
	Wait         bool // it asked to be held
}

// Fault is a misbehaviour, for requests whose method and path begin with On.
type Fault struct {
	On      string
	Times   int // 0 = always
	Status  int // with Failure; 0 = the connection is cut
	Failure dispatch.Failure
	Apply   bool // the request takes effect first
}

// Job is one that was submitted.
type Job struct {
	h *Hub

	ID         string
	Relay      string
	Submission dispatch.JobSubmission
	view       dispatch.JobView
	output     []byte
	complete   bool
	settled    bool
	asked      int64 // the furthest offset that was asked for
	toldEnd    bool  // a finished view was answered
	toldAll    bool  // the output's end was answered
}

// New starts a hub with room for n envelopes and an approved server. It ends
// with the test.
func New(t testing.TB, n int) *Hub {
	t.Helper()
	h := &Hub{ID: wire.NewID(), changed: make(chan struct{}), room: n, tokens: map[string]bool{}, relays: map[string]*relayOf{}, held: map[string]string{},
		seen: map[string]seenRequest{}, status: dispatch.ServerStatus{Status: dispatch.Approved, Name: "gl"}, revision: 1}
	ts := httptest.NewUnstartedServer(h)
	ts.Config.ErrorLog = log.New(io.Discard, "", 0) // connections that a relay gave up
	ts.StartTLS()
	t.Cleanup(func() {
		ts.CloseClientConnections()
		ts.Close()
	})
	h.URL = ts.URL
	h.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ts.Certificate().Raw})
	return h
}

func (h *Hub) changeLocked() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// Token makes a token of kind gitlab.
func (h *Hub) Token() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := wire.NewHex(wire.TokenLen)
	h.tokens[t] = true
	return t
}

// SetRoom says how many envelopes fit.
func (h *Hub) SetRoom(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.room = n
	h.revision++
	h.changeLocked()
}

// SetServer says how the hub holds the relays' server.
func (h *Hub) SetServer(s dispatch.ServerStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.status = s
	h.changeLocked()
}

// Remove unpins every relay's key.
func (h *Hub) Remove() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.relays {
		r.removed = true
	}
	h.changeLocked()
}

// Misbehave adds faults; the first that fits a request decides.
func (h *Hub) Misbehave(f ...*Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = append(h.faults, f...)
}

// Lapse ends all reservations.
func (h *Hub) Lapse() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.room += len(h.held)
	clear(h.held)
	h.revision++
	h.changeLocked()
}

// Held is how many reservations there are.
func (h *Hub) Held() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.held)
}

// Requests are all so far.
func (h *Hub) Requests() []Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.requests)
}

// Session is what the relays have said in theirs.
func (h *Hub) Session() (inv *dispatch.Inventory, beats int, states []dispatch.RunnerState, sessions int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.inventory, h.beats, slices.Clone(h.states), h.sessions
}

// Jobs are all that were submitted.
func (h *Hub) Jobs() []*Job {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.jobs)
}

// Until waits until f says so; it is asked at each change.
func (h *Hub) Until(ctx context.Context, what string, f func() bool) error {
	for {
		h.mu.Lock()
		changed := h.changed
		h.mu.Unlock()
		if f() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		}
	}
}

// Next waits for the nth submission, from 0.
func (h *Hub) Next(ctx context.Context, n int) (*Job, error) {
	err := h.Until(ctx, fmt.Sprintf("job %d is submitted", n), func() bool { return len(h.Jobs()) > n })
	if err != nil {
		return nil, err
	}
	return h.Jobs()[n], nil
}

// Accept is the node's: the job runs.
func (j *Job) Accept() {
	j.change(func() {
		j.view.State, j.view.Node = dispatch.Running, strings.Repeat("ab", wire.IDLen)
	})
}

// Write adds output.
func (j *Job) Write(p []byte) (int, error) {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	j.output = append(j.output, p...)
	j.view.OutputLen = int64(len(j.output))
	j.h.changeLocked()
	return len(p), nil
}

// Finish ends the job.
func (j *Job) Finish(r wire.JobResult) {
	j.change(func() {
		r.OutputLen = int64(len(j.output))
		j.view.State, j.view.Result, j.complete = dispatch.Finished, &r, true
	})
}

// Forget makes the job one that the hub does not know.
func (j *Job) Forget() {
	j.change(func() { j.Relay = "" })
}

func (j *Job) change(f func()) {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	f()
	j.view.Revision++
	j.h.changeLocked()
}

// View is the job as it is.
func (j *Job) View() dispatch.JobView {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	return j.view
}

// Settled says whether the job's outcome was delivered.
func (j *Job) Settled() bool {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	return j.settled
}

// Asked is the furthest offset of the output that was asked for: what is before
// it has arrived.
func (j *Job) Asked() int64 {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	return j.asked
}

// Told says whether the end of the job and of its output were answered.
func (j *Job) Told() bool {
	j.h.mu.Lock()
	defer j.h.mu.Unlock()
	return j.toldEnd && j.toldAll
}

func fail(status int, code dispatch.Code, text string) (int, any) {
	f := dispatch.Failure{Text: text, Code: code}
	if status == http.StatusServiceUnavailable {
		f.RetryAfterSecs = dispatch.PlaceRetrySecs
	}
	return status, f
}

// ServeHTTP is http.Handler's.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == dispatch.SessionPath {
		h.serveSession(w, r)
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		return
	}
	f := h.fault(r.Method + " " + r.URL.Path)
	var status int
	var answer any
	if f == nil || f.Apply {
		status, answer = h.answer(w, r, body)
	}
	if f != nil {
		if f.Status == 0 {
			h.note(r, 0)
			panic(http.ErrAbortHandler)
		}
		status, answer = f.Status, f.Failure
	}
	h.note(r, status)
	if b, ok := answer.([]byte); ok {
		w.WriteHeader(status)
		w.Write(b)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if answer != nil {
		json.NewEncoder(w).Encode(answer)
	}
}

func (h *Hub) note(r *http.Request, status int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.requests = append(h.requests, Request{Method: r.Method, Path: r.URL.Path, Conn: r.RemoteAddr, Status: status, Wait: r.URL.Query().Has("wait")})
	h.changeLocked()
}

func (h *Hub) fault(what string) *Fault {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, f := range h.faults {
		if !strings.HasPrefix(what, f.On) {
			continue
		}
		if f.Times > 0 {
			if f.Times--; f.Times == 0 {
				h.faults = slices.Delete(h.faults, i, i+1)
			}
		}
		return f
	}
	return nil
}

func (h *Hub) answer(w http.ResponseWriter, r *http.Request, body []byte) (int, any) {
	if r.URL.Path == dispatch.EnrollPath {
		return h.enroll(r, body)
	}
	relay, err := h.who(r, body)
	if err != nil {
		return fail(http.StatusUnauthorized, dispatch.Unauthorized, err.Error())
	}
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/v1/"), "/")
	what := r.Method + " " + parts[0]
	if len(parts) > 2 {
		what += " " + parts[2]
	} else if len(parts) > 1 {
		what += " id"
	}
	id := ""
	if len(parts) > 1 {
		id = parts[1]
	}
	switch what {
	case "POST capacity":
		return h.capacity(r, body)
	case "POST reservations":
		return h.reserve(relay, body)
	case "POST reservations renew":
		return h.renew(relay, id, body)
	case "DELETE reservations id":
		return h.release(relay, id)
	case "POST jobs":
		return h.submit(relay, body)
	}
	j := h.job(relay, id)
	if j == nil {
		return fail(http.StatusNotFound, dispatch.NotFound, "there is no such job")
	}
	switch what {
	case "GET jobs id":
		after, _ := strconv.ParseUint(r.URL.Query().Get("after"), 10, 64)
		h.poll(r, func() bool { return j.View().Revision > after })
		h.mu.Lock()
		defer h.mu.Unlock()
		j.toldEnd = j.toldEnd || j.view.State == dispatch.Finished
		return http.StatusOK, j.view
	case "GET jobs output":
		return j.serveOutput(w, r)
	case "POST jobs cancel":
		var c dispatch.CancelRequest
		json.Unmarshal(body, &c)
		if v := j.View(); v.State != dispatch.Finished && v.Cancel != wire.CancelImmediate {
			j.change(func() { j.view.Cancel = c.Mode })
		}
		return http.StatusAccepted, j.View()
	case "POST jobs settle":
		h.mu.Lock()
		defer h.mu.Unlock()
		if j.view.State != dispatch.Finished {
			return fail(http.StatusConflict, dispatch.Conflict, "the job is not finished")
		}
		j.settled, j.output = true, nil
		h.changeLocked()
		return http.StatusNoContent, nil
	}
	return fail(http.StatusNotFound, dispatch.NotFound, "there is no such path")
}

// poll holds a request as long as its wait says, until done.
func (h *Hub) poll(r *http.Request, done func() bool) {
	secs, _ := strconv.Atoi(r.URL.Query().Get("wait"))
	h.hold(r, secs, done)
}

func (h *Hub) hold(r *http.Request, secs int, done func() bool) {
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(min(secs, dispatch.MaxWaitSecs))*time.Second)
	defer cancel()
	h.Until(ctx, "", done)
}

func (h *Hub) capacity(r *http.Request, body []byte) (int, any) {
	var c dispatch.CapacityRequest
	if json.Unmarshal(body, &c) != nil || c.Check() != nil {
		return fail(http.StatusBadRequest, dispatch.Invalid, "no capacity request")
	}
	now := func() dispatch.Capacity {
		h.mu.Lock()
		defer h.mu.Unlock()
		return dispatch.Capacity{Revision: h.revision, Fits: max(h.room, 0)}
	}
	h.hold(r, c.WaitSecs, func() bool { return now().Revision > c.After })
	return http.StatusOK, now()
}

// again answers a create that was made before.
func (h *Hub) againLocked(id string, body []byte) (int, any) {
	s, ok := h.seen[id]
	if !ok {
		return 0, nil
	}
	if s.body != string(body) {
		return fail(http.StatusConflict, dispatch.Conflict, "the request_id is another request's")
	}
	if j, ok := s.answer.(*Job); ok {
		return http.StatusCreated, j.view
	}
	return http.StatusCreated, s.answer
}

func (h *Hub) reserve(relay string, body []byte) (int, any) {
	var q dispatch.ReservationRequest
	if json.Unmarshal(body, &q) != nil || q.Check() != nil {
		return fail(http.StatusBadRequest, dispatch.Invalid, "no reservation request")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if status, a := h.againLocked(q.RequestID, body); status != 0 {
		return status, a
	}
	if h.room <= 0 {
		return fail(http.StatusServiceUnavailable, dispatch.NoCapacity, "no node has room")
	}
	h.room--
	h.revision++
	g := dispatch.ReservationGrant{Reservation: wire.NewID(), Node: strings.Repeat("ab", wire.IDLen), Envelope: q.Placement.Envelope, LeaseSecs: q.LeaseSecs}
	h.held[g.Reservation] = relay
	h.seen[q.RequestID] = seenRequest{string(body), g}
	h.changeLocked()
	return http.StatusCreated, g
}

func (h *Hub) renew(relay, id string, body []byte) (int, any) {
	var q dispatch.RenewRequest
	if json.Unmarshal(body, &q) != nil || q.Check() != nil {
		return fail(http.StatusBadRequest, dispatch.Invalid, "no renewal")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held[id] != relay {
		return fail(http.StatusGone, dispatch.ReservationGone, "the reservation is gone")
	}
	return http.StatusOK, dispatch.ReservationGrant{Reservation: id, Node: strings.Repeat("ab", wire.IDLen), LeaseSecs: q.LeaseSecs}
}

func (h *Hub) release(relay, id string) (int, any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held[id] == relay {
		h.giveBackLocked(id)
	}
	return http.StatusNoContent, nil
}

func (h *Hub) giveBackLocked(id string) {
	delete(h.held, id)
	h.room++
	h.revision++
	h.changeLocked()
}

func (h *Hub) submit(relay string, body []byte) (int, any) {
	var s dispatch.JobSubmission
	if err := json.Unmarshal(body, &s); err != nil || s.Check() != nil {
		return fail(http.StatusBadRequest, dispatch.Invalid, "no submission")
	}
	if len(s.Spec) > dispatch.MaxSpec {
		return fail(http.StatusRequestEntityTooLarge, dispatch.TooLarge, "the spec is too large")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if status, a := h.againLocked(s.RequestID, body); status != 0 {
		return status, a
	}
	j := &Job{h: h, ID: wire.NewID(), Relay: relay, Submission: s, asked: -1}
	j.view = dispatch.JobView{ID: j.ID, Revision: 1, State: dispatch.Starting}
	if s.Reservation != "" && h.held[s.Reservation] == relay {
		h.giveBackLocked(s.Reservation)
	}
	h.jobs = append(h.jobs, j)
	h.seen[s.RequestID] = seenRequest{string(body), j}
	h.changeLocked()
	return http.StatusCreated, j.view
}

func (h *Hub) job(relay, id string) *Job {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, j := range h.jobs {
		if j.ID == id && j.Relay == relay {
			return j
		}
	}
	return nil
}

func (j *Job) serveOutput(w http.ResponseWriter, r *http.Request) (int, any) {
	h := j.h
	from, err := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	if err != nil || from < 0 {
		return fail(http.StatusBadRequest, dispatch.Invalid, "no offset")
	}
	h.mu.Lock()
	j.asked = max(j.asked, from)
	h.changeLocked()
	h.mu.Unlock()
	h.poll(r, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return int64(len(j.output)) > from || j.complete || j.settled
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if j.settled {
		return fail(http.StatusNotFound, dispatch.NotFound, "the job's output is gone")
	}
	size := int64(len(j.output))
	w.Header().Set(dispatch.HeaderLength, strconv.FormatInt(size, 10))
	if from > size {
		return fail(http.StatusRequestedRangeNotSatisfiable, dispatch.Invalid, "the output is shorter")
	}
	to := min(size, from+dispatch.MaxRead)
	w.Header().Set(dispatch.HeaderOffset, strconv.FormatInt(from, 10))
	if j.complete && to == size {
		w.Header().Set(dispatch.HeaderComplete, "true")
		j.toldAll = true
	}
	return http.StatusOK, slices.Clone(j.output[from:to])
}

// Host is the hub's HOST:PORT.
func (h *Hub) Host() string {
	u, _ := url.Parse(h.URL)
	return u.Host
}

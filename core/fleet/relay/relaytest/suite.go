package relaytest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/wire"
)

// World is a hub as its users see it: two relays of one approved server, and a
// node with room for Room envelopes of Placement.
type World struct {
	Relay, Other relay.Hub
	Placement    dispatch.Placement
	Room         int
	Spec         func(id int64) json.RawMessage // of an approved project
	Node         Node
}

// Node is what a test does as the one node. It takes every offer that it has
// room for. Each method waits until it is done, at most as long as ctx.
type Node interface {
	// Accept waits for the job's start and accepts it.
	Accept(ctx context.Context, job string) error
	Output(ctx context.Context, job string, p []byte) error
	Finish(ctx context.Context, job string, r wire.JobResult) error
	// Canceled waits until the job is to be canceled that way.
	Canceled(ctx context.Context, job string, mode wire.CancelMode) error
}

// RunSuite tests what a relay relies on of a hub.
func RunSuite(t *testing.T, factory func(t *testing.T) World) {
	for name, f := range map[string]func(*suite){
		"capacity": (*suite).capacity, "reservations": (*suite).reservations, "job": (*suite).job, "idempotent": (*suite).idempotent,
		"output": (*suite).output, "cancel": (*suite).cancel, "apart": (*suite).apart, "refusals": (*suite).refusals,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			f(&suite{T: t, World: factory(t), ctx: ctx})
		})
	}
}

type suite struct {
	*testing.T
	World
	ctx context.Context
}

func id() string { return wire.NewHex(dispatch.RequestIDLen) }

// refused wants a code, with its status.
func (s *suite) refused(what string, err error, code dispatch.Code, status int) {
	s.Helper()
	e, ok := errors.AsType[*dispatch.Error](err)
	if !ok || e.Code != code || e.Status != status {
		s.Errorf("%s: %v, expected %d %s", what, err, status, code)
	}
}

func (s *suite) must(what string, err error) {
	s.Helper()
	if err != nil {
		s.Fatalf("%s: %v", what, err)
	}
}

func (s *suite) reserve() dispatch.ReservationGrant {
	s.Helper()
	g, err := s.Relay.Reserve(s.ctx, dispatch.ReservationRequest{RequestID: id(), Placement: s.Placement, LeaseSecs: 60, WaitSecs: 20})
	s.must("reserving", err)
	return g
}

// fits waits until so many envelopes fit.
func (s *suite) fits(n int) dispatch.Capacity {
	s.Helper()
	for req := (dispatch.CapacityRequest{Placement: s.Placement}); ; {
		c, err := s.Relay.Capacity(s.ctx, req)
		s.must(fmt.Sprintf("waiting until %d fit", n), err)
		if c.Fits == n {
			return c
		}
		req.After, req.WaitSecs = c.Revision, 5
	}
}

func (s *suite) submit(reservation string) dispatch.JobView {
	s.Helper()
	v, err := s.Relay.Submit(s.ctx, &dispatch.JobSubmission{RequestID: id(), Placement: s.Placement, Reservation: reservation, PlaceWithinSecs: 60, Spec: s.Spec(4711)})
	s.must("submitting", err)
	if v.Revision == 0 || v.State != dispatch.Queued && v.State != dispatch.Starting {
		s.Errorf("submitted: %+v", v)
	}
	return v
}

// until waits for a view.
func (s *suite) until(job, what string, f func(dispatch.JobView) bool) dispatch.JobView {
	s.Helper()
	for after := uint64(0); ; {
		v, err := s.Relay.Job(s.ctx, job, after, 5)
		s.must("waiting until "+what, err)
		if f(v) {
			return v
		}
		after = v.Revision
	}
}

// running is a job that its node has accepted.
func (s *suite) running() string {
	s.Helper()
	v := s.submit(s.reserve().Reservation)
	s.must("accepting", s.Node.Accept(s.ctx, v.ID))
	s.until(v.ID, "it runs", func(v dispatch.JobView) bool { return v.State == dispatch.Running && v.Node != "" })
	return v.ID
}

// read is the output from an offset to what there is.
func (s *suite) read(job string, from int64, want int) []byte {
	s.Helper()
	var out []byte
	for len(out) < want {
		o, err := s.Relay.Output(s.ctx, job, from+int64(len(out)), 5)
		s.must("reading the output", err)
		if len(o.Data) > dispatch.MaxRead {
			s.Errorf("%d bytes in one answer", len(o.Data))
		}
		out = append(out, o.Data...)
	}
	return out
}

func (s *suite) capacity() {
	c := s.fits(s.Room)
	// A long poll ends when what it told has changed.
	changed := make(chan dispatch.Capacity, 1)
	go func() {
		c, err := s.Relay.Capacity(s.ctx, dispatch.CapacityRequest{Placement: s.Placement, After: c.Revision, WaitSecs: 60})
		if err != nil {
			s.Errorf("polling: %v", err)
		}
		changed <- c
	}()
	g := s.reserve()
	if got := <-changed; got.Revision <= c.Revision {
		s.Errorf("a poll past revision %d answers revision %d", c.Revision, got.Revision)
	}
	s.fits(s.Room - 1)
	s.must("releasing", s.Relay.Release(s.ctx, g.Reservation))
	s.fits(s.Room)
}

func (s *suite) reservations() {
	g := s.reserve()
	if !wire.IsHex(g.Reservation, wire.IDLen) || g.Node == "" || g.LeaseSecs <= 0 || g.LeaseSecs > 60 || g.Envelope != s.Placement.Envelope {
		s.Errorf("granted: %+v", g)
	}
	r, err := s.Relay.Renew(s.ctx, g.Reservation, 90)
	s.must("renewing", err)
	if r.Reservation != g.Reservation || r.LeaseSecs <= 0 || r.LeaseSecs > 90 {
		s.Errorf("renewed: %+v", r)
	}
	for range s.Room - 1 {
		s.reserve()
	}
	_, err = s.Relay.Reserve(s.ctx, dispatch.ReservationRequest{RequestID: id(), Placement: s.Placement, LeaseSecs: 60})
	s.refused("reserving more than there is", err, dispatch.NoCapacity, http.StatusServiceUnavailable)
	if e, ok := errors.AsType[*dispatch.Error](err); ok && e.RetryAfterSecs <= 0 {
		s.Errorf("no word when to come back: %+v", e)
	}
	for range 2 { // idempotent
		s.must("releasing", s.Relay.Release(s.ctx, g.Reservation))
	}
	_, err = s.Relay.Renew(s.ctx, g.Reservation, 60)
	s.refused("renewing what was released", err, dispatch.ReservationGone, http.StatusGone)
	s.must("releasing one that never was", s.Relay.Release(s.ctx, wire.NewID()))
}

func (s *suite) job() {
	g := s.reserve()
	v := s.submit(g.Reservation)
	s.must("accepting", s.Node.Accept(s.ctx, v.ID))
	v = s.until(v.ID, "it runs", func(v dispatch.JobView) bool { return v.State == dispatch.Running })
	if v.Node != g.Node || v.Result != nil {
		s.Errorf("running: %+v, reserved on %s", v, g.Node)
	}
	_, err := s.Relay.Renew(s.ctx, g.Reservation, 60)
	s.refused("renewing what the job took over", err, dispatch.ReservationGone, http.StatusGone)
	s.must("printing", s.Node.Output(s.ctx, v.ID, []byte("hello\n")))
	if got := s.read(v.ID, 0, 6); string(got) != "hello\n" {
		s.Errorf("output %q", got)
	}
	code := 3
	s.must("finishing", s.Node.Finish(s.ctx, v.ID, wire.JobResult{Failure: "script", ExitCode: &code, Message: "exit status 3"}))
	v = s.until(v.ID, "it is finished", func(v dispatch.JobView) bool { return v.State == dispatch.Finished })
	if v.Result == nil || v.Result.Failure != "script" || v.Result.ExitCode == nil || *v.Result.ExitCode != 3 || v.OutputLen != 6 {
		s.Errorf("finished: %+v", v)
	}
	for range 2 { // idempotent
		s.must("settling", s.Relay.Settle(s.ctx, v.ID))
	}
	_, err = s.Relay.Output(s.ctx, v.ID, 0, 0)
	s.refused("reading after settling", err, dispatch.NotFound, http.StatusNotFound)
	if v, err := s.Relay.Job(s.ctx, v.ID, 0, 0); err != nil || v.State != dispatch.Finished {
		s.Errorf("after settling: %+v, %v", v, err)
	}
	// A job without a reservation is placed by the hub.
	v = s.submit("")
	s.must("accepting", s.Node.Accept(s.ctx, v.ID))
	s.must("finishing", s.Node.Finish(s.ctx, v.ID, wire.JobResult{}))
	s.until(v.ID, "it is finished", func(v dispatch.JobView) bool { return v.State == dispatch.Finished && v.Result.Failure == "" })
	// As is one whose reservation is gone.
	gone := s.reserve().Reservation
	s.must("releasing", s.Relay.Release(s.ctx, gone))
	v = s.submit(gone)
	s.must("accepting", s.Node.Accept(s.ctx, v.ID))
}

func (s *suite) idempotent() {
	r := dispatch.ReservationRequest{RequestID: id(), Placement: s.Placement, LeaseSecs: 60, WaitSecs: 20}
	a, err := s.Relay.Reserve(s.ctx, r)
	s.must("reserving", err)
	b, err := s.Relay.Reserve(s.ctx, r)
	if err != nil || a.Reservation != b.Reservation {
		s.Errorf("again: %+v, %v, expected %+v", b, err, a)
	}
	r.LeaseSecs = 61
	_, err = s.Relay.Reserve(s.ctx, r)
	s.refused("the same id, another body", err, dispatch.Conflict, http.StatusConflict)
	sub := &dispatch.JobSubmission{RequestID: id(), Placement: s.Placement, Reservation: a.Reservation, PlaceWithinSecs: 60, Spec: s.Spec(1)}
	v, err := s.Relay.Submit(s.ctx, sub)
	s.must("submitting", err)
	w, err := s.Relay.Submit(s.ctx, sub)
	if err != nil || v.ID != w.ID {
		s.Errorf("again: %+v, %v, expected job %s", w, err, v.ID)
	}
	sub.Spec = s.Spec(2)
	_, err = s.Relay.Submit(s.ctx, sub)
	s.refused("the same id, another job", err, dispatch.Conflict, http.StatusConflict)
}

func (s *suite) output() {
	job := s.running()
	// A poll ends when there is something.
	polled := make(chan relay.Output, 1)
	go func() {
		o, err := s.Relay.Output(s.ctx, job, 0, 60)
		if err != nil {
			s.Errorf("polling: %v", err)
		}
		polled <- o
	}()
	var want bytes.Buffer
	for i := range 12 { // more than an answer holds
		p := []byte(strings.Repeat(fmt.Sprintf("line %d\n", i), 20<<10))
		want.Write(p)
		s.must("printing", s.Node.Output(s.ctx, job, p))
	}
	if o := <-polled; len(o.Data) == 0 || o.Complete {
		s.Errorf("a poll answers %d bytes, complete %v", len(o.Data), o.Complete)
	}
	for _, from := range []int64{0, 1, dispatch.MaxRead - 1, int64(want.Len()) - 1} {
		n := want.Len() - int(from)
		if got := s.read(job, from, n); !bytes.Equal(got, want.Bytes()[from:]) {
			s.Errorf("from %d on: %d bytes, others than were printed", from, len(got))
		}
	}
	o, err := s.Relay.Output(s.ctx, job, int64(want.Len()), 0)
	if err != nil || len(o.Data) > 0 || o.Complete || o.Length != int64(want.Len()) {
		s.Errorf("at the end of a running job: %+v, %v", o, err)
	}
	if _, err = s.Relay.Output(s.ctx, job, int64(want.Len())+1, 0); err == nil {
		s.Error("an offset past the end is answered")
	} else if e, ok := errors.AsType[*dispatch.Error](err); !ok || e.Status != http.StatusRequestedRangeNotSatisfiable || e.Retry() {
		s.Errorf("an offset past the end: %v, expected 416", err)
	}
	s.must("finishing", s.Node.Finish(s.ctx, job, wire.JobResult{}))
	o, err = s.Relay.Output(s.ctx, job, int64(want.Len()), 60)
	if err != nil || !o.Complete {
		s.Errorf("at the end of a finished job: %+v, %v", o, err)
	}
	if o, err = s.Relay.Output(s.ctx, job, 0, 0); err != nil || o.Complete || len(o.Data) == 0 {
		s.Errorf("the beginning of a long output: %d bytes, complete %v, %v", len(o.Data), o.Complete, err)
	}
}

func (s *suite) cancel() {
	job := s.running()
	for _, mode := range []wire.CancelMode{wire.CancelGraceful, wire.CancelImmediate} {
		v, err := s.Relay.Cancel(s.ctx, job, mode)
		if err != nil || v.Cancel != mode {
			s.Errorf("%s: %+v, %v", mode, v, err)
		}
		s.must("being canceled", s.Node.Canceled(s.ctx, job, mode))
	}
	if v, err := s.Relay.Cancel(s.ctx, job, wire.CancelGraceful); err != nil || v.Cancel != wire.CancelImmediate {
		s.Errorf("graceful after immediate: %+v, %v", v, err)
	}
	s.must("finishing", s.Node.Finish(s.ctx, job, wire.JobResult{Failure: "canceled"}))
	v := s.until(job, "it is finished", func(v dispatch.JobView) bool { return v.State == dispatch.Finished })
	again, err := s.Relay.Cancel(s.ctx, job, wire.CancelImmediate)
	if err != nil || again.State != dispatch.Finished || again.Revision != v.Revision {
		s.Errorf("canceling what is finished: %+v, %v", again, err)
	}
}

// apart: jobs and reservations are the relay's that made them.
func (s *suite) apart() {
	g := s.reserve()
	_, err := s.Other.Renew(s.ctx, g.Reservation, 60)
	if e, ok := errors.AsType[*dispatch.Error](err); !ok || e.Retry() {
		s.Errorf("another's reservation: %v", err)
	}
	s.must("releasing another's", ignore(s.Other.Release(s.ctx, g.Reservation)))
	_, err = s.Relay.Renew(s.ctx, g.Reservation, 60)
	s.must("renewing what another released", err)
	v := s.submit(g.Reservation)
	s.must("accepting", s.Node.Accept(s.ctx, v.ID))
	for what, err := range map[string]error{
		"job": second(s.Other.Job(s.ctx, v.ID, 0, 0)), "output": second(s.Other.Output(s.ctx, v.ID, 0, 0)),
		"cancel": second(s.Other.Cancel(s.ctx, v.ID, wire.CancelImmediate)), "settle": s.Other.Settle(s.ctx, v.ID),
		"none": second(s.Relay.Job(s.ctx, wire.NewID(), 0, 0)),
	} {
		s.refused(what, err, dispatch.NotFound, http.StatusNotFound)
	}
	if v, err := s.Relay.Job(s.ctx, v.ID, 0, 0); err != nil || v.Cancel != "" {
		s.Errorf("another canceled it: %+v, %v", v, err)
	}
}

// ignore takes a refusal as well.
func ignore(err error) error {
	if e, ok := errors.AsType[*dispatch.Error](err); ok && !e.Retry() {
		return nil
	}
	return err
}

func second[T any](_ T, err error) error { return err }

func (s *suite) refusals() {
	_, err := s.Relay.Capacity(s.ctx, dispatch.CapacityRequest{})
	s.refused("no placement", err, dispatch.Invalid, http.StatusBadRequest)
	_, err = s.Relay.Reserve(s.ctx, dispatch.ReservationRequest{RequestID: "x", Placement: s.Placement, LeaseSecs: 60})
	s.refused("no request id", err, dispatch.Invalid, http.StatusBadRequest)
	_, err = s.Relay.Reserve(s.ctx, dispatch.ReservationRequest{RequestID: id(), Placement: s.Placement, LeaseSecs: wire.MaxLeaseSecs + 1})
	s.refused("too long a lease", err, dispatch.Invalid, http.StatusBadRequest)
	big := json.RawMessage(`{"x":"` + strings.Repeat("x", dispatch.MaxSpec) + `"}`)
	_, err = s.Relay.Submit(s.ctx, &dispatch.JobSubmission{RequestID: id(), Placement: s.Placement, PlaceWithinSecs: 1, Spec: big})
	s.refused("too large", err, dispatch.TooLarge, http.StatusRequestEntityTooLarge)
	job := s.running()
	if err := s.Relay.Settle(s.ctx, job); err == nil {
		s.Error("a running job is settled")
	}
}

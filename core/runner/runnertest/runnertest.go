// Package runnertest is a host in memory for tests of core/runner: images that
// are there or not, guests that run a Go function instead of a shell, and
// knobs for what goes wrong.
package runnertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"virtkit/core/fault"
	"virtkit/core/guestwire"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// Shell is a guest's program: it gets the request, the whole script, and the
// controls.
type Shell func(ctx context.Context, r guestwire.ExecRequest, script string, out, err io.Writer, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error)

// Host is images and machines.
type Host struct {
	Root      string // job directories are below it
	Images    map[string]runner.Image
	CheckErr  error
	Shell     Shell
	LaunchErr error
	RemoveErr error
	EndWith   *supervise.Exit // what a guest's State says after KillGuest

	// Reserved, when set, is called once a directory is reserved.
	Reserved func()
	// Services are what a guest's state tells of its services; nil = all run.
	Services func(s supervise.Spec) []supervise.ServiceState

	// Silent is how many of its first programs a guest never answers. It is then
	// booted anew, or, when the job has begun, ends.
	Silent int
	// State, when set, changes what a guest's State says.
	State func(*supervise.State)

	// Recorded, when set, makes a guest's record; nil records nothing.
	Recorded func(s supervise.Spec, stage string) supervise.EgressRecord

	// Cost, when set, is what a guest has used; nil does not know.
	Cost func() supervise.Usage
	// Held are the descriptors that guests were launched with, nil included.
	Held []*os.File

	mu       sync.Mutex
	guests   map[string]*guest
	held     string // directory whose lock a slot holds
	Launched []supervise.Spec
	Samples  int // asked of guests
	Removed  []string
	Queries  []runner.ImageQuery
	Reaped   []string
}

var (
	_ runner.Images   = (*Host)(nil)
	_ runner.Machines = (*Host)(nil)
)

// Check implements runner.Images.
func (h *Host) Check(string) error { return h.CheckErr }

// Resolve implements runner.Images.
func (h *Host) Resolve(_ context.Context, q runner.ImageQuery, progress func(string)) (runner.Image, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Queries = append(h.Queries, q)
	img, ok := h.Images[q.Ref]
	if !ok {
		return img, fault.Newf(fault.NotFound, "no image %s", q.Ref).Hint("vk images lists what there is")
	}
	progress("looking at " + q.Ref)
	return img, nil
}

// Dir implements runner.Machines.
func (h *Host) Dir(id string) string { return filepath.Join(h.Root, id) }

// Reserve implements runner.Machines.
func (h *Host) Reserve(_ context.Context, s supervise.Spec) (runner.Slot, error) {
	if err := os.Mkdir(h.Dir(s.ID), 0o700); err != nil {
		return nil, fault.New(fault.Conflict, "job directory").Because(err)
	}
	h.mu.Lock()
	h.held = s.ID
	h.mu.Unlock()
	if h.Reserved != nil {
		h.Reserved()
	}
	return &slot{h, s}, nil
}

type slot struct {
	h *Host
	s supervise.Spec
}

func (s *slot) Launch(ctx context.Context, hold *os.File, progress func(supervise.State)) (runner.Guest, error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.h.held = ""
	if s.h.LaunchErr != nil {
		return nil, s.h.LaunchErr
	}
	s.h.Launched = append(s.h.Launched, s.s)
	s.h.Held = append(s.h.Held, hold)
	g := &guest{h: s.h, spec: s.s, dead: make(chan struct{})}
	if s.h.guests == nil {
		s.h.guests = map[string]*guest{}
	}
	s.h.guests[s.s.ID] = g
	st, _ := g.State(ctx)
	progress(st)
	return g, nil
}

// Release implements runner.Slot.
func (s *slot) Release() error {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if s.h.held != s.s.ID {
		return nil
	}
	s.h.held = ""
	return os.RemoveAll(s.h.Dir(s.s.ID))
}

// KillGuest ends a guest as a crash of it would.
func (h *Host) KillGuest(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil {
		g.once.Do(func() { close(g.dead) })
	}
}

// Find implements runner.Machines.
func (h *Host) Find(_ context.Context, id string) (runner.Guest, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return nil, fmt.Errorf("%s: %w", id, supervise.ErrSupervisorGone)
	}
	select {
	case <-g.dead:
		return nil, fmt.Errorf("%s ended: panic: %w", id, supervise.ErrSupervisorGone)
	default:
	}
	return g, nil
}

// Remove implements runner.Machines.
func (h *Host) Remove(_ context.Context, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == id {
		return fault.Newf(fault.Conflict, "guest %s still runs: its lock is held", id)
	}
	h.Removed = append(h.Removed, id)
	delete(h.guests, id)
	if h.RemoveErr != nil {
		return h.RemoveErr
	}
	return os.RemoveAll(h.Dir(id))
}

// Reap implements runner.Machines.
func (h *Host) Reap(context.Context) []string { return h.Reaped }

// Alive counts guests.
func (h *Host) Alive() int { h.mu.Lock(); defer h.mu.Unlock(); return len(h.guests) }

type guest struct {
	h    *Host
	spec supervise.Spec
	dead chan struct{}
	once sync.Once

	mu     sync.Mutex
	silent int  // programs that it did not answer
	lost   int  // how often it was booted anew
	begun  bool // Begin was called
}

// Begin implements runner.Guest.
func (g *guest) Begin(ctx context.Context) (supervise.State, error) {
	g.mu.Lock()
	g.begun = true
	g.mu.Unlock()
	return g.State(ctx)
}

// lose makes the guest one that did not answer.
func (g *guest) lose() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.silent >= g.h.Silent {
		return false
	}
	g.silent++
	if g.spec.Trial && !g.begun {
		g.lost++
	} else {
		g.once.Do(func() { close(g.dead) })
	}
	return true
}

func (g *guest) State(context.Context) (supervise.State, error) {
	s := supervise.State{Phase: supervise.Running, Kernel: "6.12", Accel: "tcg"}
	g.mu.Lock()
	for range g.lost {
		s.Retried = append(s.Retried, "it was silent")
	}
	g.mu.Unlock()
	if g.h.Services != nil {
		s.Services = g.h.Services(g.spec)
	}
	select {
	case <-g.dead:
		s.Phase, s.Exit = supervise.Ended, g.h.EndWith
	default:
	}
	if g.h.State != nil {
		g.h.State(&s)
	}
	return s, nil
}

func (g *guest) Exec(ctx context.Context, r guestwire.ExecRequest, s runner.Stdio, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
	script, err := io.ReadAll(s.In)
	if err != nil {
		return guestwire.ExecEvent{}, err
	}
	if g.lose() {
		return guestwire.ExecEvent{}, errors.New("stream reset")
	}
	if g.h.Shell == nil || string(script) == "exit 0\n" {
		return guestwire.ExecEvent{Exited: true}, nil
	}
	type end struct {
		ev  guestwire.ExecEvent
		err error
	}
	done := make(chan end, 1)
	go func() {
		ev, err := g.h.Shell(ctx, r, string(script), s.Out, s.Err, control)
		done <- end{ev, err}
	}()
	select {
	case e := <-done:
		return e.ev, e.err
	case <-g.dead:
		return guestwire.ExecEvent{}, errors.New("stream reset")
	}
}

// Egress implements runner.Guest.
// Sample implements runner.Guest.
func (g *guest) Sample(context.Context) error {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.h.Samples++
	return nil
}

func (g *guest) Egress(_ context.Context, stage string) (supervise.EgressRecord, error) {
	if g.h.Recorded == nil {
		return supervise.EgressRecord{}, fs.ErrNotExist
	}
	return g.h.Recorded(g.spec, stage), nil
}

// Usage implements runner.Guest.
func (g *guest) Usage(context.Context) (supervise.Usage, error) {
	if g.h.Cost == nil {
		return supervise.Usage{}, fault.New(fault.Conflict, "what the guest used is not known")
	}
	return g.h.Cost(), nil
}

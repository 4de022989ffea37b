package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/fault"
	"virtkit/core/logx"
)

// Recordings makes place for what guests record of themselves (core/atop).
type Recordings interface {
	// Begin makes a directory of its own for a recording and returns it.
	Begin(name string) (dir string, err error)
}

// Bounds of what a guest may make the host keep.
const (
	sampleMax = 64 << 20 // bytes of one sample
	recordMax = 2 << 30  // bytes of one recording
)

// recorder asks the guest for samples and appends them to the recording. Only
// whole samples are written, so that the guest's sudden end costs the last
// interval alone. The log is held by a lock for as long as this process lives.
type recorder struct {
	dir      string
	interval time.Duration
	log      *slog.Logger

	mu     sync.Mutex // one sample at a time
	f      *os.File
	size   int64
	last   time.Time // of the last sample
	failed bool      // the last one did; told once
}

// beginRecording is the step that makes place for the recording. A guest that
// cannot be recorded runs all the same; its State says why.
func (s *supervisor) beginRecording(context.Context) error {
	if s.spec.Record == nil || s.d.Recordings == nil {
		return nil
	}
	r := &recorder{interval: max(s.spec.Record.Interval, time.Second), log: s.log}
	err := r.begin(s.d.Recordings, s.spec.Record.Name)
	if err != nil {
		s.log.Warn("the guest is not recorded", logx.Err, err)
		s.board.update(func(st *State) { st.RecordErr = err.Error() })
		return nil
	}
	s.recorder = r
	s.board.update(func(st *State) { st.Recording = r.dir })
	return nil
}

func (r *recorder) begin(to Recordings, name string) (err error) {
	if r.dir, err = to.Begin(name); err != nil {
		return err
	}
	r.f, err = os.OpenFile(filepath.Join(r.dir, atop.LogFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	return unix.Flock(int(r.f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}

// release lets go of the log in a process that lives on.
func (r *recorder) release() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.f.Close()
}

// record takes a sample now and after each interval, until ctx ends.
func (s *supervisor) record(ctx context.Context, g *guest) {
	if s.recorder == nil {
		return
	}
	s.recorder.mu.Lock()
	s.recorder.last = time.Time{} // of the boot before
	s.recorder.mu.Unlock()
	t := time.NewTicker(s.recorder.interval)
	defer t.Stop()
	for {
		s.recorder.tell(s.recorder.sample(ctx, g))
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// sample asks the guest for one and appends it. One that was asked for less
// than a second after the one before is that one.
func (r *recorder) sample(ctx context.Context, g *guest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.last.IsZero() && time.Since(r.last) < time.Second {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, max(r.interval, 30*time.Second))
	defer cancel()
	ctx, cancel2 := g.with(ctx)
	defer cancel2()
	got := make(chan []byte, 1)
	err := bounded(ctx, func(ctx context.Context) error {
		b, err := g.ch.client().Sample(ctx, sampleMax)
		got <- b
		return err
	})
	if err != nil {
		return err
	}
	b := <-got
	switch {
	case !bytes.HasSuffix(b, []byte("\nSEP\n")):
		return fmt.Errorf("the guest sent %d bytes that are no sample", len(b))
	case r.size+int64(len(b)) > recordMax:
		return fmt.Errorf("the recording would be larger than %d bytes", int64(recordMax))
	}
	if _, err := r.f.Write(b); err != nil {
		r.f.Truncate(r.size) // or the next one would begin in the middle of a line
		return err
	}
	r.size += int64(len(b))
	r.last = time.Now()
	return nil
}

// tell logs the first of a row of failures.
func (r *recorder) tell(err error) {
	if _, gone := errors.AsType[*guestGone](err); gone || errors.Is(err, context.Canceled) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && !r.failed {
		r.log.Warn("the guest's recording has a gap", logx.Err, err)
	}
	r.failed = err != nil
}

// lastSample takes one more before the guest is asked to end.
func (s *supervisor) lastSample(g *guest) {
	if s.recorder == nil {
		return
	}
	select {
	case <-s.kill:
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	s.recorder.tell(s.recorder.sample(ctx, g))
}

// sampleNow is a client's wish.
func (s *supervisor) sampleNow() error {
	g := s.current()
	if s.recorder == nil || g == nil {
		return fault.New(fault.NotFound, "no recording is made of this guest").
			Hint("jobs are recorded while [executor] atop is on")
	}
	ctx, cancel := contextFor(30 * time.Second)
	defer cancel()
	return s.recorder.sample(ctx, g)
}

// Sample has a sample taken of the guest now, so that its recording
// (State.Recording) reaches to this moment. fault.NotFound when it has none.
func (c *Client) Sample(ctx context.Context) error {
	conn, err := c.ask(ctx, request{Op: opSample}, func(answer) {})
	if err == nil {
		conn.Close()
	}
	return err
}

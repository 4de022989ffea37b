package guestclient

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"sync"
	"time"

	"virtkit/core/guestwire"
)

// Stdio is what a program in the guest is joined to. A nil member is
// /dev/null in the guest. Out and Err may be the same writer, which then sees
// one Write at a time.
type Stdio struct {
	In  io.Reader
	Out io.Writer
	Err io.Writer
}

// ExecResult is how a program ended.
type ExecResult struct {
	PID    int    // in the guest; 0 = it never started
	Code   int    // exit status; 128+n when Signal is n
	Signal int    // signal that ended it, or 0
	OOM    bool   // the guest's kernel killed for memory
	Down   bool   // it ended because the guest was shutting down
	Err    string // why it never started (Code is 126 or 127), or ""
}

// NewExecID makes an ExecRequest.ID.
func NewExecID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Exec runs a program in the guest and returns when it has ended and all its
// output was written to io. It fills in req's ID when empty, and its Stdin,
// Stdout and Stderr from io. Each value of ctl is passed to the agent; ctl may
// be nil.
//
// A program that ends, however it ends, is a result and no error; so is one
// that could not be started (ExecResult.Err). ErrGuestGone is in the error
// when the guest ended first; what it had sent before was written to io. When
// a writer of io fails, the program finds its output closed and the writer's
// error is returned beside the result. When ctx ends, the streams are closed
// (the agent then ends the program, unless req.Detach) and ctx's cause is
// returned.
//
// A read of io.In that blocks does not keep Exec from returning; its goroutine
// ends with that read.
func (c *Client) Exec(ctx context.Context, req guestwire.ExecRequest, sio Stdio, ctl <-chan guestwire.ExecControl) (ExecResult, error) {
	if req.ID == "" {
		req.ID = NewExecID()
	}
	if req.TTY {
		sio.Err = nil
	}
	req.Stdin, req.Stdout, req.Stderr = sio.In != nil, sio.Out != nil, sio.Err != nil
	x := &execution{ended: make(chan struct{})}
	defer x.close()
	if err := x.connect(ctx, c, req); err != nil {
		return ExecResult{}, err
	}
	// From here on, the end of ctx ends the streams and so everything below.
	stop := context.AfterFunc(ctx, x.close)
	defer stop()

	if same(sio.Out, sio.Err) {
		w := &oneAtATime{w: sio.Out}
		sio.Out, sio.Err = w, w
	}
	var outErr, errErr error
	var copies sync.WaitGroup
	if sio.In != nil {
		go x.feed(sio.In)
	}
	if sio.Out != nil {
		copies.Go(func() { outErr = drain(sio.Out, x.fds[1]) })
	}
	if sio.Err != nil {
		copies.Go(func() { errErr = drain(sio.Err, x.fds[2]) })
	}
	go x.pass(ctl)

	res, err := x.wait()
	if err != nil && ctx.Err() == nil {
		// The guest or the way to it is gone: the stdio streams end by
		// themselves after what was under way.
		copies.Wait()
		return res, fmt.Errorf("running %s: %w", first(req.Argv), gone(err))
	}
	if err == nil && res.PID == 0 && res.Err != "" {
		// It never started, so nothing comes. Who refused it may not be who has
		// its streams (a job's host, and the agent of a service), which then end
		// late.
		return res, nil
	}
	done := make(chan struct{})
	go func() { copies.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		// A writer that blocks must not outlast ctx for long.
		select {
		case <-done:
		case <-time.After(time.Second):
			return res, context.Cause(ctx)
		}
	}
	if err != nil || ctx.Err() != nil {
		return res, context.Cause(ctx)
	}
	if res.Down {
		// Not its own end: its code would pass for one of the program's.
		return res, fmt.Errorf("running %s: %w: it is shutting down", first(req.Argv), ErrGuestGone)
	}
	if err := errors.Join(outErr, errErr); err != nil {
		return res, fmt.Errorf("writing the output of %s: %w", first(req.Argv), err)
	}
	return res, nil
}

func first(argv []string) string {
	if len(argv) == 0 {
		return "nothing"
	}
	return argv[0]
}

// execution is the streams of one exec.
type execution struct {
	ended chan struct{} // closed when the control stream said so
	once  sync.Once
	ctl   net.Conn
	fds   [3]net.Conn
}

// connect opens all streams and says on each what it is.
func (x *execution) connect(ctx context.Context, c *Client, req guestwire.ExecRequest) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("starting %s: %w", first(req.Argv), gone(err))
		}
	}()
	want := [3]bool{req.Stdin, req.Stdout, req.Stderr}
	if x.ctl, err = c.Open(ctx); err != nil {
		return err
	}
	for fd, w := range want {
		if w {
			if x.fds[fd], err = c.Open(ctx); err != nil {
				return err
			}
		}
	}
	stop := context.AfterFunc(ctx, x.close)
	defer stop()
	if err = guestwire.Open(x.ctl, guestwire.OpExec, req); err != nil {
		return cause(ctx, err)
	}
	for fd, w := range want {
		if w {
			if err = guestwire.Open(x.fds[fd], guestwire.OpStdio, guestwire.Stdio{ID: req.ID, FD: fd}); err != nil {
				return cause(ctx, err)
			}
		}
	}
	return nil
}

func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// wait receives events until the last one.
func (x *execution) wait() (ExecResult, error) {
	defer close(x.ended)
	var res ExecResult
	for {
		var ev guestwire.ExecEvent
		if err := guestwire.Recv(x.ctl, &ev); err != nil {
			return res, err
		}
		if ev.PID != 0 {
			res.PID = ev.PID
		}
		if ev.Exited {
			res.Code, res.Signal, res.OOM, res.Down, res.Err = ev.Code, ev.Signal, ev.OOM, ev.Down, ev.Err
			return res, nil
		}
	}
}

// feed copies the input and half-closes at its end. The agent's end of that
// stream means that the program reads no more.
func (x *execution) feed(in io.Reader) {
	conn := x.fds[0]
	go func() {
		io.Copy(io.Discard, conn)
		conn.Close()
	}()
	copyBuffered(conn, in)
	CloseWrite(conn)
}

// pass hands controls on while the program runs.
func (x *execution) pass(ctl <-chan guestwire.ExecControl) {
	for {
		select {
		case m, ok := <-ctl:
			if !ok {
				return
			}
			if guestwire.Send(x.ctl, m) != nil {
				return
			}
		case <-x.ended:
			return
		}
	}
}

// close ends every stream; what blocks on one returns.
func (x *execution) close() {
	x.once.Do(func() {
		if x.ctl != nil {
			x.ctl.Close()
		}
		for _, c := range x.fds {
			if c != nil {
				c.Close()
			}
		}
	})
}

// drain copies a stream to w. When w fails, the stream is closed, so that the
// program learns of it as of a broken pipe; the error is w's.
func drain(w io.Writer, conn net.Conn) error {
	ew := &errWriter{w: w}
	copyBuffered(ew, conn)
	conn.Close()
	return ew.err
}

type errWriter struct {
	w   io.Writer
	err error
}

func (e *errWriter) Write(p []byte) (int, error) {
	n, err := e.w.Write(p)
	if err != nil {
		e.err = err
	}
	return n, err
}

// same tells whether two writers are one.
func same(a, b io.Writer) bool {
	if a == nil || b == nil {
		return false
	}
	ta := reflect.TypeOf(a)
	return ta == reflect.TypeOf(b) && ta.Comparable() && a == b
}

type oneAtATime struct {
	mu sync.Mutex
	w  io.Writer
}

func (o *oneAtATime) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.w.Write(p)
}

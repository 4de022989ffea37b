package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

// ErrSupervisorGone says that a job's supervisor has ended; the error that
// wraps it tells why as far as the job's directory knows.
var ErrSupervisorGone = errors.New("supervise: the guest's supervisor is gone")

// Client talks to the supervisor of one job directory. Each call uses a
// connection of its own; a Client may be used by many goroutines and needs no
// closing.
type Client struct{ dir string }

// Dial finds the supervisor of a job directory. The error wraps
// ErrSupervisorGone when there is none.
func Dial(dir string) (*Client, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	c := &Client{dir: dir}
	conn, err := c.connect(context.Background())
	if err != nil {
		if _, serr := os.Lstat(filepath.Join(dir, StateFile)); errors.Is(serr, fs.ErrNotExist) && Locked(dir) {
			return nil, fault.Newf(fault.Conflict, "guest %s is still being prepared", filepath.Base(dir)).
				Hint("try again when `vk list` shows it running")
		}
		return nil, err
	}
	conn.Close()
	return c, nil
}

// Dir is the job's directory.
func (c *Client) Dir() string { return c.dir }

// connect opens a connection; a supervisor that is just starting or has a
// full backlog is waited for until ctx ends.
func (c *Client) connect(ctx context.Context) (*net.UnixConn, error) {
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		conn, err := fsx.DialUnix(filepath.Join(c.dir, SocketFile))
		if err == nil {
			return conn, nil
		}
		switch {
		case errors.Is(err, syscall.EAGAIN):
		case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
			if !Locked(c.dir) {
				return nil, goneError(c.dir, nil)
			}
			// It is starting, or ending.
			if st, serr := ReadState(c.dir); serr == nil && st.Phase == Ended || wait > 50*time.Millisecond && ctx.Done() == nil {
				return nil, goneError(c.dir, nil)
			}
		default:
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to the guest's supervisor: %w", context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// Locked reports whether a directory's lock is held: by its supervisor, or
// for a moment by somebody who looks.
func Locked(dir string) bool {
	path := filepath.Join(dir, LockFile)
	f, err := openExisting(path)
	if err != nil {
		return false
	}
	defer f.Close()
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
		if err != syscall.EINTR {
			break
		}
	}
	return err == syscall.EWOULDBLOCK
}

// ask sends a request and hands its answers to each until the last one.
func (c *Client) ask(ctx context.Context, r request, each func(answer)) (*net.UnixConn, error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	fail := func(err error) (*net.UnixConn, error) {
		conn.Close()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if closed(err) {
			return nil, goneError(c.dir, nil)
		}
		return nil, fmt.Errorf("asking the guest's supervisor for %s: %w", r.Op, err)
	}
	if err := guestwire.Send(conn, r); err != nil {
		return fail(err)
	}
	for {
		var a answer
		if err := guestwire.Recv(conn, &a); err != nil {
			return fail(err)
		}
		if a.Err != "" {
			conn.Close()
			return nil, a.fault()
		}
		each(a)
		if a.Done {
			return conn, nil
		}
	}
}

func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

func (c *Client) askState(ctx context.Context, r request, progress func(State)) (st State, err error) {
	conn, err := c.ask(ctx, r, func(a answer) {
		if a.State != nil {
			st = *a.State
			if progress != nil {
				progress(st)
			}
		}
	})
	if err == nil {
		conn.Close()
	}
	return st, err
}

// State asks for a snapshot.
func (c *Client) State(ctx context.Context) (State, error) {
	return c.askState(ctx, request{Op: opState}, nil)
}

// Wait blocks until the guest's phase is until or later, calling progress
// (which may be nil) with the state now and at each change. It returns the
// last state also with an error.
func (c *Client) Wait(ctx context.Context, until Phase, progress func(State)) (State, error) {
	return c.askState(ctx, request{Op: opWait, Until: until}, progress)
}

// Stop ends the guest in order and returns when its supervisor is gone: its
// programs get SIGTERM, then SIGKILL after grace (0 = the default). No error
// when it is gone already.
func (c *Client) Stop(ctx context.Context, grace time.Duration) (State, error) {
	return c.stop(ctx, request{Op: opStop, Grace: grace})
}

// Kill is Stop without asking the guest.
func (c *Client) Kill(ctx context.Context) (State, error) {
	return c.stop(ctx, request{Op: opKill})
}

func (c *Client) stop(ctx context.Context, r request) (st State, err error) {
	conn, err := c.ask(ctx, r, func(a answer) {
		if a.State != nil {
			st = *a.State
		}
	})
	if errors.Is(err, ErrSupervisorGone) {
		if last, rerr := ReadState(c.dir); rerr == nil {
			st = last
		}
		return st, nil
	}
	if err != nil {
		return st, err
	}
	defer conn.Close()
	// The process holds the connection to its last instant.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	io.Copy(io.Discard, conn)
	for wait := time.Millisecond; Locked(c.dir); wait = min(2*wait, 50*time.Millisecond) {
		select {
		case <-ctx.Done():
			return st, context.Cause(ctx)
		case <-time.After(wait):
		}
	}
	if ctx.Err() != nil {
		return st, context.Cause(ctx)
	}
	return st, nil
}

// Begin says that what comes now is the user's (see Spec.Trial), and returns
// when the guest runs. A client that has made something in the guest before must
// make it again when State.Retried has grown meanwhile.
func (c *Client) Begin(ctx context.Context) (State, error) {
	return c.askState(ctx, request{Op: opBegin}, nil)
}

// Reboot reboots the guest and returns when it runs again.
func (c *Client) Reboot(ctx context.Context) (State, error) {
	st, err := c.askState(ctx, request{Op: opReboot}, nil)
	if err == nil && st.Phase == Ended {
		return st, fault.Newf(fault.System, "guest %s did not come back: %s%s", st.Name, st.Exit.words(), consoleText(st.Exit.Console))
	}
	return st, err
}

// Publish makes a port of the guest reachable on the host and returns it as
// it was opened.
func (c *Client) Publish(ctx context.Context, p Publish) (Publish, error) {
	var got Publish
	conn, err := c.ask(ctx, request{Op: opPublish, Publish: &p}, func(a answer) {
		if a.Publish != nil {
			got = *a.Publish
		}
	})
	if err == nil {
		conn.Close()
	}
	return got, err
}

// Unpublish undoes Publish; p is what that returned.
func (c *Client) Unpublish(ctx context.Context, p Publish) error {
	conn, err := c.ask(ctx, request{Op: opUnpublish, Publish: &p}, func(answer) {})
	if err == nil {
		conn.Close()
	}
	return err
}

// Egress is the record of what the guests reached and were refused so far.
// stage, when not empty, names the stage of the job that begins now. Of a
// supervisor that is gone it is the last record that it wrote, whose Ended
// tells whether that is all. The error wraps fs.ErrNotExist when no record is
// kept.
func (c *Client) Egress(ctx context.Context, stage string) (EgressRecord, error) {
	conn, err := c.ask(ctx, request{Op: opEgress, Stage: stage}, func(answer) {})
	switch {
	case err == nil:
		conn.Close()
	case !errors.Is(err, ErrSupervisorGone):
		if fault.KindOf(err) == fault.NotFound {
			return EgressRecord{}, fmt.Errorf("%w: %w", fs.ErrNotExist, err)
		}
		return EgressRecord{}, err
	}
	return ReadEgress(c.dir)
}

// Opener opens streams to the guest's agent: each one carries one guestwire
// request. A stream that ends before its first answer is one of a guest that
// is not there (any more).
func (c *Client) Opener() guestclient.Opener {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := c.connect(ctx)
		if err != nil {
			return nil, err
		}
		if err := guestwire.Send(conn, request{Op: opGuest}); err != nil {
			conn.Close()
			if closed(err) {
				return nil, goneError(c.dir, nil)
			}
			return nil, err
		}
		return conn, nil
	}
}

// Guest asks the guest's agent through the supervisor.
func (c *Client) Guest() *guestclient.Client { return guestclient.FromOpener(c.Opener()) }

// Exec runs a program in the guest; see guestclient.Client.Exec. When the
// guest went away meanwhile, the error wraps ErrSupervisorGone and tells why,
// if that is known by then.
func (c *Client) Exec(ctx context.Context, req guestwire.ExecRequest, sio guestclient.Stdio, ctl <-chan guestwire.ExecControl) (guestclient.ExecResult, error) {
	r, err := c.Guest().Exec(ctx, req, sio, ctl)
	if !errors.Is(err, guestclient.ErrGuestGone) || ctx.Err() != nil {
		return r, err
	}
	return r, c.explainGone(ctx, err)
}

// explainGone finds out why a guest went away under a request.
func (c *Client) explainGone(ctx context.Context, err error) error {
	wctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if st, serr := c.State(wctx); serr == nil && (st.Phase == Starting || st.Phase == Booting) {
		return fault.Newf(fault.Conflict, "guest %s is not running: it is %s (boot %d)", st.Name, st.Phase, st.Boots+1).
			Hint("try again when `vk list` shows it running").Because(err)
	}
	st, werr := c.Wait(wctx, Ended, nil)
	switch {
	case errors.Is(werr, ErrSupervisorGone) && st.Exit == nil:
		return fmt.Errorf("%w: %w", werr, err)
	case st.Exit != nil:
		return &EndedError{State: st, cause: err}
	}
	return err
}

// EndedError is a guest that ended under a request. It wraps
// ErrSupervisorGone.
type EndedError struct {
	State State
	cause error
}

func (e *EndedError) Error() string {
	return fmt.Sprintf("guest %s ended: %s", e.State.Name, e.State.Exit.words())
}

// Unwrap returns ErrSupervisorGone and what the request saw.
func (e *EndedError) Unwrap() []error { return []error{ErrSupervisorGone, e.cause} }

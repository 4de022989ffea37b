package supervise

import (
	"context"
	"errors"
	"net"
	"time"
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
func Dial(dir string) (*Client, error) { return nil, errors.New("not yet") }

// Dir is the job's directory.
func (c *Client) Dir() string { return c.dir }

// State asks for a snapshot.
func (c *Client) State(ctx context.Context) (State, error) { return State{}, errors.New("not yet") }

// Wait blocks until the guest's phase is until or later, calling progress
// (which may be nil) with the state now and at each change. It returns the
// last state also with an error.
func (c *Client) Wait(ctx context.Context, until Phase, progress func(State)) (State, error) {
	return State{}, errors.New("not yet")
}

// Stop ends the guest in order and returns when its supervisor is gone: its
// programs get SIGTERM, then SIGKILL after grace (0 = the default). No error
// when it is gone already.
func (c *Client) Stop(ctx context.Context, grace time.Duration) (State, error) {
	return State{}, errors.New("not yet")
}

// Kill is Stop without asking the guest.
func (c *Client) Kill(ctx context.Context) (State, error) { return State{}, errors.New("not yet") }

// Reboot reboots the guest and returns when it runs again.
func (c *Client) Reboot(ctx context.Context) (State, error) { return State{}, errors.New("not yet") }

// Publish makes a port of the guest reachable on the host and returns it as
// it was opened.
func (c *Client) Publish(ctx context.Context, p Publish) (Publish, error) {
	return Publish{}, errors.New("not yet")
}

// Unpublish undoes Publish.
func (c *Client) Unpublish(ctx context.Context, p Publish) error { return errors.New("not yet") }

// Opener opens streams to the guest's agent: each one carries one guestwire
// request. Give it to guestclient.
func (c *Client) Opener() func(ctx context.Context) (net.Conn, error) { return nil }

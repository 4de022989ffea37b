package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// SessionDialer opens connections for sessions.
type SessionDialer = node.Dialer

// Times of the session.
const (
	minRedial   = time.Second
	maxRedial   = time.Minute
	goodSession = time.Minute // one that lasted this long resets the backoff
)

// sessions keeps a session with the hub for as long as ctx lasts: a lost one is
// dialed again. It returns an error only for a refusal that is final.
func (d *Daemon) sessions(ctx context.Context) error {
	wait := minRedial
	incarnation := wire.NewID()
	for ctx.Err() == nil {
		begin := time.Now()
		opened, err := d.session(ctx, incarnation)
		if ctx.Err() != nil {
			return nil
		}
		if node.RefusalOf(err).Final() {
			d.setServer(dispatch.ServerStatus{Status: dispatch.Rejected, Message: err.Error()})
			d.log.Error("the hub refuses this relay for good: no job is asked for any more", logx.Err, err)
			return errors.Join(errFinal, err)
		}
		if opened && time.Since(begin) >= goodSession {
			wait = minRedial
		}
		pause := d.pace.redial(wait)
		d.log.Warn("no session with the hub", logx.Err, err, "redial_in", pause.Round(time.Millisecond))
		wait = min(2*wait, maxRedial)
		sleep(ctx, pause)
	}
	return nil
}

// redial is how long to wait before another dial: with jitter, and in a test's
// pace.
func (p Pace) redial(wait time.Duration) time.Duration {
	wait += time.Duration(rand.Int64N(int64(wait)/4 + 1))
	return time.Duration(float64(wait) * p.HubMin.Seconds()) // the product of two durations does not fit
}

// talk is one session.
type talk struct {
	d     *Daemon
	conn  node.Conn
	every time.Duration
	facts []byte // inventory as said last
	said  map[string]dispatch.RunnerState
}

func (d *Daemon) session(ctx context.Context, incarnation string) (opened bool, err error) {
	dialing, cancel := context.WithTimeout(ctx, 3*wire.HandshakeStep)
	conn, err := d.dialer.Dial(dialing)
	cancel()
	if err != nil {
		return false, err
	}
	defer conn.CloseNow()
	t := &talk{d: d, conn: conn, said: map[string]dispatch.RunnerState{}}
	if err := t.open(ctx, incarnation); err != nil {
		return false, err
	}
	d.log.Info("session opened", "hub", d.enrollment.URL, "heartbeat", t.every)
	return true, t.keep(ctx)
}

func (t *talk) send(ctx context.Context, m dispatch.Message) error {
	b, err := dispatch.Encode(m)
	if err != nil {
		return err
	}
	return node.Write(ctx, t.conn, t.every, b)
}

func (t *talk) open(ctx context.Context, incarnation string) error {
	e := t.d.enrollment
	_, welcome, err := (&node.Opening{
		As: asRelay, ID: e.Relay, Incarnation: incarnation, VK: t.d.vk, Key: e.Key, Versions: dispatch.Versions, URL: e.URL, Hub: e.Hub,
	}).On(ctx, t.conn)
	if err != nil {
		return err
	}
	t.every = wire.Clamp(welcome.HeartbeatSecs)
	return nil
}

var errSilent = errors.New("the hub has been silent for too long")

// keep runs the session until it ends; the error says why.
func (t *talk) keep(ctx context.Context) error {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	inbox, broken := make(chan dispatch.Message), make(chan error, 1)
	go func() {
		for {
			data, err := t.conn.Read(inner)
			if err == nil {
				var m dispatch.Message
				if m, err = dispatch.Decode(dispatch.FromHub, data); err == nil {
					select {
					case inbox <- m:
						continue
					case <-inner.Done():
						return
					}
				}
			}
			broken <- err
			return
		}
	}()
	beat := time.NewTicker(t.every)
	defer beat.Stop()
	silence := time.NewTimer(wire.MissedBeats * t.every)
	defer silence.Stop()
	for {
		changed := t.d.changed.next()
		if err := t.tell(inner); err != nil {
			return t.last(inbox, broken, err)
		}
		select {
		case <-ctx.Done():
			t.conn.Close("vk-gitlab stops")
			return context.Cause(ctx)
		case err := <-broken:
			return err
		case m := <-inbox:
			silence.Reset(wire.MissedBeats * t.every)
			if err := t.handle(m); err != nil {
				return err
			}
		case <-silence.C:
			return errSilent
		case <-changed:
		case <-beat.C:
			if err := t.send(inner, t.d.heartbeat()); err != nil {
				return t.last(inbox, broken, err)
			}
		}
	}
}

// last looks for why the hub ended it when a connection cannot be written any
// more: what was being written met the close before the word was read.
func (t *talk) last(inbox <-chan dispatch.Message, broken <-chan error, err error) error {
	wait := time.After(time.Second)
	for {
		select {
		case m := <-inbox:
			if why := t.handle(m); why != nil {
				return why
			}
		case <-broken:
			return err
		case <-wait:
			return err
		}
	}
}

func (t *talk) handle(m dispatch.Message) error {
	switch m := m.(type) {
	case *dispatch.Ping:
	case *dispatch.ServerStatus:
		t.d.setServer(*m)
	case *dispatch.Closing:
		return asRelay.Refused(t.d.enrollment.URL, m.Code, m.Message)
	default:
		return fmt.Errorf("%w: a %T from the hub", wire.ErrProtocol, m)
	}
	return nil
}

// tell sends what is not said yet: the inventory first, then runners' states.
func (t *talk) tell(ctx context.Context) error {
	inv := t.d.inventory()
	b, err := json.Marshal(inv)
	if err != nil {
		return err
	}
	if !bytes.Equal(b, t.facts) {
		if err := t.send(ctx, inv); err != nil {
			return err
		}
		if t.facts == nil {
			if err := t.send(ctx, t.d.heartbeat()); err != nil {
				return err
			}
		}
		t.facts = b
	}
	for _, r := range t.d.runners {
		r.mu.Lock()
		s := dispatch.RunnerState{Runner: r.name, State: r.state, Message: r.message}
		r.mu.Unlock()
		if t.said[r.name] == s {
			continue
		}
		if err := t.send(ctx, &s); err != nil {
			return err
		}
		t.said[r.name] = s
	}
	return nil
}

func (d *Daemon) inventory() *dispatch.Inventory {
	d.mu.Lock()
	m := &dispatch.Inventory{Version: d.vk, SystemID: d.systemID, Concurrent: d.conf.Concurrent, ServerURL: d.conf.GitLab.URL, ServerKey: d.spki, ServerVersion: d.version}
	d.mu.Unlock()
	m.Hostname, _ = os.Hostname()
	for _, r := range d.runners {
		r.mu.Lock()
		m.Runners = append(m.Runners, dispatch.Runner{Name: r.name, ID: r.id, Placement: r.placement, Limit: r.conf.Limit, Verified: r.verified})
		r.mu.Unlock()
	}
	return m
}

func (d *Daemon) heartbeat() *dispatch.Heartbeat {
	m := &dispatch.Heartbeat{Runners: []dispatch.RunnerBeat{}}
	for _, r := range d.runners {
		jobs := r.store.len()
		r.mu.Lock()
		b := dispatch.RunnerBeat{Name: r.name, Requests: r.requests, Jobs: jobs, LastStatus: r.lastStatus}
		if !r.lastAt.IsZero() {
			b.LastAt = r.lastAt.Unix()
		}
		r.mu.Unlock()
		m.Runners = append(m.Runners, b)
	}
	return m
}

package relay

import (
	"context"
	"log/slog"
	"time"

	"virtkit/core/fleet/node"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/fleet/wire"
	"virtkit/core/gitlab"
)

// OnWrite has f called before and after each write of a state file of daemons
// opened with o.
func OnWrite(o *Options, f func(done bool)) { o.writing = f }

// Translate is translate, with what it refuses as a text.
var Translate = translate

var _ gitlab.Log = (*spool)(nil)

// ReadState is what a state file holds, as the daemon reads it.
func ReadState(path string) ([]Record, error) {
	f, err := readState(path)
	if err != nil {
		return nil, err
	}
	return (&store{path: path, f: f}).records(), nil
}

// Redial and After are waits of a pace.
func (p Pace) Redial(wait time.Duration) time.Duration { return p.redial(wait) }

// After is what the hub asked for.
func (p Pace) After(secs int) time.Duration { return p.after(secs) }

// Talk runs a session of a relay without runners over c until it ends.
func Talk(ctx context.Context, c node.Conn, e *Enrollment, log *slog.Logger) error {
	d := &Daemon{conf: &relayconf.Config{}, enrollment: e, log: log, pace: DefaultPace(time.Second), changed: newSignal(), dialer: oneConn{c}}
	_, err := d.session(ctx, wire.NewID())
	return err
}

type oneConn struct{ c node.Conn }

// Dial is SessionDialer's.
func (o oneConn) Dial(context.Context) (node.Conn, error) { return o.c, nil }

package supervise

import (
	"context"
	"time"

	"virtkit/core/guestwire"
	"virtkit/core/logx"
)

// clockSlack is how far a guest's clock may be from the host's before it is
// set again. Answers that took longer tell nothing of clocks.
const clockSlack = 500 * time.Millisecond

// clockRetry is when to look again after an answer that told nothing, or after
// the clock was set.
const clockRetry = time.Second

// clockWatch compares a guest's clock with the host's. Once they agreed, what
// is compared is how much time has passed in each since: a guest that was
// paused, or whose host was set, is found out so, while one whose job set the
// clock on purpose keeps what it set.
type clockWatch struct {
	known  bool          // they agreed
	host   time.Time     // when they did
	uptime time.Duration // of the guest, then
	unsure bool          // the last answer told nothing
}

// look takes an answer to a ping sent at sent and received at got. It returns
// how far the guest is ahead of the host, and whether that is known.
func (c *clockWatch) look(sent, got time.Time, p guestwire.Pong) (ahead time.Duration, sure bool) {
	// The wall clock alone: a host that slept, or was set, is to be followed.
	took := got.Sub(sent)
	host := sent.Add(took / 2).Round(0)
	if took > clockSlack {
		return 0, false
	}
	uptime := time.Duration(p.UptimeMS) * time.Millisecond
	if c.known {
		return (uptime - c.uptime) - host.Sub(c.host), true
	}
	ahead = time.Unix(0, p.UnixNano).Sub(host)
	if ahead.Abs() <= clockSlack {
		c.known, c.host, c.uptime = true, host, uptime
	}
	return ahead, true
}

// keepClock sets the guest's clock when it has left the host's, and returns
// when to look again.
func (s *supervisor) keepClock(ctx context.Context, g *guest, c *clockWatch, sent time.Time, p guestwire.Pong) time.Duration {
	ahead, sure := c.look(sent, time.Now(), p)
	if !sure {
		again := s.d.Times.Ping
		if !c.unsure { // a guest that was just let go on answers quickly the next time
			again = min(again, clockRetry)
		}
		c.unsure = true
		return again
	}
	c.unsure = false
	if ahead.Abs() <= clockSlack {
		return s.d.Times.Ping
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := bounded(ctx, func(ctx context.Context) error { return g.ch.client().Resume(ctx, guestwire.Resume{}) })
	if err != nil {
		s.log.Warn("setting the guest's clock", "ahead", ahead, logx.Err, err)
		return s.d.Times.Ping
	}
	s.log.Info("the guest's clock was set", "ahead", ahead)
	c.known = false // compare the clocks themselves again
	return min(s.d.Times.Ping, clockRetry)
}

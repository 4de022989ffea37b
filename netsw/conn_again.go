package netsw

import (
	"encoding/binary"
	"time"
)

// How long an acknowledgement may take until a segment is sent again; doubled
// with each that is not, up to the most.
const (
	againFirst = 400 * time.Millisecond
	againMost  = 30 * time.Second
	// againSlow is as long as it gets for a guest that takes its time: one that was
	// paused for an hour is not slow.
	againSlow = 4 * time.Second
	// shakeTries is how often a guest is told that its connection stands: 400 ms
	// and six times twice as long is 50 seconds.
	shakeTries = 6
)

// recoverFrom begins to repeat what is not acknowledged.
func (c *conn) recoverFrom() {
	c.recovering, c.recover, c.repeated = true, c.nxt, stampNow()
}

// answersFirst tells an acknowledgement of what was sent first from one of what
// was repeated, by the timestamp that it echoes: then nothing was lost, and no
// more of it needs repeating (RFC 3522).
func (c *conn) answersFirst(s *segment) bool {
	return c.stamped(s) && int32(binary.BigEndian.Uint32(s.opts[8:])-c.repeated) < 0
}

// measure has the time be taken that the last byte before nxt takes to be
// acknowledged, unless another's is.
func (c *conn) measure() {
	if c.clock.IsZero() {
		c.clock, c.clocked = time.Now(), c.nxt
	}
}

// measured takes the time when what is measured is acknowledged (RFC 6298).
func (c *conn) measured() {
	if c.clock.IsZero() || int32(c.una-c.clocked) < 0 {
		return
	}
	took := time.Since(c.clock)
	c.clock = time.Time{}
	if c.smooth == 0 {
		c.smooth, c.vary = took, took/2
		return
	}
	c.vary += ((took - c.smooth).Abs() - c.vary) / 4
	c.smooth += (took - c.smooth) / 8
}

// patience is how long an acknowledgement may take.
func (c *conn) patience() time.Duration {
	d := min(max(c.smooth+4*c.vary, againFirst), againSlow)
	return min(d<<min(c.tries, 10), againMost)
}

// again sends the oldest segment that is not acknowledged once more.
func (c *conn) again() {
	c.clock = time.Time{} // an acknowledgement would not say of which of the two it is
	switch {
	case c.state == shaking:
		c.answer(flagSyn | flagAck)
	case len(c.sent) > 0:
		e := &c.sent[0]
		head := c.head()
		off := int(c.una - e.seq)
		at := off / c.mss * (head + c.mss) // the frame that has it
		in := off % c.mss
		end := min(len(e.buf.b), at+head+c.mss)
		data := e.buf.b[at+head+in : end]
		buf := getBuffer(head + len(data))
		copy(buf.b[head:], data)
		c.seal(buf.b, c.una, flagAck|flagPsh)
		c.p.queueFrames(buf, 1)
	case c.finSent && !c.finAcked:
		c.control(c.nxt-1, flagAck|flagFin)
	default: // a closed window: is it still?
		c.control(c.una-1, flagAck)
	}
}

// arm sets the timer, unless it is. It is not set anew for each segment: when
// it goes off after some progress, it is only set again.
func (c *conn) arm() {
	if c.armed {
		return
	}
	c.armed, c.timedUna = true, c.una
	d := c.patience()
	if c.timer == nil {
		c.timer = time.AfterFunc(d, c.timeout)
		return
	}
	c.timer.Reset(d)
}

func (c *conn) timeout() {
	defer c.p.kick()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = false
	idle := c.nxt == c.una && !(c.starved && c.wnd == 0)
	if c.state == ended || idle {
		return
	}
	// What lies on the link is not lost, and more of it would be no help.
	if c.una == c.timedUna && !c.p.crowded() {
		if c.tries++; c.state == shaking && c.tries > shakeTries {
			c.endLocked(true)
			return
		}
		if c.nxt != c.una {
			c.recoverFrom()
		}
		c.again()
	}
	c.arm()
}

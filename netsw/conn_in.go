package netsw

import (
	"encoding/binary"
	"errors"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"virtkit/netsw/frame"
)

// maxGather is how many segments are written to the outside in one call. The
// kernel takes 1024 (UIO_MAXIOV); this is more than a read of the link holds
// of the size that guests with an MTU of 1500 send.
const maxGather = 768

// gather collects what one connection's guest sent in a row, to be written to
// the outside at once. It is the link reader's; the pieces lie in its buffer.
type gather struct {
	link *link

	c   *conn
	n   uint32 // bytes
	vec []unix.Iovec

	due     []*conn // to whose guest an acknowledgement is due
	touched []*Port // that frames were queued for meanwhile
	thirsty []*conn // whose guest takes more now

	// The call and what it said; made once, since a closure is an allocation.
	try  func(fd uintptr) bool
	from int
	got  int
	errn syscall.Errno
}

// call is the system call, as a RawConn wants it.
func (g *gather) call(fd uintptr) bool {
	for {
		n, _, e := syscall.Syscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&g.vec[g.from])), uintptr(len(g.vec)-g.from))
		if e != syscall.EINTR {
			g.got, g.errn = int(n), e
			return true
		}
	}
}

// add appends a piece.
func (g *gather) add(b []byte) {
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	g.vec = append(g.vec, v)
	g.n += uint32(len(b))
}

// inputTCP takes a segment to the outside; false when it is not of a
// connection of this kind but the stack's to look at.
func (p *Port) inputTCP(ip *frame.IPv4, g *gather) bool {
	if ip.Fragment() { // nobody's TCP cuts segments: it sends smaller ones
		p.c.drop(DropFragment)
		return true
	}
	s, ok := parseSegment(ip)
	if !ok {
		p.c.drop(DropMalformed)
		return true
	}
	c := g.c
	if c == nil || c.id != s.id {
		g.flush()
		if c = p.conns.find(s.id); c == nil {
			if s.flags&(flagSyn|flagAck) != flagSyn || (s.id.dst == p.sw.gwIP && s.id.dport == 53) {
				return false
			}
			p.begin(&s, g.link)
			return true
		}
	}
	c.input(&s, g)
	return true
}

// input takes a segment of the connection. Data that is next in order is
// gathered; the rest is dealt with here and now.
func (c *conn) input(s *segment, g *gather) {
	if len(g.vec) == maxGather {
		g.flush()
	}
	c.mu.Lock()
	if c.state == open && !c.finRcvd && s.flags&^flagPsh == flagAck && len(s.data) > 0 && s.seq == c.rcv+g.n &&
		int32(c.edge-s.seq) >= int32(len(s.data)) {
		c.stamp(s)
		c.acked(s)
		g.drink(c)
		g.c = c
		c.mu.Unlock()
		g.add(s.data)
		return
	}
	c.mu.Unlock()
	g.flush()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inputLocked(s)
	g.drink(c)
}

// drink notes a connection that can go on, once.
func (g *gather) drink(c *conn) {
	if c.starved && c.state == open && c.roomLocked() > 0 && !slices.Contains(g.thirsty, c) {
		g.thirsty = append(g.thirsty, c)
	}
}

func (c *conn) inputLocked(s *segment) {
	switch {
	case c.state == ended || c.state == dialing:
		return // the SYN again, or nonsense
	case s.flags&flagRst != 0:
		switch {
		case s.seq == c.rcv: // RFC 5961: nothing else ends a connection
			c.endLocked(true)
		case int32(s.seq-c.rcv) > 0 && int32(c.edge-s.seq) > 0:
			c.answer(flagAck)
		}
		return
	case s.flags&flagSyn != 0:
		if c.state == shaking && s.seq == c.rcv-1 {
			c.answer(flagSyn | flagAck)
		} else {
			c.answer(flagAck) // and if it is a new life of the guest's, it resets this one
		}
		return
	case s.flags&flagAck == 0:
		return
	}
	if c.state == shaking {
		if s.ack != c.nxt {
			return
		}
		c.state = open
		c.tries = 0
		c.moved.Signal()
	}
	c.stamp(s)
	c.acked(s)
	if c.state == ended {
		return
	}
	if len(s.data) == 0 && s.flags&flagFin == 0 {
		if int32(c.rcv-s.seq) > 0 { // a probe whether this end is alive
			c.answer(flagAck)
		}
		return
	}
	c.data(s)
}

// data takes the payload and the end of a segment that may begin early.
func (c *conn) data(s *segment) {
	early := int32(c.rcv - s.seq)
	if early < 0 || int(early) > len(s.data) || c.finRcvd {
		c.answer(flagAck) // something is missing before it, or all of it is known
		return
	}
	b := s.data[early:]
	if room := int32(c.edge - c.rcv); int(room) < len(b) {
		b = b[:max(room, 0)]
		s.flags &^= flagFin
	}
	if len(b) > 0 {
		var g gather
		g.add(b)
		c.takeLocked(&g)
	}
	if c.state == ended {
		return
	}
	if s.flags&flagFin != 0 {
		c.finRcvd = true
		c.rcv++
		c.edge++
		if e := c.ear; e != nil && len(e.b) == 0 {
			c.deafLocked()
		} else if e != nil {
			c.decide(unreadable)
			if c.state == ended {
				return
			}
		}
		if !c.flushing {
			c.passEnd()
		}
	}
	c.answer(flagAck)
}

// flush gives what was gathered to the outside; respond acknowledges it.
func (g *gather) flush() {
	c := g.c
	if c == nil {
		return
	}
	c.mu.Lock()
	if c.state == open {
		c.takeLocked(g)
		if c.state == open && !c.due {
			c.due = true
			g.due = append(g.due, c)
		}
	}
	c.mu.Unlock()
	clear(g.vec)
	g.c, g.n, g.vec = nil, 0, g.vec[:0]
}

// takeLocked takes the next bytes of the guest's stream.
func (c *conn) takeLocked(g *gather) {
	c.rcv += g.n
	if c.ear == nil {
		c.writeLocked(g)
		return
	}
	for i, v := range g.vec {
		c.heardLocked(unsafe.Slice(v.Base, int(v.Len)))
		if c.ear == nil { // decided; the rest goes the usual way
			if rest := g.vec[i+1:]; c.state == open && len(rest) > 0 {
				g.vec = append(g.vec[:0], rest...)
				c.writeLocked(g)
			}
			return
		}
	}
}

// writeLocked writes what the outside's socket takes at once and keeps the rest.
func (c *conn) writeLocked(g *gather) {
	g.from = 0
	if !c.flushing {
		if g.try == nil {
			g.try = g.call
		}
		for g.from < len(g.vec) {
			if err := c.sock.raw.Write(g.try); err != nil {
				c.failLocked()
				return
			}
			if g.errn == syscall.EAGAIN {
				break
			}
			if g.errn != 0 {
				c.failLocked()
				return
			}
			c.p.c.sent.Add(uint64(g.got))
			g.from = advance(g.vec, g.from, g.got)
		}
	}
	for _, v := range g.vec[g.from:] {
		c.keep(unsafe.Slice(v.Base, int(v.Len)))
	}
	if c.held > 0 && !c.flushing {
		c.flushing = true
		c.p.sw.wg.Go(c.outward) // run has not returned: the group is not waited out
	}
}

// keep copies what the socket did not take.
func (c *conn) keep(b []byte) {
	c.held += uint32(len(b))
	if n := len(c.pending); n > 0 {
		last := c.pending[n-1]
		if k := min(cap(last)-len(last), len(b)); k > 0 {
			c.pending[n-1] = append(last, b[:k]...)
			b = b[k:]
		}
	}
	if len(b) > 0 {
		c.pending = append(c.pending, append(make([]byte, 0, max(len(b), 4<<10)), b...))
	}
}

// outward writes what is pending, and ends when nothing is.
func (c *conn) outward() {
	defer c.p.kick()
	for {
		c.mu.Lock()
		if c.state == ended || len(c.pending) == 0 {
			c.flushing = false
			if c.state != ended && c.finRcvd {
				c.passEnd()
			}
			c.mu.Unlock()
			return
		}
		b := c.pending[0]
		c.pending[0] = b[:len(b):len(b)] // what comes goes behind it
		c.mu.Unlock()

		c.p.kick()
		n, err := c.sock.f.Write(b)
		c.p.c.sent.Add(uint64(n))

		c.mu.Lock()
		switch {
		case c.state == ended:
		case err != nil:
			c.failLocked()
		default:
			c.pending[0] = nil
			if c.pending = c.pending[1:]; len(c.pending) == 0 {
				c.pending = nil
			}
			c.held -= uint32(len(b))
			// Told when there is room for some more, or the guest would wait for ever.
			if free := c.limit - c.held; free-(c.edge-c.rcv) >= min(2*tcpRoom, c.limit/2) {
				c.answer(flagAck)
			}
		}
		c.mu.Unlock()
	}
}

// passEnd passes on the end that the guest said.
func (c *conn) passEnd() {
	c.finDone = true
	if c.finAcked { // the socket is closed now, which says it
		c.finish()
		return
	}
	if err := c.sock.endWrite(); err != nil && !errors.Is(err, syscall.ENOTCONN) {
		c.failLocked()
		return
	}
	c.finish()
}

// finish ends the connection when both directions have.
func (c *conn) finish() {
	if c.finDone && c.finAcked {
		c.endLocked(false)
	}
}

// stamp remembers the guest's timestamp (RFC 7323), for the usual form alone:
// two paddings before it.
func (c *conn) stamp(s *segment) {
	if c.stamped(s) && int32(s.seq-c.rcv) <= 0 {
		c.recent = binary.BigEndian.Uint32(s.opts[4:])
	}
}

// stamped says whether a segment has timestamps: its own in opts[4:], and the one
// it echoes in opts[8:].
func (c *conn) stamped(s *segment) bool {
	return c.stamps && len(s.opts) >= stampSize && s.opts[0] == 1 && s.opts[1] == 1 && s.opts[2] == 8
}

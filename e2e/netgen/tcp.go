package netgen

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/netsw/frame"
)

// TCP flags.
const (
	fin = 1
	syn = 2
	rst = 4
	psh = 8
	ack = 16
)

const (
	tcpSize = 20
	optSize = 12 // of the timestamps in every segment but the first
	headers = frame.LenSize + frame.EthSize + frame.IPv4Size + tcpSize
)

// window is what this end can always take, in bytes; it is announced with a
// scale of windowScale. A Linux guest grows its own to twice what comes in a
// round trip: less than this at the rates and times of a local link.
const (
	window      = 1 << 20
	windowScale = 7
)

// tcb is a connection.
type tcb struct {
	local, remote uint16
	nxt           uint32 // next to send
	rcv           uint32 // next expected
	mss           int    // of payload to send, without options
	scale         uint8  // of the peer's window
	wnd           uint32 // the peer's
	ts            bool   // timestamps are in use
	recent        uint32 // the peer's last
	start         time.Time
}

// segment is one that was received.
type segment struct {
	remote, local uint16
	seq, ack      uint32
	flags         uint8
	wnd           uint32 // not scaled
	opts, data    []byte
}

// parseTCP reads a frame that is a TCP segment for this guest.
func (l *Link) parseTCP(f []byte) (s segment, ok bool) {
	if len(f) < frame.EthSize || f[12] != 8 || f[13] != 0 {
		return s, false
	}
	ip, ok := frame.ParseIPv4(f[frame.EthSize:])
	if !ok || ip.Proto != frame.ProtoTCP || ip.Dst != l.src || len(ip.Payload) < tcpSize {
		return s, false
	}
	b := ip.Payload
	off := int(b[12]>>4) * 4
	if off < tcpSize || off > len(b) {
		return s, false
	}
	s.remote, s.local = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	s.seq, s.ack = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	s.flags, s.wnd = b[13], uint32(binary.BigEndian.Uint16(b[14:]))
	s.opts, s.data = b[tcpSize:off], b[off:]
	return s, true
}

// sound verifies the checksums of a frame.
func sound(f []byte) error {
	ip, ok := frame.ParseIPv4(f[frame.EthSize:])
	if !ok {
		return errors.New("not an IPv4 packet")
	}
	if frame.Checksum(ip.Header, 0) != 0 {
		return errors.New("a wrong IPv4 checksum")
	}
	if frame.Checksum(ip.Payload, frame.Pseudo(ip.Src, ip.Dst, frame.ProtoTCP, len(ip.Payload))) != 0 {
		return errors.New("a wrong TCP checksum")
	}
	return nil
}

// now is the clock of timestamps, in milliseconds.
func (c *tcb) now() uint32 { return uint32(time.Since(c.start).Milliseconds()) + 1 }

// segment appends one to out; data are its payload.
func (l *Link) segment(c *tcb, flags uint8, data []byte) {
	at := len(l.out)
	l.begin(l.gwMAC, frame.TypeIPv4)
	opts := 0
	switch {
	case flags&syn != 0:
		opts = 20
	case c.ts:
		opts = optSize
	}
	l.out = frame.AppendIPv4(l.out, l.src, l.dst, frame.ProtoTCP, tcpSize+opts+len(data))
	l.out = append(l.out, make([]byte, tcpSize+opts)...)
	b := l.out[at+frame.LenSize+frame.EthSize+frame.IPv4Size:]
	if flags&syn != 0 {
		copy(b[tcpSize:], []byte{2, 4, 0, 0, 4, 2, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 3, windowScale})
		b[tcpSize+4], b[tcpSize+5] = 1, 1 // in the place of "SACK permitted"
		binary.BigEndian.PutUint16(b[tcpSize+2:], uint16(l.cfg.MTU-frame.IPv4Size-tcpSize))
		binary.BigEndian.PutUint32(b[tcpSize+8:], c.now())
	}
	l.out = append(l.out, data...)
	c.fill(l.out[at+headers-tcpSize:], flags, opts)
	b = l.out[at+headers-tcpSize:]
	binary.BigEndian.PutUint16(b[16:], frame.Checksum(b, frame.Pseudo(l.src, l.dst, frame.ProtoTCP, len(b))))
	l.finish(at)
}

// fill writes the header of a segment but for its checksum.
func (c *tcb) fill(b []byte, flags uint8, opts int) {
	binary.BigEndian.PutUint16(b, c.local)
	binary.BigEndian.PutUint16(b[2:], c.remote)
	binary.BigEndian.PutUint32(b[4:], c.nxt)
	binary.BigEndian.PutUint32(b[8:], c.rcv)
	b[12], b[13] = byte((tcpSize+opts)/4)<<4, flags
	w := window >> windowScale
	if flags&syn != 0 {
		w = 65535
	} else if opts > 0 {
		b[tcpSize], b[tcpSize+1], b[tcpSize+2], b[tcpSize+3] = 1, 1, 8, 10
		binary.BigEndian.PutUint32(b[tcpSize+4:], c.now())
		binary.BigEndian.PutUint32(b[tcpSize+8:], c.recent)
	}
	binary.BigEndian.PutUint16(b[14:], uint16(w))
}

// greet takes the peer's SYN-ACK.
func (c *tcb) greet(s segment, mtu int) {
	c.rcv, c.wnd, c.nxt = s.seq+1, s.wnd, s.ack
	c.mss = 536
	for o := s.opts; len(o) > 0; {
		if o[0] == 0 {
			break
		}
		if o[0] == 1 {
			o = o[1:]
			continue
		}
		if len(o) < 2 || o[1] < 2 || int(o[1]) > len(o) {
			break
		}
		switch v := o[2:o[1]]; {
		case o[0] == 2 && len(v) == 2:
			c.mss = int(binary.BigEndian.Uint16(v))
		case o[0] == 3 && len(v) == 1:
			c.scale = v[0]
		case o[0] == 8 && len(v) == 8:
			c.ts, c.recent = true, binary.BigEndian.Uint32(v)
		}
		o = o[o[1]:]
	}
	c.mss = min(c.mss, mtu-frame.IPv4Size-tcpSize)
	if c.ts {
		c.mss -= optSize
	}
}

// stamp remembers the timestamp of a segment.
func (c *tcb) stamp(s segment) {
	if c.ts && len(s.opts) >= optSize && s.opts[2] == 8 {
		c.recent = binary.BigEndian.Uint32(s.opts[4:])
	}
}

// connect opens a connection to a port of the host's loopback.
func (l *Link) connect(port int) (*tcb, error) {
	c := &tcb{local: l.nextPort(), remote: uint16(port), start: time.Now(), nxt: 1000}
	l.segment(c, syn, nil)
	if err := l.flush(); err != nil {
		return nil, err
	}
	for {
		f, err := l.next()
		if errors.Is(err, errTick) {
			l.segment(c, syn, nil)
			err = l.flush()
			f = nil
		}
		if err != nil {
			return nil, fmt.Errorf("connecting to port %d of the host: %w", port, err)
		}
		s, ok := l.parseTCP(f)
		if !ok || s.local != c.local {
			continue
		}
		if s.flags&rst != 0 {
			return nil, fmt.Errorf("connecting to port %d of the host: reset", port)
		}
		if s.flags&(syn|ack) == syn|ack {
			c.greet(s, l.cfg.MTU)
			l.segment(c, ack, nil)
			return c, l.flush()
		}
	}
}

// drop ends a connection with a reset.
func (l *Link) drop(c *tcb) error {
	l.segment(c, rst|ack, nil)
	return l.flush()
}

// Result is what a measurement moved.
type Result struct {
	Count int64         // bytes, connections or answers
	Took  time.Duration // from the first of them to the last
	Again int64         // segments or questions that had to be sent again, either way
}

// Rate is how many a second.
func (r Result) Rate() float64 { return float64(r.Count) / r.Took.Seconds() }

// ackEvery is how many bytes may be unacknowledged while more are there to be
// read: what a Linux guest merges into one before it acknowledges.
const ackEvery = 128 << 10

// checked is how many segments of a transfer have their checksums verified.
const checked = 64

// Receive reads n bytes from a port of the host that sends as much as it can.
func (l *Link) Receive(port int, n int64) (Result, error) {
	c, err := l.connect(port)
	if err != nil {
		return Result{}, err
	}
	var r Result
	var first time.Time
	owed, look := 0, checked
	for r.Count < n {
		if owed > 0 && (owed >= ackEvery || !l.more()) {
			l.segment(c, ack, nil)
			if err := l.flush(); err != nil {
				return r, err
			}
			owed = 0
		}
		f, err := l.next()
		if errors.Is(err, errTick) {
			l.segment(c, ack, nil)
			err = l.flush()
			f = nil
		}
		if err != nil {
			return r, fmt.Errorf("receiving: %w", err)
		}
		s, ok := l.parseTCP(f)
		if !ok || s.local != c.local {
			continue
		}
		if s.flags&rst != 0 {
			return r, errors.New("receiving: reset")
		}
		if len(s.data) == 0 {
			if s.flags&fin != 0 {
				return r, fmt.Errorf("receiving: the stream ended after %d bytes", r.Count)
			}
			continue
		}
		if look > 0 {
			look--
			if err := sound(f); err != nil {
				return r, fmt.Errorf("receiving: a segment with %w", err)
			}
		}
		if r.Count == 0 {
			first = time.Now()
		}
		// Only what begins before or at what is expected, and reaches beyond.
		lead := int32(c.rcv - s.seq)
		if lead < 0 || int(lead) >= len(s.data) {
			if lead < 0 {
				r.Again++ // something before it is missing
			}
			l.segment(c, ack, nil)
			if err := l.flush(); err != nil {
				return r, err
			}
			continue
		}
		c.stamp(s)
		fresh := len(s.data) - int(lead)
		c.rcv += uint32(fresh)
		r.Count += int64(fresh)
		owed += fresh
	}
	r.Took = time.Since(first)
	return r, l.drop(c)
}

// sendBatch is how many bytes of frames one call writes at most.
const sendBatch = 64 << 10

// Send writes n bytes to a port of the host that takes all it gets. got tells
// how many have arrived there: the measurement ends when all have.
func (l *Link) Send(port int, n int64, got func() int64) (Result, error) {
	c, err := l.connect(port)
	if err != nil {
		return Result{}, err
	}
	opts := 0
	if c.ts {
		opts = optSize
	}
	size := headers + opts + c.mss
	frames := max(1, sendBatch/size)
	// The frames lie ready; only their TCP headers change.
	lay := &Link{cfg: l.cfg, src: l.src, dst: l.dst, gwMAC: l.gwMAC}
	for range frames {
		lay.segment(c, ack, make([]byte, c.mss))
	}
	fixed := frame.Pseudo(l.src, l.dst, frame.ProtoTCP, tcpSize+opts+c.mss)

	var r Result
	una, end := c.nxt, c.nxt+uint32(n) // n is below 4 GiB
	wnd := c.wnd << c.scale
	base := got()
	first := time.Now()
	dups, moved := 0, time.Now()
	for {
		// As many as the window and the acknowledgements leave.
		k := 0
		for k < frames && int32(end-c.nxt) >= int32(c.mss) && c.nxt-una+uint32(c.mss) <= wnd {
			b := lay.out[k*size+headers-tcpSize:][:tcpSize+opts]
			c.fill(b, ack, opts)
			b[16], b[17] = 0, 0
			binary.BigEndian.PutUint16(b[16:], frame.Checksum(b, fixed))
			c.nxt += uint32(c.mss)
			k++
		}
		if k > 0 {
			if err := l.write(lay.out[:k*size]); err != nil {
				return r, err
			}
		}
		if int32(end-una) < int32(c.mss) {
			break // what is left is less than a segment
		}
		// Take all acknowledgements that are there; wait only when nothing can be sent.
		for wait := k == 0; wait || l.more() || l.readable(); wait = false {
			f, err := l.next()
			if errors.Is(err, errTick) {
				c.nxt = una
				r.Again++
				if time.Since(moved) > patience {
					return r, fmt.Errorf("sending: nothing was acknowledged for %s", patience)
				}
				break
			}
			if err != nil {
				return r, fmt.Errorf("sending: %w", err)
			}
			s, ok := l.parseTCP(f)
			if !ok || s.local != c.local {
				continue
			}
			if s.flags&rst != 0 {
				return r, fmt.Errorf("sending: reset after %d bytes", una)
			}
			c.stamp(s)
			was := wnd
			wnd = s.wnd << c.scale
			switch d := int32(s.ack - una); {
			case d > 0:
				una, dups, moved = s.ack, 0, time.Now()
				if int32(una-c.nxt) > 0 { // of what was sent before a loss
					c.nxt = una
				}
			case d == 0 && wnd == was && c.nxt != una:
				if dups++; dups == 3 {
					c.nxt = una
					r.Again++
				}
			}
		}
	}
	r.Count = int64(una - (end - uint32(n)))
	for got()-base < r.Count { // acknowledged is not there yet
		if time.Since(moved) > patience {
			return r, fmt.Errorf("sending: %d bytes of %d arrived", got()-base, r.Count)
		}
		time.Sleep(100 * time.Microsecond)
	}
	r.Took = time.Since(first)
	return r, l.drop(c)
}

// readable says whether something can be read without waiting.
func (l *Link) readable() bool {
	p := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(p, 0)
	return n > 0
}

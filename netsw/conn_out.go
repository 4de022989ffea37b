package netsw

import (
	"encoding/binary"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"virtkit/netsw/frame"
)

// started is the zero of our timestamps.
var started = time.Now()

func stampNow() uint32 { return uint32(time.Since(started).Milliseconds()) + 1 }

// prepareHeader writes what is the same in every segment.
func (c *conn) prepareHeader() {
	h := c.headerReady[:]
	frame.PutEth(h[frame.LenSize:], c.p.mac, c.p.sw.gwMAC, frame.TypeIPv4)
	ip := h[frame.LenSize+frame.EthSize:]
	copy(ip, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, frame.ProtoTCP})
	copy(ip[12:], c.id.dst[:])
	copy(ip[16:], c.p.ip[:])
	t := h[tcpAt:]
	binary.BigEndian.PutUint16(t, c.id.dport)
	binary.BigEndian.PutUint16(t[2:], c.id.sport)
	copy(t[tcpSize:], []byte{1, 1, 8, 10})
}

// head is the size of what goes before a payload.
func (c *conn) head() int {
	if c.stamps {
		return natHead + stampSize
	}
	return natHead
}

// seal writes the headers of a frame whose payload is in place.
func (c *conn) seal(b []byte, seq uint32, flags uint8) {
	n := c.head()
	copy(b[:n], c.headerReady[:n])
	binary.BigEndian.PutUint32(b, uint32(len(b)-frame.LenSize))
	ip := b[frame.LenSize+frame.EthSize:]
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	binary.BigEndian.PutUint16(ip[10:], frame.Checksum(ip[:frame.IPv4Size], 0))
	t := b[tcpAt:]
	if c.stamps {
		binary.BigEndian.PutUint32(t[tcpSize+4:], stampNow())
		binary.BigEndian.PutUint32(t[tcpSize+8:], c.recent)
	}
	c.put(t, seq, flags, n-tcpAt)
}

// put writes the varying part of a TCP header and the checksum.
func (c *conn) put(t []byte, seq uint32, flags uint8, head int) {
	binary.BigEndian.PutUint32(t[4:], seq)
	binary.BigEndian.PutUint32(t[8:], c.rcv)
	t[12], t[13] = byte(head/4)<<4, flags
	binary.BigEndian.PutUint16(t[14:], c.window(flags&flagSyn != 0))
	t[16], t[17] = 0, 0
	binary.BigEndian.PutUint16(t[16:], frame.Checksum(t, frame.Pseudo(c.id.dst, c.p.ip, frame.ProtoTCP, len(t))))
}

// window is what this end takes, as it is written. It never shrinks.
func (c *conn) window(first bool) uint16 {
	shift := uint(0)
	if c.scaled && !first {
		shift = ourScale
	}
	w := c.limit - min(c.held, c.limit)
	w = min(w, 65535<<shift)
	w &^= 1<<shift - 1
	if int32(c.rcv+w-c.edge) > 0 {
		c.edge = c.rcv + w
	}
	return uint16((c.edge - c.rcv) >> shift)
}

// answer sends a segment without payload. Without room for it on the link it is
// owed, since nothing repeats an acknowledgement or a reset: one says then what
// many would have. An end (flagFin) has been counted in nxt before.
func (c *conn) answer(flags uint8) {
	if c.headerReady[frame.LenSize+frame.EthSize] == 0 {
		c.prepareHeader()
	}
	if flags&flagSyn != 0 {
		c.first(flags)
		return
	}
	if c.owed != 0 {
		c.owed |= flags
		return
	}
	l := c.p.link.Load()
	if l == nil {
		c.p.c.drop(DropNoLink)
		return
	}
	buf := getBuffer(c.head())
	seq := c.nxt
	if flags&flagRst != 0 {
		flags &^= flagFin
	}
	if flags&flagFin != 0 {
		seq--
	}
	c.seal(buf.b, seq, flags)
	if it := c.p.framesItem(buf, 1); !l.offer(it) {
		it.release()
		c.owed = flags
		l.owe(c)
	}
}

// pay says what is owed. It may be said of a connection that has ended.
func (c *conn) pay() {
	c.mu.Lock()
	defer c.mu.Unlock()
	flags := c.owed
	c.owed = 0
	c.answer(flags)
}

// control sends a segment without payload that the timer repeats if need be.
func (c *conn) control(seq uint32, flags uint8) {
	buf := getBuffer(c.head())
	c.seal(buf.b, seq, flags)
	c.p.queueFrames(buf, 1)
}

// first answers a SYN.
func (c *conn) first(flags uint8) {
	o := append(make([]byte, 0, 20), 2, 4, tcpRoom>>8, tcpRoom&0xff)
	if c.stamps {
		o = append(o, 1, 1, 8, 10)
		o = binary.BigEndian.AppendUint32(o, stampNow())
		o = binary.BigEndian.AppendUint32(o, c.recent)
	}
	if c.scaled {
		o = append(o, 1, 3, 3, ourScale)
	}
	buf := getBuffer(natHead + len(o))
	b := buf.b
	copy(b, c.headerReady[:natHead])
	binary.BigEndian.PutUint32(b, uint32(len(b)-frame.LenSize))
	ip := b[frame.LenSize+frame.EthSize:]
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	binary.BigEndian.PutUint16(ip[10:], frame.Checksum(ip[:frame.IPv4Size], 0))
	copy(b[natHead:], o)
	c.put(b[tcpAt:], c.una, flags, tcpSize+len(o))
	c.p.queueFrames(buf, 1)
}

// acked takes what a segment says of this end's bytes.
func (c *conn) acked(s *segment) {
	wnd := s.wnd << c.scale
	n := s.ack - c.una
	switch {
	case int32(n) > 0 && int32(c.nxt-s.ack) >= 0:
		c.una = s.ack
		c.measured()
		if c.armed && c.tries > 0 { // it was set for one who did not answer
			c.timer.Reset(c.patience())
			c.timedUna = c.una
		}
		c.dups, c.tries = 0, 0
		c.forget()
		if c.finSent && c.una == c.nxt {
			c.finAcked = true
			c.finish()
		}
		if c.recovering {
			if int32(c.una-c.recover) >= 0 || c.answersFirst(s) {
				c.recovering = false
			} else {
				c.again() // the next hole
			}
		}
	case int32(n) > 0: // of what was never sent
		c.answer(flagAck)
		return
	case n == 0 && len(s.data) == 0 && wnd == c.wnd && c.nxt != c.una && s.flags&flagFin == 0:
		if c.dups++; c.dups == 3 && !c.recovering {
			c.recoverFrom()
			c.again()
		}
	case int32(n) < 0:
		return // old, and so is its window
	}
	c.wnd = wnd
}

// forget lets go of what is acknowledged.
func (c *conn) forget() {
	k := 0
	for k < len(c.sent) && int32(c.una-c.sent[k].end) >= 0 {
		c.sent[k].buf.free()
		k++
	}
	if k > 0 {
		n := copy(c.sent, c.sent[k:])
		clear(c.sent[n:])
		c.sent = c.sent[:n]
	}
}

// mostSent is how many buffers a guest may leave unacknowledged. In all they are
// no larger than five times what is in them, of tiny segments with their headers,
// and 256 bytes at least.
const mostSent = 64

// How much of the outside's stream is read at once: four full frames at our MTU,
// and four times that after a read that filled as much. Each read and each write
// wakes somebody, whatever it moves: a stream that is fast enough costs two thirds
// so.
const (
	natBuffer = 4 * (natHead + stampSize + tcpRoom)
	natBurst  = 4 * natBuffer
)

// scatter reads a stream into the payloads of frames that lie in a row.
type scatter struct {
	buf  *frameBuf
	head int
	mss  int
	room int                   // bytes of payload to be read at most
	full bool                  // what was read last filled natBuffer
	try  func(fd uintptr) bool // read, and wait until there is something
	once func(fd uintptr) bool // read what there is
	n    int
	errn syscall.Errno
}

// mostPieces is how many frames are filled by one read at most; the kernel takes
// 1024 pieces (UIO_MAXIOV).
const mostPieces = 512

// pieces are lent for the time of a read: thousands of connections may wait.
var pieces = sync.Pool{New: func() any { return new([mostPieces]unix.Iovec) }}

func newScatter(head, mss int) *scatter {
	r := &scatter{head: head, mss: mss}
	r.try = func(fd uintptr) bool {
		vec := pieces.Get().(*[mostPieces]unix.Iovec)
		k := r.lay(vec)
		defer func() {
			clear(vec[:k])
			pieces.Put(vec)
		}()
		for {
			n, _, e := syscall.Syscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(vec)), uintptr(k))
			if e == syscall.EINTR {
				continue
			}
			if e != 0 || n == 0 {
				r.drop()
			}
			r.n, r.errn = int(n), e
			return e != syscall.EAGAIN
		}
	}
	r.once = func(fd uintptr) bool {
		r.try(fd)
		return true
	}
	return r
}

// drop gives the buffer back.
func (r *scatter) drop() {
	if r.buf != nil {
		r.buf.free()
		r.buf = nil
	}
}

// lay takes a buffer and points vec at the payloads in it; it says how many.
func (r *scatter) lay(vec *[mostPieces]unix.Iovec) (k int) {
	size := natBuffer
	if r.full && r.room > natBuffer {
		size = natBurst
	}
	r.buf = getBuffer(size)
	room := r.room
	for at := r.head; k < mostPieces && room > 0 && at < size; at += r.head + r.mss {
		n := min(r.mss, room, size-at)
		vec[k].Base = &r.buf.b[at]
		vec[k].SetLen(n)
		room -= n
		k++
	}
	return k
}

// inward moves what the outside sends to the guest, until either ends. It
// waits for the outside; while it is the guest that is waited for, it sleeps,
// and the link's reader goes on in its place as soon as the guest says that it
// takes more (resume). That saves waking a thread for each acknowledgement.
func (c *conn) inward() {
	c.pull = newScatter(c.head(), c.mss)
	r := c.pull
	for {
		if l := c.p.link.Load(); l != nil {
			l.q.waitRoom()
		}
		fresh := false // what is in r was read by resume
		c.mu.Lock()
		for r.room = c.roomLocked(); r.room == 0 && c.state != ended && !fresh && c.stuck.buf == nil; {
			c.starved = true
			c.arm()
			for c.starved && c.state != ended {
				c.moved.Wait()
			}
			r.room = c.roomLocked()
			fresh = r.n <= 0 && r.errn != syscall.EAGAIN
		}
		over := c.state == ended
		stuck := c.stuck
		c.stuck = item{}
		c.mu.Unlock()
		if over {
			stuck.release()
			return
		}
		if stuck.buf != nil {
			c.deliver(stuck)
			continue
		}
		if !fresh {
			if err := c.sock.raw.Read(r.try); err != nil {
				r.errn = syscall.EBADF
			}
		}
		switch {
		case r.errn != 0:
			r.drop()
			c.mu.Lock()
			c.failLocked()
			c.mu.Unlock()
			c.p.kick()
			return
		case r.n == 0:
			c.sayEnd()
			return
		}
		c.send(r, true)
	}
}

// resumeMost is how much resume moves before the link's reader goes back to
// its link.
const resumeMost = 1 << 20

// resume does what inward does, in the link's reader, for as long as neither
// end has to be waited for.
func (c *conn) resume() {
	r := c.pull
	for moved := 0; ; moved += r.n {
		c.mu.Lock()
		if !c.starved || c.state == ended {
			c.mu.Unlock()
			return
		}
		if r.room = c.roomLocked(); r.room == 0 {
			c.arm()
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		r.n, r.errn = 0, syscall.EAGAIN
		if l := c.p.link.Load(); l != nil && l.q.low() && moved < resumeMost {
			if err := c.sock.raw.Read(r.once); err != nil {
				r.errn = syscall.EBADF
			}
		}
		if r.errn != 0 || r.n == 0 || !c.send(r, false) {
			c.mu.Lock()
			c.starved = false
			c.moved.Signal()
			c.mu.Unlock()
			return
		}
	}
}

// roomLocked is how much may be sent to the guest now.
func (c *conn) roomLocked() int {
	flight := c.nxt - c.una
	free := min(c.wnd, c.limit)
	if free <= flight {
		return 0
	}
	free -= flight
	// Not little while more is under way: it would only get less, and each time
	// costs a wake-up at both ends. Nor many small pieces, each in a buffer.
	if flight == 0 || (free >= min(c.wnd, c.limit)/4 && len(c.sent) < mostSent) {
		return int(min(free, natBurst))
	}
	return 0
}

// send gives what was read to the guest. It waits for room on the link where it
// may; else it says false when there was none, and inward is to deliver it (stuck).
func (c *conn) send(r *scatter, wait bool) bool {
	buf, n := r.buf, r.n
	r.buf = nil
	frames := (n + r.mss - 1) / r.mss
	size := frames*r.head + n
	r.full = size+r.head > natBuffer // what is left has no room for another frame

	if n < cap(buf.b)/4 { // it may have to be kept: not in so large a buffer
		small := getBuffer(size)
		copy(small.b, buf.b[:size])
		buf.free()
		buf = small
	} else {
		buf.b = buf.b[:size]
	}
	c.mu.Lock()
	if c.state == ended {
		c.mu.Unlock()
		buf.free()
		return true
	}
	for i, at := 0, 0; i < frames; i++ {
		end := min(at+r.head+r.mss, size)
		flags := uint8(flagAck)
		if end == size {
			flags |= flagPsh
		}
		c.seal(buf.b[at:end], c.nxt+uint32(i*r.mss), flags)
		at = end
	}
	buf.hold()
	c.sent = append(c.sent, sentFrames{c.nxt, c.nxt + uint32(n), buf})
	c.nxt += uint32(n)
	c.measure()
	c.arm()
	c.mu.Unlock()
	c.p.c.received.Add(uint64(n))
	it := c.p.framesItem(buf, frames)
	if wait {
		c.deliver(it)
	} else if l := c.p.link.Load(); l == nil || !l.offer(it) {
		c.mu.Lock()
		c.stuck = it
		c.mu.Unlock()
		r.n, r.errn = 0, syscall.EAGAIN
		return false
	}
	c.p.kick()
	return true
}

// deliver queues it as soon as there is room.
func (c *conn) deliver(it item) {
	for {
		l := c.p.link.Load()
		c.mu.Lock()
		over := c.state == ended
		c.mu.Unlock()
		if l == nil || over {
			it.release()
			return
		}
		if l.offer(it) {
			return
		}
		l.q.waitRoom()
	}
}

// sayEnd tells the guest that the outside has ended its stream, and waits
// until both sides have ended.
func (c *conn) sayEnd() {
	c.mu.Lock()
	if c.state == ended {
		c.mu.Unlock()
		return
	}
	c.finSent = true
	c.nxt++
	c.answer(flagAck | flagFin)
	c.p.kick()
	c.arm()
	c.mu.Unlock()
	failed := c.sock.failed()
	c.mu.Lock()
	defer c.mu.Unlock()
	if failed {
		c.failLocked()
		c.p.kick()
	}
	for c.state != ended { // the guest has yet to acknowledge
		c.moved.Wait()
	}
}

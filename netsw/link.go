package netsw

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"virtkit/core/logx"
	"virtkit/netsw/frame"
)

// link is a socket pair's near end.
//
// It is read by one goroutine. It is written by whoever has something to send
// (kick), one at a time and without waiting: handing each frame to another
// goroutine would cost more than sending it. Only when the guest does not take
// what is there does the link's own writer wait for it.
//
// Its socket is a blocking one and not the runtime's to poll: a guest that
// sends wakes its reader then and nothing else, where the poller would wake
// one thread to find out and another to see whether there is more to do. It
// costs a thread a link.
type link struct {
	p    *Port
	fd   int
	q    *queue
	done chan struct{} // closed once, by end
	once sync.Once
	left atomic.Int32 // goroutines that use fd

	busy   atomic.Bool   // someone writes, and alone may use out
	handed atomic.Bool   // and it is the link's writer now
	wake   chan struct{} // a token for the link's writer
	out    outgoing

	owes  atomic.Bool // debts has some
	omu   sync.Mutex
	debts []*conn // that could not say something, and say it when there is room
}

// batch is how many items go out in one system call at most, and batchBytes
// after how many bytes none is added.
const (
	batch      = 32
	batchBytes = 256 << 10
)

// outgoing is what is being written.
type outgoing struct {
	items [batch]item
	n     int // of items
	heads [batch][frame.LenSize + frame.EthSize]byte
	vec   []unix.Iovec
	from  int // in vec

	msg unix.Msghdr
}

func newLink(p *Port, fd int) *link {
	l := &link{p: p, fd: fd, q: newQueue(), done: make(chan struct{}), wake: make(chan struct{}, 1)}
	l.left.Store(2)
	return l
}

// end ends the link. The descriptor stays until its goroutines have seen it.
func (l *link) end() {
	l.once.Do(func() {
		close(l.done)
		_ = unix.Shutdown(l.fd, unix.SHUT_RDWR)
		l.q.close()
		l.p.link.CompareAndSwap(l, nil)
	})
}

// leave is said by each of the two goroutines when it has ended.
func (l *link) leave() {
	l.end()
	if l.left.Add(-1) == 0 {
		unix.Close(l.fd)
	}
}

// readSize is how much is read from a link at once, at least a largest frame:
// the more, the fewer calls, wake-ups and acknowledgements a byte.
const readSize = 1 << 20

var readPool = sync.Pool{New: func() any { b := make([]byte, readSize); return &b }}

// idleAfter is when a silent link gives its buffer back.
const idleAfter = time.Second

// readLoop reads frames and hands each to the switch. While the guest is
// silent for long and no frame is half read, it holds no buffer.
func (l *link) readLoop() {
	defer l.leave()
	var (
		buf  *[]byte
		have int
		last int
		read int // bytes since what they led to went out
		g    = gather{link: l}
	)
	defer func() {
		if buf != nil {
			readPool.Put(buf)
		}
	}()
	limit := unix.NsecToTimeval(idleAfter.Nanoseconds())
	if err := unix.SetsockoptTimeval(l.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		l.p.sw.log.Error("reading from a guest's link", logx.VM, l.p.name, logx.Err, err)
		return
	}
	for {
		if buf == nil {
			l.poll(unix.POLLIN)
			buf = readPool.Get().(*[]byte)
		}
		flags := 0
		if read > 0 {
			flags = unix.MSG_DONTWAIT
			if last >= bulk {
				_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
		n, err := recv(l.fd, (*buf)[have:], flags)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN && read > 0:
			l.respond(&g)
			read = 0
			continue
		case err == unix.EAGAIN:
			if have == 0 {
				readPool.Put(buf)
				buf = nil
			}
			continue
		case n <= 0:
			if err != 0 && err != unix.ECONNRESET {
				l.p.sw.log.Warn("reading from a guest's link", logx.VM, l.p.name, logx.Err, err)
			}
			return
		}
		have += n
		last = n
		used, ok := l.split((*buf)[:have], &g)
		if !ok {
			return
		}
		have = copy(*buf, (*buf)[used:have])
		if read += n; read >= respondAfter {
			l.respond(&g)
			read = 0
		}
	}
}

// recv reads from a socket.
func recv(fd int, b []byte, flags int) (int, syscall.Errno) {
	n, _, err := syscall.Syscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(flags), 0, 0)
	return int(n), err
}

// bulk is a read after which there is likely more to come. A guest that shares
// a processor with its switch is let go on then, or the two would wake each
// other for every frame; with a processor of its own it costs nothing.
const bulk = 32 << 10

// respondAfter is after how many bytes what they led to goes out, even though
// there is more to be read.
const respondAfter = 1 << 20

// respond sends what reading led to: acknowledgements, one for each connection
// whatever the number of reads, more of what guests take, and frames queued for
// this guest and others.
func (l *link) respond(g *gather) {
	for i, c := range g.due {
		c.mu.Lock()
		c.due = false
		if c.state == open {
			c.answer(flagAck)
		}
		c.mu.Unlock()
		g.due[i] = nil
	}
	g.due = g.due[:0]
	for i, c := range g.thirsty {
		c.resume()
		g.thirsty[i] = nil
	}
	g.thirsty = g.thirsty[:0]
	l.kick()
	for i, p := range g.touched {
		p.kick()
		g.touched[i] = nil
	}
	g.touched = g.touched[:0]
}

// poll waits until the socket can be read from or written to, or has ended.
func (l *link) poll(events int16) {
	p := []unix.PollFd{{Fd: int32(l.fd), Events: events}}
	for {
		if _, err := unix.Poll(p, -1); err != unix.EINTR {
			return
		}
	}
}

// split hands over the whole frames in b and says how much they were. A
// length that no frame has means that the stream is out of step for good.
func (l *link) split(b []byte, g *gather) (used int, ok bool) {
	defer g.flush()
	for len(b)-used >= frame.LenSize {
		n := binary.BigEndian.Uint32(b[used:])
		if n > frame.Max {
			l.p.c.drop(DropMalformed)
			l.p.sw.log.Warn("a guest's link sent a length that no frame has; unplugging it", logx.VM, l.p.name, "length", n)
			return used, false
		}
		end := used + frame.LenSize + int(n)
		if end > len(b) {
			break
		}
		l.p.c.framesIn.Add(1)
		l.p.c.bytesIn.Add(uint64(n))
		l.p.input(b[used+frame.LenSize:end], g)
		used = end
	}
	return used, true
}

// offer queues it; false when there is no room, even after writing what the
// guest takes now, and then it is still the caller's.
func (l *link) offer(it item) bool {
	if l.q.push(it) {
		return true
	}
	if it.pkt != nil {
		return false // the stack holds locks meanwhile
	}
	l.kick()
	return l.q.push(it)
}

// kick writes what is queued unless someone does, who then sees it too.
func (l *link) kick() {
	for !l.q.empty() && l.busy.CompareAndSwap(false, true) {
		blocked, err := l.write(false)
		if blocked {
			l.handed.Store(true) // and stays busy
			l.token()
			return
		}
		l.busy.Store(false)
		if err != nil {
			l.end()
			return
		}
	}
	if l.owes.Load() {
		l.token()
	}
}

// owe has the link's writer let c say what it owes (pay), once there is room.
func (l *link) owe(c *conn) {
	l.omu.Lock()
	l.debts = append(l.debts, c)
	l.omu.Unlock()
	l.owes.Store(true)
	l.token()
}

// settle lets connections say what they owe, while there is room.
func (l *link) settle() {
	for l.owes.Load() && l.q.low() {
		l.omu.Lock()
		debts := l.debts
		l.debts = nil
		l.owes.Store(false)
		l.omu.Unlock()
		for _, c := range debts {
			c.pay() // what finds no room is owed again
		}
	}
}

// nudge wakes the link's writer unless someone writes, who then sees it too.
func (l *link) nudge() {
	if !l.busy.Load() {
		l.token()
	}
}

func (l *link) token() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// writeLoop writes when nobody else may wait.
func (l *link) writeLoop() {
	defer l.leave()
	defer l.discard()
	defer l.end()
	for {
		select {
		case <-l.wake:
		case <-l.done:
			return
		}
		for l.handed.Swap(false) || (!l.q.empty() && l.busy.CompareAndSwap(false, true)) {
			_, err := l.write(true)
			l.busy.Store(false)
			if err != nil {
				return // the guest's end is gone: readLoop says so
			}
			l.settle()
		}
		if l.owes.Load() && l.q.low() { // others wrote
			l.settle()
			l.token()
		}
	}
}

// discard drops what is still queued when the link has ended, and stays busy.
func (l *link) discard() {
	for !l.handed.Swap(false) && !l.busy.CompareAndSwap(false, true) {
		runtime.Gosched() // whoever writes is told at once that it is closed
	}
	for i := range l.out.items[:l.out.n] {
		l.p.c.drop(DropNoLink)
		l.out.items[i].release()
	}
	l.out.n = 0
	for it, ok := l.q.pop(); ok; it, ok = l.q.pop() {
		l.p.c.drop(DropNoLink)
		it.release()
	}
}

// write writes until nothing is queued, or unless wait is set until it would
// have to. The caller is the busy one.
func (l *link) write(wait bool) (blocked bool, err error) {
	o := &l.out
	for {
		if o.n == 0 && !l.take() {
			return false, nil
		}
		for o.from < len(o.vec) {
			n, err := o.send(l.fd)
			switch {
			case err == 0:
				o.from = advance(o.vec, o.from, n)
			case err == unix.EAGAIN && !wait:
				return true, nil
			case err == unix.EAGAIN:
				l.poll(unix.POLLOUT)
			case err != unix.EINTR:
				return false, err
			}
		}
		l.sent()
	}
}

// send writes once and does not wait.
func (o *outgoing) send(fd int) (int, syscall.Errno) {
	o.msg.Iov = &o.vec[o.from]
	o.msg.SetIovlen(len(o.vec) - o.from)
	n, _, err := syscall.Syscall(syscall.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&o.msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return int(n), err
}

// take takes what goes out next; false when there is nothing.
func (l *link) take() bool {
	o := &l.out
	o.vec, o.from = o.vec[:0], 0
	for total := 0; o.n < batch && total < batchBytes; o.n++ {
		it, ok := l.q.pop()
		if !ok {
			break
		}
		l.pieces(&it, o.heads[o.n][:])
		o.items[o.n] = it
		total += it.n
	}
	return o.n > 0
}

// sent counts what has been written and lets go of it.
func (l *link) sent() {
	o := &l.out
	for i := range o.items[:o.n] {
		it := &o.items[i]
		l.p.c.framesOut.Add(uint64(it.frames))
		l.p.c.bytesOut.Add(uint64(it.n - it.frames*frame.LenSize))
		it.release()
	}
	clear(o.vec)
	o.n = 0
}

// pieces appends an item's as they go on the link.
func (l *link) pieces(it *item, head []byte) {
	if it.buf != nil {
		l.piece(it.buf.b)
		return
	}
	binary.BigEndian.PutUint32(head, uint32(it.n-frame.LenSize))
	frame.PutEth(head[frame.LenSize:], l.p.mac, l.p.sw.gwMAC, frame.TypeIPv4)
	l.piece(head)
	views, off := it.pkt.AsViewList()
	for w := views.Front(); w != nil; w = w.Next() {
		b := w.AsSlice()
		if off > 0 {
			k := min(off, len(b))
			b, off = b[k:], off-k
		}
		if len(b) > 0 {
			l.piece(b)
		}
	}
}

func (l *link) piece(b []byte) {
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	l.out.vec = append(l.out.vec, v)
}

// advance steps over n bytes of vec from an index on, and says where it is then.
func advance(vec []unix.Iovec, from, n int) int {
	for n > 0 {
		v := &vec[from]
		if n < int(v.Len) {
			v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n))
			v.SetLen(int(v.Len) - n)
			break
		}
		n -= int(v.Len)
		from++
	}
	return from
}

package netsw

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"virtkit/core/guestwire"
	"virtkit/core/logx"
	"virtkit/netsw/frame"
)

// Port is a guest's place on a switch.
type Port struct {
	sw   *Switch
	name string
	mac  frame.MAC
	ip   frame.IP
	c    counters

	link atomic.Pointer[link] // nil = unplugged

	asking     atomic.Int64 // open DNS questions
	askers     atomic.Int64 // TCP connections that they come over
	connecting atomic.Int64 // TCP connections being set up
	pinging    atomic.Int64 // running pings

	mu       sync.Mutex
	file     *os.File // the guest's end of the link, until it is taken
	flows    map[flow]struct{}
	sessions map[*session]struct{}

	// Under the switch's lock; readers have the table's copies.
	names, yields []string // canonical
	removed       bool
}

// flow is what ends when its guest does.
type flow interface{ abort() }

// Name is the port's name.
func (p *Port) Name() string { return p.name }

// Addr is the port's address.
func (p *Port) Addr() netip.Addr { return p.ip.Addr() }

// MAC is the port's link address, for the guest's network device.
func (p *Port) MAC() string { return p.mac.String() }

// Stats are the port's counters.
func (p *Port) Stats() Stats { return p.c.snapshot() }

// File is the guest's end of the link, to be handed to the VMM by descriptor
// ("-netdev stream,addr.type=fd"). It stays the port's to close: call CloseFile
// once the VMM has its copy, or the link never ends with the VMM. Nil after that.
func (p *Port) File() *os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.file
}

// CloseFile closes this process's copy of the guest's end.
func (p *Port) CloseFile() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.file != nil {
		p.file.Close()
		p.file = nil
	}
}

// Net is what the guest's interface is to be set to.
func (p *Port) Net() guestwire.Net {
	return guestwire.Net{
		MAC:     p.mac.String(),
		Addr:    netip.PrefixFrom(p.Addr(), p.sw.subnet.Bits()).String(),
		Gateway: p.sw.Gateway().String(),
		DNS:     []string{p.sw.Gateway().String()},
		Search:  slices.Clone(p.sw.search),
		MTU:     MTU,
	}
}

// Replug ends the link and everything that went through it, and plugs a new
// one for a guest that starts again. It returns the guest's new end, as File.
func (p *Port) Replug() (*os.File, error) {
	p.unplug()
	p.sw.mu.Lock()
	defer p.sw.mu.Unlock()
	if p.sw.closed || p.removed {
		return nil, errClosed
	}
	return p.plug()
}

// Remove takes the port off the switch. Its address may be given to another.
func (p *Port) Remove() {
	s := p.sw
	s.mu.Lock()
	if !p.removed {
		p.removed = true
		s.store(slices.DeleteFunc(slices.Clone(s.table.Load().ports), func(q *Port) bool { return q == p }))
		s.gone = append(s.gone, &p.c) // its flows still end, and count
	}
	s.mu.Unlock()
	p.unplug()
}

// link is a socket pair's near end with its two goroutines.
type link struct {
	p    *Port
	conn *net.UnixConn
	q    *queue
	done chan struct{} // closed once, by end
	once sync.Once
}

// plug makes a link. The near end is ours and non-blocking; the far one is
// handed over blocking, as a VMM expects it. The switch's lock is held, and it
// is not closed.
func (p *Port) plug() (*os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making the socket pair of port %q: %w", p.name, err)
	}
	for _, fd := range fds {
		// Room for several large frames; the kernel cuts it to its limit, and less
		// only means more wake-ups.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	}
	near := os.NewFile(uintptr(fds[0]), "netsw:"+p.name)
	far := os.NewFile(uintptr(fds[1]), "vm:"+p.name)
	c, err := net.FileConn(near) // duplicates, and sets non-blocking
	near.Close()
	if err != nil {
		far.Close()
		return nil, fmt.Errorf("using the socket pair of port %q: %w", p.name, err)
	}
	l := &link{p: p, conn: c.(*net.UnixConn), q: newQueue(), done: make(chan struct{})}
	p.mu.Lock()
	if p.file != nil {
		p.file.Close()
	}
	p.file = far
	p.mu.Unlock()
	p.link.Store(l)
	p.sw.wg.Go(l.readLoop)
	p.sw.wg.Go(l.writeLoop)
	return far, nil
}

// unplug ends the link, if any, and all that went through it.
func (p *Port) unplug() {
	if l := p.link.Swap(nil); l != nil {
		l.end()
	}
	p.CloseFile()
	p.mu.Lock()
	flows := make([]flow, 0, len(p.flows)+len(p.sessions))
	for f := range p.flows {
		flows = append(flows, f)
	}
	for f := range p.sessions {
		flows = append(flows, f)
	}
	p.mu.Unlock()
	for _, f := range flows {
		f.abort()
	}
}

// track remembers f until untrack; false when the port is full.
func (p *Port) track(f flow) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.flows) >= p.sw.cfg.MaxFlows {
		return false
	}
	p.flows[f] = struct{}{}
	return true
}

func (p *Port) untrack(f flow) {
	p.mu.Lock()
	delete(p.flows, f)
	p.mu.Unlock()
}

func (l *link) end() {
	l.once.Do(func() {
		close(l.done)
		l.conn.Close()
		l.p.link.CompareAndSwap(l, nil)
	})
}

// readSize holds one largest frame with room for the start of others.
const readSize = 128 << 10

var readPool = sync.Pool{New: func() any { b := make([]byte, readSize); return &b }}

// readLoop reads frames and hands each to the switch. While the guest is
// silent and no frame is half read, it holds no buffer.
func (l *link) readLoop() {
	defer l.end()
	raw, err := l.conn.SyscallConn()
	if err != nil {
		l.p.sw.log.Error("reading from a guest's link", logx.VM, l.p.name, logx.Err, err)
		return
	}
	var (
		buf  *[]byte
		have int
		n    int
		rerr error
	)
	read := func(fd uintptr) bool {
		if buf == nil {
			buf = readPool.Get().(*[]byte)
		}
		for {
			n, rerr = syscall.Read(int(fd), (*buf)[have:])
			if rerr != syscall.EINTR {
				break
			}
		}
		if rerr == syscall.EAGAIN {
			if have == 0 {
				readPool.Put(buf)
				buf = nil
			}
			return false
		}
		return true
	}
	for {
		err := raw.Read(read)
		if err == nil {
			err = rerr
		}
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.ECONNRESET) {
				l.p.sw.log.Warn("reading from a guest's link", logx.VM, l.p.name, logx.Err, err)
			}
			if buf != nil {
				readPool.Put(buf)
			}
			return
		}
		have += n
		used, ok := l.split((*buf)[:have])
		if !ok {
			readPool.Put(buf)
			return
		}
		have = copy(*buf, (*buf)[used:have])
		if have == 0 && n < readSize/2 {
			readPool.Put(buf)
			buf = nil
		}
	}
}

// split hands over the whole frames in b and says how much they were. A
// length that no frame has means that the stream is out of step for good.
func (l *link) split(b []byte) (used int, ok bool) {
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
		l.p.input(b[used+frame.LenSize : end])
		used = end
	}
	return used, true
}

// batch is how many frames go out in one system call at most.
const batch = 32

// writeLoop sends what is queued.
func (l *link) writeLoop() {
	defer l.end()
	var (
		items [batch]item
		heads [batch][frame.LenSize + frame.EthSize]byte
		vecs  = make(net.Buffers, 0, 4*batch)
	)
	defer func() { // what is still queued when the link ends
		for it, ok := l.q.pop(); ok; it, ok = l.q.pop() {
			l.p.c.drop(DropNoLink)
			it.release()
		}
	}()
	for {
		n, total := 0, 0
		all := vecs[:0]
		for n < batch && total < 256<<10 {
			it, ok := l.q.pop()
			if !ok {
				break
			}
			all = l.p.appendVecs(all, &it, heads[n][:])
			items[n] = it
			total += it.n
			n++
		}
		if n == 0 {
			if !l.q.wait(l.done) {
				return
			}
			continue
		}
		vecs = all
		out := all
		_, err := out.WriteTo(l.conn)
		for i := range items[:n] {
			items[i].release()
		}
		clear(all)
		if err != nil {
			return // the guest's end is gone: readLoop says so
		}
		l.p.c.framesOut.Add(uint64(n))
		l.p.c.bytesOut.Add(uint64(total - n*frame.LenSize))
	}
}

// appendVecs appends the pieces of one frame as they go on the link.
func (p *Port) appendVecs(v net.Buffers, it *item, head []byte) net.Buffers {
	if it.buf != nil {
		return append(v, it.buf.b)
	}
	binary.BigEndian.PutUint32(head, uint32(it.n-frame.LenSize))
	frame.PutEth(head[frame.LenSize:], p.mac, p.sw.gwMAC, frame.TypeIPv4)
	v = append(v, head)
	views, off := it.pkt.AsViewList()
	for w := views.Front(); w != nil; w = w.Next() {
		b := w.AsSlice()
		if off > 0 {
			k := min(off, len(b))
			b, off = b[k:], off-k
		}
		if len(b) > 0 {
			v = append(v, b)
		}
	}
	return v
}

// sendBuf queues a frame for the guest; buf is used up.
func (p *Port) sendBuf(buf *frameBuf) bool {
	binary.BigEndian.PutUint32(buf.b, uint32(len(buf.b)-frame.LenSize))
	p.capture(buf.b[frame.LenSize:])
	return p.send(item{buf: buf, n: len(buf.b)})
}

// sendPkt queues a packet of the stack for the guest; the reference is used up.
func (p *Port) sendPkt(pkt *stack.PacketBuffer) bool {
	n := pkt.Size()
	if p.sw.pcap != nil {
		b := frame.AppendEth(make([]byte, 0, frame.EthSize+n), p.mac, p.sw.gwMAC, frame.TypeIPv4)
		for _, s := range pkt.AsSlices() {
			b = append(b, s...)
		}
		p.capture(b)
	}
	return p.send(item{pkt: pkt, n: frame.LenSize + frame.EthSize + n})
}

func (p *Port) send(it item) bool {
	l := p.link.Load()
	if l == nil {
		p.c.drop(DropNoLink)
		it.release()
		return false
	}
	if !l.q.push(it) {
		p.c.drop(DropQueueFull)
		it.release()
		return false
	}
	return true
}

// sendIP queues an IPv4 packet that build appends.
func (p *Port) sendIP(sizeHint int, build func(b []byte) []byte) {
	buf := getBuffer(frame.LenSize + frame.EthSize + sizeHint)
	frame.PutEth(buf.b[frame.LenSize:], p.mac, p.sw.gwMAC, frame.TypeIPv4)
	buf.b = build(buf.b[:frame.LenSize+frame.EthSize])
	p.sendBuf(buf)
}

func (p *Port) capture(f []byte) {
	if w := p.sw.pcap; w != nil {
		w.Frame(f)
	}
}

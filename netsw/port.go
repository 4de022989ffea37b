package netsw

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"virtkit/core/guestwire"
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

	conns connTable

	mu       sync.Mutex
	file     *os.File // the guest's end of the link, until it is taken
	flows    map[flow]struct{}
	sessions map[*session]struct{}
	dead     bool // removed: nothing begins any more

	names   []string // canonical; set once
	removed bool     // under the switch's lock
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
//
// What went through it ends first: whoever has its address next must not find
// itself in a flow that was decided for another.
func (p *Port) Remove() {
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	p.unplug()
	s := p.sw
	s.mu.Lock()
	if !p.removed {
		p.removed = true
		s.store(slices.DeleteFunc(slices.Clone(s.table.Load().ports), func(q *Port) bool { return q == p }))
		s.gone = append(s.gone, &p.c) // its flows still end, and count
	}
	s.mu.Unlock()
	p.unplug() // a Replug may have come between
}

// plug makes a link. Both ends block: a VMM expects it of its own. The switch's lock is held, and it
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
	far := os.NewFile(uintptr(fds[1]), "vm:"+p.name)
	l := newLink(p, fds[0])
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
	if p.dead || len(p.flows) >= p.sw.cfg.MaxFlows {
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

// sendBuf sends a frame to the guest; buf is used up.
func (p *Port) sendBuf(buf *frameBuf) bool {
	ok := p.queueBuf(buf)
	p.kick()
	return ok
}

// queueBuf queues a frame, which goes out with the next kick.
func (p *Port) queueBuf(buf *frameBuf) bool {
	binary.BigEndian.PutUint32(buf.b, uint32(len(buf.b)-frame.LenSize))
	p.capture(buf.b[frame.LenSize:])
	return p.queue(item{buf: buf, n: len(buf.b), frames: 1})
}

// queueFrames queues frames that lie in a row, each with its length; one
// reference to buf is used up.
func (p *Port) queueFrames(buf *frameBuf, frames int) bool {
	return p.queue(p.framesItem(buf, frames))
}

// framesItem is what queueFrames queues.
func (p *Port) framesItem(buf *frameBuf, frames int) item {
	if p.sw.pcap != nil {
		for b := buf.b; len(b) > 0; {
			end := frame.LenSize + int(binary.BigEndian.Uint32(b))
			p.capture(b[frame.LenSize:end])
			b = b[end:]
		}
	}
	return item{buf: buf, n: len(buf.b), frames: frames}
}

// sendPkt queues a packet of the stack for the guest; the reference is used up.
// The stack holds locks meanwhile: the link's writer is only woken.
func (p *Port) sendPkt(pkt *stack.PacketBuffer) {
	n := pkt.Size()
	if p.sw.pcap != nil {
		b := frame.AppendEth(make([]byte, 0, frame.EthSize+n), p.mac, p.sw.gwMAC, frame.TypeIPv4)
		for _, s := range pkt.AsSlices() {
			b = append(b, s...)
		}
		p.capture(b)
	}
	if p.queue(item{pkt: pkt, n: frame.LenSize + frame.EthSize + n, frames: 1}) {
		if l := p.link.Load(); l != nil {
			l.nudge()
		}
	}
}

// queue queues what goes out with the next kick; false when it is dropped.
func (p *Port) queue(it item) bool {
	l := p.link.Load()
	if l == nil {
		p.c.drop(DropNoLink)
		it.release()
		return false
	}
	if !l.offer(it) {
		p.c.drop(DropQueueFull)
		it.release()
		return false
	}
	return true
}

// crowded says whether much lies on the link that the guest has yet to take.
func (p *Port) crowded() bool {
	l := p.link.Load()
	return l != nil && !l.q.low()
}

// kick sends what is queued, as far as the guest takes it at once.
func (p *Port) kick() {
	if l := p.link.Load(); l != nil {
		l.kick()
	}
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

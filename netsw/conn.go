package netsw

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/netsw/frame"
)

// conn is a TCP connection of a guest joined to one of the host's. This end of
// it speaks TCP itself (RFC 9293) instead of leaving it to the stack, because
// a link to a guest is not a network: it keeps the order and loses nothing but
// what a receiver drops. So there is no congestion to control, what comes out
// of order is not kept, and bytes go from socket to socket with no copy but the
// kernel's:
//
//   - What the guest sends is written to the host's socket from where the link
//     was read to, many segments at once, by the link's own reader. Only what
//     that socket does not take at once is copied and waits (pending), and the
//     window announced shrinks by it.
//   - What the outside sends is read into frames that lie ready, up to a buffer
//     of them at once, and those same buffers stay until the guest has
//     acknowledged them (sent), to be sent again should it have lost one.
//
// A connection that is silent stays for as long as both ends keep it; the
// host's keepalive finds a dead outside, and a guest that goes away ends its
// connections by its port. A paused guest is no dead one: what it does not
// acknowledge is repeated without end, ever more seldom. One that is only slow, as
// its processor is shared, is not repeated to: how long it takes is measured (RFC
// 6298), and what was repeated in vain is told by its timestamps (RFC 3522). There
// are no selective acknowledgements (RFC 2018): what a guest drops it drops in
// a row, when it has no room.
//
// The lock is the connection's own; the host's socket is written to under it,
// never waited for. What is to go to the guest is queued under it and goes out
// with the next kick, mostly after it: when the link's reader has read all there
// is, for all connections at once.
type conn struct {
	p     *Port
	id    connID
	begun *link // on which

	cancel context.CancelFunc // of the dial
	sock   *hostConn          // set once, before state is shaking; closed by endLocked

	mu    sync.Mutex
	moved sync.Cond // what run waits for may have come
	state connState
	limit uint32 // of what is held for the guest, and of what is held of it; see share

	// Towards the guest.
	una, nxt     uint32 // oldest unacknowledged, and next to be sent
	wnd          uint32 // how much the guest takes from una on
	scale        uint8  // of its windows
	mss          int    // payload of a full segment
	stamps       bool   // both use timestamps (RFC 7323)
	recent       uint32 // the guest's last one
	sent         []sentFrames
	finSent      bool
	finAcked     bool
	starved      bool // inward waits until resume says more than "no room"
	pull         *scatter
	stuck        item // what resume found no room for on the link
	dups         int  // acknowledgements that say the same again
	recover      uint32
	recovering   bool // until recover is acknowledged, or nothing was lost
	timer        *time.Timer
	armed        bool
	timedUna     uint32        // una when the timer was set
	tries        int           // of the timer, without progress
	smooth, vary time.Duration // of the time that acknowledgements take; see measured
	clock        time.Time     // when what is measured was sent; zero = nothing is
	clocked      uint32        // what acknowledges it
	repeated     uint32        // our timestamp when recovering began
	headerReady  [natHead + stampSize]byte
	owed         uint8 // flags of what the link had no room for; see pay

	// From the guest.
	rcv      uint32 // next expected
	edge     uint32 // end of the window announced
	scaled   bool   // our windows are
	pending  [][]byte
	held     uint32     // bytes of pending
	flushing bool       // a goroutine writes pending
	due      bool       // an acknowledgement is; see gather
	ear      *listening // nil = nobody listens
	finRcvd  bool
	finDone  bool // and passed on
}

type connState uint8

const (
	dialing connState = iota
	shaking           // the outside stands; the guest has yet to say so
	open
	ended
)

// Sizes of what goes before a payload.
const (
	tcpSize   = 20
	stampSize = 12 // timestamps, with padding
	natHead   = frame.LenSize + frame.EthSize + frame.IPv4Size + tcpSize
	tcpAt     = natHead - tcpSize
	tcpRoom   = MTU - frame.IPv4Size - tcpSize // a segment's payload without options
	ourScale  = 6                              // windows of 4 MiB can be said
)

// sentFrames are frames that the guest has not acknowledged in full.
type sentFrames struct {
	seq, end uint32
	buf      *frameBuf
}

// segment is a TCP segment of a guest, as much as is looked at.
type segment struct {
	id       connID
	seq, ack uint32
	flags    uint8
	wnd      uint32 // as written
	opts     []byte
	data     []byte
}

// TCP flags.
const (
	flagFin = 1
	flagSyn = 2
	flagRst = 4
	flagPsh = 8
	flagAck = 16
)

func parseSegment(ip *frame.IPv4) (s segment, ok bool) {
	b := ip.Payload
	if len(b) < tcpSize {
		return s, false
	}
	off := int(b[12]>>4) * 4
	if off < tcpSize || off > len(b) {
		return s, false
	}
	s.id = connID{ip.Dst, binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint16(b)}
	s.seq, s.ack = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	s.flags, s.wnd = b[13], uint32(binary.BigEndian.Uint16(b[14:]))
	s.opts, s.data = b[tcpSize:off], b[off:]
	return s, true
}

// begin takes the first segment of a connection, and dials. It runs in the
// link's reader.
func (p *Port) begin(s *segment, l *link) {
	if s.flags&(flagSyn|flagAck|flagRst|flagFin) != flagSyn {
		return
	}
	all, own := p.sw.connecting.Add(1), p.connecting.Add(1)
	if all > maxInFlight || own > maxConnecting {
		p.c.drop(DropLimit) // the guest tries again
		p.dialled()
		return
	}
	c := &conn{p: p, begun: l, id: s.id, rcv: s.seq + 1, edge: s.seq + 1, una: rand.Uint32()}
	c.moved.L = &c.mu
	c.nxt = c.una
	c.hello(s)
	ctx, cancel := context.WithTimeout(p.sw.ctx, p.sw.cfg.DialTimeout)
	c.cancel = cancel
	p.conns.add(c)
	if !p.sw.run(func() { c.run(ctx) }) {
		p.conns.remove(c)
		p.dialled()
		cancel()
	}
}

// dialled is said once of every connection that begin counted.
func (p *Port) dialled() {
	p.connecting.Add(-1)
	p.sw.connecting.Add(-1)
}

// hello reads the options of the guest's SYN.
func (c *conn) hello(s *segment) {
	c.mss, c.wnd = 536, s.wnd
	for o := s.opts; len(o) > 0 && o[0] != 0; {
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
			c.scaled, c.scale = true, min(v[0], 14)
		case o[0] == 8 && len(v) == 8:
			c.stamps, c.recent = true, binary.BigEndian.Uint32(v)
		}
		o = o[o[1]:]
	}
	c.mss = max(min(c.mss, tcpRoom), 64)
	if c.stamps {
		c.mss -= stampSize
	}
}

// run is the connection's life: it dials, lets the guest's handshake end, and
// then moves what the outside sends.
func (c *conn) run(ctx context.Context) {
	p := c.p
	dialled := sync.OnceFunc(p.dialled)
	defer dialled()
	defer c.cancel()
	defer p.conns.remove(c)
	dst := netip.AddrPortFrom(c.id.dst.Addr(), c.id.dport)
	if !p.admit(policy.TCP, dst) {
		c.refuse()
		return
	}
	if a := p.sw.asker; a != nil && a.Listens(policy.Flow{Port: p.name, Proto: policy.TCP, Dst: dst}) {
		c.mu.Lock()
		c.listen()
		c.mu.Unlock()
	}
	if !p.track(c) {
		p.c.drop(DropLimit)
		c.refuse()
		return
	}
	defer p.untrack(c)
	if p.link.Load() != c.begun { // the guest that began it is gone, and unplug came too early to end it
		p.c.drop(DropNoLink)
		c.end(true)
		return
	}
	if !p.sw.sockets.take() {
		p.c.drop(DropLimit)
		c.refuse()
		return
	}
	defer p.sw.sockets.release()
	if !c.dial(ctx, dst) {
		return
	}
	defer c.end(false)
	limit := share(p.sw.openFlows.Add(1))
	defer p.sw.openFlows.Add(-1)
	if limit == 0 {
		limit = bufMax
	}
	if !c.shake(uint32(limit)) {
		return
	}
	dialled()
	p.c.flows.Add(1)
	p.c.openFlows.Add(1)
	defer p.c.openFlows.Add(-1)
	c.inward()
}

// dial connects to the outside; false when it did not, which the guest was told.
func (c *conn) dial(ctx context.Context, dst netip.AddrPort) bool {
	sock, err := dialTCP(ctx, c.p.sw.guard.target(dst))
	if err != nil {
		c.unreached(dst, err)
		return false
	}
	if c.p.sw.guard.guards(dst) && sock.own() {
		c.p.deny(policy.TCP, dst, ownAddress)
		sock.f.Close()
		c.refuse()
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sock = sock
	if c.state == ended { // aborted meanwhile
		sock.reset()
		return false
	}
	return true
}

// unreached passes on why the outside could not be reached.
func (c *conn) unreached(dst netip.AddrPort, err error) {
	var code uint8
	switch {
	case errors.Is(err, syscall.ENETUNREACH):
		code = frame.CodeNet
	case errors.Is(err, syscall.EHOSTUNREACH):
		code = frame.CodeHost
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM): // the host's firewall
		code = frame.CodeProhibited
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, context.Canceled):
		return // silence outside is silence inside
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		c.refuse()
		return
	default: // such as no descriptors left: ours
		if c.p.sw.warned.now() {
			c.p.sw.log.Warn("connecting for a guest", logx.VM, c.p.name, "dst", dst.String(), logx.Err, err)
		}
		c.refuse()
		return
	}
	head := make([]byte, 8) // what an ICMP error must quote to be believed
	binary.BigEndian.PutUint16(head, c.id.sport)
	binary.BigEndian.PutUint16(head[2:], c.id.dport)
	binary.BigEndian.PutUint32(head[4:], c.rcv-1)
	ip := frame.IPv4{Src: c.p.ip, Dst: c.id.dst, Payload: head}
	ip.Header = frame.AppendIPv4(nil, ip.Src, ip.Dst, frame.ProtoTCP, tcpSize)
	c.p.unreachable(code, &ip)
}

// refuse answers the guest's SYN with a reset.
func (c *conn) refuse() {
	defer c.p.kick()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != ended {
		c.state = ended
		c.p.conns.remove(c)
		c.una, c.nxt = 0, 0
		c.answer(flagRst | flagAck)
	}
}

// shake accepts the guest's connection and waits until the guest knows.
func (c *conn) shake(limit uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == ended {
		return false
	}
	c.state, c.limit = shaking, limit // together: what is answered from here on says a window
	c.prepareHeader()
	c.nxt = c.una + 1
	c.answer(flagSyn | flagAck)
	c.p.kick()
	c.arm()
	for c.state == shaking {
		c.moved.Wait()
	}
	return c.state == open
}

// abort resets both ends; see flow.
func (c *conn) abort() { c.end(true) }

// end ends both sides: with a reset to the outside, or with a proper end. Safe to call
// more than once.
func (c *conn) end(withReset bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(withReset)
}

func (c *conn) endLocked(withReset bool) {
	if c.state == ended {
		return
	}
	c.state = ended
	c.p.conns.remove(c) // the guest may use its port again at once
	c.cancel()
	if c.timer != nil {
		c.timer.Stop()
	}
	for i := range c.sent {
		c.sent[i].buf.free()
	}
	c.sent, c.pending, c.held = nil, nil, 0
	c.deafLocked()
	switch {
	case c.sock == nil:
	case withReset:
		c.sock.reset()
	default:
		c.sock.f.Close() // lets go who waits at it
	}
	c.moved.Broadcast()
}

// failLocked resets both sides: the outside has failed.
func (c *conn) failLocked() {
	if c.state != ended {
		c.answer(flagRst | flagAck)
		c.endLocked(true)
	}
}

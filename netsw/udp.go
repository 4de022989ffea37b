package netsw

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/netsw/frame"
)

// dnsIdle is the idle time of sessions to other people's resolvers: one
// question each, and there may be thousands.
const dnsIdle = 10 * time.Second

// handleUDP takes the first datagram of a session; later ones go to its endpoint.
func (g *gateway) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	p := g.port(id.RemoteAddress)
	if p == nil {
		return true
	}
	dst := addrOf(id.LocalAddress.AsSlice(), id.LocalPort)
	quote := func(code uint8) {
		n := pkt.TransportHeader().Slice()
		p.unreachable(code, &frame.IPv4{Src: p.ip, Dst: dst.Addr().As4(), Header: pkt.NetworkHeader().Slice(), Payload: n})
	}
	if !p.admit(policy.UDP, dst) {
		quote(frame.CodeProhibited)
		return true
	}
	if !g.sw.sockets.take() {
		p.c.drop(DropLimit)
		return true
	}
	conn, err := dialUDP(g.sw.guard.target(dst))
	if err != nil {
		g.sw.sockets.release()
	}
	switch {
	case errors.Is(err, syscall.ENETUNREACH):
		quote(frame.CodeNet)
		return true
	case errors.Is(err, syscall.EHOSTUNREACH):
		quote(frame.CodeHost)
		return true
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		quote(frame.CodeProhibited)
		return true
	case err != nil:
		if g.sw.warned.now() {
			g.sw.log.Warn("opening a UDP socket for a guest", logx.VM, p.name, "dst", dst.String(), logx.Err, err)
		}
		return true
	}
	if g.sw.guard.local(dst, conn) {
		conn.Close()
		g.sw.sockets.release()
		p.deny(policy.UDP, dst, ownAddress)
		quote(frame.CodeProhibited)
		return true
	}
	s := &session{p: p, dst: dst, src: id.RemotePort, conn: conn, idle: g.sw.cfg.UDPIdle}
	if dst.Port() == 53 {
		s.idle = min(s.idle, dnsIdle)
	}
	s.touch()
	clone := pkt.Clone()
	defer clone.DecRef()
	ep, terr := udp.NewForwarderRequest(g.st, id, clone).CreateEndpoint(&s.wq)
	if terr != nil { // another datagram of the same session was first; this one is lost
		conn.Close()
		g.sw.sockets.release()
		p.c.drop(DropQueueFull)
		return true
	}
	cuttable(ep)
	s.ep = ep
	p.admitSession(s)
	if !g.sw.run(s.pump) {
		s.abort()
		p.forget(s)
	}
	return true
}

// dialUDP connects a socket of the host's. It cannot send to a broadcast address
// (EACCES), which package net would have it do.
func dialUDP(to netip.AddrPort) (*net.UDPConn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 0) }); cerr != nil {
			return cerr
		}
		return os.NewSyscallError("setsockopt", err)
	}}
	return d.DialUDP(context.Background(), "udp4", netip.AddrPort{}, to)
}

// cuttable lets datagrams to the guest be cut on their way: behind it may be a
// network of its own, such as its containers', with a smaller MTU than ours, and
// nobody there would hear that they were too long.
func cuttable(ep tcpip.Endpoint) {
	_ = ep.SetSockOptInt(tcpip.MTUDiscoverOption, int(tcpip.PMTUDiscoveryDont)) // the stack knows it
}

// session is what a guest's port and an outside address say to each other.
type session struct {
	p    *Port
	dst  netip.AddrPort
	src  uint16 // guest's port
	conn *net.UDPConn
	ep   tcpip.Endpoint
	wq   waiter.Queue
	idle time.Duration
	last atomic.Int64 // of traffic, Unix nanoseconds
	once sync.Once
}

func (s *session) touch() { s.last.Store(time.Now().UnixNano()) }

// abort ends both directions.
func (s *session) abort() {
	s.once.Do(func() {
		s.conn.Close()
		s.ep.Close()
		s.p.sw.sockets.release()
	})
}

// admitSession counts s in. Over the cap, the one idle for longest makes room.
func (p *Port) admitSession(s *session) {
	p.mu.Lock()
	if p.dead {
		defer s.abort()
	}
	var oldest *session
	if len(p.sessions) >= p.sw.cfg.MaxSessions {
		for o := range p.sessions {
			if oldest == nil || o.last.Load() < oldest.last.Load() {
				oldest = o
			}
		}
		delete(p.sessions, oldest)
	}
	p.sessions[s] = struct{}{}
	p.mu.Unlock()
	p.c.sessions.Add(1)
	p.c.openSess.Add(1)
	if oldest != nil {
		p.c.drop(DropLimit)
		oldest.abort()
	}
}

func (p *Port) forget(s *session) {
	p.mu.Lock()
	delete(p.sessions, s)
	p.mu.Unlock()
	p.c.openSess.Add(-1)
}

// pump moves datagrams both ways until the session has been idle for long.
func (s *session) pump() {
	defer s.p.forget(s)
	entry, ch := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventErr | waiter.EventHUp)
	s.wq.EventRegister(&entry)
	defer s.wq.EventUnregister(&entry)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.abort()
		s.inward()
	}()
	s.outward(ch, done)
	s.abort()
	<-done
}

// outward sends the guest's datagrams.
func (s *session) outward(ch <-chan struct{}, done <-chan struct{}) {
	var pending *[]byte
	defer func() {
		if pending != nil {
			copyPool.Put(pending)
		}
	}()
	for {
		if pending == nil {
			pending = copyPool.Get().(*[]byte)
		}
		w := tcpip.SliceWriter(*pending)
		res, terr := s.ep.Read(&w, tcpip.ReadOptions{})
		if _, ok := terr.(*tcpip.ErrWouldBlock); ok {
			copyPool.Put(pending)
			pending = nil
			select {
			case <-ch:
				continue
			case <-done:
				return
			}
		}
		if terr != nil {
			return
		}
		s.touch()
		b := (*pending)[:res.Count]
		_, err := s.conn.Write(b)
		if errors.Is(err, syscall.ECONNREFUSED) { // said of an earlier one
			s.unreachable(frame.CodePort)
			_, err = s.conn.Write(b)
		}
		switch {
		case err == nil:
			s.p.c.sent.Add(uint64(len(b)))
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, syscall.ENETUNREACH):
			s.unreachable(frame.CodeNet)
		case errors.Is(err, syscall.EHOSTUNREACH):
			s.unreachable(frame.CodeHost)
		}
	}
}

// inward hands the outside's datagrams to the guest.
func (s *session) inward() {
	r, err := newTryReader(s.conn, &copyPool)
	if err != nil {
		return
	}
	defer r.release()
	var data bytes.Reader
	for {
		deadline := time.Unix(0, s.last.Load()).Add(s.idle)
		if !deadline.After(time.Now()) {
			return
		}
		if s.conn.SetReadDeadline(deadline) != nil {
			return
		}
		n, err := r.read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue // unless there was traffic the other way, it ends above
		case errors.Is(err, syscall.ECONNREFUSED):
			s.unreachable(frame.CodePort)
			continue
		case errors.Is(err, syscall.EHOSTUNREACH):
			s.unreachable(frame.CodeHost)
			continue
		case errors.Is(err, syscall.ENETUNREACH):
			s.unreachable(frame.CodeNet)
			continue
		case err != nil:
			return
		}
		s.touch()
		data.Reset((*r.buf)[:n])
		if _, terr := s.ep.Write(&data, tcpip.WriteOptions{}); terr == nil {
			s.p.c.received.Add(uint64(n))
		} else if _, ok := terr.(*tcpip.ErrWouldBlock); !ok {
			return
		} else {
			s.p.c.drop(DropQueueFull)
		}
		r.release()
	}
}

// unreachable tells the guest about the last datagrams, quoting a header like theirs.
func (s *session) unreachable(code uint8) {
	pkt := frame.AppendUDP(nil, netip.AddrPortFrom(s.p.Addr(), s.src), s.dst, nil)
	if ip, ok := frame.ParseIPv4(pkt); ok {
		s.p.unreachable(code, &ip)
	}
}

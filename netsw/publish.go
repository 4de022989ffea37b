package netsw

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/core/policy"
)

// Publish makes a guest's port reachable at an address of the host
// (hostAddr "" = 127.0.0.1; hostPort 0 = any free one) and returns the host port.
// The guest sees the gateway's address as its peer. It ends with the Closer,
// or with the switch. A host port that is taken is fault.Conflict and names the
// program that holds it where that can be found out.
func (s *Switch) Publish(hostAddr string, hostPort int, p *Port, guestPort int, proto policy.Proto) (int, io.Closer, error) {
	if hostAddr == "" {
		hostAddr = "127.0.0.1"
	}
	ip, err := netip.ParseAddr(hostAddr)
	if err != nil {
		return 0, nil, fault.Newf(fault.Usage, "publishing on %q: not an IP address of this host", hostAddr).Because(err)
	}
	if hostPort < 0 || hostPort > 65535 || guestPort < 1 || guestPort > 65535 {
		return 0, nil, fault.Newf(fault.Usage, "publishing %d to port %d of %q: not port numbers", hostPort, guestPort, p.name).
			Hint("the host's is 0 (any) to 65535, the guest's 1 to 65535")
	}
	at := netip.AddrPortFrom(ip, uint16(hostPort))
	pub := &published{sw: s, p: p, guest: netip.AddrPortFrom(p.Addr(), uint16(guestPort))}
	switch proto {
	case policy.TCP:
		return pub.listenTCP(at)
	case policy.UDP:
		return pub.listenUDP(at)
	}
	return 0, nil, fault.Newf(fault.Usage, "publishing %s: protocol %q is neither tcp nor udp", at, proto)
}

// published is one published port.
type published struct {
	sw    *Switch
	p     *Port
	guest netip.AddrPort

	once sync.Once
	end  io.Closer // listener or socket
	stop func() bool
}

// Close ends the publication; connections that stand go on.
func (pub *published) Close() error {
	var err error
	pub.once.Do(func() {
		pub.stop()
		err = pub.end.Close()
	})
	return err
}

// begin ties the socket to the switch's life and starts serve.
func (pub *published) begin(end io.Closer, serve func()) error {
	pub.end = end
	pub.stop = context.AfterFunc(pub.sw.ctx, func() { pub.Close() })
	if !pub.sw.run(serve) {
		pub.Close()
		return errClosed
	}
	return nil
}

func (pub *published) listenTCP(at netip.AddrPort) (int, io.Closer, error) {
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return 0, nil, listenFault(at, policy.TCP, err)
	}
	if err := pub.begin(ln, func() { pub.acceptTCP(ln) }); err != nil {
		return 0, nil, err
	}
	return ln.Addr().(*net.TCPAddr).Port, pub, nil
}

func (pub *published) acceptTCP(ln *net.TCPListener) {
	var delay time.Duration
	for {
		c, err := ln.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as no descriptors left: wait for some
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			pub.sw.log.Warn("accepting for a published port", logx.VM, pub.p.name, "addr", ln.Addr().String(), logx.Err, err)
			select {
			case <-time.After(delay):
				continue
			case <-pub.sw.ctx.Done():
				return
			}
		}
		delay = 0
		if !pub.sw.run(func() { pub.connectTCP(c) }) {
			reset(c)
		}
	}
}

// connectTCP joins a client of the host to the guest. A guest that does not
// listen resets the client, which has been accepted already.
func (pub *published) connectTCP(c *net.TCPConn) {
	ctx, cancel := context.WithTimeout(pub.sw.ctx, pub.sw.cfg.DialTimeout)
	defer cancel()
	f := &tcpFlow{p: pub.p, cancel: cancel}
	if !pub.p.track(f) {
		pub.p.c.drop(DropLimit)
		reset(c)
		return
	}
	defer pub.p.untrack(f)
	if !pub.sw.sockets.take() {
		pub.p.c.drop(DropLimit)
		reset(c)
		return
	}
	defer pub.sw.sockets.release()
	ep, err := pub.sw.gw.dialTCP(ctx, pub.guest, &f.wq)
	if err != nil {
		pub.sw.log.Debug("connecting to a published port", logx.VM, pub.p.name, "dst", pub.guest.String(), logx.Err, err)
		reset(c)
		return
	}
	if f.attach(c, ep) {
		f.pump()
	}
}

// dialTCP connects from the gateway to a guest.
func (g *gateway) dialTCP(ctx context.Context, to netip.AddrPort, wq *waiter.Queue) (tcpip.Endpoint, error) {
	ep, terr := g.st.NewEndpoint(tcp.ProtocolNumber, ipv4.ProtocolNumber, wq)
	if terr != nil {
		return nil, fmt.Errorf("connecting to %s: %s", to, terr)
	}
	entry, ch := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)
	terr = ep.Bind(full(netip.AddrPortFrom(g.sw.Gateway(), 0)))
	if terr == nil {
		terr = ep.Connect(full(to))
	}
	if _, ok := terr.(*tcpip.ErrConnectStarted); ok {
		select {
		case <-ch:
			terr = ep.LastError()
		case <-ctx.Done():
			ep.Abort()
			return nil, fmt.Errorf("connecting to %s: %w", to, ctx.Err())
		}
	}
	if terr != nil {
		ep.Close()
		return nil, fmt.Errorf("connecting to %s: %s", to, terr)
	}
	return ep, nil
}

func (pub *published) listenUDP(at netip.AddrPort) (int, io.Closer, error) {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return 0, nil, listenFault(at, policy.UDP, err)
	}
	if err := pub.begin(c, func() { pub.serveUDP(c) }); err != nil {
		return 0, nil, err
	}
	return c.LocalAddr().(*net.UDPAddr).Port, pub, nil
}

// serveUDP gives each client an endpoint of its own on the gateway, so that
// answers find their way back.
func (pub *published) serveUDP(c *net.UDPConn) {
	var mu sync.Mutex
	clients := make(map[netip.AddrPort]*inbound)
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		for _, in := range clients {
			in.abort()
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		mu.Lock()
		in := clients[from]
		full := in == nil && len(clients) >= pub.sw.cfg.MaxSessions
		mu.Unlock()
		if full {
			pub.p.c.drop(DropLimit)
			continue
		}
		if in == nil {
			if in, err = pub.newInbound(c, from); err != nil {
				pub.sw.log.Debug("passing a datagram to a published port", logx.VM, pub.p.name, logx.Err, err)
				continue
			}
			mu.Lock()
			clients[from] = in
			mu.Unlock()
			ok := pub.sw.run(func() {
				in.replies()
				mu.Lock()
				delete(clients, from)
				mu.Unlock()
			})
			if !ok {
				in.abort()
				return
			}
		}
		in.deliver(buf[:n])
	}
}

// inbound is one client of a published UDP port.
type inbound struct {
	pub    *published
	conn   *net.UDPConn
	client netip.AddrPort
	wq     waiter.Queue
	ep     tcpip.Endpoint
	once   sync.Once
	done   chan struct{}
	used   chan struct{} // a token: traffic since last looked
}

func (pub *published) newInbound(c *net.UDPConn, client netip.AddrPort) (*inbound, error) {
	in := &inbound{pub: pub, conn: c, client: client, done: make(chan struct{}), used: make(chan struct{}, 1)}
	ep, terr := pub.sw.gw.st.NewEndpoint(udp.ProtocolNumber, ipv4.ProtocolNumber, &in.wq)
	if terr == nil {
		terr = ep.Bind(full(netip.AddrPortFrom(pub.sw.Gateway(), 0)))
	}
	if terr == nil {
		terr = ep.Connect(full(pub.guest))
	}
	if terr != nil {
		if ep != nil {
			ep.Close()
		}
		return nil, fmt.Errorf("opening a socket to %s: %s", pub.guest, terr)
	}
	cuttable(ep)
	in.ep = ep
	if !pub.p.track(in) {
		ep.Close()
		return nil, fmt.Errorf("opening a socket to %s: too many flows", pub.guest)
	}
	return in, nil
}

func (in *inbound) abort() {
	in.once.Do(func() {
		close(in.done)
		in.ep.Close()
	})
}

func (in *inbound) touch() {
	select {
	case in.used <- struct{}{}:
	default:
	}
}

func (in *inbound) deliver(b []byte) {
	in.touch()
	if n, terr := in.ep.Write(bytes.NewReader(b), tcpip.WriteOptions{}); terr == nil {
		in.pub.p.c.received.Add(uint64(n))
	} else {
		in.pub.p.c.drop(DropQueueFull)
	}
}

// replies passes the guest's answers to the client until both are idle.
func (in *inbound) replies() {
	defer in.pub.p.untrack(in)
	defer in.abort()
	entry, ch := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventErr | waiter.EventHUp)
	in.wq.EventRegister(&entry)
	defer in.wq.EventUnregister(&entry)
	idle := time.NewTimer(in.pub.sw.cfg.UDPIdle)
	defer idle.Stop()
	for {
		buf := copyPool.Get().(*[]byte)
		w := tcpip.SliceWriter(*buf)
		res, terr := in.ep.Read(&w, tcpip.ReadOptions{})
		if terr == nil {
			in.touch()
			if _, err := in.conn.WriteToUDPAddrPort((*buf)[:res.Count], in.client); err == nil {
				in.pub.p.c.sent.Add(uint64(res.Count))
			}
		}
		copyPool.Put(buf)
		switch terr.(type) {
		case nil:
			continue
		case *tcpip.ErrWouldBlock:
		case *tcpip.ErrConnectionRefused: // nobody listens there yet
			continue
		default:
			return
		}
		select {
		case <-ch:
		case <-in.done:
			return
		case <-idle.C:
			select {
			case <-in.used:
				idle.Reset(in.pub.sw.cfg.UDPIdle)
			default:
				return
			}
		}
	}
}

// listenFault explains why an address of the host cannot be listened on.
func listenFault(at netip.AddrPort, proto policy.Proto, err error) error {
	e := fault.Newf(fault.System, "publishing %s/%s", at, proto).Because(err)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		e = fault.Newf(fault.Conflict, "publishing %s/%s: the port is in use on this host", at, proto)
		who := holder(at.Port(), proto)
		if who == ownProcess {
			return e.Hint("this guest's network publishes it already: close it with `vk publish --remove`, or publish another host port (0 takes any free one)")
		}
		if who != "" {
			return e.Hint("it is held by %s: stop it, or publish another host port (0 takes any free one)", who)
		}
		return e.Hint("the holder is another user's program: find it with `sudo ss -Hlnp%c sport = :%d`, or publish another host port (0 takes any free one)",
			proto[0], at.Port())
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		e = fault.Newf(fault.Denied, "publishing %s/%s: not allowed", at, proto).Because(err)
		return e.Hint("ports below %d are root's on this host (net.ipv4.ip_unprivileged_port_start): publish a higher one", lowestPort())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		e = fault.Newf(fault.Usage, "publishing %s/%s: this host has no such address", at, proto)
		return e.Hint("use 127.0.0.1, 0.0.0.0 for all of the host's addresses, or one that `ip -br addr` lists")
	}
	return e
}

func lowestPort() int {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if n, cerr := strconv.Atoi(string(bytes.TrimSpace(b))); err == nil && cerr == nil {
		return n
	}
	return 1024
}

package netsw

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/netsw/frame"
)

// pinger passes echo requests on through the kernel's unprivileged ping
// sockets, which the host may or may not allow (net.ipv4.ping_group_range).
// Where it does not, a guest is told "prohibited" and the log says why, once.
type pinger struct {
	once sync.Once // of the warning
	open atomic.Int64

	mu    sync.Mutex
	flows map[pingKey]*pingFlow
}

type pingKey struct {
	p   *Port
	dst frame.IP
	id  uint16
}

// pingFlow is one running ping: a socket of its own, because the kernel
// chooses the identifier by socket.
type pingFlow struct {
	key  pingKey
	conn net.Conn
	once sync.Once
}

func (f *pingFlow) abort() { f.once.Do(func() { f.conn.Close() }) }

const (
	pingIdle = 10 * time.Second
	pingMax  = 256 // open at once, of all guests

	pingMaxPort = 64 // of one
)

// echo sends one request on.
func (pg *pinger) echo(p *Port, ip *frame.IPv4, m frame.ICMP) {
	key := pingKey{p: p, dst: ip.Dst, id: uint16(m.Rest >> 16)}
	pg.mu.Lock()
	f := pg.flows[key]
	pg.mu.Unlock()
	if f == nil {
		dst := netip.AddrPortFrom(ip.Dst.Addr(), 0)
		if !p.admit(policy.ICMP, dst) {
			p.unreachable(frame.CodeProhibited, ip)
			return
		}
		if pg.open.Load() >= pingMax || p.pinging.Load() >= pingMaxPort {
			p.c.drop(DropLimit)
			return
		}
		conn, err := dialPing(p.sw.guard.target(dst).Addr())
		if err != nil {
			pg.fail(p, ip, err)
			return
		}
		if p.sw.guard.local(dst, conn) {
			conn.Close()
			p.deny(policy.ICMP, dst, ownAddress)
			p.unreachable(frame.CodeProhibited, ip)
			return
		}
		f = &pingFlow{key: key, conn: conn}
		pg.mu.Lock()
		if pg.flows == nil {
			pg.flows = make(map[pingKey]*pingFlow)
		}
		pg.flows[key] = f
		pg.mu.Unlock()
		pg.open.Add(1)
		p.pinging.Add(1)
		if !p.track(f) || !p.sw.run(func() { pg.replies(f) }) {
			p.c.drop(DropLimit)
			pg.end(f)
			return
		}
	}
	b := make([]byte, frame.ICMPSize, frame.ICMPSize+len(m.Payload))
	b[0] = frame.ICMPEcho
	binary.BigEndian.PutUint32(b[4:], m.Rest)
	b = append(b, m.Payload...)
	_ = f.conn.SetReadDeadline(time.Now().Add(pingIdle))
	if _, err := f.conn.Write(b); err != nil {
		pg.fail(p, ip, err)
		return
	}
	p.c.sent.Add(uint64(len(m.Payload)))
}

func (pg *pinger) fail(p *Port, ip *frame.IPv4, err error) {
	switch {
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		pg.once.Do(func() {
			p.sw.log.Warn("guests cannot ping the outside: this host gives ping sockets to no group of ours "+
				"(see sysctl net.ipv4.ping_group_range)", logx.Err, err)
		})
		p.unreachable(frame.CodeProhibited, ip)
	case errors.Is(err, syscall.ENETUNREACH):
		p.unreachable(frame.CodeNet, ip)
	case errors.Is(err, syscall.EHOSTUNREACH):
		p.unreachable(frame.CodeHost, ip)
	default:
		p.sw.log.Debug("sending a ping for a guest", logx.VM, p.name, logx.Err, err)
	}
}

// replies passes answers back until none came for a while.
func (pg *pinger) replies(f *pingFlow) {
	defer pg.end(f)
	p := f.key.p
	for {
		bp := copyPool.Get().(*[]byte)
		n, err := f.conn.Read(*bp)
		if err == nil && n >= frame.ICMPSize && (*bp)[0] == frame.ICMPEchoReply {
			m, _ := frame.ParseICMP((*bp)[:n])
			// The kernel put an identifier of its own in.
			m.Rest = uint32(f.key.id)<<16 | m.Rest&0xffff
			p.sendIP(frame.IPv4Size+n, func(b []byte) []byte {
				return frame.AppendICMP(b, f.key.dst, p.ip, m)
			})
			p.c.received.Add(uint64(len(m.Payload)))
		}
		copyPool.Put(bp)
		if err != nil {
			return
		}
	}
}

func (pg *pinger) end(f *pingFlow) {
	pg.mu.Lock()
	if pg.flows[f.key] == f {
		delete(pg.flows, f.key)
	}
	pg.mu.Unlock()
	f.abort()
	f.key.p.untrack(f)
	pg.open.Add(-1)
	f.key.p.pinging.Add(-1)
}

func dialPing(a netip.Addr) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMP)
	if err != nil {
		return nil, fmt.Errorf("opening a ping socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: a.As4()}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("opening a ping socket to %s: %w", a, err)
	}
	f := os.NewFile(uintptr(fd), "ping")
	defer f.Close()
	return net.FileConn(f)
}

package netsw

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hostConn is a TCP connection of the host's. It is dialled and closed some
// hundred times a second by a guest that builds, and net.Dialer does much that
// is of no use here: names, families, a race of addresses.
type hostConn struct {
	f   *os.File // in the runtime's poller
	raw syscall.RawConn
}

// The host's keepalive, as package net sets it: it finds a dead outside.
const (
	keepIdle  = 15 // seconds of silence until it is asked
	keepEvery = 15 // seconds between questions
	keepTries = 9
)

// dialTCP connects to an IPv4 address. The error is the system's own, or the
// context's.
func dialTCP(ctx context.Context, to netip.AddrPort) (*hostConn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	for _, o := range [...]struct{ level, name, value int }{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepIdle},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepEvery},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepTries},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			unix.Close(fd)
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	if err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	h := &hostConn{f: os.NewFile(uintptr(fd), "tcp")}
	var rerr error
	if h.raw, rerr = h.f.SyscallConn(); rerr != nil {
		h.f.Close()
		return nil, rerr
	}
	if err != nil { // under way; to the host itself it stands at once
		if err := h.connected(ctx); err != nil {
			h.f.Close()
			return nil, err
		}
	}
	return h, nil
}

// connected waits until the connection stands.
func (h *hostConn) connected(ctx context.Context) error {
	var state error
	look := func(fd uintptr) bool {
		p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(p[:], 0); n == 0 || err == unix.EINTR {
			return false
		}
		e, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			state = os.NewSyscallError("getsockopt", err)
		case e != 0:
			state = os.NewSyscallError("connect", syscall.Errno(e))
		}
		return true
	}
	stop := context.AfterFunc(ctx, func() { _ = h.f.SetWriteDeadline(time.Unix(1, 0)) })
	err := h.raw.Write(look)
	if !stop() {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	return state
}

// failed waits, once the outside has ended its stream, until the connection fails
// (a reset, no answer to keepalive), or until nothing more can come of it: it is
// closed, or both ends have ended and been acknowledged.
func (h *hostConn) failed() bool {
	failed := false
	_ = h.raw.Read(func(fd uintptr) bool {
		p := [1]unix.PollFd{{Fd: int32(fd)}}
		for {
			if _, err := unix.Poll(p[:], 0); err != unix.EINTR {
				break
			}
		}
		failed = p[0].Revents&unix.POLLERR != 0
		return p[0].Revents != 0
	})
	return failed
}

// own tells a connection to the host itself: from an address to the same one.
func (h *hostConn) own() bool {
	var own bool
	_ = h.raw.Control(func(fd uintptr) {
		a, err := unix.Getsockname(int(fd))
		b, err2 := unix.Getpeername(int(fd))
		x, ok := a.(*unix.SockaddrInet4)
		y, ok2 := b.(*unix.SockaddrInet4)
		// What cannot be told is not let through either.
		own = err != nil || err2 != nil || !ok || !ok2 || x.Addr == y.Addr
	})
	return own
}

// endWrite passes on a proper end.
func (h *hostConn) endWrite() error {
	var err error
	if cerr := h.raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) }); cerr != nil {
		return cerr
	}
	return err
}

// reset closes with a reset instead of a proper end.
func (h *hostConn) reset() {
	_ = h.raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	h.f.Close()
}

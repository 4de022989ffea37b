package netsw

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// tcpFlow is a connection of a guest (ep) joined to one of the host (conn).
type tcpFlow struct {
	p      *Port
	cancel context.CancelFunc // of the dial
	wq     waiter.Queue

	mu      sync.Mutex
	conn    *net.TCPConn
	ep      tcpip.Endpoint // nil until the guest's handshake is over
	aborted bool

	share int64 // of memory each way; see share
}

// attach gives the flow its two ends; false when it was aborted meanwhile,
// and then both are closed.
func (f *tcpFlow) attach(conn *net.TCPConn, ep tcpip.Endpoint) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.aborted {
		ep.Abort()
		reset(conn)
		return false
	}
	f.conn, f.ep = conn, ep
	return true
}

// abort resets both ends.
func (f *tcpFlow) abort() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.aborted = true
	f.cancel()
	if f.ep != nil {
		// In this order: an aborted endpoint looks like an ended stream to
		// outward, which would pass on a proper end first.
		reset(f.conn)
		f.ep.Abort()
	}
}

// reset closes with a reset instead of a proper end.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	c.Close()
}

// pump moves bytes both ways until both have ended. An end of one direction
// is passed on and leaves the other open; an error or reset of either side
// resets the other. A slow reader on one side stops the reading from the
// other, so nothing piles up here. A connection that is silent stays for as
// long as both ends keep it; the host's keepalive finds a dead outside, and a
// guest that goes away ends its flows by its port.
func (f *tcpFlow) pump() {
	f.p.c.flows.Add(1)
	f.p.c.openFlows.Add(1)
	defer f.p.c.openFlows.Add(-1)
	f.share = share(f.p.sw.openFlows.Add(1))
	defer f.p.sw.openFlows.Add(-1)
	restrict(f.ep, f.share)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f.inward(); err != nil {
			f.abort()
		}
	}()
	if err := f.outward(done); err != nil {
		f.abort()
	}
	<-done
	f.ep.Close()
	f.conn.Close()
}

var errReset = errors.New("reset")

// outward copies from the guest to the outside, then watches for the guest's
// reset until the other direction is done.
func (f *tcpFlow) outward(done <-chan struct{}) error {
	entry, ch := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventErr | waiter.EventHUp)
	f.wq.EventRegister(&entry)
	defer f.wq.EventUnregister(&entry)
	w, err := newTryWriter(f.conn)
	if err != nil {
		return err
	}
	for {
		w.err = nil
		res, terr := f.ep.Read(w, tcpip.ReadOptions{})
		f.p.c.sent.Add(uint64(res.Count))
		switch {
		case errors.Is(w.err, syscall.EAGAIN):
			if err := w.wait(); err != nil {
				return err
			}
			continue
		case w.err != nil:
			return w.err
		}
		switch terr.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			<-ch
		case *tcpip.ErrClosedForReceive:
			if err := f.conn.CloseWrite(); err != nil {
				return err
			}
			for {
				select {
				case <-done:
					return nil
				case <-ch:
					if tcp.EndpointState(f.ep.State()) == tcp.StateError {
						return errReset
					}
				}
			}
		default:
			return errReset
		}
	}
}

// segmentSize is the payload of a full segment at our MTU, with timestamps: a
// buffer of whole segments makes no small ones.
const segmentSize = MTU - 20 - 32

var copyPool = sync.Pool{New: func() any { b := make([]byte, 2*segmentSize); return &b }}

// smallPool is for connections of which there are many: each may keep its
// buffer for as long as its guest does not read.
var smallPool = sync.Pool{New: func() any { b := make([]byte, leastBytes); return &b }}

// inward copies from the outside to the guest.
func (f *tcpFlow) inward() error {
	entry, ch := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	f.wq.EventRegister(&entry)
	defer f.wq.EventUnregister(&entry)
	pool := &copyPool
	if f.share != 0 && f.share < goodBytes {
		pool = &smallPool
	}
	r, err := newTryReader(f.conn, pool)
	if err != nil {
		return err
	}
	defer r.release()
	var data bytes.Reader
	for {
		n, err := r.read()
		if err != nil {
			return err
		}
		if n == 0 {
			if terr := f.ep.Shutdown(tcpip.ShutdownWrite); terr != nil {
				return errReset
			}
			return nil
		}
		f.p.c.received.Add(uint64(n))
		data.Reset((*r.buf)[:n])
		for data.Len() > 0 {
			// Atomic: what the endpoint takes from data, it keeps.
			_, terr := f.ep.Write(&data, tcpip.WriteOptions{Atomic: true})
			switch terr.(type) {
			case nil:
			case *tcpip.ErrWouldBlock:
				<-ch
			default:
				return errReset
			}
		}
		r.release()
	}
}

// tryWriter writes to a socket without ever waiting in Write, because the
// stack holds the connection's lock while it reads into it.
type tryWriter struct {
	raw syscall.RawConn
	try func(uintptr) bool
	b   []byte
	n   int
	err error
}

func newTryWriter(c syscall.Conn) (*tryWriter, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	w := &tryWriter{raw: raw}
	w.try = func(fd uintptr) bool {
		for {
			w.n, w.err = syscall.Write(int(fd), w.b)
			if w.err != syscall.EINTR {
				return true
			}
		}
	}
	return w, nil
}

func (w *tryWriter) Write(b []byte) (int, error) {
	w.b = b
	err := w.raw.Write(w.try)
	w.b = nil
	if err != nil {
		w.err = err
	}
	n := max(w.n, 0)
	w.n = 0
	if w.err == nil && n < len(b) {
		w.err = syscall.EAGAIN
	}
	return n, w.err
}

// wait returns when the socket can be written to.
func (w *tryWriter) wait() error {
	return w.raw.Write(func(fd uintptr) bool {
		// Looked at here, after the poller has forgotten earlier events: else one
		// between Write and now would be lost.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(p, 0)
		return n > 0 || (err != nil && err != unix.EINTR)
	})
}

// tryReader reads from a socket and holds a buffer only while there is data.
type tryReader struct {
	raw  syscall.RawConn
	pool *sync.Pool
	buf  *[]byte
	try  func(uintptr) bool
	n    int
	err  error
}

func newTryReader(c syscall.Conn, pool *sync.Pool) (*tryReader, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	r := &tryReader{raw: raw, pool: pool}
	r.try = func(fd uintptr) bool {
		if r.buf == nil {
			r.buf = r.pool.Get().(*[]byte)
		}
		for {
			r.n, r.err = syscall.Read(int(fd), *r.buf)
			if r.err != syscall.EINTR {
				break
			}
		}
		if r.err == syscall.EAGAIN {
			r.release()
			return false
		}
		return true
	}
	return r, nil
}

// read returns how many bytes are in buf; 0 is the end of the stream (or an
// empty datagram). The caller releases the buffer.
func (r *tryReader) read() (int, error) {
	r.n, r.err = 0, nil
	if err := r.raw.Read(r.try); err != nil {
		return 0, err
	}
	return max(r.n, 0), r.err
}

func (r *tryReader) release() {
	if r.buf != nil {
		r.pool.Put(r.buf)
		r.buf = nil
	}
}

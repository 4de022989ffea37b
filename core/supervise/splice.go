package supervise

import (
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// copyBuffers are the buffers of all copies; the garbage collector takes them
// back when nothing is copied.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// splice joins a client's connection to a stream of the agent until both
// directions have ended, each by itself.
func splice(c *net.UnixConn, s *agentStream) {
	up := make(chan struct{})
	go func() {
		defer close(up)
		switch gone, err := copyFromSocket(s, c); {
		case gone:
			s.SetReadDeadline(time.Unix(1, 0)) // wakes copyOut
			return
		case err != nil:
			return // the guest takes no more; what it still says is delivered
		}
		s.CloseWrite()
		go func() {
			if hungUp(c) {
				s.SetReadDeadline(time.Unix(1, 0)) // wakes copyOut
			}
		}()
	}()
	_, err := copyOut(c, s.Stream)
	if err != nil {
		// The client is gone: end its direction too, let the guest's output go.
		c.CloseRead()
		s.Close()
	} else {
		c.CloseWrite()
	}
	<-up
	s.Close()
}

// hungUp blocks until the peer has closed c altogether, which a half-close is
// not; false when c was closed on this side.
func hungUp(c *net.UnixConn) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	hup := false
	rc.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		_, err := unix.Poll(fds, 0)
		hup = err == nil && fds[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
		return hup
	})
	return hup
}

// copyOut copies from the guest to the client.
func copyOut(c *net.UnixConn, r io.Reader) (int64, error) {
	buf := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buf)
	return io.CopyBuffer(onlyWriter{c}, onlyReader{r}, *buf)
}

// onlyWriter and onlyReader hide the shortcuts that would bring buffers of
// their own.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

// copyFromSocket copies c to w until EOF. It holds a buffer only while there
// is something to read, because most connections idle in this direction. gone
// says that c itself failed: a client that closes its socket before it has read
// all of it, or is killed so, is told of by ECONNRESET and not by EOF.
func copyFromSocket(w io.Writer, c *net.UnixConn) (gone bool, err error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return true, err
	}
	for {
		var buf *[]byte
		var n int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			buf = copyBuffers.Get().(*[]byte)
			for {
				n, rerr = unix.Read(int(fd), *buf)
				if rerr != unix.EINTR {
					break
				}
			}
			if rerr == unix.EAGAIN {
				copyBuffers.Put(buf)
				buf = nil
				return false
			}
			return true
		})
		if err != nil {
			if buf != nil {
				copyBuffers.Put(buf)
			}
			return true, err
		}
		if rerr == nil && n > 0 {
			_, rerr = w.Write((*buf)[:n])
			copyBuffers.Put(buf)
			if rerr != nil {
				return false, rerr
			}
			continue
		}
		copyBuffers.Put(buf)
		return rerr != nil, rerr // nil at EOF
	}
}

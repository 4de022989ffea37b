package exec

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// buffers hold bytes on their way; an idle stream holds none.
// With yamux's header of 12 bytes, one is eight writes of a virtio-serial port.
var buffers = sync.Pool{New: func() any { b := make([]byte, pipeSize-12); return &b }}

// A stream on which something was sent less than busy ago is busy; small
// pieces on it wait for nap.
const (
	busy = 2 * time.Millisecond
	nap  = 300 * time.Microsecond
)

// ttyDrain is how long the rest of a terminal's output may take after its
// program's end, when something still holds it open.
const ttyDrain = 2 * time.Second

// readerGrace tells a reader that has had enough from a host that is gone: in
// the second case the end of the exec stream follows within it.
const readerGrace = 100 * time.Millisecond

// endGrace is how long the end of an output waits for the end of its program,
// which nearly always follows at once: the host is then told both together.
const endGrace = 5 * time.Millisecond

// output moves what the program writes to the host.
type output struct {
	p    *process
	f    *os.File // our end of the pipe, or the terminal's master
	rc   syscall.RawConn
	conn net.Conn // nil = nobody asked for it
	tty  bool
}

func newOutput(p *process, f *os.File, conn net.Conn) (*output, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &output{p: p, f: f, rc: rc, conn: conn}, nil
}

// stop makes the pump go over to what is left.
func (o *output) stop() { o.f.SetReadDeadline(time.Unix(1, 0)) }

// pump copies until the program's end, then what it has written until then. It
// closes the stream of a program that writes no more and goes on; that of one
// that has ended is closed by serve. A child that lives on may still write: that
// is read and dropped, for it would die of a closed pipe.
func (o *output) pump() {
	defer o.f.Close()
	err := o.copy(-1)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = o.rest()
	case o.conn != nil && !o.endsToo():
		o.conn.Close()
	}
	if o.p.filled.Add(-1) == 0 {
		close(o.p.drained)
	}
	if err == nil || errors.Is(err, errHost) {
		o.discard()
	}
}

// endsToo tells whether the program has ended, or does within endGrace.
func (o *output) endsToo() bool {
	t := time.NewTimer(endGrace)
	defer t.Stop()
	select {
	case <-o.p.over:
		return true
	case <-t.C:
		return false
	}
}

// errHost is a failure of the stream, not of the program's side.
var errHost = errors.New("exec: the host takes no more")

// copy moves up to max bytes (-1 = no limit) until the end of either side.
// io.EOF is the end of the program's.
func (o *output) copy(max int) error {
	var sent time.Time
	for max != 0 {
		b, n, err := o.next(max, max < 0)
		if b == nil {
			return err
		}
		if max < 0 && n < len(*b)/2 && time.Since(sent) < busy {
			n = o.gather(*b, n)
		}
		sent = time.Now()
		var werr error
		if o.conn != nil && n > 0 {
			_, werr = o.conn.Write((*b)[:n])
		}
		buffers.Put(b)
		if werr != nil {
			return errHost
		}
		if max > 0 {
			max -= n
		}
	}
	return nil
}

// gather lets a program that writes much in small pieces write some more
// before they are sent: on one processor the reader would else wake for each.
func (o *output) gather(b []byte, n int) int {
	time.Sleep(nap)
	o.rc.Control(func(fd uintptr) {
		for n < len(b) {
			m, err := syscall.Read(int(fd), b[n:])
			if err == syscall.EINTR {
				continue
			}
			if err != nil || m <= 0 {
				return // the next read meets it again
			}
			n += m
		}
	})
	return n
}

// rest moves what the pipe holds now. Nil means that others hold it open.
func (o *output) rest() error {
	if o.tty {
		// The kernel hangs the terminal up with its session leader, and says
		// so after the last byte.
		o.f.SetReadDeadline(time.Now().Add(ttyDrain))
		err := o.copy(-1)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		return err
	}
	o.f.SetReadDeadline(time.Time{})
	n := 0
	if err := o.rc.Control(func(fd uintptr) {
		if v, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = v
		}
	}); err != nil {
		return err
	}
	return o.copy(n)
}

// next waits for bytes (or does not, unless wait) and returns them in a pooled
// buffer that the caller gives back; nil with the error, or with nil when
// there are none now.
func (o *output) next(max int, wait bool) (*[]byte, int, error) {
	var b *[]byte
	var n int
	var rerr error
	err := o.rc.Read(func(fd uintptr) bool {
		b = buffers.Get().(*[]byte)
		into := *b
		if max > 0 && max < len(into) {
			into = into[:max]
		}
		for {
			n, rerr = syscall.Read(int(fd), into)
			if rerr != syscall.EINTR {
				break
			}
		}
		if rerr != nil || n == 0 {
			buffers.Put(b)
			b = nil
		}
		return !wait || rerr != syscall.EAGAIN
	})
	switch {
	case err != nil:
		return nil, 0, err
	case rerr == syscall.EAGAIN:
		return nil, 0, nil
	case rerr == syscall.EIO && o.tty:
		return nil, 0, io.EOF
	case rerr != nil:
		return nil, 0, rerr
	case n == 0:
		return nil, 0, io.EOF
	}
	return b, n, nil
}

// discard reads until nobody holds the other end.
func (o *output) discard() {
	o.f.SetReadDeadline(time.Time{})
	for {
		b, _, err := o.next(0, true)
		if b == nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				// The program ended meanwhile; its children may not have.
				o.f.SetReadDeadline(time.Time{})
				continue
			}
			return
		}
		buffers.Put(b)
	}
}

// watch learns that nobody reads this stream any more and lets the program
// find its pipe broken, unless the whole host is gone.
func (o *output) watch() {
	io.Copy(io.Discard, o.conn)
	if o.tty || o.p.req.Detach {
		return
	}
	t := time.NewTimer(readerGrace)
	defer t.Stop()
	select {
	case <-o.p.lost:
	case <-o.p.finished:
	case <-t.C:
		o.conn.SetWriteDeadline(time.Unix(1, 0))
		o.f.Close()
	}
}

func isEOF(err error) bool { return errors.Is(err, io.EOF) }

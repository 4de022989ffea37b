// Package netgen is the network end of a guest without a guest: it speaks
// QEMU's stream framing (4 bytes of length, then an Ethernet frame) over a unix
// socket, and just enough ARP, IPv4, TCP and UDP to load whatever is at the
// other end: the switch, or one of the programs that it is measured beside.
//
// It is made to cost little, so that what is measured is the other end: the
// payload is zeros whose checksum is known, headers are written into frames
// that lie ready, and many frames go out in one call. It keeps nothing of what
// it receives, but looks at the checksums of the first segments of each
// transfer: a guest would.
//
// It is no TCP for anything else: it takes segments in order only, and sends
// again from the last acknowledged byte when something is lost, which on a
// socket pair happens only where the other end drops. Result counts that.
package netgen

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/netsw/frame"
)

// Config is how a guest at this end of the link would be set up.
type Config struct {
	MAC     frame.MAC
	Addr    netip.Addr
	Gateway netip.Addr
	// Host is the address that means the host's loopback.
	Host netip.Addr
	// MTU of the guest's interface.
	MTU int
}

// Link is one end of a unix stream socket. Its methods are for one goroutine.
type Link struct {
	cfg    Config
	fd     int // blocking
	src    frame.IP
	dst    frame.IP
	gwMAC  frame.MAC
	buf    []byte // read, from at to end
	at     int
	end    int
	out    []byte // frames to be written with flush
	port   uint16 // last local port used
	silent time.Duration
}

// patience is how long nothing at all may come before a measurement fails.
const patience = 10 * time.Second

// tick is how long a read waits before it says errTick, so that what may have
// been lost is sent again.
const tick = 500 * time.Millisecond

var errTick = errors.New("nothing came")

// Open takes fd over, a connected stream socket, and finds the gateway's MAC.
func Open(fd int, cfg Config) (*Link, error) {
	l := &Link{cfg: cfg, fd: fd, src: cfg.Addr.As4(), dst: cfg.Host.As4(), buf: make([]byte, 1<<20), port: 20000}
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, fmt.Errorf("using the link: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	t := unix.NsecToTimeval(tick.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t); err != nil {
		return nil, fmt.Errorf("using the link: %w", err)
	}
	return l, l.resolve()
}

// Gateway is the gateway's address with a port.
func (l *Link) Gateway(port uint16) netip.AddrPort { return netip.AddrPortFrom(l.cfg.Gateway, port) }

// Close closes the link.
func (l *Link) Close() { unix.Close(l.fd) }

// resolve asks who has the gateway's address.
func (l *Link) resolve() error {
	ask := func() error {
		l.begin(frame.Broadcast, frame.TypeARP)
		l.out = frame.AppendARP(l.out, frame.ARP{Op: frame.ARPRequest, SrcMAC: l.cfg.MAC, SrcIP: l.src, TargetIP: l.cfg.Gateway.As4()})
		l.finish(0)
		return l.flush()
	}
	if err := ask(); err != nil {
		return err
	}
	for {
		f, err := l.next()
		if errors.Is(err, errTick) {
			err = ask()
		}
		if err != nil {
			return fmt.Errorf("resolving the gateway %s: %w", l.cfg.Gateway, err)
		}
		if e, ok := frame.ParseEth(f); ok && e.Type == frame.TypeARP {
			if a, ok := frame.ParseARP(e.Payload); ok && a.Op == frame.ARPReply && a.SrcIP == frame.IP(l.cfg.Gateway.As4()) {
				l.gwMAC = a.SrcMAC
				return nil
			}
		}
	}
}

// begin starts a frame in out.
func (l *Link) begin(to frame.MAC, typ uint16) {
	l.out = append(l.out, 0, 0, 0, 0)
	l.out = frame.AppendEth(l.out, to, l.cfg.MAC, typ)
}

// finish writes the length of the frame that starts at an offset of out.
func (l *Link) finish(at int) {
	binary.BigEndian.PutUint32(l.out[at:], uint32(len(l.out)-at-frame.LenSize))
}

func (l *Link) flush() error {
	err := l.write(l.out)
	l.out = l.out[:0]
	return err
}

func (l *Link) write(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(l.fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("writing to the link: %w", err)
		}
		b = b[n:]
	}
	return nil
}

// more says whether a whole frame is there already.
func (l *Link) more() bool {
	have := l.end - l.at
	return have >= frame.LenSize && have >= frame.LenSize+int(binary.BigEndian.Uint32(l.buf[l.at:]))
}

// next is the next frame, valid until the call after; ARP requests about this
// guest are answered on the way. errTick when nothing came for a while.
func (l *Link) next() ([]byte, error) {
	for {
		for !l.more() {
			if err := l.fill(); err != nil {
				return nil, err
			}
		}
		n := int(binary.BigEndian.Uint32(l.buf[l.at:]))
		f := l.buf[l.at+frame.LenSize:][:n]
		l.at += frame.LenSize + n
		if len(f) > frame.EthSize && f[12] == frame.TypeARP>>8 && f[13] == frame.TypeARP&0xff {
			if answered, err := l.answerARP(f); err != nil {
				return nil, err
			} else if answered {
				continue
			}
		}
		return f, nil
	}
}

func (l *Link) fill() error {
	if l.at > 0 {
		l.end = copy(l.buf, l.buf[l.at:l.end])
		l.at = 0
	}
	for {
		n, err := unix.Read(l.fd, l.buf[l.end:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if l.silent += tick; l.silent >= patience {
				l.silent = 0 // of the next measurement
				return fmt.Errorf("nothing came over the link for %s", patience)
			}
			return errTick
		case err != nil:
			return fmt.Errorf("reading from the link: %w", err)
		case n == 0:
			return errors.New("the other end closed the link")
		}
		l.silent = 0
		l.end += n
		if l.end >= frame.LenSize {
			if n := binary.BigEndian.Uint32(l.buf); n > frame.Max {
				return fmt.Errorf("the other end sent a length that no frame has: %d", n)
			}
		}
		return nil
	}
}

func (l *Link) answerARP(f []byte) (bool, error) {
	a, ok := frame.ParseARP(f[frame.EthSize:])
	if !ok || a.Op != frame.ARPRequest || a.TargetIP != l.src {
		return false, nil
	}
	b := frame.AppendEth([]byte{0, 0, 0, frame.EthSize + frame.ARPSize}, a.SrcMAC, l.cfg.MAC, frame.TypeARP)
	b = frame.AppendARP(b, frame.ARP{Op: frame.ARPReply, SrcMAC: l.cfg.MAC, SrcIP: l.src, DstMAC: a.SrcMAC, TargetIP: a.SrcIP})
	return true, l.write(b)
}

// nextPort is a local port that was not used for long.
func (l *Link) nextPort() uint16 {
	if l.port++; l.port >= 60000 {
		l.port = 20000
	}
	return l.port
}

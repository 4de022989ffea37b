package guestwire

import (
	"encoding/binary"
	"io"
)

// JoinFrames returns conn with yamux's frames written together where that
// costs nobody anything, because on a virtio-serial port every write is an exit
// of the guest and an interrupt after it. A data header goes with its body, or
// with the beginning of a long one. The frame that opens a stream goes with the
// next frame: who opens a stream here says at once what it is. (The one that
// accepts a stream does not wait: it widens a window that may be used up.) Only
// one goroutine may write, as yamux's does.
func JoinFrames(conn io.ReadWriteCloser) io.ReadWriteCloser {
	return &joined{ReadWriteCloser: conn}
}

const (
	muxHeader = 12             // bytes: version, type, flags, stream, length
	joinMax   = 32 << 10       // bytes written at once at most: one buffer of the port
	heldMax   = 16 * muxHeader // bytes of frames that wait for the next one
)

type joined struct {
	io.ReadWriteCloser
	buf  []byte // frames that wait, and a header that waits for its body
	body bool   // there is such a header
}

// Write implements io.Writer. What is kept counts as written: its error is
// that of the next write.
func (j *joined) Write(p []byte) (int, error) {
	if j.body {
		j.body = false
		return j.send(p)
	}
	if len(p) != muxHeader || p[0] != 0 {
		return j.send(p)
	}
	typ, flags := p[1], binary.BigEndian.Uint16(p[2:])
	const data, window, syn = 0, 1, 1
	switch {
	case typ == data && binary.BigEndian.Uint32(p[8:]) > 0:
		j.body = true
	case typ == window && flags == syn && len(j.buf) < heldMax:
	default:
		return j.send(p)
	}
	j.buf = append(j.buf, p...)
	return len(p), nil
}

// send writes what waits, then p, and tells how much of p went. Of p only what
// goes into the first buffer of the port is copied.
func (j *joined) send(p []byte) (int, error) {
	if len(j.buf) == 0 {
		return j.ReadWriteCloser.Write(p)
	}
	before := len(j.buf)
	head := min(len(p), joinMax-before)
	j.buf = append(j.buf, p[:head]...)
	n, err := j.ReadWriteCloser.Write(j.buf)
	j.buf = j.buf[:0]
	if n = max(n-before, 0); err != nil || head == len(p) {
		return n, err
	}
	m, err := j.ReadWriteCloser.Write(p[head:])
	return n + m, err
}

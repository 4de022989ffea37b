package guestwire

import (
	"encoding/binary"
	"io"
)

// JoinFrames returns conn with each yamux data header written together with
// its body, or with the beginning of a long one. yamux writes them apart, and
// on a virtio-serial port every write is an exit of the guest and an interrupt
// after it. Only one goroutine may write, as yamux's does.
func JoinFrames(conn io.ReadWriteCloser) io.ReadWriteCloser {
	return &joined{ReadWriteCloser: conn}
}

const (
	muxHeader = 12       // bytes: version, type, flags, stream, length
	joinMax   = 32 << 10 // bytes written at once at most: one buffer of the port
)

type joined struct {
	io.ReadWriteCloser
	buf []byte // a header that waits for its body
}

// Write implements io.Writer. A kept header counts as written: its error is
// that of the body.
func (j *joined) Write(p []byte) (int, error) {
	if len(j.buf) == 0 {
		if len(p) == muxHeader && p[0] == 0 && p[1] == 0 && binary.BigEndian.Uint32(p[8:]) > 0 {
			j.buf = append(j.buf, p...)
			return len(p), nil
		}
		return j.ReadWriteCloser.Write(p)
	}
	// Only what goes into the first buffer of the port is copied.
	head := min(len(p), joinMax-muxHeader)
	j.buf = append(j.buf, p[:head]...)
	n, err := j.ReadWriteCloser.Write(j.buf)
	j.buf = j.buf[:0]
	if n = max(n-muxHeader, 0); err != nil || head == len(p) {
		return n, err
	}
	m, err := j.ReadWriteCloser.Write(p[head:])
	return n + m, err
}

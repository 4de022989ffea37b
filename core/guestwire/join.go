package guestwire

import (
	"encoding/binary"
	"io"
)

// JoinFrames returns conn with each yamux data header written together with
// its body. yamux writes them apart, and on a virtio-serial port every write
// is an exit of the guest. Only one goroutine may write, as yamux's does.
func JoinFrames(conn io.ReadWriteCloser) io.ReadWriteCloser {
	return &joined{ReadWriteCloser: conn}
}

const muxHeader = 12 // bytes: version, type, flags, stream, length

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
	j.buf = append(j.buf, p...)
	n, err := j.ReadWriteCloser.Write(j.buf)
	j.buf = j.buf[:0]
	if cap(j.buf) > 512<<10 {
		j.buf = nil
	}
	return max(n-muxHeader, 0), err
}

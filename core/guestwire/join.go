package guestwire

import (
	"encoding/binary"
	"io"
	"sync"
)

// JoinFrames returns conn with yamux's frames written together where that
// costs nobody anything, because on a virtio-serial port every write is an exit
// of the guest and an interrupt after it. A data header goes with its body, or
// with the beginning of a long one. The frame that opens a stream goes with the
// next frame: who opens a stream here says at once what it is. (The one that
// accepts a stream does not wait, unless HoldAccepts says so: it widens a window
// that may be used up.) Only one goroutine may write, as yamux's does.
func JoinFrames(conn io.ReadWriteCloser) *Frames {
	return &Frames{ReadWriteCloser: conn}
}

const (
	muxHeader = 12             // bytes: version, type, flags, stream, length
	joinMax   = 32 << 10       // bytes written at once at most: one buffer of the port
	heldMax   = 16 * muxHeader // bytes of frames that wait for the next one
)

// OpenWindow is how many bytes the opener of a stream may send before it has
// the frame that accepts the stream; yamux fixes it.
const OpenWindow = 256 << 10

// Frames is a connection whose frames are joined. Its methods other than
// io.ReadWriteCloser's may be called by any goroutine, and on nil, where they
// do nothing.
type Frames struct {
	io.ReadWriteCloser

	mu      sync.Mutex
	buf     []byte // frames that wait, and a header that waits for its body
	body    bool   // there is such a header
	accepts bool   // frames that accept a stream wait too
	holds   int    // Hold without Release
	err     error  // of a write that nobody could be told of
}

// HoldAccepts lets the frame that accepts a stream wait for the next one, too.
// Whoever reads more than a part of OpenWindow of a stream before something is
// sent must Flush, or its sender may wait for ever.
func (f *Frames) HoldAccepts() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.accepts = true
}

// Hold lets all that is written wait for Release, as far as it fits into one
// write. What is written until then must not take long.
func (f *Frames) Hold() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holds++
}

// Release undoes Hold and writes what waits.
func (f *Frames) Release() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.holds--; f.holds == 0 {
		f.flush()
	}
}

// Flush writes what waits. An error is that of the next write.
func (f *Frames) Flush() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flush()
}

func (f *Frames) flush() {
	if len(f.buf) == 0 || f.err != nil {
		return
	}
	_, f.err = f.ReadWriteCloser.Write(f.buf)
	f.buf = f.buf[:0]
}

// Write implements io.Writer. What is kept counts as written: its error is
// that of the next write.
func (f *Frames) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return 0, f.err
	}
	if !f.waits(p) && (f.holds == 0 || len(f.buf)+len(p) > joinMax) {
		return f.send(p)
	}
	f.buf = append(f.buf, p...)
	return len(p), nil
}

// waits tells whether p goes with what comes after it.
func (f *Frames) waits(p []byte) bool {
	if f.body {
		f.body = false
		return false
	}
	if len(p) != muxHeader || p[0] != 0 {
		return false
	}
	const data, window, syn, ack = 0, 1, 1, 2
	switch flags := binary.BigEndian.Uint16(p[2:]); p[1] {
	case data:
		f.body = binary.BigEndian.Uint32(p[8:]) > 0
		return f.body
	case window:
		return (flags == syn || flags == ack && f.accepts) && len(f.buf) < heldMax
	}
	return false
}

// send writes what waits, then p, and tells how much of p went. Of p only what
// goes into the first buffer of the port is copied.
func (f *Frames) send(p []byte) (int, error) {
	if len(f.buf) == 0 {
		return f.ReadWriteCloser.Write(p)
	}
	before := len(f.buf)
	head := max(0, min(len(p), joinMax-before))
	f.buf = append(f.buf, p[:head]...)
	n, err := f.ReadWriteCloser.Write(f.buf)
	f.buf = f.buf[:0]
	if n = max(n-before, 0); err != nil || head == len(p) {
		return n, err
	}
	m, err := f.ReadWriteCloser.Write(p[head:])
	return n + m, err
}

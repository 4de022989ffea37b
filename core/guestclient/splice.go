package guestclient

import (
	"io"
	"net"
	"sync"
)

// bufSize is one copy's buffer, in bytes.
const bufSize = 64 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufSize); return &b }}

// copyBuffered is io.Copy through a pooled buffer of bufSize.
func copyBuffered(dst io.Writer, src io.Reader) (int64, error) {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	// Hide WriterTo and ReaderFrom: yamux streams have neither, and a bare
	// file's would use a buffer of its own.
	return io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, *b)
}

// CloseWrite ends what is written to c and leaves what is read. A connection
// without CloseWrite is taken for a yamux stream, whose Close does just that.
func CloseWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

func withCloseWrite(c net.Conn) net.Conn {
	if _, ok := c.(interface{ CloseWrite() error }); ok {
		return c
	}
	return halfCloser{c}
}

type halfCloser struct{ net.Conn }

func (h halfCloser) CloseWrite() error { return h.Conn.Close() }

// Splice copies both ways between a and b, passes on the end of each
// direction as it comes, and closes both when both directions have ended.
// It returns the bytes that went from a to b and from b to a.
func Splice(a, b net.Conn) (ab, ba int64) {
	defer a.Close()
	defer b.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		ab, _ = copyBuffered(b, a)
		CloseWrite(b)
	})
	ba, _ = copyBuffered(a, b)
	CloseWrite(a)
	wg.Wait()
	return ab, ba
}

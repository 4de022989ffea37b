package agent

import (
	"io"
	"net"
	"os"
	"time"
)

// addr names an end of the channel.
type addr string

func (a addr) Network() string { return "vk" }
func (a addr) String() string  { return string(a) }

// pairConn is the connection of a oneConn.
type pairConn struct{ o *oneConn }

func (c *pairConn) Read(p []byte) (int, error)  { return c.o.r.Read(p) }
func (c *pairConn) Write(p []byte) (int, error) { return c.o.w.Write(p) }

func (c *pairConn) Close() error {
	// yamux waits for its reader before it is closed.
	if rc, ok := c.o.r.(io.Closer); ok {
		rc.Close()
	}
	return c.o.Close()
}

func (c *pairConn) LocalAddr() net.Addr                { return addr("stdio") }
func (c *pairConn) RemoteAddr() net.Addr               { return addr("stdio") }
func (c *pairConn) SetDeadline(t time.Time) error      { return nil }
func (c *pairConn) SetReadDeadline(t time.Time) error  { return nil }
func (c *pairConn) SetWriteDeadline(t time.Time) error { return nil }

// fileConn is a device or socket of the runtime's poller as a net.Conn. first
// are bytes that were read from it before.
type fileConn struct {
	*os.File
	first  []byte
	closed func() // called once closed; may be nil
}

func (c *fileConn) Read(p []byte) (int, error) {
	if len(c.first) > 0 {
		n := copy(p, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.File.Read(p)
}

func (c *fileConn) Close() error {
	err := c.File.Close()
	if err == nil && c.closed != nil {
		c.closed()
	}
	return err
}

func (c *fileConn) LocalAddr() net.Addr  { return addr(c.Name()) }
func (c *fileConn) RemoteAddr() net.Addr { return addr("host") }

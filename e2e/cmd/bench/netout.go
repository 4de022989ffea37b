package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"virtkit/e2e/netgen"
)

// outside is what a guest talks to: servers on the host's loopback that cost
// as little as can be, so that the switch is what is measured. Each runs on
// blocking sockets of its own.
type outside struct {
	source int   // port that sends without end
	sink   int   // port that takes everything
	answer []int // ports that answer one byte to one byte, and end
	dns    int   // UDP port that answers every question with an address
	taken  atomic.Int64
	closes []func()
}

func newOutside() (*outside, error) {
	o := &outside{}
	zero, err := os.CreateTemp("", "vk-bench-zero-")
	if err != nil {
		return nil, err
	}
	os.Remove(zero.Name())
	if err := zero.Truncate(sendPiece); err != nil {
		return nil, err
	}
	if _, err := zero.Write(make([]byte, sendPiece)); err != nil { // pages, not holes
		return nil, err
	}
	o.closes = append(o.closes, func() { zero.Close() })
	serve := func(f func(fd int), opts ...func(fd int) error) (int, error) {
		return o.listen(f, opts...)
	}
	if o.source, err = serve(func(fd int) { sendAll(fd, int(zero.Fd())) }); err == nil {
		o.sink, err = serve(o.takeAll)
	}
	// Accepted when the byte is there, so that one thread never waits for it.
	late := func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 5) }
	for range 4 {
		if err != nil {
			break
		}
		var p int
		p, err = o.listenInline(answerOne, late)
		o.answer = append(o.answer, p)
	}
	if err == nil {
		err = o.resolve()
	}
	if err != nil {
		o.close()
		return nil, fmt.Errorf("starting the servers of the benchmark: %w", err)
	}
	return o, nil
}

func (o *outside) close() {
	for _, f := range o.closes {
		f()
	}
}

func (o *outside) bind(typ int, opts ...func(fd int) error) (fd, port int, err error) {
	if fd, err = unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0); err != nil {
		return 0, 0, err
	}
	o.closes = append(o.closes, func() { unix.Shutdown(fd, unix.SHUT_RDWR); unix.Close(fd) })
	for _, f := range opts {
		if err := f(fd); err != nil {
			return 0, 0, err
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, 0, err
	}
	if typ == unix.SOCK_STREAM {
		if err := unix.Listen(fd, 1024); err != nil {
			return 0, 0, err
		}
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return 0, 0, err
	}
	return fd, sa.(*unix.SockaddrInet4).Port, nil
}

// listen runs f on each connection, on a thread of its own.
func (o *outside) listen(f func(fd int), opts ...func(fd int) error) (int, error) {
	return o.listenInline(func(fd int) { go f(fd) }, opts...)
}

// listenInline runs f on each connection, one after the other. f closes it.
func (o *outside) listenInline(f func(fd int), opts ...func(fd int) error) (int, error) {
	fd, port, err := o.bind(unix.SOCK_STREAM, opts...)
	if err != nil {
		return 0, err
	}
	go func() {
		for {
			c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
				continue
			}
			if err != nil {
				return
			}
			f(c)
		}
	}()
	return port, nil
}

const sendPiece = 4 << 20

// sendAll sends the file again and again; its pages are not copied to be sent.
func sendAll(fd, file int) {
	defer unix.Close(fd)
	for {
		off := int64(0)
		for off < sendPiece {
			n, err := unix.Sendfile(fd, file, &off, int(sendPiece-off))
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || n == 0 {
				return
			}
		}
	}
}

// takeAll counts what comes without copying it.
func (o *outside) takeAll(fd int) {
	defer unix.Close(fd)
	b := make([]byte, 1<<20)
	for {
		n, _, err := unix.Recvfrom(fd, b, unix.MSG_TRUNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		o.taken.Add(int64(n))
	}
}

func answerOne(fd int) {
	var b [1]byte
	if n, err := unix.Read(fd, b[:]); err == nil && n == 1 {
		_, _ = unix.Write(fd, b[:])
	}
	unix.Close(fd)
}

// resolve answers DNS questions, all the same.
func (o *outside) resolve() error {
	fd, port, err := o.bind(unix.SOCK_DGRAM, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<20)
	})
	if err != nil {
		return err
	}
	o.dns = port
	for range 2 {
		go func() {
			b := make([]byte, 4096)
			for {
				n, from, err := unix.Recvfrom(fd, b, 0)
				if errors.Is(err, unix.EINTR) {
					continue
				}
				if err != nil {
					return
				}
				if n < 17 {
					continue
				}
				_ = unix.Sendto(fd, answerTo(b[:n]), 0, from)
			}
		}()
	}
	return nil
}

// answerTo makes a question an answer: an address that goes with its name
// (198.18.0.0/15 is for benchmarks), for an hour. What follows
// the question (an EDNS record) is kept behind it.
func answerTo(q []byte) []byte {
	end := 12
	for end < len(q) && q[end] != 0 {
		end += 1 + int(q[end])
	}
	end += 5
	if end > len(q) {
		return q
	}
	out := append([]byte(nil), q[:end]...)
	out[2], out[3] = out[2]|0x80, 0x80
	binary.BigEndian.PutUint16(out[6:], 1)
	sum := crc32.ChecksumIEEE(q[12:end])
	out = append(out, 0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4, 198, 18, byte(sum>>8), byte(sum))
	return append(out, q[end:]...)
}

// askDirect is netgen's questions to a server on the host's loopback.
func askDirect(port, n, parallel int) (netgen.Result, error) {
	c, err := net.Dial("udp4", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return netgen.Result{}, err
	}
	f, err := c.(*net.UDPConn).File()
	c.Close()
	if err != nil {
		return netgen.Result{}, err
	}
	defer f.Close()
	fd := int(f.Fd()) // blocking from here on
	return netgen.AskUDP(fd, n, parallel)
}

package agent

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// portPatience is how long the port may be missing before the console hears
// of it; it is waited for in any case.
const portPatience = 2 * time.Second

// serialListener accepts sessions on the virtio-serial port of a name, one at
// a time: the device has one opener.
type serialListener struct {
	name string
	say  func(string, ...any)
	last chan struct{} // closed when the last connection is
}

// Accept returns once the host has sent something: before, nobody may be at
// the other end, and the device reads as ended.
func (l *serialListener) Accept() (net.Conn, error) {
	if l.last != nil {
		<-l.last
	}
	start, told := time.Now(), false
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if !told && time.Since(start) > portPatience && l.find() == "" {
			told = true
			l.say("no virtio-serial port is named %s: is the driver there?", l.name)
		}
		conn, err := l.try()
		if conn != nil || err != nil {
			return conn, err
		}
		time.Sleep(wait)
	}
}

// try opens the port and waits for its first bytes; nil is "not yet".
func (l *serialListener) try() (net.Conn, error) {
	dev := l.find()
	if dev == "" {
		return nil, nil
	}
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		if os.IsNotExist(err) {
			return nil, nil // devtmpfs is about to make it
		}
		return nil, fmt.Errorf("opening port %s: %w", l.name, err)
	}
	b := make([]byte, 4096)
	// Whatever a read without bytes says, the port is tried again.
	n, _ := f.Read(b)
	if n == 0 {
		f.Close()
		return nil, nil
	}
	l.last = make(chan struct{})
	last := l.last
	return &fileConn{File: f, first: b[:n], closed: func() { close(last) }}, nil
}

// find is the device of the port, by its name: numbers depend on the order of
// devices.
func (l *serialListener) find() string {
	files, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == l.name {
			return "/dev/" + filepath.Base(filepath.Dir(f))
		}
	}
	return ""
}

// Close implements net.Listener; PID 1 never calls it.
func (l *serialListener) Close() error { return nil }

// Addr implements net.Listener.
func (l *serialListener) Addr() net.Addr { return addr(l.name) }

// vsockListener accepts sessions of the host over AF_VSOCK.
type vsockListener struct{ f *os.File }

func listenVsock(port uint32) (net.Listener, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("vsock socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("vsock bind", err)
	}
	if err := unix.Listen(fd, 16); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("vsock listen", err)
	}
	return &vsockListener{os.NewFile(uintptr(fd), "vsock")}, nil
}

// Accept returns the next connection of the host; the guest's own processes
// get none.
func (l *vsockListener) Accept() (net.Conn, error) {
	rc, err := l.f.SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		var fd int
		var from unix.Sockaddr
		var aerr error
		err := rc.Read(func(s uintptr) bool {
			fd, from, aerr = unix.Accept4(int(s), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return aerr != unix.EAGAIN
		})
		if err != nil {
			return nil, err
		}
		if aerr == unix.EINTR || aerr == unix.ECONNABORTED {
			continue
		}
		if aerr != nil {
			return nil, os.NewSyscallError("vsock accept", aerr)
		}
		if vm, ok := from.(*unix.SockaddrVM); !ok || vm.CID != unix.VMADDR_CID_HOST {
			unix.Close(fd)
			continue
		}
		return &fileConn{File: os.NewFile(uintptr(fd), "vsock")}, nil
	}
}

// Close implements net.Listener.
func (l *vsockListener) Close() error { return l.f.Close() }

// Addr implements net.Listener.
func (l *vsockListener) Addr() net.Addr { return addr("vsock") }

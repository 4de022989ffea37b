package exec

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// openTTY makes a terminal whose master goes to conn (nil = nowhere) and
// returns the program's side.
func (p *process) openTTY(conn net.Conn) (slave int, err error) {
	master, err := openMaster(p.srv.opt.Root)
	if err != nil {
		return -1, err
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		unix.Close(master)
		return -1, fmt.Errorf("unlocking the terminal: %w", err)
	}
	// By the master's own ioctl, so that no path of the image decides which
	// terminal it is.
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		unix.Close(master)
		return -1, fmt.Errorf("opening the terminal's other side: %w", errno)
	}
	slave = int(r)
	p.child = append(p.child, slave)
	if os.Getuid() == 0 {
		unix.Fchown(slave, int(p.user.UID), -1)
	}
	unix.SetNonblock(master, true)
	p.tty = os.NewFile(uintptr(master), "ptmx")
	if p.req.Rows > 0 && p.req.Cols > 0 {
		setSize(p.tty, p.req.Rows, p.req.Cols)
	}
	o, err := newOutput(p, p.tty, conn)
	if err != nil {
		return -1, err
	}
	o.tty = true
	p.outs = append(p.outs, o)
	return slave, nil
}

func openMaster(root string) (int, error) {
	var first error
	for _, name := range []string{"dev/ptmx", "dev/pts/ptmx"} {
		fd, err := unix.Open(filepath.Join(root, name), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if err == nil {
			return fd, nil
		}
		if first == nil {
			first = fmt.Errorf("opening /%s: %w", name, err)
		}
	}
	return -1, first
}

func setSize(tty *os.File, rows, cols uint16) {
	rc, err := tty.SyscallConn()
	if err != nil {
		return
	}
	rc.Control(func(fd uintptr) {
		unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	})
}

package atop

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's accounting of tasks at their death
// (Documentation/accounting/taskstats.rst), by generic netlink.
const (
	familyName  = "TASKSTATS"
	minVersion  = 11      // first one that says to which process a thread belongs and which was its last
	flagLast    = 0x20    // AGROUP: the last task of its process
	bufferBytes = 4 << 20 // what the kernel may keep for us until we read
	maxEnded    = 1 << 16 // processes that ended in one interval and are recorded
)

// ended is what all threads of a process used that have died.
type ended struct {
	pid, ppid          int
	name               string
	uid, gid           int
	nice               int
	policy             int
	status             uint32 // as of wait(2)
	threads            int
	start              int64 // epoch
	elapsed            int64 // microseconds
	user, sys          int64 // microseconds
	minflt, majflt     int64
	read, write, undid int64 // bytes
	rss, vsize         int64 // KiB, the highest
	delay, blkDelay    int64 // nanoseconds
}

// exits listens for the deaths of tasks.
type exits struct {
	f *os.File

	mu    sync.Mutex
	buf   []byte
	dying map[int]*ended // by process
	done  []*ended
	lost  int64 // times that the kernel's buffer ran over, or too many ended
}

// listen asks the kernel to tell of every task that ends.
func listen() (*exits, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, os.NewSyscallError("netlink socket", err)
	}
	ok := false
	defer func() {
		if !ok {
			unix.Close(fd)
		}
	}()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, os.NewSyscallError("netlink bind", err)
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferBytes) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, bufferBytes)
	}
	tv := unix.Timeval{Sec: 2}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	family := uint16(0)
	err = ask(fd, unix.GENL_ID_CTRL, unix.CTRL_CMD_GETFAMILY, attr(nil, unix.CTRL_ATTR_FAMILY_NAME, append([]byte(familyName), 0)), func(b []byte) {
		attrs(b, func(typ uint16, v []byte) {
			if typ == unix.CTRL_ATTR_FAMILY_ID && len(v) >= 2 {
				family = binary.NativeEndian.Uint16(v)
			}
		})
	})
	if err != nil || family == 0 {
		return nil, fmt.Errorf("the kernel has no %s: %w", familyName, errors.Join(err, unix.EOPNOTSUPP))
	}
	cpus := append(fmt.Appendf(nil, "0-%d", max(runtime.NumCPU(), possible())-1), 0)
	if err := ask(fd, family, unix.TASKSTATS_CMD_GET, attr(nil, unix.TASKSTATS_CMD_ATTR_REGISTER_CPUMASK, cpus), nil); err != nil {
		return nil, fmt.Errorf("asking for the ends of tasks: %w", err)
	}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{})
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	ok = true
	return &exits{f: os.NewFile(uintptr(fd), "taskstats"), buf: make([]byte, 32<<10), dying: map[int]*ended{}}, nil
}

// possible is the number of processors that this kernel may have.
func possible() int {
	b, err := os.ReadFile("/sys/devices/system/cpu/possible")
	if err != nil {
		return 1
	}
	n := 0
	for _, c := range b { // "0-7", "0,2-3": the last number is the highest
		switch {
		case c >= '0' && c <= '9':
			n = min(n*10+int(c-'0'), 1<<16)
		case c != '\n':
			n = 0
		}
	}
	return n + 1
}

func attr(b []byte, typ uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// attrs calls f for each attribute of b.
func attrs(b []byte, f func(typ uint16, v []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED, b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// ask sends one request and waits for the kernel's word on it; f sees the
// payload of what comes before.
func ask(fd int, family uint16, cmd byte, body []byte, f func([]byte)) error {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+unix.GENL_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, family)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = append(b, make([]byte, 8)...)
	b = append(append(b, cmd, 1, 0, 0), body...)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("netlink send", err)
	}
	buf := make([]byte, 32<<10)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("netlink receive", err)
		}
		done := false
		var verdict error
		messages(buf[:n], func(typ uint16, body []byte) {
			if typ == unix.NLMSG_ERROR && len(body) >= 4 {
				done = true
				if e := int32(binary.NativeEndian.Uint32(body)); e != 0 {
					verdict = unix.Errno(-e)
				}
			} else if f != nil && len(body) >= unix.GENL_HDRLEN {
				f(body[unix.GENL_HDRLEN:])
			}
		})
		if done {
			return verdict
		}
	}
}

// messages calls f for each netlink message of b.
func messages(b []byte, f func(typ uint16, body []byte)) {
	for len(b) >= unix.NLMSG_HDRLEN {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[4:]), b[unix.NLMSG_HDRLEN:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// run reads until close.
func (x *exits) run() {
	c, err := x.f.SyscallConn()
	if err != nil {
		return
	}
	c.Read(func(fd uintptr) bool { return !x.drain(int(fd)) })
}

// now reads what the kernel has told until now.
func (x *exits) now() {
	if c, err := x.f.SyscallConn(); err == nil {
		c.Control(func(fd uintptr) { x.drain(int(fd)) })
	}
}

// drain reads all that there is. It returns false when there will be no more.
func (x *exits) drain(fd int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		n, _, err := unix.Recvfrom(fd, x.buf, unix.MSG_DONTWAIT)
		switch err {
		case nil:
			messages(x.buf[:n], x.message)
		case unix.EAGAIN:
			return true
		case unix.EINTR:
		case unix.ENOBUFS:
			x.lost++
		default:
			return false
		}
	}
}

// message takes the accounts out of one message.
func (x *exits) message(typ uint16, body []byte) {
	if typ < unix.NLMSG_MIN_TYPE || len(body) < unix.GENL_HDRLEN {
		return
	}
	attrs(body[unix.GENL_HDRLEN:], func(typ uint16, v []byte) {
		if typ != unix.TASKSTATS_TYPE_AGGR_PID { // that of a process sums up too little
			return
		}
		attrs(v, func(typ uint16, v []byte) {
			if typ == unix.TASKSTATS_TYPE_STATS {
				x.add(v)
			}
		})
	})
}

func (x *exits) close() { x.f.Close() }

// add takes the last account of one task. mu is held.
func (x *exits) add(b []byte) {
	var t unix.Taskstats
	n := copy(unsafe.Slice((*byte)(unsafe.Pointer(&t)), unsafe.Sizeof(t)), b)
	if t.Version < minVersion || n < int(unsafe.Offsetof(t.Ac_tgid)+unsafe.Sizeof(t.Ac_tgid)) {
		return
	}
	pid := int(t.Ac_tgid)
	e := x.dying[pid]
	if e == nil {
		if len(x.dying) >= maxEnded {
			x.lost++
			return
		}
		e = &ended{pid: pid, start: int64(t.Ac_btime64)}
		x.dying[pid] = e
	}
	e.threads++
	leader := t.Ac_pid == t.Ac_tgid
	if leader || e.name == "" {
		e.name = unix.ByteSliceToString(unsafe.Slice((*byte)(unsafe.Pointer(&t.Ac_comm)), len(t.Ac_comm)))
		e.ppid, e.uid, e.gid = int(t.Ac_ppid), int(t.Ac_uid), int(t.Ac_gid)
		e.nice, e.policy = int(int8(t.Ac_nice)), int(t.Ac_sched)
	}
	if leader {
		e.start, e.elapsed = int64(t.Ac_btime64), int64(t.Ac_etime)
	}
	e.status = t.Ac_exitcode
	e.user += int64(t.Ac_utime)
	e.sys += int64(t.Ac_stime)
	e.minflt += int64(t.Ac_minflt)
	e.majflt += int64(t.Ac_majflt)
	e.read += int64(t.Read_bytes)
	e.write += int64(t.Write_bytes)
	e.undid += int64(t.Cancelled_write_bytes)
	e.rss, e.vsize = max(e.rss, int64(t.Hiwater_rss)), max(e.vsize, int64(t.Hiwater_vm))
	e.delay += int64(t.Cpu_delay_total)
	e.blkDelay += int64(t.Blkio_delay_total)
	if t.Ac_flag&flagLast == 0 {
		return
	}
	if t.Ac_tgetime > 0 {
		e.elapsed = int64(t.Ac_tgetime)
	}
	delete(x.dying, pid)
	if len(x.done) >= maxEnded {
		x.lost++
		return
	}
	x.done = append(x.done, e)
}

// take returns the processes that have ended since it was
// called before, and how many times some were lost.
func (x *exits) take() ([]*ended, int64) {
	x.now()
	x.mu.Lock()
	defer x.mu.Unlock()
	done, lost := x.done, x.lost
	x.done, x.lost = nil, 0
	return done, lost
}

// dead is the disk I/O of a living process's threads that have ended.
func (x *exits) dead(pid int) io {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e := x.dying[pid]; e != nil {
		return io{e.read, e.write, e.undid}
	}
	return io{}
}

// forget drops what is kept of threads whose process is not alive: the word of
// its last task was lost.
func (x *exits) forget(alive func(pid int) bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for pid := range x.dying {
		if !alive(pid) {
			delete(x.dying, pid)
		}
	}
}

package supervise

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/core/atop"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// vmmThreads writes what the threads of the VMM are doing, before it is
// stopped: of a job that hung on something that the host never answered, this
// is all that is left to see.
func (s *supervisor) vmmThreads(g *guest) {
	if s.recorder == nil {
		return
	}
	text := threadsOf(g.m.PID(), os.Geteuid() == 0)
	if text == "" {
		return
	}
	path := filepath.Join(s.recorder.dir, atop.ThreadsFile)
	if err := fsx.WriteFile(path, []byte(text), 0o600); err != nil {
		s.log.Warn("what the VMM's threads were doing is not recorded", logx.Err, err)
	}
}

// threadsOf describes the threads of a process, one in a line: its name,
// state, wait channel and the call that it is blocked in, with the file that
// the call's first argument names. Kernel stacks follow where they can be read.
func threadsOf(pid int, stacks bool) string {
	proc := fmt.Sprintf("/proc/%d", pid)
	entries, err := os.ReadDir(proc + "/task")
	if err != nil {
		return ""
	}
	var tids []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, n)
		}
	}
	slices.Sort(tids)
	var b strings.Builder
	fmt.Fprintf(&b, "# threads of the VMM, process %d: thread, name, state, wait channel, system call\n", pid)
	for _, tid := range tids {
		dir := fmt.Sprintf("%s/task/%d/", proc, tid)
		read := func(name string) string {
			t, err := os.ReadFile(dir + name)
			if err != nil {
				return "-"
			}
			if s := strings.TrimSpace(string(t)); s != "" && s != "0" {
				return s
			}
			return "-"
		}
		state := "-"
		if st := read("stat"); st != "-" {
			if i := strings.LastIndexByte(st, ')'); i > 0 && i+2 < len(st) {
				state = st[i+2 : i+3]
			}
		}
		fmt.Fprintf(&b, "%d %q %s %s %s\n", tid, read("comm"), state, read("wchan"), callOf(proc, read("syscall")))
		if !stacks {
			continue
		}
		if st := read("stack"); st != "-" {
			for line := range strings.Lines(st) {
				b.WriteString("    " + strings.TrimSpace(line) + "\n")
			}
		}
	}
	return b.String()
}

// fdCalls are the system calls whose first argument is a descriptor and in
// which a thread of a VMM is found.
var fdCalls = map[int]string{
	unix.SYS_READ: "read", unix.SYS_WRITE: "write", unix.SYS_PREAD64: "pread64", unix.SYS_PWRITE64: "pwrite64",
	unix.SYS_READV: "readv", unix.SYS_WRITEV: "writev", unix.SYS_PREADV: "preadv", unix.SYS_PWRITEV: "pwritev",
	unix.SYS_PREADV2: "preadv2", unix.SYS_PWRITEV2: "pwritev2", unix.SYS_IOCTL: "ioctl", unix.SYS_FSYNC: "fsync",
	unix.SYS_FDATASYNC: "fdatasync", unix.SYS_FALLOCATE: "fallocate", unix.SYS_FTRUNCATE: "ftruncate",
	unix.SYS_RECVMSG: "recvmsg", unix.SYS_SENDMSG: "sendmsg", unix.SYS_RECVFROM: "recvfrom", unix.SYS_SENDTO: "sendto",
	unix.SYS_ACCEPT4: "accept4", unix.SYS_EPOLL_PWAIT: "epoll_pwait", unix.SYS_EPOLL_PWAIT2: "epoll_pwait2",
	unix.SYS_IO_URING_ENTER: "io_uring_enter", unix.SYS_FLOCK: "flock", unix.SYS_GETDENTS64: "getdents64",
	unix.SYS_COPY_FILE_RANGE: "copy_file_range", unix.SYS_SYNC_FILE_RANGE: "sync_file_range",
}

// otherCalls are those whose first argument is none.
var otherCalls = map[int]string{
	unix.SYS_FUTEX: "futex", unix.SYS_PPOLL: "ppoll", unix.SYS_PSELECT6: "pselect6", unix.SYS_RT_SIGTIMEDWAIT: "rt_sigtimedwait",
	unix.SYS_NANOSLEEP: "nanosleep", unix.SYS_CLOCK_NANOSLEEP: "clock_nanosleep", unix.SYS_MADVISE: "madvise",
	unix.SYS_MMAP: "mmap", unix.SYS_MUNMAP: "munmap", unix.SYS_IO_GETEVENTS: "io_getevents", unix.SYS_WAIT4: "wait4",
}

// oldCalls are what only amd64 has.
var oldCalls = map[int]string{7: "poll", 23: "select", 232: "epoll_wait"}

// callOf words /proc/PID/syscall: "futex", "ioctl(12 → /dev/kvm)", "running".
func callOf(proc, line string) string {
	f := strings.Fields(line)
	if len(f) == 0 {
		return "-"
	}
	nr, err := strconv.Atoi(f[0])
	if err != nil || len(f) < 2 || nr < 0 { // "running", or blocked outside of a call
		return f[0]
	}
	if name, ok := oldCalls[nr]; ok && runtime.GOARCH == "amd64" {
		return name
	}
	if name, ok := otherCalls[nr]; ok {
		return name
	}
	name, ok := fdCalls[nr]
	if !ok {
		return fmt.Sprintf("call-%d", nr)
	}
	fd, err := strconv.ParseUint(strings.TrimPrefix(f[1], "0x"), 16, 32)
	if err != nil {
		return name
	}
	if to, err := os.Readlink(fmt.Sprintf("%s/fd/%d", proc, fd)); err == nil {
		return fmt.Sprintf("%s(%d → %q)", name, fd, to)
	}
	return fmt.Sprintf("%s(%d)", name, fd)
}

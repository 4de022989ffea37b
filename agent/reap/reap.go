// Package reap starts processes and collects their ends. In a guest, where
// every wait is PID 1's, its own children tell of their end by a descriptor and
// the orphans it inherits by SIGCHLD. Elsewhere (a test, a helper process) each
// child is waited for by its number, and nobody else's child is touched.
//
// No call blocks in the kernel in a guest: Go's runtime has one processor there,
// which such a call keeps until the runtime's monitor has noticed.
package reap

import (
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reaper starts processes. Make one with New.
type Reaper struct {
	all bool

	mu      sync.Mutex // held from the fork to the entry in waiters, and from a wait to its removal
	waiters map[int]chan<- syscall.WaitStatus
	barren  bool // no child was found
}

// New returns a Reaper. With all set it takes every child of this process,
// also those it did not start, and needs Run.
func New(all bool) *Reaper {
	return &Reaper{all: all, waiters: map[int]chan<- syscall.WaitStatus{}, barren: true}
}

// timerSlack is by how much a program's timers may be late, in nanoseconds:
// what the kernel gives to its first process.
const timerSlack = 50_000

// Start starts a program and returns its process id and a channel that
// receives its end, once. attr is changed.
func (r *Reaper) Start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	ch := make(chan syscall.WaitStatus, 1)
	if !r.all {
		pid, err := syscall.ForkExec(path, argv, attr)
		if err != nil {
			return 0, nil, err
		}
		go func() { ch <- waitOne(pid) }()
		return pid, ch, nil
	}
	if attr.Sys == nil {
		attr.Sys = &syscall.SysProcAttr{}
	}
	fd := -1
	attr.Sys.PidFD = &fd
	r.mu.Lock()
	runtime.LockOSThread()
	// This thread's, and so the program's, may be the one of the runtime's
	// monitor (see agent.slowMonitor).
	syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_TIMERSLACK, timerSlack, 0)
	pid, err := syscall.ForkExec(path, argv, attr)
	runtime.UnlockOSThread()
	if err == nil {
		r.waiters[pid] = ch
		r.barren = false
	}
	r.mu.Unlock()
	if err != nil {
		return 0, nil, err
	}
	// Without a descriptor, which a kernel before 5.3 lacks, SIGCHLD will do.
	if fd >= 0 {
		unix.SetNonblock(fd, true) // makes it one of the runtime's poller
		go r.await(os.NewFile(uintptr(fd), "pidfd"), pid, ch)
	}
	return pid, ch, nil
}

// await collects the end of one child, unless sweep was faster.
func (r *Reaper) await(f *os.File, pid int, ch chan<- syscall.WaitStatus) {
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	rc.Read(func(uintptr) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		// Not another child of the same number.
		return r.waiters[pid] != ch || r.collect(pid) != 0
	})
}

// collect waits for pid (-1: any child) without blocking and hands its end on,
// with mu held. It returns the process collected, 0 when there is none now, and
// -1 when there is no such child.
func (r *Reaper) collect(pid int) int {
	var ws syscall.WaitStatus
	for {
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return -1
		case got > 0:
			if ch := r.waiters[got]; ch != nil {
				delete(r.waiters, got)
				ch <- ws
			}
		}
		return got
	}
}

// Run collects children for ever.
func (r *Reaper) Run() {
	ch := make(chan os.Signal, 1) // one tells of all until it is taken
	signal.Notify(ch, syscall.SIGCHLD)
	for r.sweep(); ; r.sweep() {
		<-ch
	}
}

// sweep collects all children that have ended.
func (r *Reaper) sweep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	got := 1
	for got > 0 {
		got = r.collect(-1)
	}
	r.barren = got < 0
}

// Barren tells whether this process had no child left at Run's last look.
func (r *Reaper) Barren() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.barren
}

func waitOne(pid int) syscall.WaitStatus {
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &ws, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		return ws
	}
}

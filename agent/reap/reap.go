// Package reap starts processes and collects their ends. In a guest one loop
// owns every wait of PID 1, for its own children and for the orphans it
// inherits, so that neither is lost to the other. Elsewhere (a test, a helper
// process) each child is waited for by its number, and nobody else's child is
// touched.
package reap

import (
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Reaper starts processes. Make one with New.
type Reaper struct {
	all bool

	mu      sync.Mutex
	waiters map[int]chan<- syscall.WaitStatus
	barren  bool          // Run found no child
	born    chan struct{} // wakes Run after a start
}

// New returns a Reaper. With all set it takes every child of this process,
// also those it did not start, and needs Run.
func New(all bool) *Reaper {
	return &Reaper{all: all, waiters: map[int]chan<- syscall.WaitStatus{}, barren: true, born: make(chan struct{}, 1)}
}

// Start starts a program and returns its process id and a channel that
// receives its end, once.
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
	// With the lock held from the fork to the entry in waiters, Run cannot
	// look up a child before it is entered.
	r.mu.Lock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err == nil {
		r.waiters[pid] = ch
		r.barren = false
	}
	r.mu.Unlock()
	if err != nil {
		return 0, nil, err
	}
	select {
	case r.born <- struct{}{}:
	default:
	}
	return pid, ch, nil
}

// Run waits for children for ever. A process without children sleeps until
// the next Start: orphans can only come from below a child.
func (r *Reaper) Run() {
	for {
		// Whoever was just told of an end goes first: with one processor for
		// Go, a call that blocks takes it away for as long as the runtime's
		// monitor needs to see that.
		runtime.Gosched()
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			r.mu.Lock()
			// A start may have happened since the wait failed.
			idle := len(r.waiters) == 0
			r.barren = idle
			r.mu.Unlock()
			if idle {
				<-r.born
			} else {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		r.mu.Lock()
		ch := r.waiters[pid]
		delete(r.waiters, pid)
		r.mu.Unlock()
		if ch != nil {
			ch <- ws
		}
	}
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

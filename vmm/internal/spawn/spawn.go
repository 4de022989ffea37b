// Package spawn starts processes that die with this one, whatever ends it.
package spawn

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

type request struct {
	cmd   *exec.Cmd
	place func() (undo func())
	done  chan error
}

// The parent-death signal of Linux is sent when the thread that forked ends,
// not the process, and Go ends threads as it likes. So every fork is done by
// one goroutine that keeps its thread for the life of the process.
var forker = sync.OnceValue(func() chan<- request {
	ch := make(chan request)
	go func() {
		runtime.LockOSThread()
		for r := range ch {
			undo := func() {}
			if r.place != nil {
				undo = r.place()
			}
			err := r.cmd.Start()
			undo()
			r.done <- err
		}
	}()
	return ch
})

// Start is cmd.Start with a parent-death signal of SIGKILL and a process group
// of its own for the child. Other fields of SysProcAttr stay as they are.
func Start(cmd *exec.Cmd) error { return StartPlaced(cmd, nil) }

// StartPlaced is Start where place, unless it is nil, is called on the thread
// that forks: what it sets of that thread the child inherits. undo is called
// there after the fork.
func StartPlaced(cmd *exec.Cmd, place func() (undo func())) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.SysProcAttr.Setpgid = true
	r := request{cmd, place, make(chan error, 1)}
	forker() <- r
	return <-r.done
}

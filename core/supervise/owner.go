package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fsx"
)

// Self is this process as an Owner.
func Self() Owner { o, _ := ProcessOwner(os.Getpid()); return o }

// ProcessOwner is a living process as an Owner.
func ProcessOwner(pid int) (Owner, error) {
	start, err := fsx.ProcStart(pid)
	if err != nil {
		return Owner{}, fmt.Errorf("looking at process %d: %w", pid, err)
	}
	return Owner{PID: pid, Start: start}, nil
}

// Alive reports whether the very process still exists; a zombie does not
// count. Start 0 matches any process of that number.
func (o Owner) Alive() bool {
	if o.PID <= 0 {
		return false
	}
	start, err := fsx.ProcStart(o.PID)
	return err == nil && (o.Start == 0 || start == o.Start) && !zombie(o.PID)
}

func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] == ')' {
			return i+2 < len(b) && (b[i+2] == 'Z' || b[i+2] == 'X')
		}
	}
	return false
}

// open returns a descriptor of the very process, -1 when it is gone.
func (o Owner) open() (int, error) {
	fd, err := unix.PidfdOpen(o.PID, 0)
	if err == unix.ESRCH {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	// Looked at after opening: the number cannot be reused while we hold it.
	if !o.Alive() {
		unix.Close(fd)
		return -1, nil
	}
	return fd, nil
}

// Wait blocks until the process is gone or ctx ends, which is the error then.
func (o Owner) Wait(ctx context.Context) error {
	fd, err := o.open()
	if err == nil && fd < 0 {
		return nil
	}
	if err == nil {
		defer unix.Close(fd)
	}
	// The thread that polls is woken a few times a minute only to see ctx's
	// end; without pidfds the start time is looked at each second.
	for ctx.Err() == nil {
		if err != nil {
			if !o.Alive() {
				return nil
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, perr := unix.Poll(fds, 20_000)
		if perr != nil && perr != unix.EINTR {
			return fmt.Errorf("waiting for process %d: %w", o.PID, perr)
		}
		if n > 0 {
			return nil
		}
	}
	return context.Cause(ctx)
}

// Kill sends SIGKILL to the very process, if it still exists, and waits for
// its end. It reports whether there was one.
func (o Owner) Kill(ctx context.Context) (bool, error) {
	if o.PID <= 1 || o.Start == 0 || !o.Alive() {
		return false, nil
	}
	fd, err := o.open()
	if err != nil {
		return false, fmt.Errorf("opening process %d: %w", o.PID, err)
	}
	if fd < 0 {
		return false, nil
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		if errors.Is(err, unix.ESRCH) {
			return false, nil
		}
		return false, fmt.Errorf("killing process %d: %w", o.PID, err)
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if !o.Alive() {
			return true, nil
		}
		select {
		case <-ctx.Done():
			return true, fmt.Errorf("waiting for the end of process %d: %w", o.PID, context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

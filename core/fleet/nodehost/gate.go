package nodehost

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// gateFD is the descriptor that a runner's gate waits at.
const gateFD = 3

// Gate is what a managed runner's process is before it is gitlab-runner: it
// waits until its number is on disk, so that no runner ever runs that the next
// node cannot find, then becomes the program. It ends without a word when the
// node does. Only its error returns.
//
// Each signal gets its default disposition and none is blocked: one that the
// node inherited as ignored or blocked would keep the runner from stopping.
func Gate(argv, env []string) error {
	f := os.NewFile(gateFD, "gate")
	if f == nil || len(argv) == 0 {
		return fmt.Errorf("the gate of a managed runner is started by vk node run alone")
	}
	var b [1]byte
	if _, err := io.ReadFull(f, b[:]); err != nil {
		return fmt.Errorf("the node ended before its runner began: %w", err)
	}
	f.Close()
	runtime.LockOSThread() // the mask is a thread's
	if err := resetSignals(); err != nil {
		return err
	}
	err := syscall.Exec(argv[0], argv, env)
	return fmt.Errorf("starting %s: %w", argv[0], err)
}

// resetSignals gives every signal its default disposition and blocks none. The
// runtime's own handlers go with the exec; what it left ignored would stay.
func resetSignals() error {
	var dfl [4]uint64 // struct sigaction of the kernel: handler, flags, restorer, mask
	for sig := uintptr(1); sig <= 64; sig++ {
		s := syscall.Signal(sig)
		if s == unix.SIGKILL || s == unix.SIGSTOP {
			continue
		}
		// 32 and 33 are refused by no kernel; a libc keeps them for itself.
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&dfl)), 0, 8, 0, 0); e != 0 {
			return fmt.Errorf("resetting signal %d: %w", sig, e)
		}
	}
	var none uint64
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0); e != 0 {
		return fmt.Errorf("unblocking signals: %w", e)
	}
	return nil
}

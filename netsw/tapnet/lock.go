package tapnet

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

const lockName = "vktap-lock"

// lockWait bounds how long a start waits for others that set their devices up,
// which takes each of them some ten milliseconds.
const lockWait = 30 * time.Second

// lock takes the lock of this network namespace. Closing the file gives it
// back, and so does the death of the process.
func lock(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lockWait, errLocked)
	defer cancel()
	for {
		f, err := open(lockName, unix.IFF_TAP|unix.IFF_NO_PI|exclusive)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return f, rights(err)
		}
		select {
		case <-ctx.Done():
			if context.Cause(ctx) == errLocked {
				return nil, fault.Newf(fault.Busy, "another vk has been changing this host's guest devices for %v", lockWait).
					Hint("device %s is its lock; it goes with that process: ip -d link show %s", lockName, lockName)
			}
			return nil, context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

var errLocked = errors.New("tapnet: the lock is held")

// rights words the lack of them.
func rights(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	return fault.New(fault.System, `[net] mode "tap", and a "pool" of vk's own, need the right to set up network devices (CAP_NET_ADMIN)`).
		Hint(`run the runner as root, or give its service AmbientCapabilities=CAP_NET_ADMIN, or name devices of the administrator's in [net] pool, or use mode "switch", which needs no rights`).
		Because(err)
}

// Admin reports whether this process may set up network devices.
func Admin() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
}

package tapnet

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
)

// tunDev is the kernel's door to tap devices (Documentation/networking/tuntap).
const tunDev = "/dev/net/tun"

// Flags of TUNSETIFF. Frames carry a virtio header: with it the guest and the
// host's kernel hand each other segments of up to 64 KiB and leave checksums
// out, which docs/network.md has the worth of.
const (
	tapFlags  = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	exclusive = 0x8000 // IFF_TUN_EXCL of linux/if_tun.h: EBUSY when the device exists
)

// open attaches to the device name, or makes it.
func open(name string, flags uint16) (*os.File, error) {
	fd, err := unix.Open(tunDev, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, tunMissing(err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func tunMissing(err error) error {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fault.Newf(fault.System, "%s may not be opened by this user", tunDev).
			Hint("chmod 0666 %s is what distributions ship: attaching to a device is checked apart from it", tunDev).Because(err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fault.Newf(fault.System, "this host's kernel has no tap devices (%s)", tunDev).
			Hint("modprobe tun").Because(err)
	}
	return fmt.Errorf("opening %s: %w", tunDev, err)
}

// persistent reports whether the device behind f outlives its descriptors.
func persistent(f *os.File) (bool, error) {
	req, err := unix.NewIfreq("")
	if err != nil {
		return false, err
	}
	if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNGETIFF, req); err != nil {
		return false, fmt.Errorf("asking for the flags of %s: %w", f.Name(), err)
	}
	return req.Uint16()&unix.IFF_PERSIST != 0, nil
}

func setPersistent(f *os.File, on bool) error {
	v := 0
	if on {
		v = 1
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.TUNSETPERSIST, v); err != nil {
		return fmt.Errorf("making %s persistent (%v): %w", f.Name(), on, err)
	}
	return nil
}

// duplicate is another descriptor of the same attachment.
func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicating the descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

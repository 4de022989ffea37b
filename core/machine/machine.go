// Package machine is the contract between what runs guests (a Driver, in vmm)
// and what needs one (the supervisor of a job). The fake in vmm/vmmtest and
// QEMU pass the same conformance suite.
package machine

import (
	"context"
	"io"
	"net"
	"os"
	"time"

	"virtkit/core/numa"
)

// Spec is a guest to boot. Everything is decided before: no field is looked
// up again by the driver.
type Spec struct {
	Name    string // the VMM process is named "vk:<Name>"
	CPUs    int
	MemMiB  int
	Dir     string // a private directory of this guest, 0700, for the driver's use
	Kernel  Kernel
	Disks   []Disk // in this order: vda, vdb, …; found in the guest by serial
	NIC     *NIC   // nil = no device at all
	Shares  []Share
	Console io.Writer // every byte of the serial console, written in order; must not block for long
	Nested  bool      // let the guest run guests
	// NoBalloon keeps what the guest frees: without a balloon it is not told to
	// the host.
	NoBalloon bool
	// Place is the memory node that the VMM is put on; nil = where the kernel
	// likes. A host that refuses leaves the guest unplaced, with a line in the
	// driver's log.
	Place *numa.Placement
	// Unplaced, when set, is told why the host refused Place, before Boot returns.
	Unplaced func(error)
	ProcLog  io.Writer // what the VMM's own process prints
	// Hold are files that the VMM's process keeps open and does not use: what
	// they lock stays locked until the guest's memory is free, also when the one
	// who boots it is killed and the VMM goes a moment after him. They stay the
	// caller's to close.
	Hold []*os.File

	// Restore, when set, is a state that a Saver wrote of a guest with the same
	// StateKey: the guest goes on from there instead of booting. The driver
	// takes the file over, also on error.
	Restore *os.File
}

// Kernel is what the guest boots.
type Kernel struct {
	Image   string   // file; bzImage or a PVH vmlinux
	Initrd  string   // file
	Cmdline []string // appended to the driver's own words
	Version string   // release, for people
}

// Disk is a block device.
type Disk struct {
	Path     string
	Serial   string // at most 20 bytes
	ReadOnly bool
	// Varies says that a read-only disk is another one in each guest, and is
	// first read after the guest was told to.
	Varies bool
}

// NIC is a network device whose frames go to File: a stream socket carrying
// 4-byte big-endian length + Ethernet frame or, with Tap, a tap device of the
// host that File is attached to. The driver takes File over and closes it.
type NIC struct {
	File *os.File
	Tap  bool
	MAC  string
	MTU  int // told to the guest; 0 = 1500
}

// Share is a host directory reachable in the guest by its tag (virtio-fs).
type Share struct {
	Tag      string
	Source   string
	ReadOnly bool
}

// Driver boots guests. Implementations are safe for concurrent use.
type Driver interface {
	// Name is "qemu", "fake", …
	Name() string
	// Boot starts a guest and returns as soon as its VMM runs; the guest may
	// still be far from answering. ctx bounds Boot alone, not the guest's
	// life. On error nothing of the guest is left. The VMM dies with this
	// process, whatever ends it.
	Boot(ctx context.Context, s Spec) (Machine, error)
}

// Machine is one guest under a VMM, from Boot to its end; a reboot of the
// guest ends it too (Exit.Reason Reboot) and its owner boots another one.
type Machine interface {
	// Control is the byte stream to the guest's agent, open from the start:
	// what is written before the agent listens waits for it. Always the same
	// value. It reads EOF once the guest is gone and all its bytes were read.
	Control() net.Conn
	// PID is the VMM's process; 0 for a fake.
	PID() int
	// Wait blocks until the guest has ended and all its console and control
	// bytes were delivered, or ctx ends. May be called many times.
	Wait(ctx context.Context) (Exit, error)
	// Kill ends the VMM at once. It returns when the process is gone, also
	// when it was gone before.
	Kill() error
	// Pause stops the guest's processors; Continue lets them go on. The
	// caller sends a Resume to the agent after Continue.
	Pause(ctx context.Context) error
	Continue(ctx context.Context) error
}

// Restorer is a Driver that can begin a guest from a saved state.
type Restorer interface {
	// StateKey is equal for two specs exactly when a state saved of the one can
	// be restored as the other: same VMM, machine, kernel, processors, memory
	// and disks. "" = such a guest cannot be saved, and why.
	StateKey(ctx context.Context, s Spec) (key, why string, err error)
}

// Saver is a Machine of a Restorer.
type Saver interface {
	// Save writes the guest's state to f, from its current offset. The guest
	// goes on meanwhile and afterwards. Nothing may be under way on the control
	// channel: bytes in it are in no state.
	Save(ctx context.Context, f *os.File) error
	// TimerKHz is the true rate of what HelloReply.TimerKHz tells; 0 = unknown.
	TimerKHz() int
}

// Stander is a Machine that can tell what a guest stands at that says nothing.
type Stander interface {
	// StandsAt is, in one line for people, what the VMM takes the guest's state
	// for and where its processors are; "" when that is not to be had. dead is
	// that the guest can never go on. It returns soon, also when the VMM does not
	// answer.
	StandsAt(ctx context.Context) (at string, dead bool)
}

// Reason says how a guest ended. Strings, because they are shown and stored.
type Reason string

// The reasons.
const (
	PowerOff Reason = "poweroff" // the guest powered off
	Reboot   Reason = "reboot"   // the guest asked for a reset
	Panic    Reason = "panic"    // the guest's kernel panicked
	Killed   Reason = "killed"   // Kill was called
	Crashed  Reason = "crashed"  // the VMM ended by itself
)

// Exit is the end of a guest.
type Exit struct {
	Reason Reason
	Detail string // panic line, the VMM's last words or signal; for people
	At     time.Time
}

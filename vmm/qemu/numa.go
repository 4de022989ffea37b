package qemu

import (
	"fmt"
	"log/slog"
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"

	"virtkit/core/logx"
	"virtkit/core/numa"
)

// Memory policies of set_mempolicy(2).
const (
	mpolDefault    = 0
	mpolPreferred  = 1
	mpolInterleave = 3
)

// placer puts the thread that forks a VMM on the processors and the memory of
// a placement. Both are inherited over fork and exec, so that QEMU has them
// before its first page. A host that refuses gets a line and a guest that is
// not placed; unplaced, which may be nil, is told too.
func placer(p *numa.Placement, log *slog.Logger, unplaced func(error)) func() (undo func()) {
	if p == nil {
		return nil
	}
	refused := func(err error) {
		log.Warn("the guest is not placed on a memory node", "wanted", p.Line(), logx.Err, err)
		if unplaced != nil {
			unplaced(err)
		}
	}
	return func() (undo func()) {
		var before unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			refused(err)
			return func() {}
		}
		undo = func() {
			_ = unix.SchedSetaffinity(0, &before)
			_ = setPolicy(mpolDefault, nil)
		}
		if err := place(p); err != nil {
			undo()
			refused(err)
			return func() {}
		}
		return undo
	}
}

// place is of the calling thread.
func place(p *numa.Placement) error {
	if len(p.CPUs) > 0 {
		var set unix.CPUSet
		for _, c := range p.CPUs {
			set.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("running on cpus %s: %w", p.CPUList, err)
		}
	}
	if p.Interleave {
		return setPolicy(mpolInterleave, p.Nodes)
	}
	return setPolicy(mpolPreferred, []int{p.Node})
}

func setPolicy(mode int, nodes []int) error {
	const word = bits.UintSize
	var mask [16]uint
	for _, n := range nodes {
		if n < 0 || n >= len(mask)*word {
			return fmt.Errorf("memory node %d: %w", n, unix.EINVAL)
		}
		mask[n/word] |= 1 << (n % word)
	}
	ptr, size := uintptr(0), uintptr(0)
	if len(nodes) > 0 {
		ptr, size = uintptr(unsafe.Pointer(&mask)), uintptr(len(mask)*word)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SET_MEMPOLICY, uintptr(mode), ptr, size); e != 0 {
		return fmt.Errorf("setting the memory policy: %w", e)
	}
	return nil
}

// Package boot finds and fetches guest kernels and writes the initramfs that
// carries the agent and the modules a kernel needs.
//
// Files it owns, all made whole in a temporary name and renamed, so that any
// number of processes may ask for them at once:
//
//	<state_dir>/kernels/NAME/   a kernel: kernel.json (Manifest) and its files
//	<state_dir>/boot/HEX.cpio   an initramfs, named by the digest of its content
package boot

import (
	"context"

	"virtkit/core/machine"
)

// Options choose what goes into a guest's initramfs.
type Options struct {
	Agent  []byte // nil = Agent()
	Nested bool   // carry KVM's modules, for guests that run guests
}

// Ensure is Find, and when want is "" and the host has no kernel at all, it
// fetches Debian's. progress (may be nil) is told in words what goes on.
func Ensure(ctx context.Context, stateDir, want string, progress func(string)) (Kernel, error) {
	k, err := Find(stateDir, want)
	if err == nil || want != "" || !isNotFound(err) {
		return k, err
	}
	return Fetch(ctx, stateDir, progress)
}

// Prepare writes the initramfs for k, unless the same one is there already,
// and returns what a machine.Spec needs. Cmdline holds no words yet: drivers
// add their own.
func Prepare(ctx context.Context, stateDir string, k Kernel, o Options) (machine.Kernel, error) {
	mods, err := modulesFor(ctx, k, o.Nested)
	if err != nil {
		return machine.Kernel{}, err
	}
	a, err := agentFor(o)
	if err != nil {
		return machine.Kernel{}, err
	}
	path, err := writeInitramfs(stateDir, a, mods)
	if err != nil {
		return machine.Kernel{}, err
	}
	return machine.Kernel{Image: k.Image, Initrd: path, Version: k.Version}, nil
}

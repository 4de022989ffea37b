// Package vmm holds the engine that runs guests: kernels and initramfs
// (vmm/boot), writable layers (vmm/disk), shares (vmm/virtiofs), and the
// drivers of core/machine.Driver (vmm/qemu, and the fake of vmm/vmmtest).
//
// Words: the guest is the virtual machine; the VMM is the process on the host
// that runs it; the agent is the guest's PID 1. The engine moves bytes to and
// from the agent but never reads what they say.
package vmm

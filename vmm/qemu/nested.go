package qemu

import (
	"os"
	"path/filepath"
	"strings"

	"virtkit/core/fault"
)

// CanNest says why guests of this host's KVM cannot run guests of their own;
// nil when they can. sys is /sys. Nesting is a parameter of the module that KVM
// runs by; under emulation it needs nothing of the host.
func CanNest(sys string) error {
	for _, m := range []string{"kvm_intel", "kvm_amd"} {
		b, err := os.ReadFile(filepath.Join(sys, "module", m, "parameters", "nested"))
		if err != nil {
			continue
		}
		switch strings.TrimSpace(string(b)) {
		case "Y", "1":
			return nil
		}
		return fault.Newf(fault.System, "nested virtualization is off on this host (%s.nested=%s), and [executor.vm] nested wants it", m, strings.TrimSpace(string(b))).
			Hint("load the module with it: echo 'options %[1]s nested=1' > /etc/modprobe.d/kvm-nested.conf, then reload %[1]s with no guest running", m)
	}
	return fault.New(fault.System, "this host's KVM tells of no nested virtualization (neither kvm_intel nor kvm_amd is loaded), and [executor.vm] nested wants it").
		Hint("load kvm_intel or kvm_amd with nested=1")
}

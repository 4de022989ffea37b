package qemu_test

import (
	"testing"
	"time"

	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/vmm/boot"
	"virtkit/vmm/qemu"
	"virtkit/vmm/vmmtest"
)

// real is a driver and a spec for a guest that runs testinit.
func real(t *testing.T, kernel string) (*qemu.Driver, machine.Spec) {
	t.Helper()
	vmmtest.NeedQEMU(t)
	k := vmmtest.NeedKernel(t, kernel)
	mk, err := boot.Prepare(t.Context(), t.TempDir(), k, boot.Options{Agent: vmmtest.BuildInit(t)})
	if err != nil {
		t.Fatal(err)
	}
	d := qemu.New(qemu.Config{CacheDir: t.TempDir(), Log: logx.ForTest(t)})
	return d, machine.Spec{Name: "t", CPUs: 1, MemMiB: 256, Dir: t.TempDir(), Kernel: mk}
}

func TestQEMUPassesTheSuite(t *testing.T) {
	d, spec := real(t, "")
	vmmtest.RunSuite(t, vmmtest.Factory{Driver: d, Spec: spec, Many: 4, FloodKiB: 512, Limit: time.Minute})
}

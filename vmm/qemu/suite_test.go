package qemu_test

import (
	"context"
	"os"
	"path/filepath"
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
	vmmtest.RunSuite(t, vmmtest.Factory{Driver: d, Spec: spec, Many: 4, FloodKiB: 128, Limit: time.Minute})
}

// TestProbe runs what the KVM probe runs, under emulation: a kernel without a
// root that starts is told from one that does not.
func TestProbe(t *testing.T) {
	for _, kernel := range []string{"tuned", "debian"} {
		t.Run(kernel, func(t *testing.T) {
			d, s := real(t, kernel)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := d.ProbeWith(ctx, s.Kernel, "tcg"); err != nil {
				t.Errorf("a kernel that starts: %v", err)
			}
		})
	}
	t.Run("broken", func(t *testing.T) {
		d, s := real(t, "")
		s.Kernel.Image = filepath.Join(t.TempDir(), "none")
		if err := os.WriteFile(s.Kernel.Image, make([]byte, 4096), 0o644); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // it may just hang
		defer cancel()
		if err := d.ProbeWith(ctx, s.Kernel, "tcg"); err == nil {
			t.Error("a file of zeros passed for a kernel that starts")
		}
	})
	t.Run("silent", func(t *testing.T) {
		d, s := real(t, "")
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel() // long before any kernel is through
		if err := d.ProbeWith(ctx, s.Kernel, "tcg"); err == nil {
			t.Error("a kernel that was not waited for passed")
		}
	})
}

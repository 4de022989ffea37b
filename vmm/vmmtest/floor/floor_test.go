package floor_test

import (
	"os"
	"os/exec"
	"testing"

	"virtkit/vmm/qemu"
	"virtkit/vmm/vmmtest"
	"virtkit/vmm/vmmtest/floor"
)

func TestFloor(t *testing.T) {
	vmmtest.NeedQEMU(t)
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc: apt-get install gcc")
	}
	k := vmmtest.NeedKernel(t, os.Getenv("VIRTKIT_TEST_KERNEL"))
	dir := t.TempDir()
	f, err := floor.Prepare(t.Context(), dir, qemu.New(qemu.Config{CacheDir: dir}), k)
	if err != nil {
		t.Fatal(err)
	}
	r, err := f.Run(t.Context(), 512)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: first line %v, wall %v, CPU %v", k.Name, r.FirstLine, r.Wall, r.CPU)
	if r.FirstLine <= 0 || r.FirstLine > r.Wall || r.CPU <= 0 {
		t.Errorf("impossible times: %+v", r)
	}
}

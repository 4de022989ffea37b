package qemu

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/core/numa"
	"virtkit/vmm/internal/spawn"
)

// where runs a child and returns the processors it may run on and the policy of
// its memory.
func where(t *testing.T, p *numa.Placement) (cpus, policy string) {
	t.Helper()
	cpus, policy, _ = whereTold(t, p)
	return cpus, policy
}

// whereTold also returns what was told of a refusal.
func whereTold(t *testing.T, p *numa.Placement) (cpus, policy string, refused error) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "grep Cpus_allowed_list /proc/self/status; head -n 1 /proc/self/numa_maps")
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := spawn.StartPlaced(cmd, placer(p, logx.ForTest(t), func(err error) { refused = err })); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	f := strings.Fields(out.String())
	if len(f) < 4 {
		t.Fatalf("the child says %q", out.String())
	}
	return f[1], f[3], refused
}

func TestAVMMIsPlacedBeforeItStarts(t *testing.T) {
	if _, err := os.Stat("/proc/self/numa_maps"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("needs a kernel with CONFIG_NUMA")
	}
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	first := 0
	for !mine.IsSet(first) {
		first++
	}
	one := strconv.Itoa(first)
	allCPUs, policy := where(t, nil)
	if policy != "default" {
		t.Skipf("needs a process without a memory policy, this one has %q", policy)
	}
	cpus, policy, refused := whereTold(t, &numa.Placement{Node: 0, Nodes: []int{0}, CPUs: []int{first}, CPUList: one})
	if refused != nil || cpus != one || !strings.HasPrefix(policy, "prefer") || !strings.HasSuffix(policy, ":0") {
		t.Errorf("on cpus %s by %s, want %s and to prefer node 0", cpus, policy, one)
	}
	cpus, policy = where(t, &numa.Placement{Interleave: true, Nodes: []int{0}})
	if cpus != allCPUs || policy != "interleave:0" {
		t.Errorf("on cpus %s by %s, want %s, interleaved", cpus, policy, allCPUs)
	}
	// A host that refuses: no such processor, no such node.
	for _, p := range []*numa.Placement{
		{Node: 0, Nodes: []int{0}, CPUs: []int{1023}, CPUList: "1023"},
		{Node: 1000, Nodes: []int{1000}, CPUs: []int{first}},
		{Node: -1, Nodes: []int{-1}, CPUs: []int{first}},
	} {
		if cpus, policy, refused := whereTold(t, p); cpus != allCPUs || policy != "default" || refused == nil {
			t.Errorf("%+v: on cpus %s by %s, want it not placed", p, cpus, policy)
		}
	}
	if cpus, policy := where(t, nil); cpus != allCPUs || policy != "default" {
		t.Errorf("the next one is on cpus %s by %s, want %s by default", cpus, policy, allCPUs)
	}
}

func TestCanNest(t *testing.T) {
	for _, tc := range []struct{ module, value, want string }{
		{"kvm_intel", "Y", ""}, {"kvm_amd", "1", ""},
		{"kvm_intel", "N", "kvm_intel.nested=N"}, {"kvm_amd", "0", "kvm_amd.nested=0"},
		{"", "", "neither kvm_intel nor kvm_amd is loaded"},
	} {
		sys := t.TempDir()
		if tc.module != "" {
			dir := filepath.Join(sys, "module", tc.module, "parameters")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "nested"), []byte(tc.value+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		err := CanNest(sys)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || fault.HintOf(err) == "") {
			t.Errorf("%s=%s: %v, want %q", tc.module, tc.value, err, tc.want)
		}
	}
}

func TestABalloonUnlessThereIsToBeNone(t *testing.T) {
	for _, none := range []bool{false, true} {
		p := plan{spec: machine.Spec{Name: "g", CPUs: 1, MemMiB: 64, NoBalloon: none}, accel: "kvm"}
		if has := slices.Contains(p.args(), "virtio-balloon-device,free-page-reporting=on"); has == none {
			t.Errorf("NoBalloon %v: a balloon %v", none, has)
		}
	}
}

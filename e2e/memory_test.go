package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
)

// TestMemoryComesBack: what a guest frees, and file cache that it does not need,
// come back to the host. Each condition is waited for: a loaded host takes its
// time.
func TestMemoryComesBack(t *testing.T) {
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, "memory"), config+"\n")
	if err != nil {
		t.Fatal(err)
	}
	conf := strings.Replace(config, "max_mem = \"1G\"\n", "max_mem = \"1G\"\nreclaim = \"32M\"\n", 1)
	if err := os.WriteFile(h.Conf, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busyboxGit(t, h), "MICROVM_MEM": "1G", "MICROVM_USER": "root"}, nil)
	prepared(t, s)
	dirs := h.JobDirs()
	if len(dirs) != 1 {
		t.Fatalf("job directories %q, want one", dirs)
	}
	st, err := supervise.ReadState(filepath.Join(h.State, "jobs", dirs[0]))
	if err != nil || st.VMMPID == 0 {
		t.Fatalf("state %+v, %v", st, err)
	}
	run := func(script string) string {
		t.Helper()
		res := stage(t, s, execdrv.StageBuild, script)
		if res.Exit != 0 {
			t.Fatalf("%s: %d %s%s", script, res.Exit, res.Stdout, res.Stderr)
		}
		return strings.TrimSpace(string(res.Stdout))
	}
	// Memory that is written and freed. Nothing of it is cache.
	run("dd if=/dev/urandom of=/dev/shm/x bs=1M count=300 2>/dev/null\n")
	full := rss(t, st.VMMPID)
	if full < 300 {
		t.Fatalf("the VMM holds %d MiB while its guest holds 300 in memory", full)
	}
	run("rm /dev/shm/x\n")
	eventuallyMiB(t, "memory that the guest freed", full-200, func() int64 { return rss(t, st.VMMPID) })

	// File cache above the floor of 32 MiB, of files that stay.
	run("dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null; sync; cat /big > /dev/null\n")
	cache := func() int64 {
		kib := int64(0)
		for line := range strings.Lines(run("cat /proc/meminfo\n")) {
			if f := strings.Fields(line); len(f) > 1 && (f[0] == "Active(file):" || f[0] == "Inactive(file):") {
				n, err := strconv.ParseInt(f[1], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				kib += n
			}
		}
		return kib >> 10
	}
	eventuallyMiB(t, "file cache of the guest", 64, cache)
	if got := run("wc -c < /big\n"); got != strconv.Itoa(200<<20) {
		t.Errorf("the file has %s bytes", got)
	}
}

// rss is what a process holds, in MiB.
func rss(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n >> 10
		}
	}
	t.Fatalf("process %d has no VmRSS", pid)
	return 0
}

// eventuallyMiB waits until get is at most want.
func eventuallyMiB(t *testing.T, what string, want int64, get func() int64) {
	t.Helper()
	var got int64
	for end := time.Now().Add(4 * time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
		if got = get(); got <= want {
			return
		}
	}
	t.Errorf("%s: still %d MiB, want at most %d", what, got, want)
}

package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/atop"
	"virtkit/core/atop/archive"
	"virtkit/core/execdrv"
	"virtkit/e2e/host"
)

const recordConfig = `
[vmm]
disk = "2G"
[executor]
atop_interval_secs = 1
[executor.vm]
hostname = "vm"
cpus = 1
mem = "512M"
`

// TestRecording: a job's guest records itself; the trace ends with the account,
// and vk atop reads what is kept.
func TestRecording(t *testing.T) {
	guests(t)
	h, err := host.New(root, filepath.Join(world.dir, "record"), recordConfig)
	if err != nil {
		t.Fatal(err)
	}
	once(t, "default in "+h.State, func() error {
		_, err := h.Run(context.Background(), "pull", "--policy", "missing", "local/default")
		return err
	})
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default", "CI_JOB_NAME": "test:unit", "CI_PROJECT_PATH_SLUG": "group-e2e"}, nil)
	id := s.Vars["CI_JOB_ID"]
	name := id + "-group-e2e-test_unit"
	prepared(t, s)
	if path, err := h.Run(t.Context(), "atop", id); err != nil || strings.TrimSpace(path) == "" || filepath.Base(filepath.Dir(strings.TrimSpace(path))) != name {
		t.Errorf("while it runs: %q, %v", path, err)
	}
	res := stage(t, s, execdrv.StageBuild, "for i in 1 2 3 4 5 6 7 8; do /bin/true; done; for i in 1 2 3; do /bin/false; done\n"+
		"bash -c 'kill -9 $$'\ndd if=/dev/urandom of=/big bs=1M count=8 conv=fsync 2>/dev/null\nsleep 4; exit 0\n")
	if res.Exit != 0 || strings.Contains(string(res.Stdout), "vk_atop") {
		t.Errorf("build_script: %d %q %s", res.Exit, res.Stdout, res.Stderr)
	}
	res = stage(t, s, execdrv.StageCleanFileVars, "true\n")
	trace := string(res.Stderr)
	from := strings.Index(trace, "\x1b[0Ksection_start:")
	if from < 0 {
		t.Fatalf("no section in %q %s", trace, res.Stderr)
	}
	section := trace[from:]
	// Of a program that no sample saw alive only its name is known.
	for _, part := range []string{
		"vk_atop[collapsed=true]\r\x1b[0Kwhat the job's guest did (vk atop " + id + ")\nvirtkit: " + name + " — what its guest did:\n  recorded ",
		"  guest            vm on 1 cpu, ", "  pressure         cpu ", " written — vd", "\n  dd ",
	} {
		if !strings.Contains(section, part) {
			t.Errorf("%q is not in\n%s", part, section)
		}
	}
	if !strings.HasSuffix(section, ":vk_atop\r\x1b[0K\n") {
		t.Errorf("the trace does not end with the section: %q", section)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Fatalf("cleanup: %d %v %s", res.Exit, err, res.Stderr)
	}
	path, err := h.Run(t.Context(), "atop", "test_unit")
	path = strings.TrimSpace(path)
	if err != nil || filepath.Base(path) != atop.PackedFile {
		t.Fatalf("%q, %v", path, err)
	}
	checkRecording(t, path)
	sum, err := h.Run(t.Context(), "atop", id, "--summary")
	if err != nil || !strings.HasPrefix(sum, "virtkit: "+name+" — what its guest did:\n") {
		t.Errorf("%q, %v", sum, err)
	}
	out, err := h.Run(t.Context(), "atop", id, "--json")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil || m["cpu"] == nil {
			t.Errorf("%v in %.200s", err, line)
		}
	}
	nothingLeft(t, h)
}

// checkRecording reads what one job left.
func checkRecording(t *testing.T, path string) {
	t.Helper()
	n, killed, recorder, interval := 0, false, int64(0), int64(0)
	ends := map[string]int{}
	st, err := archive.Samples(path, false, func(s *atop.Sample) bool {
		if n++; s.Reset != (n == 1) {
			t.Errorf("sample %d: reset %v", n, s.Reset)
		}
		if s.Has&atop.HasPSI == 0 || !s.PSI.Present {
			t.Errorf("sample %d has no pressure", n)
		}
		for i := range s.Procs {
			p := &s.Procs[i]
			if p.Ended() {
				killed = killed || p.Exit == 256+9
				ends[fmt.Sprint(p.Name, " ", p.Exit)]++
			}
			if p.PID == 1 && n > 1 {
				recorder += p.User + p.Sys
			}
		}
		if n > 1 {
			interval += s.Interval
		}
		return true
	})
	if err != nil || st.Skipped+st.Torn > 0 || n < 3 {
		t.Errorf("%d samples, %+v, %v", n, st, err)
	}
	if !killed {
		t.Error("no process ended by signal 9")
	}
	// Each is told once, whether or not a sample saw it alive.
	if ends["true 0"] != 8 || ends["false 1"] != 3 {
		t.Errorf("ends: %v", ends)
	}
	t.Logf("the agent used %d ticks of 10 ms in %d s and %d samples", recorder, interval, n)
}

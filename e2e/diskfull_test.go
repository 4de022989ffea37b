package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/execdrv"
	"virtkit/e2e/host"
)

// smallState is a state directory on a file system of that size, with the
// images and kernels of h.
func smallState(t *testing.T, h *host.Host, kib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("vk-test", dir, "tmpfs", 0, fmt.Sprintf("size=%dk,mode=700", kib)); errors.Is(err, unix.EPERM) {
		t.Skip("needs root, to mount a small file system")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	for _, n := range []string{"images", "kernels", "boot", "vmm", "local"} {
		if err := os.Symlink(filepath.Join(h.State, n), filepath.Join(dir, n)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A disk that fills up while a job runs is the host's fault, in each stage from
// then on, and neither cleanup nor gc needs room.
func TestHostDiskFullInAJob(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	dir := smallState(t, h, 300<<10) // admission wants the 256 MiB that the host of the tests expects of a job
	d := h.Driver()
	d.Env = append(d.Env, "VIRTKIT_STATE_DIR="+dir)
	s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": img}, nil)
	prepared(t, s)
	f, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for piece := make([]byte, 4096); err == nil; {
		_, err = f.Write(piece)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	for _, name := range []string{execdrv.StageBuild, execdrv.StageAfter} {
		res := stage(t, s, name, "head -c 8000000 /dev/urandom >/f; sync; exit 3\n")
		if res.Exit != 2 || res.FileCode != "" || !strings.Contains(string(res.Stderr), "the host has no space left") {
			t.Errorf("%s: exit %d, code %q\n%s%s", name, res.Exit, res.FileCode, res.Stdout, res.Stderr)
		}
	}
	cmd := exec.CommandContext(t.Context(), h.VK, "gc")
	cmd.Env = d.Env
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("vk gc: %v\n%s", err, out)
	}
	if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %d %v\n%s%s", res.Exit, err, res.Stdout, res.Stderr)
	}
	if ents, err := os.ReadDir(filepath.Join(dir, "jobs")); err != nil || slices.ContainsFunc(ents, os.DirEntry.IsDir) {
		t.Errorf("left in jobs: %v, %v", ents, err)
	}
}

// A state directory on a full disk is told as that, at whichever write it
// fills up, never as a fault of the job, and nothing is left.
func TestHostDiskFull(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	for _, kib := range []int{16, 64, 256, 2048} {
		t.Run(fmt.Sprintf("%d KiB", kib), func(t *testing.T) {
			dir := smallState(t, h, kib)
			cmd := exec.CommandContext(t.Context(), h.VK, "run", "--mem", "256M", img, "sh", "-c", "head -c 8000000 /dev/urandom >/f; sync; exit 3")
			cmd.Env = append(h.Env(), "VIRTKIT_STATE_DIR="+dir)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			_ = cmd.Run()
			if code := cmd.ProcessState.ExitCode(); code != 125 || !strings.Contains(out.String(), "space") {
				t.Errorf("exit %d\n%s", code, out.String())
			}
			ents, err := os.ReadDir(filepath.Join(dir, "jobs"))
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range ents {
				if e.IsDir() {
					t.Errorf("%s is left", e.Name())
				}
			}
		})
	}
}

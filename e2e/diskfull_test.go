package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A state directory on a full disk is told as that, at whichever write it
// fills up, never as a fault of the job, and nothing is left.
func TestHostDiskFull(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	for _, kib := range []int{16, 64, 256, 2048} {
		t.Run(fmt.Sprintf("%d KiB", kib), func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("vk-test", dir, "tmpfs", 0, fmt.Sprintf("size=%dk,mode=700", kib)); errors.Is(err, unix.EPERM) {
				t.Skip("needs root, to mount a small file system")
			} else if err != nil {
				t.Fatal(err)
			}
			defer unix.Unmount(dir, unix.MNT_DETACH)
			for _, n := range []string{"images", "kernels", "boot", "vmm", "local"} {
				if err := os.Symlink(filepath.Join(h.State, n), filepath.Join(dir, n)); err != nil {
					t.Fatal(err)
				}
			}
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

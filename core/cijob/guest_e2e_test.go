package cijob_test

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"
	"testing"
	"time"

	"virtkit/core/fleet/jobdir"
	"virtkit/e2e/host"
)

const guestConfig = `
[net]
host_loopback = [%s]

[vmm]
disk = "2G"
boot_timeout_secs = 360

[executor]
atop = false

[executor.vm]
hostname = "vm"
cpus = 1
mem = "512M"

[executor.schedule]
disk_default = "256M"
`

// TestInGuests runs recorded jobs by `vk node job`, each in a microVM, and
// compares as TestRecordings does.
func TestInGuests(t *testing.T) {
	if testing.Short() {
		t.Skip("needs guests, which -short leaves out")
	}
	repo := gitServer(t)
	u, err := url.Parse(repo)
	if err != nil {
		t.Fatal(err)
	}
	h, err := host.New("../..", t.TempDir(), fmt.Sprintf(guestConfig, u.Port()))
	if host.IsMissing(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	if _, err := h.Run(ctx, "pull", "local/default"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"simple-success", "fail-exit3", "killed-by-signal", "cancel-canceling"} {
		t.Run(name, func(t *testing.T) {
			var rec recorded
			readJSON(t, name+".json", &rec)
			s := newScene(t, repo)
			s.dir = "/" // where a guest's builds directory is
			if s.store, err = jobdir.Open(h.State); err != nil {
				t.Fatal(err)
			}
			s.drive = func(ctx context.Context, d *jobdir.Dir) error {
				cmd := exec.CommandContext(ctx, h.VK, "node", "job", d.Path())
				cmd.Env = h.Env()
				out, err := cmd.CombinedOutput()
				if err != nil {
					return fmt.Errorf("vk node job: %w\n%s", err, out)
				}
				t.Logf("driver's log:\n%s", out)
				if size, err := d.Stage(); err != nil || size.Guest == nil || size.Guest.CPUs != 1 {
					t.Errorf("the last stage: %+v, %v", size, err)
				}
				if r, _, err := d.Result(); err != nil || r.Usage == nil || r.Usage.CPUMS == nil || r.Usage.MemMiB != 512 {
					t.Errorf("the usage: %+v, %v", r.Usage, err)
				}
				return nil
			}
			s.compare(name, 1, rec.Jobs[0], specials[name])
		})
	}
	left, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	if l := h.Left(left); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

package cijob_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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

// hostOnly are recordings that a guest cannot repeat, and why.
var hostOnly = map[string]string{
	"custom-fail-prepare-1": "the executor of the recording fails by itself",
	"custom-fail-prepare-2": "the executor of the recording fails by itself",
	"custom-fail-system":    "the executor of the recording fails by itself",
	"section-attempts-git":  "the executor of the recording fails by itself",
	"image-services":        "its images are of a registry that is not here",
}

// firstOnly are recordings whose later jobs need what the first one has left in
// the builds directory: a guest's is new for each job.
var firstOnly = map[string]string{
	"custom-git-strategies":    "a later job fetches into the first one's tree, and a guest begins without one",
	"git-clean-flags":          "a later job finds what the first one left, and a guest begins without it",
	"git-fetch-twice":          "a later job fetches into the first one's tree, and a guest begins without one",
	"git-submodules-recursive": "a later job fetches into the first one's tree, and a guest begins without one",
}

// guestNames are the recordings that TestInGuests runs: a few, or those that
// VK_RECORDINGS names, with commas between; all of them with "all".
func guestNames(t *testing.T) []string {
	switch v := os.Getenv("VK_RECORDINGS"); v {
	case "":
		return []string{"simple-success", "fail-exit3", "killed-by-signal", "cancel-canceling"}
	case "all":
		files, err := filepath.Glob(data + "/*.json")
		if err != nil || len(files) < 40 {
			t.Fatalf("%d recordings, %v", len(files), err)
		}
		var out []string
		for _, f := range files {
			name := strings.TrimSuffix(filepath.Base(f), ".json")
			if why := hostOnly[name]; why != "" {
				t.Logf("%s is left out: %s", name, why)
			} else if name != "common" {
				out = append(out, name)
			}
		}
		return out
	default:
		return strings.Split(v, ",")
	}
}

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
	names := guestNames(t)
	if _, err := h.Run(ctx, "pull", "local/default"); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
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
				cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // as who stops a node does
				out, err := cmd.CombinedOutput()
				if err != nil && (ctx.Err() == nil || !cmd.ProcessState.Success()) { // one that was stopped has done well, too
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
			for i, r := range rec.Jobs {
				if firstOnly[name] != "" && i > 0 {
					t.Logf("job %d and what comes after it are left out: %s", i+1, firstOnly[name])
					break
				}
				s.compare(name, i+1, r, specials[name])
			}
		})
	}
	left, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	if l := h.Left(left); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
}

// cutShort: gitlab-runner counts all that is in a trace towards the limit, and so
// what an executor says of itself: in a guest the same bytes hold less of the
// job's own output, and are as many.
func cutShort(t *testing.T, theirs, ours map[string][]string, out string) {
	const whole = 4096 + 119 // the limit and what is said of it (vectors/README.md 6.14)
	if len(out) != whole {
		t.Errorf("%d bytes, recorded are %d", len(out), whole)
	}
	if d := cmp.Diff(theirs["all"], ours["all"]); d != "" {
		t.Errorf("what is said of the limit (-recorded +ours):\n%s", d)
	}
	a, b := theirs["O"], ours["O"]
	last := len(b) - 1
	if last < 20 || last >= len(a) {
		t.Fatalf("%d lines, recorded are %d", len(b), len(a))
	}
	if d := cmp.Diff(a[:last], b[:last]); d != "" || !strings.HasPrefix(a[last], b[last]) {
		t.Errorf("the lines before the cut (-recorded +ours):\n%s\nand the cut one is %q of %q", d, b[last], a[last])
	}
}

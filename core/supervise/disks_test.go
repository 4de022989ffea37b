package supervise_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"virtkit/core/fsx"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// TestDisks: a guest gets its disks after its root and layer, mounts them, and
// they are held like the root while it lives.
func TestDisks(t *testing.T) {
	var lock string
	w := run(t, &supervisetest.Driver{Linked: []string{"git-lfs"}}, func(s *supervise.Spec, _ *supervise.Deps) {
		dir := filepath.Dir(s.Image.Path)
		for i, target := range []string{"/data", supervise.ToolsTarget} {
			img := s.Image
			img.Path = filepath.Join(dir, "image.disk"+string(rune('0'+i)))
			img.Lock = img.Path + ".lock"
			if err := os.WriteFile(img.Path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			lock = img.Lock
			s.Disks = append(s.Disks, supervise.Disk{Image: img, Target: target, Tools: i == 1})
		}
	})
	var serials []string
	for _, d := range w.driver.Last().Spec.Disks {
		if d.Serial == supervise.RootSerial || d.Serial == supervise.UpperSerial {
			continue
		}
		if _, err := os.Stat(d.Path); !d.ReadOnly || err != nil {
			t.Errorf("disk %+v, %v; want a read-only one that is there", d, err)
		}
		serials = append(serials, d.Serial)
	}
	setup := w.driver.Last().Setups()[0]
	if len(serials) != 2 || len(setup.Mounts) != 2 {
		t.Fatalf("disks %q, mounts %+v; want two", serials, setup.Mounts)
	}
	for i, m := range setup.Mounts {
		want := guestwire.Mount{Kind: "disk", Source: serials[i], FSType: "ext4", Target: []string{"/data", supervise.ToolsTarget}[i], ReadOnly: true}
		if m != want {
			t.Errorf("mount %+v, want %+v", m, want)
		}
	}
	if setup.Tools != supervise.ToolsTarget {
		t.Errorf("tools are %q, want %q", setup.Tools, supervise.ToolsTarget)
	}
	st, err := w.client.State(ctxFor(t))
	if err != nil || !slices.Equal(st.Linked, []string{"git-lfs"}) {
		t.Errorf("linked %q, %v", st.Linked, err)
	}
	if l, err := fsx.TryLock(lock, false); err == nil {
		l.Close()
		t.Error("a disk of a living guest could be removed")
	}
	if _, err := w.client.Stop(ctxFor(t), time.Second); err != nil {
		t.Fatal(err)
	}
	w.wait()
	l, err := fsx.TryLock(lock, false)
	if err != nil {
		t.Errorf("the disk is held after the guest's end: %v", err)
	}
	l.Close()
}

func TestAMissingDiskFailsTheStart(t *testing.T) {
	w := begin(t, &supervisetest.Driver{}, keep, func(s *supervise.Spec, _ *supervise.Deps) {
		s.Disks = []supervise.Disk{{Image: supervise.Image{Ref: "tools_dir:/opt/tools", Path: filepath.Join(filepath.Dir(s.Image.Path), "gone")}, Target: "/data"}}
	})
	w.wait()
	st, err := supervise.ReadState(w.dir)
	if err != nil || st.Exit == nil || st.Exit.Step != "image" {
		t.Errorf("state %+v, %v; want a failed step image", st.Exit, err)
	}
	l, err := fsx.TryLock(filepath.Join(filepath.Dir(w.dir), "image.lock"), false)
	if err != nil {
		t.Errorf("the root is still held: %v", err)
	}
	l.Close()
}

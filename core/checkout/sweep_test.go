package checkout_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"virtkit/core/checkout"
	"virtkit/core/fault"
)

// at opens the store at another time.
func (d dirs) at(t *testing.T, later time.Duration) *checkout.Store {
	return d.open(t, func(o *checkout.Options) { o.Now = func() time.Time { return time.Now().Add(later) } })
}

func TestSweep(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	sha := srv.commit(map[string]string{"f": "1"})
	s := d.open(t)
	idle := done(t, s, srv.job(sha))
	j := srv.job(sha)
	j.Slot = "tok-1"
	held := take(t, s, j)
	j.Slot = "tok-2"
	swapped := done(t, s, j)

	// Others' things beside them: a tree without a record, a symlink, a file,
	// another directory in the place of one of ours.
	outside := t.TempDir()
	precious := filepath.Join(outside, "precious")
	for _, f := range []string{precious, filepath.Join(d.root, "file")} {
		os.WriteFile(f, []byte("p"), 0o644)
	}
	for _, dir := range []string{filepath.Join(d.root, "other/project"), filepath.Join(d.root, "tok-0/unrecorded")} {
		os.MkdirAll(dir, 0o755)
	}
	os.Symlink(outside, filepath.Join(d.root, "link"))
	os.WriteFile(filepath.Join(outside, ".x.json"), []byte(`{"schema":"vk.checkout/1","used":"2001-01-01T00:00:00Z"}`), 0o600)
	os.Rename(swapped.Path, swapped.Path+".away")
	os.Mkdir(swapped.Path, 0o755)
	os.WriteFile(filepath.Join(swapped.Path, "mine"), nil, 0o644)

	if r, err := s.Sweep(t.Context(), checkout.SweepOptions{Idle: -1}); err != nil || len(r.Trees)+len(r.Mirrors) != 0 {
		t.Fatalf("a sweep within the idle time removed %+v (%v)", r, err)
	}
	two := d.at(t, 2*time.Hour)
	if r, err := two.Sweep(t.Context(), checkout.SweepOptions{Idle: -1, DryRun: true, Sizes: true}); err != nil || !slices.Equal(r.Trees, []string{"tok-0/7-project"}) || r.Bytes == 0 {
		t.Errorf("a dry run says %+v (%v)", r, err)
	}
	isFile(t, filepath.Join(idle.Path, "f"), "1")
	r, err := two.Sweep(t.Context(), checkout.SweepOptions{Idle: -1, Sizes: true})
	if err != nil || !slices.Equal(r.Trees, []string{"tok-0/7-project"}) || len(r.Mirrors) != 0 || r.Bytes == 0 {
		t.Errorf("the sweep says %+v (%v)", r, err)
	}
	isGone(t, idle.Path)
	isFile(t, filepath.Join(held.Path, "f"), "1")
	isFile(t, filepath.Join(swapped.Path, "mine"), "")
	isFile(t, precious, "p")
	for _, p := range []string{"file", "link", "other/project", "tok-0/unrecorded"} {
		if _, err := os.Lstat(filepath.Join(d.root, p)); err != nil {
			t.Errorf("%s: %v", p, err)
		}
	}
	kept := strings.Join(r.Kept, "\n")
	for _, want := range []string{"link: it is a symlink", "file: it is no directory", "it is not the directory that was recorded"} {
		if !strings.Contains(kept, want) {
			t.Errorf("kept are\n%s\nwithout %q", kept, want)
		}
	}
	held.Close()
	if r, err = d.at(t, 48*time.Hour).Sweep(t.Context(), checkout.SweepOptions{Idle: -1}); err != nil || !slices.Equal(r.Trees, []string{"tok-1/7-project"}) || len(r.Mirrors) != 1 {
		t.Errorf("the last sweep says %+v (%v)", r, err)
	}
	if left, _ := os.ReadDir(d.mirrors); len(left) != 0 {
		t.Errorf("of the mirror are left %v", left)
	}
}

// A removal that was cut short goes on with the next sweep, whatever the idle
// time, and a job makes its tree anew.
func TestSweepCutShort(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	sha := srv.commit(map[string]string{"f": "1"})
	tree := done(t, d.open(t), srv.job(sha))
	rec := filepath.Join(filepath.Dir(tree.Path), ".7-project.json")
	b, err := os.ReadFile(rec)
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(rec, []byte(strings.Replace(string(b), `"clean"`, `"going"`, 1)), 0o600)
	os.Remove(filepath.Join(tree.Path, "f"))
	again := done(t, d.open(t), srv.job(sha))
	isFile(t, filepath.Join(again.Path, "f"), "1")
	if again.Reused || again.Mended != "it was being removed" {
		t.Errorf("reused %v: %s", again.Reused, again.Mended)
	}
	b, _ = os.ReadFile(rec)
	os.WriteFile(rec, []byte(strings.Replace(string(b), `"clean"`, `"going"`, 1)), 0o600)
	if r, err := d.open(t).Sweep(t.Context(), checkout.SweepOptions{Idle: -1}); err != nil || len(r.Trees) != 1 {
		t.Errorf("%+v %v", r, err)
	}
	isGone(t, tree.Path)
}

func TestRootsThatOthersCanWrite(t *testing.T) {
	for name, c := range map[string]struct {
		parent, root os.FileMode
		ok           bool
	}{
		"private":   {0o755, 0o700, true},
		"shared":    {0o777, 0, false},
		"sticky":    {0o777 | os.ModeSticky, 0, true},
		"open root": {0o755, 0o777, false},
	} {
		parent := filepath.Join(t.TempDir(), "p")
		root := filepath.Join(parent, "vk")
		os.Mkdir(parent, 0o755)
		os.Chmod(parent, c.parent)
		if c.root != 0 {
			os.Mkdir(root, 0o700)
			os.Chmod(root, c.root)
		}
		_, err := checkout.Open(checkout.Options{Root: root})
		if (err == nil) != c.ok || err != nil && (fault.KindOf(err) != fault.System || !strings.Contains(fmt.Sprint(err), "can be written by others")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	link := filepath.Join(t.TempDir(), "vk")
	os.Symlink(t.TempDir(), link)
	if _, err := checkout.Open(checkout.Options{Root: link}); err == nil {
		t.Error("a symlink is taken for the root")
	}
	if _, err := checkout.Open(checkout.Options{Root: "/nonexistent/dir/vk"}); err == nil || fault.HintOf(err) == "" {
		t.Errorf("no parent: %v", err)
	}
}

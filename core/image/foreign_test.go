package image_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/image"
)

// TestGCLeavesWhatIsNotOurs: an image with a file of somebody else's in its
// directory, one whose directory is mounted, one of another user, stay whole
// and where they are, and are told.
func TestGCLeavesWhatIsNotOurs(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		root       bool
		do         func(t *testing.T, dir string) error
	}{
		{"a file", "notes is none of the store's files", false, func(_ *testing.T, dir string) error {
			return os.WriteFile(filepath.Join(dir, "notes"), nil, 0o600)
		}},
		{"a directory", "more is none of the store's files", false, func(_ *testing.T, dir string) error {
			return os.Mkdir(filepath.Join(dir, "more"), 0o700)
		}},
		{"a symlink by a name of ours", "spool is none of the store's files", false, func(_ *testing.T, dir string) error {
			return os.Symlink("/etc/passwd", filepath.Join(dir, "spool"))
		}},
		{"another user's file", "uid 4321", true, func(_ *testing.T, dir string) error {
			return os.Chown(filepath.Join(dir, "root.ext4"), 4321, 0)
		}},
		{"another user's directory", "uid 4321", true, func(_ *testing.T, dir string) error { return os.Chown(dir, 4321, 0) }},
		{"a mount", "a filesystem is mounted there", true, func(t *testing.T, dir string) error {
			if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
				t.Skipf("needs to mount: %v", err)
			}
			t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			return nil
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.root && os.Geteuid() != 0 {
				t.Skip("needs root, to give files away and to mount")
			}
			reg := newRegistry(t)
			reg.push(t, "r", "1", ociManifest, nil, gz(t, layer(t, f{name: "x", body: "one"})))
			s := openStore(t, image.Options{})
			img, err := resolve(t, s, reg.host()+"/r:1", image.ResolveOptions{})
			if err != nil {
				t.Fatal(err)
			}
			img.Close()
			dir := filepath.Dir(img.Path)
			if err := tc.do(t, dir); err != nil {
				t.Fatal(err)
			}
			for _, dry := range []bool{true, false} {
				r, err := s.GC(t.Context(), 0, dry)
				if err != nil || len(r.Images) != 0 || !strings.Contains(strings.Join(r.Skipped, "\n"), tc.want) {
					t.Errorf("dry %v: removed %v, skipped %q, %v; want it left for %q", dry, r.Images, r.Skipped, err, tc.want)
				}
			}
			if e, err := s.Evict(t.Context(), image.EvictOptions{Need: 1}); err != nil || e.Images != 0 {
				t.Errorf("evicted %+v, %v", e, err)
			}
			if cat(t, img.Path, "/x") != "one" {
				t.Error("the image changed")
			}
			ents, err := os.ReadDir(filepath.Join(s.Dir(), "staging"))
			if err != nil || len(ents) > 0 {
				t.Errorf("it was moved to staging: %v, %v", ents, err)
			}
		})
	}
}

func TestGCCountsBundlesInUse(t *testing.T) {
	s := openStore(t, image.Options{})
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "v"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"a", "b"} {
		if _, err := s.Import(t.Context(), src, n, image.ImportOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	img, err := resolve(t, s, "local/b", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for want := range 2 {
		if want = 1 - want; want == 0 {
			img.Close()
		}
		if r, err := s.GC(t.Context(), 0, false); err != nil || r.Held != want {
			t.Errorf("%d held, %v; want %d", r.Held, err, want)
		}
	}
}

package image_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// TestDefaultForReal makes local/default as a user's first run does. It takes
// minutes and Debian's archive, so it runs only when asked for.
func TestDefaultForReal(t *testing.T) {
	if os.Getenv("VIRTKIT_TEST_SLOW") == "" {
		t.Skip("needs minutes and Debian's archive: set VIRTKIT_TEST_SLOW=1")
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		t.Skip("needs mmdebstrap: apt-get install mmdebstrap")
	}
	s, err := image.Open(filepath.Join(t.TempDir(), "images"), image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := s.Parse("")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	img, err := s.Resolve(t.Context(), ref, image.ResolveOptions{Progress: func(p image.Progress) {
		if p.Text != "" {
			t.Logf("%6.1f s  %s: %s", time.Since(start).Seconds(), p.Stage, p.Text)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("local/default after %s: %d bytes", time.Since(start).Round(time.Second), img.Size)
	if out := cat(t, img.Path, "/usr/lib/os-release"); !strings.Contains(out, "ID=debian") {
		t.Errorf("/etc/os-release = %q", out)
	}
	if out, err := exec.Command("e2fsck", "-fn", img.Path).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	if keep := os.Getenv("VIRTKIT_TEST_KEEP"); keep != "" {
		if err := exec.Command("cp", "--sparse=always", img.Path, keep).Run(); err != nil {
			t.Error(err)
		}
	}
	start = time.Now()
	again, err := s.Resolve(t.Context(), ref, image.ResolveOptions{})
	if err != nil || again.Digest != img.Digest {
		t.Fatalf("again: %v, %v", again, err)
	}
	again.Close()
	t.Logf("again after %s", time.Since(start))
	img.Close()
}

func defaultTar(t testing.TB, entries ...f) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "default.tar")
	if err := os.WriteFile(p, layer(t, entries...), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestDefaultFromTar(t *testing.T) {
	tar := defaultTar(t, f{name: "etc/os-release", body: "ID=test"})
	s := openStore(t, image.Options{Getenv: func(k string) string { return map[string]string{image.EnvDefaultTar: tar}[k] }})
	img, err := resolve(t, s, "", image.ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if img.Ref != "local/default" || cat(t, img.Path, "/etc/os-release") != "ID=test" {
		t.Errorf("image = %+v", img)
	}
	first := img.Digest
	if err := os.WriteFile(tar, layer(t, f{name: "etc/os-release", body: "ID=other"}), 0o600); err != nil {
		t.Fatal(err)
	}
	if img, err = resolve(t, s, "local/default", image.ResolveOptions{}); err != nil || img.Digest == first {
		t.Errorf("another tar gives the same image: %v, %v", img, err)
	}
}

func TestDefaultNever(t *testing.T) {
	s := openStore(t, image.Options{Getenv: func(string) string { return "" }})
	if _, err := resolve(t, s, "", image.ResolveOptions{Policy: image.Never}); fault.KindOf(err) != fault.NotFound {
		t.Errorf("error = %v; want %s", err, fault.NotFound)
	}
}

func TestDefaultWithoutTool(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	s := openStore(t, image.Options{Getenv: func(string) string { return "" }})
	_, err := resolve(t, s, "local/default", image.ResolveOptions{})
	if err == nil || !strings.Contains(fault.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("error = %v, hint %q", err, fault.HintOf(err))
	}
	if left := leftovers(t, s); len(left) > 0 {
		t.Errorf("left in the store: %q", left)
	}
}

// TestSuiteSources: the host's own mirror is used, and no third party's.
func TestSuiteSources(t *testing.T) {
	dir := t.TempDir()
	write := func(name, body string) {
		t.Helper()
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sources.list", "# deb http://a.example/debian x main\ndeb [signed-by=/k arch=amd64] http://m.example/debian bookworm main\ndeb-src http://m.example/debian bookworm main\ndeb http://sec.example bookworm-security main\n")
	write("sources.list.d/tool.list", "deb https://tool.example/apt tool-bookworm main\n")
	want := "deb [signed-by=/k arch=amd64] http://m.example/debian bookworm main\ndeb http://sec.example bookworm-security main\n"
	if d := cmp.Diff(want, image.SuiteSources(dir, "bookworm")); d != "" {
		t.Errorf("one-line sources (-want +got):\n%s", d)
	}
	write("sources.list.d/debian.sources", "Types: deb deb-src\nURIs: http://m.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\nTypes: deb\nEnabled: no\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n")
	write("sources.list.d/node.sources", "Types: deb\nURIs: https://node.example\nSuites: nodistro\nComponents: main\n")
	want = "Types: deb deb-src\nURIs: http://m.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
	if d := cmp.Diff(want, image.SuiteSources(dir, "bookworm")); d != "" {
		t.Errorf("deb822 sources (-want +got):\n%s", d)
	}
	if got := image.SuiteSources(dir, "trixie"); got != "" {
		t.Errorf("sources of another suite = %q", got)
	}
}

package applets_test

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// builtVK is what `make build` made, which CI and `make test` do before.
func builtVK(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../bin/vk")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs bin/vk: make build")
	}
	return path
}

func TestBuiltVKIsStatic(t *testing.T) {
	f, err := elf.Open(builtVK(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("bin/vk has a %v segment: it is not static", p.Type)
		}
	}
}

func TestBuiltVKRunsInAnEmptyRoot(t *testing.T) {
	bin := builtVK(t)
	root := t.TempDir()
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "vk"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	chroot := []string{"chroot", root, "/vk", "version"}
	if os.Getuid() != 0 {
		chroot = append([]string{"unshare", "-r"}, chroot...)
		if exec.Command("unshare", "-r", "true").Run() != nil {
			t.Skip("needs root or user namespaces for chroot")
		}
	}
	out, err := exec.Command(chroot[0], chroot[1:]...).CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "vk ") {
		t.Errorf("%q: %v, %q", chroot, err, out)
	}
}

func TestBuiltLinks(t *testing.T) {
	dir := filepath.Dir(builtVK(t))
	for _, name := range []string{"vk-hub", "vk-gitlab", "vk-agent", "vk-runnerctl"} {
		if to, err := os.Readlink(filepath.Join(dir, name)); err != nil || to != "vk" {
			t.Errorf("%s leads to %q, %v; want vk", name, to, err)
		}
	}
}

func TestNoticeNamesWhatIsLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "netgo,osusergo", "-f", "{{with .Module}}{{.Path}}{{end}}", "virtkit").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	notice, err := os.ReadFile("../NOTICE")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for line := range strings.SplitSeq(string(notice), "\n") {
		if f := strings.Fields(line); strings.HasPrefix(line, "  ") && len(f) == 2 {
			listed[f[0]] = true
			if f[1] == "unknown" {
				t.Errorf("NOTICE: the licence of %s is unknown", f[0])
			}
		}
	}
	linked := map[string]bool{"virtkit": true}
	for m := range strings.FieldsSeq(string(out)) {
		linked[m] = true
		if m != "virtkit" && !listed[m] {
			t.Errorf("NOTICE lacks %s", m)
		}
	}
	for m := range listed {
		if !linked[m] {
			t.Errorf("NOTICE names %s, which is not linked", m)
		}
	}
}

package agent

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestToolsAreLinkedWhereTheImageLacksThem(t *testing.T) {
	root := t.TempDir()
	put := func(path string, mode os.FileMode) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []string{"git", "git-lfs", "gitlab-runner", "git-remote-http", "vk-agent"} {
		put("run/vk/tools/"+n, 0o755)
	}
	put("run/vk/tools/README", 0o644)
	put("run/vk/tools/share/file", 0o644)
	put("run/vk/bin/vk-agent", 0o755)
	put("opt/bin/git", 0o755)               // on the image's own PATH
	put("usr/bin/git-lfs", 0o755)           // not on it
	put("opt/bin/gitlab-runner", 0o644)     // no program
	put("opt/bin/git-remote-http/x", 0o644) // nor is that

	got, err := linkTools(root, "/run/vk/tools", "/run/vk/bin", []string{"PATH=/usr/bin", "A=b", "PATH=/opt/bin:/opt/other"})
	if want := []string{"git-lfs", "git-remote-http", "gitlab-runner"}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("linked %q, %v; want %q", got, err, want)
	}
	for _, n := range got {
		if to, err := os.Readlink(filepath.Join(root, "run/vk/bin", n)); err != nil || to != "/run/vk/tools/"+n {
			t.Errorf("%s leads to %q, %v", n, to, err)
		}
	}
	ents, err := os.ReadDir(filepath.Join(root, "run/vk/bin"))
	if err != nil || len(ents) != 4 {
		t.Errorf("there are %v, %v; want three links and vk-agent", ents, err)
	}

	// A PATH that the image does not set is the usual one.
	put("usr/local/bin/gitlab-runner", 0o755)
	if err := os.MkdirAll(filepath.Join(root, "b2"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, err = linkTools(root, "/run/vk/tools", "/b2", nil)
	if want := []string{"git", "git-remote-http", "vk-agent"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("linked %q, %v; want %q", got, err, want)
	}
	if _, err := linkTools(root, "/nowhere", "/b2", nil); err == nil {
		t.Error("a directory that is not there is no error")
	}
}

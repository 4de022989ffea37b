package image_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/core/image"
)

// toolsDir is a directory of tools: programs, a link to one beside it and one to
// one elsewhere, a directory, and what is no tool.
func toolsDir(t *testing.T) (dir, elsewhere string) {
	t.Helper()
	top := t.TempDir()
	dir, elsewhere = filepath.Join(top, "tools"), filepath.Join(top, "runner")
	for _, d := range []string{dir, filepath.Join(dir, "share")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, content string, mode os.FileMode) {
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "git"), "git one", os.ModeSetuid|0o750)
	write(filepath.Join(dir, "git-remote-http"), "http", 0o755)
	write(filepath.Join(dir, "README"), "text", 0o600)
	write(filepath.Join(dir, "share", "template"), "template", 0o644)
	write(elsewhere, "runner", 0o755)
	for name, to := range map[string]string{"git-remote-https": "git-remote-http", "gitlab-runner": elsewhere} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir, elsewhere
}

func TestToolsArePackedOnceAndAgainWhenTheyChange(t *testing.T) {
	dir, elsewhere := toolsDir(t)
	link := filepath.Join(filepath.Dir(dir), "current")
	if err := os.Symlink("tools", link); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, image.Options{})
	_, tools, err := image.ToolsIn(link)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := image.ToolNames(tools), []string{"git", "git-remote-http", "git-remote-https", "gitlab-runner"}; !slices.Equal(got, want) {
		t.Errorf("tools %q, want %q", got, want)
	}
	pack := func() *image.Image {
		t.Helper()
		img, err := s.Tools(t.Context(), link, image.ResolveOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { img.Close() })
		return img
	}
	first := pack()
	for path, want := range map[string]string{"/git": "git one", "/git-remote-http": "http", "/gitlab-runner": "runner", "/share/template": "template", "/README": "text"} {
		if got := cat(t, first.Path, path); got != want {
			t.Errorf("%s holds %q, want %q", path, got, want)
		}
	}
	for path, want := range map[string]string{
		"/git": "Mode:  0755", "/git-remote-https": `Fast link dest: "git-remote-http"`, "/gitlab-runner": "Type: regular", "/README": "Mode:  0644",
	} {
		if got := debugfs(t, first.Path, "stat "+path); !strings.Contains(got, want) || !strings.Contains(got, "User:     0   Group:     0") {
			t.Errorf("stat %s says\n%s\nwant root's and %q", path, got, want)
		}
	}
	if again := pack(); again.Digest != first.Digest || again.Path != first.Path {
		t.Errorf("packed again although nothing changed: %s, then %s", first.Digest, again.Digest)
	}
	if err := os.WriteFile(elsewhere, []byte("runner two"), 0o755); err != nil {
		t.Fatal(err)
	}
	second := pack()
	if second.Digest == first.Digest || cat(t, second.Path, "/gitlab-runner") != "runner two" {
		t.Errorf("a changed tool is not in the image %s", second.Digest)
	}
	if got := cat(t, first.Path, "/gitlab-runner"); got != "runner" {
		t.Errorf("the image of a running job changed: %q", got)
	}
	infos, err := s.List()
	if err != nil || len(infos) != 2 || infos[0].Kind != "tools" || !strings.HasPrefix(infos[0].Ref, image.ToolsPrefix) {
		t.Errorf("List = %+v, %v", infos, err)
	}
}

func TestToolsThatCannotBeTrustedAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(dir, elsewhere string) error
		want string
	}{
		{"missing", func(dir, _ string) error { return os.RemoveAll(dir) }, "no such file"},
		{"a file", func(dir, _ string) error {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			return os.WriteFile(dir, nil, 0o755)
		}, "is no directory"},
		{"writable by everybody", func(dir, _ string) error { return os.Chmod(dir, 0o757) }, "may be written by everybody"},
		{"a tool writable by everybody", func(dir, _ string) error { return os.Chmod(filepath.Join(dir, "git"), 0o757) }, "git may be written by everybody"},
		{"a link to what everybody may write", func(_, e string) error { return os.Chmod(e, 0o777) }, "runner may be written by everybody"},
		{"a link to nowhere", func(_, e string) error { return os.Remove(e) }, "no such file"},
		{"no tool", func(dir, _ string) error {
			for _, n := range []string{"git", "git-remote-http", "git-remote-https", "gitlab-runner"} {
				if err := os.Remove(filepath.Join(dir, n)); err != nil {
					return err
				}
			}
			return nil
		}, "has no program in it"},
		{"another user's", func(dir, _ string) error {
			if os.Geteuid() != 0 {
				return nil
			}
			return os.Chown(filepath.Join(dir, "git"), 4321, 0)
		}, "belongs to uid 4321"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.name == "another user's" && os.Geteuid() != 0 {
				t.Skip("needs root, to give a file away")
			}
			dir, elsewhere := toolsDir(t)
			if err := tc.do(dir, elsewhere); err != nil {
				t.Fatal(err)
			}
			s := openStore(t, image.Options{})
			img, err := s.Tools(t.Context(), dir, image.ResolveOptions{})
			img.Close()
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "tools_dir") || fault.KindOf(err) != fault.System || fault.HintOf(err) == "" {
				t.Errorf("%v (%v, hint %q), want %q", err, fault.KindOf(err), fault.HintOf(err), tc.want)
			}
			if left := leftovers(t, s); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

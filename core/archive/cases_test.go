package archive_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/archive"
)

// S08: a pattern that begins at the root of the file system, as one does whose
// variable is not set. It is refused before anything is read, and said to be
// outside the project's directory.
func TestPatternsFromTheRoot(t *testing.T) {
	root := project(t)
	for _, p := range []string{"/**/nothing.txt", "/**", "/*", "/proc/**/x", "//**//x", "/../**/x", root + "/../**/x", "../**/x", filepath.Dir(root) + "/**"} {
		var said notes
		got, err := archive.Select(archive.Selection{Tree: root, Paths: []string{p}}, said.say)
		if err != nil || len(got) > 0 {
			t.Errorf("%s selects %v, %v", p, names(got), err)
		}
		if len(said) != 1 || !strings.Contains(said[0], "is not a subpath of project directory: "+p) {
			t.Errorf("%s: %q", p, said)
		}
	}
	// Within the project a tree of many files is no matter.
	for i := range 40 {
		dir := filepath.Join(root, "many", strings.Repeat("d/", i%8), string(rune('a'+i%26)))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "nothing.txt"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var said notes
	got, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"many/**/nothing.txt"}}, said.say)
	if err != nil || len(got) == 0 {
		t.Errorf("%v, %v, %q", names(got), err, said)
	}
}

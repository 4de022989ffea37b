package failpoint_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"virtkit/core/archtest"
	"virtkit/core/failpoint"
)

func TestAt(t *testing.T) {
	failpoint.At("nowhere") // nothing is set
	var got []string
	failpoint.Set(func(p string) { got = append(got, p) })
	t.Cleanup(func() { failpoint.Set(nil) })
	failpoint.At(failpoint.Recorded)
	if !slices.Equal(got, []string{failpoint.Recorded}) {
		t.Error(got)
	}
	if n := testing.AllocsPerRun(100, func() { failpoint.At("x") }); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

// TestOnlyTestsSet reads all Go files: no program can be told to fail. Every
// point is somewhere, once.
func TestOnlyTestsSet(t *testing.T) {
	root, err := archtest.Root(".")
	if err != nil {
		t.Fatal(err)
	}
	tree, err := archtest.Load(root)
	if err != nil {
		t.Fatal(err)
	}
	at := regexp.MustCompile(`failpoint\.At\(failpoint\.(\w+)\)`)
	seen := map[string]int{}
	for _, f := range tree.Files {
		if f.Test || f.Folder() == "core/failpoint" {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, f.Path))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), "failpoint.Set(") {
			t.Errorf("%s sets a hook: only tests may", f.Path)
		}
		for _, m := range at.FindAllStringSubmatch(string(b), -1) {
			seen[m[1]]++
		}
	}
	if len(seen) != len(failpoint.Placing) {
		t.Errorf("%d points are met in the program, %d are listed: %v", len(seen), len(failpoint.Placing), seen)
	}
	for name, n := range seen {
		if n != 1 {
			t.Errorf("%s is at %d places", name, n)
		}
	}
}

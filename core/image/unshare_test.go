package image

import (
	"os"
	"path/filepath"
	"testing"
)

func TestHasSubIDs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(file, []byte("ann:100000:65536\n1002:165536:65536\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		uid, name string
		want      bool
	}{
		{"1001", "ann", true},
		{"1002", "bob", true},
		{"1003", "eve", false},
		{"100", "an", false},
	} {
		if got := hasSubIDs(file, tc.uid, tc.name); got != tc.want {
			t.Errorf("user %s (%s): %v, want %v", tc.name, tc.uid, got, tc.want)
		}
	}
	if hasSubIDs(file+".none", "1001", "ann") {
		t.Error("a file that is not there has no lines")
	}
}

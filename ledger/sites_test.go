package ledger_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fault"
	"virtkit/ledger"
)

// TestDamagedStandingListIsToldAndLeft: a list that cannot be read is named,
// with what to do, and is changed by nobody.
func TestDamagedStandingListIsToldAndLeft(t *testing.T) {
	dir := t.TempDir()
	const key = "42-acme/test-1"
	e := ledger.OpenEgress(dir)
	if _, err := e.Contacted(key, "", []string{"a.example", "b.example"}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sites", "42-acme", "test-1.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	bad := map[string][]byte{
		"cut in the middle": whole[:len(whole)/2], "cut at the end": whole[:len(whole)-3], "foreign": []byte("remember the milk\n"),
		"binary": {0, 1, 2, 0xff, 0xfe}, "too long": append(append([]byte{}, whole...), make([]byte, 64<<20)...),
	}
	for name, text := range bad {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := e.Standing(key)
		_, err2 := e.Contacted(key, "", []string{"c.example"})
		for _, err := range []error{err, err2} {
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v, want an error that names the file", name, err)
			} else if name != "too long" && fault.HintOf(err) == "" {
				t.Errorf("%s: %v has no hint", name, err)
			}
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != string(text) {
			t.Errorf("%s: the file was changed to %d bytes, %v", name, len(b), err)
		}
	}
	// Beside it, others' lists are as they were.
	if s, err := e.Contacted("42-acme/test-2", "", []string{"d.example"}); err != nil || len(s.Names("")) != 1 {
		t.Errorf("another job's list: %+v, %v", s, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if s, err := e.Contacted(key, "", []string{"c.example"}); err != nil || len(s.Names("")) != 1 {
		t.Errorf("begun anew: %+v, %v", s, err)
	}
}

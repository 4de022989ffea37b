package jobdir_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/wire"
)

// FuzzFiles reads any files of a job, and finds no secret in what it says of
// them.
func FuzzFiles(f *testing.F) {
	f.Add([]byte(`{"job":"x","spec":{"token":"s3cr3tword"},"accepted":1}`), []byte(`{"stage":"script"}`), []byte(`{"ok":true}`))
	f.Fuzz(func(t *testing.T, start, stage, result []byte) {
		dir := t.TempDir()
		s, err := jobdir.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		d, err := s.Create(jobdir.Start{Start: wire.Start{Job: wire.NewID(), Spec: []byte(`{}`), Envelope: wire.Envelope{Memory: 1, CPUs: 1}}})
		if err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(d.Path())
		if err != nil || len(entries) == 0 {
			t.Fatal(entries, err)
		}
		for name, b := range map[string][]byte{"start.json": start, "stage.json": stage, "result.json": result} {
			if err := os.WriteFile(filepath.Join(d.Path(), name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := d.Start(); err != nil && strings.Contains(err.Error(), "s3cr3tword") {
			t.Errorf("it quotes the file: %v", err)
		}
		d.Stage()
		d.Result()
	})
}

package nodehost_test

import (
	"os"
	"path/filepath"
	"testing"

	"virtkit/core/fleet/nodehost"
)

// FuzzRunnerConfig reads any config.toml of gitlab-runner.
func FuzzRunnerConfig(f *testing.F) {
	f.Add([]byte("concurrent = 4\n[[runners]]\nname = \"a\"\nexecutor = \"custom\"\n[runners.custom]\nrun_exec = \"vk\"\nrun_args = [\"gitlab\", \"run\"]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		root := nodehost.Root(t.TempDir())
		if err := os.WriteFile(root.Path("/config.toml"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := root.ReadRunnerConfig("/config.toml", "/usr/bin/vk"); (c == nil) == (err == nil) {
			t.Errorf("%+v, %v", c, err)
		}
	})
}

// FuzzPIDFile reads any record of a runner: one that is taken is of a process that
// is not the kernel's, or of none, and nothing of it is signalled.
func FuzzPIDFile(f *testing.F) {
	f.Add([]byte(`{"schema":"vk.runner/1","pid":1,"start":1,"boot_id":"x"}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		file := filepath.Join(dir, nodehost.PIDFile)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if alive, err := nodehost.ReadPID(dir); err == nil && alive {
			t.Errorf("%q is taken for a runner that lives", data)
		}
	})
}

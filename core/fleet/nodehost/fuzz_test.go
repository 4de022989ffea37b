package nodehost_test

import (
	"os"
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

package hubconf_test

import (
	"os"
	"path/filepath"
	"testing"

	"virtkit/core/fleet/hubconf"
)

// FuzzLoad reads any hub.toml: what is taken is valid.
func FuzzLoad(f *testing.F) {
	f.Add([]byte("addr = \"127.0.0.1:0\"\ndata_dir = \"/d\"\nheartbeat_secs = 5\n"))
	f.Add([]byte("kept_output = \"1MiB\"\nimage_affinity_max_load = 0.5\njob_history = 3\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := filepath.Join(t.TempDir(), "hub.toml")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := hubconf.Load(file, func(string) string { return "" }, "/home/x")
		if err != nil {
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("taken, and not valid: %v", err)
		}
	})
}

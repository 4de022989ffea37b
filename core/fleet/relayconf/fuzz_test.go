package relayconf_test

import (
	"testing"

	"virtkit/core/fleet/relayconf"
)

// FuzzParse reads any configuration of vk-gitlab; what it says of a bad one is
// of that file.
func FuzzParse(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte("[[runners]]\noutput_limit = \"1MiB\"\n[runners.envelope]\nmem = \"x\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := relayconf.Parse("config.toml", data, none)
		if (c == nil) == (err == nil) {
			t.Errorf("%+v, %v", c, err)
		}
		if err != nil && err.Error() == "" {
			t.Error("an error without a word")
		}
	})
}

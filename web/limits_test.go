package web_test

import (
	"testing"

	"virtkit/core/fleet/hubadmin"
	"virtkit/web"
)

// TestLimits holds the listeners' bounds to the reference's numbers.
func TestLimits(t *testing.T) {
	for name, v := range map[string][2]int{
		"connections before authentication": {web.MaxUnauthenticated, 256},
		"handshakes at once":                {web.MaxHandshakes, 256},
		"bytes of an admin reply":           {hubadmin.MaxReply, 16 << 20},
	} {
		if v[0] != v[1] {
			t.Errorf("%s: %d, the reference has %d", name, v[0], v[1])
		}
	}
}

package hub_test

import (
	"testing"

	"virtkit/core/fleet/hub"
)

// TestLimits holds what is kept, and how long, to the reference's numbers.
func TestLimits(t *testing.T) {
	const days = 24 * 3600
	for name, v := range map[string][2]int{
		"audit lines":                  {hub.AuditKept, 100_000},
		"seconds of a settled command": {hub.SettledKept, 30 * days},
		"seconds of a token":           {hub.MaxTokenTTL, 30 * days},
	} {
		if v[0] != v[1] {
			t.Errorf("%s: %d, the reference has %d", name, v[0], v[1])
		}
	}
}

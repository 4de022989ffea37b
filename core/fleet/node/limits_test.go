package node_test

import (
	"maps"
	"testing"
	"time"

	"virtkit/core/fleet/node"
)

// TestLimits holds the node's numbers to the reference's.
func TestLimits(t *testing.T) {
	if want := map[string]time.Duration{"first redial": time.Second, "longest redial": time.Minute, "good session": time.Minute, "inventory": time.Minute,
		"concurrency": 30 * time.Second, "lock": 10 * time.Second}; !maps.Equal(node.Times(), want) {
		t.Errorf("%v, the reference has %v", node.Times(), want)
	}
	if node.MaxJournal != 4096 || node.Copies != 3 {
		t.Errorf("a journal of %d, %d superseded sessions", node.MaxJournal, node.Copies)
	}
}

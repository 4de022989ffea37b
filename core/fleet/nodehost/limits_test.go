package nodehost_test

import (
	"testing"
	"time"

	"virtkit/core/fleet/nodehost"
)

// TestLimits holds the numbers of a node's host to the reference's.
func TestLimits(t *testing.T) {
	if nodehost.DefaultMemEvery != 30*time.Second || nodehost.TunePass != 30*time.Second {
		t.Errorf("memory is measured every %s, the concurrency set every %s", nodehost.DefaultMemEvery, nodehost.TunePass)
	}
	// A sixteenth of the last reading.
	for n, want := range map[int64]bool{1600: true, 1700: true, 1500: true, 1701: false, 1499: false} {
		if nodehost.Near(1600, n) != want {
			t.Errorf("%d after 1600: near is %v", n, !want)
		}
	}
	// A runner that dies is started after 1 to 60 seconds, and after 1 again once
	// one has run for a minute.
	wait := time.Duration(0)
	for i, want := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
		if wait = nodehost.NextRestart(wait, 59*time.Second); wait != time.Duration(want)*time.Second {
			t.Errorf("restart %d after %s, want %d s", i, wait, want)
		}
	}
	if wait = nodehost.NextRestart(wait, time.Minute); wait != time.Second {
		t.Errorf("after a good run: %s", wait)
	}
}

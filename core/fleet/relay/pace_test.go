package relay_test

import (
	"math"
	"testing"
	"time"

	"virtkit/core/fleet/relay"
)

// TestWaits: each wait is the one that was meant, also those for which a product
// of two durations would not fit 64 bits (from ten seconds on).
func TestWaits(t *testing.T) {
	p := relay.DefaultPace(time.Second)
	for wait := time.Second; wait <= time.Minute; wait += time.Second {
		for range 20 {
			if d := p.Redial(wait); d < wait || d > wait+wait/4+time.Millisecond {
				t.Fatalf("a dial after %v waits %v", wait, d)
			}
		}
	}
	for secs, want := range map[int]time.Duration{0: 0, -5: 0, 1: time.Second, 5: 5 * time.Second, 10: 10 * time.Second, 3600: time.Hour, 3601: time.Hour, math.MaxInt: time.Hour} {
		if d := p.After(secs); d != want {
			t.Errorf("retry_after_secs %d waits %v, want %v", secs, d, want)
		}
	}
	p.HubMin = 10 * time.Millisecond // a test's
	if d := p.Redial(time.Minute); d < 600*time.Millisecond || d > 751*time.Millisecond {
		t.Errorf("at a hundredth: %v", d)
	}
}

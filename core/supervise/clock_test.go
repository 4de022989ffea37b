package supervise_test

import (
	"testing"
	"time"

	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// S36: a guest that was paused has the host's clock again soon, also one that
// is never ended for its silence; a job that sets its clock keeps it.
func TestClockIsKept(t *testing.T) {
	for name, limit := range map[string]time.Duration{"watched": time.Hour, "never ended": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := run(t, &supervisetest.Driver{}, hold(limit), func(_ *supervise.Spec, d *supervise.Deps) { d.Times.Ping = 10 * time.Millisecond })
			g := w.driver.Last()
			lookedTwice := func() {
				t.Helper()
				_, _, from := g.Clock()
				eventually(t, "two pings", func() bool { _, _, n := g.Clock(); return n >= from+3 })
			}
			right := func(sets int) {
				t.Helper()
				eventually(t, "the right clock", func() bool { ahead, n, _ := g.Clock(); return n == sets && ahead.Abs() < 500*time.Millisecond })
			}
			lookedTwice()
			right(0)
			g.LoseTime(time.Minute)
			right(1)
			lookedTwice()
			g.LoseTime(400 * time.Millisecond) // pauses add up
			lookedTwice()
			g.LoseTime(400 * time.Millisecond)
			right(2)
			lookedTwice()
			g.ShiftClock(-time.Hour)
			lookedTwice()
			if ahead, n, _ := g.Clock(); n != 2 || ahead > -50*time.Minute {
				t.Errorf("a clock that the job set was set back: %v ahead, set %d times", ahead, n)
			}
			g.LoseTime(time.Minute)
			right(3)
		})
	}
}

// A clock that was wrong from the start is set too.
func TestClockWrongFromTheStart(t *testing.T) {
	w := run(t, &supervisetest.Driver{Ahead: -40 * 365 * 24 * time.Hour}, func(_ *supervise.Spec, d *supervise.Deps) { d.Times.Ping = 10 * time.Millisecond })
	eventually(t, "the right clock", func() bool {
		ahead, n, _ := w.driver.Last().Clock()
		return n == 1 && ahead.Abs() < 500*time.Millisecond
	})
}

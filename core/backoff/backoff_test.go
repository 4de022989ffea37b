package backoff_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"virtkit/core/backoff"
	"virtkit/core/fault"
)

var errBoom = errors.New("boom")

// run calls Retry in a bubble of synthetic time and returns what was called
// when, the error and the time taken.
//
//lint:ignore ST1008 the order in which the tests read them
func run(t *testing.T, ctx context.Context, p backoff.Policy, fn func(try int) error) (at []time.Duration, err error, took time.Duration) {
	t.Helper()
	begin := time.Now()
	err = backoff.Retry(ctx, p, func(context.Context) error {
		at = append(at, time.Since(begin))
		return fn(len(at))
	})
	return at, err, time.Since(begin)
}

func TestGrowsWithJitterUntilSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var waits []time.Duration
		p := backoff.Policy{Min: time.Second, Max: 4 * time.Second, Budget: -1,
			Notify: func(err error, try int, d time.Duration) {
				if err != errBoom || try != len(waits)+1 {
					t.Errorf("notified of %v, try %d", err, try)
				}
				waits = append(waits, d)
			}}
		at, err, _ := run(t, t.Context(), p, func(try int) error {
			if try == 7 {
				return nil
			}
			return errBoom
		})
		if err != nil || len(at) != 7 || len(waits) != 6 {
			t.Fatalf("err %v, %d calls, %d waits", err, len(at), len(waits))
		}
		for i, full := range []time.Duration{1, 2, 4, 4, 4, 4} {
			full *= time.Second
			if waits[i] < full/2 || waits[i] > full {
				t.Errorf("wait %d is %v, want between %v and %v", i+1, waits[i], full/2, full)
			}
		}
	})
}

func TestGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at, err, _ := run(t, t.Context(), backoff.Policy{Tries: 3}, func(int) error { return errBoom })
		e, ok := errors.AsType[*backoff.Error](err)
		if len(at) != 3 || !ok || e.Why != "tries" || e.Tries != 3 || !errors.Is(err, errBoom) || !strings.Contains(err.Error(), "tried 3 times") {
			t.Errorf("%d calls, %v", len(at), err)
		}
		_, err, took := run(t, t.Context(), backoff.Policy{Budget: 30 * time.Second}, func(int) error { return errBoom })
		if e, ok = errors.AsType[*backoff.Error](err); !ok || e.Why != "budget" || took > 30*time.Second || took < 15*time.Second {
			t.Errorf("after %v: %v", took, err)
		}
		// The zero policy is bounded too.
		if _, err, took = run(t, t.Context(), backoff.Policy{}, func(int) error { return errBoom }); err == nil || took > time.Minute {
			t.Errorf("zero policy: %v after %v", err, took)
		}
	})
}

func TestPermanent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at, err, _ := run(t, t.Context(), backoff.Policy{}, func(int) error { return backoff.Permanent(errBoom) })
		if len(at) != 1 || err != errBoom {
			t.Errorf("%d calls, %#v; want 1 and the plain error", len(at), err)
		}
		at, err, _ = run(t, t.Context(), backoff.Policy{}, func(int) error { return fmt.Errorf("deep: %w", backoff.Permanent(errBoom)) })
		if len(at) != 1 || !errors.Is(err, errBoom) {
			t.Errorf("wrapped: %d calls, %v", len(at), err)
		}
		at, err, _ = run(t, t.Context(), backoff.Policy{}, func(int) error { return fault.New(fault.Denied, "no") })
		if len(at) != 1 || fault.KindOf(err) != fault.Denied {
			t.Errorf("denied: %d calls, %v", len(at), err)
		}
		at, _, _ = run(t, t.Context(), backoff.Policy{Tries: 2}, func(int) error { return fault.New(fault.Unavailable, "down") })
		if len(at) != 2 {
			t.Errorf("unavailable: %d calls, want 2", len(at))
		}
		if backoff.Permanent(nil) != nil || backoff.After(nil, 1) != nil {
			t.Error("nil did not stay nil")
		}
	})
}

func TestAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := backoff.Policy{Tries: 2, Budget: time.Minute}
		at, err, _ := run(t, t.Context(), p, func(int) error { return fmt.Errorf("x: %w", backoff.After(errBoom, 42*time.Second)) })
		if len(at) != 2 || at[1] != 42*time.Second || !errors.Is(err, errBoom) {
			t.Errorf("calls at %v, %v; want the second exactly after 42s", at, err)
		}
		at, err, took := run(t, t.Context(), p, func(int) error { return backoff.After(errBoom, time.Hour) })
		if e, ok := errors.AsType[*backoff.Error](err); !ok || e.Why != "budget" || len(at) != 1 || took != 0 {
			t.Errorf("an hour against a budget of a minute: %d calls, %v after %v", len(at), err, took)
		}
		if err.Error() != "boom" {
			t.Errorf("one call alone is told as %q", err)
		}
		p.Budget, p.MaxAfter = -1, time.Minute
		if at, _, _ = run(t, t.Context(), p, func(int) error { return backoff.After(errBoom, time.Hour) }); len(at) != 1 {
			t.Errorf("MaxAfter does not hold: calls at %v", at)
		}
		// A peer that says "at once" for ever must not make us spin.
		if _, _, took = run(t, t.Context(), backoff.Policy{Tries: 100}, func(int) error { return backoff.After(errBoom, 0) }); took < 99*time.Millisecond {
			t.Errorf("100 calls in %v", took)
		}
	})
}

func TestContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("job cancelled")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(300*time.Millisecond, func() { cancel(cause) })
		_, err, took := run(t, ctx, backoff.Policy{Min: 10 * time.Second}, func(int) error { return errBoom })
		if took != 300*time.Millisecond || !errors.Is(err, cause) || !errors.Is(err, errBoom) || !strings.Contains(err.Error(), "job cancelled") {
			t.Errorf("after %v: %v; want both the cause and the last error at 300ms", took, err)
		}
		at, err, _ := run(t, ctx, backoff.Policy{}, func(int) error { return nil })
		if len(at) != 0 || !errors.Is(err, cause) {
			t.Errorf("called %d times after the end, %v", len(at), err)
		}
		// The call itself noticed the end: no further one.
		ctx, cancel2 := context.WithCancel(t.Context())
		at, err, _ = run(t, ctx, backoff.Policy{}, func(int) error { cancel2(); return ctx.Err() })
		if len(at) != 1 || !errors.Is(err, context.Canceled) {
			t.Errorf("%d calls, %v", len(at), err)
		}
	})
}

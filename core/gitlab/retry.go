package gitlab

import (
	"context"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// retry makes a call again when GitLab, or what stands before it, says that it
// could not serve it now (vectors/README.md 4, "Transport retry").
type retry struct {
	tries int
	first time.Duration // doubled with each try, and half of it random
	max   time.Duration
	sleep func(context.Context, time.Duration) error
	now   func() time.Time
}

func newRetry() retry {
	return retry{tries: 5, first: 100 * time.Millisecond, max: time.Minute, sleep: sleep, now: time.Now}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r retry) do(ctx context.Context, call func() (*answer, error)) (*answer, error) {
	for try := 0; ; try++ {
		a, err := call()
		if err != nil || !worthAnother(a.status) || try == r.tries-1 {
			return a, err
		}
		if err := r.sleep(ctx, r.wait(a, try)); err != nil {
			return nil, err
		}
	}
}

func worthAnother(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return status >= 512
}

// wait is what the answer asks for, or the next of the backoff.
func (r retry) wait(a *answer, try int) time.Duration {
	if v := a.header.Get("RateLimit-ResetTime"); v != "" {
		if t, err := http.ParseTime(v); err == nil {
			return min(max(t.Sub(r.now()), 0), r.max)
		}
	}
	if n, err := strconv.Atoi(a.header.Get("Retry-After")); err == nil && n >= 0 {
		return min(secs(n), r.max)
	}
	d := min(r.first<<try, r.max)
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// Another says whether a call whose answer was try, counted from 0, is to be
// made again, and after how long: for calls that are not a Client's.
func Another(status int, h http.Header, try int) (wait time.Duration, again bool) {
	r := newRetry()
	if !worthAnother(status) || try >= r.tries-1 {
		return 0, false
	}
	return r.wait(&answer{status: status, header: h}, try), true
}

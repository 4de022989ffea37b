// Package backoff is the one way to try something again: with a context, with
// growing and jittered waits, and with a budget, so that no loop spins and
// none goes on for ever.
//
// An error is tried again unless it is Permanent, carries a fault.Kind that
// is not retryable, or comes from the end of the context. A peer that said
// when to come back (Retry-After) is obeyed through After, within the budget.
package backoff

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"virtkit/core/fault"
)

// Policy says how often and how long. The zero value is Default.
type Policy struct {
	Min      time.Duration // first wait; 0 = 200 ms
	Max      time.Duration // longest wait; 0 = 10 s
	Tries    int           // calls in all; 0 = no limit but Budget
	Budget   time.Duration // from the first call: no wait goes beyond it; 0 = 1 minute, negative = none
	MaxAfter time.Duration // longest wait a peer may ask for; 0 = Budget
	// Notify, when set, is told before each wait: the error, the number of
	// the call that failed (from 1) and the wait.
	Notify func(err error, try int, wait time.Duration)
}

func (p Policy) filled() Policy {
	if p.Min <= 0 {
		p.Min = 200 * time.Millisecond
	}
	if p.Max <= 0 {
		p.Max = 10 * time.Second
	}
	p.Max = max(p.Max, p.Min)
	if p.Budget == 0 {
		p.Budget = time.Minute
	}
	return p
}

// permanent and after mark an error for Retry.
type permanent struct{ err error }

func (e permanent) Error() string { return e.err.Error() }
func (e permanent) Unwrap() error { return e.err }

type after struct {
	err error
	d   time.Duration
}

func (e after) Error() string { return e.err.Error() }
func (e after) Unwrap() error { return e.err }

// Permanent marks err as one that trying again cannot help. Retry returns the
// error inside. nil stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent{err}
}

// After marks err with the wait that the peer asked for. It is kept exactly
// (never shortened: coming early only makes it worse), so a wait beyond the
// budget ends the retrying. nil stays nil.
func After(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return after{err, max(d, 0)}
}

// Error is what Retry returns when it gave up on an error that could have
// been tried again.
type Error struct {
	Err   error         // of the last call
	Tries int           // calls made
	Took  time.Duration // from the first call
	Why   string        // "tries", "budget" or "context"
	Cause error         // of the context, when that ended it
}

// Error is the last error with how long it was tried.
func (e *Error) Error() string {
	s := fmt.Sprintf("%v (tried %d times in %s)", e.Err, e.Tries, e.Took.Round(100*time.Millisecond))
	if e.Tries == 1 {
		s = e.Err.Error()
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap is the last error, and the context's cause.
func (e *Error) Unwrap() []error {
	if e.Cause != nil {
		return []error{e.Err, e.Cause}
	}
	return []error{e.Err}
}

// Retry calls fn until it returns nil or an error that must not be tried
// again, ctx ends, or the policy's budget or tries are used up. fn is always
// called once unless ctx has ended before. A permanent error is returned as
// it is, giving up as *Error.
func Retry(ctx context.Context, p Policy, fn func(context.Context) error) error {
	p = p.filled()
	begin := time.Now()
	wait := p.Min
	for try := 1; ; try++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err := fn(ctx)
		if err == nil {
			return nil
		}
		if pe, ok := errors.AsType[permanent](err); ok {
			if err == error(pe) {
				return pe.err
			}
			return err
		}
		if fe, ok := errors.AsType[*fault.Error](err); ok && !fault.Table[fe.Kind].Retryable {
			return plain(err)
		}
		giveUp := func(why string, cause error) error {
			return &Error{Err: plain(err), Tries: try, Took: time.Since(begin), Why: why, Cause: cause}
		}
		if ctx.Err() != nil {
			return giveUp("context", context.Cause(ctx))
		}
		if p.Tries > 0 && try >= p.Tries {
			return giveUp("tries", nil)
		}
		d := jitter(wait)
		wait = min(wait*2, p.Max)
		if a, ok := errors.AsType[after](err); ok {
			if d = a.d; p.MaxAfter > 0 && d > p.MaxAfter {
				return giveUp("budget", nil)
			}
			d = max(d, time.Millisecond) // "at once" must not spin
		}
		if p.Budget > 0 && time.Since(begin)+d > p.Budget {
			return giveUp("budget", nil)
		}
		if p.Notify != nil {
			p.Notify(plain(err), try, d)
		}
		t := time.NewTimer(d)
		select {
		case <-ctx.Done():
			t.Stop()
			return giveUp("context", context.Cause(ctx))
		case <-t.C:
		}
	}
}

// plain takes the mark of After off when it is outermost.
func plain(err error) error {
	if a, ok := err.(after); ok {
		return a.err
	}
	return err
}

// jitter is between half of d and d: many clients of one peer spread out, and
// no wait is nearly nothing.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

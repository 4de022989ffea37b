package runner

import (
	"context"
	"fmt"
	"time"
)

// Step is one part of the work of prepare. Undo is called when a later step
// fails; it gets a context that does not end with the work's.
type Step struct {
	Name string
	Do   func(ctx context.Context) error
	Undo func(ctx context.Context) error // nil = nothing to undo
}

// undoTime bounds the undoing of one step.
const undoTime = 30 * time.Second

// RunSteps does the steps in order. When one fails, those done before are
// undone backwards, and so is the failed one, because it may have got half
// way: an Undo must cope with a Do that did nothing. after hears of each step
// that was done. The error names the step; what could not be undone is in
// left.
//
//lint:ignore ST1008 err is why the steps ended; left is what the undoing left
func RunSteps(ctx context.Context, steps []Step, now func() time.Time, after func(name string, took time.Duration)) (err error, left []error) {
	for i, s := range steps {
		if err = context.Cause(ctx); err == nil {
			t := now()
			if err = s.Do(ctx); err == nil {
				if after != nil {
					after(s.Name, now().Sub(t))
				}
				continue
			}
		}
		for j := i; j >= 0; j-- {
			if steps[j].Undo == nil {
				continue
			}
			uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
			if e := steps[j].Undo(uctx); e != nil {
				left = append(left, fmt.Errorf("undoing %s: %w", steps[j].Name, e))
			}
			cancel()
		}
		return &StepError{s.Name, err}, left
	}
	return nil, nil
}

// StepError is the failure of a step.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return e.Step + ": " + e.Err.Error() }

// Unwrap is what the step failed with.
func (e *StepError) Unwrap() error { return e.Err }

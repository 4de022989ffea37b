// Package fault is virtkit's error vocabulary: a kind that decides exit code,
// HTTP status and GitLab's failure reason; a public text for the user; a hint
// naming the next step; and a cause for the log. Everything else is a plain
// Go error wrapped with %w.
package fault

import (
	"errors"
	"fmt"
)

// Kind says what class of failure an error is. The values are strings because
// they are written to JSON output and must never change their meaning.
type Kind string

// The kinds. See Table for what each one means to a program.
const (
	Usage       Kind = "usage"       // wrong flags, arguments or configuration
	NotFound    Kind = "not_found"   // what was named does not exist
	Conflict    Kind = "conflict"    // exists already, or another state is needed
	Denied      Kind = "denied"      // not allowed, or not signed in
	Busy        Kind = "busy"        // locked, full, no capacity
	Unavailable Kind = "unavailable" // a peer (registry, hub, GitLab) cannot be reached
	JobFailed   Kind = "job_failed"  // the user's own program failed
	System      Kind = "system"      // virtkit or its host failed
	Interrupted Kind = "interrupted" // stopped by a signal
	Partial     Kind = "partial"     // some of the work was done
)

// Meaning is what a Kind becomes outside Go.
type Meaning struct {
	Exit      int    // process exit status (shared by all applets)
	HTTP      int    // status of an HTTP answer
	GitLab    string // failure_reason of a job
	Retryable bool   // may succeed if tried again unchanged
}

// Table maps every Kind; a test proves that it is complete.
var Table = map[Kind]Meaning{
	Usage:       {2, 400, "runner_configuration_error", false},
	NotFound:    {10, 404, "runner_system_failure", false},
	Conflict:    {1, 409, "runner_system_failure", false},
	Denied:      {12, 403, "runner_system_failure", false},
	Busy:        {11, 503, "runner_system_failure", true},
	Unavailable: {13, 502, "runner_system_failure", true},
	JobFailed:   {1, 422, "script_failure", false},
	System:      {1, 500, "runner_system_failure", true},
	Interrupted: {130, 499, "runner_system_failure", true},
	Partial:     {3, 207, "runner_system_failure", true},
}

// Error is a failure with a text fit for users. Build it with New or Newf.
type Error struct {
	Kind  Kind
	Text  string // public, lower case, no final period
	hint  string
	cause error
	exit  int // overrides the table when >= 0 and set
	has   bool
}

// New makes an error of a kind with a public text.
func New(k Kind, text string) *Error { return &Error{Kind: k, Text: text} }

// Newf is New with formatting. It does not wrap: use Because for a cause.
func Newf(k Kind, format string, a ...any) *Error {
	return &Error{Kind: k, Text: fmt.Sprintf(format, a...)}
}

// Hint returns a copy that also names the next step for the user.
func (e *Error) Hint(format string, a ...any) *Error {
	c := *e
	if len(a) == 0 {
		c.hint = format
	} else {
		c.hint = fmt.Sprintf(format, a...)
	}
	return &c
}

// Because returns a copy that carries the cause, found by errors.Is and As.
func (e *Error) Because(err error) *Error { c := *e; c.cause = err; return &c }

// WithExit returns a copy that ends the process with this status instead of
// the kind's. `vk run` uses it to pass a guest's exit code on.
func (e *Error) WithExit(code int) *Error { c := *e; c.exit, c.has = code, true; return &c }

// Error is the public text, followed by the cause when there is one.
func (e *Error) Error() string {
	switch {
	case e.cause == nil:
		return e.Text
	case e.Text == "":
		return e.cause.Error()
	}
	return e.Text + ": " + e.cause.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.cause }

// KindOf is the kind of the outermost Error in err's chain, or System.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		if _, known := Table[e.Kind]; known { // one that a newer peer sent is not
			return e.Kind
		}
	}
	return System
}

// HintOf is the outermost hint in err's chain, or "".
func HintOf(err error) string {
	for err != nil {
		e, ok := errors.AsType[*Error](err)
		if !ok {
			return ""
		}
		if e.hint != "" {
			return e.hint
		}
		err = e.cause
	}
	return ""
}

// ExitCode is the process status for err: 0 for nil, an explicit WithExit
// status, else the kind's.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[*Error](err); ok {
		if e.has {
			return e.exit
		}
	}
	return Table[KindOf(err)].Exit
}

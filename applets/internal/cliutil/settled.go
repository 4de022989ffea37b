package cliutil

import "errors"

// Settled says whether err's exit status is final: a usage error, or one that
// carries a status and no more.
func Settled(err error) bool {
	if _, ok := errors.AsType[silent](err); ok {
		return true
	}
	if _, ok := errors.AsType[*optionError](err); ok {
		return true
	}
	_, ok := errors.AsType[*usageError](err)
	return ok
}

package reclaim

import "syscall"

const (
	errInvalid = syscall.EINVAL
	errRange   = syscall.ERANGE
	errAgain   = syscall.EAGAIN
)

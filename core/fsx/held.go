package fsx

import "os"

// HeldLock wraps a descriptor whose flock is held already, such as one
// inherited from the process that took it. Lock.Close releases it.
func HeldLock(f *os.File) *Lock { return &Lock{f} }

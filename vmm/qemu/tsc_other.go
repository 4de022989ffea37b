//go:build !amd64

package qemu

// rdtsc has no meaning here: the guests are x86-64 and their rate is then that
// of QEMU's own clock, one tick a nanosecond.
func rdtsc() uint64 { return uint64(monotonicRaw()) }

package frame

import "golang.org/x/sys/cpu"

// wideSum is whether sumWide is there: the processor adds 32 bytes at a time,
// and the system keeps its registers.
var wideSum = cpu.X86.HasAVX2

// sumWide is the sum of the 32-bit words of b, in the processor's order. The
// length of b is a multiple of wideStep, from that on and below 4 GiB.
func sumWide(b []byte) uint64 { return sumAVX2(&b[0], len(b)) }

//go:noescape
func sumAVX2(b *byte, n int) uint64

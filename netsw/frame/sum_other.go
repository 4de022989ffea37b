//go:build !amd64

package frame

// wideSum: there is no sumWide but for amd64.
var wideSum = false

func sumWide([]byte) uint64 { panic("frame: no wide sum") }

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// cpuOf is the CPU time that a process has taken.
func cpuOf(pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	w := strings.Fields(rest)
	if len(w) < 13 {
		return 0
	}
	u, _ := strconv.ParseInt(w[11], 10, 64)
	s, _ := strconv.ParseInt(w[12], 10, 64)
	return time.Duration(u+s) * time.Second / 100 // USER_HZ
}

// peakOf is a process's largest resident set in MiB.
func peakOf(pid int) float64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for l := range strings.SplitSeq(string(b), "\n") {
		if rest, ok := strings.CutPrefix(l, "VmHWM:"); ok {
			kib, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kib / 1024
		}
	}
	return 0
}

package agent

import (
	"fmt"
	"os"
	"slices"
	"strconv"
)

// monitorSlack is by how much the runtime's monitor may wake late, in
// nanoseconds. It wakes 20 µs after 20 µs while anything runs, to see whether a
// call that blocks keeps a processor from others; in an emulated guest those
// wake-ups are half of all that an exec costs, and PID 1's calls do not block.
// Go's own limit for a monitor with nothing to do is 10 ms. Threads that the
// monitor makes inherit it: hence the call when a boot has made most of them,
// and what reap.Start does for the programs.
const monitorSlack = 2_000_000

// slowMonitor sets the timer slack of the runtime's monitor, which is the first
// thread that the runtime makes. proc is where procfs is mounted.
func slowMonitor(proc string) error {
	ents, err := os.ReadDir(proc + "/self/task")
	if err != nil {
		return err
	}
	var tids []int
	for _, e := range ents {
		if tid, err := strconv.Atoi(e.Name()); err == nil && tid != os.Getpid() {
			tids = append(tids, tid)
		}
	}
	if len(tids) == 0 {
		return fmt.Errorf("%s/self/task names no thread but the first", proc)
	}
	return os.WriteFile(fmt.Sprintf("%s/%d/timerslack_ns", proc, slices.Min(tids)), []byte(strconv.Itoa(monitorSlack)), 0)
}

package agent

import (
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"virtkit/core/guestwire"
)

// The kernel measures the timer of its processors (the local APIC's) at boot,
// against a tenth of a second of its clock, in a loop. On an emulated processor
// that its host lets wait meanwhile, the result is wrong by as much as it waited:
// timers are then late or early for the guest's life. When it waited for all of
// that tenth, the kernel takes the timer for broken and does without; such a
// guest runs until something sleeps, and then never again.

// timerDead is whether this kernel has given its timer up: by now it has
// interrupted a kernel that uses it hundreds of times. interrupts is
// /proc/interrupts.
func timerDead(interrupts string) bool {
	for line := range strings.Lines(interrupts) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "LOC:" {
			continue
		}
		counts := 0
		for _, w := range f[1:] {
			n, err := strconv.ParseUint(w, 10, 64)
			if err != nil {
				break // the row's name
			}
			if n > 0 {
				return false
			}
			counts++
		}
		return counts > 0
	}
	return false
}

// timerKHz is the rate that the kernel takes its timer to have, 0 when it does
// not tell. list is /proc/timer_list.
func timerKHz(list string) int {
	_, device, ok := strings.Cut(list, "Clock Event Device: lapic\n")
	if !ok {
		return 0
	}
	value := func(key string) uint64 {
		_, rest, ok := strings.Cut(device, "\n "+key+":")
		if !ok {
			return 0
		}
		word, _, _ := strings.Cut(rest, "\n")
		n, _ := strconv.ParseUint(strings.TrimSpace(word), 10, 64)
		return n
	}
	mult, shift := value("mult"), value("shift")
	if mult == 0 || mult >= 1<<40 || shift == 0 || shift > 40 {
		return 0
	}
	return int(mult * 1_000_000 >> shift)
}

// checkTimer resets a guest that would stop at its first sleep, so that its host
// boots another one. Else it returns timerKHz.
func (g *guest) checkTimer() int {
	if runtime.GOARCH != "amd64" {
		return 0
	}
	if b, err := os.ReadFile("/proc/interrupts"); err != nil || !timerDead(string(b)) {
		list, _ := os.ReadFile("/proc/timer_list") // without it, it is not known
		return timerKHz(string(list))
	}
	g.say("%sthe kernel has no timer: it could not measure the processor's while its host was busy", guestwire.ResetPhrase)
	// At once, without the kernel's good-byes, which may sleep.
	os.WriteFile("/proc/sysrq-trigger", []byte("b"), 0)
	unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	return 0
}

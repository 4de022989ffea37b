package agent

import "testing"

func TestTimerDead(t *testing.T) {
	const others = "           CPU0       CPU1       \n 49:       1665          0   IO-APIC  23-fasteoi   virtio0\nNMI:          0          0   Non-maskable interrupts\n"
	for name, c := range map[string]struct {
		file string
		want bool
	}{
		"alive":         {others + "LOC:       4831       4433   Local timer interrupts\n", false},
		"one processor": {others + "LOC:          0          3   Local timer interrupts\n", false},
		"dead":          {others + "LOC:          0          0   Local timer interrupts\n", true},
		"dead, alone":   {"LOC:          0   Local timer interrupts\n", true},
		"no such row":   {others, false},
		"no counts":     {"LOC: Local timer interrupts\n", false},
		"nothing":       {"", false},
	} {
		if got := timerDead(c.file); got != c.want {
			t.Errorf("%s: dead = %v, want %v", name, got, c.want)
		}
	}
}

func TestTimerKHz(t *testing.T) {
	const device = "Timer List Version: v0.10\n\nTick Device: mode:     1\nBroadcast device\nClock Event Device: <NULL>\n\n" +
		"Tick Device: mode:     1\nPer CPU device: 0\nClock Event Device: lapic\n max_delta_ns:   34359738\n min_delta_ns:   1000\n mult:           268435456\n shift:          32\n mode:           3\n"
	for name, c := range map[string]struct {
		file string
		want int
	}{
		"QEMU's":        {device, 62500},
		"none":          {"Clock Event Device: <NULL>\n mult: 268435456\n shift: 32\n", 0},
		"no mult":       {"Clock Event Device: lapic\n shift:          32\n", 0},
		"not a number":  {"Clock Event Device: lapic\n mult: x\n shift:          32\n", 0},
		"beyond bounds": {"Clock Event Device: lapic\n mult:          18446744073709551615\n shift:          32\n", 0},
		"nothing":       {"", 0},
	} {
		if got := timerKHz(c.file); got != c.want {
			t.Errorf("%s: %d kHz, want %d", name, got, c.want)
		}
	}
}

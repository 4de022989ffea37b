package qemu

import (
	"context"

	"virtkit/core/machine"
)

// Args is the command line of a plan with descriptors numbered as boot does.
func Args(s machine.Spec, accel string, tscKHz uint64) []string {
	p := plan{spec: s, accel: accel, tscKHz: tscKHz, qmp: 3, console: 4, control: 5, kernel: 6}
	n := 7
	next := func() int { n++; return n - 1 }
	if s.Kernel.Initrd != "" {
		p.initrd = next()
	}
	for range s.Disks {
		p.disks = append(p.disks, next())
	}
	if s.NIC != nil {
		p.nic = next()
	}
	for range s.Shares {
		p.shares = append(p.shares, next())
	}
	return p.args()
}

// SetProbe replaces the KVM probe and the device it needs.
func (d *Driver) SetProbe(dev string, probe func(context.Context, machine.Kernel) error) {
	d.dev, d.probe = dev, probe
}

// Classify is ending.classify.
func Classify(shutdown, stuck, console, status, words string, killed bool) (machine.Reason, string) {
	var w panicWatch
	for len(console) > 0 { // in pieces, as a socket gives them
		n := min(7, len(console))
		w.Write([]byte(console[:n]))
		console = console[n:]
	}
	return ending{shutdown: shutdown, stuck: stuck, panicked: w.last(), killed: killed, status: status, words: words}.classify()
}

// PanicWatch is what sees console bytes.
type PanicWatch = panicWatch

// Last is panicWatch.last.
func (w *panicWatch) Last() string { return w.last() }

// Held is how many bytes w holds.
func (w *panicWatch) Held() int { return cap(w.line) }

var (
	Processors   = processors
	TimerGivenUp = timerGivenUp
	Validate     = validate
	ParseVersion = parseVersion
	AtLeast      = atLeast
	MapCovers    = mapCovers
	MeasureTSC   = measureTSC
)

// ProbeWith runs the KVM probe with another accelerator.
func (d *Driver) ProbeWith(ctx context.Context, k machine.Kernel, accel string) error {
	return d.probeWith(ctx, k, accel)
}

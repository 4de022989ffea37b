package qemu

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

func monotonicRaw() int64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts)
	return ts.Nano()
}

// stamp reads both clocks as close together as the host lets it: of several
// tries, the one during which the least time went by.
func stamp() (tsc uint64, ns int64) {
	best := int64(1 << 62)
	for range 16 {
		a := monotonicRaw()
		t := rdtsc()
		b := monotonicRaw()
		if b-a < best {
			best, tsc, ns = b-a, t, a+(b-a)/2
		}
	}
	return tsc, ns
}

// measureTSC is the rate of the host's TSC in kHz, measured for d.
func measureTSC(d time.Duration) uint64 {
	t0, n0 := stamp()
	time.Sleep(d)
	t1, n1 := stamp()
	return uint64(float64(t1-t0)*1e6/float64(n1-n0) + 0.5)
}

// tsc is kept in the cache: the rate holds from one boot of the host to the
// next.
type tscRecord struct {
	BootID string `json:"boot_id"`
	KHz    uint64 `json:"khz"`
}

// ClockKHz is the rate of the host's TSC, measured once per boot of the host.
// It is what an emulated guest must be told as tsc_early_khz.
func (d *Driver) ClockKHz() (uint64, error) {
	d.tscMu.Lock()
	defer d.tscMu.Unlock()
	if d.tsc != 0 {
		return d.tsc, nil
	}
	id, err := bootID()
	if err != nil {
		return 0, fmt.Errorf("reading the host's boot id: %w", err)
	}
	var r tscRecord
	if d.cacheGet("tsc.json", &r) && r.BootID == id && r.KHz > 100_000 {
		d.tsc = r.KHz
		return d.tsc, nil
	}
	d.tsc = measureTSC(100 * time.Millisecond)
	d.cachePut("tsc.json", tscRecord{id, d.tsc})
	return d.tsc, nil
}

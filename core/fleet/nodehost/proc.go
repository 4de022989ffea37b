package nodehost

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"virtkit/core/admit"
	"virtkit/core/fleet/wire"
)

// CPUs counts the processors of the host and names their model, from
// /proc/cpuinfo.
func (r Root) CPUs() (n int, model string, err error) {
	b, err := r.read("/proc/cpuinfo")
	if err != nil {
		return 0, "", err
	}
	for _, l := range lines(b) {
		key, val, ok := strings.Cut(l, ":")
		if !ok {
			continue
		}
		switch strings.TrimSpace(key) {
		case "processor":
			n++
		case "model name":
			if model == "" {
				model = strings.Join(strings.Fields(val), " ")
			}
		}
	}
	if n == 0 {
		return 0, "", fmt.Errorf("/proc/cpuinfo names no processor")
	}
	return n, model, nil
}

// Memory is the host's memory in bytes, from /proc/meminfo.
func (r Root) Memory() (total, available int64, err error) {
	p := r.Path(admit.MemInfo)
	if total, err = admit.HostMemory(p, "MemTotal"); err != nil {
		return 0, 0, err
	}
	if available, err = admit.HostMemory(p, "MemAvailable"); err != nil {
		return 0, 0, err
	}
	return total, available, nil
}

// MemoryNodes are the host's memory nodes (NUMA), by number; none when the
// kernel knows of none.
func (r Root) MemoryNodes() ([]wire.MemoryNode, error) {
	dirs, err := filepath.Glob(r.Path("/sys/devices/system/node/node[0-9]*"))
	if err != nil {
		return nil, err
	}
	var out []wire.MemoryNode
	for _, d := range dirs {
		id, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(d), "node"))
		if err != nil {
			continue
		}
		n := wire.MemoryNode{ID: id}
		at := filepath.Join("/sys/devices/system/node", filepath.Base(d))
		b, err := r.read(filepath.Join(at, "meminfo"))
		if err != nil {
			return nil, err
		}
		for _, l := range lines(b) {
			// Node 0 MemTotal:       32768000 kB
			f := strings.Fields(l)
			if len(f) == 5 && f[2] == "MemTotal:" && f[4] == "kB" {
				kib, err := strconv.ParseInt(f[3], 10, 64)
				if err != nil || kib < 0 || kib > math.MaxInt64>>10 {
					return nil, fmt.Errorf("%s/meminfo: MemTotal is %q", at, f[3])
				}
				n.Memory = kib << 10
			}
		}
		if b, err := r.read(filepath.Join(at, "cpulist")); err == nil {
			n.CPUs = countCPUs(strings.TrimSpace(string(b)))
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b wire.MemoryNode) int { return a.ID - b.ID })
	return out, nil
}

// countCPUs counts the processors of a list such as "0-7,16-23".
func countCPUs(list string) int {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(lo)
		if err != nil {
			continue
		}
		b := a
		if isRange {
			if b, err = strconv.Atoi(hi); err != nil {
				continue
			}
		}
		n += max(0, b-a+1)
	}
	return n
}

// Load1 is the load average of the last minute.
func (r Root) Load1() (float64, error) {
	b, err := r.read("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 3 {
		return 0, fmt.Errorf("/proc/loadavg is %q", strings.TrimSpace(string(b)))
	}
	return parseReading("/proc/loadavg", f[0])
}

// parseReading reads a number that is neither negative nor infinite: a reading
// travels as JSON.
func parseReading(where, s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || v < 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 0, fmt.Errorf("%s: %q is no reading", where, s)
	}
	return v, nil
}

// Pressure reads /proc/pressure (the kernel's accounting/psi.rst); an error when
// the kernel does not account it.
func (r Root) Pressure() (*wire.Pressure, error) {
	p := &wire.Pressure{}
	for _, x := range []struct {
		file string
		to   **wire.Stall
	}{{"cpu", &p.CPU}, {"memory", &p.Memory}, {"io", &p.IO}} {
		b, err := r.read("/proc/pressure/" + x.file)
		if err != nil {
			return nil, err
		}
		if *x.to, err = parseStall("/proc/pressure/"+x.file, b); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// parseStall reads the lines "some" and "full" of a pressure file. Kernels
// before 5.13 have no "full" of processors.
func parseStall(where string, b []byte) (*wire.Stall, error) {
	s := &wire.Stall{}
	some := false
	for _, l := range lines(b) {
		f := strings.Fields(l)
		if len(f) == 0 {
			continue
		}
		avg10, avg60 := &s.Full10, &s.Full60
		switch f[0] {
		case "some":
			avg10, avg60, some = &s.Some10, &s.Some60, true
		case "full":
		default: // a later kernel's
			continue
		}
		for _, kv := range f[1:] {
			key, val, _ := strings.Cut(kv, "=")
			into := map[string]*float64{"avg10": avg10, "avg60": avg60}[key]
			if into == nil {
				continue
			}
			var err error
			if *into, err = parseReading(where, val); err != nil {
				return nil, err
			}
		}
	}
	if !some {
		return nil, fmt.Errorf("%s has no line \"some\"", where)
	}
	return s, nil
}

// Dev is the number of a block device.
type Dev struct{ Major, Minor uint32 }

// diskIO is what a block device has done since boot. Times are milliseconds.
type diskIO struct {
	reads, readMS   uint64 // operations that ended, and the time that each took by itself
	writes, writeMS uint64
	busyMS          uint64 // time in which there was any
}

// diskstats reads /proc/diskstats (the kernel's admin-guide/iostats.rst).
func (r Root) diskstats() (map[Dev]diskIO, error) {
	b, err := r.read("/proc/diskstats")
	if err != nil {
		return nil, err
	}
	out := map[Dev]diskIO{}
	for _, l := range lines(b) {
		f := strings.Fields(l)
		if len(f) < 14 {
			continue
		}
		var n [7]uint64
		bad := false
		for i, col := range []int{0, 1, 3, 6, 7, 10, 12} {
			if n[i], err = strconv.ParseUint(f[col], 10, 64); err != nil {
				bad = true
			}
		}
		if !bad {
			out[Dev{uint32(n[0]), uint32(n[1])}] = diskIO{n[2], n[3], n[4], n[5], n[6]}
		}
	}
	return out, nil
}

// since is what a device did between two looks that were elapsed apart: the
// mean time of a read and of a write, in milliseconds (0 when none ended), and
// the share of time in which it was busy, in percent. ok is false when nothing
// can be said, as when a counter went back.
func (d diskIO) since(before diskIO, elapsed time.Duration) (readMS, writeMS, busy float64, ok bool) {
	if elapsed <= 0 || d.reads < before.reads || d.writes < before.writes ||
		d.readMS < before.readMS || d.writeMS < before.writeMS || d.busyMS < before.busyMS {
		return 0, 0, 0, false
	}
	mean := func(ms, n uint64) float64 {
		if n == 0 {
			return 0
		}
		return float64(ms) / float64(n)
	}
	busy = 100 * float64(d.busyMS-before.busyMS) / (float64(elapsed) / float64(time.Millisecond))
	return mean(d.readMS-before.readMS, d.reads-before.reads), mean(d.writeMS-before.writeMS, d.writes-before.writes), min(busy, 100), true
}

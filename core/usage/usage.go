// Package usage is what jobs cost their host: the figures of one run, what a job
// has been using lately, what its next run is expected to need, and the lines
// and tables that tell of it. It is pure; core/supervise measures and the ledger
// remembers.
//
// A figure that could not be taken is nil and left out of every line: a job that
// moved nothing and a host that cannot tell are not the same.
package usage

import (
	"fmt"
	"strings"
	"time"
)

// Figures are what one run cost. All sizes are bytes.
type Figures struct {
	CPU time.Duration `json:"cpu"` // of all its processes on the host, the guests' own work included
	// Memory is the sum of the high-water marks of the processes that run at
	// the end: the most that was ever held, or more.
	Memory  int64    `json:"memory"`
	Overlay *Overlay `json:"overlay,omitempty"`
	IO      *IO      `json:"io,omitempty"`
	Net     *Net     `json:"net,omitempty"`
}

// Overlay is a guest's writable layer.
type Overlay struct {
	Used int64 `json:"used"` // high-water mark
	Size int64 `json:"size"`
}

// IO is what went through the host's block layer.
type IO struct {
	Read    int64 `json:"read"`
	Written int64 `json:"written"`
}

// Net is payload between the guests and the outside, from the guests' side.
type Net struct {
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
}

// Victim is a process that a guest's kernel killed for want of memory.
type Victim struct {
	Name   string        `json:"name"`
	PID    int           `json:"pid"`
	RSS    int64         `json:"rss"`    // anonymous memory that it held, bytes
	Uptime time.Duration `json:"uptime"` // of the guest at its death
}

// Line tells of the victim.
func (v Victim) Line() string {
	return fmt.Sprintf("guest OOM: the kernel killed %s (pid %d, %s RSS) at +%ds (raise MICROVM_MEM)",
		v.Name, v.PID, Size(v.RSS), int64(v.Uptime.Seconds()))
}

// Line is a job's figures at its end.
func (f Figures) Line() string {
	var b strings.Builder
	fmt.Fprintf(&b, "job resource usage: cpu %s, peak memory %s", Duration(f.CPU), Size(f.Memory))
	b.WriteString(moved(f.Overlay, nil, f.IO, f.Net))
	return b.String()
}

// moved is the part that two lines share, each clause after a comma.
func moved(o *Overlay, jobDir *int64, io *IO, n *Net) string {
	var b strings.Builder
	if o != nil {
		fmt.Fprintf(&b, ", overlay %s of %s", Size(o.Used), Size(o.Size))
	}
	if jobDir != nil {
		fmt.Fprintf(&b, ", job dir %s", Size(*jobDir))
	}
	if io != nil {
		fmt.Fprintf(&b, ", read %s, written %s", Size(io.Read), Size(io.Written))
	}
	if n != nil {
		fmt.Fprintf(&b, ", sent %s, received %s", Size(n.Sent), Size(n.Received))
	}
	return b.String()
}

// Size writes bytes as traces do: tenths from a GiB on, whole numbers below.
func Size(n int64) string {
	const kib, mib, gib, tib = 1 << 10, 1 << 20, 1 << 30, 1 << 40
	f := float64(n)
	switch {
	case n < 0:
		return "-" + Size(-n)
	case n < kib:
		return fmt.Sprintf("%d B", n)
	case n < mib-kib/2:
		return fmt.Sprintf("%.0f KiB", f/kib)
	case n < gib-mib/2:
		return fmt.Sprintf("%.0f MiB", f/mib)
	case n < tib-gib/20:
		return fmt.Sprintf("%.1f GiB", f/gib)
	}
	return fmt.Sprintf("%.1f TiB", f/tib)
}

// Duration writes a time in whole seconds: 34s, 2m14s, 1h0m5s.
func Duration(d time.Duration) string { return d.Round(time.Second).String() }

// Package account sums up a recording (core/atop) as the lines that a job's
// trace and `vk atop --summary` show: what the guest did with its processors
// and its memory, what it moved, where it was held up, and which processes the
// time went to. It sees one sample at a time and needs memory for the distinct
// commands, which are bounded.
//
// Totals count every sample. What is a rate (percentages of time, switches a
// second, the curves) leaves out the samples that cover a boot; what is a
// reading of a moment (load, memory held, averages of pressure) does not. What
// the guest's kernel could not tell is "-", not 0.
package account

import (
	"cmp"
	"slices"

	"virtkit/core/atop"
)

// Bounds of what is kept of a recording, which a guest may have written.
const (
	maxRows   = 1 << 16
	maxStalls = 1 << 10
	maxNames  = 256 // disks, interfaces, processors
)

// Account is what a recording adds up to. The zero value is not ready: use New.
type Account struct {
	samples, boots      int64
	first, last         int64 // epochs
	interval            int64 // that most samples have, seconds
	intervals           map[int64]int64
	host                string
	cpus                int64
	mem                 int64 // bytes
	swap                int64
	hasMem, hasSwap     bool
	hertz               int64
	cpu                 seconds
	hasCPU              bool
	busy, time          float64 // ticks, boots left out
	peakBusy            float64
	perCPU              map[int64]float64 // its busiest interval
	hasLoad             bool
	peakLoad            float64
	load                [3]float64
	switches            int64 // a second
	held, heldPart      float64
	cache               int64
	oom                 int64
	hasPSI              bool
	psi                 [3]pressure
	read, wrote         int64            // bytes
	disks               map[string]int64 // busy, ms
	nets                map[string]*traffic
	cpuCurve, heldCurve curve

	rows   map[atop.ProcKey]*row // watched ones
	names  map[string]*row       // those that no sample saw alive
	stalls *atop.Stalls
	stall  map[atop.ProcKey]*stall
	stacks map[int]*stackSet // last recorded, by pid
}

// seconds of processor time.
type seconds struct{ user, system, stolen, wait float64 }

type pressure struct {
	total  int64 // microseconds
	peak   float64
	peakAt int64
}

type traffic struct{ in, out int64 }

// row is one line of what ran.
type row struct {
	title        string
	pid          int
	runs, failed int64 // of those that no sample saw
	cpu          float64
	rss          int64 // KiB
	io           bool
	read, wrote  int64 // bytes
}

type stall struct {
	atop.Stalled
	stacks *stackSet
}

type stackSet struct {
	at     int64
	stacks []atop.Stack
}

// New returns an account of nothing.
func New() *Account {
	return &Account{
		intervals: map[int64]int64{}, perCPU: map[int64]float64{}, disks: map[string]int64{}, nets: map[string]*traffic{},
		rows: map[atop.ProcKey]*row{}, names: map[string]*row{}, stalls: atop.NewStalls(),
		stall: map[atop.ProcKey]*stall{}, stacks: map[int]*stackSet{},
	}
}

// Empty says whether no sample was added.
func (a *Account) Empty() bool { return a.samples == 0 }

// Add adds the next sample, of which nothing is kept but texts.
func (a *Account) Add(s *atop.Sample) {
	if a.samples == 0 {
		a.first, a.host = s.Epoch, s.Host
	}
	if n := a.intervals[s.Interval]; !s.Reset && (n > 0 || len(a.intervals) < maxNames) {
		a.intervals[s.Interval] = n + 1
		if most := a.intervals[a.interval]; n+1 > most {
			a.interval = s.Interval
		}
	}
	a.samples++
	if s.Reset {
		a.boots++
	}
	a.last = s.Epoch
	a.processors(s)
	a.memory(s)
	a.pressures(s)
	a.devices(s)
	for i := range s.Procs {
		a.process(&s.Procs[i])
	}
	a.stalled(s)
}

func (a *Account) processors(s *atop.Sample) {
	if s.Has&atop.HasCPU != 0 && s.CPU.Hertz > 0 {
		c := &s.CPU
		hz := float64(c.Hertz)
		a.hasCPU, a.hertz, a.cpus = true, c.Hertz, max(a.cpus, c.N)
		a.cpu.user += float64(c.User+c.Nice) / hz
		a.cpu.system += float64(c.Sys+c.IRQ+c.Soft) / hz
		a.cpu.stolen += float64(c.Steal) / hz
		a.cpu.wait += float64(c.Wait) / hz
		if total := c.Total(); !s.Reset && total > 0 {
			part := float64(c.Busy()) / float64(total)
			a.busy += float64(c.Busy())
			a.time += float64(total)
			a.peakBusy = max(a.peakBusy, part)
			a.cpuCurve.add(part)
		}
	}
	for i := range s.CPUs {
		c := &s.CPUs[i]
		if total := c.Total(); !s.Reset && total > 0 && (len(a.perCPU) < maxNames || a.perCPU[c.N] > 0) {
			a.perCPU[c.N] = max(a.perCPU[c.N], float64(c.Busy())/float64(total))
		}
	}
	if s.Has&atop.HasCPL != 0 {
		a.hasLoad = true
		a.peakLoad = max(a.peakLoad, s.CPL.Load1)
		a.load = [3]float64{s.CPL.Load1, s.CPL.Load5, s.CPL.Load15}
		if !s.Reset && s.Interval > 0 {
			a.switches = max(a.switches, s.CPL.Switches/s.Interval)
		}
	}
}

func (a *Account) memory(s *atop.Sample) {
	if m := &s.MEM; s.Has&atop.HasMEM != 0 && m.Phys > 0 {
		a.hasMem = true
		a.mem = m.Phys * m.PageSize
		held := float64(m.Held())
		a.held, a.heldPart = max(a.held, held*float64(m.PageSize)), max(a.heldPart, held/float64(m.Phys))
		a.cache = max(a.cache, (m.Cache+m.Buffers)*m.PageSize)
		if !s.Reset {
			a.heldCurve.add(held / float64(m.Phys))
		}
	}
	if s.Has&atop.HasSWP != 0 {
		a.hasSwap = true
		a.swap = s.SWP.Total * s.SWP.PageSize
	}
	if s.Has&atop.HasPAG != 0 && s.PAG.OOMKills > 0 {
		a.oom += s.PAG.OOMKills
	}
}

func (a *Account) pressures(s *atop.Sample) {
	if s.Has&atop.HasPSI == 0 || !s.PSI.Present {
		return
	}
	a.hasPSI = true
	for i, v := range []*atop.Stall{&s.PSI.CPUSome, &s.PSI.MemSome, &s.PSI.IOSome} {
		a.psi[i].total += v.Total
		if v.Avg10 > a.psi[i].peak {
			a.psi[i].peak, a.psi[i].peakAt = v.Avg10, s.Epoch
		}
	}
}

func (a *Account) devices(s *atop.Sample) {
	for i := range s.DSK {
		d := &s.DSK[i]
		a.read += d.RSect * 512
		a.wrote += d.WSect * 512
		if _, ok := a.disks[d.Name]; ok || len(a.disks) < maxNames {
			a.disks[d.Name] += d.BusyMS
		}
	}
	for i := range s.NET {
		n := &s.NET[i]
		if n.Name == "lo" || n.RBytes+n.SBytes == 0 {
			continue
		}
		t := a.nets[n.Name]
		if t == nil {
			if len(a.nets) >= maxNames {
				continue
			}
			t = &traffic{}
			a.nets[n.Name] = t
		}
		t.in += n.RBytes
		t.out += n.SBytes
	}
}

func (a *Account) process(p *atop.Proc) {
	var r *row
	if !p.Ended() || !p.New { // one that began and ended between two samples was seen by none
		r = a.rows[p.Key()]
	}
	if r == nil && (!p.Ended() || !p.New) && len(a.rows) < maxRows {
		r = &row{pid: p.PID, title: p.Title()}
		a.rows[p.Key()] = r
	}
	if r == nil {
		name := p.Name
		if r = a.names[name]; r == nil {
			if len(a.names) >= maxRows {
				name = "(others)"
			}
			if r = a.names[name]; r == nil {
				r = &row{pid: p.PID, title: name}
				a.names[name] = r
			}
		}
		if p.Ended() {
			r.runs++
			if p.Failed() {
				r.failed++
			}
		}
	} else if !p.Ended() {
		r.title = p.Title()
	}
	if p.Hertz > 0 {
		r.cpu += float64(p.User+p.Sys) / float64(p.Hertz)
	}
	r.rss = max(r.rss, p.RSize)
	if p.IO {
		r.io = true
		r.read += p.RSect * 512
		r.wrote += p.WSect * 512
	}
}

func (a *Account) stalled(s *atop.Sample) {
	if s.Reset {
		clear(a.stacks)
	}
	for i := range s.Stacks {
		k := s.Stacks[i]
		set := a.stacks[k.PID]
		if set == nil || set.at != s.Epoch {
			if len(a.stacks) >= maxStalls {
				continue
			}
			set = &stackSet{at: s.Epoch}
			a.stacks[k.PID] = set
		}
		if len(set.stacks) < atop.StackThreads {
			set.stacks = append(set.stacks, k)
		}
	}
	a.stalls.Add(s, func(x atop.Stalled) {
		t := a.stall[x.Key]
		if t == nil {
			if len(a.stall) >= maxStalls {
				return
			}
			t = &stall{}
			a.stall[x.Key] = t
		}
		if x.Until-x.Since >= t.Until-t.Since {
			t.Stalled = x
			t.Channels = slices.Clone(x.Channels)
		}
		if t.stacks == nil {
			t.stacks = a.stacks[x.Key.PID]
		}
	})
}

// busiest are the rows by the processor time that they used.
func (a *Account) busiest() []*row {
	out := make([]*row, 0, len(a.rows)+len(a.names))
	for _, r := range a.rows {
		out = append(out, r)
	}
	for _, r := range a.names {
		out = append(out, r)
	}
	slices.SortFunc(out, func(x, y *row) int {
		return cmp.Or(cmp.Compare(y.cpu, x.cpu), cmp.Compare(y.rss, x.rss), cmp.Compare(x.title, y.title), cmp.Compare(x.pid, y.pid))
	})
	return out
}

// longest are the stalls: those of the job's own processes first, then the
// longest.
func (a *Account) longest() []*stall {
	out := make([]*stall, 0, len(a.stall))
	for _, s := range a.stall {
		out = append(out, s)
	}
	slices.SortFunc(out, func(x, y *stall) int {
		if x.First != y.First {
			if y.First {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(y.Until-y.Since, x.Until-x.Since), cmp.Compare(x.Key.PID, y.Key.PID))
	})
	return out
}

// curve keeps at most curveMax points: when there are more, each stands for
// twice as many samples, and is their highest.
type curve struct {
	points []float64
	every  int // samples a point
	have   int // samples of the last point
}

const curveMax = 120 // twice what is shown

func (c *curve) add(v float64) {
	if c.every == 0 {
		c.every = 1
	}
	if c.have > 0 && c.have < c.every {
		last := &c.points[len(c.points)-1]
		*last = max(*last, v)
		c.have++
		return
	}
	if len(c.points) == curveMax {
		for i := range curveMax / 2 {
			c.points[i] = max(c.points[2*i], c.points[2*i+1])
		}
		c.points = c.points[:curveMax/2]
		c.every *= 2
	}
	c.points = append(c.points, v)
	c.have = 1
}

// draw is the curve in at most width characters, from nothing to all.
func (c *curve) draw(width int) string {
	p := c.points
	for len(p) > width {
		q := make([]float64, 0, len(p)/2+1)
		for i := 0; i < len(p); i += 2 {
			q = append(q, max(p[i], p[min(i+1, len(p)-1)]))
		}
		p = q
	}
	bars := []rune("▁▂▃▄▅▆▇█")
	var out []rune
	for _, v := range p {
		out = append(out, bars[min(max(int(v*float64(len(bars))), 0), len(bars)-1)])
	}
	return string(out)
}

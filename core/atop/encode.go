package atop

import (
	"strconv"
	"time"
)

// enc appends the lines of one sample.
type enc struct {
	b    []byte
	head []byte // " host epoch date time interval"
}

// AppendSample appends the sample's lines to dst, from RESET, where there is
// one, to SEP.
func AppendSample(dst []byte, s *Sample) []byte {
	e := enc{b: dst, head: []byte(" ")}
	e.head = append(e.head, word(s.Host)...)
	e.head = append(append(e.head, ' '), strconv.FormatInt(s.Epoch, 10)...)
	e.head = time.Unix(s.Epoch, 0).UTC().AppendFormat(e.head, " 2006/01/02 15:04:05 ")
	e.head = strconv.AppendInt(e.head, s.Interval, 10)
	if s.Reset {
		e.b = append(e.b, "RESET\n"...)
	}
	e.system(s)
	e.processes(s)
	return append(e.b, "SEP\n"...)
}

// word is a text that is one field.
func word(s string) string {
	if s == "" {
		return "-"
	}
	b := []byte(s)
	for i, c := range b {
		if c <= ' ' || c == 0x7f {
			b[i] = '_'
		}
	}
	return string(b)
}

func (e *enc) label(l string) { e.b = append(append(e.b, l...), e.head...) }
func (e *enc) end()           { e.b = append(e.b, '\n') }
func (e *enc) word(s string)  { e.b = append(append(e.b, ' '), word(s)...) }
func (e *enc) raw(s string)   { e.b = append(append(e.b, ' '), s...) }

func (e *enc) ints(v ...int64) {
	for _, n := range v {
		e.b = strconv.AppendInt(append(e.b, ' '), n, 10)
	}
}

func (e *enc) float(v float64, digits int) {
	e.b = strconv.AppendFloat(append(e.b, ' '), v, 'f', digits, 64)
}

// text is a text between parentheses, without control characters and bounded.
func (e *enc) text(s string, limit int) {
	e.b = append(e.b, " ("...)
	for i := 0; i < len(s) && i < limit; i++ {
		c := s[i]
		if c < ' ' || c == 0x7f {
			c = ' '
		}
		e.b = append(e.b, c)
	}
	e.b = append(e.b, ')')
}

func (e *enc) flag(v bool) {
	if v {
		e.raw("y")
	} else {
		e.raw("n")
	}
}

func (e *enc) system(s *Sample) {
	cpu := func(label string, c *CPU) {
		e.label(label)
		e.ints(c.Hertz, c.N, c.Sys, c.User, c.Nice, c.Idle, c.Wait, c.IRQ, c.Soft, c.Steal, c.Guest)
		e.raw("0 100 0 0") // frequency, its percentage, instructions and cycles: not known
		e.end()
	}
	if s.Has&HasCPU != 0 {
		cpu("CPU", &s.CPU)
	}
	for i := range s.CPUs {
		cpu("cpu", &s.CPUs[i])
	}
	if s.Has&HasCPL != 0 {
		e.label("CPL")
		e.ints(s.CPL.CPUs)
		e.float(s.CPL.Load1, 2)
		e.float(s.CPL.Load5, 2)
		e.float(s.CPL.Load15, 2)
		e.ints(s.CPL.Switches, s.CPL.Interrupts)
		e.end()
	}
	if m := &s.MEM; s.Has&HasMEM != 0 {
		e.label("MEM")
		e.ints(m.PageSize, m.Phys, m.Free, m.Cache, m.Buffers, m.Slab, m.Dirty, m.SlabReclaim, 0,
			m.Shmem, 0, 0, m.HugeSize, m.HugeTotal, m.HugeFree, 0, 0, 0, m.TCP, m.UDP, m.PageTabs)
		e.end()
	}
	if w := &s.SWP; s.Has&HasSWP != 0 {
		e.label("SWP")
		e.ints(w.PageSize, w.Total, w.Free, w.Cached, w.Committed, w.Limit, w.Cached, w.ZStored, w.ZPool)
		e.end()
	}
	if p := &s.PAG; s.Has&HasPAG != 0 {
		e.label("PAG")
		e.ints(p.PageSize, p.Scans, p.AllocStalls, 0, p.In, p.Out, p.OOMKills, p.CompactStalls, p.Migrated, p.NUMA, p.Ins, p.Outs)
		e.end()
	}
	if p := &s.PSI; s.Has&HasPSI != 0 {
		e.label("PSI")
		e.flag(p.Present)
		for _, v := range []*Stall{&p.CPUSome, &p.MemSome, &p.MemFull, &p.IOSome, &p.IOFull} {
			e.float(v.Avg10, 1)
			e.float(v.Avg60, 1)
			e.float(v.Avg300, 1)
			e.ints(v.Total)
		}
		e.end()
	}
	e.devices(s)
}

func (e *enc) devices(s *Sample) {
	for i := range s.DSK {
		d := &s.DSK[i]
		e.label("DSK")
		e.word(d.Name)
		e.ints(d.BusyMS, d.Reads, d.RSect, d.Writes, d.WSect, d.Discards, d.DSect, d.InFlight)
		e.float(d.Queue, 2)
		e.end()
	}
	if u := &s.TCP; s.Has&HasNET != 0 {
		e.label("NET")
		e.raw("upper")
		e.ints(u.TCPIn, u.TCPOut, u.UDPIn, u.UDPOut, u.IPIn, u.IPOut, u.IPDeliver, u.IPForward,
			u.UDPErrs, u.UDPNoPort, u.ActiveOpens, u.PassiveOpens, u.Established, u.Resent, u.TCPErrs, u.Resets)
		e.end()
	}
	for i := range s.NET {
		n := &s.NET[i]
		e.label("NET")
		e.word(n.Name)
		e.ints(n.RPack, n.RBytes, n.SPack, n.SBytes, n.Speed, n.Duplex)
		e.end()
	}
}

// noLimit is what atop prints for the limits of a control group where there is
// no support of them.
const noLimit = -3

func (e *enc) processes(s *Sample) {
	for i := range s.Procs {
		e.prg(&s.Procs[i])
	}
	for i := range s.Procs {
		p := &s.Procs[i]
		e.proc("PRC", p)
		e.ints(p.Hertz, p.User, p.Sys, int64(p.Nice), int64(p.Prio), int64(p.RTPrio), int64(p.Policy), int64(p.CPU), 0, int64(p.PID))
		e.raw("y")
		e.ints(p.RunDelay)
		e.text(p.WChan, MaxName)
		e.ints(p.BlkDelay, noLimit, noLimit)
		e.end()
	}
	for i := range s.Procs {
		p := &s.Procs[i]
		e.proc("PRM", p)
		e.ints(p.PageSize, p.VSize, p.RSize, p.VExec, p.VGrow, p.RGrow, p.MinFlt, p.MajFlt, p.VLibs, p.VData, p.VStack, p.VSwap, int64(p.PID))
		e.raw("y 0")
		e.ints(p.VLock, noLimit, noLimit, noLimit, noLimit)
		e.end()
	}
	for i := range s.Procs {
		p := &s.Procs[i]
		e.proc("PRD", p)
		e.raw("n")
		e.flag(p.IO)
		e.ints(p.Reads, p.RSect, p.Writes, p.WSect, p.CancelWSect, int64(p.PID))
		e.raw("n y")
		e.end()
	}
	for i := range s.Waits {
		w := &s.Waits[i]
		e.label("PRW")
		e.ints(int64(w.PID))
		e.text(w.Name, MaxName)
		for _, c := range w.Channels {
			e.word(c.Name)
			e.b = strconv.AppendInt(append(e.b, ':'), int64(c.Threads), 10)
		}
		e.end()
	}
	for i := range s.Stacks {
		k := &s.Stacks[i]
		e.label("PRK")
		e.ints(int64(k.PID))
		e.text(k.Name, MaxName)
		e.ints(int64(k.TID))
		e.word(k.WChan)
		for n, f := range k.Frames {
			if n == 0 {
				e.word(f)
			} else {
				e.b = append(append(e.b, ';'), word(f)...)
			}
		}
		if len(k.Frames) == 0 {
			e.raw("-")
		}
		e.end()
	}
}

// proc begins a line of a process.
func (e *enc) proc(label string, p *Proc) {
	e.label(label)
	e.ints(int64(p.PID))
	e.text(p.Name, MaxName)
	e.b = append(e.b, ' ', p.State)
}

func (e *enc) prg(p *Proc) {
	e.proc("PRG", p)
	e.ints(int64(p.UID), int64(p.GID), int64(p.PID), int64(p.Threads), int64(p.Exit), p.Start)
	e.text(p.Cmdline, MaxCmdline)
	e.ints(int64(p.PPID), int64(p.Running), int64(p.Sleeping), int64(p.Blocked),
		int64(p.EUID), int64(p.EGID), int64(p.SUID), int64(p.SGID), int64(p.FUID), int64(p.FGID), p.Elapsed)
	e.raw("y 0 0 -")
	if p.New {
		e.raw("N")
	} else {
		e.raw("-")
	}
	e.text(p.CGroup, MaxCmdline)
	e.end()
}

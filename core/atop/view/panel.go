package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"virtkit/core/atop"
	"virtkit/core/atop/account"
)

// Key is something that was pressed.
type Key int

// The keys. Any other rune is passed as it is.
const (
	Left Key = -iota - 1
	Right
	Home
	End
	Enter
	Escape
	Backspace
)

// order is what processes are sorted by.
type order int

const (
	byCPU order = iota
	byMemory
	byDisk
)

// Panel is the state of a walk through a recording.
type Panel struct {
	name   string
	index  *Index
	follow bool

	at     int
	paused bool // of a follower: it stays where it is
	sort   order
	whole  bool // show totals of the job up to now
	filter string
	typing bool
	totals *totals
	err    error
}

// New returns a panel of a log. With follow, it moves with the samples that
// come.
func New(name string, x *Index, follow bool) *Panel {
	p := &Panel{name: name, index: x, follow: follow, totals: &totals{}}
	if follow {
		p.at = max(0, x.Len()-1)
	}
	return p
}

// Update looks for samples that have come, and moves with them.
func (p *Panel) Update() {
	n := p.index.Len()
	if p.err = p.index.Refresh(); p.err == nil && !p.paused && p.index.Len() > n {
		p.at = p.index.Len() - 1
	}
}

// Press does what a key asks for and says whether the walk goes on.
func (p *Panel) Press(k Key) bool {
	if p.typing {
		p.input(k)
		return true
	}
	last := max(0, p.index.Len()-1)
	switch k {
	case 'q', 'Q', 3: // 3 = Ctrl-C
		return false
	case Left:
		p.at = max(0, p.at-1)
		p.paused = p.follow && p.at < last
	case Right:
		p.at = min(last, p.at+1)
		p.paused = p.follow && p.at < last
	case Home:
		p.at = 0
		p.paused = p.follow && last > 0
	case End:
		p.at, p.paused = last, false
	case 'c':
		p.sort = byCPU
	case 'm':
		p.sort = byMemory
	case 'd':
		p.sort = byDisk
	case 'a':
		p.whole = !p.whole
	case '/':
		p.typing, p.filter = true, ""
	}
	return true
}

// input is a key of the filter, which is ASCII.
func (p *Panel) input(k Key) {
	switch {
	case k == Enter:
		p.typing = false
	case k == Escape, k == 3:
		p.typing, p.filter = false, ""
	case k == Backspace:
		p.filter = p.filter[:max(0, len(p.filter)-1)]
	case k >= ' ' && k < 0x7f && len(p.filter) < 64:
		p.filter += string(rune(k))
	}
}

// Lines are what to show on a terminal of that size, one string a line, each no
// wider than width.
func (p *Panel) Lines(width, height int) []string {
	width, height = max(width, 20), max(height, 4)
	if p.index.Len() == 0 {
		return []string{cut(account.Text(p.name, 0)+" — no sample yet", width), "", cut("q quit", width)}
	}
	p.at = min(p.at, p.index.Len()-1)
	s := &atop.Sample{}
	if err := p.index.Read(p.at, s); err != nil {
		p.err = err
	}
	var rows []entry
	if p.whole {
		rows = p.totals.upTo(p.index, p.at)
	} else {
		rows = entries(s)
	}
	out := append(p.head(s), "")
	out = append(out, p.table(rows, width, height-len(out)-2)...)
	for len(out) < height-1 {
		out = append(out, "")
	}
	out = append(out[:height-1], p.foot())
	for i := range out {
		out[i] = cut(out[i], width)
	}
	return out
}

func (p *Panel) foot() string {
	if p.typing {
		return "/" + p.filter + "_   enter keep  esc drop"
	}
	return "←/→ step  home/end jump  c/m/d sort by " + []string{"cpu", "memory", "disk"}[p.sort] + "  a whole job  / filter  q quit"
}

func (p *Panel) head(s *atop.Sample) []string {
	title := fmt.Sprintf("%s — sample %d/%d at %s", account.Text(p.name, 0), p.at+1, p.index.Len(), account.Clock(s.Epoch))
	if s.Reset {
		title += " (since the guest's boot)"
	} else {
		title += fmt.Sprintf(" +%ds", s.Interval)
	}
	if p.paused {
		title += " [paused]"
	}
	if p.filter != "" && !p.typing {
		title += " [" + p.filter + "]"
	}
	if p.whole {
		title += " [whole job]"
	}
	if p.err != nil {
		title += " — " + account.Text(p.err.Error(), 0)
	}
	out := []string{title, cpuLine(s), coreLine(s), memLine(s), psiLine(s)}
	return append(out, deviceLines(s)...)
}

const barWide = 12

// bar is a part of 1 as a bar of eighths.
func bar(part float64, wide int) string {
	part = min(max(part, 0), 1)
	n := int(part*float64(wide)*8 + 0.5)
	if part > 0 && n == 0 {
		n = 1
	}
	b := strings.Repeat("█", n/8)
	if n%8 > 0 {
		b += string([]rune("▏▎▍▌▋▊▉")[n%8-1])
	}
	return "[" + b + strings.Repeat(" ", wide-utf8.RuneCountInString(b)) + "]"
}

func part(n, of int64) float64 {
	if of <= 0 {
		return 0
	}
	return float64(n) / float64(of)
}

func cpuLine(s *atop.Sample) string {
	if s.Has&atop.HasCPU == 0 || s.CPU.Hertz <= 0 {
		return "cpu    -"
	}
	c := &s.CPU
	t := c.Total()
	pc := func(n int64) string { return fmt.Sprintf("%3.0f%%", part(n, t)*100) }
	return fmt.Sprintf("cpu   %s %s  user %s  sys %s  wait %s  steal %s  %s of cpu time", pc(c.Busy()), bar(part(c.Busy(), t), barWide),
		pc(c.User+c.Nice), pc(c.Sys+c.IRQ+c.Soft), pc(c.Wait), pc(c.Steal), account.CPUTime(float64(c.Busy())/float64(c.Hertz)))
}

func coreLine(s *atop.Sample) string {
	if len(s.CPUs) == 0 {
		return "cores -"
	}
	var b strings.Builder
	b.WriteString("cores")
	for i := range s.CPUs {
		c := &s.CPUs[i]
		f := part(c.Busy(), c.Total())
		fmt.Fprintf(&b, " %d:%s %3.0f%%", c.N, bar(f, 8), f*100)
	}
	return b.String()
}

func memLine(s *atop.Sample) string {
	if s.Has&atop.HasMEM == 0 || s.MEM.Phys <= 0 {
		return "mem    -"
	}
	m := &s.MEM
	f := part(m.Held(), m.Phys)
	swap := "  no swap"
	switch {
	case s.Has&atop.HasSWP == 0:
		swap = "  swap -"
	case s.SWP.Total > 0:
		swap = fmt.Sprintf("  swap %s of %s", account.Size((s.SWP.Total-s.SWP.Free)*s.SWP.PageSize), account.Size(s.SWP.Total*s.SWP.PageSize))
	}
	return fmt.Sprintf("mem   %3.0f%% %s  %s of %s  cache %s%s", f*100, bar(f, barWide), account.Size(m.Held()*m.PageSize),
		account.Size(m.Phys*m.PageSize), account.Size((m.Cache+m.Buffers)*m.PageSize), swap)
}

func psiLine(s *atop.Sample) string {
	if s.Has&atop.HasPSI == 0 || !s.PSI.Present {
		return "psi   -"
	}
	p := &s.PSI
	return fmt.Sprintf("psi   cpu %4.1f%%  mem %4.1f%%  mem-full %4.1f%%  io %4.1f%%  io-full %4.1f%%",
		p.CPUSome.Avg10, p.MemSome.Avg10, p.MemFull.Avg10, p.IOSome.Avg10, p.IOFull.Avg10)
}

// How many devices are shown.
const maxDisks, maxNets = 3, 3

func deviceLines(s *atop.Sample) []string {
	secs := max(1, s.Interval)
	var out []string
	disks := slices.Clone(s.DSK)
	slices.SortStableFunc(disks, func(a, b atop.Disk) int { return cmp.Compare(b.BusyMS, a.BusyMS) })
	for _, d := range disks[:min(len(disks), maxDisks)] {
		out = append(out, fmt.Sprintf("disk  %s read %s/s write %s/s busy %dms", account.Text(d.Name, 16),
			account.Size(d.RSect*512/secs), account.Size(d.WSect*512/secs), d.BusyMS))
	}
	tcp := ""
	if s.Has&atop.HasNET != 0 {
		tcp = fmt.Sprintf("   %d tcp connections, %d resent", s.TCP.Established, s.TCP.Resent)
	}
	shown := 0
	for _, n := range s.NET {
		if n.Name == "lo" || n.RPack+n.SPack == 0 && shown > 0 || shown == maxNets {
			continue
		}
		shown++
		out = append(out, fmt.Sprintf("net   %s in %s/s out %s/s%s", account.Text(n.Name, 16), account.Size(n.RBytes/secs), account.Size(n.SBytes/secs), tcp))
		tcp = ""
	}
	return out
}

func cut(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width-1]) + "…"
}

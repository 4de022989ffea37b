package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"virtkit/core/atop"
	"virtkit/core/atop/account"
)

// entry is one line of the table.
type entry struct {
	key    atop.ProcKey
	title  string
	state  byte
	cpu    float64 // seconds
	memory int64   // KiB
	io     bool
	disk   int64 // bytes
}

func entries(s *atop.Sample) []entry {
	out := make([]entry, 0, len(s.Procs))
	for i := range s.Procs {
		p := &s.Procs[i]
		e := entry{key: p.Key(), title: p.Title(), state: p.State, memory: p.RSize, io: p.IO, disk: (p.RSect + p.WSect) * 512}
		if p.Hertz > 0 {
			e.cpu = float64(p.User+p.Sys) / float64(p.Hertz)
		}
		out = append(out, e)
	}
	return out
}

// maxTotals bounds the processes that totals are kept of.
const maxTotals = 1 << 17

// totals are what processes have used up to a sample.
type totals struct {
	next int // sample that is not in them yet
	rows map[atop.ProcKey]*entry
}

// upTo are the totals of the samples up to at, with that one.
func (t *totals) upTo(x *Index, at int) []entry {
	if t.rows == nil || at+1 < t.next {
		t.next, t.rows = 0, map[atop.ProcKey]*entry{}
	}
	var s atop.Sample
	for ; t.next <= at; t.next++ {
		if x.Read(t.next, &s) != nil {
			continue
		}
		for _, e := range entries(&s) {
			r := t.rows[e.key]
			if r == nil {
				if len(t.rows) >= maxTotals {
					continue
				}
				r = &entry{}
				t.rows[e.key] = r
			}
			cpu, mem, disk, io := r.cpu+e.cpu, max(r.memory, e.memory), r.disk+e.disk, r.io || e.io
			title := e.title
			if e.state == 'E' && r.title != "" {
				title = r.title // a command line, which an ended one has not
			}
			*r = e
			r.cpu, r.memory, r.disk, r.io, r.title = cpu, mem, disk, io, title
		}
	}
	out := make([]entry, 0, len(t.rows))
	for _, r := range t.rows {
		out = append(out, *r)
	}
	return out
}

// table shows the processes that match the filter, in their order.
func (p *Panel) table(rows []entry, width, height int) []string {
	if p.filter != "" {
		want := strings.ToLower(p.filter)
		rows = slices.DeleteFunc(rows, func(e entry) bool { return !strings.Contains(asciiLower(e.title), want) })
	}
	slices.SortFunc(rows, func(a, b entry) int {
		var c int
		switch p.sort {
		case byMemory:
			c = cmp.Compare(b.memory, a.memory)
		case byDisk:
			c = cmp.Compare(b.disk, a.disk)
		default:
			c = cmp.Compare(b.cpu, a.cpu)
		}
		return cmp.Or(c, cmp.Compare(a.key.PID, b.key.PID), cmp.Compare(a.key.Start, b.key.Start))
	})
	mark := func(o order, s string) string {
		if p.sort == o {
			return ">" + s
		}
		return s
	}
	out := []string{fmt.Sprintf("%7s  %2s  %8s %10s %10s  %s", "pid", "st", mark(byCPU, "cpu"), mark(byMemory, "memory"), mark(byDisk, "disk"), "command")}
	for _, e := range rows[:min(len(rows), max(0, height-1))] {
		disk := "-"
		if e.io {
			disk = account.Size(e.disk)
		}
		state := e.state
		if state <= ' ' || state > '~' {
			state = '?'
		}
		out = append(out, fmt.Sprintf("%7d  %2c  %8s %10s %10s  %s", e.key.PID, state, account.CPUTime(e.cpu), account.Size(e.memory<<10), disk, account.Text(e.title, width)))
	}
	if left := len(rows) - max(0, height-1); left > 0 {
		out[len(out)-1] = fmt.Sprintf("        … and %d more", left+1)
	}
	return out
}

func asciiLower(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

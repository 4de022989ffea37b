package account

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"virtkit/core/atop"
)

// How much of a recording is shown.
const (
	topRows   = 10
	topStalls = 10
	curveWide = 60
	maxFrames = 12
	maxTIDs   = 3
)

// Lines are the account of a job that is called name. There are none of an
// empty recording.
func (a *Account) Lines(name string) []string {
	if a.Empty() {
		return nil
	}
	out := []string{fmt.Sprintf("virtkit: %s — what its guest did:", Text(name, 0))}
	add := func(label, text string) { out = append(out, fmt.Sprintf("  %-16s %s", label, text)) }
	add("recorded", a.recordedLine())
	add("guest", a.guestLine())
	add("cpu", a.cpuLine())
	add("load", a.loadLine())
	add("memory", a.memoryLine())
	add("pressure", a.pressureLine())
	add("disk", a.diskLine())
	add("network", a.networkLine())
	if len(a.cpuCurve.points) > 0 {
		add("cpu over time", fmt.Sprintf("%s  (peak %s)", a.cpuCurve.draw(curveWide), Percent(a.peakBusy)))
	}
	if len(a.heldCurve.points) > 0 {
		add("memory over time", fmt.Sprintf("%s  (peak %s)", a.heldCurve.draw(curveWide), Percent(a.heldPart)))
	}
	out = append(out, a.rowLines()...)
	return append(out, a.stallLines()...)
}

func (a *Account) recordedLine() string {
	from, to := time.Unix(a.first, 0).UTC(), time.Unix(a.last, 0).UTC()
	until := to.Format("15:04:05")
	if from.Format(time.DateOnly) != to.Format(time.DateOnly) {
		until = to.Format("2006/01/02 15:04:05")
	}
	text := fmt.Sprintf("%s → %s UTC (%s), %d %s", from.Format("2006/01/02 15:04:05"), until, Long(max(0, a.last-a.first)), a.samples, plural(a.samples, "sample"))
	if a.interval > 0 {
		text += fmt.Sprintf(" at %ds", a.interval)
	}
	switch {
	case a.boots == 1 && a.samples == 1:
		text += ", covering the guest's boot (counted in the totals, not the rates)"
	case a.boots == 1:
		text += ", the first covering the guest's boot (counted in the totals, not the rates)"
	case a.boots > 1:
		text += fmt.Sprintf(", %d covering the guest's boots (counted in the totals, not the rates)", a.boots)
	}
	return text
}

func plural(n int64, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

func (a *Account) guestLine() string {
	text := fmt.Sprintf("%s on ", Text(a.host, 64))
	if a.cpus > 0 {
		text += fmt.Sprintf("%d %s", a.cpus, plural(a.cpus, "cpu"))
	} else {
		text += "- cpus"
	}
	if a.hasMem {
		text += ", " + Size(a.mem) + " memory"
	}
	switch {
	case !a.hasSwap:
	case a.swap == 0:
		text += ", no swap"
	default:
		text += ", " + Size(a.swap) + " swap"
	}
	return text
}

func (a *Account) cpuLine() string {
	if !a.hasCPU {
		return "-"
	}
	c := a.cpu
	text := fmt.Sprintf("%s of cpu time — %s user, %s system, %s stolen by the host; %s waiting for disk",
		CPUTime(c.user+c.system+c.stolen), CPUTime(c.user), CPUTime(c.system), CPUTime(c.stolen), CPUTime(c.wait))
	if a.time == 0 {
		return text
	}
	text += fmt.Sprintf("; %s busy at peak, %s on average", Percent(a.peakBusy), Percent(a.busy/a.time))
	best, at := -1.0, int64(0)
	for _, n := range slices.Sorted(maps.Keys(a.perCPU)) {
		if a.perCPU[n] > best {
			best, at = a.perCPU[n], n
		}
	}
	if best >= 0 {
		text += fmt.Sprintf(", cpu %d busiest at %s of its own time", at, Percent(best))
	}
	return text
}

func (a *Account) loadLine() string {
	if !a.hasLoad {
		return "-"
	}
	text := fmt.Sprintf("%.2f at peak, %.2f / %.2f / %.2f at the end (1m / 5m / 15m)", a.peakLoad, a.load[0], a.load[1], a.load[2])
	if a.samples > a.boots {
		text += fmt.Sprintf("; %d context switches a second at peak", a.switches)
	}
	return text
}

func (a *Account) memoryLine() string {
	if !a.hasMem {
		return "-"
	}
	text := fmt.Sprintf("%s held at peak (%s of the VM), %s of cache at peak", Size(int64(a.held)), Percent(a.heldPart), Size(a.cache))
	if a.oom > 0 {
		text += fmt.Sprintf("; %d %s killed for lack of memory", a.oom, plural2(a.oom, "process", "processes"))
	}
	return text
}

func plural2(n int64, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

func (a *Account) pressureLine() string {
	if !a.hasPSI {
		return "-"
	}
	var parts []string
	for i, name := range []string{"cpu", "memory", "io"} {
		p := a.psi[i]
		if p.total == 0 && p.peak == 0 {
			continue
		}
		t := name + " " + short(p.total)
		if p.peak > 0 {
			t += fmt.Sprintf(", %.1f%% at %s", p.peak, Clock(p.peakAt))
		}
		parts = append(parts, t)
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, "; ")
}

func (a *Account) diskLine() string {
	text := fmt.Sprintf("%s read, %s written", Size(a.read), Size(a.wrote))
	best, at := int64(0), ""
	for _, n := range slices.Sorted(maps.Keys(a.disks)) {
		if a.disks[n] > best {
			best, at = a.disks[n], n
		}
	}
	if at != "" {
		text += fmt.Sprintf(" — %s busiest, %s busy", Text(at, 32), short(best*1000))
	}
	return text
}

func (a *Account) networkLine() string {
	var parts []string
	for _, n := range slices.Sorted(maps.Keys(a.nets)) {
		t := a.nets[n]
		parts = append(parts, fmt.Sprintf("%s received %s, sent %s", Text(n, 32), Size(t.in), Size(t.out)))
	}
	if len(parts) == 0 {
		return "nothing moved"
	}
	return strings.Join(parts[:min(len(parts), 16)], "; ")
}

const rowFormat = "  %s%s %5s %6s %9s %7s %8s"

func (a *Account) rowLines() []string {
	rows := a.busiest()
	if len(rows) == 0 {
		return nil
	}
	n := min(len(rows), topRows)
	line := func(title string, v ...any) string {
		const width = 39
		title = Text(title, width)
		pad := strings.Repeat(" ", width-len([]rune(title)))
		return strings.TrimRight(fmt.Sprintf(rowFormat, append([]any{title, pad}, v...)...), " ")
	}
	out := []string{"", fmt.Sprintf("  what ran — the %d of %d that used the most cpu", n, len(rows)),
		line("command", "pid", "cpu", "peak rss", "read", "written")}
	for _, r := range rows[:n] {
		title, pid := r.title, fmt.Sprint(r.pid)
		if r.runs > 1 {
			count := fmt.Sprintf(" ×%d", r.runs)
			if r.failed > 0 {
				count += fmt.Sprintf(" (%d failed)", r.failed)
			}
			title, pid = Text(title, 39-len([]rune(count)))+count, "-"
		} else if r.failed > 0 {
			title = Text(title, 39-9) + " (failed)"
		}
		read, wrote := "-", "-"
		if r.io {
			read, wrote = Size(r.read), Size(r.wrote)
		}
		out = append(out, line(title, pid, CPUTime(r.cpu), Size(r.rss<<10), read, wrote))
	}
	return out
}

func (a *Account) stallLines() []string {
	all := a.longest()
	if len(all) == 0 {
		return nil
	}
	out := []string{"", fmt.Sprintf("  stalled — its threads in the same wait channels, under 10%% of a cpu and no disk i/o, for %s or more", Long(atop.StallAfter))}
	for _, s := range all[:min(len(all), topStalls)] {
		out = append(out, fmt.Sprintf("  %s (pid %d, %d %s) for %s from %s UTC", Text(s.Title, 0), s.Key.PID, s.Threads,
			plural(int64(s.Threads), "thread"), Long(s.Until-s.Since), Clock(s.Since)))
		out = append(out, "    waiting: "+waiting(s.Channels))
		out = append(out, s.stacks.lines(s.Threads)...)
	}
	if n := len(all) - topStalls; n > 0 {
		out = append(out, fmt.Sprintf("  … and %d more", n))
	}
	return out
}

func waiting(ch []atop.Channel) string {
	ch = slices.Clone(ch)
	slices.SortStableFunc(ch, func(a, b atop.Channel) int {
		return cmp.Or(cmp.Compare(a.Threads, b.Threads), cmp.Compare(a.Name, b.Name))
	})
	var parts []string
	for _, c := range ch {
		parts = append(parts, fmt.Sprintf("%d in %s", c.Threads, Text(c.Name, 64)))
	}
	return strings.Join(parts, ", ")
}

// lines tells each distinct stack once. threads is how many the process had.
func (s *stackSet) lines(threads int) []string {
	if s == nil || len(s.stacks) == 0 {
		return nil
	}
	type same struct {
		tids []int
		text string
	}
	byText := map[string]*same{}
	var all []*same
	for _, k := range s.stacks {
		text := Text(k.WChan, 64) + " (no stack)"
		if len(k.Frames) > 0 {
			f := k.Frames[:min(len(k.Frames), maxFrames)]
			text = Text(strings.Join(f, " < "), 0)
			if len(f) < len(k.Frames) {
				text += " < …"
			}
		}
		e := byText[text]
		if e == nil {
			e = &same{text: text}
			byText[text] = e
			all = append(all, e)
		}
		e.tids = append(e.tids, k.TID)
	}
	slices.SortStableFunc(all, func(a, b *same) int {
		return cmp.Or(cmp.Compare(len(a.tids), len(b.tids)), cmp.Compare(a.tids[0], b.tids[0]))
	})
	head := fmt.Sprintf("    stacks at %s UTC", Clock(s.at))
	if len(s.stacks) < threads {
		head += fmt.Sprintf(", of %d of its %d threads", len(s.stacks), threads)
	}
	out := []string{head + ":"}
	for _, e := range all {
		ids := strings.Trim(fmt.Sprint(e.tids[:min(len(e.tids), maxTIDs)]), "[]")
		if len(e.tids) > maxTIDs {
			ids += " …"
		}
		out = append(out, fmt.Sprintf("      %d %s (%s): %s", len(e.tids), plural(int64(len(e.tids)), "thread"), ids, e.text))
	}
	return out
}

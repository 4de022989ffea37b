package usage_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/usage"
)

const (
	mib = int64(1) << 20
	gib = int64(1) << 30
)

func gibs(f float64) int64 { return int64(f * float64(gib)) }

func ptr(n int64) *int64 { return &n }

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 812 * mib: "812 MiB", mib - 1: "1 MiB", gib - 1: "1.0 GiB",
		gibs(3.4): "3.4 GiB", 16 * gib: "16.0 GiB", 1023 * gib: "1023.0 GiB", 1<<40 - 1: "1.0 TiB", 3 << 39: "1.5 TiB", 500 * mib: "500 MiB", -gib: "-1.0 GiB"} {
		if got := usage.Size(n); got != want {
			t.Errorf("Size(%d) = %q, want %q", n, got, want)
		}
	}
}

var full = usage.Figures{
	CPU: 134400 * time.Millisecond, Memory: gibs(1.6), Overlay: &usage.Overlay{Used: gibs(1.2), Size: 16 * gib},
	IO: &usage.IO{Read: gibs(3.4), Written: 812 * mib}, Net: &usage.Net{Sent: 3 * mib, Received: 941 * mib},
}

// The lines that the specification quotes.
func TestLines(t *testing.T) {
	if got, want := full.Line(), "job resource usage: cpu 2m14s, peak memory 1.6 GiB, overlay 1.2 GiB of 16.0 GiB, read 3.4 GiB, written 812 MiB, sent 3 MiB, received 941 MiB"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got, want := (usage.Figures{Memory: mib, IO: &usage.IO{}}).Line(), "job resource usage: cpu 0s, peak memory 1 MiB, read 0 B, written 0 B"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	v := usage.Victim{Name: "cc1plus", PID: 1234, RSS: gibs(1.9), Uptime: 48900 * time.Millisecond}
	if got, want := v.Line(), "guest OOM: the kernel killed cc1plus (pid 1234, 1.9 GiB RSS) at +48s (raise MICROVM_MEM)"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	l := usage.Lately{Runs: 37, CeilingMiB: 4096, Memory: gibs(2.1), Overlay: &usage.Overlay{Used: gibs(1.9), Size: 16 * gib}, JobDir: ptr(gibs(6.4)),
		IO: &usage.IO{Read: 12 * gib, Written: gibs(3.1)}, Net: &usage.Net{Sent: 40 * mib, Received: gibs(4.2)}}
	want := "most this job has used lately: memory 2.1 GiB, overlay 1.9 GiB of 16.0 GiB, job dir 6.4 GiB, read 12.0 GiB, written 3.1 GiB, sent 40 MiB, received 4.2 GiB over 37 runs"
	if got := l.Line(false); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got := l.Line(true); got != want+"; the next run reserves 2.6 GiB" {
		t.Error(got)
	}
	if got, want := (usage.Lately{Runs: 1, CeilingMiB: 2048, Memory: mib}).Line(true), "most this job has used lately: memory 1 MiB over 1 run; the next run reserves 512 MiB"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got, want := usage.ReservingLine(531, 2048), "reserving 531 MiB from what this job has been using (it declares 2048 MiB)"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

var now = time.Date(2026, 8, 11, 12, 0, 0, 0, time.UTC)

func run(daysAgo int, ceiling, memMiB int64) usage.Run {
	return usage.Run{ID: fmt.Sprint(daysAgo, "-", ceiling, "-", memMiB), Ended: now.Add(-time.Duration(daysAgo) * 24 * time.Hour), CeilingMiB: ceiling,
		Figures: usage.Figures{Memory: memMiB * mib}}
}

func TestWhatCounts(t *testing.T) {
	for _, tt := range []struct {
		name    string
		runs    []usage.Run
		ceiling int64
		count   int
		memory  int64 // MiB
		reserve int64
		known   bool
	}{
		{"unknown", nil, 4096, 0, 0, 4096, false},
		{"one", []usage.Run{run(0, 4096, 1000)}, 4096, 1, 1000, 1250, true},
		{"the floor", []usage.Run{run(0, 4096, 100)}, 4096, 1, 100, 512, true},
		{"what it declares", []usage.Run{run(0, 4096, 4000)}, 4096, 1, 4000, 4096, true},
		{"the floor above what it declares", []usage.Run{run(0, 256, 100)}, 256, 1, 100, 256, true},
		{"the largest counts, not the last", []usage.Run{run(13, 4096, 2000), run(3, 4096, 800), run(0, 4096, 700)}, 4096, 3, 2000, 2500, true},
		{"six inside the window, and a spike outside", []usage.Run{run(15, 4096, 3000), run(14, 4096, 900), run(5, 4096, 800), run(4, 4096, 800), run(3, 4096, 800), run(2, 4096, 800), run(1, 4096, 800)}, 4096, 6, 900, 1125, true},
		{"too quiet: the last five", []usage.Run{run(400, 4096, 3000), run(300, 4096, 900), run(200, 4096, 1000), run(100, 4096, 800), run(50, 4096, 800), run(2, 4096, 800)}, 4096, 5, 1000, 1250, true},
		{"another ceiling", []usage.Run{run(1, 4096, 4000)}, 16384, 0, 0, 16384, false},
		{"the ceiling is put back", []usage.Run{run(5, 4096, 2000), run(1, 16384, 9000)}, 4096, 1, 2000, 2500, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := usage.Job{Runs: tt.runs}.Lately(now, tt.ceiling)
			got, known := l.ReserveMiB()
			if l.Runs != tt.count || l.Memory != tt.memory*mib || got != tt.reserve || known != tt.known {
				t.Errorf("%d runs, %d MiB; reserves %d (%t)", l.Runs, l.Memory/mib, got, known)
			}
		})
	}
}

func TestEachFigureIsItsOwnMaximum(t *testing.T) {
	a, b := run(2, 1024, 10), run(1, 1024, 20)
	a.JobDir, a.Inodes, a.IO, a.Overlay = ptr(100), ptr(8), &usage.IO{Read: 5, Written: 1}, &usage.Overlay{Used: 9, Size: 10}
	b.IO, b.Net, b.Overlay = &usage.IO{Read: 1, Written: 7}, &usage.Net{Sent: 1}, &usage.Overlay{Used: 3, Size: 20}
	l := usage.Job{Runs: []usage.Run{a, b}}.Lately(now, 1024)
	want := usage.Lately{Runs: 2, CeilingMiB: 1024, Memory: 20 * mib, JobDir: ptr(100), Inodes: ptr(8), IO: &usage.IO{Read: 5, Written: 7},
		Net: &usage.Net{Sent: 1}, Overlay: &usage.Overlay{Used: 9, Size: 10}}
	if d := cmp.Diff(want, l); d != "" {
		t.Error(d)
	}
	if bytes, inodes, ok := l.Disk(); bytes != 125 || inodes != 10 || !ok {
		t.Error(bytes, inodes, ok)
	}
	if _, _, ok := (usage.Lately{Runs: 1}).Disk(); ok {
		t.Error("a directory that no run measured is known")
	}
}

func TestAdd(t *testing.T) {
	var j usage.Job
	for i := range usage.MaxRuns + 10 {
		r := run(0, 1, 1)
		r.ID, r.Ended = fmt.Sprint(i), now.Add(time.Duration(i)*time.Second)
		j.Add(r)
	}
	if len(j.Runs) != usage.MaxRuns || j.Runs[0].ID != "10" {
		t.Errorf("%d runs from %s", len(j.Runs), j.Runs[0].ID)
	}
	again := j.Runs[5]
	again.Memory = 99
	j.Add(again)
	if len(j.Runs) != usage.MaxRuns || j.Runs[5].Memory != 99 {
		t.Error("a run is remembered twice")
	}
}

// The table that the specification shows.
func TestReport(t *testing.T) {
	unit := run(0, 2048, 500)
	unit.JobDir, unit.Net = ptr(gibs(1.1)), &usage.Net{Sent: 2 * mib, Received: 88 * mib}
	build := run(0, 8192, 0)
	build.Memory = gibs(5.87)
	build.Overlay, build.JobDir = &usage.Overlay{Used: gibs(3.9), Size: 4 * gib}, ptr(gibs(6.4))
	build.IO, build.Net = full.IO, full.Net
	many := func(r usage.Run, n int) (out []usage.Run) {
		for i := range n {
			r.ID = fmt.Sprint(i)
			out = append(out, r)
		}
		return out
	}
	p := usage.Project{Name: "42-acme", Jobs: []usage.Job{{Name: "test_unit", Runs: many(unit, 37)}, {Name: "build", Runs: many(build, 24)}, {Name: "empty"}}}
	text := func(r usage.Report) string {
		first, table, last := r.Lines()
		return "virtkit: " + first + "\n" + strings.Join(table, "\n") + "\nvirtkit: " + last
	}
	want := `virtkit: 42-acme — what its jobs have been using lately:
  job         memory            overlay  job dir  ceiling  reserves  runs     read  written   sent  received
  build      5.9 GiB  3.9 GiB / 4.0 GiB  6.4 GiB  8.0 GiB   7.3 GiB    24  3.4 GiB  812 MiB  3 MiB   941 MiB
  test_unit  500 MiB                  -  1.1 GiB  2.0 GiB   625 MiB    37        -        -  2 MiB    88 MiB
virtkit: 2 jobs; all at once they would reserve 7.9 GiB, against a budget of 16.0 GiB`
	if d := cmp.Diff(want, text(p.Report(now, true, 16384))); d != "" {
		t.Error(d)
	}
	got := text(p.Report(now, false, 0))
	if !strings.HasSuffix(got, "\nvirtkit: 2 jobs; all at once they would reserve 10.0 GiB") {
		t.Error(got)
	}
	p = usage.Project{Name: "1-x", Jobs: []usage.Job{{Name: "a\x1b[2Jb\nc", Runs: many(unit, 1)}}}
	if got := text(p.Report(now, false, 0)); !strings.Contains(got, "a?[2Jb?c  ") || strings.Count(got, "\n") != 3 {
		t.Error(got)
	}
}

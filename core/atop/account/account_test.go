package account_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/atop"
	"virtkit/core/atop/account"
)

const start = 1786519309 // 2026/08/12 07:21:49 UTC

// job is a recording of the job that the manual shows.
func job() []*atop.Sample {
	proc := func(p atop.Proc) atop.Proc {
		p.Hertz, p.Threads, p.IO, p.PageSize = 100, max(1, p.Threads), true, 4096
		if p.State == 0 {
			p.State = 'S'
		}
		return p
	}
	var out []*atop.Sample
	for i := range int64(11) {
		s := &atop.Sample{Reset: i == 0, Host: "runner", Epoch: start + i, Interval: 1,
			Has:  atop.HasCPU | atop.HasCPL | atop.HasMEM | atop.HasSWP | atop.HasPAG | atop.HasPSI | atop.HasNET,
			CPU:  atop.CPU{Hertz: 100, N: 2, User: 1, Sys: 4, Steal: 3, Idle: 192},
			CPUs: []atop.CPU{{Hertz: 100, N: 0, Idle: 100}, {Hertz: 100, N: 1, Sys: 4, Idle: 96}},
			CPL:  atop.CPL{CPUs: 2, Switches: 100 + i}, PAG: atop.PAG{PageSize: 4096},
			MEM: atop.MEM{PageSize: 4096, Phys: 252928, Free: 200000, Cache: 37000},
			SWP: atop.SWP{PageSize: 4096}, PSI: atop.PSI{Present: true},
			Procs: []atop.Proc{proc(atop.Proc{PID: 1, Name: "init", Cmdline: "/init", Sys: 3, RSize: 11 << 10, RSect: 372, WSect: 4, Threads: 8})},
		}
		switch i {
		case 0:
			s.Interval, s.CPU.Wait = 9, 10
			s.Procs[0].RSect, s.Procs[0].New = 4096, true
		case 2:
			s.PSI.CPUSome = atop.Stall{Avg10: 0.9, Total: 182_000}
		case 6:
			s.PSI.IOSome = atop.Stall{Avg10: 0.3, Total: 50_400}
			s.DSK = []atop.Disk{{Name: "vda", BusyMS: 96, RSect: 4096, WSect: 184}, {Name: "vdb", BusyMS: 1}}
			s.NET = []atop.Interface{{Name: "lo", RBytes: 5, SBytes: 5}, {Name: "eth0", RBytes: 42, SBytes: 714}}
		case 10:
			s.CPU = atop.CPU{Hertz: 100, N: 2, User: 6, Sys: 20, Steal: 6, Idle: 168}
			s.CPUs[1] = atop.CPU{Hertz: 100, N: 1, Sys: 22, Idle: 78}
		}
		if i > 0 && i < 9 {
			for n := range 148 {
				p := proc(atop.Proc{PID: 100 + n, Start: start + i, Name: "cc1plus", State: 'E', New: true, User: 31, RSize: 1000, CPU: -1, RSect: 2000, WSect: 166})
				if n == 0 {
					p.RSize = 184 << 10
				}
				if n == 1 && i < 3 {
					p.Exit = 1
				}
				s.Procs = append(s.Procs, p)
			}
		}
		out = append(out, s)
	}
	return out
}

func accountOf(samples []*atop.Sample) *account.Account {
	a := account.New()
	for _, s := range samples {
		a.Add(s)
	}
	return a
}

// TestBrief: an account of what was read in brief is that of all.
func TestBrief(t *testing.T) {
	var text []byte
	for _, s := range append(job(), hung()...) {
		text = atop.AppendSample(text, s)
	}
	read := func(brief bool) string {
		r, a := atop.NewReader(bytes.NewReader(text)), account.New()
		r.Brief = brief
		var s atop.Sample
		for r.Next(&s) == nil {
			a.Add(&s)
		}
		if st := r.Stats(); st.Skipped+st.Torn > 0 {
			t.Errorf("%+v", st)
		}
		return strings.Join(a.Lines("x"), "\n")
	}
	if d := cmp.Diff(read(false), read(true)); d != "" {
		t.Error(d)
	}
}

func TestLines(t *testing.T) {
	want := `virtkit: 42137-acme-web-test_unit — what its guest did:
  recorded         2026/08/12 07:21:49 → 07:21:59 UTC (10s), 11 samples at 1s, the first covering the guest's boot (counted in the totals, not the rates)
  guest            runner on 2 cpus, 988 MiB memory, no swap
  cpu              1.1s of cpu time — 0.2s user, 0.6s system, 0.4s stolen by the host; 0.1s waiting for disk; 16% busy at peak, 5% on average, cpu 1 busiest at 22% of its own time
  load             0.00 at peak, 0.00 / 0.00 / 0.00 at the end (1m / 5m / 15m); 110 context switches a second at peak
  memory           62 MiB held at peak (6% of the VM), 145 MiB of cache at peak
  pressure         cpu 182ms, 0.9% at 07:21:51; io 50ms, 0.3% at 07:21:55
  disk             2 MiB read, 92 KiB written — vda busiest, 96ms busy
  network          eth0 received 42 B, sent 714 B
  cpu over time    ▁▁▁▁▁▁▁▁▁▂  (peak 16%)
  memory over time ▁▁▁▁▁▁▁▁▁▁  (peak 6%)

  what ran — the 2 of 2 that used the most cpu
  command                                   pid    cpu  peak rss    read  written
  cc1plus ×1184 (2 failed)                    -  6m07s   184 MiB 1.1 GiB   96 MiB
  /init                                       1   0.3s    11 MiB   4 MiB   22 KiB`
	got := strings.Join(accountOf(job()).Lines("42137-acme-web-test_unit"), "\n")
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// TestNothing: what was not recorded is told as that.
func TestNothing(t *testing.T) {
	if l := account.New().Lines("x"); l != nil {
		t.Errorf("an empty recording: %q", l)
	}
	a := account.New()
	a.Add(&atop.Sample{Reset: true, Epoch: start, Host: "h", Procs: []atop.Proc{{PID: 2, Name: "kthreadd", State: 'S', Hertz: 100}}})
	want := `virtkit: x — what its guest did:
  recorded         2026/08/12 07:21:49 → 07:21:49 UTC (0s), 1 sample, covering the guest's boot (counted in the totals, not the rates)
  guest            h on - cpus
  cpu              -
  load             -
  memory           -
  pressure         -
  disk             0 B read, 0 B written
  network          nothing moved

  what ran — the 1 of 1 that used the most cpu
  command                                   pid    cpu  peak rss    read  written
  kthreadd                                    2   0.0s       0 B       -        -`
	if d := cmp.Diff(want, strings.Join(a.Lines("x"), "\n")); d != "" {
		t.Error(d)
	}
}

// hung is a job whose checker stands still after some work, for twelve hours.
func hung() []*atop.Sample {
	var out []*atop.Sample
	for at := int64(0); at <= 43090; at += 10 {
		s := &atop.Sample{Reset: at == 0, Host: "runner", Epoch: start + 1 + at, Interval: 10}
		daemon := atop.Proc{PID: 40, Name: "dockerd", Cmdline: "dockerd", State: 'S', Threads: 2, Hertz: 100, User: 1}
		s.Procs = append(s.Procs, daemon)
		if at == 0 {
			s.Waits = append(s.Waits, atop.Waits{PID: 40, Channels: []atop.Channel{{Name: "futex_do_wait", Threads: 2}}})
		}
		if at >= 10 {
			s.Procs = append(s.Procs, atop.Proc{PID: 412, Name: "ruff", Cmdline: "ruff check .", State: 'S', Threads: 9, Hertz: 100, Start: start + 5, User: 5})
		}
		if at == 20 {
			s.Waits = append(s.Waits, atop.Waits{PID: 412, Channels: []atop.Channel{{Name: "futex_do_wait", Threads: 1}, {Name: "hrtimer_nanosleep", Threads: 7}, {Name: "request_wait_answer", Threads: 1}}})
		}
		if at == 320 {
			k := func(tid int, frames ...string) {
				s.Stacks = append(s.Stacks, atop.Stack{PID: 412, Name: "ruff", TID: tid, WChan: "w", Frames: frames})
			}
			k(412, "futex_do_wait", "__futex_wait")
			for tid := 413; tid < 419; tid++ {
				k(tid, "hrtimer_nanosleep", "do_nanosleep")
			}
			k(420, "request_wait_answer", "fuse_simple_request")
			k(421)
		}
		out = append(out, s)
	}
	return out
}

func TestStalled(t *testing.T) {
	all := accountOf(hung()).Lines("x")
	var got []string
	for i, l := range all {
		if strings.Contains(l, "stalled") {
			got = all[i:]
		}
	}
	want := []string{
		"  stalled — its threads in the same wait channels, under 10% of a cpu and no disk i/o, for 5m00s or more",
		"  ruff check . (pid 412, 9 threads) for 11h57m from 07:22:10 UTC",
		"    waiting: 1 in futex_do_wait, 1 in request_wait_answer, 7 in hrtimer_nanosleep",
		"    stacks at 07:27:10 UTC:",
		"      1 thread (412): futex_do_wait < __futex_wait",
		"      1 thread (420): request_wait_answer < fuse_simple_request",
		"      1 thread (421): w (no stack)",
		"      6 threads (413 414 415 …): hrtimer_nanosleep < do_nanosleep",
		"  dockerd (pid 40, 2 threads) for 11h58m from 07:21:50 UTC",
		"    waiting: 2 in futex_do_wait",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// TestHostile: what a guest writes reaches no terminal as a command.
func TestHostile(t *testing.T) {
	s := job()[0]
	s.Host = "h\x1b[2J"
	s.Procs[0].Cmdline = "evil\x1b]0;title\x07\u202e\xff\u009b1m" + strings.Repeat("x", 100)
	s.NET = []atop.Interface{{Name: "e\x1b[1m", RBytes: 1}}
	text := strings.Join(accountOf([]*atop.Sample{s}).Lines("n\x1b[0m"), "\n")
	for _, bad := range []string{"\x1b", "\x07", "\u202e", "\u009b", "\xff"} {
		if strings.Contains(text, bad) {
			t.Errorf("%q is in %q", bad, text)
		}
	}
	if !strings.Contains(text, "evil") {
		t.Error("the command is not there at all")
	}
}

func TestJSON(t *testing.T) {
	x := account.NewExporter()
	var lines []map[string]any
	for _, s := range hung()[:40] {
		b, err := x.Line(s)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil || bytes.Count(b, []byte("\n")) != 1 {
			t.Fatalf("%v in %s", err, b)
		}
		lines = append(lines, m)
	}
	proc := func(at int) map[string]any {
		ps := lines[at]["procs"].([]any)
		return ps[len(ps)-1].(map[string]any)
	}
	if m := lines[0]; m["hertz"] != nil || m["pagesize"] != nil || m["cpu"] != nil || m["pressure"] != nil || m["boot"] != true || fmt.Sprint(m["stacks"]) != "[]" {
		t.Errorf("what was not recorded: %v", m)
	}
	if p := proc(1); p["wchans"] != nil || p["wchans_since"] != nil || p["read_sectors"] != nil || p["threads"] != 9.0 || p["threads_running"] != 0.0 || p["rsize_kib"] != 0.0 {
		t.Errorf("before its channels were recorded: %v", p)
	}
	if p := proc(30); fmt.Sprint(p["wchans"]) != "map[futex_do_wait:1 hrtimer_nanosleep:7 request_wait_answer:1]" || p["wchans_since"] != float64(start+21) {
		t.Errorf("after: %v", p)
	}
	if n := len(lines[32]["stacks"].([]any)); n != 9 {
		t.Errorf("%d stacks", n)
	}
}

// six is a recording of six hours with a million records of processes, as
// text.
type six struct {
	samples int64
	at      int64
	pending []byte
	buf     []byte
	s       *atop.Sample
}

const sixProcs = 463 // a million in six hours of samples at 10 s

func (g *six) Read(p []byte) (int, error) {
	if len(g.pending) == 0 {
		if g.at == g.samples {
			return 0, io.EOF
		}
		if g.s == nil {
			g.s = job()[10]
			g.s.Interval = 10
			for i := range sixProcs - 1 {
				p := g.s.Procs[0]
				p.PID, p.Name, p.Cmdline = 1000+i, fmt.Sprintf("worker-%d", i%40), fmt.Sprintf("/usr/lib/worker --number=%d --config=/etc/worker.conf", i)
				if i >= 300 {
					p.State, p.New, p.Cmdline = 'E', true, ""
				}
				g.s.Procs = append(g.s.Procs, p)
			}
		}
		g.s.Reset = g.at == 0
		g.s.Epoch += 10
		for i := 300; i < sixProcs-1; i++ {
			g.s.Procs[i+1].PID = 1000 + int(g.at)*200 + i
			g.s.Procs[i+1].Start = g.s.Epoch
		}
		g.buf = atop.AppendSample(g.buf[:0], g.s)
		g.pending = g.buf
		g.at++
	}
	n := copy(p, g.pending)
	g.pending = g.pending[n:]
	return n, nil
}

// TestSixHours: the memory that an account needs does not grow with the
// recording.
func TestSixHours(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const samples = 300
	r := atop.NewReader(&six{samples: samples})
	a := account.New()
	var s atop.Sample
	n := 0
	for r.Next(&s) == nil {
		n += len(s.Procs)
		a.Add(&s)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n != samples*sixProcs {
		t.Errorf("%d records of processes", n)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
		t.Errorf("an account of %d records holds %d bytes", n, grown)
	}
	if l := a.Lines("x"); len(l) < 20 {
		t.Errorf("%q", l)
	}
	runtime.KeepAlive(r)
}

func BenchmarkSummary(b *testing.B) {
	text, err := io.ReadAll(&six{samples: 2160})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		r := atop.NewReader(bytes.NewReader(text))
		r.Brief = true
		a := account.New()
		var s atop.Sample
		for r.Next(&s) == nil {
			a.Add(&s)
		}
		a.Lines("x")
	}
}

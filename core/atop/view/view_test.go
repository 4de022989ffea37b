package view_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/atop"
	"virtkit/core/atop/view"
)

const start = 1786519309 // 2026/08/12 07:21:49 UTC

func sample(i int64) *atop.Sample {
	s := &atop.Sample{Reset: i == 0, Host: "h", Epoch: start + i, Interval: 1,
		Has:  atop.HasCPU | atop.HasMEM | atop.HasSWP | atop.HasPSI | atop.HasNET,
		CPU:  atop.CPU{Hertz: 100, N: 2, User: 6, Sys: 20, Steal: 6, Idle: 168},
		CPUs: []atop.CPU{{Hertz: 100, N: 0, User: 10, Idle: 90}, {Hertz: 100, N: 1, Sys: 22, Idle: 78}},
		MEM:  atop.MEM{PageSize: 4096, Phys: 252928, Free: 200000, Cache: 37000},
		SWP:  atop.SWP{PageSize: 4096}, PSI: atop.PSI{Present: true, CPUSome: atop.Stall{Avg10: 0.4}},
		DSK: []atop.Disk{{Name: "vda", BusyMS: 4, WSect: 8}},
		NET: []atop.Interface{{Name: "lo", RPack: 1}, {Name: "eth0", SBytes: 42, SPack: 1}},
		Procs: []atop.Proc{
			{PID: 1, Name: "init", Cmdline: "/init", State: 'S', Hertz: 100, RSize: 11 << 10, IO: true},
			{PID: 65, Name: "sh", Cmdline: "sh", State: 'S', Hertz: 100, User: 10, RSize: 1 << 10, IO: true, WSect: 16},
			{PID: 2, Name: "kthreadd", State: 'S', Hertz: 100},
			{PID: int(700 + i), Name: "true", State: 'E', Hertz: 100, RSize: 512, IO: true, RSect: 2},
		}}
	return s
}

func logOf(t *testing.T, n int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), atop.LogFile)
	var b []byte
	for i := range n {
		b = atop.AppendSample(b, sample(i))
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func grow(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Write(b)
	f.Close()
}

func panel(t *testing.T, path string, follow bool) *view.Panel {
	t.Helper()
	x, err := view.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return view.New("42137-acme-web-test_unit", x, follow)
}

func TestPanel(t *testing.T) {
	p := panel(t, logOf(t, 11), false)
	p.Press(view.End)
	want := strings.Split(`42137-acme-web-test_unit — sample 11/11 at 07:21:59 +1s
cpu    16% [█▉          ]  user   3%  sys  10%  wait   0%  steal   3%  0.3s of cpu time
cores 0:[▊       ]  10% 1:[█▊      ]  22%
mem     6% [▊           ]  62 MiB of 988 MiB  cache 145 MiB  no swap
psi   cpu  0.4%  mem  0.0%  mem-full  0.0%  io  0.0%  io-full  0.0%
disk  vda read 0 B/s write 4 KiB/s busy 4ms
net   eth0 in 0 B/s out 42 B/s   0 tcp connections, 0 resent

    pid  st      >cpu     memory       disk  command
     65   S      0.1s      1 MiB      8 KiB  sh
      1   S      0.0s     11 MiB        0 B  /init
      2   S      0.0s        0 B          -  kthreadd
    710   E      0.0s    512 KiB      1 KiB  true

←/→ step  home/end jump  c/m/d sort by cpu  a whole job  / filter  q quit`, "\n")
	if d := cmp.Diff(want, p.Lines(100, 15)); d != "" {
		t.Error(d)
	}
}

// press presses keys and returns the panel's text.
func press(p *view.Panel, keys ...view.Key) string {
	for _, k := range keys {
		p.Press(k)
	}
	return strings.Join(p.Lines(120, 30), "\n")
}

func TestKeys(t *testing.T) {
	p := panel(t, logOf(t, 5), false)
	has := func(text string, parts ...string) {
		t.Helper()
		for _, s := range parts {
			if !strings.Contains(text, s) {
				t.Errorf("%q is not in\n%s", s, text)
			}
		}
	}
	has(press(p), "sample 1/5", "(since the guest's boot)")
	has(press(p, view.Left), "sample 1/5")
	has(press(p, view.Right, view.Right), "sample 3/5")
	has(press(p, view.End, view.Right), "sample 5/5")
	has(press(p, 'm'), ">memory", "sort by memory", "memory       disk  command\n      1   S")
	has(press(p, 'd'), ">disk  command\n     65   S")
	has(press(p, 'a'), "[whole job]", "0.5s", "40 KiB", "    700   E", "    704   E")
	has(press(p, view.Home, 'a'), "sample 1/5")
	text := press(p, '/', 'I', 'n', 'x', view.Backspace, view.Enter, 'c')
	has(text, "[In]", "/init")
	if strings.Contains(text, "kthreadd") || strings.Contains(text, "  sh\n") {
		t.Errorf("not filtered:\n%s", text)
	}
	has(press(p, '/', 'q', view.Escape), "kthreadd")
	if p.Press('q') || !panel(t, logOf(t, 1), false).Press('x') {
		t.Error("q goes on, or x does not")
	}
}

func TestFollow(t *testing.T) {
	path := logOf(t, 3)
	p := panel(t, path, true)
	at := func(want string) {
		t.Helper()
		if l := press(p); !strings.HasPrefix(l, "42137-acme-web-test_unit — sample "+want) {
			t.Errorf("%s, want %s", strings.SplitN(l, "\n", 2)[0], want)
		}
	}
	at("3/3 at 07:21:51 +1s\n")
	b := atop.AppendSample(nil, sample(3))
	grow(t, path, b[:len(b)-4]) // no SEP yet
	p.Update()
	at("3/3")
	grow(t, path, b[len(b)-4:])
	p.Update()
	at("4/4")
	press(p, view.Left)
	grow(t, path, atop.AppendSample(nil, sample(4)))
	p.Update()
	at("3/5 at 07:21:51 +1s [paused]\n")
	press(p, view.Right, view.Right)
	at("5/5 at 07:21:53 +1s\n")
	grow(t, path, atop.AppendSample(nil, sample(5)))
	p.Update()
	at("6/6")
	press(p, view.Home)
	press(p, view.End)
	at("6/6 at 07:21:54 +1s\n")
}

// TestSizes: every line fits, whatever the terminal and the log.
func TestSizes(t *testing.T) {
	paths := []string{logOf(t, 0), logOf(t, 2)}
	bad := filepath.Join(t.TempDir(), "bad")
	s := sample(1)
	s.Procs[0].Cmdline = "\x1b[2J" + strings.Repeat("é", 300)
	b := append([]byte("garbage\nSEP\nRESET\nSEP\n"), atop.AppendSample(nil, s)...)
	os.WriteFile(bad, append(b, "\xff\xfe\nCPU h x\nSEP\n"...), 0o600)
	for _, path := range append(paths, bad) {
		p := panel(t, path, false)
		for range 6 {
			for _, w := range []int{0, 20, 79, 300} {
				for _, h := range []int{0, 4, 10, 50} {
					lines := p.Lines(w, h)
					if len(lines) > max(h, 4) {
						t.Errorf("%d lines of %d", len(lines), h)
					}
					for _, l := range lines {
						if utf8.RuneCountInString(l) > max(w, 20) || strings.ContainsAny(l, "\x1b\n") {
							t.Errorf("%d wide: %q", w, l)
						}
					}
				}
			}
			p.Press(view.Right)
			p.Press('a')
		}
	}
}

// The busiest disks are shown and the first interfaces that moved something; one
// that did not is shown only when it stands first. The filter takes both cases of
// a letter, the first and the last too.
func TestDevicesAndCases(t *testing.T) {
	s := sample(0)
	s.DSK = []atop.Disk{{Name: "vda", BusyMS: 1}, {Name: "vdb", BusyMS: 9}, {Name: "vdc", BusyMS: 5}, {Name: "vdd", BusyMS: 7}}
	s.NET = []atop.Interface{{Name: "lo", RPack: 9}}
	for i, pack := range []int64{1, 0, 1, 1, 1} {
		s.NET = append(s.NET, atop.Interface{Name: fmt.Sprintf("eth%d", i), RPack: pack})
	}
	s.Procs = append(s.Procs, atop.Proc{PID: 900, Name: "AZ", Cmdline: "AZ@[ x", State: 'S', Hertz: 100})
	path := filepath.Join(t.TempDir(), atop.LogFile)
	if err := os.WriteFile(path, atop.AppendSample(nil, s), 0o600); err != nil {
		t.Fatal(err)
	}
	p := panel(t, path, false)
	shown := func() string {
		var out []string
		for l := range strings.Lines(press(p)) {
			if f := strings.Fields(l); len(f) > 1 && (f[0] == "disk" || f[0] == "net") {
				out = append(out, f[1])
			}
		}
		return strings.Join(out, " ")
	}
	if got := shown(); got != "vdb vdd vdc eth0 eth2 eth3" {
		t.Errorf("shown are %s", got)
	}
	for _, filter := range []string{"az@[", "AZ", "aZ@", "@[ x"} {
		q := panel(t, path, false)
		q.Press('/')
		for _, c := range filter {
			q.Press(view.Key(c))
		}
		if text := press(q, view.Enter); !strings.Contains(text, "AZ@[") || strings.Contains(text, "kthreadd") {
			t.Errorf("filter %q:\n%s", filter, text)
		}
	}
}

package qemu_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/fault"
	"virtkit/core/machine"
	"virtkit/vmm/qemu"
)

var update = flag.Bool("update", false, "write golden files")

func TestCommandLines(t *testing.T) {
	full := machine.Spec{
		Name: "job-1", CPUs: 2, MemMiB: 2048, Nested: true,
		Kernel: machine.Kernel{Image: "/k", Initrd: "/i", Cmdline: []string{"extra=1"}},
		Disks:  []machine.Disk{{Path: "/root.img", Serial: "root", ReadOnly: true}, {Path: "/upper.img", Serial: "upper"}},
		NIC:    &machine.NIC{MAC: "52:54:00:00:00:01", MTU: 65520},
		Shares: []machine.Share{{Tag: "src", Source: "/src"}},
	}
	tap := machine.Spec{
		Name: "tap", CPUs: 1, MemMiB: 512, Kernel: machine.Kernel{Image: "/k", Initrd: "/i"},
		NIC: &machine.NIC{Tap: true, MAC: "52:54:00:00:00:01", MTU: 1500},
	}
	bare := machine.Spec{Name: "bare", CPUs: 1, MemMiB: 512, Kernel: machine.Kernel{Image: "/k", Initrd: "/i"}}
	for name, args := range map[string][]string{
		"tcg-bare": qemu.Args(bare, "tcg", 2445432), "kvm-bare": qemu.Args(bare, "kvm", 0),
		"tcg-full": qemu.Args(full, "tcg", 2445432), "kvm-full": qemu.Args(full, "kvm", 0),
		"tcg-tap": qemu.Args(tap, "tcg", 2445432), "kvm-tap": qemu.Args(tap, "kvm", 0),
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(args, "\n") + "\n"
			golden := filepath.Join("testdata", name+".args")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), got); d != "" {
				t.Error(d)
			}
			if kvm := strings.HasPrefix(name, "kvm"); kvm == strings.Contains(got, "tsc") {
				t.Errorf("clock words under kvm=%v:\n%s", kvm, got)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	ok := func() machine.Spec {
		return machine.Spec{Name: "a", CPUs: 1, MemMiB: 64, Kernel: machine.Kernel{Image: "/k"}}
	}
	if err := qemu.Validate(ok()); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*machine.Spec){
		"name with comma":   func(s *machine.Spec) { s.Name = "a,process=b" },
		"name with newline": func(s *machine.Spec) { s.Name = "a\nb" },
		"long name":         func(s *machine.Spec) { s.Name = strings.Repeat("a", 64) },
		"serial with comma": func(s *machine.Spec) { s.Disks = []machine.Disk{{Serial: "a,b"}} },
		"long serial":       func(s *machine.Spec) { s.Disks = []machine.Disk{{Serial: strings.Repeat("a", 21)}} },
		"tag with comma":    func(s *machine.Spec) { s.Shares = []machine.Share{{Tag: "a,b"}} },
		"MAC":               func(s *machine.Spec) { s.NIC = &machine.NIC{MAC: "x", File: os.Stdin} },
		"no socket":         func(s *machine.Spec) { s.NIC = &machine.NIC{MAC: "52:54:00:00:00:01"} },
		"MTU":               func(s *machine.Spec) { s.NIC = &machine.NIC{MAC: "52:54:00:00:00:01", File: os.Stdin, MTU: 70000} },
		"too many disks": func(s *machine.Spec) {
			for range 22 {
				s.Disks = append(s.Disks, machine.Disk{Serial: "d"})
			}
		},
		"no kernel": func(s *machine.Spec) { s.Kernel.Image = "" },
	} {
		s := ok()
		change(&s)
		if err := qemu.Validate(s); fault.KindOf(err) != fault.Usage || err == nil {
			t.Errorf("%s: error is %v", name, err)
		}
	}
}

func TestClassify(t *testing.T) {
	const boom = "[    2.1] Kernel panic - not syncing: sysrq triggered \x1b[1mcrash\r\n[    2.2] CPU: 0\r\n"
	long := strings.Repeat("stack line\r\n", 20000)
	for name, c := range map[string]struct {
		shutdown, stuck, console, words string
		killed                          bool
		want                            machine.Reason
		detail                          string
	}{
		"poweroff":              {shutdown: "guest-shutdown", want: machine.PowerOff},
		"reboot":                {shutdown: "guest-reset", want: machine.Reboot},
		"panic":                 {shutdown: "guest-reset", console: boom, want: machine.Panic, detail: "Kernel panic - not syncing: sysrq triggered [1mcrash"},
		"panic without newline": {shutdown: "guest-reset", console: "x\nKernel panic - not syncing: y", want: machine.Panic, detail: "Kernel panic - not syncing: y"},
		"old words":             {shutdown: "guest-reset", console: boom + long, want: machine.Reboot},
		"panic, then poweroff":  {shutdown: "guest-shutdown", console: boom, want: machine.PowerOff},
		"panic device":          {shutdown: "guest-panic", want: machine.Panic, detail: "the guest's kernel panicked"},
		"killed":                {killed: true, want: machine.Killed},
		"killed after its end":  {shutdown: "guest-shutdown", killed: true, want: machine.PowerOff},
		"disk full":             {stuck: "no space", killed: true, want: machine.Crashed, detail: "no space"},
		"crashed":               {words: "bad MSR", want: machine.Crashed, detail: "QEMU ended: killed by SIGABRT: bad MSR"},
		"told to end":           {shutdown: "host-signal", want: machine.Crashed, detail: "QEMU was told to end by a signal from the host"},
	} {
		r, d := qemu.Classify(c.shutdown, c.stuck, c.console, "killed by SIGABRT", c.words, c.killed)
		if r != c.want || d != c.detail {
			t.Errorf("%s: %s %q, want %s %q", name, r, d, c.want, c.detail)
		}
	}
}

func FuzzConsole(f *testing.F) {
	f.Add([]byte("Kernel panic - not syncing: x\n"), uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, cut uint8) {
		var w qemu.PanicWatch
		i := int(cut) % (len(b) + 1)
		w.Write(b[:i])
		w.Write(b[i:])
		got := w.Last()
		if got != "" && !strings.HasPrefix(got, strings.TrimSpace("Kernel panic - not syncing: ")) {
			t.Errorf("panic line %q", got)
		}
		if strings.ContainsAny(got, "\x1b\n\r\x00") {
			t.Errorf("panic line %q can steer a terminal", got)
		}
		if w.Held() > 4096 {
			t.Errorf("holds %d bytes", w.Held())
		}
	})
}

// TestFloodHoldsNothing: a guest that writes for ever without a line's end.
func TestFloodHoldsNothing(t *testing.T) {
	var w qemu.PanicWatch
	chunk := bytes.Repeat([]byte("x"), 1<<20)
	for range 256 {
		w.Write(chunk)
	}
	if w.Held() > 4096 {
		t.Errorf("holds %d bytes after 256 MiB", w.Held())
	}
}

// fakeQEMU is a program that only knows its version.
func fakeQEMU(t *testing.T, version string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "qemu-fake")
	script := "#!/bin/sh\necho 'QEMU emulator version " + version + " (Debian 1)'\n"
	if err := os.WriteFile(p, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// kvmHost is a host whose /dev/kvm opens, which proves nothing: a kernel, the
// device and a QEMU.
func kvmHost(t *testing.T) (k machine.Kernel, dev, bin string) {
	t.Helper()
	k.Image = filepath.Join(t.TempDir(), "k")
	dev = filepath.Join(t.TempDir(), "kvm")
	for _, f := range []string{k.Image, dev} {
		if err := os.WriteFile(f, []byte("k"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return k, dev, fakeQEMU(t, "8.2.1")
}

func TestAccelDecision(t *testing.T) {
	k, dev, bin := kvmHost(t)
	var probes atomic.Int32
	works := func(context.Context, machine.Kernel) error { probes.Add(1); return nil }
	fails := func(context.Context, machine.Kernel) error { probes.Add(1); return errors.New("it hangs") }

	for name, c := range map[string]struct {
		accel, env, dev string
		probe           func(context.Context, machine.Kernel) error
		want, why       string
		probes          int32
	}{
		"works":         {dev: dev, probe: works, want: "kvm", why: "ran under KVM", probes: 1},
		"fails":         {dev: dev, probe: fails, want: "tcg", why: "it hangs", probes: 1},
		"no device":     {dev: dev + "-none", probe: works, want: "tcg", why: "has no"},
		"forced tcg":    {accel: "tcg", dev: dev, probe: works, want: "tcg", why: "configured"},
		"forced kvm":    {accel: "kvm", dev: dev + "-none", probe: fails, want: "kvm", why: "configured"},
		"env wins":      {accel: "tcg", env: "kvm", dev: dev, probe: fails, want: "kvm", why: "VIRTKIT_ACCEL"},
		"env says auto": {accel: "tcg", env: "auto", dev: dev, probe: works, want: "kvm", probes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(qemu.AccelEnv, c.env)
			probes.Store(0)
			cache := t.TempDir()
			for range 2 { // a second driver, such as another process's, reads the cache
				d := qemu.New(qemu.Config{Binary: bin, Accel: c.accel, CacheDir: cache})
				d.SetProbe(c.dev, c.probe)
				for range 2 {
					v, err := d.Verdict(t.Context(), k)
					if err != nil || v.Accel != c.want || !strings.Contains(v.Why, c.why) {
						t.Fatalf("verdict %+v, %v", v, err)
					}
				}
			}
			if n := probes.Load(); n != c.probes {
				t.Errorf("%d probes, want %d", n, c.probes)
			}
		})
	}
}

func TestAccelProbes(t *testing.T) {
	k, dev, bin := kvmHost(t)
	var probes atomic.Int32
	works := func(context.Context, machine.Kernel) error { probes.Add(1); return nil }
	hangs := func(ctx context.Context, _ machine.Kernel) error { <-ctx.Done(); return ctx.Err() }

	t.Run("many at once probe once", func(t *testing.T) {
		t.Setenv(qemu.AccelEnv, "")
		probes.Store(0)
		cache := t.TempDir()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				d := qemu.New(qemu.Config{Binary: bin, CacheDir: cache})
				d.SetProbe(dev, works)
				if v, err := d.Verdict(t.Context(), k); err != nil || v.Accel != "kvm" {
					t.Errorf("%+v, %v", v, err)
				}
			})
		}
		wg.Wait()
		if n := probes.Load(); n != 1 {
			t.Errorf("%d probes", n)
		}
	})

	t.Run("a caller that gives up decides nothing", func(t *testing.T) {
		t.Setenv(qemu.AccelEnv, "")
		cache := t.TempDir()
		d := qemu.New(qemu.Config{Binary: bin, CacheDir: cache})
		d.SetProbe(dev, hangs)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if v, err := d.Verdict(ctx, k); err == nil {
			t.Errorf("verdict %+v", v)
		}
		if left, _ := filepath.Glob(filepath.Join(cache, "accel-*.json")); len(left) != 0 {
			t.Errorf("kept %v", left)
		}
	})

	t.Run("nonsense", func(t *testing.T) {
		t.Setenv(qemu.AccelEnv, "hvf")
		if _, err := qemu.New(qemu.Config{}).Verdict(t.Context(), k); fault.KindOf(err) != fault.Usage || !strings.Contains(err.Error(), "hvf") {
			t.Errorf("error %v", err)
		}
	})

	t.Run("another kernel is another verdict", func(t *testing.T) {
		t.Setenv(qemu.AccelEnv, "")
		probes.Store(0)
		d := qemu.New(qemu.Config{Binary: bin, CacheDir: t.TempDir()})
		d.SetProbe(dev, works)
		other := filepath.Join(t.TempDir(), "k2")
		if err := os.WriteFile(other, []byte("k2"), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, k := range []machine.Kernel{k, {Image: other}, k} {
			if _, err := d.Verdict(t.Context(), k); err != nil {
				t.Fatal(err)
			}
		}
		if n := probes.Load(); n != 2 {
			t.Errorf("%d probes, want 2", n)
		}
	})
}

func TestInfo(t *testing.T) {
	cache := t.TempDir()
	d := qemu.New(qemu.Config{Binary: fakeQEMU(t, "7.2.22"), CacheDir: cache})
	for range 2 {
		if i, err := d.Info(t.Context()); err != nil || i.Version != "7.2.22" {
			t.Errorf("%+v, %v", i, err)
		}
	}
	_, err := qemu.New(qemu.Config{Binary: fakeQEMU(t, "6.2.0"), CacheDir: cache}).Info(t.Context())
	if err == nil || !strings.Contains(err.Error(), "7.2") || fault.HintOf(err) == "" {
		t.Errorf("old QEMU: %v", err)
	}
	_, err = qemu.New(qemu.Config{Binary: "qemu-is-not-here"}).Info(t.Context())
	if err == nil || !strings.Contains(fault.HintOf(err), "apt-get install qemu-system-x86") {
		t.Errorf("no QEMU: %v, hint %q", err, fault.HintOf(err))
	}
	// The network's socket is taken over, also when nothing boots.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, err = qemu.New(qemu.Config{Binary: "qemu-is-not-here", Accel: "tcg"}).Boot(t.Context(), machine.Spec{
		Name: "a", CPUs: 1, MemMiB: 64, Kernel: machine.Kernel{Image: "/k"}, NIC: &machine.NIC{MAC: "52:54:00:00:00:01", File: w}})
	if err == nil {
		t.Fatal("no error")
	}
	if err := w.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the socket was left open: %v", err)
	}
}

func TestVersions(t *testing.T) {
	for v, want := range map[string]bool{"7.2.0": true, "7.1.9": false, "10.0.2": true, "8.0": true, "7.2": true} {
		if got := qemu.AtLeast(v, 7, 2); got != want {
			t.Errorf("AtLeast(%s) is %v", v, got)
		}
	}
	if _, err := qemu.ParseVersion("what"); err == nil {
		t.Error("no error for nonsense")
	}
}

// What QEMU's monitor says of processors is told in a line, and what it does not
// say as unknown.
func TestProcessors(t *testing.T) {
	cpu := func(n, rip, rfl, hlt string) string {
		return "CPU#" + n + "\r\nRAX=0000000000000000 RBX=00\r\nRIP=" + rip + " RFL=" + rfl + " [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=" + hlt + "\r\nES =0000\r\n"
	}
	first := cpu("0", "ffffffff81c93f8f", "00000206", "1") + cpu("1", "ffffffff81c8b7b6", "00000046", "0")
	second := cpu("0", "ffffffff81c93f8f", "00000206", "1") + cpu("1", "00007fff00000010", "00000246", "0")
	for _, c := range []struct{ a, b, want string }{
		{first, second, "; CPU 0 halted at ffffffff81c93f8f; CPU 1 at ffffffff81c8b7b6 without interrupts, then at 00007fff00000010"},
		{first, "", "; CPU 0 halted at ffffffff81c93f8f; CPU 1 at ffffffff81c8b7b6 without interrupts"},
		{"CPU#0\r\nsomething else", "", "; CPU 0 unknown"},
		{"", "", ""},
	} {
		if got := qemu.Processors(c.a, c.b); got != c.want {
			t.Errorf("processors:\n%s\nwant\n%s", got, c.want)
		}
	}
}

// Only a timer that was left in the middle of being measured was given up.
func TestTimerGivenUp(t *testing.T) {
	lapic := func(lvtt, timer string) string {
		return "dumping local APIC state for CPU 0 \r\n\r\nLVT0\t 0x00010700 active-hi edge  masked                      ExtINT (vec 0)\r\n" +
			"LVTT\t " + lvtt + " active-hi edge  Fixed  (vec 236)\r\nTimer\t DCR=0x3 (divide by 16) initial_count = " + timer + " current_count = 7\r\n"
	}
	for name, c := range map[string]struct {
		text string
		want bool
	}{
		"given up":         {lapic("0x000300ec", "268435455"), true},
		"one shot, to run": {lapic("0x000000ec", "62500"), false},
		"one shot, idle":   {lapic("0x000100ec", "0"), false},
		"periodic":         {lapic("0x000200ec", "250000"), false},
		"periodic, ended":  {lapic("0x000300ec", "0"), false},
		"nothing":          {"", false},
	} {
		if got := qemu.TimerGivenUp(c.text); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestMapCovers(t *testing.T) {
	for m, want := range map[string]bool{
		"         0          0 4294967295\n": true, "0 1000 1\n": false, "": false, "0 100000 65536\n": false, "x y z\n": false,
	} {
		if got := qemu.MapCovers(m, 0x70000000, 0xffffff); got != want {
			t.Errorf("%q: %v", m, got)
		}
	}
}

// TestClockRate measures twice: what is told to guests must not vary by more
// than they forgive (the kernel accepts 1 %; a host's rate is steady to ppm).
func TestClockRate(t *testing.T) {
	a, b := qemu.MeasureTSC(50*time.Millisecond), qemu.MeasureTSC(50*time.Millisecond)
	if a < 100_000 || a > 20_000_000 {
		t.Fatalf("the clock's rate is %d kHz", a)
	}
	if diff := max(a, b) - min(a, b); diff > a/200 {
		t.Errorf("two measurements gave %d and %d kHz", a, b)
	}
}

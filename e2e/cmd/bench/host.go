package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/core/atop"
	"virtkit/core/atop/archive"
	"virtkit/core/usage"
	"virtkit/ledger"
)

// The ledger is measured with so many claims held, and so many who wait.
const (
	benchClaims  = 1000
	benchWaiters = 64
)

// admission: decisions of one who asks, beside a loop that only looks at the
// same claims: opens each file, tries its lock, and reads it.
func (b *bench) admission(ctx context.Context) error {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil && lim.Cur < 2*benchClaims {
		lim.Cur = min(lim.Max, 4*benchClaims)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
			return fmt.Errorf("raising the limit of descriptors: %w", err)
		}
	}
	state := filepath.Join(b.dir, "admit")
	jobs, err := ledger.Open(state)
	if err != nil {
		return err
	}
	gate := func(wait time.Duration) (*ledger.Admissions, error) {
		return jobs.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: benchClaims}, Wait: wait})
	}
	ask := func(id string) admit.Ask { return admit.Ask{ID: id, Amounts: admit.Amounts{MemMiB: 1}} }
	g, err := gate(time.Hour)
	if err != nil {
		return err
	}
	var held []admit.Held
	defer func() {
		for _, h := range held {
			h.Release()
		}
	}()
	for i := range benchClaims {
		h, err := g.Admit(ctx, ask("c-"+strconv.Itoa(i)), func(string) {})
		if err != nil {
			return err
		}
		held = append(held, h)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	waits := make(chan struct{}, benchWaiters)
	for i := range benchWaiters {
		w, err := gate(time.Hour)
		if err != nil {
			return err
		}
		go w.Admit(ctx, ask("w-"+strconv.Itoa(i)), func(string) {
			select {
			case waits <- struct{}{}:
			default:
			}
		})
	}
	for range benchWaiters {
		<-waits
	}
	now, err := gate(0)
	if err != nil {
		return err
	}
	var vk, floor []float64
	for range b.rounds {
		const n = 30
		cpu, err := ofThisThread(func() error {
			for range n {
				if _, refused, err := now.Offer(ctx, "x", admit.Amounts{MemMiB: 1}); err != nil || refused == "" {
					return fmt.Errorf("an offer beyond the budget: %q, %v", refused, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		vk = append(vk, n/cpu.Seconds())
		cpu, err = ofThisThread(func() error {
			for range n {
				if err := lookAtAll(filepath.Join(state, "admit")); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		floor = append(floor, n/cpu.Seconds())
	}
	b.addRate("host", "admission decisions a CPU second, 1,000 claims, 64 waiting", "1/s", median(vk), "floor: open, lock, read each claim", median(floor), 0.5)
	return nil
}

func lookAtAll(dir string) error {
	ents, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	buf := make([]byte, 4096)
	for _, e := range ents {
		fd, err := unix.Open(filepath.Join(dir, e.Name()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return err
		}
		_ = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
		_, err = unix.Read(fd, buf)
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

// ofThisThread is the processor time of f, which stays on its thread: wall time
// is that of a machine with other work.
func ofThisThread(f func() error) (time.Duration, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	now := func() time.Duration {
		var r unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_THREAD, &r)
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	began := now()
	err := f()
	return max(now()-began, time.Microsecond), err
}

// history: what a job with a thousand runs waits for, beside decoding the same
// lines.
func (b *bench) history(context.Context) error {
	state := filepath.Join(b.dir, "history-state")
	h := ledger.OpenHistory(state)
	at := time.Now().Add(-time.Hour)
	const key = "42-acme-web/test_unit-1"
	// Two runs by the ledger; the rest are copies of the second one's line.
	for i := range 2 {
		if err := h.Add(key, "test:unit", usage.Run{ID: "r-" + strconv.Itoa(i), Ended: at.Add(time.Duration(i) * time.Second), CeilingMiB: 2048}); err != nil {
			return err
		}
	}
	file := filepath.Join(state, "history", key)
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	last := string(text[bytes.LastIndexByte(text[:len(text)-1], '\n')+1:])
	for i := 2; i < usage.MaxRuns; i++ {
		text = append(text, strings.Replace(last, `"r-1"`, fmt.Sprintf(`"r-%d"`, i), 1)...)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return err
	}
	var vk, floor []float64
	for range b.rounds {
		const n = 20
		cpu, err := ofThisThread(func() error {
			for range n {
				j, err := h.Job(key)
				if err != nil {
					return err
				}
				if got := j.Lately(time.Now(), 2048).Runs; got != usage.MaxRuns {
					return fmt.Errorf("the estimate rests on %d runs, not %d", got, usage.MaxRuns)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		vk = append(vk, ms(cpu)/n)
		cpu, err = ofThisThread(func() error {
			for range n {
				text, err := os.ReadFile(file)
				if err != nil {
					return err
				}
				for line := range bytes.Lines(text) {
					var r usage.Run
					if err := json.Unmarshal(line, &r); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		floor = append(floor, ms(cpu)/n)
	}
	b.add("host", "estimate from 1,000 runs, CPU", "ms", median(vk), "floor: decoding them", median(floor), 1.5)
	return nil
}

// million is a recording of six hours with a million records of processes.
const (
	millionSamples = 2160
	millionProcs   = 463
)

func writeMillion(w io.Writer) error {
	s := atop.Sample{Host: "vm", Epoch: 1_790_000_000, Interval: 10, Reset: true, Has: atop.HasCPU | atop.HasMEM}
	s.CPU = atop.CPU{Hertz: 100, N: 2, User: 900, Idle: 1000}
	s.MEM = atop.MEM{PageSize: 4096, Phys: 1 << 20, Free: 1 << 19}
	var buf []byte
	for at := range millionSamples {
		s.Epoch, s.Procs = s.Epoch+10, s.Procs[:0]
		for i := range millionProcs {
			p := atop.Proc{PID: 100 + i, Name: fmt.Sprintf("worker-%d", i%40), State: 'S', Threads: 1 + i%3, Start: 1_789_999_000,
				Cmdline: fmt.Sprintf("/usr/lib/worker --number=%d --config=/etc/worker.conf", i), CGroup: "/vk/exec",
				Hertz: 100, User: int64(i % 7), Sys: 1, RSize: 20000, IO: true, WChan: "do_wait"}
			if i >= 300 { // short ones, which no other sample sees
				p.PID, p.Start, p.State, p.New, p.Cmdline = 1000+at*200+i, s.Epoch-5, 'E', true, ""
			}
			s.Procs = append(s.Procs, p)
		}
		buf = atop.AppendSample(buf[:0], &s)
		if _, err := w.Write(buf); err != nil {
			return err
		}
		s.Reset = false
	}
	return nil
}

// summary: `vk atop --summary` of a million records, beside what the issue
// allows, and beside counting the lines of the unpacked file.
func (b *bench) summary(ctx context.Context) error {
	state := filepath.Join(b.dir, "summary")
	a := &archive.Archive{Root: filepath.Join(state, "atop"), Days: 14}
	dir, err := a.Begin("4711-acme-web-million")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, atop.LogFile)
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := writeMillion(f); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := a.Finish(dir); err != nil {
		return err
	}
	packed := filepath.Join(dir, atop.PackedFile)
	var cpus, floors, rss []float64
	for range min(b.rounds, 3) {
		cmd := exec.CommandContext(ctx, b.vk, "--state-dir", state, "atop", "4711", "--summary")
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil || !strings.Contains(string(out), "what ran") {
			return fmt.Errorf("vk atop --summary: %w: %s%s", err, out, errs.String())
		}
		cpus = append(cpus, ms(cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()))
		if r, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
			rss = append(rss, float64(r.Maxrss)/1024)
		}
		_, cpu, err := timed(ctx, "sh", "-c", "zstdcat '"+packed+"' | wc -l > /dev/null")
		if err != nil {
			return err
		}
		floors = append(floors, ms(cpu))
	}
	b.add("host", "vk atop --summary, 1,000,000 records, CPU", "ms", median(cpus), "limit of the issue", 2000, 1)
	b.add("host", "vk atop --summary beside unpacking and counting lines, CPU", "ms", median(cpus), "floor: zstdcat | wc -l", median(floors), 10)
	b.add("host", "vk atop --summary, memory", "MiB", median(rss), "limit", 128, 1)
	return nil
}

// procTime is the processor time of a process's threads.
func procTime(pid int) time.Duration {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	var all []byte
	for _, f := range files {
		b, _ := os.ReadFile(f)
		all = append(all, b...)
	}
	return turns(all)
}

// turns sums the processor times of lines of schedstat.
func turns(lines []byte) time.Duration {
	sum := int64(0)
	for l := range strings.Lines(string(lines)) {
		if f := strings.Fields(l); len(f) == 3 {
			n, _ := strconv.ParseInt(f[0], 10, 64)
			sum += n
		}
	}
	return time.Duration(sum)
}

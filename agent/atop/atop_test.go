package atop_test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"virtkit/agent/atop"
	format "virtkit/core/atop"
)

// TestMain: the test program is also the programs that are watched.
func TestMain(m *testing.M) {
	switch os.Getenv("ATOP_TEST_AS") {
	case "threads": // some threads that wait, until standard input ends
		for range 4 {
			go func() {
				runtime.LockOSThread()
				select {}
			}()
		}
		os.Stdout.WriteString("ready\n")
		io.Copy(io.Discard, os.Stdin)
		os.Exit(7)
	}
	os.Exit(m.Run())
}

func sampleOf(t testing.TB, r *atop.Recorder) *format.Sample {
	t.Helper()
	b := r.Sample(nil)
	rd := format.NewReader(bytes.NewReader(b))
	s := &format.Sample{}
	if err := rd.Next(s); err != nil {
		t.Fatalf("%v in %q", err, b)
	}
	if st := rd.Stats(); st.Skipped+st.Torn > 0 {
		t.Fatalf("%+v of %q", st, b)
	}
	return s
}

// find is a process of a sample: its end, or itself.
func find(s *format.Sample, pid int, ended bool) *format.Proc {
	for i := range s.Procs {
		if p := &s.Procs[i]; p.PID == pid && p.Ended() == ended {
			return p
		}
	}
	return nil
}

// recorder is one whose host tells of ends.
func recorder(t testing.TB) *atop.Recorder {
	t.Helper()
	missing := ""
	r := atop.New(func(f string, a ...any) { missing += f })
	t.Cleanup(r.Close)
	if missing != "" {
		t.Skip("needs root in the first namespaces and a kernel with taskstats: ", missing)
	}
	return r
}

// TestEnds: who comes and goes between two samples is in the second one, with
// its status and what it used, once.
func TestEnds(t *testing.T) {
	r := recorder(t)
	if s := sampleOf(t, r); !s.Reset || s.Interval < 1 {
		t.Errorf("the first sample: reset %v, %d seconds", s.Reset, s.Interval)
	}
	status := map[int]int{}
	run := func(want int, script string) {
		c := exec.Command("sh", "-c", script)
		c.Run()
		status[c.Process.Pid] = want
	}
	run(0, "exit 0")
	run(3, "exit 3")
	run(256+9, "kill -9 $$")
	run(256+15, "kill -15 $$")
	run(0, "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done")
	busy := 0
	for pid := range status {
		busy = max(busy, pid)
	}
	s := sampleOf(t, r)
	for pid, want := range status {
		p := find(s, pid, true)
		switch {
		case p == nil:
			t.Errorf("the end of process %d (status %d) is missing", pid, want)
		case p.Exit != want || p.Name != "sh" || !p.New || p.RSize == 0 || p.PPID != os.Getpid() || p.Start == 0 || p.CPU != -1 || !p.IO:
			t.Errorf("process %d with status %d: %+v", pid, want, p)
		case pid == busy && p.User+p.Sys < 1:
			t.Errorf("process %d used %d ticks", pid, p.User+p.Sys)
		}
		if find(s, pid, false) != nil {
			t.Errorf("process %d is both ended and alive", pid)
		}
	}
	s = sampleOf(t, r)
	for pid := range status {
		if find(s, pid, true) != nil {
			t.Errorf("the end of process %d is told again", pid)
		}
	}
}

// TestZombie: one that has ended and that nobody has waited for is told once.
func TestZombie(t *testing.T) {
	r := recorder(t)
	c := exec.Command("cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if p := find(sampleOf(t, r), c.Process.Pid, false); p == nil || p.Cmdline != "cat" || p.Threads != 1 {
		t.Fatalf("the living one: %+v", p)
	}
	in.Close()
	io.Copy(io.Discard, out) // it has closed its files, and ends
	told := false
	for !told {
		s := sampleOf(t, r)
		told = find(s, c.Process.Pid, true) != nil
		if z := find(s, c.Process.Pid, false); told && z != nil {
			t.Errorf("ended and alive at once: %+v", z)
		}
	}
	s := sampleOf(t, r)
	if a, b := find(s, c.Process.Pid, false), find(s, c.Process.Pid, true); a != nil || b != nil {
		t.Errorf("a zombie is told again: %+v %+v", a, b)
	}
	c.Wait()
}

// TestThreads: a process of several threads is one, alive and at its end, and
// its wait channels are told when they change.
func TestThreads(t *testing.T) {
	r := recorder(t)
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), "ATOP_TEST_AS=threads")
	in, _ := c.StdinPipe()
	out, _ := c.StdoutPipe()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	pid := c.Process.Pid
	s := sampleOf(t, r)
	p := find(s, pid, false)
	if p == nil || p.Threads < 2 || p.Running+p.Sleeping+p.Blocked != p.Threads {
		t.Fatalf("threads: %+v", p)
	}
	waits := 0
	for _, w := range s.Waits {
		if w.PID == pid {
			for _, ch := range w.Channels {
				waits += ch.Threads
			}
		}
	}
	if waits != p.Threads-p.Running {
		t.Errorf("%d threads of %d, %d running, wait somewhere: %+v", waits, p.Threads, p.Running, s.Waits)
	}
	in.Close()
	c.Wait()
	s = sampleOf(t, r)
	n := 0
	for i := range s.Procs {
		if s.Procs[i].PID == pid {
			n++
		}
	}
	if p := find(s, pid, true); n != 1 || p == nil || p.Exit != 7 || p.Threads < 2 {
		t.Errorf("%d records, %+v", n, p)
	}
}

// TestIdle: a process that does nothing is in every sample as it was, what it
// does later is in the next one, and of one that has ended no file stays open.
func TestIdle(t *testing.T) {
	r := atop.New(t.Logf)
	defer r.Close()
	// open counts our descriptors of a process's files.
	open := func(pid int) (n int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range fds {
			if to, _ := os.Readlink("/proc/self/fd/" + d.Name()); strings.HasPrefix(to, "/proc/"+strconv.Itoa(pid)+"/") {
				n++
			}
		}
		return n
	}
	sampleOf(t, r)
	const many = 30
	var cmds []*exec.Cmd
	var ins []io.WriteCloser
	for range many {
		c := exec.Command("sh", "-c", "echo ready; read x; i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; echo done; read x")
		in, _ := c.StdinPipe()
		out, _ := c.StdoutPipe()
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		cmds, ins = append(cmds, c), append(ins, in)
		defer c.Wait()
		defer in.Close()
		if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		if len(cmds) == 1 {
			defer func() {
				// The one that works: from idle to idle.
				if _, err := io.WriteString(in, "go\n"); err != nil {
					t.Error(err)
				}
				if _, err := io.ReadFull(out, make([]byte, 5)); err != nil {
					t.Error(err)
				}
				if p := find(sampleOf(t, r), c.Process.Pid, false); p == nil || p.User+p.Sys == 0 {
					t.Errorf("it worked: %+v", p)
				}
			}()
		}
	}
	pid := cmds[0].Process.Pid
	var first *format.Proc
	for end := time.Now().Add(time.Minute); first == nil || first.State != 'S' || first.User+first.Sys > 0 || first.RGrow != 0; {
		if time.Now().After(end) {
			t.Fatalf("never idle: %+v", first)
		}
		first = find(sampleOf(t, r), pid, false)
	}
	for range 8 { // both those that look again and those that do not
		p := find(sampleOf(t, r), pid, false)
		if p == nil {
			t.Fatal("an idle process is missing")
		}
		p.CPU = first.CPU // it may be moved while it sleeps
		if d := cmp.Diff(first, p); d != "" {
			t.Errorf("an idle process has changed: %s", d)
		}
	}
	for i, c := range cmds[1:] {
		c.Process.Kill()
		ins[i+1].Close()
		c.Wait()
	}
	s := sampleOf(t, r)
	for _, c := range cmds[1:] {
		if p := find(s, c.Process.Pid, false); p != nil {
			t.Errorf("process %d has ended: %+v", c.Process.Pid, p)
		}
	}
	for _, c := range cmds[1:] {
		if n := open(c.Process.Pid); n > 0 {
			t.Errorf("%d files of process %d, which has ended, are open", n, c.Process.Pid)
		}
	}
}

// TestChildrensDisk: what a process reads and writes is its own, not also what
// its children did.
func TestChildrensDisk(t *testing.T) {
	r := recorder(t)
	sampleOf(t, r)
	dir := t.TempDir()
	c := exec.Command("sh", "-c", "dd if=/dev/zero of="+dir+"/x bs=1M count=4 conv=fsync 2>/dev/null; echo done; read x")
	in, _ := c.StdinPipe()
	out, _ := c.StdoutPipe()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	s := sampleOf(t, r)
	parent := find(s, c.Process.Pid, false)
	child := int64(0)
	for i := range s.Procs {
		if p := &s.Procs[i]; p.PPID == c.Process.Pid && p.Ended() {
			child += p.WSect
		}
	}
	if child < 4<<11 {
		t.Skipf("needs a file system on a disk for temporary files: %d sectors were written", child)
	}
	if parent == nil || parent.WSect >= 4<<11 {
		t.Errorf("the parent has written %+v, its child %d sectors", parent, child)
	}
	in.Close()
	c.Wait()
	if p := find(sampleOf(t, r), c.Process.Pid, true); p == nil || p.WSect >= 4<<11 {
		t.Errorf("at its end: %+v", p)
	}
}

// TestAsAtop compares with atop itself, of processes that do nothing: what both
// say of a process must be the same.
func TestAsAtop(t *testing.T) {
	bin, err := exec.LookPath("atop")
	if err != nil {
		t.Skip("needs atop (apt-get install atop)")
	}
	var pids []int
	for _, args := range [][]string{{"sleep", "1000"}, {"nice", "-n", "5", "sleep", "2000"}, {"sh", "-c", "read x", "a (b) c"}} {
		c := exec.Command(args[0], args[1:]...)
		in, _ := c.StdinPipe()
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, c.Process.Pid)
		defer c.Wait()
		defer c.Process.Kill()
		defer in.Close()
	}
	r := atop.New(t.Logf)
	defer r.Close()
	// Until nobody runs any more: nice has become sleep, and sleeps.
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		s, asleep := sampleOf(t, r), 0
		for _, pid := range pids {
			if p := find(s, pid, false); p != nil && p.State == 'S' && p.WChan != "-" && p.User+p.Sys == 0 && p.RGrow == 0 && p.Name != "nice" {
				asleep++
			}
		}
		if asleep == len(pids) {
			break
		}
		if time.Now().After(end) {
			for _, pid := range pids {
				t.Errorf("not asleep: %+v", find(s, pid, false))
			}
			t.FailNow()
		}
	}
	out, err := exec.Command(bin, "-P", "CPU,cpu,MEM,SWP,PRG,PRC,PRM,PRD", "1", "1").Output()
	if err != nil {
		t.Fatal(err)
	}
	want := &format.Sample{}
	if err := format.NewReader(bytes.NewReader(out)).Next(want); err != nil {
		t.Fatal(err)
	}
	fresh := atop.New(t.Logf)
	defer fresh.Close()
	got := sampleOf(t, fresh)
	near := cmpopts.IgnoreFields(format.Proc{}, "CGroup", "WChan")
	for _, pid := range pids {
		a, b := find(want, pid, false), find(got, pid, false)
		if a == nil || b == nil {
			t.Fatalf("process %d: %v, %v", pid, a, b)
		}
		if d := a.Start - b.Start; d < -1 || d > 1 { // both round the time of the boot
			t.Errorf("process %d started at %d, atop says %d", pid, b.Start, a.Start)
		}
		a.Start = b.Start
		a.Cmdline = strings.TrimSpace(a.Cmdline)
		if d := cmp.Diff(a, b, near); d != "" {
			t.Errorf("process %d, atop against this: %s", pid, d)
		}
	}
	if got.CPU.N != want.CPU.N || got.CPU.Hertz != want.CPU.Hertz || len(got.CPUs) != len(want.CPUs) {
		t.Errorf("processors: %+v, atop has %+v", got.CPU, want.CPU)
	}
	if got.MEM.Phys != want.MEM.Phys || got.MEM.PageSize != want.MEM.PageSize || got.MEM.HugeSize != want.MEM.HugeSize || got.SWP.Total != want.SWP.Total || got.SWP.Limit != want.SWP.Limit {
		t.Errorf("memory: %+v %+v, atop has %+v %+v", got.MEM, got.SWP, want.MEM, want.SWP)
	}
}

// TestSystem: counters are those since the sample before.
func TestSystem(t *testing.T) {
	r := atop.New(t.Logf)
	defer r.Close()
	a, b := sampleOf(t, r), sampleOf(t, r)
	all := uint(format.HasCPU | format.HasCPL | format.HasMEM | format.HasSWP | format.HasPAG | format.HasPSI | format.HasNET)
	if a.Has != all || b.Has != all || b.Reset {
		t.Errorf("labels %b and %b, want %b", a.Has, b.Has, all)
	}
	if a.CPU.Total() <= b.CPU.Total() || a.CPL.Switches <= b.CPL.Switches || a.PAG.Ins < b.PAG.Ins {
		t.Errorf("the boot %+v %+v is not more than an interval %+v %+v", a.CPU, a.CPL, b.CPU, b.CPL)
	}
	sum := int64(0)
	for _, c := range a.CPUs {
		sum += c.Total()
	}
	if d := sum - a.CPU.Total(); d > 20 || d < -20 {
		t.Errorf("processors add up to %d ticks, all have %d", sum, a.CPU.Total())
	}
}

func BenchmarkSample(b *testing.B) {
	r := atop.New(b.Logf)
	defer r.Close()
	var buf []byte
	buf = r.Sample(buf[:0])
	for b.Loop() {
		buf = r.Sample(buf[:0])
	}
	b.ReportMetric(float64(len(buf)), "bytes/sample")
}

package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/admit"
	"virtkit/ledger"
)

// Processes that ask for admission, and are killed.
const (
	workers    = 64
	unit       = 1024 // MiB
	budget     = 3 * unit
	workerEnv  = "VIRTKIT_TEST_ADMIT_WORKER" // state directory
	stressTime = "VIRTKIT_TEST_ADMIT_TIME"   // such as 10m
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(workerEnv); dir != "" {
		if err := worker(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var (
	whyRE      = regexp.MustCompile(`^waiting for (1024|3072) MiB of the host's 3072 MiB memory budget \((0|1024|2048|3072) MiB reserved, \d+ job\(s\) asked first\)$`)
	admittedRE = regexp.MustCompile(`^admitted after waiting \d+s for memory$`)
)

// worker asks for one job after another until it is killed. A job of one unit
// takes one of three slots, and a large one all three: locks that know nothing
// of the ledger. One that finds too few of them proves that the budget was
// overstepped.
func worker(state string) error {
	// Before the claim, so that at this process's end they are free before it.
	var slots [3]*os.File
	for i := range slots {
		f, err := os.OpenFile(filepath.Join(state, "slot"+strconv.Itoa(i)), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		slots[i] = f
	}
	j, err := ledger.Open(state)
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		a, err := j.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: budget}, Wait: 20 * time.Minute}) // a machine with other work is no starvation
		if err != nil {
			return err
		}
		want := 1
		if rand.N(8) == 0 {
			want = 3
		}
		said := []string{}
		id := fmt.Sprintf("%d-%d", os.Getpid(), n)
		h, err := a.Admit(context.Background(), admit.Ask{ID: id, Amounts: admit.Amounts{MemMiB: int64(want) * unit}}, func(s string) { said = append(said, s) })
		if err != nil {
			return fmt.Errorf("%s of %d: %w", id, want, err)
		}
		if len(said) > 0 && (!whyRE.MatchString(said[0]) || !admittedRE.MatchString(said[len(said)-1])) {
			return fmt.Errorf("%s waited and said %q", id, said)
		}
		took, err := takeSlots(slots[:], want)
		if err != nil {
			return fmt.Errorf("%s: %w", id, err)
		}
		fmt.Printf("%s %d %t\n", id, want, len(said) > 0)
		time.Sleep(rand.N(20 * time.Millisecond)) // the job
		for _, f := range took {
			if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
				return err
			}
		}
		if rand.N(10) == 0 {
			return nil // a job whose supervisor is gone, without a word
		}
		if err := h.Release(); err != nil {
			return err
		}
	}
}

func takeSlots(slots []*os.File, want int) ([]*os.File, error) {
	var took []*os.File
	var holders []string
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		for _, f := range slots {
			if len(took) == want {
				return took, nil
			}
			if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
				continue
			}
			if _, err := f.WriteAt(fmt.Appendf(nil, "%10d", os.Getpid()), 0); err != nil {
				return nil, err
			}
			took = append(took, f)
		}
		if len(took) == want {
			return took, nil
		}
		// A process that is being torn down may hold one for a moment longer
		// than its claim.
		var bad bool
		if holders, bad = alive(slots, took); bad {
			break
		}
	}
	return nil, fmt.Errorf("overstepped: %d of %d slots are free, the others are held by %v", len(took), want, holders)
}

// alive lists the holders of the slots that are not ours, and reports whether
// they all are running processes.
func alive(slots, ours []*os.File) ([]string, bool) {
	var out []string
	for _, f := range slots {
		var b [10]byte
		if _, err := f.ReadAt(b[:], 0); err != nil {
			return nil, false
		}
		pid := strings.TrimSpace(string(b[:]))
		if pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		st, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil {
			return nil, false
		}
		field := strings.Fields(string(st[strings.LastIndexByte(string(st), ')')+1:]))
		flags, _ := strconv.ParseUint(field[6], 10, 64)
		if field[0] == "Z" || field[0] == "X" || flags&4 != 0 { // PF_EXITING
			return nil, false
		}
		out = append(out, pid)
	}
	return out, len(out)+len(ours) >= len(slots)
}

// TestAdmissionUnderFire: 64 processes against a budget for three, killed at
// random. The ledger's own word and locks outside of it agree that the budget is
// never overstepped; nobody is let in before one that asked earlier and lives,
// so that whoever is not killed gets his turn; who was seen waiting has said why;
// and nothing is left.
func TestAdmissionUnderFire(t *testing.T) {
	long := 4 * time.Second
	if s := os.Getenv(stressTime); s != "" {
		var err error
		if long, err = time.ParseDuration(s); err != nil {
			t.Fatalf("%s: %v", stressTime, err)
		}
	}
	state := t.TempDir()
	j, err := ledger.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	procs := map[*os.Process]bool{}
	var admitted, large, waited, killed, samples atomic.Int64
	seen := map[string]bool{}   // claims that waited, as the one who looks saw them
	silent := map[string]bool{} // admitted without a word
	run := func() {
		for ctx.Err() == nil {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), workerEnv+"="+state)
			var out, errs strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &errs
			mu.Lock()
			if err := cmd.Start(); err != nil {
				mu.Unlock()
				t.Error(err)
				return
			}
			procs[cmd.Process] = true
			mu.Unlock()
			err := cmd.Wait()
			mu.Lock()
			delete(procs, cmd.Process)
			mu.Unlock()
			mu.Lock()
			for line := range strings.Lines(out.String()) {
				f := strings.Fields(line) // whole: a line is one write(2)
				admitted.Add(1)
				if f[1] == "3" {
					large.Add(1)
				}
				if f[2] == "true" {
					waited.Add(1)
				} else {
					silent[f[0]] = true
				}
			}
			mu.Unlock()
			var ee *exec.ExitError
			if errors.As(err, &ee) && ee.ExitCode() < 0 {
				killed.Add(1)
			} else if err != nil {
				t.Errorf("%v: %s", err, errs.String())
				stop()
			}
		}
	}
	for range workers {
		wg.Go(run)
	}
	// The one who looks.
	wg.Go(func() {
		a, err := j.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: budget}})
		if err != nil {
			t.Error(err)
		}
		for ctx.Err() == nil {
			all, problems, err := a.Claims(ctx)
			if ctx.Err() != nil {
				return
			}
			sum, first, last := int64(0), uint64(math.MaxUint64), uint64(0)
			mu.Lock()
			for _, c := range all {
				sum += c.Granted.MemMiB
				if c.Waiting {
					first = min(first, c.Seq)
					seen[c.ID] = true
				} else {
					last = max(last, c.Seq)
				}
			}
			mu.Unlock()
			if last > first {
				t.Errorf("one that asked later than one that waits was let in: %+v", all)
				stop()
				return
			}
			if err != nil || problems != nil || sum > budget {
				t.Errorf("%d MiB of %d are granted: %+v, %v %v", sum, budget, all, err, problems)
				stop()
				return
			}
			samples.Add(1)
			time.Sleep(time.Millisecond)
		}
	})
	// The one who kills.
	// On a machine with other work the time may be too short to see anything.
	enough := func() bool {
		return large.Load() > 1 && waited.Load() > 20 && killed.Load() > 20 && samples.Load() > 20
	}
	end := time.Now().Add(long)
	for ; ctx.Err() == nil && (time.Now().Before(end) || !enough() && time.Since(end) < 3*time.Minute); time.Sleep(rand.N(200 * time.Millisecond)) {
		if killed.Load() > 20+4*admitted.Load() {
			continue // or a slow machine does nothing but start those who come after
		}
		mu.Lock()
		for p := range procs { // any
			p.Kill()
			break
		}
		mu.Unlock()
	}
	stop()
	mu.Lock()
	for p := range procs {
		p.Kill()
	}
	mu.Unlock()
	wg.Wait()
	t.Logf("%d admitted in %v and more, %d of them large, %d waited; %d killed; looked %d times", admitted.Load(), long, large.Load(), waited.Load(), killed.Load(), samples.Load())
	if !enough() {
		t.Error("too little was tried")
	}
	told := 0
	for id := range seen {
		if silent[id] {
			t.Errorf("%s waited and did not say so", id)
		}
		told++
	}
	t.Logf("%d were seen waiting, %d were let in without waiting", told, len(silent))
	a := gate(t, j, budget)
	admitNow(t, a, mem("last", budget)).Release()
	left, err := os.ReadDir(filepath.Join(state, "admit"))
	if err != nil || len(left) != 1 || left[0].Name() != ".lock" {
		t.Errorf("left: %v %v", left, err)
	}
}

// BenchmarkAdmission is decisions among 1,000 claims and 64 who wait.
func BenchmarkAdmission(b *testing.B) {
	j, err := ledger.Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); lim.Cur < 1500 {
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	for i := range 1000 {
		admitNow(b, gate(b, j, 1000), mem(fmt.Sprint("c-", i), 1))
	}
	for i := range 64 {
		admitLater(b, gate(b, j, 1000), mem(fmt.Sprint("w-", i), 1))
	}
	b.Run("full", func(b *testing.B) {
		a := gate(b, j, 1000, func(o *ledger.AdmitOptions) { o.Wait = 0 })
		defer ofThisThread(b)()
		for b.Loop() {
			if _, err := a.Admit(b.Context(), mem("x", 1), func(string) {}); err == nil {
				b.Fatal("admitted")
			}
		}
	})
	b.Run("offer", func(b *testing.B) {
		a := gate(b, j, 1000)
		defer ofThisThread(b)()
		for b.Loop() {
			if _, refused, err := a.Offer(b.Context(), "x", admit.Amounts{MemMiB: 1}); refused != "memory" || err != nil {
				b.Fatal(refused, err)
			}
		}
	})
}

// ofThisThread reports processor time: the wall's is that of a machine with
// other work.
func ofThisThread(b *testing.B) func() {
	runtime.LockOSThread()
	now := func() time.Duration {
		var r unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_THREAD, &r); err != nil {
			b.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	began := now()
	return func() {
		b.ReportMetric(float64((now()-began).Microseconds())/float64(b.N), "cpu-µs/op")
		runtime.UnlockOSThread()
	}
}

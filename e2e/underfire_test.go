package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"virtkit/core/admit"
	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
	"virtkit/ledger"
)

const (
	fireJobs   = 64
	fireMem    = 192 // MiB a guest
	fireBudget = 3 * fireMem
	fireConfig = `
[vmm]
disk = "1G"
boot_timeout_secs = 360
[executor]
atop = false
[executor.vm]
cpus = 1
mem = "192M"
[executor.schedule]
mem_budget = "576M"
wait_timeout_secs = 86400
disk_default = "64M"
`
)

var (
	fireWhy = regexp.MustCompile(`(?m)^virtkit: waiting for 192 MiB of the host's 576 MiB memory budget \((0|192|384|576) MiB reserved, \d+ job\(s\) asked first\)$`)
	fireIn  = regexp.MustCompile(`(?m)^virtkit: admitted after waiting \d+s for memory$`)
)

// fire is TestRealAdmissionUnderFire.
type fire struct {
	t    *testing.T
	h    *host.Host
	img  string
	ctx  context.Context
	stop context.CancelFunc

	admitted, waited, killed, served, looked, vmms atomic.Int64
	number                                         atomic.Int64

	mu      sync.Mutex
	calls   map[int]string  // pid of a running vk gitlab → its call
	hit     map[string]bool // jobs of which something was killed
	waiting map[string]bool // jobs that were seen to wait
}

// TestRealAdmissionUnderFire: 64 runners call vk gitlab prepare, run and cleanup
// at once, against a budget for three guests, while executors, supervisors and
// VMMs are killed at random. Seen from outside, in the ledger and in /proc, the
// budget is never overstepped; nobody is let in before one that asked earlier; a
// job that nothing was done to succeeds, and tells why it waited if it did; no
// claim and nothing else is left. It takes VIRTKIT_TEST_ADMIT_TIME, or as long
// as it takes to see something of each.
func TestRealAdmissionUnderFire(t *testing.T) {
	guests(t)
	var long time.Duration
	if s := os.Getenv("VIRTKIT_TEST_ADMIT_TIME"); s != "" {
		var err error
		if long, err = time.ParseDuration(s); err != nil {
			t.Fatalf("VIRTKIT_TEST_ADMIT_TIME: %v", err)
		}
	}
	h, err := host.New(root, filepath.Join(world.dir, "fire"), fireConfig)
	if err != nil {
		t.Fatal(err)
	}
	f := &fire{t: t, h: h, img: busybox(t, h), calls: map[int]string{}, hit: map[string]bool{}, waiting: map[string]bool{}}
	f.ctx, f.stop = context.WithCancel(t.Context())
	// What is tried once a host (how it runs guests, the template) is no job's.
	if err := f.job(); err != nil || f.served.Load() != 1 {
		t.Fatalf("alone: %v", err)
	}
	var wg sync.WaitGroup
	for range fireJobs {
		wg.Go(func() {
			for f.ctx.Err() == nil {
				if err := f.job(); err != nil {
					t.Error(err)
					f.stop()
				}
			}
		})
	}
	wg.Go(f.look)
	enough := func() bool {
		return f.admitted.Load() > 5 && f.served.Load() > 1 && f.waited.Load() > 2 && f.killed.Load() > 5 && f.looked.Load() > 20 && f.vmms.Load() > 0
	}
	end := time.Now().Add(long)
	for f.ctx.Err() == nil && (time.Now().Before(end) || !enough() && time.Since(end) < 10*time.Minute) {
		time.Sleep(rand.N(500 * time.Millisecond))
		if f.killed.Load() <= 3+2*f.admitted.Load() { // or nobody's turn ever comes
			f.kill()
		}
	}
	f.stop()
	f.mu.Lock()
	for pid, call := range f.calls {
		if call != "cleanup" {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	f.mu.Unlock()
	wg.Wait()
	t.Logf("%d prepared, %d of them served, %d had waited; %d killed; looked %d times, at %d VMMs", f.admitted.Load(), f.served.Load(), f.waited.Load(), f.killed.Load(), f.looked.Load(), f.vmms.Load())
	if !enough() {
		t.Error("too little was tried")
	}
	nothingLeft(t, h)
	if left := h.Claims(); len(left) > 0 {
		t.Errorf("claims are left: %q", left)
	}
}

// job is one job from its runner's first call to its last.
func (f *fire) job() error {
	id := 700000 + f.number.Add(1)
	vars := map[string]string{
		"MICROVM_IMAGE": f.img, "CI_JOB_ID": fmt.Sprint(id), "CI_JOB_NAME": "fire", "CI_PROJECT_PATH": "group/e2e",
		"CI_BUILDS_DIR": "/builds", "CI_PROJECT_DIR": "/builds/group/e2e", "CI_JOB_TIMEOUT": "86400", "CI_CONCURRENT_ID": "0",
	}
	resp, err := json.Marshal(map[string]any{"id": id, "token": "glcbt-e2e", "job_info": map[string]any{"name": "fire", "project_id": 42}})
	if err != nil {
		return err
	}
	d := f.h.Driver()
	if d.TmpRoot, err = os.MkdirTemp(world.dir, "fire-"); err != nil {
		return err
	}
	defer os.RemoveAll(d.TmpRoot)
	s, err := d.Open(vars, resp)
	if err != nil {
		return err
	}
	defer s.Close()
	if res, _, err := s.Config(f.ctx); err != nil || res.Exit != 0 {
		if f.ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("config: %d %v\n%s", res.Exit, err, res.Stderr)
	}
	job := fmt.Sprint(id)
	exit, out := f.call(s, job, []string{f.h.VK, "gitlab", "prepare"})
	if exit == 0 {
		f.admitted.Add(1)
		tell, in := fireWhy.MatchString(out), fireIn.MatchString(out)
		if tell {
			f.waited.Add(1)
		}
		if f.was(f.waiting, job) && !tell || tell != in || strings.Contains(out, "virtkit: waiting for ") && !tell {
			return fmt.Errorf("%s waited and did not say how (told why: %t, its end: %t):\n%s", job, tell, in, out)
		}
		script, err := s.WriteScript([]byte("echo served; sleep 0.2\n"))
		if err != nil {
			return err
		}
		var said string
		if exit, said = f.call(s, job, []string{f.h.VK, "gitlab", "run", script, execdrv.StageBuild}); exit == 0 {
			if !strings.HasSuffix(said, "served\n") {
				return fmt.Errorf("%s: the script said %q", job, said)
			}
			f.served.Add(1)
		}
		out += said
	}
	if exit != 0 && f.ctx.Err() == nil && !f.was(f.hit, job) {
		return fmt.Errorf("%s failed with %d, though nothing of it was killed:\n%s", job, exit, out)
	}
	for range 3 { // it may be killed too
		if exit, out = f.call(s, job, []string{f.h.VK, "gitlab", "cleanup"}); exit == 0 {
			return nil
		}
	}
	return fmt.Errorf("%s: cleanup: %d\n%s", job, exit, out)
}

func (f *fire) was(m map[string]bool, job string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return m[job]
}

// call makes one of a job's calls.
func (f *fire) call(s *runnerside.Session, job string, argv []string) (exit int, out string) {
	cmd := s.Command(argv)
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	f.mu.Lock()
	if f.ctx.Err() != nil && argv[2] != "cleanup" {
		f.mu.Unlock()
		return -1, ""
	}
	if err := cmd.Start(); err != nil {
		f.mu.Unlock()
		return -1, err.Error()
	}
	f.calls[cmd.Process.Pid] = argv[2]
	f.mu.Unlock()
	err := cmd.Wait()
	f.mu.Lock()
	delete(f.calls, cmd.Process.Pid)
	if _, ok := errors.AsType[*exec.ExitError](err); ok && cmd.ProcessState.ExitCode() < 0 {
		f.hit[job] = true
	}
	f.mu.Unlock()
	return cmd.ProcessState.ExitCode(), b.String()
}

// kill ends one process of any job, without a warning: an executor, a supervisor
// or a VMM.
func (f *fire) kill() {
	if dirs := f.h.JobDirs(); rand.N(2) == 0 && len(dirs) > 0 {
		dir := dirs[rand.N(len(dirs))]
		st, err := supervise.ReadState(filepath.Join(f.h.State, "jobs", dir))
		role, pid := "supervisor", st.PID
		if rand.N(2) == 0 {
			role, pid = "vmm", st.VMMPID
		}
		if err != nil || pid < 2 || f.h.Processes()[pid] == "" {
			return // not yet, or no more
		}
		f.mu.Lock()
		f.hit[number(dir)] = true
		f.mu.Unlock()
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			f.t.Logf("killed the %s of %s", role, dir)
			f.killed.Add(1)
		}
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for pid := range f.calls { // any
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			f.killed.Add(1)
		}
		return
	}
}

// number is the job's, of what is named by it.
func number(dir string) string {
	n, _, _ := strings.Cut(dir, "-")
	return n
}

// look watches from outside, all the time.
func (f *fire) look() {
	j, err := ledger.Open(f.h.State)
	if err != nil {
		f.t.Error(err)
		f.stop()
		return
	}
	gate, err := j.Admissions(ledger.AdmitOptions{Limits: admit.Limits{MemMiB: fireBudget}})
	if err != nil {
		f.t.Error(err)
		f.stop()
		return
	}
	for f.ctx.Err() == nil {
		if err := f.lookOnce(gate); err != nil && f.ctx.Err() == nil {
			f.t.Error(err)
			f.stop()
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (f *fire) lookOnce(gate *ledger.Admissions) error {
	all, problems, err := gate.Claims(f.ctx)
	if err != nil || problems != nil {
		return fmt.Errorf("claims: %w %v", err, problems)
	}
	f.looked.Add(1)
	sum, first, last := int64(0), uint64(math.MaxUint64), uint64(0)
	f.mu.Lock()
	for _, c := range all {
		sum += c.Granted.MemMiB
		if !c.Waiting {
			last = max(last, c.Seq)
			continue
		}
		first = min(first, c.Seq)
		f.waiting[number(c.ID)] = true
	}
	f.mu.Unlock()
	switch {
	case sum > fireBudget:
		return fmt.Errorf("%d MiB of %d are granted: %+v", sum, fireBudget, all)
	case last > first:
		return fmt.Errorf("one that asked later than one that waits was let in: %+v", all)
	}
	// Each VMM has its job's claim open: so there is memory of a guest only where
	// the ledger counts it.
	comms, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	n := 0
	for _, p := range comms {
		comm, err := os.ReadFile(p)
		fds, _ := filepath.Glob(filepath.Join(filepath.Dir(p), "fd", "*"))
		if err != nil || !strings.HasPrefix(string(comm), "vk:") || len(fds) == 0 {
			continue // another program, or it has ended and its memory is gone
		}
		ours, holds := false, false
		for _, fd := range fds {
			to, err := os.Readlink(fd)
			ours = ours || strings.HasPrefix(to, f.h.State+"/")
			holds = holds || err != nil || strings.HasPrefix(to, filepath.Join(f.h.State, "admit")+"/")
		}
		if !ours {
			continue // of another host
		}
		n++
		if !holds {
			return fmt.Errorf("the VMM %s has no claim", p)
		}
	}
	f.vmms.Add(int64(n))
	if n > 3 {
		return fmt.Errorf("%d VMMs run at once, and there is room for three", n)
	}
	return nil
}

package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/core/execdrv"
	"virtkit/core/execdrv/runnerside"
	"virtkit/core/supervise"
	"virtkit/e2e/host"
)

// kills is how many processes TestRandomKills kills: 6, or $VK_KILLS.
func kills() int {
	if n, err := strconv.Atoi(os.Getenv("VK_KILLS")); err == nil {
		return n
	}
	return 6
}

// killSeed is where the moments come from: the clock, or $VK_KILL_SEED.
func killSeed(t *testing.T) uint64 {
	seed := uint64(time.Now().UnixNano())
	if v, err := strconv.ParseUint(os.Getenv("VK_KILL_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("VK_KILL_SEED=%d", seed)
	return seed
}

// TestRandomKills kills one process with SIGKILL at a random moment of a
// random call of a job, many times. Whatever dies, the job's verdict is right
// and nothing is left after cleanup.
func TestRandomKills(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	rnd := rand.New(rand.NewPCG(killSeed(t), 1))
	k := &killer{t: t, h: h, span: map[string]time.Duration{"prepare": 6 * time.Second, execdrv.StageBuild: time.Second, "cleanup": 300 * time.Millisecond}}
	for i := range kills() {
		phase := []string{"prepare", execdrv.StageBuild, "cleanup"}[rnd.IntN(3)]
		victim := []string{"vk", "supervisor", "vmm", "service supervisor", "service vmm"}[rnd.IntN(5)]
		after := time.Duration(rnd.Int64N(int64(k.span[phase])))
		name := fmt.Sprintf("%d/%s of %s after %v", i, victim, phase, after.Round(time.Millisecond))
		if !t.Run(name, func(t *testing.T) {
			k.t = t
			s := jobWith(t, h, img, nil, service(img, "idle", map[string]any{"command": []string{"sleep", "1000"}}))
			k.job(s, phase, victim, after)
			nothingLeft(t, h)
		}) {
			return
		}
	}
}

type killer struct {
	t    *testing.T
	h    *host.Host
	span map[string]time.Duration // how long each call takes, so that the moment falls into it
}

// ended is how a call came out.
type ended struct {
	exit int // -1 when it was killed
	hit  bool
	out  string
}

// call makes one call and, when it is its turn, kills the victim.
func (k *killer) call(s *runnerside.Session, argv []string, victim string, after time.Duration) ended {
	k.t.Helper()
	cmd := s.Command(argv)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	start := time.Now()
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	done := make(chan struct{})
	hit := make(chan bool, 1)
	go func() {
		if victim == "" {
			hit <- false
			return
		}
		select {
		case <-done:
			hit <- false
		case <-time.After(after):
			hit <- k.kill(victim, cmd.Process.Pid)
		}
	}()
	_ = cmd.Wait()
	close(done)
	e := ended{exit: cmd.ProcessState.ExitCode(), hit: <-hit, out: out.String()}
	if victim == "" {
		name := argv[len(argv)-1]
		k.span[name] = (k.span[name] + time.Since(start)) / 2
	}
	return e
}

func (k *killer) kill(victim string, vk int) bool {
	if victim == "vk" {
		return syscall.Kill(vk, syscall.SIGKILL) == nil
	}
	for _, id := range k.h.JobDirs() {
		if pid := k.h.Supervisors(id)[victim]; pid > 1 {
			return syscall.Kill(pid, syscall.SIGKILL) == nil
		}
	}
	return false
}

func (k *killer) job(s *runnerside.Session, phase, victim string, after time.Duration) {
	t, vk := k.t, k.h.VK
	at := func(p string) string {
		if p == phase {
			return victim
		}
		return ""
	}
	prep := k.call(s, []string{vk, "gitlab", "prepare"}, at("prepare"), after)
	switch {
	case prep.exit == 0:
	case !prep.hit:
		t.Errorf("prepare: %d, though nothing was killed\n%s", prep.exit, prep.out)
	case victim == "vk" && prep.exit != -1 || victim != "vk" && prep.exit != 2:
		t.Errorf("prepare with a dead %s: %d, expected a system failure\n%s", victim, prep.exit, prep.out)
	case victim != "vk" && !strings.Contains(prep.out, "virtkit: boot: ") && !strings.Contains(prep.out, "virtkit: shell: "):
		t.Errorf("prepare does not name the step:\n%s", prep.out)
	}
	if prep.exit == 0 {
		// A guest whose VMM dies while it starts from a template is booted again
		// and lives, and the trace says so; any other that was hit is dead.
		again := victim == "vmm" && strings.Contains(prep.out, "virtkit: warning: the guest was booted again: ")
		k.stages(s, at(execdrv.StageBuild), after, prep.hit && ends(victim) && !again)
	}
	clean := k.call(s, []string{vk, "gitlab", "cleanup"}, at("cleanup"), after)
	if clean.exit != 0 && !(victim == "vk" && clean.hit) {
		t.Errorf("cleanup: %d\n%s", clean.exit, clean.out)
	}
	if clean.exit != 0 {
		if clean = k.call(s, []string{vk, "gitlab", "cleanup"}, "", 0); clean.exit != 0 {
			t.Errorf("cleanup again: %d\n%s", clean.exit, clean.out)
		}
	}
}

// A prepare whose VMM is killed as soon as it runs fails when the guest was
// booting, and says why; when it came from a template the guest is booted again,
// the trace says so, and the job goes on.
func TestVMMKilledInPrepare(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	vars := map[string]string{"MICROVM_IMAGE": img, "MICROVM_MEM": "231M"} // of no other test: no template yet
	killed := func(s *runnerside.Session) (exit int, trace string) {
		cmd := s.Command([]string{h.VK, "gitlab", "prepare"})
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended, hit := make(chan struct{}), make(chan bool, 1)
		go func() {
			for {
				for _, id := range h.JobDirs() {
					if st, err := supervise.ReadState(filepath.Join(h.State, "jobs", id)); err == nil && st.VMMPID > 1 {
						hit <- syscall.Kill(st.VMMPID, syscall.SIGKILL) == nil
						return
					}
				}
				select {
				case <-ended:
					hit <- false
					return
				case <-time.After(time.Millisecond):
				}
			}
		}()
		_ = cmd.Wait()
		close(ended)
		if !<-hit {
			t.Errorf("prepare ended before its VMM could be killed:\n%s", out.String())
		}
		return cmd.ProcessState.ExitCode(), out.String()
	}
	t.Run("booting", func(t *testing.T) {
		exit, trace := killed(plainJob(t, h.Driver(), vars, nil))
		if exit != 2 || !strings.Contains(trace, "virtkit: boot: ") || !strings.Contains(trace, "QEMU ended: killed by SIGKILL") || strings.Contains(trace, "booted again") {
			t.Errorf("prepare: %d\n%s", exit, trace)
		}
		nothingLeft(t, h)
	})
	t.Run("keeps a template", func(t *testing.T) { prepared(t, plainJob(t, h.Driver(), vars, nil)) })
	t.Run("from the template", func(t *testing.T) {
		s := plainJob(t, h.Driver(), vars, nil)
		cleanedUp(t, s)
		exit, trace := killed(s)
		if exit != 0 || strings.Count(trace, "virtkit: warning: the guest was booted again: its start from a template came to nothing: ") != 1 || !strings.Contains(trace, "virtkit: booted in ") {
			t.Fatalf("prepare: %d\n%s", exit, trace)
		}
		if res := stage(t, s, execdrv.StageBuild, "echo alive\n"); res.Exit != 0 || string(res.Stdout) != "alive\n" {
			t.Errorf("build_script: %d %q\n%s", res.Exit, res.Stdout, res.Stderr)
		}
	})
	nothingLeft(t, h)
}

// ends tells whether a job's guest ends with the victim.
func ends(victim string) bool { return victim == "supervisor" || victim == "vmm" }

// stages runs a script that exits with 7 and one after it. dead says that the
// guest was killed before.
func (k *killer) stages(s *runnerside.Session, victim string, after time.Duration, dead bool) {
	t := k.t
	path, err := s.WriteScript([]byte("echo begin; sleep 0.5; echo end; exit 7\n"))
	if err != nil {
		t.Fatal(err)
	}
	os.Remove(s.ExitCodeFile())
	run := k.call(s, []string{k.h.VK, "gitlab", "run", path, execdrv.StageBuild}, victim, after)
	code, _ := os.ReadFile(s.ExitCodeFile())
	lost := dead || run.hit && ends(victim)
	switch {
	case run.exit == 1 && string(code) == "7\n": // it had ended before the kill, or goes on without its service
	case run.exit == -1 && victim == "vk":
	case run.exit == 2 && lost && len(code) == 0:
	default:
		t.Errorf("build_script (killed: %q): %d, code %q\n%s", victim, run.exit, code, run.out)
	}
	if path, err = s.WriteScript([]byte("echo alive\n")); err != nil {
		t.Fatal(err)
	}
	next := k.call(s, []string{k.h.VK, "gitlab", "run", path, execdrv.StageAfter}, "", 0)
	if lost && next.exit != 2 || !lost && (next.exit != 0 || !strings.HasSuffix(next.out, "alive\n") && !strings.Contains(next.out, "alive\nvirtkit: warning: service idle has ended")) {
		t.Errorf("after_script (guest lost: %v): %d\n%s", lost, next.exit, next.out)
	}
}

// A runner that dies takes its job's guest with it, and the next job's
// prepare removes the directory that nobody came back for.
func TestForgottenJob(t *testing.T) {
	h := guests(t)
	img := busybox(t, h)
	s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": img}, nil)
	// A shell is the runner: it makes the calls and ends without cleanup.
	script := `"$1" gitlab config >"$TMPDIR/answer" || exit 1
VIRTKIT_GITLAB_CALL=$(sed 's/.*"VIRTKIT_GITLAB_CALL":"\([^"]*\)".*/\1/' "$TMPDIR/answer"); export VIRTKIT_GITLAB_CALL
"$1" gitlab prepare >&2 || exit 1
echo prepared; read -r wait; exit 0
`
	cmd := s.Command([]string{"/bin/sh", "-c", script, "runner", h.VK})
	var errb bytes.Buffer
	cmd.Stderr = &errb
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 32)
	if n, _ := out.Read(buf); string(buf[:n]) != "prepared\n" {
		t.Fatalf("the runner said %q\n%s", buf[:n], errb.String())
	}
	dirs := h.JobDirs()
	if len(dirs) != 1 || len(h.Supervisors(dirs[0])) != 2 {
		t.Fatalf("jobs %q with %v", dirs, h.Processes())
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for len(h.Processes()) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("the guest outlives its runner: %v", h.Processes())
		}
		time.Sleep(50 * time.Millisecond)
	}
	b, err := os.ReadFile(filepath.Join(h.State, "jobs", dirs[0], "state.json"))
	if err != nil || !strings.Contains(string(b), "owner-gone") {
		t.Errorf("state: %v\n%s", err, b)
	}
	s2 := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": img}, nil)
	prepared(t, s2)
	for _, d := range h.JobDirs() {
		if d == dirs[0] {
			t.Errorf("%s is still there", d)
		}
	}
}

// The four calls work for a shell around each of them, which is gone after the
// call: such a parent is not taken for the runner.
func TestCallsFromShells(t *testing.T) {
	h := guests(t)
	d := h.Driver()
	wrap := func(argv []string) []string {
		return append([]string{"/bin/sh", "-c", `"$@"; exit $?`, "wrapper"}, argv...)
	}
	d.Config, d.Prepare, d.Run, d.Cleanup = wrap(d.Config), wrap(d.Prepare), wrap(d.Run), wrap(d.Cleanup)
	s := plainJob(t, d, map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
	prepared(t, s)
	for range 3 {
		if res := stage(t, s, execdrv.StageBuild, "sleep 1; echo here\n"); res.Exit != 0 || string(res.Stdout) != "here\n" {
			t.Errorf("%d %q %s", res.Exit, res.Stdout, res.Stderr)
		}
	}
}

// `vk gitlab check` runs a job of its own and says that all is well.
func TestGitlabCheck(t *testing.T) {
	h := guests(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.VK, "gitlab", "check", "--image", busybox(t, h))
	cmd.Env = h.Env()
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, errb.String())
	}
	for _, want := range []string{`executor = "custom"`, `run_exec = "` + h.VK + `"`, `run_args = ["gitlab", "run"]`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the block lacks %q:\n%s", want, out.String())
		}
	}
	if !strings.Contains(errb.String(), "it works") || !strings.Contains(errb.String(), "in the guest: Linux") {
		t.Errorf("it said:\n%s", errb.String())
	}
	nothingLeft(t, h)
}

// watched is output that is looked at while it comes.
type watched struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// A prepare that is told to end undoes what it did, before any cleanup.
func TestPrepareIsCancelled(t *testing.T) {
	h := guests(t)
	for _, at := range []string{"it begins", "it has read the job", "a VMM runs"} {
		s := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": busybox(t, h)}, nil)
		cmd := s.Command([]string{h.VK, "gitlab", "prepare"})
		out := &watched{}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				switch at {
				case "it has read the job":
					if out.String() == "" {
						continue
					}
				case "a VMM runs":
					if ids := h.JobDirs(); len(ids) == 0 || h.Supervisors(ids[0])["vmm"] == 0 {
						continue
					}
				}
				break
			}
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}()
		_ = cmd.Wait()
		<-done
		// At its very beginning it may not have got to taking signals.
		if code := cmd.ProcessState.ExitCode(); code != 2 && code != 0 && !(code == -1 && at == "it begins") {
			t.Errorf("SIGTERM when %s: exit %d\n%s", at, code, out.String())
		} else if code == 0 {
			if res, err := s.Cleanup(t.Context()); err != nil || res.Exit != 0 {
				t.Errorf("cleanup: %+v %v", res, err)
			}
		}
		nothingLeft(t, h)
	}
}

package supervise_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

func ownerOf(t *testing.T, pid string) supervise.Owner {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(pid))
	if err != nil {
		t.Fatalf("pid %q: %v", pid, err)
	}
	o, err := supervise.ProcessOwner(n)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// processesWith lists living processes whose command line or environment
// names dir.
func processesWith(dir string) []int {
	var found []int
	ents, _ := os.ReadDir("/proc")
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		for _, f := range []string{"cmdline", "environ"} {
			if b, err := os.ReadFile(filepath.Join("/proc", e.Name(), f)); err == nil && bytes.Contains(b, []byte(dir)) {
				found = append(found, pid)
				break
			}
		}
	}
	return found
}

// nothingLeft checks that no process of dir lives and that a take-over of the
// directory leaves nothing.
func nothingLeft(t *testing.T, dir string, vmm supervise.Owner) {
	t.Helper()
	eventually(t, "the end of all processes", func() bool { return len(processesWith(dir)) == 0 })
	if vmm.PID != 0 {
		eventually(t, "the end of the VMM", func() bool { return !vmm.Alive() })
	}
	sweep(t, filepath.Dir(dir))
	gone(t, dir)
}

// sweep is what ledger does, which this package may not import.
func sweep(t *testing.T, base string) {
	t.Helper()
	ents, err := os.ReadDir(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range ents {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(base, e.Name())
		l, err := supervise.TakeOver(dir)
		if err != nil {
			t.Errorf("taking over %s: %v", dir, err)
			continue
		}
		if _, err := supervise.KillLeftover(t.Context(), dir); err != nil {
			t.Error(err)
		}
		if err := supervise.RemoveJobDir(dir); err != nil {
			t.Error(err)
		}
		l.Close()
	}
}

func vmmOf(dir string) supervise.Owner {
	st, err := supervise.ReadState(dir)
	if err != nil {
		return supervise.Owner{}
	}
	return supervise.Owner{PID: st.VMMPID, Start: st.VMMStart}
}

func TestLaunch(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	t.Setenv("TEST_SECRET", "hunter2")
	var stages []string
	o := launchOptions(dir, testSpec(base))
	o.Progress = func(st supervise.State) { stages = append(stages, st.Stage) }
	c, err := supervise.Launch(ctxFor(t), o)
	if err != nil {
		t.Fatalf("Launch = %v", err)
	}
	st, err := c.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || st.PID == os.Getpid() || st.VMMPID == 0 {
		t.Fatalf("State = %+v, %v", st, err)
	}
	if len(stages) == 0 || stages[len(stages)-1] != "running" {
		t.Errorf("stages = %q, want some, the last one running", stages)
	}
	if sid, err := syscall.Getpgid(st.PID); err != nil || sid != st.PID {
		t.Errorf("process group of the supervisor = %d, %v; want its own", sid, err)
	}
	env, err := os.ReadFile("/proc/" + strconv.Itoa(st.PID) + "/environ")
	if err != nil || bytes.Contains(env, []byte("hunter2")) {
		t.Errorf("a secret is in the supervisor's environment (%v)", err)
	}
	for _, f := range []string{supervise.SpecFile, supervise.StateFile, supervise.LogFile, supervise.LockFile, supervise.SocketFile, supervise.ConsoleFile, supervise.UpperFile} {
		fi, err := os.Lstat(filepath.Join(dir, f))
		if err != nil || fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v, %v; want nothing for others", f, fi.Mode(), err)
		}
	}
	var out bytes.Buffer
	r, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"cat"}}, guestclient.Stdio{In: strings.NewReader("eof"), Out: &out}, nil)
	if err != nil || r.Code != 0 || out.String() != "eof" {
		t.Errorf("Exec = %+v, %v, %q", r, err, out.String())
	}
	t.Logf("supervisor: PSS %d KiB", pss(st.PID))
	if _, err := supervise.Launch(ctxFor(t), launchOptions(dir, testSpec(base))); !errors.Is(err, os.ErrExist) {
		t.Errorf("second Launch = %v, want ErrExist", err)
	}
	vmm := vmmOf(dir)
	if _, err := c.Stop(ctxFor(t), time.Second); err != nil {
		t.Errorf("Stop = %v", err)
	}
	if supervise.Locked(dir) || vmm.Alive() {
		t.Error("Stop returned before the end")
	}
	gone(t, dir)
	nothingLeft(t, dir, vmm)
}

func pss(pid int) int {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	for ln := range strings.SplitSeq(string(b), "\n") {
		if f := strings.Fields(ln); len(f) > 1 && f[0] == "Pss:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func TestLaunchFailures(t *testing.T) {
	for name, c := range map[string]struct {
		env  []string
		text []string
	}{
		"silent": {env: []string{"TEST_SUPERVISE_SILENT=1"}, text: []string{"did not get ready in time", "waiting for the guest's agent", "fake guest g1"}},
		"crash":  {env: []string{"TEST_SUPERVISE_CRASH=network"}, text: []string{"guest g1 ended", "crash as told at network"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir := filepath.Join(base, "run-1")
			s := testSpec(base)
			s.BootLimit = 3 * time.Second // all of which the silent one takes
			s.Keep = true
			_, err := supervise.Launch(ctxFor(t), launchOptions(dir, s, c.env...))
			if err == nil {
				t.Fatal("Launch succeeded")
			}
			for _, want := range c.text {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Launch = %v; want %q in it", err, want)
				}
			}
			if fault.KindOf(err) != fault.System {
				t.Errorf("kind = %v", fault.KindOf(err))
			}
			gone(t, dir) // at once, without a sweep
			nothingLeft(t, dir, supervise.Owner{})
		})
	}
	t.Run("no program", func(t *testing.T) {
		base := t.TempDir()
		o := launchOptions(filepath.Join(base, "run-1"), testSpec(base))
		o.Argv = []string{"/no/such/program"}
		if _, err := supervise.Launch(ctxFor(t), o); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("Launch = %v, want ErrNotExist", err)
		}
		gone(t, o.Dir)
	})
}

var supervisorSteps = []string{"socket", "image", "disk", "network", "driver", "kernel", "boot", "contact", "setup", "command", "ready"}

// A launch that is cancelled while the supervisor is at any step undoes all.
func TestLaunchCancelled(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	ctx, cancel := context.WithCancel(ctxFor(t))
	o := launchOptions(dir, testSpec(base), "TEST_SUPERVISE_SILENT=1")
	o.Progress = func(st supervise.State) {
		if st.Phase == supervise.Booting {
			cancel()
		}
	}
	if _, err := supervise.Launch(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("Launch = %v, want canceled", err)
	}
	gone(t, dir)
	nothingLeft(t, dir, supervise.Owner{})
}

// readPID waits for the file that pauseAt writes.
func readPID(t *testing.T, file string) int {
	t.Helper()
	var pid int
	eventually(t, "the pause", func() bool {
		b, err := os.ReadFile(file)
		pid, _ = strconv.Atoi(string(b))
		return err == nil && pid != 0
	})
	return pid
}

func TestSupervisorKilledAtEachStep(t *testing.T) {
	for _, step := range append(supervisorSteps, "ending", "removing") {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir, file := filepath.Join(base, "run-1"), filepath.Join(t.TempDir(), "pid")
			type launched struct {
				c   *supervise.Client
				err error
			}
			done := make(chan launched, 1)
			go func() {
				c, err := supervise.Launch(ctxFor(t), launchOptions(dir, testSpec(base), "TEST_SUPERVISE_PAUSE="+step+"="+file))
				done <- launched{c, err}
			}()
			late := step == "ending" || step == "removing"
			var l launched
			stopped := make(chan error, 1)
			if late {
				if l = <-done; l.err != nil {
					t.Fatalf("Launch = %v", l.err)
				}
				go func() { _, err := l.c.Stop(ctxFor(t), 0); stopped <- err }()
			}
			pid := readPID(t, file)
			vmm := vmmOf(dir)
			if step == "contact" && !vmm.Alive() {
				t.Error("no VMM to outlive: the test tests nothing")
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if late {
				if err := <-stopped; err != nil {
					t.Errorf("Stop under a kill = %v", err)
				}
			} else {
				if l = <-done; l.err == nil {
					t.Error("Launch succeeded")
				} else if !strings.Contains(l.err.Error(), "killed") {
					t.Errorf("Launch = %v; want the signal in it", l.err)
				}
				gone(t, dir) // Launch cleans up by itself
			}
			nothingLeft(t, dir, vmm)
		})
	}
}

// launcher starts a launching process.
func launcher(t *testing.T, dir string, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), append(env, "TEST_SUPERVISE_MODE=launch", "TEST_SUPERVISE_DIR="+dir)...)
	var errb bytes.Buffer
	cmd.Stderr = &errb
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		if t.Failed() && errb.Len() > 0 {
			t.Logf("launcher: %s", errb.String())
		}
	})
	return cmd
}

func TestLauncherKilledAtEachStep(t *testing.T) {
	for _, step := range []string{"make", "start", "wait", "adopt"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			testSpec(base)
			dir, file := filepath.Join(base, "run-1"), filepath.Join(t.TempDir(), "pid")
			cmd := launcher(t, dir, "TEST_SUPERVISE_LAUNCH_PAUSE="+step+"="+file)
			readPID(t, file)
			if step == "adopt" {
				eventually(t, "a running guest", func() bool {
					st, err := supervise.ReadState(dir)
					return err == nil && st.Phase == supervise.Running
				})
			}
			vmm := vmmOf(dir)
			cmd.Process.Kill()
			cmd.Wait()
			nothingLeft(t, dir, vmm)
		})
	}
}

func TestLauncherAndSupervisorKilledAtEachStep(t *testing.T) {
	for _, step := range supervisorSteps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			testSpec(base)
			dir, file := filepath.Join(base, "run-1"), filepath.Join(t.TempDir(), "pid")
			cmd := launcher(t, dir, "TEST_SUPERVISE_CHILD_ENV=TEST_SUPERVISE_PAUSE="+step+"="+file)
			pid := readPID(t, file)
			vmm := vmmOf(dir)
			cmd.Process.Kill()
			cmd.Wait()
			// Paused for ever, the supervisor cannot notice.
			syscall.Kill(pid, syscall.SIGKILL)
			nothingLeft(t, dir, vmm)
		})
	}
}

// A launcher that dies while the guest boots takes it along.
func TestLauncherKilledDuringBoot(t *testing.T) {
	base := t.TempDir()
	testSpec(base)
	dir := filepath.Join(base, "run-1")
	cmd := launcher(t, dir, "TEST_SUPERVISE_CHILD_ENV=TEST_SUPERVISE_SILENT=1")
	var vmm supervise.Owner
	eventually(t, "the boot", func() bool { vmm = vmmOf(dir); return vmm.Alive() })
	cmd.Process.Kill()
	cmd.Wait()
	eventually(t, "the end of all processes", func() bool { return len(processesWith(dir)) == 0 && !vmm.Alive() })
	gone(t, dir) // the supervisor was alive: no sweep is needed
}

func TestAdoptedGuestOutlivesItsLauncher(t *testing.T) {
	base := t.TempDir()
	testSpec(base)
	dir := filepath.Join(base, "run-1")
	cmd := launcher(t, dir)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the launcher ended with %v", err)
	}
	c, err := supervise.Dial(dir)
	if err != nil {
		t.Fatal(err)
	}
	st, err := c.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running {
		t.Fatalf("State = %+v, %v", st, err)
	}
	// kill -9 of a supervisor that nobody waits for: the VMM dies with it, the
	// directory waits for a sweep, clients are told.
	vmm := vmmOf(dir)
	syscall.Kill(st.PID, syscall.SIGKILL)
	eventually(t, "the end of the VMM", func() bool { return !vmm.Alive() })
	eventually(t, "the client's notice", func() bool {
		_, err := c.State(ctxFor(t))
		return errors.Is(err, supervise.ErrSupervisorGone) && strings.Contains(err.Error(), "killed while the guest was running")
	})
	nothingLeft(t, dir, vmm)
}

func TestVMMKilled(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	s := testSpec(base)
	s.Keep = true
	c, err := supervise.Launch(ctxFor(t), launchOptions(dir, s))
	if err != nil {
		t.Fatal(err)
	}
	vmm := vmmOf(dir)
	done := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sleep", "60"}}, guestclient.Stdio{}, nil)
		done <- err
	}()
	syscall.Kill(vmm.PID, syscall.SIGKILL)
	if err := <-done; !errors.Is(err, supervise.ErrSupervisorGone) || !strings.Contains(err.Error(), "crashed") {
		t.Errorf("Exec = %v; want ErrSupervisorGone with the crash", err)
	}
	nothingLeft(t, dir, vmm)
}

func TestSignalAndOwner(t *testing.T) {
	owner := exec.Command("sleep", "1000")
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	defer owner.Process.Kill()
	for name, do := range map[string]func(st supervise.State){
		supervise.ReasonStopped:   func(st supervise.State) { syscall.Kill(st.PID, syscall.SIGTERM) },
		supervise.ReasonOwnerGone: func(supervise.State) { owner.Process.Kill(); owner.Wait() },
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir := filepath.Join(base, "run-1")
			s := testSpec(base)
			if name == supervise.ReasonOwnerGone {
				s.Owner = ownerOf(t, strconv.Itoa(owner.Process.Pid))
			}
			c, err := supervise.Launch(ctxFor(t), launchOptions(dir, s))
			if err != nil {
				t.Fatal(err)
			}
			st, err := c.State(ctxFor(t))
			if err != nil {
				t.Fatal(err)
			}
			vmm := vmmOf(dir)
			do(st)
			last, err := c.Wait(ctxFor(t), supervise.Ended, nil)
			if err == nil && last.Exit.Reason != name {
				t.Errorf("Exit = %+v, want %s", last.Exit, name)
			} else if err != nil && !errors.Is(err, supervise.ErrSupervisorGone) {
				t.Errorf("Wait = %v", err)
			}
			eventually(t, "the end", func() bool { return len(processesWith(dir)) == 0 })
			gone(t, dir) // by itself
			nothingLeft(t, dir, vmm)
		})
	}
}

func TestOwnerGoneBefore(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	base := t.TempDir()
	s := testSpec(base)
	s.Owner = supervise.Owner{PID: cmd.Process.Pid, Start: 1}
	_, err := supervise.Launch(ctxFor(t), launchOptions(filepath.Join(base, "run-1"), s, "TEST_SUPERVISE_SILENT=1"))
	if fault.KindOf(err) != fault.Interrupted || !strings.Contains(err.Error(), "is gone") {
		t.Errorf("Launch for a dead owner = %v", err)
	}
	gone(t, filepath.Join(base, "run-1"))
}

// peerProcess asks for the state as another user: it ends with 0 when it is
// refused by closing.
func peerProcess() int {
	c, err := net.Dial("unix", os.Getenv("TEST_SUPERVISE_DIR"))
	if err != nil {
		fmt.Println("connecting:", err)
		return 1
	}
	guestwire.Send(c, map[string]string{"op": "kill"})
	if b, err := io.ReadAll(c); len(b) > 0 {
		fmt.Printf("answered with %d bytes, %v\n", len(b), err)
		return 1
	}
	return 0
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: becomes another user")
	}
	w := run(t, &supervisetest.Driver{})
	// The permissions alone would refuse; take them away.
	for p := w.dir; p != os.TempDir() && p != "/"; p = filepath.Dir(p) {
		if err := os.Chmod(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sock := filepath.Join(w.dir, supervise.SocketFile)
	if err := os.Chmod(sock, 0o666); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = []string{"TEST_SUPERVISE_MODE=peer", "TEST_SUPERVISE_DIR=" + sock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, os.ErrPermission) {
		t.Skipf("needs a test binary that others may run: %v", err)
	}
	if err != nil {
		t.Errorf("another user: %v: %s", err, out)
	}
	if st, err := w.client.State(ctxFor(t)); err != nil || st.Phase != supervise.Running {
		t.Errorf("State after it = %+v, %v", st.Phase, err)
	}
}

func TestExecOnAGuestThatBoots(t *testing.T) {
	w := begin(t, &supervisetest.Driver{Silent: true})
	w.dial()
	_, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil)
	if fault.KindOf(err) != fault.Conflict || fault.HintOf(err) == "" {
		t.Errorf("Exec = %v; want a conflict with a hint", err)
	}
}

func TestDialOfWhatIsBeingPrepared(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "run-1")
	l, err := supervise.Make(dir, testSpec(base))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := supervise.Dial(dir); fault.KindOf(err) != fault.Conflict || errors.Is(err, supervise.ErrSupervisorGone) {
		t.Errorf("Dial = %v; want a conflict", err)
	}
}

package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"virtkit/applets"
	"virtkit/core/cijob"
	"virtkit/core/execdrv"
	"virtkit/core/failpoint"
	"virtkit/core/fleet/node"
)

// standInName is the name under which this binary is standIn: what vk starts is
// its own program by its path, whatever its environment is.
const standInName = "stand-in-vk"

// newStandIn puts it into a directory.
func newStandIn(dir string) (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, standInName)
	if os.Link(exe, path) == nil {
		return path, nil
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		return "", err
	}
	return path, os.WriteFile(path, b, 0o700)
}

// standIn is vk, but that a job's guest is a process that waits on this host,
// and its scripts run beside it: all of a fleet but QEMU, in a fraction of the
// time. What a real executor does is kept: the guest outlives the calls and the
// driver, holds the job's claim, is ended by cleanup, and a stage whose guest
// dies is the system's failure.
func standIn(args []string) int {
	failpoint.Set(failHere)
	words := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.HasPrefix(a, "-") })
	var err error
	switch {
	case len(words) > 1 && words[0] == "gitlab":
		g := newGuest()
		switch words[1] {
		case "config":
			err = json.NewEncoder(os.Stdout).Encode(execdrv.ConfigAnswer{BuildsDir: filepath.Join(g.dir, "builds")})
		case "prepare":
			err = g.prepare()
		case "run":
			return g.run(words[2])
		case "cleanup":
			err = g.cleanup()
		}
	case len(words) > 0 && words[0] == "guest":
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		<-stop
	case len(words) > 2 && words[0] == "node" && words[1] == "join":
		err = joinHub(words[2])
	default:
		return applets.Main(context.Background(), applets.FromOS())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stand-in:", err)
		return execdrv.DefaultSystemFailure
	}
	return 0
}

// joinHub is vk node join without its look at the host's QEMU.
func joinHub(hub string) error {
	var token bytes.Buffer
	if _, err := token.ReadFrom(os.Stdin); err != nil {
		return err
	}
	j, err := node.Join(context.Background(), node.JoinOptions{StateDir: os.Getenv("VIRTKIT_STATE_DIR"), Hub: hub, Token: strings.TrimSpace(token.String()), Hostname: "stand-in", VK: "test"})
	if err == nil {
		fmt.Println(j.Node)
	}
	return err
}

// guest is one job's.
type guest struct{ dir string }

// guestsDir has a directory for each job that has a guest.
func guestsDir(state string) string { return filepath.Join(state, "stand-in") }

func newGuest() guest {
	return guest{filepath.Join(guestsDir(os.Getenv("VIRTKIT_STATE_DIR")), os.Getenv(execdrv.EnvPrefix+"CI_JOB_ID"))}
}

// pid is the guest's process; 0 = it is gone.
func (g guest) pid() int {
	b, err := os.ReadFile(filepath.Join(g.dir, "pid"))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(string(b))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n))
	if n == 0 || err != nil || bytes.Contains(stat, []byte(") Z ")) {
		return 0
	}
	return n
}

func (g guest) prepare() error {
	if err := g.cleanup(); err != nil { // of an attempt before
		return err
	}
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", "guest", g.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), "HOME="+g.dir)
	if n, err := strconv.Atoi(os.Getenv(cijob.EnvClaim)); err == nil {
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(n), "claim")}
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println("virtkit: the guest is a process of this host")
	time.Sleep(200 * time.Millisecond) // it boots
	return os.WriteFile(filepath.Join(g.dir, "pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

// cleanup ends all that runs for the job: the guest, which prepare may not have
// lived to name, and what scripts have started.
func (g guest) cleanup() error {
	for {
		all := processesOf("HOME=" + g.dir)
		if len(all) == 0 {
			return os.RemoveAll(g.dir)
		}
		for pid := range all {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// processesOf are the processes that have a variable in their environment, with
// their arguments.
func processesOf(variable string) map[int][]string {
	out := map[int][]string{}
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range files {
		env, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(append([]byte{0}, env...), []byte("\x00"+variable+"\x00")) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(f), "cmdline"))
		if pid != os.Getpid() {
			out[pid] = strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		}
	}
	return out
}

// run is a stage: the script by bash, its status where the driver looks for it.
func (g guest) run(script string) int {
	stop := make(chan os.Signal, 4)
	signal.Notify(stop, syscall.SIGTERM)
	in, err := os.Open(script)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return execdrv.DefaultSystemFailure
	}
	cmd := exec.Command("bash")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, os.Stdout, os.Stderr
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + g.dir, "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "VIRTKIT_STATE_DIR=" + os.Getenv("VIRTKIT_STATE_DIR")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return execdrv.DefaultSystemFailure
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for sig := syscall.SIGTERM; ; {
		select {
		case err := <-done:
			return g.ended(cmd.ProcessState.Sys().(syscall.WaitStatus), err)
		case <-stop:
			syscall.Kill(-cmd.Process.Pid, sig)
			sig = syscall.SIGKILL
		case <-tick.C:
			if g.pid() != 0 {
				continue
			}
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-done
			fmt.Fprintln(os.Stderr, "virtkit: the guest has ended")
			return execdrv.DefaultSystemFailure
		}
	}
}

func (g guest) ended(ws syscall.WaitStatus, err error) int {
	code := ws.ExitStatus()
	if ws.Signaled() {
		code = 128 + int(ws.Signal())
	}
	if err == nil && code == 0 {
		return 0
	}
	if g.pid() == 0 {
		return execdrv.DefaultSystemFailure
	}
	os.WriteFile(os.Getenv(execdrv.EnvExitCodeFile), []byte(strconv.Itoa(code)), 0o600)
	return execdrv.DefaultBuildFailure
}

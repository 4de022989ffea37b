package leash_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/leash"
)

// tree is a tool as mmdebstrap is: it holds SIGTERM back until its children
// are done, and starts some. It prints the numbers of all of them.
const tree = `trap 'exit 9' TERM
sh -c 'echo $$; sleep 1000 & echo $!; wait' &
echo $$
sleep 1000
`

func TestMain(m *testing.M) {
	if os.Getenv("LEASH_TEST_PARENT") != "" {
		cmd := exec.Command("sh", "-c", tree)
		cmd.Stdout = os.Stdout
		leash.Run(cmd)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// pids reads the three numbers that tree prints.
func pids(t *testing.T, s *bufio.Scanner) (out []int) {
	t.Helper()
	for len(out) < 3 && s.Scan() {
		n, err := strconv.Atoi(strings.TrimSpace(s.Text()))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	if len(out) < 3 {
		t.Fatalf("the tool said %v", out)
	}
	return out
}

// gone waits for the end of processes; a zombie has ended.
func gone(t *testing.T, pids []int) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for _, p := range pids {
		for {
			b, err := os.ReadFile("/proc/" + strconv.Itoa(p) + "/stat")
			if err != nil || strings.Contains(string(b), ") Z ") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("process %d is left: %s", p, b)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// No process of a tool outlives its parent, whichever signal ends that.
func TestParentIsKilled(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			// Under nohup it would begin with SIGHUP ignored, which is inherited.
			cmd := exec.Command("env", "--default-signal=HUP", exe)
			cmd.Env = append(os.Environ(), "LEASH_TEST_PARENT=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			all := pids(t, bufio.NewScanner(out))
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			gone(t, all)
			cmd.Wait()
		})
	}
}

func TestContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.CommandContext(ctx, "sh", "-c", tree)
	cmd.Stdout = w
	done := make(chan error, 1)
	go func() { done <- leash.Run(cmd) }()
	all := pids(t, bufio.NewScanner(r))
	cancel()
	if err := <-done; err == nil {
		t.Error("no error of a command that was ended")
	}
	w.Close()
	gone(t, all)
}

func TestResults(t *testing.T) {
	cmd := exec.Command("sh", "-c", "cat; exit 3")
	var out strings.Builder
	cmd.Stdin, cmd.Stdout = strings.NewReader("in"), &out
	err := leash.Run(cmd)
	if e, ok := err.(*exec.ExitError); !ok || e.ExitCode() != 3 || out.String() != "in" {
		t.Errorf("%v %q", err, &out)
	}
	if err := leash.Run(exec.Command("sh", "-c", "exit 0")); err != nil {
		t.Error(err)
	}
	if err := leash.Run(exec.Command("/nonexistent/tool")); err == nil {
		t.Error("no error of a command that is not there")
	}
}

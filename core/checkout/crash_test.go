package checkout_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"virtkit/core/checkout"
)

// crash is what a child of TestKilledAtEachStep does.
type crash struct {
	Root, Mirrors, Step string
	Job                 checkout.Job
}

const crashEnv = "VK_TEST_CRASH"

func TestMain(m *testing.M) {
	if s := os.Getenv(crashEnv); s != "" {
		var c crash
		if err := json.Unmarshal([]byte(s), &c); err != nil {
			os.Exit(3)
		}
		o := checkout.Options{Root: c.Root, Mirrors: c.Mirrors, Hook: func(step string) {
			if step == c.Step {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				time.Sleep(time.Minute)
			}
		}}
		st, err := checkout.Open(o)
		if err != nil {
			os.Exit(4)
		}
		_, err = st.Take(context.Background(), c.Job, func(string) {})
		if err != nil {
			os.Stderr.WriteString(err.Error())
		}
		os.Exit(5) // it got past the step
	}
	os.Exit(m.Run())
}

// Whatever step a process is killed at, the next job gets a whole tree, and a
// later sweep leaves nothing behind.
func TestKilledAtEachStep(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := d.open(t)
	sha := srv.commit(map[string]string{"f": "first", "keep": "k"})
	for _, first := range []bool{true, false} {
		steps := []string{"mirror-fetch", "mirror-gc", "settle", "fetch", "checkout", "record"}
		if first {
			steps = []string{"make", "name", "mirror-init", "init", "checkout"}
		}
		for _, step := range steps {
			if first { // from nothing each time
				os.RemoveAll(d.root)
				os.RemoveAll(d.mirrors)
				d.open(t)
			} else {
				sha = srv.commit(map[string]string{"f": step})
			}
			b, err := json.Marshal(crash{d.root, d.mirrors, step, srv.job(sha)})
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), crashEnv+"="+string(b))
			out, err := cmd.CombinedOutput()
			if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
				t.Fatalf("%s: the child was not killed there: %v %s", step, err, out)
			}
			tree := done(t, s, srv.job(sha))
			want := "first"
			if !first {
				want = step
				if !tree.Reused {
					t.Errorf("%s: the tree was cloned anew: %s", step, tree.Mended)
				}
			}
			isFile(t, filepath.Join(tree.Path, "f"), want)
			isFile(t, filepath.Join(tree.Path, "keep"), "k")
			if got := srv.git(tree.Path, "status", "--porcelain"); got != "" {
				t.Errorf("%s: status %q", step, got)
			}
		}
	}
	later := d.open(t, func(o *checkout.Options) { o.Now = func() time.Time { return time.Now().Add(48 * time.Hour) } })
	if _, err := later.Sweep(t.Context(), checkout.SweepOptions{Idle: -1}); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{d.root, d.mirrors} {
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("the sweep left %v in %s", left, dir)
		}
	}
}

package checkout_test

import (
	"context"
	"encoding/json"
	"fmt"
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

// killedAt has a child take a tree, and die at a step of that.
func killedAt(t *testing.T, c crash) {
	t.Helper()
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), crashEnv+"="+string(b))
	out, err := cmd.CombinedOutput()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("%s: the child was not killed there: %v %s", c.Step, err, out)
	}
}

// Killed among its submodules, a tree is whole for the next job too, and for
// one that wants none.
func TestKilledAmongSubmodules(t *testing.T) {
	w, d := newModules(t), newDirs(t)
	s := d.open(t)
	for i, step := range []string{"submodules", "submodule", "submodule-made", "submodule-checkout", "record"} {
		for _, first := range []bool{true, false} {
			text := fmt.Sprintf("%d %v\n", i, first)
			if first {
				os.RemoveAll(d.root)
				os.RemoveAll(d.mirrors)
				d.open(t)
			} else {
				w.top.commit(map[string]string{"dir/sub": "@" + w.sub.commit(map[string]string{"sub.txt": text})})
				if step == "submodule-made" { // nothing is cloned in a known one
					continue
				}
			}
			want := w.top.git("", "--git-dir="+w.sub.bare, "show", "main:sub.txt") + "\n"
			killedAt(t, crash{d.root, d.mirrors, step, w.job(true)})
			if i%2 == 0 {
				j := w.job(true)
				j.Submodules = nil
				tree := done(t, s, j)
				isGone(t, filepath.Join(tree.Path, "dir/sub/sub.txt"))
				if got := w.top.git(tree.Path, "status", "--porcelain"); got != "" {
					t.Errorf("%s: status without submodules %q", step, got)
				}
			}
			tree := done(t, s, w.job(true))
			isFile(t, filepath.Join(tree.Path, "dir/sub/sub.txt"), want)
			isFile(t, filepath.Join(tree.Path, "dir/sub/nested/nested.txt"), "nested\n")
			if got := w.top.git(tree.Path, "status", "--porcelain"); got != "" {
				t.Errorf("%s: status %q", step, got)
			}
		}
	}
}

// Whatever step a process is killed at, the next job gets a whole tree, and a
// later sweep leaves nothing behind.
func TestKilledAtEachStep(t *testing.T) {
	srv, d := newServer(t), newDirs(t)
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
			killedAt(t, crash{d.root, d.mirrors, step, srv.job(sha)})
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

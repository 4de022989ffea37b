package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/core/execdrv"
	"virtkit/e2e/host"
)

// plainUser tells a test that it runs as one.
const plainUser = "VK_E2E_PLAIN"

// asPlainUser runs the rest of the test in a process of a user that was just
// added to this host, in which it returns true. The user has a home, copies of
// this host's kernels and images, and no rights. The caller returns on false.
func asPlainUser(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		return true
	}
	h := guests(t)
	if _, err := h.Run(t.Context(), "pull", "--policy", "missing", "local/default"); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("useradd"); err != nil {
		t.Skip("needs useradd: apt-get install passwd")
	}
	home, err := os.MkdirTemp("", "vk-plain-")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("vk-e2e-%d", os.Getpid())
	if err := command("useradd", "--system", "--no-create-home", "--home-dir", home, "--shell", "/bin/sh", name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := command("userdel", name); err != nil {
			t.Error(err)
		}
		os.RemoveAll(home)
	})
	u, err := user.Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	vk := filepath.Join(home, "vk")
	copies := map[string]string{h.VK: vk}
	for _, kind := range []string{"images", "kernels"} {
		ents, err := os.ReadDir(filepath.Join(h.Base, kind))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ents {
			if !strings.HasPrefix(e.Name(), ".") { // locks, and what is being made
				copies[filepath.Join(h.Base, kind, e.Name())] = filepath.Join(home, "base", kind, e.Name())
			}
		}
	}
	for from, to := range copies {
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := command("cp", "-RL", "--preserve=mode", "--reflink=auto", from, to); err != nil {
			t.Fatal(err)
		}
	}
	if err := filepath.WalkDir(home, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, gid))
	}); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // Pdeathsig is of the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=10m")
	cmd.Dir = home
	cmd.Env = []string{plainUser + "=1", "HOME=" + home, "USER=" + name, "TMPDIR=" + home, "PATH=/usr/bin:/bin",
		"VIRTKIT_STATE_DIR=" + filepath.Join(home, "base"), "VK_BIN=" + vk, "VIRTKIT_ACCEL=" + os.Getenv("VIRTKIT_ACCEL")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("as user %s: %v\n%s", name, err, out)
	}
	return false
}

// TestPlainUser has a user without any rights run a guest and a GitLab job.
func TestPlainUser(t *testing.T) {
	if !asPlainUser(t) {
		return
	}
	h := guests(t)
	if out, err := h.Run(t.Context(), "run", "local/default", "true"); err != nil || out != "" {
		t.Fatalf("vk run local/default true: %q, %v", out, err)
	}
	// Root in the guest is nobody here.
	out, err := h.Run(t.Context(), "run", "local/default", "bash", "-c", "id -u; touch /root/f && echo written; exit 7")
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 7 || out != "0\nwritten\n" {
		t.Errorf("a failing command: %q, %v; want 0, written and exit status 7", out, err)
	}

	job := plainJob(t, h.Driver(), map[string]string{"MICROVM_IMAGE": "local/default"}, nil)
	prepared(t, job)
	if res := stage(t, job, execdrv.StageBuild, "mkdir -p /builds/group/e2e && cd /builds/group/e2e && git init -q . && echo made > f && cat f\nexit 5\n"); res.Exit != 1 || res.FileCode != "5" || string(res.Stdout) != "made\n" {
		t.Errorf("build_script: %d, code %q\n%s%s", res.Exit, res.FileCode, res.Stdout, res.Stderr)
	}
	if res, err := job.Cleanup(t.Context()); err != nil || res.Exit != 0 {
		t.Errorf("cleanup: %+v, %v", res, err)
	}
	// What is there is this user's alone.
	for _, dir := range []string{h.State, filepath.Join(h.State, "jobs")} {
		if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s may be read by others: %v, %v", dir, fi.Mode(), err)
		}
	}

	// A mode that needs rights says so before anything starts.
	tap, err := host.New(root, filepath.Join(world.dir, "tap"), "[net]\nmode = \"tap\"\n")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tap.Run(context.Background(), "run", "local/default", "true"); err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") || !strings.Contains(err.Error(), "hint:") {
		t.Errorf("[net] mode tap: %v", err)
	}
	if dirs := tap.JobDirs(); len(dirs) > 0 {
		t.Errorf("[net] mode tap made %q", dirs)
	}
	nothingLeft(t, h)
}

package nodehost_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fleet/nodehost"
)

// The test binary is also the gate of a runner, and a node that can be killed.
func TestMain(m *testing.M) {
	switch os.Getenv("NODEHOST_CHILD") {
	case "":
		os.Exit(m.Run())
	case "gate":
		os.Unsetenv("NODEHOST_CHILD")
		fmt.Fprintln(os.Stderr, nodehost.Gate(os.Args[1:], os.Environ()))
	case "node":
		killable()
	}
	os.Exit(1)
}

// killable runs a managed runner until it is killed. Its signals are as bad as a
// service manager could leave them.
func killable() {
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGTTOU, unix.SIGUSR1)
	runtime.LockOSThread()
	var set unix.Sigset_t
	set.Val[0] = 1<<(unix.SIGQUIT-1) | 1<<(unix.SIGTERM-1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil); err != nil {
		panic(err)
	}
	m, err := nodehost.NewManaged(options(os.Getenv("NODEHOST_DIR"), os.Getenv("NODEHOST_EXE")))
	if err != nil {
		panic(err)
	}
	if os.Getenv("NODEHOST_WANT") != "" {
		m.Want(true)
	}
	fmt.Println(m.Run(context.Background()))
}

func options(dir, exe string) nodehost.ManagedOptions {
	out, err := os.OpenFile(filepath.Join(dir, "out"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		panic(err)
	}
	return nodehost.ManagedOptions{
		StateDir: filepath.Join(dir, "state"), Gate: []string{exe},
		Program: filepath.Join(dir, "gitlab-runner"), Config: filepath.Join(dir, "config.toml"),
		Env:    append(os.Environ(), "NODEHOST_CHILD=gate", "FAKE_DIR="+dir),
		Output: out,
	}
}

// The runner: it tells its number and its signals, and what it is told; on
// SIGQUIT it takes no more jobs and ends once the file "job" is gone, as
// gitlab-runner does; on SIGTERM it abandons it. A file "die" ends it at once.
const fakeRunner = `#!/bin/sh
cd "$FAKE_DIR" || exit 3
echo "start $$ $*" >> log
grep -E 'SigIgn|SigBlk' /proc/self/status >> log
[ -e die ] && exit 4
trap 'echo quit $$ >> log; q=1' QUIT
trap 'echo term $$ >> log; exit 5' TERM
echo "ready $$" >> log
while :; do
	[ -n "$q" ] && [ ! -e job ] && { echo "end $$" >> log; exit 0; }
	sleep 0.02
done
`

// fake is a directory with a fake runner.
func fake(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "state/node"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "gitlab-runner"), fakeRunner, 0o755)
	write(t, filepath.Join(dir, "config.toml"), "concurrent = 4\n", 0o600)
	return dir
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition, a minute at most.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited a minute for %s", what)
		}
	}
}

// said are the lines of the runners' log that begin with a word.
func said(dir, word string) (out []string) {
	b, _ := os.ReadFile(filepath.Join(dir, "log"))
	for l := range strings.SplitSeq(string(b), "\n") {
		if strings.HasPrefix(l, word+" ") {
			out = append(out, l)
		}
	}
	return out
}

package supervise_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// The test binary is also the supervisor's and the launcher's process:
// TEST_SUPERVISE_MODE says so, TEST_SUPERVISE_* are its knobs. It is set in
// the child's environment through LaunchOptions.Env.
func TestMain(m *testing.M) {
	switch os.Getenv("TEST_SUPERVISE_MODE") {
	case "supervise":
		os.Exit(supervisorProcess(os.Args[len(os.Args)-1]))
	case "launch":
		os.Exit(launcherProcess())
	case "listen":
		os.Exit(listenProcess())
	case "peer":
		os.Exit(peerProcess())
	}
	os.Exit(m.Run())
}

func fakeDeps(d *supervisetest.Driver, n *supervisetest.Network) supervise.Deps {
	return supervise.Deps{
		Driver: d,
		Kernel: func(context.Context, supervise.Spec) (machine.Kernel, error) {
			return machine.Kernel{Version: "6.12-fake"}, nil
		},
		Disk: func(path string, size int64) error {
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return err
			}
			defer f.Close()
			return f.Truncate(size)
		},
		NewNetwork: func(context.Context, string, supervise.Spec) (supervise.Network, error) { return n, nil },
		Times: supervise.Times{
			Ping: 20 * time.Millisecond, Contact: 100 * time.Millisecond,
			Grace: 200 * time.Millisecond, Power: 500 * time.Millisecond, Usage: 500 * time.Millisecond,
		},
	}
}

// pauseAt stops the process at a step until it is killed, after saying so in
// a file.
func pauseAt(step, file string) func(string) {
	return func(s string) {
		if s == step {
			os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o600)
			select {}
		}
	}
}

func supervisorProcess(dir string) int {
	d := &supervisetest.Driver{Process: true}
	d.Silent = os.Getenv("TEST_SUPERVISE_SILENT") != ""
	deps := fakeDeps(d, &supervisetest.Network{})
	if os.Getenv("TEST_SUPERVISE_STILLBORN") != "" {
		d.Stillborn, deps.Times.Life = 1, soonLife
	}
	deps.Log = logx.New(os.Stderr, slog.LevelDebug, false)
	deps.Argv, deps.Env = relaunch()
	if os.Getenv("TEST_SUPERVISE_CRASH") != "" {
		deps.Hook = func(s string) {
			if s == os.Getenv("TEST_SUPERVISE_CRASH") {
				panic("crash as told at " + s)
			}
		}
	}
	if p := os.Getenv("TEST_SUPERVISE_PAUSE"); p != "" {
		step, file, _ := strings.Cut(p, "=")
		deps.Hook = pauseAt(step, file)
	}
	if err := supervise.Run(context.Background(), dir, deps); err != nil {
		fmt.Fprintln(os.Stderr, "supervise:", err)
		return 1
	}
	return 0
}

// relaunch is how a supervisor starts those of its services; they pause where
// TEST_SUPERVISE_SERVICE_PAUSE says, and their guests' first boots give
// no sign of life with TEST_SUPERVISE_STILLBORN.
func relaunch() (argv, env []string) {
	env = []string{"TEST_SUPERVISE_MODE=supervise"}
	if os.Getenv("TEST_SUPERVISE_STILLBORN") != "" {
		env = append(env, "TEST_SUPERVISE_STILLBORN=1")
	}
	if p := os.Getenv("TEST_SUPERVISE_SERVICE_PAUSE"); p != "" {
		env = append(env, "TEST_SUPERVISE_PAUSE="+p)
	}
	return []string{"/proc/self/exe", "-test.run=^$"}, env
}

func launchOptions(dir string, s supervise.Spec, env ...string) supervise.LaunchOptions {
	return supervise.LaunchOptions{
		Dir: dir, Spec: s,
		Argv: []string{"/proc/self/exe", "-test.run=^$"},
		Env:  append([]string{"TEST_SUPERVISE_MODE=supervise"}, env...),
	}
}

// launcherProcess launches a supervisor in TEST_SUPERVISE_DIR.
func launcherProcess() int {
	dir := os.Getenv("TEST_SUPERVISE_DIR")
	o := launchOptions(dir, testSpec(filepath.Dir(dir)), strings.Split(os.Getenv("TEST_SUPERVISE_CHILD_ENV"), ",")...)
	if p := os.Getenv("TEST_SUPERVISE_LAUNCH_PAUSE"); p != "" {
		step, file, _ := strings.Cut(p, "=")
		o.Hook = pauseAt(step, file)
	}
	if _, err := supervise.Launch(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, "launch:", err)
		return 1
	}
	return 0
}

// testSpec is a small guest whose image is a file in base.
func testSpec(base string) supervise.Spec {
	img := filepath.Join(base, "image.ext4")
	if _, err := os.Stat(img); errors.Is(err, os.ErrNotExist) {
		if err := os.WriteFile(img, []byte("root"), 0o600); err != nil {
			panic(err)
		}
	}
	return supervise.Spec{
		ID: "run-1", Name: "g1", Kind: "run", Hostname: "g1", CPUs: 1, MemMiB: 64, Created: time.Now(),
		Image:     supervise.Image{Ref: "local/test", Digest: "sha256:0", Path: img, FSType: "ext4", Lock: filepath.Join(base, "image.lock")},
		Upper:     1 << 20,
		Net:       supervise.NetSpec{Mode: "switch"},
		BootLimit: 2 * time.Minute,
	}
}

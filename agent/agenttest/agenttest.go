// Package agenttest runs a real agent on the host, without a guest: a process
// of its own (the test binary again) that answers on a socket.
package agenttest

import (
	"context"
	"net"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/agent"
	"virtkit/core/guestclient"
)

// envServe makes a test binary an agent.
const envServe = "VK_AGENTTEST_SERVE"

// Main is for TestMain: it makes this process an agent when Start has started
// it as one, and returns otherwise.
func Main() {
	if os.Getenv(envServe) != "" {
		os.Unsetenv(envServe)
		os.Exit(agent.Main(context.Background(), []string{"vk-agent", "serve", "--stdio"}, os.Stdin, os.Stdin, os.Stderr))
	}
}

// Process is an agent that Start has started.
type Process struct {
	Client *guestclient.Client
	Conn   net.Conn // what Client speaks over
	Cmd    *exec.Cmd
}

// Start starts an agent that ends with the test. The test's package must call
// Main from its TestMain.
func Start(t testing.TB) *Process {
	t.Helper()
	conn, theirs := Socketpair(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), envServe+"=1")
	cmd.Stdin, cmd.Stderr = theirs, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	p := &Process{Client: guestclient.New(conn), Conn: conn, Cmd: cmd}
	t.Cleanup(func() {
		p.Client.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	return p
}

// Socketpair is a connected pair: ours, and a file for a child process.
func Socketpair(t testing.TB) (net.Conn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "ours")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	return conn, os.NewFile(uintptr(fds[1]), "theirs")
}

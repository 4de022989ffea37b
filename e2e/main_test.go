// Package e2e tests everything together: the built vk, real guests, a driver
// that behaves as gitlab-runner does, and a Git server. Tests skip, saying
// what is missing, on a host that cannot run guests.
package e2e_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"virtkit/e2e/gitsrv"
	"virtkit/e2e/host"
	"virtkit/e2e/testimage"
)

const root = ".."

// gitPort is where the recorded jobs fetch from, on their own 127.0.0.1.
const gitPort = 8929

const config = `
[net]
host_loopback = [8929]

[vmm]
disk = "2G"
# A guest that comes up late on a busy host is no failure of what is tried.
boot_timeout_secs = 360

[executor]
services_timeout_secs = 5

[executor.vm]
hostname = "vm"
cpus = 1
mem = "512M"
max_cpus = 2
max_mem = "1G"

[executor.schedule]
disk_default = "256M"
`

var world struct {
	dir  string
	once sync.Once
	host *host.Host
	err  error

	git     sync.Once
	gitErr  error
	server  *gitsrv.Server
	imgOnce sync.Map // name → func() error
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "vk-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	world.dir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// guests returns the host for tests, or skips.
func guests(t *testing.T) *host.Host {
	t.Helper()
	if testing.Short() {
		t.Skip("needs guests, which -short leaves out")
	}
	world.once.Do(func() { world.host, world.err = host.New(root, world.dir, config) })
	if host.IsMissing(world.err) {
		t.Skip(world.err)
	}
	if world.err != nil {
		t.Fatal(world.err)
	}
	return world.host
}

// defaultImage makes local/default ready, or skips.
func defaultImage(t *testing.T, h *host.Host) {
	t.Helper()
	once(t, "default", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
		defer cancel()
		_, err := h.Run(ctx, "pull", "local/default")
		return err
	})
}

// once runs f one time for all tests; its error fails each of them.
func once(t *testing.T, key string, f func() error) {
	t.Helper()
	v, _ := world.imgOnce.LoadOrStore(key, sync.OnceValue(f))
	if err := v.(func() error)(); err != nil {
		t.Fatal(err)
	}
}

// image makes local/<name> from a test image.
func image(t *testing.T, h *host.Host, name string, s testimage.Spec) string {
	t.Helper()
	once(t, h.State+" image "+name, func() error {
		path := filepath.Join(t.TempDir(), name+".tar")
		if err := testimage.Write(path, s); err != nil {
			return err
		}
		return h.Import(context.Background(), path, name)
	})
	return "local/" + name
}

// busybox is an image with sh alone and no git.
func busybox(t *testing.T, h *host.Host) string {
	return image(t, h, "busybox", testimage.Spec{})
}

// busyboxGit is an image whose only shell is busybox, with git, run by a user
// of its own.
func busyboxGit(t *testing.T, h *host.Host) string {
	return image(t, h, "busybox-git", testimage.Spec{Git: true, Config: v1.Config{User: "build"}})
}

// gitServer serves the recorded repositories where the recorded jobs look.
func gitServer(t *testing.T) *gitsrv.Server {
	t.Helper()
	world.git.Do(func() {
		dir := filepath.Join(world.dir, "git")
		if world.server, world.gitErr = gitsrv.New(dir); world.gitErr != nil {
			return
		}
		if world.gitErr = gitsrv.Recorded(dir); world.gitErr != nil {
			return
		}
		world.server.Allow("*")
		var l net.Listener
		if l, world.gitErr = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", gitPort)); world.gitErr == nil {
			go world.server.Serve(context.Background(), l)
		}
	})
	if world.gitErr != nil {
		t.Fatalf("git server: %v", world.gitErr)
	}
	return world.server
}

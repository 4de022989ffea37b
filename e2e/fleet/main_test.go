// Package fleet_test runs a hub and nodes as processes of their own (this test
// binary again, under a word) on loopback, and interrupts them: kill -9,
// partitions, restores of an older backup, a copied state directory.
//
// The hub is vk-hub serve itself. A node is core/fleet/node on a host that has
// no guests and no runner, so that what is tried is what hub and node
// remember, not what they run.
package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"virtkit/applets"
	"virtkit/applets/hubcmd"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
)

// role is the word under which this binary is another process: "hub FILE" or
// "node DIR". By the name of standInName it is vk with this host for a guest.
const role = "VK_E2E_FLEET_ROLE"

func TestMain(m *testing.M) {
	if exe, err := os.Executable(); err != nil || filepath.Base(exe) == standInName {
		os.Exit(standIn(os.Args[1:]))
	}
	word, arg, _ := strings.Cut(os.Getenv(role), " ")
	switch word {
	case "":
		// vk that calls itself without its word (an environment of its own) would run
		// all tests, and each of them itself again, without end.
		if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
			fmt.Fprintf(os.Stderr, "%s %q without its word in $%s\n", os.Args[0], os.Args[1:], role)
			os.Exit(97)
		}
		os.Exit(m.Run())
	case "hub":
		env := applets.FromOS()
		env.Args = []string{"vk-hub", "--config", arg, "serve"}
		os.Exit(hubcmd.Main(context.Background(), env))
	case "node":
		if err := runNode(arg); err != nil {
			fmt.Fprintln(os.Stderr, "node:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// bare is a host without guests, and its runner: none.
type bare struct {
	mu     sync.Mutex
	take   bool
	change chan struct{}
	// file, while it exists, is a job that a drain waits for.
	job string
}

func (b *bare) Inventory(context.Context) (*wire.Inventory, error) {
	return &wire.Inventory{Hostname: filepath.Base(filepath.Dir(b.job)), CPUs: 1, VK: "test", Features: []string{wire.FeatureEgressFallback}}, nil
}
func (b *bare) Heartbeat(context.Context) (*wire.Heartbeat, error) { return &wire.Heartbeat{}, nil }
func (b *bare) Workloads(context.Context) ([]wire.Workload, int, error) {
	return nil, 0, nil
}
func (b *bare) Drain(context.Context) (wire.Drain, error) {
	d := wire.Drain{RunnerExited: true, AdmissionIdle: true}
	if _, err := os.Stat(b.job); err == nil {
		d.AdmissionIdle, d.Jobs = false, 1
	}
	return d, nil
}
func (b *bare) Concurrency(_ context.Context, ceiling int, _ bool) wire.Concurrency {
	return wire.Concurrency{HubCeiling: ceiling, Effective: ceiling}
}
func (b *bare) Mode() wire.RunnerMode { return wire.RunnerNone }
func (b *bare) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
func (b *bare) SetAcquire(take bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.take != take {
		b.take = take
		select {
		case b.change <- struct{}{}:
		default:
		}
	}
}
func (b *bare) Status() node.RunnerStatus {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.take {
		return node.RunnerStatus{Acquisition: wire.Taking}
	}
	return node.RunnerStatus{Acquisition: wire.Stopped}
}
func (b *bare) Changed() <-chan struct{} { return b.change }
func (b *bare) Abandon()                 {}

func runNode(dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	b := &bare{change: make(chan struct{}, 1), job: filepath.Join(dir, "job")}
	n, err := node.Open(ctx, node.Config{StateDir: dir, Host: b, Runner: b, VK: "test", Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Run(ctx)
}

// process is one that is started again after it was killed.
type process struct {
	t    *testing.T
	role string
	log  string
	// command makes what is run instead of this binary in its role.
	command func() *exec.Cmd

	one sync.Mutex // a restart at a time
	mu  sync.Mutex
	cmd *exec.Cmd
	end chan struct{}
}

// restart kills and starts.
func (p *process) restart() {
	p.one.Lock()
	defer p.one.Unlock()
	p.kill(syscall.SIGKILL)
	p.start()
}

func (p *process) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := os.OpenFile(p.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Error(err)
		return
	}
	defer f.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), role+"="+p.role)
	if p.command != nil {
		cmd = p.command()
	}
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		p.t.Error(err)
		return
	}
	end := make(chan struct{})
	go func() { _ = cmd.Wait(); close(end) }()
	p.cmd, p.end = cmd, end
}

// kill sends a signal and waits for the end.
func (p *process) kill(sig syscall.Signal) {
	p.mu.Lock()
	cmd, end := p.cmd, p.end
	p.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Signal(sig)
	select {
	case <-end:
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		<-end
		p.t.Errorf("%s did not end by %v", p.role, sig)
	}
}

// fleet is a hub and its nodes.
type fleet struct {
	t     *testing.T
	dir   string
	conf  string
	addr  string
	hub   *process
	admin *hubadmin.Client
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, dir: t.TempDir(), addr: l.Addr().String()}
	l.Close()
	f.conf = filepath.Join(f.dir, "hub.toml")
	data := filepath.Join(f.dir, "hub")
	text := fmt.Sprintf("addr = %q\ndata_dir = %q\nheartbeat_secs = 1\n", f.addr, data)
	if err := os.WriteFile(f.conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	f.hub = &process{t: t, role: "hub " + f.conf, log: filepath.Join(f.dir, "hub.log")}
	f.admin = hubadmin.Dial(filepath.Join(data, "admin.sock"))
	f.hub.start()
	t.Cleanup(func() {
		f.hub.kill(syscall.SIGTERM)
		if t.Failed() {
			f.show(f.hub.log)
		}
	})
	f.up()
	return f
}

// show logs the end of a file.
func (f *fleet) show(file string) {
	b, _ := os.ReadFile(file)
	f.t.Logf("%s:\n%s", filepath.Base(file), b[max(0, len(b)-4000):])
}

// eventually waits up to two minutes.
func (f *fleet) eventually(what string, ok func() bool) {
	f.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.t.Fatalf("it did not come to pass: %s", what)
		}
	}
}

func (f *fleet) up() {
	f.t.Helper()
	f.eventually("the hub answers", func() bool { _, err := f.admin.Status(f.t.Context()); return err == nil })
}

// cli runs a command of vk-hub and returns what it prints.
func (f *fleet) cli(args ...string) (string, int) {
	var out, stderr bytes.Buffer
	env := applets.FromOS()
	env.Args = append([]string{"vk-hub", "--config", f.conf}, args...)
	env.Stdout, env.Stderr = &out, &stderr
	code := hubcmd.Main(f.t.Context(), env)
	return out.String() + stderr.String(), code
}

func (f *fleet) must(args ...string) string {
	f.t.Helper()
	out, code := f.cli(args...)
	if code != 0 {
		f.t.Fatalf("vk-hub %q: status %d\n%s", args, code, out)
	}
	return out
}

// join enrolls a node over via (an address of the hub or of a proxy) and
// starts it.
func (f *fleet) join(name, via string) (*process, string) {
	f.t.Helper()
	dir := filepath.Join(f.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		f.t.Fatal(err)
	}
	token := strings.TrimSpace(f.must("token", "create"))
	j, err := node.Join(f.t.Context(), node.JoinOptions{StateDir: dir, Hub: "http://" + via, Token: token, Hostname: name, VK: "test"})
	if err != nil {
		f.t.Fatal(err)
	}
	return f.run(name, dir), j.Node
}

func (f *fleet) run(name, dir string) *process {
	p := &process{t: f.t, role: "node " + dir, log: filepath.Join(f.dir, name+".log")}
	p.start()
	f.t.Cleanup(func() {
		p.kill(syscall.SIGKILL)
		if f.t.Failed() {
			f.show(p.log)
		}
	})
	return p
}

func (f *fleet) node(id string) *hubadmin.Node {
	n, err := f.admin.Node(f.t.Context(), id)
	if err != nil {
		return &hubadmin.Node{}
	}
	return n
}

func (f *fleet) state(id string) wire.NodeState {
	if r := f.node(id).Reported; r != nil {
		return r.Node
	}
	return ""
}

// persisted is what a node has on its disk.
func persisted(dir string) (st node.State, err error) {
	b, err := os.ReadFile(filepath.Join(dir, "node/state.json"))
	if err != nil {
		return st, err
	}
	return st, json.Unmarshal(b, &st)
}

// proxy passes connections on until it is cut, each piece after delay.
type proxy struct {
	l     net.Listener
	to    string
	delay atomic.Int64 // nanoseconds

	mu   sync.Mutex
	cut  bool
	open map[net.Conn]bool
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, to: to, open: map[net.Conn]bool{}}
	t.Cleanup(func() { l.Close(); p.set(true) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.pass(c)
		}
	}()
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	p.open[c] = true
	return true
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	far, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer far.Close()
	if !p.keep(c) || !p.keep(far) {
		return
	}
	done := make(chan struct{}, 2)
	for _, d := range [][2]net.Conn{{c, far}, {far, c}} {
		go func() { _ = p.copy(d[0], d[1]); done <- struct{}{} }()
	}
	<-done
}

func (p *proxy) copy(to, from net.Conn) error {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		time.Sleep(time.Duration(p.delay.Load()))
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return errors.Join(err, werr)
		}
	}
}

// set cuts the connections and refuses new ones, or lets them pass again.
func (p *proxy) set(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	for c := range p.open {
		c.Close()
		delete(p.open, c)
	}
}

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
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
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
		env.Now = shifted(filepath.Dir(arg))
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
	n, err := node.Open(ctx, node.Config{StateDir: dir, Host: b, Runner: b, VK: "test", Now: shifted(dir), Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Run(ctx)
}

// clockFile in a directory is how far the wall clock of what runs there is off;
// it may change at any time.
const clockFile = "clock"

// shifted is that clock.
func shifted(dir string) func() time.Time {
	return func() time.Time {
		b, err := os.ReadFile(filepath.Join(dir, clockFile))
		if err != nil {
			return time.Now()
		}
		d, err := time.ParseDuration(string(b))
		if err != nil {
			panic(err)
		}
		return time.Now().Add(d).Round(0) // a wall clock: no monotonic reading
	}
}

// process is one that is started again after it was killed.
type process struct {
	t    *testing.T
	role string
	log  string
	// ns is the file of the network namespace that it runs in; "" = this one.
	ns string
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
	if p.ns != "" {
		exe, env := cmd.Path, cmd.Env
		if exe == "/proc/self/exe" {
			if exe, err = os.Executable(); err != nil {
				p.t.Error(err)
				return
			}
		}
		cmd = exec.Command("nsenter", append([]string{"--net=" + p.ns, exe}, cmd.Args[1:]...)...)
		cmd.Env = env
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
	ca    []byte // of the hub's certificate; nil = it has none
	hub   *process
	admin *hubadmin.Client
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	return newFleetAt(t, "127.0.0.1", false)
}

// newFleetAt has its hub listen at an address, with TLS or without.
func newFleetAt(t *testing.T, ip string, secure bool) *fleet {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, dir: t.TempDir(), addr: l.Addr().String()}
	l.Close()
	f.conf = filepath.Join(f.dir, "hub.toml")
	data := filepath.Join(f.dir, "hub")
	text := fmt.Sprintf("addr = %q\ndata_dir = %q\nheartbeat_secs = 1\n", f.addr, data)
	if secure {
		cert, key := filepath.Join(f.dir, "cert.pem"), filepath.Join(f.dir, "key.pem")
		f.ca = certify(t, ip, cert, key)
		text += fmt.Sprintf("tls_cert = %q\ntls_key = %q\n", cert, key)
	}
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
	dir, id := f.enroll(name, via)
	return f.run(name, dir), id
}

// url is a hub's or a proxy's.
func (f *fleet) url(via string) string {
	if f.ca != nil {
		return "https://" + via
	}
	return "http://" + via
}

func (f *fleet) enroll(name, via string) (dir, id string) {
	f.t.Helper()
	dir = filepath.Join(f.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		f.t.Fatal(err)
	}
	token := strings.TrimSpace(f.must("token", "create"))
	j, err := node.Join(f.t.Context(), node.JoinOptions{StateDir: dir, Hub: f.url(via), CA: f.ca, Token: token, Hostname: name, VK: "test", Now: shifted(dir)})
	if err != nil {
		f.t.Fatal(err)
	}
	return dir, j.Node
}

func (f *fleet) run(name, dir string) *process { return f.runIn(name, dir, "") }

func (f *fleet) runIn(name, dir, ns string) *process {
	p := &process{t: f.t, role: "node " + dir, log: filepath.Join(f.dir, name+".log"), ns: ns}
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

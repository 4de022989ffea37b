// Package fleetup brings up a whole fleet on this machine, each part as the
// process that an operator would run: a hub, a vk-gitlab, and one node that
// boots real microVMs. GitLab is a stand-in in this process (e2e/gitlabtest),
// with the projects' repositories beside it.
package fleetup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hubadmin"
	"virtkit/e2e/gitlabtest"
	"virtkit/e2e/gitsrv"
)

// Options of a fleet.
type Options struct {
	VK       string // the program
	StateDir string // where kernels and images are
	Dir      string // for all that the fleet keeps; short, since sockets are below it
	Log      io.Writer
	// NodeConfig is added to the node's configuration, TOML.
	NodeConfig string
	// Relay is added to the relay's [[runners]].
	Relay string
	// Mem is what a job may use, such as "1G".
	Mem string
	// Envelopes is how many jobs vk-gitlab asks for at a time; 0 = one.
	Envelopes int
	// Between puts something between two parts: it is told who connects (node,
	// vk-gitlab, GitLab's clients, git) to which address, and returns the one to
	// use in its place. nil = nothing.
	Between func(who, addr string) (string, error)
	// Wrap is put around the stand-in GitLab; nil = nothing.
	Wrap func(http.Handler) http.Handler
}

// Fleet is one that is up.
type Fleet struct {
	Options
	GitLab *gitlabtest.Server
	URL    string // GitLab's, on the host and in guests
	GitURL string // the same by a way of its own: for clones
	Repos  string // directory of the bare repositories
	Git    *gitsrv.Server
	Node   string // its ID

	web  *http.Server
	addr string // of the hub

	mu    sync.Mutex
	procs []*process
}

type process struct {
	name string
	args []string
	cmd  *exec.Cmd
	gone chan struct{}
}

// RunnerToken is that of the fleet's one runner.
const RunnerToken = "glrt-demo-fleet-0123456789"

// Up brings a fleet up. What was begun is ended when it fails.
func Up(ctx context.Context, o Options) (f *Fleet, err error) {
	f = &Fleet{Options: o, GitLab: gitlabtest.New(), Repos: filepath.Join(o.Dir, "repos")}
	defer func() {
		if err != nil {
			f.Down()
		}
	}()
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{{"GitLab", f.gitlab}, {"the hub", f.hub}, {"the node", f.node}, {"vk-gitlab", f.relay}} {
		if err := step.do(ctx); err != nil {
			return f, fmt.Errorf("bringing up %s: %w", step.name, err)
		}
	}
	return f, nil
}

func (f *Fleet) gitlab(context.Context) error {
	var err error
	if f.Git, err = gitsrv.New(f.Repos); err != nil {
		return err
	}
	f.GitLab.RunnerToken, f.GitLab.Hold, f.GitLab.Git = RunnerToken, 5*time.Second, f.Git
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	git, err := f.between("git", l.Addr().String())
	if err != nil {
		l.Close()
		return err
	}
	f.GitURL = "http://" + git
	addr, err := f.between("GitLab's clients", l.Addr().String())
	if err != nil {
		l.Close()
		return err
	}
	f.URL = "http://" + addr
	f.web = &http.Server{Handler: f.GitLab, ReadHeaderTimeout: 30 * time.Second}
	if f.Wrap != nil {
		f.web.Handler = f.Wrap(f.GitLab)
	}
	go f.web.Serve(l)
	return nil
}

func (f *Fleet) between(who, addr string) (string, error) {
	if f.Between == nil {
		return addr, nil
	}
	return f.Options.Between(who, addr)
}

// freeAddr is an address that nobody listens at now: the hub's, which is to be
// the same after a restart.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func (f *Fleet) file(name, text string) (string, error) {
	path := filepath.Join(f.Dir, name)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

func (f *Fleet) socket() string { return filepath.Join(f.Dir, "hub", "admin.sock") }

func (f *Fleet) hub(ctx context.Context) error {
	var err error
	if f.addr, err = freeAddr(); err != nil {
		return err
	}
	conf, err := f.file("hub.toml", fmt.Sprintf("addr = %q\ndata_dir = %q\nheartbeat_secs = 1\n", f.addr, filepath.Join(f.Dir, "hub")))
	if err != nil {
		return err
	}
	if err := f.start("hub", "hub", "--config", conf, "serve"); err != nil {
		return err
	}
	return f.until(ctx, "the hub answers", func() bool { _, err := f.status(ctx); return err == nil })
}

func (f *Fleet) status(ctx context.Context) (*hubadmin.StatusReply, error) {
	return hubadmin.Dial(f.socket()).Status(ctx)
}

// Hub runs a command of vk-hub and returns what it prints.
func (f *Fleet) Hub(ctx context.Context, args ...string) (string, error) {
	return f.run(ctx, "", append([]string{"hub", "--config", filepath.Join(f.Dir, "hub.toml")}, args...)...)
}

func (f *Fleet) node(ctx context.Context) error {
	state := filepath.Join(f.Dir, "node")
	if err := os.Mkdir(state, 0o700); err != nil {
		return err
	}
	for _, share := range []string{"kernels", "images", "vmm", "boot", "templates"} {
		if _, err := os.Stat(filepath.Join(f.StateDir, share)); err == nil {
			if err := os.Symlink(filepath.Join(f.StateDir, share), filepath.Join(state, share)); err != nil {
				return err
			}
		}
	}
	ports := portOf(f.URL)
	if f.GitURL != f.URL {
		ports += ", " + portOf(f.GitURL)
	}
	if _, err := f.file("config.toml", fmt.Sprintf("state_dir = %q\n[net]\nhost_loopback = [%s]\n[node]\nrunner = \"none\"\n%s", state, ports, f.NodeConfig)); err != nil {
		return err
	}
	token, err := f.Hub(ctx, "token", "create")
	if err != nil {
		return err
	}
	addr, err := f.between("node", f.addr)
	if err != nil {
		return err
	}
	id, err := f.run(ctx, token, "node", "join", "http://"+addr, "--token", "-")
	if err != nil {
		return err
	}
	f.Node = strings.TrimSpace(id)
	if _, err := f.Hub(ctx, "nodes", "pools", f.Node, "ci"); err != nil {
		return err
	}
	return f.start("node", "node", "run")
}

func portOf(url string) string { return url[strings.LastIndexByte(url, ':')+1:] }

func (f *Fleet) relay(ctx context.Context) error {
	token, err := f.file("runner.token", RunnerToken+"\n")
	if err != nil {
		return err
	}
	if _, err := f.file("gitlab.toml", fmt.Sprintf("check_interval = 1\nshutdown_timeout = 5\nstate_dir = %q\n[gitlab]\nurl = %q\n[[runners]]\nname = \"demo\"\ntoken_file = %q\npool = \"ci\"\nenvelope = { mem = %q, cpus = 1 }\nrequest_concurrency = %d\n%s",
		filepath.Join(f.Dir, "relay"), f.URL, token, f.Mem, max(f.Envelopes, 1), f.Relay)); err != nil {
		return err
	}
	join, err := f.Hub(ctx, "token", "create", "--kind", "gitlab")
	if err != nil {
		return err
	}
	addr, err := f.between("vk-gitlab", f.addr)
	if err != nil {
		return err
	}
	conf := filepath.Join(f.Dir, "gitlab.toml")
	if _, err := f.run(ctx, join, "gitlabd", "--config", conf, "join", "http://"+addr, "--token", "-"); err != nil {
		return err
	}
	if err := f.start("vk-gitlab", "gitlabd", "--config", conf, "run"); err != nil {
		return err
	}
	return f.until(ctx, "the hub takes the GitLab server", func() bool {
		_, err := f.Hub(ctx, "gitlabs", "approve", f.URL, "--name", "gitlab")
		return err == nil
	})
}

// Approve lets a project's jobs in.
func (f *Fleet) Approve(ctx context.Context, project int64, path string) error {
	_, err := f.Hub(ctx, "gitlabs", "projects", "approve", "gitlab", fmt.Sprintf("%d:%s", project, path))
	return err
}

// VKRun runs a command of vk on the node's host and returns what it prints.
func (f *Fleet) VKRun(ctx context.Context, args ...string) (string, error) {
	return f.run(ctx, "", args...)
}

func (f *Fleet) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, f.VK, args...)
	cmd.Env = append(os.Environ(), "VIRTKIT_CONFIG="+filepath.Join(f.Dir, "config.toml"), "VIRTKIT_STATE_DIR="+filepath.Join(f.Dir, "node"))
	return cmd
}

// run runs a command to its end.
func (f *Fleet) run(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := f.command(ctx, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fault.Newf(fault.System, "vk %s: %s", strings.Join(args, " "), strings.TrimSpace(errs.String())).Because(err)
	}
	return out.String(), nil
}

// start begins a process that goes on.
func (f *Fleet) start(name string, args ...string) error {
	p := &process{name: name, args: args, cmd: f.command(context.Background(), args...), gone: make(chan struct{})}
	w := &prefixed{w: f.Log, name: name}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = w, w, 10*time.Second // its children may have its output
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() { p.cmd.Wait(); close(p.gone) }()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, old := range f.procs {
		if old.name == name {
			f.procs[i] = p // where it was: Down ends them in order
			return nil
		}
	}
	f.procs = append(f.procs, p)
	return nil
}

func (f *Fleet) all() []*process {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.procs)
}

// Signal sends a signal to one of hub, node, vk-gitlab.
func (f *Fleet) Signal(name string, sig syscall.Signal) error {
	for _, p := range f.all() {
		if p.name == name {
			return p.cmd.Process.Signal(sig)
		}
	}
	return fault.Newf(fault.NotFound, "the fleet has no process %s", name)
}

// Restart ends one of hub, node, vk-gitlab by a signal and starts it again once
// pause is over.
func (f *Fleet) Restart(name string, sig syscall.Signal, pause time.Duration) error {
	p, err := f.end(name, sig)
	if err != nil {
		return err
	}
	time.Sleep(pause)
	return f.start(name, p.args...)
}

// End ends one of them by a signal, and waits until it has.
func (f *Fleet) End(name string, sig syscall.Signal) error {
	_, err := f.end(name, sig)
	return err
}

func (f *Fleet) end(name string, sig syscall.Signal) (*process, error) {
	for _, p := range f.all() {
		if p.name != name {
			continue
		}
		p.cmd.Process.Signal(sig)
		select {
		case <-p.gone:
		case <-time.After(2 * time.Minute):
			p.cmd.Process.Kill()
			return nil, fault.Newf(fault.System, "%s does not end by %v", name, sig)
		}
		return p, nil
	}
	return nil, fault.Newf(fault.NotFound, "the fleet has no process %s", name)
}

// prefixed writes lines with the name of who wrote them.
type prefixed struct {
	mu   sync.Mutex
	w    io.Writer
	name string
}

func (p *prefixed) Write(b []byte) (int, error) {
	if p.w == nil {
		return len(b), nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(string(b)) {
		fmt.Fprintf(p.w, "%s: %s\n", p.name, strings.TrimRight(line, "\n"))
	}
	return len(b), nil
}

// until asks f until it says so, at most two minutes.
func (f *Fleet) until(ctx context.Context, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for !ok() {
		if p := f.dead(); p != "" {
			return fault.Newf(fault.System, "waiting until %s: %s has ended", what, p)
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, context.Cause(ctx))
		}
	}
	return nil
}

// dead names a process that has ended, "" for none.
func (f *Fleet) dead() string {
	for _, p := range f.all() {
		select {
		case <-p.gone:
			return p.name
		default:
		}
	}
	return ""
}

// Ended waits for a job's last update.
func (f *Fleet) Ended(ctx context.Context, id int64) (gitlabtest.Job, error) {
	for {
		changed := f.GitLab.Changed()
		if j, ok := f.GitLab.Job(id); ok && j.Final != nil {
			return j, nil
		}
		select {
		case <-changed:
		case <-time.After(time.Second):
			if p := f.dead(); p != "" {
				return gitlabtest.Job{}, fmt.Errorf("%s has ended", p)
			}
		case <-ctx.Done():
			return gitlabtest.Job{}, context.Cause(ctx)
		}
	}
}

// Down ends all, the last one that was begun first.
func (f *Fleet) Down() error {
	var errs []error
	procs := f.all()
	for _, p := range slices.Backward(procs) {
		p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.gone:
		case <-time.After(60 * time.Second):
			errs = append(errs, fmt.Errorf("%s does not end", p.name))
			p.cmd.Process.Kill()
			<-p.gone
		}
	}
	f.mu.Lock()
	f.procs = nil
	f.mu.Unlock()
	if f.web != nil {
		f.web.Close()
	}
	return errors.Join(errs...)
}

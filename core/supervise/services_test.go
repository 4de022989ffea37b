package supervise_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/supervise"
	"virtkit/core/supervise/supervisetest"
)

// listenProcess is a service: it says hello and what it was told, and listens.
func listenProcess() int {
	l, err := net.Listen("tcp", "127.0.0.1:"+os.Getenv("TEST_LISTEN"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("hello from", os.Getenv("TEST_SECRET_NAME"))
	for {
		if _, err := l.Accept(); err != nil {
			return 1
		}
	}
}

// freePort is one that nobody listens on.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func serviceSpec(base, name string, argv []string, env ...string) supervise.Service {
	s := testSpec(base)
	s.ID, s.Name, s.Hostname, s.Created = name, name, name, time.Now()
	s.Net = supervise.NetSpec{Names: []string{name, name + ".alias"}}
	s.Command = &supervise.Command{Argv: argv, Env: env}
	return supervise.Service{Spec: s, Wait: time.Minute}
}

// listener is a service that listens on a free port.
func listener(t *testing.T, base, name string) supervise.Service {
	port := freePort(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	v := serviceSpec(base, name, []string{exe, "-test.run=^$"},
		"TEST_SUPERVISE_MODE=listen", "TEST_LISTEN="+strconv.Itoa(port), "TEST_SECRET_NAME=hunter2 of "+name)
	v.Ports = []int{port}
	return v
}

func shell(base, name, script string) supervise.Service {
	return serviceSpec(base, name, []string{"sh", "-c", script})
}

// launchWith launches a guest with services.
func launchWith(t *testing.T, base string, env []string, services ...supervise.Service) (string, *supervise.Client, error) {
	t.Helper()
	dir := filepath.Join(base, "run-1")
	s := testSpec(base)
	s.Services, s.ServiceExec = services, supervise.ServiceExecOn
	c, err := supervise.Launch(ctxFor(t), launchOptions(dir, s, env...))
	return dir, c, err
}

func commandLog(t *testing.T, dir, service string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(supervise.ServiceDir(dir, service), supervise.CommandFile))
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

func TestServices(t *testing.T) {
	base := t.TempDir()
	// Whoever accepts for it has done so before the wait begins, so that the wait,
	// all of which is taken, can be short.
	open, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	const wait = 2 * time.Second
	bad := shell(base, "late", "exec sleep 1000")
	bad.Ports, bad.Wait = []int{open.Addr().(*net.TCPAddr).Port, freePort(t)}, wait
	dir, c, err := launchWith(t, base, nil, listener(t, base, "web"), bad, shell(base, "dead", "echo last words; exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	var st supervise.State
	eventually(t, "the death of a service", func() bool {
		st, err = c.State(ctxFor(t))
		return err == nil && st.Services[2].Exit != nil
	})
	if v := st.Services[0]; v.Name != "web" || v.Phase != supervise.Running || v.Addr == "" || !v.Waited || len(v.Closed) != 0 || v.Exit != nil {
		t.Errorf("web = %+v", v)
	}
	if v := st.Services[1]; v.Phase != supervise.Running || len(v.Closed) != 1 || v.Closed[0] != bad.Ports[1] || v.Limit != wait || v.Ready < v.Limit {
		t.Errorf("late = %+v, want port %d closed after its limit", v, bad.Ports[1])
	}
	if x := st.Services[2].Exit; x.Reason != supervise.ReasonExited || x.Code == nil || *x.Code != 3 || st.Services[2].Phase != supervise.Ended {
		t.Errorf("dead = %+v, %+v", st.Services[2], x)
	}
	if got := commandLog(t, dir, "web"); got != "hello from hunter2 of web\n" {
		t.Errorf("log of web = %q", got)
	}
	if got := commandLog(t, dir, "dead"); got != "last words\n" {
		t.Errorf("log of dead = %q", got)
	}
	// Its environment is in no file and no process's own.
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != supervise.CommandFile {
			if b, _ := os.ReadFile(path); bytes.Contains(b, []byte("hunter2")) {
				t.Errorf("%s holds a variable of a service", path)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	web, err := c.Service("WEB.alias")
	if err != nil {
		t.Fatal(err)
	}
	ws, err := web.State(ctxFor(t))
	if err != nil || ws.PID == st.PID || ws.VMMPID == st.VMMPID || ws.Kind != supervise.ServiceKind {
		t.Errorf("web's own state = %+v, %v", ws, err)
	}
	if _, err := c.Service("nobody"); fault.KindOf(err) != fault.NotFound || !strings.Contains(fault.HintOf(err), "web, late, dead") {
		t.Errorf("Service(nobody) = %v, hint %q", err, fault.HintOf(err))
	}
	if _, err := c.Stop(ctxFor(t), time.Second); err != nil {
		t.Error(err)
	}
	gone(t, dir)
	if left := processesWith(dir); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

// What was booted again is told of the guest and of each of its services.
func TestBootedAgainIsTold(t *testing.T) {
	base := t.TempDir()
	_, c, err := launchWith(t, base, []string{"TEST_SUPERVISE_STILLBORN=1"}, shell(base, "web", "exec sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	st, err := c.State(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"it gave no sign of life for 50ms"}
	if !slices.Equal(st.Retried, want) || !slices.Equal(st.Services[0].Retried, want) {
		t.Errorf("booted again: %q, its service: %q; want %q of both", st.Retried, st.Services[0].Retried, want)
	}
	if _, err := c.Stop(ctxFor(t), time.Second); err != nil {
		t.Error(err)
	}
}

func TestServiceFailsToStart(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*supervise.Service)
		kind   fault.Kind
		text   string
	}{
		"no image":   {func(v *supervise.Service) { v.Spec.Image.Path += ".gone" }, fault.NotFound, "service web: starting guest web: image: image local/test is not on this host"},
		"no program": {func(v *supervise.Service) { v.Spec.Command.Argv = []string{"/nonexistent/program"} }, fault.JobFailed, "service web: its command could not be started: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			v := listener(t, base, "web")
			c.change(&v)
			dir, _, err := launchWith(t, base, nil, v, shell(base, "other", "exec sleep 1000"))
			if err == nil || !strings.Contains(err.Error(), c.text) || fault.KindOf(err) != c.kind {
				t.Errorf("Launch = %v (%s), want %s with %q", err, fault.KindOf(err), c.kind, c.text)
			}
			gone(t, dir)
			nothingLeft(t, dir, supervise.Owner{})
		})
	}
}

func TestServicesNeedASwitch(t *testing.T) {
	base := t.TempDir()
	s := testSpec(base)
	s.Net.Mode = "none"
	s.Services = []supervise.Service{shell(base, "web", "true")}
	_, err := supervise.Launch(ctxFor(t), launchOptions(filepath.Join(base, "run-1"), s))
	if err == nil || !strings.Contains(err.Error(), "need the per-job LAN") {
		t.Errorf("Launch = %v", err)
	}
}

// SIGKILL of any process, while services start and while they run, leaves
// nothing behind.
func TestServicesKilled(t *testing.T) {
	t.Run("job's supervisor", func(t *testing.T) {
		t.Parallel()
		base := t.TempDir()
		dir, c, err := launchWith(t, base, nil, listener(t, base, "web"), shell(base, "other", "exec sleep 1000"))
		if err != nil {
			t.Fatal(err)
		}
		st, err := c.State(ctxFor(t))
		if err != nil {
			t.Fatal(err)
		}
		syscall.Kill(st.PID, syscall.SIGKILL)
		nothingLeft(t, dir, vmmOf(dir))
	})
	t.Run("job's supervisor, swept at once", func(t *testing.T) {
		t.Parallel()
		base := t.TempDir()
		dir, c, err := launchWith(t, base, nil, listener(t, base, "web"), shell(base, "other", "exec sleep 1000"))
		if err != nil {
			t.Fatal(err)
		}
		st, _ := c.State(ctxFor(t))
		vmms := []supervise.Owner{vmmOf(dir), vmmOf(supervise.ServiceDir(dir, "web")), vmmOf(supervise.ServiceDir(dir, "other"))}
		// Stopped, so that they cannot end by themselves.
		for _, n := range []string{"web", "other"} {
			s, _ := supervise.ReadState(supervise.ServiceDir(dir, n))
			syscall.Kill(s.PID, syscall.SIGSTOP)
		}
		syscall.Kill(st.PID, syscall.SIGKILL)
		sweep(t, base)
		gone(t, dir)
		for _, v := range vmms {
			eventually(t, "the end of a VMM", func() bool { return !v.Alive() })
		}
		if left := processesWith(dir); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
	t.Run("service's supervisor", func(t *testing.T) {
		t.Parallel()
		base := t.TempDir()
		dir, c, err := launchWith(t, base, nil, listener(t, base, "web"))
		if err != nil {
			t.Fatal(err)
		}
		web, _ := supervise.ReadState(supervise.ServiceDir(dir, "web"))
		vmm := vmmOf(supervise.ServiceDir(dir, "web"))
		syscall.Kill(web.PID, syscall.SIGKILL)
		eventually(t, "the service's end in the state", func() bool {
			st, err := c.State(ctxFor(t))
			return err == nil && st.Phase == supervise.Running && st.Services[0].Exit != nil && strings.Contains(st.Services[0].Exit.Detail, "killed")
		})
		eventually(t, "the end of its VMM", func() bool { return !vmm.Alive() })
		if _, err := c.Stop(ctxFor(t), time.Second); err != nil {
			t.Error(err)
		}
		nothingLeft(t, dir, vmm)
	})
	// A service's supervisor that is just starting when the job's dies.
	for _, step := range []string{"socket", "network", "boot", "command"} {
		t.Run("job's supervisor while its service is at "+step, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir := filepath.Join(base, "run-1")
			file := filepath.Join(t.TempDir(), "paused")
			s := testSpec(base)
			s.Services = []supervise.Service{shell(base, "web", "exec sleep 1000")}
			o := launchOptions(dir, s, "TEST_SUPERVISE_SERVICE_PAUSE="+step+"="+file)
			ctx, cancel := context.WithCancel(ctxFor(t))
			ended := make(chan error, 1)
			go func() { _, err := supervise.Launch(ctx, o); ended <- err }()
			eventually(t, "the pause", func() bool { _, err := os.ReadFile(file); return err == nil })
			st, err := supervise.ReadState(dir)
			if err != nil {
				t.Fatal(err)
			}
			syscall.Kill(st.PID, syscall.SIGKILL)
			if err := <-ended; err == nil {
				t.Error("Launch succeeded")
			}
			cancel()
			nothingLeft(t, dir, supervise.Owner{})
		})
	}
}

// withServices is a supervisor in this process whose services have their own.
func withServices(t *testing.T, d *supervisetest.Driver, exec supervise.ServiceExec) *world {
	return run(t, d, func(s *supervise.Spec, deps *supervise.Deps) {
		base := filepath.Dir(s.Image.Path)
		s.Services, s.ServiceExec = []supervise.Service{shell(base, "web", "exec sleep 1000"), shell(base, "dead", "exit 4")}, exec
		deps.Argv, deps.Env = relaunch()
	})
}

// inService is guestclient's Opener as a program of the guest has it.
func inService(g *supervisetest.Guest, name string) *guestclient.Client {
	open := func(context.Context) (net.Conn, error) { return g.OpenStream() }
	return guestclient.FromOpener(guestclient.ForService(open, name))
}

func TestServiceExec(t *testing.T) {
	w := withServices(t, &supervisetest.Driver{}, supervise.ServiceExecOn)
	g := w.driver.Last()
	if s := g.Setups(); len(s) != 1 || s[0].Services != guestwire.ServiceExecOn || s[0].Net == nil || len(s[0].Net.Options) != 1 {
		t.Errorf("Setup = %+v", s)
	}
	eventually(t, "the end of a service", func() bool {
		st, err := w.client.State(ctxFor(t))
		return err == nil && st.Services[1].Exit != nil
	})
	var out, errs bytes.Buffer
	r, err := inService(g, "Web.Alias").Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "cat; echo err >&2; exit 7"}},
		guestclient.Stdio{In: strings.NewReader("to the service"), Out: &out, Err: &errs}, nil)
	if err != nil || r.Code != 7 || out.String() != "to the service" || errs.String() != "err\n" {
		t.Errorf("Exec = %+v, %v, %q, %q", r, err, out.String(), errs.String())
	}
	for name, want := range map[string]string{"nobody": `no service "nobody"; it has: web, dead`, "dead": "service dead has ended: exited"} {
		r, err := inService(g, name).Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{Out: &out}, nil)
		if err != nil || r.Code != 125 || !strings.Contains(r.Err, want) {
			t.Errorf("Exec in %s = %+v, %v; want %q", name, r, err, want)
		}
	}
}

func TestServiceExecLimit(t *testing.T) {
	w := withServices(t, &supervisetest.Driver{}, supervise.ServiceExecOn)
	c := inService(w.driver.Last(), "web")
	ends := make(chan error, guestwire.MaxServiceExecs)
	var inputs []io.Closer
	for range guestwire.MaxServiceExecs {
		in, hold := io.Pipe()
		inputs = append(inputs, hold)
		up := make(chan bool, 1)
		go func() {
			r, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "echo up; cat"}}, guestclient.Stdio{In: in, Out: onWrite(func() { up <- true })}, nil)
			if err == nil && r.Code != 0 {
				err = fmt.Errorf("%+v", r)
			}
			ends <- err
		}()
		<-up
	}
	// With streams, that the service's agent has already.
	r, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{In: strings.NewReader("x"), Out: io.Discard, Err: io.Discard}, nil)
	if err != nil || r.Code != 125 || !strings.Contains(r.Err, "4 commands run in services already") {
		t.Errorf("one more = %+v, %v", r, err)
	}
	for _, in := range inputs {
		in.Close()
	}
	for range inputs {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
	eventually(t, "room for another", func() bool {
		r, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil)
		return err == nil && r.Err == "" && r.Code == 0
	})
}

type onWrite func()

func (f onWrite) Write(p []byte) (int, error) { f(); return len(p), nil }

// Whatever a guest says on streams of its own, nothing but an exec in a service
// comes of it, and its host goes on.
func TestServiceExecGarbage(t *testing.T) {
	w := withServices(t, &supervisetest.Driver{}, supervise.ServiceExecOn)
	g := w.driver.Last()
	body := func(v any) json.RawMessage { b, _ := json.Marshal(v); return b }
	say := func(name string, f func(io.Writer) error) {
		c, err := g.OpenStream()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer c.Close()
		f(c)
		c.SetReadDeadline(time.Now().Add(time.Minute))
		if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
			t.Errorf("%s was answered %q, %v; want the stream's end", name, b, err)
		}
	}
	for _, op := range []string{"guest", "stop", "hello", "setup", "shutdown", "ping", "exec", "stdio", "dial", "write", "", "\x00"} {
		say("header "+op, func(w io.Writer) error { return guestwire.Open(w, op, nil) })
		switch op {
		case "exec", "stdio":
			continue
		}
		say("service "+op, func(w io.Writer) error {
			return guestwire.Open(w, guestwire.OpService, guestwire.Service{Name: "web", Request: guestwire.Header{Op: op, Body: body(map[string]any{"grace": 0})}})
		})
	}
	say("no JSON", func(w io.Writer) error { _, err := w.Write([]byte("\x00\x00\x00\x04!!!!")); return err })
	say("too long", func(w io.Writer) error { _, err := w.Write([]byte("\xff\xff\xff\xff")); return err })
	say("body of another kind", func(w io.Writer) error { return guestwire.Open(w, guestwire.OpService, []int{1}) })
	say("stdio of nobody", func(w io.Writer) error {
		return guestwire.Open(w, guestwire.OpService, guestwire.Service{Name: "../web", Request: guestwire.Header{Op: "stdio"}})
	})
	st, err := w.client.State(ctxFor(t))
	if err != nil || st.Phase != supervise.Running || st.Services[0].Exit != nil {
		t.Errorf("State = %+v, %v", st, err)
	}
	// A guest that keeps its refused streams open gets no more of them, and the
	// host holds no more than so many.
	for range 400 {
		c, err := g.OpenStream()
		if err != nil {
			break
		}
		guestwire.Open(c, "hello", nil)
	}
	r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil)
	if err != nil || r.Code != 0 {
		t.Errorf("the host's own exec = %+v, %v", r, err)
	}
}

func TestServiceExecRefused(t *testing.T) {
	w := withServices(t, &supervisetest.Driver{}, supervise.ServiceExecRefused)
	g := w.driver.Last()
	if s := g.Setups(); len(s) != 1 || s[0].Services != guestwire.ServiceExecRefused {
		t.Errorf("Setup = %+v", s)
	}
	eventually(t, "the host's refusal", func() bool {
		_, err := g.OpenStream()
		return err != nil
	})
	if r, err := w.client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{}, nil); err != nil || r.Code != 0 {
		t.Errorf("the host's own exec = %+v, %v", r, err)
	}
	if errors.Is(w.err, os.ErrClosed) {
		t.Error(w.err)
	}
}

package agent_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"virtkit/agent/agenttest"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
)

func TestMain(m *testing.M) {
	agenttest.Main()
	os.Exit(m.Run())
}

func ctxFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// run executes a shell script and returns what it wrote.
func run(t *testing.T, c *guestclient.Client, req guestwire.ExecRequest, script string) (stdout, stderr string, res guestclient.ExecResult) {
	t.Helper()
	req.Argv = []string{"/bin/sh", "-c", script}
	var o, e bytes.Buffer
	res, err := c.Exec(ctxFor(t), req, guestclient.Stdio{Out: &o, Err: &e}, nil)
	if err != nil {
		t.Fatalf("Exec(%q): %v", script, err)
	}
	return o.String(), e.String(), res
}

// eventually polls until ok, for what another process does in its own time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func needRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: run the tests as uid 0 to switch users")
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

func TestHelloPing(t *testing.T) {
	c := agenttest.Start(t).Client
	h, err := c.Hello(ctxFor(t))
	if err != nil || h.Kernel == "" || h.UptimeMS <= 0 || h.Ready {
		t.Errorf("Hello() = %+v, %v", h, err)
	}
	p, err := c.Ping(ctxFor(t))
	if err != nil || p.MemTotal <= 0 || p.MemAvail <= 0 || p.UpperSize <= 0 || p.Execs != 0 {
		t.Errorf("Ping() = %+v, %v", p, err)
	}
}

func TestExecStreamsApart(t *testing.T) {
	c := agenttest.Start(t).Client
	o, e, res := run(t, c, guestwire.ExecRequest{}, "echo out; echo err >&2; exit 7")
	if o != "out\n" || e != "err\n" || res.Code != 7 || res.Signal != 0 || res.PID == 0 {
		t.Errorf("got %q, %q, %+v", o, e, res)
	}
}

func TestExecExitCodes(t *testing.T) {
	c := agenttest.Start(t).Client
	for _, code := range []int{0, 1, 2, 105, 126, 127, 137, 255} {
		if _, _, res := run(t, c, guestwire.ExecRequest{}, fmt.Sprintf("exit %d", code)); res.Code != code || res.Signal != 0 || res.Err != "" {
			t.Errorf("exit %d: %+v", code, res)
		}
	}
	if _, _, res := run(t, c, guestwire.ExecRequest{}, "kill -9 $$"); res.Code != 137 || res.Signal != 9 {
		t.Errorf("kill -9: %+v", res)
	}
}

func TestExecNotStarted(t *testing.T) {
	c := agenttest.Start(t).Client
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, tc := range []struct {
		name string
		req  guestwire.ExecRequest
		code int
		text string
	}{
		{"not in PATH", guestwire.ExecRequest{Argv: []string{"no-such-program"}}, 127, "not found in PATH"},
		{"no file", guestwire.ExecRequest{Argv: []string{"/no/such"}}, 127, "no such file"},
		{"directory", guestwire.ExecRequest{Argv: []string{dir}}, 126, "is a directory"},
		{"no x bit", guestwire.ExecRequest{Argv: []string{write("plain", "x", 0o644)}}, 126, "not executable"},
		{"no interpreter", guestwire.ExecRequest{Argv: []string{write("bad", "#!/no/such/interp\n", 0o755)}}, 127, "interpreter"},
		{"no format", guestwire.ExecRequest{Argv: []string{write("junk", "\x01\x02\x03", 0o755)}}, 126, "not a program"},
		{"nothing", guestwire.ExecRequest{}, 127, "no program"},
		{"no such user", guestwire.ExecRequest{Argv: []string{"true"}, User: "nobody-of-that-name"}, 126, `user "nobody-of-that-name" is not in /etc/passwd`},
		{"no such group", guestwire.ExecRequest{Argv: []string{"true"}, User: "0:nogroupofthatname"}, 126, `group "nogroupofthatname"`},
		{"no dir", guestwire.ExecRequest{Argv: []string{"true"}, Dir: "/no/such/dir"}, 127, "working directory /no/such/dir"},
		{"relative dir", guestwire.ExecRequest{Argv: []string{"true"}, Dir: "x"}, 126, "not absolute"},
		{"bad id", guestwire.ExecRequest{ID: "../../etc", Argv: []string{"true"}}, 126, "32 hex"},
	} {
		var o bytes.Buffer
		res, err := c.Exec(ctxFor(t), tc.req, guestclient.Stdio{In: strings.NewReader("x"), Out: &o, Err: &o}, nil)
		if err != nil || res.Code != tc.code || !strings.Contains(res.Err, tc.text) || res.PID != 0 {
			t.Errorf("%s: %+v, %v; want %d with %q", tc.name, res, err, tc.code, tc.text)
		}
	}
}

func TestExecEnvironment(t *testing.T) {
	c := agenttest.Start(t).Client
	if _, err := c.Setup(ctxFor(t), guestwire.Setup{Env: []string{"A=image", "B=image", "PATH=/bin:/usr/bin"}}, nil); err != nil {
		t.Fatal(err)
	}
	req := guestwire.ExecRequest{Env: []string{"B=request", "C=1", "C=2=3", "M=a\nb"}, Dir: "/"}
	o, _, _ := run(t, c, req, `echo "$A $B $C $PATH $HOME $USER"; printf %s "$M"`)
	if want := "image request 2=3 /bin:/usr/bin /root root\na\nb"; os.Getuid() == 0 && o != want {
		t.Errorf("got %q, want %q", o, want)
	}
	req.Clear, req.Env = true, []string{"ONLY=1"}
	var b bytes.Buffer
	req.Argv = []string{"env"}
	if _, err := c.Exec(ctxFor(t), req, guestclient.Stdio{Out: &b}, nil); err != nil {
		t.Fatal(err)
	}
	if want := "ONLY=1\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"; b.String() != want {
		t.Errorf("cleared environment is %q, want %q", b.String(), want)
	}
	if _, err := c.Setup(ctxFor(t), guestwire.Setup{}, nil); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("second Setup = %v, want a refusal", err)
	}
	if h, err := c.Hello(ctxFor(t)); err != nil || !h.Ready {
		t.Errorf("Hello after Setup = %+v, %v", h, err)
	}
}

func TestExecUser(t *testing.T) {
	needRoot(t)
	c := agenttest.Start(t).Client
	dir := filepath.Join(t.TempDir(), "a", "b")
	for _, tc := range []struct{ user, want string }{
		{"", "0:0"},
		{"daemon", "1:1"},
		{"1", "1:1"},
		{"12345", "12345:0"},
		{"12345:54321", "12345:54321"},
		{"daemon:bin", "1:2"},
	} {
		o, e, res := run(t, c, guestwire.ExecRequest{User: tc.user, Dir: "/"}, "echo $(id -u):$(id -g)")
		if strings.TrimSpace(o) != tc.want || res.Code != 0 {
			t.Errorf("user %q: %q %q %+v, want %s", tc.user, o, e, res, tc.want)
		}
	}
	os.Chmod(filepath.Dir(filepath.Dir(filepath.Dir(dir))), 0o755)
	os.Chmod(filepath.Dir(filepath.Dir(dir)), 0o755)
	o, e, res := run(t, c, guestwire.ExecRequest{User: "daemon", Dir: dir, MkDir: true}, "pwd; touch x ../y; echo to-err > /dev/stderr")
	if strings.TrimSpace(o) != dir || e != "to-err\n" || res.Code != 0 {
		t.Errorf("MkDir: %q %q %+v", o, e, res)
	}
}

func TestExecStdin(t *testing.T) {
	c := agenttest.Start(t).Client
	var o bytes.Buffer
	res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh"}}, guestclient.Stdio{In: strings.NewReader("echo from stdin\nexit 3\n"), Out: &o}, nil)
	if err != nil || o.String() != "from stdin\n" || res.Code != 3 {
		t.Errorf("got %q, %+v, %v", o.String(), res, err)
	}
	// No stdin is an empty one.
	if o, _, res := run(t, c, guestwire.ExecRequest{}, "cat; echo done"); o != "done\n" || res.Code != 0 {
		t.Errorf("without stdin: %q %+v", o, res)
	}
	// A reader that never returns does not hold Exec.
	r, w := io.Pipe()
	defer w.Close()
	if _, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{In: r}, nil); err != nil {
		t.Errorf("blocked stdin: %v", err)
	}
	// Endless input to a program that takes none.
	if res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"true"}}, guestclient.Stdio{In: endless{}}, nil); err != nil || res.Code != 0 {
		t.Errorf("endless stdin: %+v, %v", res, err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestExecBinaryIntegrity(t *testing.T) {
	c := agenttest.Start(t).Client
	in := make([]byte, 64<<20)
	rand.Read(in)
	h := sha256.New()
	res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"cat"}}, guestclient.Stdio{In: bytes.NewReader(in), Out: h}, nil)
	if err != nil || res.Code != 0 {
		t.Fatalf("Exec = %+v, %v", res, err)
	}
	if want := sha256.Sum256(in); !bytes.Equal(h.Sum(nil), want[:]) {
		t.Error("64 MiB came back changed")
	}
}

func TestExecThreeHundredAtOnce(t *testing.T) {
	c := agenttest.Start(t).Client
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			var o, e bytes.Buffer
			want := strings.Repeat(fmt.Sprint(i, ";"), 100)
			res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "cat; echo e >&2; exit " + strconv.Itoa(i%200)}},
				guestclient.Stdio{In: strings.NewReader(want), Out: &o, Err: &e}, nil)
			if err != nil || o.String() != want || e.String() != "e\n" || res.Code != i%200 {
				t.Errorf("exec %d: %d bytes, %q, %+v, %v", i, o.Len(), e.String(), res, err)
			}
		})
	}
	wg.Wait()
	if p, err := c.Ping(ctxFor(t)); err != nil || p.Execs != 0 {
		t.Errorf("after all: %+v, %v", p, err)
	}
}

// gate is a writer that takes nothing until opened.
type gate struct {
	open  chan struct{}
	first chan struct{}
	once  sync.Once
	n     int
}

func newGate() *gate { return &gate{open: make(chan struct{}), first: make(chan struct{})} }

func (g *gate) Write(p []byte) (int, error) {
	g.once.Do(func() { close(g.first) })
	<-g.open
	g.n += len(p)
	return len(p), nil
}

func TestStalledStreamBlocksNothingElse(t *testing.T) {
	c := agenttest.Start(t).Client
	g := newGate()
	er, ew := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "head -c 8000000 /dev/zero & head -c 3000000 /dev/zero >&2; echo >&2; wait"}},
			guestclient.Stdio{Out: g, Err: ew}, nil)
		ew.Close()
		done <- err
	}()
	<-g.first // stdout is stalled from here on
	if n, err := io.CopyN(io.Discard, er, 3000001); err != nil {
		t.Fatalf("stderr: %d bytes, %v", n, err)
	}
	if o, _, _ := run(t, c, guestwire.ExecRequest{}, "echo other"); o != "other\n" {
		t.Errorf("another exec said %q", o)
	}
	close(g.open)
	go io.Copy(io.Discard, er)
	if err := <-done; err != nil || g.n != 8000000 {
		t.Errorf("stdout carried %d bytes, %v; want 8000000", g.n, err)
	}
}

func TestWriterFailureIsABrokenPipe(t *testing.T) {
	c := agenttest.Start(t).Client
	boom := errors.New("disk full")
	var e bytes.Buffer
	res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "yes; echo yes ended with $? >&2; exit 5"}},
		guestclient.Stdio{Out: failing{boom}, Err: &e}, nil)
	if !errors.Is(err, boom) || res.Code != 5 || !strings.Contains(e.String(), "141") {
		t.Errorf("got %+v, %v, stderr %q; want code 5 after status 141", res, err, e.String())
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestSignalsReachTheGroup(t *testing.T) {
	c := agenttest.Start(t).Client
	r, w := io.Pipe()
	ctl := make(chan guestwire.ExecControl)
	type end struct {
		res guestclient.ExecResult
		err error
	}
	done := make(chan end, 1)
	go func() {
		// The other process says itself that it is there: between fork and exec
		// it still has the shell's handler, which would swallow the signal.
		res, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "trap 'echo got; exit 9' TERM; sh -c 'echo ready $$; exec sleep 1000' & wait"}}, guestclient.Stdio{Out: w}, ctl)
		w.Close()
		done <- end{res, err}
	}()
	b := make([]byte, 100)
	n, _ := r.Read(b)
	child, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(string(b[:n]), "ready ")))
	if err != nil {
		t.Fatalf("first words %q", b[:n])
	}
	ctl <- guestwire.ExecControl{Signal: int(syscall.SIGTERM)}
	rest, _ := io.ReadAll(r)
	if e := <-done; e.err != nil || e.res.Code != 9 || string(rest) != "got\n" {
		t.Errorf("got %+v, %v, %q", e.res, e.err, rest)
	}
	eventually(t, "the group's other process got the signal", func() bool { return !alive(child) })
}

func TestKillEndsAllItStarted(t *testing.T) {
	c := agenttest.Start(t).Client
	r, w := io.Pipe()
	ctl := make(chan guestwire.ExecControl, 1)
	done := make(chan guestclient.ExecResult, 1)
	go func() {
		// In process groups of their own (job control), ignoring SIGTERM.
		res, _ := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "trap '' TERM; set -m; sleep 1000 & echo ready $!; wait; sleep 1000"}}, guestclient.Stdio{Out: w}, ctl)
		w.Close()
		done <- res
	}()
	b := make([]byte, 100)
	n, _ := r.Read(b)
	child, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(string(b[:n]), "ready ")))
	if err != nil {
		t.Fatalf("first words %q", b[:n])
	}
	go io.Copy(io.Discard, r)
	ctl <- guestwire.ExecControl{Kill: true}
	if res := <-done; res.Signal != 9 || res.Code != 137 {
		t.Errorf("got %+v", res)
	}
	eventually(t, "the background process is dead", func() bool { return !alive(child) })
}

func TestDrainAfterExit(t *testing.T) {
	c := agenttest.Start(t).Client
	// The child holds the pipe open and lives on; all that was written before
	// the shell's end arrives, nothing hangs, and the child does not die of
	// what it writes later.
	mark := filepath.Join(t.TempDir(), "mark")
	script := fmt.Sprintf("head -c 60000 /dev/zero; (trap 'exit' TERM; until [ -e %s.go ]; do sleep 0.05; done; echo late && echo ok > %s; exec sleep 1000) & echo $! >&2; exit 4", mark, mark)
	o, e, res := run(t, c, guestwire.ExecRequest{}, script)
	if len(o) != 60000 || res.Code != 4 {
		t.Errorf("got %d bytes, %+v; want 60000, code 4", len(o), res)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(e))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(pid, syscall.SIGKILL)
	if !alive(pid) {
		t.Fatal("the background process died with its parent")
	}
	if err := os.WriteFile(mark+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the background process could write", func() bool { _, err := os.Stat(mark); return err == nil })
	if !alive(pid) {
		t.Error("the background process died of writing")
	}
}

func TestLossEndsTheProgram(t *testing.T) {
	p := agenttest.Start(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("no longer wanted")
	r, w := io.Pipe()
	done := make(chan error, 1)
	mark := filepath.Join(t.TempDir(), "mark")
	go func() {
		_, err := p.Client.Exec(ctx, guestwire.ExecRequest{Argv: []string{"sh", "-c", "trap 'echo bye; echo trapped > " + mark + "; exit' TERM; echo $$; while :; do sleep 0.1; done"}}, guestclient.Stdio{Out: w}, nil)
		done <- err
	}()
	b := make([]byte, 100)
	n, _ := r.Read(b)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	go io.Copy(io.Discard, r)
	cancel(why)
	if err := <-done; !errors.Is(err, why) {
		t.Errorf("Exec = %v, want the context's cause", err)
	}
	eventually(t, "the program ended by its trap", func() bool { _, err := os.Stat(mark); return err == nil && !alive(pid) })
	eventually(t, "no exec is counted", func() bool { g, err := p.Client.Ping(ctxFor(t)); return err == nil && g.Execs == 0 })
}

func TestDetachSurvivesLoss(t *testing.T) {
	p := agenttest.Start(t)
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	go p.Client.Exec(ctx, guestwire.ExecRequest{Detach: true, Argv: []string{"sh", "-c", "echo $$; while echo line; do sleep 0.01; done"}}, guestclient.Stdio{Out: w}, nil)
	b := make([]byte, 100)
	n, _ := r.Read(b)
	pid, err := strconv.Atoi(strings.Fields(string(b[:n]))[0])
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(-pid, syscall.SIGKILL)
	go io.Copy(io.Discard, r)
	cancel()
	// It must still be there after many more lines than a closed pipe allows.
	time.Sleep(300 * time.Millisecond)
	if g, err := p.Client.Ping(ctxFor(t)); err != nil || g.Execs != 1 || !alive(pid) {
		t.Errorf("after the loss: %+v, %v, alive %v", g, err, alive(pid))
	}
}

func TestGuestGoneKeepsOutput(t *testing.T) {
	p := agenttest.Start(t)
	g := newGate()
	done := make(chan error, 1)
	mark := filepath.Join(t.TempDir(), "mark")
	go func() {
		_, err := p.Client.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "head -c 200000 /dev/zero; echo $$ > " + mark + "; exec sleep 1000"}}, guestclient.Stdio{Out: g}, nil)
		done <- err
	}()
	<-g.first
	eventually(t, "all was written", func() bool { fi, err := os.Stat(mark); return err == nil && fi.Size() > 0 })
	t.Cleanup(func() { // outlives the agent, which is killed
		if b, err := os.ReadFile(mark); err != nil {
			t.Error(err)
		} else if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
			t.Error(err)
		} else {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	// One round trip behind the output: it is all on this side, or in a pipe
	// that the agent empties at once.
	eventually(t, "the pipe is empty", func() bool { _, err := p.Client.Ping(ctxFor(t)); time.Sleep(50 * time.Millisecond); return err == nil })
	p.Cmd.Process.Kill()
	close(g.open)
	if err := <-done; !errors.Is(err, guestclient.ErrGuestGone) {
		t.Errorf("Exec = %v, want ErrGuestGone", err)
	}
	if g.n != 200000 {
		t.Errorf("%d bytes of 200000 were delivered", g.n)
	}
	if _, err := p.Client.Ping(ctxFor(t)); !errors.Is(err, guestclient.ErrGuestGone) {
		t.Errorf("Ping = %v, want ErrGuestGone", err)
	}
	if err := p.Client.Shutdown(ctxFor(t), guestwire.Shutdown{}); err != nil {
		t.Errorf("Shutdown of a guest that is gone = %v", err)
	}
}

func TestTTY(t *testing.T) {
	c := agenttest.Start(t).Client
	var o bytes.Buffer
	req := guestwire.ExecRequest{Argv: []string{"sh", "-c", "tty; stty size; test -t 0 && test -t 1 && test -t 2 && echo all; echo err >&2; echo $TERM; exit 6"}, TTY: true, Rows: 33, Cols: 77}
	res, err := c.Exec(ctxFor(t), req, guestclient.Stdio{Out: &o}, nil)
	if err != nil || res.Code != 6 {
		t.Fatalf("Exec = %+v, %v", res, err)
	}
	lines := strings.Split(strings.ReplaceAll(o.String(), "\r\n", "\n"), "\n")
	if len(lines) < 5 || !strings.HasPrefix(lines[0], "/dev/pts/") || lines[1] != "33 77" || lines[2] != "all" || lines[3] != "err" {
		t.Errorf("terminal said %q", lines)
	}
	// Input, its end, and a resize. The shell reads only once it has seen the
	// resize, because one that interrupts its read ends that as if at the end.
	o.Reset()
	r, w := io.Pipe()
	ctl := make(chan guestwire.ExecControl)
	done := make(chan error, 1)
	ready := &waitFor{text: "ready", seen: make(chan struct{})}
	go func() {
		_, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "trap 'stty size; seen=1' WINCH; echo ready; until [ \"$seen\" ]; do sleep 0.1; done; while read l; do echo \"<$l>\"; done; echo end"}, TTY: true}, guestclient.Stdio{In: r, Out: ready}, ctl)
		done <- err
	}()
	<-ready.seen
	ctl <- guestwire.ExecControl{Resize: &guestwire.Resize{Rows: 11, Cols: 22}}
	io.WriteString(w, "hello\n")
	w.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	got := ready.String()
	for _, want := range []string{"11 22", "<hello>", "end"} {
		if !strings.Contains(got, want) {
			t.Errorf("terminal said %q, want %q in it", got, want)
		}
	}
	// Much output at the end is not lost.
	o.Reset()
	if _, err := c.Exec(ctxFor(t), guestwire.ExecRequest{Argv: []string{"sh", "-c", "stty -opost; head -c 300000 /dev/zero"}, TTY: true}, guestclient.Stdio{Out: &o}, nil); err != nil || o.Len() != 300000 {
		t.Errorf("terminal delivered %d bytes of 300000, %v", o.Len(), err)
	}
}

type waitFor struct {
	mu   sync.Mutex
	b    bytes.Buffer
	text string
	seen chan struct{}
	once sync.Once
}

func (w *waitFor) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.b.Write(p)
	if strings.Contains(w.b.String(), w.text) {
		w.once.Do(func() { close(w.seen) })
	}
	return len(p), nil
}

func (w *waitFor) String() string { w.mu.Lock(); defer w.mu.Unlock(); return w.b.String() }

func TestNeverReadStreamsLeakNothing(t *testing.T) {
	p := agenttest.Start(t)
	// Raw streams of a host that asks for output and reads none of it.
	var conns []net.Conn
	for range 20 {
		id := guestclient.NewExecID()
		for _, m := range []struct {
			op   string
			body any
		}{
			{guestwire.OpExec, guestwire.ExecRequest{ID: id, Argv: []string{"yes"}, Stdout: true}},
			{guestwire.OpStdio, guestwire.Stdio{ID: id, FD: 1}},
		} {
			c, err := p.Client.Open(ctxFor(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := guestwire.Open(c, m.op, m.body); err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
	}
	eventually(t, "all run", func() bool { g, err := p.Client.Ping(ctxFor(t)); return err == nil && g.Execs == 20 })
	if o, _, _ := run(t, p.Client, guestwire.ExecRequest{}, "echo fine"); o != "fine\n" {
		t.Errorf("meanwhile: %q", o)
	}
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "none runs", func() bool { g, err := p.Client.Ping(ctxFor(t)); return err == nil && g.Execs == 0 })
}

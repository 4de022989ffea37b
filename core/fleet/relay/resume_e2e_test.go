package relay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/relayconf"
	"virtkit/core/fleet/wire"
	"virtkit/e2e/gitlabtest"
)

// The output of hub and GitLab is read and sent as it comes, in patches of at
// most a MiB, whatever the hub's answers do.
func TestLongOutput(t *testing.T) {
	w := newWorld(t, 1)
	w.hub.Misbehave(&relaytest.Fault{On: "GET /v1/jobs", Times: 2, Apply: true}, &relaytest.Fault{On: "GET /v1/jobs", Times: 1, Status: 503, Failure: dispatch.Failure{Code: dispatch.Unavailable}})
	w.add(response(7))
	w.run()
	j := w.next(0)
	j.Accept()
	line := []byte(strings.Repeat("0123456789abcdé", 4096) + "\n")
	var want bytes.Buffer
	for want.Len() < 5<<20 {
		j.Write(line)
		want.Write(line)
	}
	j.Finish(wire.JobResult{})
	got, f := w.ended(7)
	if !bytes.Equal(got.Trace, want.Bytes()) || f.State != "success" {
		t.Errorf("%d bytes of %d, %+v", len(got.Trace), want.Len(), f)
	}
	for _, r := range w.gitlab.Requests() {
		if r.Endpoint == "patch" && len(r.Body) > 1<<20 {
			t.Errorf("a patch of %d bytes", len(r.Body))
		}
	}
}

// SIGTERM leaves jobs that do not end in time to the next start, which goes on
// with them; GitLab sees one end and the whole trace.
func TestShutdownAndResume(t *testing.T) {
	w := newWorld(t, 1)
	w.conf.ShutdownTimeout = 0
	w.add(response(7))
	stop := w.run()
	j := w.next(0)
	j.Accept()
	j.Write([]byte("before\n"))
	w.gitlabUntil("the trace has begun", func() bool { g, _ := w.gitlab.Job(7); return len(g.Trace) > 0 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if w.held() != 1 {
		t.Fatalf("%d records", w.held())
	}
	w.noSecrets()
	// Neither joining nor leaving is possible now.
	_, err := relay.Leave(t.Context(), w.conf.StateDir)
	if fault.KindOf(err) != fault.Conflict {
		t.Errorf("leave with a job: %v", err)
	}
	_, err = relay.Join(t.Context(), relay.JoinOptions{StateDir: w.conf.StateDir, Hub: w.hub.URL, CA: w.hub.CA, Token: w.hub.Token(), Replace: true})
	if fault.KindOf(err) != fault.Conflict {
		t.Errorf("join with a job: %v", err)
	}
	j.Write([]byte("after\n"))
	w.run()
	j.Finish(wire.JobResult{})
	got, f := w.ended(7)
	if string(got.Trace) != "before\nafter\n" || f.State != "success" {
		t.Errorf("%q, %+v", got.Trace, f)
	}
	commits := 0
	for _, r := range w.gitlab.Requests() {
		if r.Endpoint == "put_running" {
			commits++
		}
	}
	if commits != 1 {
		t.Errorf("committed %d times", commits)
	}
	w.until("nothing is left", func() bool { return w.held() == 0 })
}

// noSecrets looks for the tokens in what others could read.
func (w *world) noSecrets() {
	w.t.Helper()
	err := filepath.WalkDir(w.conf.StateDir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			w.t.Errorf("%s has mode %04o", path, info.Mode().Perm())
		}
		return err
	})
	if err != nil {
		w.t.Error(err)
	}
	b, err := os.ReadFile(relay.StatePath(w.conf.StateDir, "ci"))
	if err != nil || !bytes.Contains(b, []byte(jobToken)) {
		w.t.Errorf("the job's token is not in the state file, where it is to be: %v", err)
	}
	if bytes.Contains(b, []byte(runnerToken)) || bytes.Contains(b, []byte(`"spec"`)) {
		w.t.Error("the state file has more than it needs")
	}
}

// A hub that removed the relay ends the asking, and Run.
func TestRemoved(t *testing.T) {
	w := newWorld(t, 1)
	d, err := relay.Open(t.Context(), w.opt)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	over := make(chan error, 1)
	go func() { over <- d.Run(t.Context()) }()
	w.until("there is a session", func() bool { _, beats, _, _ := w.hub.Session(); return beats > 0 })
	w.hub.Remove()
	select {
	case err = <-over:
	case <-within(t).Done():
		t.Fatal("the relay goes on")
	}
	if fault.KindOf(err) != fault.Denied || !strings.Contains(err.Error(), "removed this relay") || !strings.Contains(fault.HintOf(err), "vk-gitlab join --replace") {
		t.Errorf("%v (%s)", err, fault.HintOf(err))
	}
}

// A lost session is dialed again.
func TestRedial(t *testing.T) {
	w := newWorld(t, 1)
	w.run()
	w.until("there is a session", func() bool { _, _, _, n := w.hub.Session(); return n == 1 })
	w.hub.DropSessions()
	w.until("there is another one", func() bool { _, _, _, n := w.hub.Session(); return n == 2 })
}

// An outcome that GitLab does not take now is told later, what it refuses for
// good is not.
func TestOutcomeAgain(t *testing.T) {
	for status, finals := range map[int]int{503: 4*5 + 1, 400: 4} {
		w := newWorld(t, 1)
		w.gitlab.Misbehave(gitlabtest.Rule{On: "put_final", To: 20, Status: status, Headers: map[string]string{"Retry-After": "0"}})
		w.add(response(7))
		w.run()
		finish(w.next(0), "x\n", wire.JobResult{})
		w.until("the job is settled", w.next(0).Settled)
		n := 0
		for _, r := range w.gitlab.Requests() {
			if r.Endpoint == "put_final" {
				n++
			}
		}
		if n != finals {
			t.Errorf("%d: told %d times, expected %d", status, n, finals)
		}
	}
}

// The environment of a relay that is a process of its own, and kills itself.
const (
	envVictim = "VK_TEST_RELAY" // its Options.Conf, JSON
	envStep   = "VK_TEST_RELAY_STEP"
)

func TestMain(m *testing.M) {
	if conf := os.Getenv(envVictim); conf != "" {
		victim(conf)
	}
	os.Exit(m.Run())
}

// victim runs a relay that is killed at a step of its state file: even ones are
// after a write, odd ones before it.
func victim(text string) {
	go func() { // it ends with the test, however that ends
		io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	var conf relayconf.Config
	if err := json.Unmarshal([]byte(text), &conf); err != nil {
		panic(err)
	}
	step, err := strconv.Atoi(os.Getenv(envStep))
	if err != nil {
		panic(err)
	}
	pace := fast()
	o := relay.Options{Conf: &conf, Info: relay.Ours("1.2.3", "abc", "linux", "amd64"), VK: "1.2.3", Pace: &pace}
	relay.OnWrite(&o, func(bool) {
		if step--; step == 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	d, err := relay.Open(context.Background(), o)
	if err != nil {
		panic(err)
	}
	d.Run(context.Background())
}

// A relay that is killed at any write of its state file, before it or after it,
// loses nothing: the next start goes on, GitLab has one end and one trace.
func TestKilledAtEachStep(t *testing.T) {
	for step := 1; ; step++ {
		w := newWorld(t, 2)
		w.add(response(7))
		conf, err := json.Marshal(w.conf)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), envVictim+"="+string(conf), envStep+"="+strconv.Itoa(step))
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			if j, err := w.hub.Next(within(t), 0); err == nil {
				finish(j, "whole\ntrace\n", wire.JobResult{Failure: "script", ExitCode: code(4)})
			}
		}()
		over := make(chan struct{})
		go func() {
			w.hub.Until(within(t), "settled", func() bool { return len(w.hub.Jobs()) > 0 && w.hub.Jobs()[0].Settled() && w.held() == 0 })
			close(over)
		}()
		gone := make(chan struct{})
		go func() { cmd.Wait(); close(gone) }()
		last := false
		select {
		case <-gone:
		case <-over:
			last = true
			cmd.Process.Kill()
			<-gone
		}
		if last {
			if step < 10 {
				t.Fatalf("the state file is written %d times", (step-1)/2)
			}
			return
		}
		// A job that GitLab gave out, and that was on no disk yet, is lost to
		// everyone: GitLab ends it by its own timeout.
		if step == 1 {
			continue
		}
		left := filepath.Join(w.conf.StateDir, ".ci.json.tmp-12345") // as of a write that was cut short
		if err := os.WriteFile(left, []byte("glcbt-token"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.run()
		if _, err := os.Lstat(left); err == nil {
			t.Errorf("killed at step %d: %s is still there", step, left)
		}
		got, f := w.ended(7)
		w.until("nothing is left", func() bool { return w.held() == 0 && w.hub.Jobs()[0].Settled() })
		if string(got.Trace) != "whole\ntrace\n" || f.ExitCode != 4 || len(w.hub.Jobs()) != 1 {
			t.Errorf("killed at step %d: trace %q, %+v, %d submissions", step, got.Trace, f, len(w.hub.Jobs()))
		}
	}
}

// The state file of another relay, or of none, is not gone on with.
func TestAnothersState(t *testing.T) {
	w := newWorld(t, 1)
	path := relay.StatePath(w.conf.StateDir, "ci")
	for name, text := range map[string]string{
		"another relay":  `{"version":1,"relay":"` + strings.Repeat("ab", 16) + `","hub":"` + w.hub.ID + `","jobs":[{"job_id":1}]}`,
		"before relays":  `{"version":1,"jobs":[{"job_id":1}]}`,
		"a newer one":    `{"version":2,"jobs":[]}`,
		"no JSON at all": "glcbt-secret",
	} {
		w.write(path, text)
		_, err := relay.Open(t.Context(), w.opt)
		if err == nil || fault.HintOf(err) == "" || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Without jobs it does not matter whose it was.
	w.write(path, `{"version":1,"relay":"`+strings.Repeat("ab", 16)+`","hub":"x","jobs":[]}`)
	d, err := relay.Open(t.Context(), w.opt)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := relay.Open(t.Context(), w.opt); fault.ExitCode(err) != 75 {
		t.Errorf("a second vk-gitlab: %v", err)
	}
	d.Close()
	// A directory that others can enter is refused.
	if err := os.Chmod(w.conf.StateDir, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := relay.Open(t.Context(), w.opt); fault.KindOf(err) != fault.Denied {
		t.Errorf("an open state dir: %v", err)
	}
}

// Two runners with one token, or one name, are refused.
func TestRunnersApart(t *testing.T) {
	w := newWorld(t, 1)
	again := w.conf.Runners[0]
	again.Name = "other"
	w.conf.Runners = append(w.conf.Runners, again)
	if _, err := relay.Open(t.Context(), w.opt); fault.KindOf(err) != fault.Usage || strings.Contains(err.Error(), runnerToken) {
		t.Errorf("one token twice: %v", err)
	}
}

// Leave deletes what Join made, and Join makes it anew.
func TestJoinLeave(t *testing.T) {
	w := newWorld(t, 1)
	dir := w.conf.StateDir
	e, err := relay.LoadEnrollment(dir)
	if err != nil {
		t.Fatal(err)
	}
	o := relay.JoinOptions{StateDir: dir, Hub: w.hub.URL, CA: w.hub.CA, Token: w.hub.Token()}
	if _, err := relay.Join(t.Context(), o); fault.KindOf(err) != fault.Conflict {
		t.Errorf("a second join: %v", err)
	}
	o.Replace = true
	j, err := relay.Join(t.Context(), o)
	if err != nil || j.OldRelay != e.Relay || j.Relay == e.Relay {
		t.Errorf("%+v, %v", j, err)
	}
	id, err := relay.SystemID(dir)
	if err != nil || len(id) != 14 {
		t.Errorf("system id %q, %v", id, err)
	}
	if again, _ := relay.SystemID(dir); again != id {
		t.Error("the system id changes")
	}
	if left, err := relay.Leave(t.Context(), dir); err != nil || left.Relay != j.Relay {
		t.Errorf("%+v, %v", left, err)
	}
	if _, err := os.Stat(filepath.Join(dir, relay.HubDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the enrollment is there: %v", err)
	}
	for what, err := range map[string]error{"leaving": second(relay.Leave(t.Context(), dir)), "running": second(relay.Open(t.Context(), w.opt))} {
		if fault.KindOf(err) != fault.NotFound || !strings.Contains(fault.HintOf(err), "--kind gitlab") {
			t.Errorf("%s without an enrollment: %v", what, err)
		}
	}
	o.Token = strings.Repeat("0", 64)
	if _, err := relay.Join(t.Context(), o); fault.KindOf(err) != fault.Denied || !strings.Contains(err.Error(), "did not give out this token") {
		t.Errorf("a wrong token: %v", err)
	}
	o.Token = "short"
	if _, err := relay.Join(t.Context(), o); fault.KindOf(err) != fault.Usage {
		t.Errorf("no token: %v", err)
	}
	o.Token, o.CA = w.hub.Token(), nil
	if _, err := relay.Join(t.Context(), o); fault.KindOf(err) != fault.Unavailable {
		t.Errorf("a hub that cannot be verified: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

// The token's end is warned of a week before, and told once it has come.
func TestExpiry(t *testing.T) {
	for _, c := range []struct {
		in   time.Duration
		want string
	}{{30 * 24 * time.Hour, ""}, {6 * 24 * time.Hour, "expires soon"}, {-time.Hour, "has expired"}} {
		w := newWorld(t, 0)
		body, _ := json.Marshal(map[string]any{"id": 7, "token_expires_at": time.Now().Add(c.in)})
		w.gitlab.Misbehave(gitlabtest.Rule{On: "verify", Status: 200, Body: body})
		logs := newLines()
		w.opt.Log = logs.logger()
		w.run()
		w.until("the runner is verified", func() bool { inv, _, _, _ := w.hub.Session(); return inv != nil && inv.Runners[0].Verified })
		if c.want != "" {
			logs.until(t, c.want)
		}
		text := logs.String()
		if c.want == "" && strings.Contains(text, "expire") || strings.Contains(text, runnerToken) {
			t.Errorf("in %v: %s", c.in, text)
		}
	}
}

package e2e_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"virtkit/core/fleet/node"
)

// TestFallbackFromAHub: an operator's Fallback goes from a hub to a node, and
// holds the job that the host's own gitlab-runner has next, in a real guest; the
// one that replaced it holds the job after, with hub and node both dead.
func TestFallbackFromAHub(t *testing.T) {
	h, configure := egressHost(t)
	configure("[node]\nrunner = \"external\"\n")
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	conf := filepath.Join(dir, "hub.toml")
	if err := os.WriteFile(conf, fmt.Appendf(nil, "addr = %q\ndata_dir = %q\nheartbeat_secs = 1\n[jobs]\negress_rules = true\n", addr, filepath.Join(dir, "hub")), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	t.Cleanup(func() {
		if b, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("hub and node:\n%s", b)
		}
	})
	// Each file is opened once: what one process writes is behind what the other did.
	begin := func(args ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command(h.VK, args...)
		cmd.Env, cmd.Stdout, cmd.Stderr = h.Env(), log, log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	hub := func(args ...string) (string, error) {
		return h.Run(t.Context(), append([]string{"hub", "--config", conf}, args...)...)
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := hub(args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("it did not come to pass: %s", what)
			}
		}
	}
	serving := begin("hub", "--config", conf, "serve")
	eventually("the hub answers", func() bool { _, err := hub("status"); return err == nil })
	if out, err := h.Run(t.Context(), "node", "join", "http://"+addr, "--token", strings.TrimSpace(must("token", "create"))); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	running := begin("node", "run")
	file := filepath.Join(h.State, "node", node.FallbackFile)
	held := func(text string) func() bool {
		return func() bool { b, _ := os.ReadFile(file); return strings.Contains(string(b), text) }
	}

	must("egress", "set", "default", "--run-name", "web.test", "--build", "unrestricted", "--mode", "enforce")
	eventually("the Fallback is on the node", held("web.test"))
	j := runEgressJob(t, h, t.Name(), fetches, nil)
	want(t, "prepare", `
virtkit: egress under the hub's rules: default
virtkit:   run: node cap unrestricted; hub names web.test, ips none; job not narrowed
virtkit:   build: node cap unrestricted; hub unrestricted; job not narrowed
`, j.prepare)
	want(t, "the script's output", "name\n", string(j.build.Stdout))
	if got := string(j.build.Stderr); !strings.Contains(got, "virtkit: egress blocked by the hub's egress rules (default):\nvirtkit:   tcp 198.51.100.2:80 (once)\nvirtkit:   dns one.test (once)\n") {
		t.Errorf("the refusals:\n%s", got)
	}

	must("egress", "set", "default", "--run-name", "one.test", "--build", "unrestricted", "--mode", "enforce")
	eventually("the next one is on the node", held("one.test"))
	for _, p := range []*exec.Cmd{serving, running} {
		if err := p.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = p.Wait()
	}
	j = runEgressJob(t, h, t.Name(), fetches, nil)
	want(t, "the script's output, with hub and node dead", "lookup\n", string(j.build.Stdout))
	nothingLeft(t, h)
}

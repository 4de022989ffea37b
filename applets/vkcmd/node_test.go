package vkcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"virtkit/applets/internal/appenv"
	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/node/nodetest"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// nodeApp is vk on a state directory of its own.
func nodeApp(t *testing.T, stdin string) (*app, *bytes.Buffer, *bytes.Buffer, string) {
	t.Helper()
	dir := t.TempDir()
	var out, said bytes.Buffer
	env := appenv.OS()
	env.Stdin, env.Stdout, env.Stderr = strings.NewReader(stdin), &out, &said
	env.Getenv = func(k string) string {
		return map[string]string{"VIRTKIT_STATE_DIR": filepath.Join(dir, "state"), "HOME": dir, "VIRTKIT_ACCEL": "tcg"}[k]
	}
	env.LookupEnv = func(k string) (string, bool) { v := env.Getenv(k); return v, v != "" }
	return &app{env: env, g: globals{color: "never"}}, &out, &said, dir
}

func TestNodeToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("  from-the-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		stdin string
		o     joinOptions
		want  string
		words string
	}{
		"standard input": {"from-stdin\n", joinOptions{token: "-"}, "from-stdin", ""},
		"file":           {"", joinOptions{tokenFile: file}, "from-the-file", ""},
		"argument":       {"", joinOptions{token: "as-it-is"}, "as-it-is", ""},
		"none":           {"", joinOptions{}, "", "no token"},
		"both":           {"", joinOptions{token: "-", tokenFile: file}, "", "exclude each other"},
		"empty input":    {"\n", joinOptions{token: "-"}, "", "standard input holds no token"},
		"no file":        {"", joinOptions{tokenFile: file + "x"}, "", "--token-file"},
	} {
		a, _, said, _ := nodeApp(t, c.stdin)
		got, err := a.readToken(c.o)
		if got != c.want || (err == nil) != (c.words == "") || err != nil && (!strings.Contains(err.Error(), c.words) || fault.KindOf(err) != fault.Usage) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		if warned := strings.Contains(said.String(), "can be read by every user"); warned != (name == "argument") {
			t.Errorf("%s: said %q", name, said)
		}
	}
}

// TestNodeJoin enrolls with a hub on loopback: the id alone on standard output,
// the token nowhere.
func TestNodeJoin(t *testing.T) {
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(fleet.EnrollReply{Node: nodetest.NodeID, Hub: nodetest.HubID})
	}))
	defer hub.Close()
	token := strings.Repeat("cd", 32)
	a, out, said, dir := nodeApp(t, token+"\n")
	if err := a.nodeJoin(t.Context(), joinOptions{hub: hub.URL, token: "-"}); err != nil {
		if fault.KindOf(err) == fault.System && strings.Contains(err.Error(), "guests cannot run") {
			t.Skipf("this host is not fit to be a node: %v", err)
		}
		t.Fatal(err)
	}
	if out.String() != nodetest.NodeID+"\n" || strings.Contains(said.String(), token) {
		t.Errorf("printed %q, said %q", out, said)
	}
	e, err := node.LoadEnrollment(filepath.Join(dir, "state", node.Dir))
	if err != nil || e.URL != hub.URL {
		t.Errorf("%+v, %v", e, err)
	}
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, o := range []joinOptions{{hub: "http://hub.example.com", token: token}, {hub: hub.URL, token: token, ca: ca}, {hub: hub.URL, token: token, ca: ca + "x"}} {
		if err := a.nodeJoin(t.Context(), o); fault.KindOf(err) != fault.Usage || strings.Contains(err.Error(), token) {
			t.Errorf("%+v: %v", o.hub, err)
		}
	}
}

// lives is a node's run that ends when it is told.
type lives struct {
	err  error
	wait chan struct{}
}

func (l *lives) Run(ctx context.Context) error {
	<-ctx.Done()
	<-l.wait
	return l.err
}

// TestNodeSignals: the first signal waits, the second abandons a managed
// runner's jobs, the third waits for nothing.
func TestNodeSignals(t *testing.T) {
	for name, c := range map[string]struct {
		mode      fleet.RunnerMode
		signals   int
		abandoned bool
		exit      int
	}{
		"one":          {fleet.RunnerManaged, 1, false, 0},
		"two, managed": {fleet.RunnerManaged, 2, true, 0},
		"two":          {fleet.RunnerNone, 2, false, 130},
		"three":        {fleet.RunnerManaged, 3, false, 130},
	} {
		sigs := make(chan os.Signal)
		l := &lives{wait: make(chan struct{})}
		r := &abandons{Runner: nodetest.NewRunner(c.mode), called: make(chan struct{})}
		done := make(chan error, 1)
		go func() { done <- runNode(t.Context(), l, r, sigs, logx.ForTest(t)) }()
		for range c.signals {
			sigs <- unix.SIGTERM
		}
		if c.abandoned {
			<-r.called
		}
		if c.exit == 0 {
			close(l.wait)
		}
		if err := <-done; fault.ExitCode(err) != c.exit {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A refusal for good is a failure like any other of this host.
	sigs := make(chan os.Signal, 1)
	l := &lives{wait: make(chan struct{}), err: node.AsNode.Refused("https://hub.example.com", fleet.Revoked, "")}
	close(l.wait)
	sigs <- unix.SIGTERM
	err := runNode(t.Context(), l, nodetest.NewRunner(fleet.RunnerNone), sigs, logx.ForTest(t))
	if fault.ExitCode(err) != 1 || node.RefusalOf(err) != fleet.Revoked || fault.HintOf(err) == "" {
		t.Errorf("%v, status %d", err, fault.ExitCode(err))
	}
}

type abandons struct {
	*nodetest.Runner
	called chan struct{}
}

func (a *abandons) Abandon() { close(a.called) }

// TestNodeNotEnrolled: vk node run says what is missing, and what to do.
func TestNodeNotEnrolled(t *testing.T) {
	a, _, _, _ := nodeApp(t, "")
	if err := a.nodeRun(t.Context(), ""); fault.KindOf(err) != fault.NotFound || !strings.Contains(fault.HintOf(err), "vk node join") {
		t.Errorf("%v", err)
	}
}

// TestTuneFollowsHub: while the node is down, vk tune holds to the ceiling that
// its hub asked last.
func TestTuneFollowsHub(t *testing.T) {
	w := newTuned(t, "[executor.schedule]\nmax_concurrency = 8\n")
	nodetest.Enroll(t, w.h.StateDir)
	s, err := node.OpenStore(filepath.Join(w.h.StateDir, node.Dir), &node.Enrollment{Hub: nodetest.HubID, Node: nodetest.NodeID})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Apply(&fleet.Desired{Generation: 1, Policy: fleet.Policy{Ceiling: 3}}); err != nil {
		t.Fatal(err)
	}
	if out := w.run(); !strings.Contains(out, "concurrency 3 ") {
		t.Errorf("%s", out)
	}
}

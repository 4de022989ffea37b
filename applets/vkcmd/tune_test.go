package vkcmd

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"virtkit/applets/internal/appenv"
	"virtkit/applets/internal/wire"
	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/tune"
	"virtkit/core/usage"
)

// tuned is a host for vk tune, with its own memory.
type tuned struct {
	t    *testing.T
	dir  string
	mem  string
	out  bytes.Buffer
	said bytes.Buffer
	a    *app
	h    *wire.Host
}

func newTuned(t *testing.T, config string) *tuned {
	t.Helper()
	w := &tuned{t: t, dir: t.TempDir()}
	conf := filepath.Join(w.dir, "config.toml")
	if err := os.WriteFile(conf, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	w.mem = filepath.Join(w.dir, "meminfo")
	os.WriteFile(w.mem, []byte("MemTotal:       33554432 kB\nMemAvailable:   23592960 kB\n"), 0o600)
	env := appenv.OS()
	env.Stdout, env.Stderr = &w.out, &w.said
	env.Getenv = func(k string) string {
		return map[string]string{"VIRTKIT_CONFIG": conf, "VIRTKIT_STATE_DIR": filepath.Join(w.dir, "state"), "HOME": w.dir}[k]
	}
	env.LookupEnv = func(k string) (string, bool) { v := env.Getenv(k); return v, v != "" }
	w.a = &app{env: env, g: globals{color: "never"}}
	var err error
	if w.h, err = w.a.host(); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *tuned) run() string {
	w.t.Helper()
	w.out.Reset()
	if err := w.a.tune(w.t.Context(), w.h, w.mem); err != nil {
		w.t.Fatal(err)
	}
	return w.out.String()
}

func (w *tuned) desired() string {
	b, _ := os.ReadFile(filepath.Join(w.h.StateDir, tune.DesiredFile))
	return string(b)
}

const budget8 = "[executor.schedule]\nmem_budget = \"8G\"\ndisk_admission = false\n[executor.vm]\nmem = \"2G\"\n"

func TestTune(t *testing.T) {
	w := newTuned(t, budget8)
	gate, err := w.h.Gate()
	if err != nil {
		t.Fatal(err)
	}
	held, err := gate.Admit(t.Context(), admit.Ask{ID: "1-x", Amounts: admit.Amounts{MemMiB: 6144}}, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	// What jobs of this host typically reserve is what its history says.
	if err := w.h.History.Add("7-acme/lint", "lint", usage.Run{ID: "a", Ended: time.Now(), CeilingMiB: 2048}); err != nil {
		t.Fatal(err)
	}
	want := "virtkit: runner concurrency 2 (estimate 2, ceiling none); 6144 of 8192 MiB committed by 1 job(s), typical job 2048 MiB, 23040 of 32768 MiB host memory available\n"
	if got := w.run(); got != want || w.desired() != "2" {
		t.Errorf("%q, wrote %q, want %q", got, w.desired(), want)
	}
	os.Remove(w.mem)
	if got := w.run(); !strings.HasSuffix(got, "host memory unreadable\n") {
		t.Errorf("%q", got)
	}
	held.Release()
	held.Close()
	for _, n := range []string{"3", "4", "4"} { // 8 GiB have room for four, one more at a time
		if w.run(); w.desired() != n {
			t.Errorf("%q was written, want %s", w.desired(), n)
		}
	}
}

func TestTuneCeilings(t *testing.T) {
	w := newTuned(t, "[executor.schedule]\nmax_concurrency = 5\n")
	if got := w.run(); !strings.HasPrefix(got, "virtkit: runner concurrency 5 (estimate none, ceiling 5); ") || w.desired() != "5" {
		t.Errorf("%q, wrote %q", got, w.desired())
	}
	w = newTuned(t, "")
	if err := w.a.tune(t.Context(), w.h, w.mem); fault.KindOf(err) != fault.Usage || w.desired() != "" {
		t.Errorf("%v, wrote %q", err, w.desired())
	}
}

// TestTuneSets: a runner of the same user has its concurrent set.
func TestTuneSets(t *testing.T) {
	runner := filepath.Join(t.TempDir(), "config.toml")
	const text = "concurrent = 1 # here\n[[runners]]\ntoken = \"x\"\n"
	if err := os.WriteFile(runner, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := newTuned(t, "[executor.schedule]\nmax_concurrency = 3\n[node]\nrunner_config = \""+runner+"\"\n")
	if got := w.run(); !strings.HasSuffix(got, runner+": concurrent 1 → 3\n") {
		t.Errorf("%q", got)
	}
	if b, _ := os.ReadFile(runner); string(b) != strings.Replace(text, "1", "3", 1) {
		t.Errorf("%q", b)
	}
	if got := w.run(); strings.Contains(got, "→") {
		t.Errorf("again: %q", got)
	}
}

// TestTuneStandsAside: a node that is up decides itself.
func TestTuneStandsAside(t *testing.T) {
	w := newTuned(t, "[executor.schedule]\nmax_concurrency = 3\n")
	path := filepath.Join(w.h.StateDir, nodeLock)
	os.MkdirAll(filepath.Dir(path), 0o700)
	l, err := fsx.TryLock(path, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.run(); got != "" || w.desired() != "" || !strings.Contains(w.said.String(), "vk node run is up") {
		t.Errorf("%q, %q, wrote %q", got, w.said.String(), w.desired())
	}
	l.Close()
	if w.run(); w.desired() != "3" {
		t.Errorf("wrote %q", w.desired())
	}
}

// TestTuneKeepsTheHubsCeiling: what a node received last holds while it is down.
func TestTuneKeepsTheHubsCeiling(t *testing.T) {
	w := newTuned(t, "[executor.schedule]\nmax_concurrency = 3\n")
	path := filepath.Join(w.h.StateDir, nodeState)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ text, want string }{
		{`{"version":1,"applied":{"generation":6,"policy":{"ceiling":2}}}`, "2"},
		{`{"version":1,"applied":{"generation":7,"policy":{"ceiling":9}}}`, "3"},
		{`{"version":1,"applied":{"generation":8,"policy":{}}}`, "3"},
		{`{"version":1}`, "3"},
	} {
		if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if w.run(); w.desired() != tc.want {
			t.Errorf("%s: wrote %q, want %s", tc.text, w.desired(), tc.want)
		}
	}
	for _, bad := range []string{"", "{", `{"applied":{"policy":{"ceiling":-1}}}`, `{"applied":7}`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := nodeCeiling(w.h.StateDir); err == nil || n != 0 || !strings.Contains(err.Error(), path) || fault.HintOf(err) == "" {
			t.Errorf("%q: %d, %v", bad, n, err)
		}
	}
}

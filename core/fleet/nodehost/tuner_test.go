package nodehost_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"virtkit/core/fleet/nodehost"
	"virtkit/core/fleet/wire"
	"virtkit/core/tune"
)

func TestTuner(t *testing.T) {
	state := t.TempDir()
	conf := filepath.Join(t.TempDir(), "config.toml")
	write(t, conf, "# mine\nconcurrent = 10\ncheck_interval = 0\n", 0o600)
	in := tune.Input{Budget: 8192, Typical: 1024, Total: 65536, Available: 60000}
	tuner := nodehost.NewTuner(nodehost.TunerOptions{
		StateDir: state, RunnerConfig: conf, LocalCeiling: 7,
		Input: func(context.Context) (tune.Input, error) {
			got := in
			got.Ceilings = []int{7}
			if n, _, err := tune.ReadDesired(filepath.Join(state, tune.DesiredFile)); err == nil {
				got.Last = n
			}
			return got, nil
		},
	})
	pass := func(hub int, raise bool, estimate, effective int) {
		t.Helper()
		got := tuner.Pass(t.Context(), hub, raise)
		want := wire.Concurrency{Estimate: estimate, HubCeiling: hub, LocalCeiling: 7, Effective: effective}
		if got != want || tuner.Last() != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if n, _, err := tune.ReadDesired(filepath.Join(state, tune.DesiredFile)); err != nil || n != effective {
			t.Errorf("desired %d (%v), want %d", n, err, effective)
		}
		b, _ := os.ReadFile(conf)
		if n, err := tune.Concurrent(b); err != nil || n != effective {
			t.Errorf("concurrent %d (%v), want %d", n, err, effective)
		}
	}
	in.Running = 4
	pass(0, false, 5, 5) // the first number: one more than what runs
	pass(0, false, 6, 5) // only the pass of the half minute raises it
	pass(0, true, 6, 6)
	pass(0, true, 7, 7)
	pass(0, true, 8, 7)  // the local ceiling
	pass(3, false, 8, 3) // the hub's is in force at once
	pass(0, false, 4, 3)
	pass(0, true, 4, 4)
	in.Committed = 8192 // the host fills: it falls at once
	in.Running = 1
	pass(0, false, 1, 1)
	b, _ := os.ReadFile(conf)
	if !strings.HasPrefix(string(b), "# mine\n") {
		t.Errorf("the rest of the configuration changed: %s", b)
	}
}

// A hub's ceiling that is lifted from a host that has nothing else to decide by
// does not hold for ever.
func TestTunerRelease(t *testing.T) {
	for _, edited := range []bool{false, true} {
		state := t.TempDir()
		conf := filepath.Join(t.TempDir(), "config.toml")
		write(t, conf, "concurrent = 10\n", 0o600)
		desired := filepath.Join(state, tune.DesiredFile)
		tuner := nodehost.NewTuner(nodehost.TunerOptions{StateDir: state, RunnerConfig: conf,
			Input: func(context.Context) (in tune.Input, err error) {
				in.Last, _, err = tune.ReadDesired(desired)
				if errors.Is(err, fs.ErrNotExist) {
					err = nil
				}
				return in, err
			}})
		if c := tuner.Pass(t.Context(), 0, true); c != (wire.Concurrency{}) {
			t.Errorf("with nothing to decide by: %+v", c)
		}
		if c := tuner.Pass(t.Context(), 2, false); c.Effective != 2 || c.Error != "" {
			t.Errorf("%+v", c)
		}
		want := 10
		if edited { // an operator's own number stays
			write(t, conf, "concurrent = 5\n", 0o600)
			want = 5
		}
		if c := tuner.Pass(t.Context(), 0, false); c != (wire.Concurrency{}) {
			t.Errorf("%+v", c)
		}
		b, _ := os.ReadFile(conf)
		if n, _ := tune.Concurrent(b); n != want {
			t.Errorf("concurrent = %d, want %d", n, want)
		}
		if _, err := os.Stat(desired); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the request is left: %v", err)
		}
	}
}

func TestTunerError(t *testing.T) {
	fail := error(&fs.PathError{Op: "open", Path: "/admit", Err: fs.ErrPermission})
	tuner := nodehost.NewTuner(nodehost.TunerOptions{StateDir: t.TempDir(),
		Input:   func(context.Context) (tune.Input, error) { return tune.Input{}, fail },
		Explain: func(error) error { return errors.New("the jobs run as root") }})
	if c := tuner.Pass(t.Context(), 4, true); c.Error != "the jobs run as root" || c.HubCeiling != 4 {
		t.Errorf("%+v", c)
	}
	fail = errors.New("broken")
	if c := tuner.Pass(t.Context(), 0, true); !strings.Contains(c.Error, "broken") {
		t.Errorf("%+v", c)
	}
	tuner = nodehost.NewTuner(nodehost.TunerOptions{StateDir: t.TempDir(), RunnerConfig: "/nonexistent/config.toml",
		Input: func(context.Context) (tune.Input, error) { return tune.Input{Ceilings: []int{3}}, nil }})
	if c := tuner.Pass(t.Context(), 0, true); c.Effective != 3 || !strings.Contains(c.Error, "/nonexistent/config.toml") {
		t.Errorf("%+v", c)
	}
}

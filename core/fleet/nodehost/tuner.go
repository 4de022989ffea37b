package nodehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/logx"
	"virtkit/core/tune"
)

// TunePass is the time between two passes that may raise the concurrency.
const TunePass = 30 * time.Second

// TunerOptions are what sets a runner's concurrency.
type TunerOptions struct {
	StateDir string
	// Input is what `vk tune` decides by: the local ceiling and the number that was
	// written last are part of it, a hub's ceiling is not.
	Input func(ctx context.Context) (tune.Input, error)
	// LocalCeiling is [executor.schedule] max_concurrency; 0 = none.
	LocalCeiling int
	// RunnerConfig is the config.toml whose `concurrent` is set; "" = none is, and
	// the number is left for vk-runnerctl.
	RunnerConfig string
	// Explain replaces an error of permissions by what is behind it, when that can
	// be found out; nil = it is told as it is.
	Explain func(error) error
	Log     *slog.Logger
}

// Tuner sets the runner's concurrency on a node, with the decision of `vk tune`
// and the hub's ceiling as a third term. There is one writer of the number: `vk
// tune` does nothing while a node holds node/lock.
type Tuner struct {
	o TunerOptions

	mu   sync.Mutex
	told string // the last error that was logged
	last wire.Concurrency
}

// NewTuner makes one.
func NewTuner(o TunerOptions) *Tuner {
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	return &Tuner{o: o}
}

// Last is what the last pass came to.
func (t *Tuner) Last() wire.Concurrency { t.mu.Lock(); defer t.mu.Unlock(); return t.last }

// Pass decides and sets the number. hub is the hub's ceiling, 0 for none. Only a
// pass with raise, one each half minute, raises the number; it falls in any. What
// it came to is for the report: a number that cannot be set is the report's
// error, and logged when it starts.
func (t *Tuner) Pass(ctx context.Context, hub int, raise bool) wire.Concurrency {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := wire.Concurrency{HubCeiling: hub, LocalCeiling: t.o.LocalCeiling}
	err := t.pass(ctx, &c, raise)
	if err != nil && denied(err) && t.o.Explain != nil {
		err = t.o.Explain(err)
	}
	if err != nil {
		c.Error = err.Error()
	}
	if c.Error != t.told {
		if t.told = c.Error; c.Error != "" {
			t.o.Log.Warn("the runner's concurrency cannot be set", logx.Err, c.Error)
		} else {
			t.o.Log.Info("the runner's concurrency can be set again")
		}
	}
	t.last = c
	return c
}

func (t *Tuner) pass(ctx context.Context, c *wire.Concurrency, raise bool) error {
	in, err := t.o.Input(ctx)
	if err != nil {
		return fmt.Errorf("looking at the host: %w", err)
	}
	if c.HubCeiling > 0 {
		in.Ceilings = append(in.Ceilings, c.HubCeiling)
	}
	d, ok := tune.Decide(in)
	c.Estimate = d.Estimate
	if !ok {
		return t.release(in.Last)
	}
	n := d.Concurrency
	if !raise && in.Last > 0 {
		n = min(n, in.Last)
	}
	c.Effective = n
	// Also when it is the same: vk-runnerctl goes by the file's age.
	if raise || n != in.Last {
		if err := tune.WriteDesired(t.o.StateDir, n); err != nil {
			return fmt.Errorf("writing the number: %w", err)
		}
	}
	if t.o.RunnerConfig == "" {
		return nil
	}
	was, err := tune.Set(t.o.RunnerConfig, n)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no %s yet: gitlab-runner register makes it", t.o.RunnerConfig)
	}
	if err != nil {
		return err
	}
	if was != n {
		t.o.Log.Info("concurrent is set", logx.Path, t.o.RunnerConfig, "was", was, "now", n, "estimate", d.Estimate, "ceiling", d.Ceiling)
	}
	return nil
}

// release lets go of a number that was asked for while there was something to
// decide by, such as a hub's ceiling: the request goes, and a configuration that
// still has it gets what its original had. Without it the last ceiling would
// hold for ever.
func (t *Tuner) release(last int) error {
	if last == 0 {
		return nil
	}
	if t.o.RunnerConfig != "" {
		if err := restoreConcurrent(t.o.RunnerConfig, last); err != nil {
			return err
		}
	}
	path := filepath.Join(t.o.StateDir, tune.DesiredFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	t.o.Log.Info("nothing bounds the runner's concurrency any more")
	return fsx.SyncDir(filepath.Dir(path))
}

// restoreConcurrent gives a config.toml the `concurrent` of its original back,
// unless somebody has set another one than ours since.
func restoreConcurrent(path string, ours int) error {
	orig, err := os.ReadFile(path + tune.OrigSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it was never changed
	}
	if err != nil {
		return err
	}
	want, err := tune.Concurrent(orig)
	if err != nil {
		return nil // it had none to go back to
	}
	now, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if n, err := tune.Concurrent(now); err != nil || n != ours {
		return err
	}
	_, err = tune.Set(path, want)
	return err
}

package supervise

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// board is the supervisor's State, published to waiters and to state.json.
type board struct {
	path string
	log  *slog.Logger

	mu      sync.Mutex
	state   State
	changed chan struct{} // closed and replaced at each change

	saveMu sync.Mutex // before mu; held over a change, which has one writer at a time
	failed bool       // state.json could not be written; logged once
}

func newBoard(path string, log *slog.Logger, s State) *board {
	return &board{path: path, log: log, state: s, changed: make(chan struct{})}
}

// update changes the state: first in state.json, then for those who watch, so
// that whoever was told finds it written. fn is called once for each and must
// replace slices, not change their elements: snapshots share them.
func (b *board) update(fn func(s *State)) {
	now := time.Now()
	change := func(s *State) {
		was := s.Phase
		fn(s)
		if s.Phase != was {
			s.Since = now
		}
	}
	b.saveMu.Lock()
	defer b.saveMu.Unlock()
	next := b.get()
	change(&next)
	b.save(next)
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.state)
	close(b.changed)
	b.changed = make(chan struct{})
}

// stage is update for a stage alone, which is told but not saved: state.json
// is written at each phase.
func (b *board) stage(words string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state.Stage == words {
		return
	}
	b.state.Stage = words
	close(b.changed)
	b.changed = make(chan struct{})
}

// snapshot is the state and a channel that is closed at its next change.
func (b *board) snapshot() (State, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.changed
}

func (b *board) get() State { s, _ := b.snapshot(); return s }

// save replaces state.json; saveMu is held. There is no fsync: the file means
// nothing after the host's own end, when no process that it names exists.
func (b *board) save(s State) {
	err := writeJSON(b.path, s, false)
	if err != nil && !b.failed {
		b.log.Warn("the guest goes on without its state file", logx.Path, b.path, logx.Err, err)
	}
	b.failed = err != nil
}

// saveAgain is save when the last one failed: on a full disk, which the guest's
// end has made room on. Else what is kept of the guest would say for ever that
// it ran, and not why it ended.
func (b *board) saveAgain() {
	b.saveMu.Lock()
	defer b.saveMu.Unlock()
	if b.failed {
		b.save(b.get())
	}
}

// took notes the time of a step of the first start.
func (b *board) took(name string, d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state.Boots == 0 {
		b.state.Steps = append(slices.Clip(b.state.Steps), Step{Name: name, Took: d})
	}
}

// writeJSON replaces path atomically, 0600.
func writeJSON(path string, v any, durable bool) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", path, err)
	}
	data = append(data, '\n')
	if durable {
		return fsx.WriteFile(path, data, 0o600)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, path)
}

// ReadSpec reads a job directory's spec.json.
func ReadSpec(dir string) (Spec, error) {
	var s Spec
	err := readJSON(filepath.Join(dir, SpecFile), &s)
	return s, err
}

// ReadState reads a job directory's state.json, which is as old as the last
// change of phase.
func ReadState(dir string) (State, error) {
	var s State
	err := readJSON(filepath.Join(dir, StateFile), &s)
	return s, err
}

// jsonMax is the largest of a job directory's JSON files, in bytes; egress.json
// with its bounds is the largest of ours.
const jsonMax = 64 << 20

func readJSON(path string, v any) error {
	data, err := fsx.ReadFile(path, jsonMax)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

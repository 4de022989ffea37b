package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// StateFile is below the node's directory.
const StateFile = "state.json"

// FallbackFile, below the node's directory, is the egress layer of the desired
// state that was applied last (policy.HubEgress): what holds the jobs of the
// node's own gitlab-runner. No file: there is none. Executors read it, so it is
// made of the state and never read here.
const FallbackFile = "egress-fallback.json"

// stateVersion is of the file's format. Fields are only added; another number
// is a state that this vk must not guess at.
const stateVersion = 1

// State is what a node keeps, whole. The zero value is a node that was never
// steered.
type State struct {
	Version int           `json:"version"`
	Hub     string        `json:"hub,omitempty"` // what the rest was kept for
	NodeID  string        `json:"node,omitempty"`
	Applied *wire.Applied `json:"applied,omitempty"`

	Node wire.NodeState `json:"state"`
	// WasDrained is where a release returns a quarantined node to.
	WasDrained bool `json:"was_drained,omitempty"`
	// Maintenance is the update or reset that is under way, from its drain on.
	Maintenance *Maintenance `json:"maintenance,omitempty"`

	LastCommand string  `json:"last_command,omitempty"`
	Journal     []Entry `json:"journal,omitempty"` // in the order of receipt
	// Dropped are the latest times of issue and expiry of entries that were
	// dropped: no command that old is carried out any more.
	DroppedIssued  int64 `json:"dropped_issued,omitempty"`
	DroppedExpires int64 `json:"dropped_expires,omitempty"`
}

// Maintenance is what a node does between draining and its return.
type Maintenance struct {
	Command string  `json:"command"`
	Op      wire.Op `json:"op"`
	// Drained says that the node returns to drained.
	Drained bool `json:"drained,omitempty"`
	// Quarantine came meanwhile; it is entered at the end.
	Quarantine bool `json:"quarantine,omitempty"`
}

// Store is the State on disk. Every change is durable before its method
// returns; after a write that failed the old state holds, in memory too.
// Methods may be called from several goroutines.
type Store struct {
	path        string
	beforeWrite func() // set by tests

	mu      sync.Mutex
	state   State
	said    string        // the conflict that is reported
	changed chan struct{} // closed and replaced at each change
}

// OpenStore reads the state below dir for an enrollment. A state that was kept
// for another hub or enrollment forgets the applied generation and the journal,
// and keeps the node's own state: generations and commands count for one hub
// and one enrollment.
func OpenStore(dir string, e *Enrollment) (*Store, error) {
	s := &Store{path: filepath.Join(dir, StateFile), changed: make(chan struct{})}
	st, err := readState(s.path)
	if err != nil {
		return nil, err
	}
	if st.Hub != e.Hub || st.NodeID != e.Node {
		st = State{Version: stateVersion, Hub: e.Hub, NodeID: e.Node, Node: st.Node, WasDrained: st.WasDrained}
		switch st.Node {
		case "":
			st.Node = wire.Ready
		case wire.Maintenance, wire.Validating: // of a command that nobody knows any more
			st.Node = wire.Draining
		}
		if err := s.write(st); err != nil {
			return nil, err
		}
	}
	s.state = st
	// After a crash it may be that of a state that was not written.
	return s, s.writeFallback(st.Policy())
}

// writeFallback brings FallbackFile up to date. What is in it is the hub's and is
// not looked at: where it makes no sense, jobs are to fail rather than run free.
func (s *Store) writeFallback(p wire.Policy) error {
	path := filepath.Join(filepath.Dir(s.path), FallbackFile)
	if p.Layer == nil {
		switch err := os.Remove(path); {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return fmt.Errorf("removing the hub's egress rules: %w", err)
		}
		return fsx.SyncDir(filepath.Dir(path))
	}
	var b bytes.Buffer
	if err := json.Compact(&b, *p.Layer); err != nil {
		return fmt.Errorf("writing the hub's egress rules: %w", err)
	}
	if was, err := os.ReadFile(path); err == nil && bytes.Equal(was, b.Bytes()) {
		return nil
	}
	if err := fsx.WriteFile(path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("writing the hub's egress rules: %w", err)
	}
	return nil
}

func readState(path string) (State, error) {
	var st State
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{Version: stateVersion, Node: wire.Ready}, nil
	}
	if err != nil {
		return st, err
	}
	bad := func(why string) error {
		return fault.Newf(fault.System, "%s: %s", path, why).
			Hint("move it away to start without what the hub asked; a drain or quarantine of this node is then forgotten too")
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return st, bad(err.Error())
	}
	if st.Version != stateVersion {
		return st, bad(fmt.Sprintf("format %d, this vk reads format %d", st.Version, stateVersion))
	}
	if !slices.Contains(wire.NodeStates, st.Node) {
		return st, bad(fmt.Sprintf("state %q is not known", st.Node))
	}
	if (st.Node == wire.Maintenance || st.Node == wire.Validating) && st.Maintenance == nil {
		return st, bad(fmt.Sprintf("state %s without what it is for", st.Node))
	}
	return st, nil
}

func (s *Store) write(st State) error {
	b, err := json.MarshalIndent(st, "", "\t")
	if err != nil {
		return err
	}
	if s.beforeWrite != nil {
		s.beforeWrite()
	}
	if err := fsx.WriteFile(s.path, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("writing the node's state: %w", err)
	}
	return nil
}

// update is how the state changes: fn works on a copy, which is written and
// then taken unless fn says that nothing changed. It must not keep what it is
// given.
func (s *Store) update(fn func(*State) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.state.clone()
	if !fn(&next) {
		return nil
	}
	if next.Applied != nil && (s.state.Applied == nil || next.Applied.ID != s.state.Applied.ID || next.Applied.Generation != s.state.Applied.Generation) {
		// Before it is said to be applied.
		if err := s.writeFallback(next.Policy()); err != nil {
			return err
		}
	}
	if err := s.write(next); err != nil {
		return err
	}
	s.state = next
	s.notifyLocked()
	return nil
}

func (s *Store) notifyLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Changed is closed at the next change.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// State is a copy of the state.
func (s *Store) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.clone()
}

// Conflict is why the hub's desired state was not applied, "" when it was, or
// when this session brought none.
func (s *Store) Conflict() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.said
}

// setConflict is not persisted: the hub says the same again in each session.
func (s *Store) setConflict(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.said != text {
		s.said = text
		s.notifyLocked()
	}
}

func (st State) clone() State {
	st.Journal = slices.Clone(st.Journal)
	if st.Applied != nil {
		a := *st.Applied
		st.Applied = &a
	}
	if st.Maintenance != nil {
		m := *st.Maintenance
		st.Maintenance = &m
	}
	return st
}

// Policy is what the hub asks as last applied.
func (st State) Policy() wire.Policy {
	if st.Applied == nil {
		return wire.Policy{}
	}
	return st.Applied.Policy
}

// MayTake says whether the node may take new jobs.
func (st State) MayTake() bool { return st.Node == wire.Ready && !st.Policy().Stop }

// Quarantining says whether a quarantine is in force, entered or not.
func (st State) Quarantining() bool {
	return st.Node == wire.Quarantined || st.Maintenance != nil && st.Maintenance.Quarantine
}

// Apply takes a desired state. changed says whether it was newer; another
// state of a generation that is not newer is a conflict, and is not applied.
func (s *Store) Apply(d *wire.Desired) (changed bool, err error) {
	conflict := ""
	err = s.update(func(st *State) bool {
		if a := st.Applied; a != nil && d.Generation <= a.Generation {
			switch {
			case d.Generation < a.Generation:
				conflict = fmt.Sprintf("the hub sent generation %d, the node has applied %d", d.Generation, a.Generation)
			case d.ID != a.ID && d.ID != "" && a.ID != "" || !samePolicy(d.Policy, a.Policy):
				conflict = fmt.Sprintf("the hub sent another generation %d than the node has applied", d.Generation)
			}
			return false
		}
		st.Applied = &wire.Applied{Generation: d.Generation, ID: d.ID, Policy: d.Policy}
		changed = true
		return true
	})
	if err != nil {
		return false, err
	}
	if changed || conflict != "" {
		s.setConflict(conflict)
	}
	return changed, nil
}

// Drained notes that everything a drain waits for was seen to be over.
func (s *Store) Drained() error {
	return s.update(func(st *State) bool {
		if st.Node != wire.Draining {
			return false
		}
		st.DrainOver()
		return true
	})
}

func samePolicy(a, b wire.Policy) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

package wire

import (
	"errors"
	"fmt"
)

// Report is a node's observed state: its VMs and, from version 2, its own.
type Report struct {
	Workloads []Workload `json:"vms"`
	Omitted   int        `json:"vms_omitted,omitempty"` // entries left out by BoundWorkloads
	State     *State     `json:"state,omitempty" since:"2"`
}

// Check is Message's.
func (m *Report) Check() error {
	if m.Omitted < 0 {
		return errors.New("vms_omitted is negative")
	}
	if m.State == nil {
		return nil
	}
	return m.State.check()
}

// NodeState is where a node is in its life.
type NodeState string

// Node states.
const (
	Ready       NodeState = "ready"
	Draining    NodeState = "draining"
	Drained     NodeState = "drained"
	Maintenance NodeState = "maintenance"
	Validating  NodeState = "validating"
	Quarantined NodeState = "quarantined"
)

// NodeStates are all of them.
var NodeStates = []NodeState{Ready, Draining, Drained, Maintenance, Validating, Quarantined}

// Acquisition says whether a node takes jobs.
type Acquisition string

// Acquisitions.
const (
	Taking   Acquisition = "taking"
	Quitting Acquisition = "quitting" // told to stop; the runner has not exited
	Stopped  Acquisition = "stopped"
)

// RunnerMode is who runs gitlab-runner.
type RunnerMode string

// Runner modes. Below version 5 RunnerNone is sent as RunnerExternal, which an
// older hub steers the more cautious way.
const (
	RunnerManaged  RunnerMode = "managed"
	RunnerExternal RunnerMode = "external"
	RunnerNone     RunnerMode = "none"
)

// State is a node's state as it persists it, and what it does about it.
type State struct {
	Node        NodeState   `json:"node"`
	Applied     *Applied    `json:"applied,omitempty"` // nil: no desired state was ever applied
	Acquisition Acquisition `json:"acquisition"`
	Runner      RunnerMode  `json:"runner"`
	// LastCommand is the command that this enrollment journaled last, kept when
	// its entry is not. A hub that has no record of it was restored from a
	// backup that is older.
	LastCommand string       `json:"last_command,omitempty"`
	Unsupported []string     `json:"unsupported,omitempty"` // what was asked and cannot be carried out
	Concurrency *Concurrency `json:"concurrency,omitempty"`
	Drain       *Drain       `json:"drain,omitempty"` // while draining
	Conflict    string       `json:"conflict,omitempty" max:"2048"`
	Update      *Progress    `json:"update,omitempty"` // the last one
	Reset       *Progress    `json:"reset,omitempty"`  // the last one
	Placed      *Placed      `json:"placed,omitempty" since:"3"`
	Tools       *Progress    `json:"tools,omitempty" since:"4"` // the last build
}

// Applied is the desired state that a node last applied, in full: a hub that
// was restored from a backup learns from it what it has forgotten.
type Applied struct {
	Generation uint64 `json:"generation"`
	ID         string `json:"id,omitempty"`
	Policy     Policy `json:"policy"`
}

// Concurrency is how the number of a runner's jobs came about. 0 = no such term.
type Concurrency struct {
	Estimate     int    `json:"estimate,omitempty"`
	HubCeiling   int    `json:"hub_ceiling,omitempty"`
	LocalCeiling int    `json:"local_ceiling,omitempty"`
	Effective    int    `json:"effective,omitempty"`
	Error        string `json:"concurrency_error,omitempty" max:"2048"` // why it cannot be set
}

// Drain says which of its conditions hold.
type Drain struct {
	RunnerExited  bool `json:"runner_exited"`  // or there is none to wait for
	AdmissionIdle bool `json:"admission_idle"` // the ledger holds and awaits nothing
	Jobs          int  `json:"jobs"`           // left, placed ones included
}

// Progress is an update, a reset or a tools build.
type Progress struct {
	Command string `json:"command,omitempty"`
	Target  string `json:"target,omitempty"` // sha256
	Phase   Phase  `json:"phase"`
	Reason  string `json:"reason,omitempty" max:"2048"`
	Output  string `json:"output,omitempty" max:"8192" lines:"keep"` // the last lines of a failed build
}

// Phase is how far it got. The ones of an update: draining, downloading,
// validating, then done, rolled_back or failed; of a reset: draining, clearing,
// validating, then done or failed; of tools: downloading, building, installing,
// then done or failed.
type Phase string

// Phases.
const (
	PhaseDraining    Phase = "draining"
	PhaseDownloading Phase = "downloading"
	PhaseValidating  Phase = "validating"
	PhaseClearing    Phase = "clearing"
	PhaseBuilding    Phase = "building"
	PhaseInstalling  Phase = "installing"
	PhaseDone        Phase = "done"
	PhaseRolledBack  Phase = "rolled_back"
	PhaseFailed      Phase = "failed"
)

// Placed is what a node says of the jobs that a hub places.
type Placed struct {
	Runner              string `json:"runner,omitempty" max:"2048"` // the runner of its own that makes it refuse them
	Limit               int    `json:"limit,omitempty"`             // its own max_concurrency
	ImageCacheIdleSecs  int64  `json:"image_cache_idle_secs,omitempty"`
	Jobs                int    `json:"jobs,omitempty"`
	ReservationsPending int    `json:"reservations,omitempty"`
}

func (s *State) check() error {
	err := optHex("last_command", s.LastCommand, IDLen)
	if !oneOf(s.Node, NodeStates...) {
		err = errors.Join(err, fmt.Errorf("node state %q is not known", s.Node))
	}
	if !oneOf(s.Acquisition, Taking, Quitting, Stopped) {
		err = errors.Join(err, fmt.Errorf("acquisition %q is not known", s.Acquisition))
	}
	if !oneOf(s.Runner, RunnerManaged, RunnerExternal, RunnerNone) {
		err = errors.Join(err, fmt.Errorf("runner mode %q is not known", s.Runner))
	}
	if a := s.Applied; a != nil {
		err = errors.Join(err, optHex("applied.id", a.ID, IDLen), a.Policy.Check())
		if a.Generation == 0 || a.Generation > 1<<53 {
			err = errors.Join(err, fmt.Errorf("applied generation %d is out of range", a.Generation))
		}
	}
	for _, p := range []*Progress{s.Update, s.Reset, s.Tools} {
		if p != nil {
			err = errors.Join(err, optHex("progress command", p.Command, IDLen), optHex("progress target", p.Target, DigestLen))
		}
	}
	return err
}

func oneOf[T comparable](v T, all ...T) bool {
	for _, a := range all {
		if a == v {
			return true
		}
	}
	return false
}

package wire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
)

// The messages of placed jobs, from version 3. They are declared here so that
// their names and fields are fixed; hubs and nodes that negotiate no more than
// VersionSteer never see one. Spec: gitlab-dispatch.

// Envelope is what a placed job may use.
type Envelope struct {
	Memory int64 `json:"mem_bytes"`
	CPUs   int   `json:"cpus"`
	Disk   int64 `json:"disk_bytes,omitempty"`
}

func (e Envelope) check() error {
	if e.Memory < 0 || e.CPUs < 0 || e.Disk < 0 {
		return errors.New("the envelope has a negative size")
	}
	return nil
}

// Offer asks a node to set an envelope aside.
type Offer struct {
	Reservation string   `json:"reservation"`
	Envelope    Envelope `json:"envelope"`
	LeaseSecs   int      `json:"lease_secs"`
}

// Check is Message's.
func (m *Offer) Check() error {
	return errors.Join(checkHex("reservation", m.Reservation, IDLen), m.Envelope.check(), checkLease(m.LeaseSecs))
}

// Renew extends a lease from now.
type Renew struct {
	Reservation string `json:"reservation"`
	LeaseSecs   int    `json:"lease_secs"`
}

// Check is Message's.
func (m *Renew) Check() error {
	return errors.Join(checkHex("reservation", m.Reservation, IDLen), checkLease(m.LeaseSecs))
}

func checkLease(n int) error {
	if n <= 0 {
		return fmt.Errorf("a lease of %d seconds", n)
	}
	return nil
}

// GiveBack ends a reservation ("release" on the wire).
type GiveBack struct {
	Reservation string `json:"reservation"`
}

// Check is Message's.
func (m *GiveBack) Check() error { return checkHex("reservation", m.Reservation, IDLen) }

// Start runs a job.
type Start struct {
	Job         string          `json:"job"`
	Reservation string          `json:"reservation,omitempty"`
	Envelope    Envelope        `json:"envelope"`
	Spec        json.RawMessage `json:"spec"`
	Egress      *EgressRule     `json:"egress,omitempty"`       // reserved, as the next: Layer has both
	EgressNames []string        `json:"egress_names,omitempty"` // of the rules that made it
	// Layer is what the hub's egress rules make for this job, a
	// policy.HubEgress, which the node reads strictly: a layer that it cannot
	// read is one that it cannot enforce. Absent, no rule holds the job.
	Layer json.RawMessage `json:"egress_layer,omitempty" since:"3"`
}

// MaxLayer is how many bytes a Layer has at most.
const MaxLayer = 256 << 10

// Check is Message's.
func (m *Start) Check() error {
	err := errors.Join(checkHex("job", m.Job, IDLen), optHex("reservation", m.Reservation, IDLen), m.Envelope.check())
	if len(m.Spec) == 0 {
		err = errors.Join(err, errors.New("spec is missing"))
	}
	if len(m.Layer) > MaxLayer {
		err = errors.Join(err, fmt.Errorf("egress_layer has %d bytes, at most %d are allowed", len(m.Layer), MaxLayer))
	}
	return err
}

// OutputAck says how much of a job's output is stored durably.
type OutputAck struct {
	Job    string `json:"job"`
	Offset int64  `json:"offset"`
}

// Check is Message's.
func (m *OutputAck) Check() error {
	return errors.Join(checkHex("job", m.Job, IDLen), checkOffset(m.Offset))
}

func checkOffset(n int64) error {
	if n < 0 || n > 1<<53 {
		return fmt.Errorf("offset %d is out of range", n)
	}
	return nil
}

// CancelMode is how a job is stopped.
type CancelMode string

// Cancel modes.
const (
	CancelGraceful  CancelMode = "graceful"
	CancelImmediate CancelMode = "immediate"
)

// Cancel stops a job.
type Cancel struct {
	Job  string     `json:"job"`
	Mode CancelMode `json:"mode"`
}

// Check is Message's.
func (m *Cancel) Check() error {
	return errors.Join(checkHex("job", m.Job, IDLen), needText("mode", string(m.Mode)))
}

// JobRecorded says that a job's result is stored.
type JobRecorded struct {
	Job string `json:"job"`
}

// Check is Message's.
func (m *JobRecorded) Check() error { return checkHex("job", m.Job, IDLen) }

// IDs is a list that is never cut.
type IDs []string

// Held is everything that a node holds, once a session after its report.
type Held struct {
	Reservations IDs `json:"reservations"`
	Jobs         IDs `json:"jobs"`
}

// Check is Message's.
func (m *Held) Check() error {
	for _, l := range []IDs{m.Reservations, m.Jobs} {
		for _, id := range l {
			if err := checkHex("what is held", id, IDLen); err != nil {
				return err
			}
		}
	}
	return nil
}

// OfferReply answers an Offer.
type OfferReply struct {
	Reservation string `json:"reservation"`
	Reply       Answer `json:"reply"`
}

// Answer accepts or refuses.
type Answer struct {
	State     string `json:"state"` // accepted, refused
	LeaseSecs int    `json:"lease_secs,omitempty"`
	// Reason: memory, disk, cpus, not_ready, policy, no_reservation, invalid,
	// ceiling, concurrency, runner; one that is not known reads as other.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty" max:"2048"`
}

// Check is Message's.
func (m *OfferReply) Check() error {
	return errors.Join(checkHex("reservation", m.Reservation, IDLen), needText("reply.state", m.Reply.State))
}

// Lease tells what became of a reservation.
type Lease struct {
	Reservation string     `json:"reservation"`
	State       LeaseState `json:"state"`
}

// LeaseState is held for so long, or gone and why: expired, released, started,
// unknown.
type LeaseState struct {
	State         string `json:"state"` // held, gone
	RemainingSecs int    `json:"remaining_secs,omitempty"`
	Why           string `json:"why,omitempty"`
}

// Check is Message's.
func (m *Lease) Check() error {
	return errors.Join(checkHex("reservation", m.Reservation, IDLen), needText("state.state", m.State.State))
}

// JobState tells where a job is.
type JobState struct {
	Job   string     `json:"job"`
	State StateOfJob `json:"state"`
}

// StateOfJob is accepted, refused, running or finished, with what belongs to it.
type StateOfJob struct {
	State    string     `json:"state"`
	Reason   string     `json:"reason,omitempty"`
	Message  string     `json:"message,omitempty" max:"2048"`
	Stage    string     `json:"stage,omitempty"`
	Activity string     `json:"activity,omitempty"`
	Guest    *GuestSize `json:"guest,omitempty"`
}

// GuestSize is a job's VM, once prepare has sized it.
type GuestSize struct {
	CPUs   int   `json:"cpus"`
	MemMiB int64 `json:"mem_mib"`
}

// Check is Message's.
func (m *JobState) Check() error {
	return errors.Join(checkHex("job", m.Job, IDLen), needText("state.state", m.State.State))
}

// Output is a piece of a job's output.
type Output struct {
	Job    string `json:"job"`
	Offset int64  `json:"offset"`
	Data   string `json:"data" raw:"base64"` // at most MaxOutput bytes
}

// Check is Message's.
func (m *Output) Check() error {
	err := errors.Join(checkHex("job", m.Job, IDLen), checkOffset(m.Offset))
	if n := len(m.Data); n > base64.StdEncoding.EncodedLen(MaxOutput) {
		return errors.Join(err, fmt.Errorf("%d bytes of base64 are more than a chunk of %d bytes", n, MaxOutput))
	}
	if _, e := base64.StdEncoding.Strict().DecodeString(m.Data); e != nil {
		err = errors.Join(err, errors.New("data is not base64"))
	}
	return err
}

// Result tells how a job ended; repeated until it is recorded.
type Result struct {
	Job    string    `json:"job"`
	Result JobResult `json:"result"`
}

// JobResult is how a job ended. Failure "" is success; see gitlab-dispatch for
// the words.
type JobResult struct {
	Failure   string           `json:"failure,omitempty"`
	ExitCode  *int             `json:"exit_code,omitempty"`
	Message   string           `json:"message,omitempty" max:"2048"`
	OutputLen int64            `json:"output_len"`
	Artifacts []ArtifactResult `json:"artifacts"`
	Usage     *JobUsage        `json:"usage,omitempty"`
	Egress    json.RawMessage  `json:"egress,omitempty"` // a policy.Report
	// Events are what the node saw go wrong on the machine while the job ran,
	// beside why it failed.
	Events []JobEvent `json:"events,omitempty" since:"3"`
}

// JobEvent is something that happened, once or more.
type JobEvent struct {
	Kind  string `json:"kind"`                       // such as oom_kill
	Count int64  `json:"count"`                      // how many times
	First string `json:"first,omitempty" max:"2048"` // the first of them, whole
	At    int64  `json:"at,omitempty"`               // of the first, Unix seconds of the node's clock
}

// ArtifactResult is an upload's outcome: uploaded, skipped, too_large, failed.
type ArtifactResult struct {
	Name    string `json:"name,omitempty"`
	Outcome string `json:"outcome"`
}

// JobUsage is what a job used on its node.
type JobUsage struct {
	WallMS  int64  `json:"wall_ms"`
	CPUMS   *int64 `json:"cpu_ms,omitempty"`
	PeakMem *int64 `json:"peak_mem_bytes,omitempty"`
	CPUs    int    `json:"cpus,omitempty"`
	MemMiB  int64  `json:"mem_mib,omitempty"`
}

// Check is Message's.
func (m *Result) Check() error {
	return errors.Join(checkHex("job", m.Job, IDLen), checkOffset(m.Result.OutputLen))
}

// EgressReport is a running job's egress so far, cumulative; the highest
// revision stands.
type EgressReport struct {
	Job    string          `json:"job"`
	Report json.RawMessage `json:"report"`
}

// Check is Message's.
func (m *EgressReport) Check() error {
	err := checkHex("job", m.Job, IDLen)
	if len(m.Report) == 0 {
		err = errors.Join(err, errors.New("report is missing"))
	}
	return err
}

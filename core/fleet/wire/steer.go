package wire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
)

// Policy is what a hub asks of a node for as long as it holds. The zero Policy
// asks nothing.
type Policy struct {
	Ceiling int         `json:"ceiling,omitempty"`          // of the runner's concurrency or of placed jobs; 0 = none
	Stop    bool        `json:"stop,omitempty"`             // take no new jobs
	Egress  *EgressRule `json:"egress,omitempty" since:"3"` // reserved: Layer has more
	// Layer is what the hub's egress rules make for the jobs of the node's own
	// gitlab-runner, a policy.HubEgress of at most MaxLayer bytes; nil when there is
	// none. For nodes with FeatureEgressFallback.
	Layer *json.RawMessage `json:"egress_layer,omitempty" since:"3"`
}

// EgressRule is a list each of names and networks for a phase; nil is
// unrestricted, an empty one denies.
type EgressRule struct {
	Run   *EgressLists `json:"run,omitempty"`
	Build *EgressLists `json:"build,omitempty"`
}

// EgressLists are the two dimensions of a phase.
type EgressLists struct {
	Names []string `json:"names"` // DNS suffixes
	IPs   []string `json:"ips"`   // CIDR, or CIDR:port
}

// Check says what is wrong with a policy.
func (p Policy) Check() error {
	if p.Ceiling < 0 || p.Ceiling > 1<<20 {
		return fmt.Errorf("ceiling %d is not between 1 and %d", p.Ceiling, 1<<20)
	}
	if p.Layer != nil && len(*p.Layer) > MaxLayer {
		return fmt.Errorf("egress_layer has %d bytes, at most %d are allowed", len(*p.Layer), MaxLayer)
	}
	if p.Egress == nil {
		return nil
	}
	for _, l := range []*EgressLists{p.Egress.Run, p.Egress.Build} {
		if l != nil && (len(l.Names) > MaxEgressList || len(l.IPs) > MaxEgressList) {
			return fmt.Errorf("a list of egress rules has more than %d entries", MaxEgressList)
		}
	}
	return nil
}

// Desired is the desired state of one node, as of a generation. It is sent
// when the node's report shows an older one, once per generation and session.
type Desired struct {
	Generation uint64 `json:"generation"`
	// ID is drawn anew for each generation. It tells two states of the same
	// generation apart, which a hub restored from a backup can make.
	ID     string `json:"id,omitempty"`
	Policy Policy `json:"policy"`
}

// Check is Message's.
func (m *Desired) Check() error {
	err := errors.Join(optHex("id", m.ID, IDLen), m.Policy.Check())
	if m.Generation == 0 || m.Generation > 1<<53 {
		err = errors.Join(err, fmt.Errorf("generation %d is out of range", m.Generation))
	}
	return err
}

// Op is what a command does.
type Op string

// Ops. Restart and redeploy are reserved names.
const (
	OpDrain      Op = "drain"
	OpUndrain    Op = "undrain"
	OpQuarantine Op = "quarantine"
	OpRelease    Op = "release" // lifts a quarantine
	OpUpdate     Op = "update"  // Command.Update
	OpReset      Op = "reset"   // Command.Reset
	OpTools      Op = "tools"   // Command.Tools, from version 4
)

// Since is the first version that carries the op; 0 when it is not known.
func (o Op) Since() int {
	switch o {
	case OpDrain, OpUndrain, OpQuarantine, OpRelease, OpUpdate, OpReset:
		return VersionSteer
	case OpTools:
		return VersionTools
	}
	return 0
}

// Command is an operation with an identity. It is delivered once per session
// until it has a final outcome, and carried out once.
type Command struct {
	ID      string      `json:"id"`
	Op      Op          `json:"op"`
	Issued  int64       `json:"issued_at,omitempty"` // by the hub's clock
	Expires int64       `json:"expires_at"`          // by the hub's clock
	Sent    int64       `json:"sent_at,omitempty"`   // the hub's clock at this delivery
	Update  *UpdateSpec `json:"update,omitempty"`
	Reset   *ResetSpec  `json:"reset,omitempty"`
	Tools   *ToolsSpec  `json:"tools,omitempty" since:"4"`
}

// UpdateSpec names the release that a node is to run.
type UpdateSpec struct {
	SHA256     string `json:"sha256"`
	Size       int64  `json:"size"`
	Version    string `json:"version,omitempty"`
	Signature  string `json:"signature,omitempty"` // a release key's, base64
	Force      bool   `json:"force,omitempty"`
	WithinSecs int64  `json:"within_secs,omitempty"` // from the end of the drain
}

// ResetSpec says what a reset spares.
type ResetSpec struct {
	KeepImages bool `json:"keep_images,omitempty"`
}

// ToolsSpec names a tools definition.
type ToolsSpec struct {
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// Check is Message's. An op that is not known is no error here: the node
// refuses it in its ack.
func (m *Command) Check() error {
	err := errors.Join(checkHex("id", m.ID, IDLen), needText("op", string(m.Op)))
	if m.Expires <= 0 || m.Issued < 0 || m.Sent < 0 {
		err = errors.Join(err, errors.New("the command has no expiry, or was issued or sent before 1970"))
	}
	switch {
	case m.Op == OpUpdate && m.Update == nil, m.Op == OpReset && m.Reset == nil, m.Op == OpTools && m.Tools == nil:
		err = errors.Join(err, fmt.Errorf("%s without its %s", m.Op, m.Op))
	}
	if u := m.Update; u != nil {
		err = errors.Join(err, checkHex("update.sha256", u.SHA256, DigestLen), checkSize("update.size", u.Size))
		if b, e := base64.StdEncoding.Strict().DecodeString(u.Signature); u.Signature != "" && (e != nil || len(b) != SignatureLen) {
			err = errors.Join(err, errors.New("update.signature is not an ed25519 signature in base64"))
		}
		if u.WithinSecs < 0 {
			err = errors.Join(err, errors.New("update.within_secs is negative"))
		}
	}
	if t := m.Tools; t != nil {
		err = errors.Join(err, checkHex("tools.sha256", t.SHA256, DigestLen), checkSize("tools.size", t.Size))
	}
	return err
}

func checkSize(field string, n int64) error {
	if n <= 0 || n > 1<<40 {
		return fmt.Errorf("%s %d is out of range", field, n)
	}
	return nil
}

// Outcome is what became of a command.
type Outcome string

// Outcomes. Accepted alone is not final.
const (
	Accepted Outcome = "accepted"
	Done     Outcome = "done"
	Failed   Outcome = "failed"
	Declined Outcome = "refused" // the node cannot or may not
	Expired  Outcome = "expired"
)

// Final says whether nothing more will become of the command.
func (o Outcome) Final() bool { return o == Done || o == Failed || o == Declined || o == Expired }

// Ack is a command's outcome as the node's journal has it. It answers each
// delivery, and is repeated at the start of every session until it is recorded.
type Ack struct {
	Command string  `json:"command"`
	Outcome Outcome `json:"outcome"`
	Message string  `json:"message,omitempty" max:"2048"` // why it failed or was refused
}

// Check is Message's.
func (m *Ack) Check() error {
	err := checkHex("command", m.Command, IDLen)
	if m.Outcome != Accepted && !m.Outcome.Final() {
		err = errors.Join(err, fmt.Errorf("outcome %q is not known", m.Outcome))
	}
	return err
}

// Recorded says that the hub has stored an outcome, durably, or does not know
// the command and wants to hear no more of it.
type Recorded struct {
	Command string  `json:"command"`
	Outcome Outcome `json:"outcome"`
}

// Check is Message's.
func (m *Recorded) Check() error {
	return errors.Join(checkHex("command", m.Command, IDLen), needText("outcome", string(m.Outcome)))
}

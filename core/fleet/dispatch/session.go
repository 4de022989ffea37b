package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"

	"virtkit/core/fleet/wire"
)

// Versions of the relay's session that this build speaks, on either side.
var Versions = wire.Range{Min: 1, Max: 1}

// Side is one end of a relay's session.
type Side string

// Sides.
const (
	FromRelay Side = "relay"
	FromHub   Side = "hub"
)

// Message is one of a relay's session, after its handshake.
type Message interface {
	Check() error
}

// Inventory is what a relay is, sent first and whenever it changes.
type Inventory struct {
	Version       string   `json:"version"` // of vk-gitlab
	Hostname      string   `json:"hostname"`
	SystemID      string   `json:"system_id"`
	Concurrent    int      `json:"concurrent"` // jobs at most; 0 = no limit
	ServerURL     string   `json:"server_url"`
	ServerKey     string   `json:"server_key_sha256,omitempty"` // of its certificate's public key (SPKI); "" for plain http
	ServerVersion string   `json:"server_version,omitempty"`
	Runners       []Runner `json:"runners"`
}

// Runner is one of a relay's.
type Runner struct {
	Name      string    `json:"name"`
	ID        int64     `json:"id,omitempty"` // GitLab's, once verified
	Placement Placement `json:"placement"`
	Limit     int       `json:"limit,omitempty"` // jobs at most; 0 = no limit
	Verified  bool      `json:"verified"`        // GitLab took its token
}

// Check says what is wrong with the message. Texts are the hub's to clean.
func (m *Inventory) Check() error {
	if len(m.Runners) > MaxRunners {
		return fmt.Errorf("%d runners are more than %d", len(m.Runners), MaxRunners)
	}
	if m.ServerKey != "" && !wire.IsHex(m.ServerKey, wire.DigestLen) {
		return errors.New("server_key_sha256 is no sha256")
	}
	_, err := ServerURL(m.ServerURL)
	return err
}

// Heartbeat is how a relay's runners are, each interval.
type Heartbeat struct {
	Runners []RunnerBeat `json:"runners"`
}

// RunnerBeat is one runner's.
type RunnerBeat struct {
	Name       string `json:"name"`
	Requests   int    `json:"requests"` // job requests outstanding
	Jobs       int    `json:"jobs"`     // held
	LastStatus int    `json:"last_status,omitempty"`
	LastAt     int64  `json:"last_at,omitempty"` // of GitLab's last answer to a job request
}

// Check says what is wrong with the message.
func (m *Heartbeat) Check() error {
	if len(m.Runners) > MaxRunners {
		return fmt.Errorf("%d runners are more than %d", len(m.Runners), MaxRunners)
	}
	return nil
}

// RunnerStateName is what a runner does.
type RunnerStateName string

// States of a runner.
const (
	Polling         RunnerStateName = "polling"
	WaitingCapacity RunnerStateName = "waiting_capacity"
	ServerPending   RunnerStateName = "server_pending"
	Unhealthy       RunnerStateName = "unhealthy"
	TokenRefused    RunnerStateName = "token_refused"
)

// RunnerState tells that a runner's has changed.
type RunnerState struct {
	Runner  string          `json:"runner"`
	State   RunnerStateName `json:"state"`
	Message string          `json:"message,omitempty"`
}

// Check says what is wrong with the message.
func (m *RunnerState) Check() error {
	if m.Runner == "" || m.State == "" {
		return errors.New("runner or state is missing")
	}
	return nil
}

// Approval is how a hub holds a relay's GitLab server.
type Approval string

// Approvals. One that is not known reads as Pending.
const (
	Approved Approval = "approved"
	Pending  Approval = "pending"
	Rejected Approval = "rejected"
	Rebound  Approval = "rebound" // the relay is bound to another server than it reports
)

// ServerStatus tells a relay how the hub holds its server. Runners ask GitLab
// for jobs only while it is Approved.
type ServerStatus struct {
	Status  Approval `json:"status"`
	Name    string   `json:"name,omitempty"`    // of the instance, once approved
	Bound   string   `json:"bound,omitempty"`   // URL that the relay is bound to
	Message string   `json:"message,omitempty"` // what an operator has to do
}

// Check says what is wrong with the message.
func (m *ServerStatus) Check() error {
	if m.Status == "" {
		return errors.New("status is missing")
	}
	return nil
}

// Ping is the hub's sign of life, each interval.
type Ping struct{}

// Check is Message's.
func (m *Ping) Check() error { return nil }

// Closing is the hub's last message of a session.
type Closing wire.Closing

// Check is Message's.
func (m *Closing) Check() error { return (*wire.Closing)(m).Check() }

// Types are all messages: names are only ever added.
var Types = []struct {
	Name string
	From Side
	New  func() Message
}{
	{"inventory", FromRelay, func() Message { return new(Inventory) }},
	{"heartbeat", FromRelay, func() Message { return new(Heartbeat) }},
	{"runner", FromRelay, func() Message { return new(RunnerState) }},
	{"server", FromHub, func() Message { return new(ServerStatus) }},
	{"ping", FromHub, func() Message { return new(Ping) }},
	{"closing", FromHub, func() Message { return new(Closing) }},
}

// Encode writes a message as one flat object with its "type".
func Encode(m Message) ([]byte, error) {
	for _, t := range Types {
		if fmt.Sprintf("%T", t.New()) != fmt.Sprintf("%T", m) {
			continue
		}
		if err := m.Check(); err != nil {
			return nil, fmt.Errorf("%s: %w", t.Name, err)
		}
		body, err := json.Marshal(m)
		if err != nil {
			return nil, err
		}
		out := append([]byte(`{"type":"`+t.Name+`"`), body[1:]...)
		if len(body) > 2 {
			out = append([]byte(`{"type":"`+t.Name+`",`), body[1:]...)
		}
		if len(out) > wire.MaxMessage {
			return nil, fmt.Errorf("%s has %d bytes, at most %d are allowed", t.Name, len(out), wire.MaxMessage)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%T is no message of a relay's session", m)
}

// Decode reads a message that from sent. Errors wrap wire.ErrProtocol.
func Decode(from Side, data []byte) (Message, error) {
	if len(data) > wire.MaxMessage {
		return nil, fmt.Errorf("%w: a message of %d bytes, at most %d are allowed", wire.ErrProtocol, len(data), wire.MaxMessage)
	}
	var tag struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(data, &tag); err != nil {
		return nil, fmt.Errorf("%w: %w", wire.ErrProtocol, err)
	}
	for _, t := range Types {
		if t.Name != tag.Type || t.From != from {
			continue
		}
		m := t.New()
		if err := json.Unmarshal(data, m); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", wire.ErrProtocol, t.Name, err)
		}
		if err := m.Check(); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", wire.ErrProtocol, t.Name, err)
		}
		return m, nil
	}
	return nil, fmt.Errorf("%w: %s sent a message of type %q", wire.ErrProtocol, from, wire.Clean(tag.Type, 32))
}

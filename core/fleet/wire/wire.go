// Package wire is what a hub and its nodes say to each other.
//
// Transport: a WebSocket at /v1/node over TLS 1.3 that the node dials (plain
// text to a hub on loopback alone), one message of JSON a text frame, at most
// MaxMessage bytes. A message is one flat object whose "type" names it; those
// of placed jobs have the type "job" and a "kind". Fields that are not known
// are ignored, since fields are only ever added; a type that is not known, or
// is not of the session's version or direction, ends the session.
//
// A session opens with four messages, each within HandshakeStep:
//
//	node → hub  hello      who it is, its incarnation, the versions it speaks
//	hub → node  challenge  a nonce, the versions the hub speaks, the one it picked
//	node → hub  auth       the signature of AuthPayload, by the node's key
//	hub → node  welcome    the interval of heartbeats, the hub's clock
//
// or with refused instead of the last. The version is the highest that both
// speak; the node checks that before it signs. Then, in this order: the node
// sends its report, from version 2 the acks that the hub has not recorded, from
// version 3 what it holds, then its inventory and its heartbeats. The hub says
// nothing of its own before the first report, but a ping each interval, after a
// heartbeat or, when none comes, by itself; after
// it the desired state when the node's is older, and each command that has no
// final outcome, once a session. closing comes before the hub ends a session.
//
// Versions (see History for what each added): 1 monitoring, 2 steering, 3
// placed jobs, 4 tools builds, 5 a node without a runner, 6 egress reports of
// running jobs. Version 1 and enrollment at EnrollPath are frozen. A struct's
// field with a since tag is left out below that version, both when encoding
// and when decoding, so that a session is what its version says whatever the
// peer sends.
//
// Units: sizes are bytes, times of day are Unix seconds by the sender's clock,
// durations say their unit in their name. Identifiers, keys, nonces, digests
// and signatures are strict lowercase hex of a fixed length; a release key's
// signature alone is base64.
//
// Spec: fleet-reference (running the node, steering), fleet-design (hub ↔ node
// protocol), gitlab-dispatch (placed jobs).
package wire

import (
	"fmt"
	"time"
)

// Limits of the protocol.
const (
	MaxMessage    = 1 << 20          // bytes of one message, either way
	MaxList       = 64               // entries of an inventory's list; the rest is cut
	MaxText       = 256              // characters of a text that a node reports
	MaxReason     = 2048             // characters of a reason or message
	MaxEgressList = 256              // entries of a list of egress rules
	MaxOutput     = 256 << 10        // bytes of one chunk of a job's output
	HandshakeStep = 10 * time.Second // for each step of a handshake

	DefaultHeartbeat = 5 * time.Second
	MinHeartbeat     = 1 * time.Second
	MaxHeartbeat     = 300 * time.Second
	// MissedBeats is how many intervals of silence end a session, on either side.
	MissedBeats = 3
	// CommandValid is how long a command may wait for its node.
	CommandValid = 24 * time.Hour
	MaxLeaseSecs = 600
)

// Paths of the node listener.
const (
	SessionPath  = "/v1/node"
	EnrollPath   = "/v1/enroll"
	ReleasesPath = "/v1/releases/" // then the sha256
	ToolsPath    = "/v1/tools/"    // then the sha256
)

// Range is the protocol versions that one side speaks.
type Range struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

// What each version began.
const (
	VersionMonitor = 1
	VersionSteer   = 2
	VersionJobs    = 3
	VersionTools   = 4
	VersionNone    = 5
	VersionEgress  = 6
)

// Spoken is the versions that this build's hub and node have code for. A side
// may offer less: a node that does not carry out placed jobs yet offers up to
// VersionSteer.
var Spoken = Range{Min: VersionMonitor, Max: VersionEgress}

// Check says what is wrong with a range.
func (r Range) Check() error {
	if r.Min < 1 || r.Max < r.Min || r.Max > 1<<16 {
		return fmt.Errorf("versions %d to %d are no range", r.Min, r.Max)
	}
	return nil
}

// Has says whether v is in the range.
func (r Range) Has(v int) bool { return r.Min <= v && v <= r.Max }

func (r Range) String() string { return fmt.Sprintf("%d to %d", r.Min, r.Max) }

// Negotiate is the highest version that both sides speak. Both compute it: the
// hub to pick, the node to check before it signs.
func Negotiate(a, b Range) (version int, ok bool) {
	v := min(a.Max, b.Max)
	return v, v >= max(a.Min, b.Min)
}

// Revision counts the changes of the messages' fields. Each adds an entry to
// History; the lock file fails otherwise.
const Revision = 5

// Entry is one line of History.
type Entry struct {
	Revision int
	Date     string // when it was decided, ISO 8601
	Versions Range  // protocol versions that messages may have
	Text     string
}

// History says what a peer of some age understands. Append; never edit.
var History = []Entry{
	{1, "2026-11-30", Range{1, 6}, "The first: version 1 monitoring; 2 steering; 3 placed jobs, labels; 4 tools builds; 5 runner mode none; 6 egress reports of running jobs. Beyond the reference, as fields that may be absent: pressure, disk latency, jobs by stage, ids of desired states, a command's time of issue, the hub's id and clock."},
	{2, "2026-11-30", Range{1, 6}, "State.LastCommand: a hub that does not know it has been restored from an older backup."},
	{3, "2026-11-30", Range{1, 6}, "Start.Layer: the hub's egress rules for a job, for nodes with the feature egress_rules; Egress and EgressNames of a start, which no hub sent, are reserved. Inventory.Egress: the node's caps. JobResult.Events."},
	{4, "2026-12-01", Range{1, 6}, "Policy.Layer: the hub's egress rules for the jobs of a node's own gitlab-runner, for nodes with the feature egress_fallback; Policy.Egress, which no hub sent, is reserved."},
	{5, "2026-12-01", Range{1, 6}, "Command.Sent: the hub's clock as it sends a command. Its expiry holds when that clock was set during a session."},
}

// Clamp holds the interval that a hub asks for within MinHeartbeat and
// MaxHeartbeat.
func Clamp(secs int) time.Duration {
	return min(max(time.Duration(min(max(secs, 0), 1<<20))*time.Second, MinHeartbeat), MaxHeartbeat)
}

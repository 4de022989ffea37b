package hub

import (
	"context"
	"crypto/ed25519"
	"errors"

	"virtkit/core/fleet/wire"
)

// Limits of what is kept.
const (
	AuditKept    = 100_000        // newest audit lines
	SettledKept  = 30 * 24 * 3600 // seconds that a settled command is kept
	CommandsKept = 32             // newest commands of a node, however old
	MaxOpen      = 256            // commands of a node without a final outcome
	MaxTokens    = 1024           // unspent tokens
	MaxTokenTTL  = 30 * 24 * 3600 // seconds
	MaxPools     = 32             // of a node
)

// Errors that a Store's Apply wraps, so that the hub can say what is wrong.
// Nothing of the batch was stored; what an earlier Apply acknowledged is there.
var (
	ErrFull     = errors.New("hub: no space left for the database")
	ErrReadOnly = errors.New("hub: the database cannot be written")
	ErrBroken   = errors.New("hub: the database is damaged")
)

// Store keeps what must survive the hub. It has one writer, the Hub; reads may
// come from any goroutine. hubdb is the real one, hubtest.Memory a fake that
// passes the same suite.
type Store interface {
	// Load reads all that the hub holds in memory. It is called once, first.
	Load(ctx context.Context) (*Loaded, error)
	// Apply stores a batch whole or not at all. Once it returned nil, the batch
	// survives the end of this process; after a durable one, it and all batches
	// before it survive the loss of power. Not safe for concurrent use.
	Apply(ctx context.Context, b *Batch) error
	// Audit returns lines, oldest first.
	Audit(ctx context.Context, q AuditQuery) ([]AuditLine, error)
	// Workloads returns the list a node reported last, nil for none.
	Workloads(ctx context.Context, node string) (*Workloads, error)
	// Commands returns a node's newest commands, newest first, settled ones too.
	Commands(ctx context.Context, node string, limit int) ([]Command, error)
	// Command returns one; nil when it is not known (any more).
	Command(ctx context.Context, id string) (*Command, error)
	// Issued says whether the hub has a record of a desired state of that id
	// for the node.
	Issued(ctx context.Context, node, id string) (bool, error)

	JobStore
}

// Loaded is what a Store holds, but for audit lines, workloads, settled
// commands and past desired states.
type Loaded struct {
	Hub        string // id of the database, made with it
	Records    []*Record
	Heartbeats []Heartbeat
	Tokens     []Token
	Commands   []*Command // without a final outcome
	// LastIssued is when a node's newest command was issued, by the command
	// itself; Unix seconds, by node.
	LastIssued map[string]int64
	Revoked    []Revoked
	LastAudit  uint64 // Seq of the newest audit line, 0 = none

	LoadedJobs
	LoadedPeople
}

// Batch is one change of the store. Rows replace those of the same key.
type Batch struct {
	Durable bool

	Records    []*Record
	Removed    []string // nodes, with all that is theirs but the audit lines
	Revoked    []Revoked
	Heartbeats []Heartbeat
	Workloads  []Workloads
	Issued     []Issued
	Tokens     []Token
	DropTokens []string // by hash
	Commands   []*Command
	// SettledBefore removes commands settled before it (Unix seconds), but for
	// each node's newest CommandsKept, of which it may yet report one. 0 = none.
	SettledBefore int64
	Audit         []AuditLine // Seq is set by the hub; only AuditKept stay

	JobBatch
	PeopleBatch
}

// Empty says whether there is nothing to store.
func (b *Batch) Empty() bool {
	return len(b.Records)+len(b.Removed)+len(b.Revoked)+len(b.Heartbeats)+len(b.Workloads)+len(b.Issued)+
		len(b.Tokens)+len(b.DropTokens)+len(b.Commands)+len(b.Audit) == 0 && b.SettledBefore == 0 && b.JobBatch.Empty() && b.PeopleBatch.Empty()
}

// Record is what the hub knows of a node but for its readings. It is never
// changed once stored: a change makes a new one.
type Record struct {
	ID       string
	Key      ed25519.PublicKey
	Name     string // hostname
	Enrolled int64  // Unix seconds

	// Version is the protocol version of the latest session, 0 before one.
	Version     int
	Incarnation string

	// Desired is what the hub asks; generation 0 is nothing.
	Desired wire.Desired
	Pools   []string

	// What the node reported last. State is nil before a report of version 2.
	State     *wire.State
	Reported  int64
	VMs       int
	Omitted   int // VMs left out of the list
	Inventory *wire.Inventory

	// LastCommand is one that an operator took over from the node's journal: a
	// command of which the hub has no record, and needs none.
	LastCommand string
	Conflict    *Conflict
}

// Conflict is a recovery conflict: the node holds what this hub has no record
// of, as after a restore of the hub's database. While it stands the node is
// sent nothing but pings (fleet-design, Proposed recovery after a hub restore).
type Conflict struct {
	Since   int64          `json:"since"`
	Reasons []string       `json:"reasons"`
	Node    *wire.Applied  `json:"node,omitempty"` // what the node applied; nil = nothing
	Hub     wire.Desired   `json:"hub"`            // what the hub held
	State   wire.NodeState `json:"state"`
	Command string         `json:"last_command,omitempty"` // the node's
}

// Heartbeat is the latest one of a node.
type Heartbeat struct {
	Node string
	At   int64
	Beat *wire.Heartbeat
}

// Workloads is the list that a node reported last.
type Workloads struct {
	Node    string
	At      int64
	List    []wire.Workload
	Omitted int
}

// Issued is a desired state that the hub gave out, kept so that a node that is
// behind is told from one that is ahead.
type Issued struct {
	Node    string
	Desired wire.Desired
	At      int64
}

// Token is one that an enrollment may spend. A spent or expired one is kept
// until its time is over, so that its second use is told from a wrong one.
type Token struct {
	Hash    string // sha256 of the token's text, hex
	Created int64
	Expires int64
	Actor   string
	Spent   int64 // 0 = not
	Node    string
	Kind    string // "" = a node's, TokenGitLab a relay's
}

// TokenGitLab is the kind of token that only a relay's enrollment spends.
const TokenGitLab = "gitlab"

// Revoked is a key whose node was removed.
type Revoked struct {
	Node string
	Key  ed25519.PublicKey
	At   int64
}

// Command is one issued to a node, and what became of it.
type Command struct {
	wire.Command
	Node    string
	Actor   string
	Outcome wire.Outcome // "" = no ack yet
	Message string
	Acked   int64 // when the outcome was recorded
}

// Open says whether the command has no final outcome.
func (c *Command) Open() bool { return !c.Outcome.Final() }

// AuditLine is one line of the audit log.
type AuditLine struct {
	Seq    uint64 `json:"seq"`
	At     int64  `json:"at"`
	Node   string `json:"node,omitempty"`
	Actor  string `json:"actor"`
	Event  string `json:"event"`
	Detail string `json:"detail,omitempty"`
}

// AuditQuery selects the newest Limit lines, of a node when it names one, with
// a Seq below Before unless that is 0.
type AuditQuery struct {
	Node   string
	Limit  int
	Before uint64
}

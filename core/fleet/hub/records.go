package hub

import (
	"context"
	"crypto/ed25519"
	"encoding/json"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
)

// Limits of placed jobs (fleet-reference, The hub implements its side of
// GitLab dispatch).
const (
	MaxUnfinished  = 4096           // jobs not finished
	MaxKeys        = 256            // API keys
	MaxServers     = 1024           // GitLab servers that were decided on
	MaxProjects    = 65536          // projects of an instance
	UnsettledKept  = 30 * 24 * 3600 // seconds that a job's output and spec are kept at most
	DefaultHistory = 100_000        // jobs
	MaxHistory     = 1_000_000
	TrimAtOnce     = 1000 // records of a write
	trimEvery      = 3600 // seconds
)

// JobStore is the part of a Store that is of placed jobs, relays and keys.
type JobStore interface {
	// Job returns a record; nil when it is not in the history (any more).
	Job(ctx context.Context, id string) (*Job, error)
	// Jobs returns records, newest first.
	Jobs(ctx context.Context, q JobQuery) ([]*Job, error)
	// JobsOf returns records by N, newest first; ones that are gone are left out.
	JobsOf(ctx context.Context, ns []int64) ([]*Job, error)
	// History returns the rows of at most limit records after one, by N.
	History(ctx context.Context, after int64, limit int) ([]JobRow, error)
	// Request returns what a create with an owner's request_id was answered, nil
	// for one that was not made within dispatch.IdempotentSecs.
	Request(ctx context.Context, owner, id string) (*Request, error)
	// Requests tells the owner and request_id of every request that is stored.
	Requests(ctx context.Context, each func(owner, id string)) error
	// Spec returns a job's redacted spec as it was stored, nil for none, and the
	// dictionary that it was compressed with.
	Spec(ctx context.Context, n int64) (*Spec, []byte, error)
	// Specs returns the newest specs, at most n and of at most bytes together.
	Specs(ctx context.Context, n int, bytes int64) ([]Spec, error)
	// Dict returns a dictionary, nil when it is not there (any more).
	Dict(ctx context.Context, id uint32) ([]byte, error)
	// Tail returns what is kept of a settled job's output, nil for nothing.
	Tail(ctx context.Context, n int64) (*Tail, error)
	// Egress returns a job's egress report, nil for none.
	Egress(ctx context.Context, n int64) (*JobEgress, error)
	// Old returns the oldest records that may go, at most limit: finished ones,
	// settled or finished before unsettled (Unix seconds), past the newest keep.
	Old(ctx context.Context, keep int, unsettled int64, limit int) ([]*Job, error)
}

// JobQuery selects records. Zero fields select all.
type JobQuery struct {
	ID       string // or the beginning of one
	Limit    int
	Before   int64 // N below it
	Owner    string
	Instance string
	Project  string // path; with a final /** all below it
	Ref      string
	Name     string // of the job
	State    dispatch.State
	Failure  string // of a finished job; "success" for none
	Node     string
	Pool     string
	Since    int64 // submitted at or after it
	Events   bool  // whose node reported some
}

// Relay is an enrolled vk-gitlab.
type Relay struct {
	ID       string
	Key      ed25519.PublicKey
	Name     string // hostname
	Enrolled int64
	// Server is the URL that it is bound to, by its first inventory; "" before.
	Server string
	// What it said last.
	Inventory *dispatch.Inventory
	Reported  int64
	Seen      int64
	Beat      *dispatch.Heartbeat
	States    []dispatch.RunnerState // the latest of each runner
}

// Rebound says whether the relay reports another server than its own.
func (r *Relay) Rebound() bool {
	if r.Inventory == nil || r.Server == "" {
		return false
	}
	u, err := dispatch.ServerURL(r.Inventory.ServerURL)
	return err != nil || u != r.Server
}

// Server is a GitLab server that an operator decided on. Name "" is rejected.
type Server struct {
	URL   string
	Name  string // of the instance
	At    int64
	Actor string
}

// Project is one of an instance's.
type Project struct {
	Instance string
	ID       int64
	Path     string // as seen last
	State    dispatch.Approval
	FirstJob int64  // GitLab's ID of the first job that was refused, 0 = none
	FirstRef string // its name
	Refused  int64
	At       int64 // of the decision, or of the first refusal
	Actor    string
}

// ProjectKey names a Project.
type ProjectKey struct {
	Instance string
	ID       int64
}

// Key is an API key of another client than a relay.
type Key struct {
	Hash    string // sha256 of the key's text, hex
	Name    string
	Prefix  string // first 8 characters after vkk_
	Scopes  []string
	Pools   []string      // * = any
	Max     wire.Envelope // 0 = no bound
	Created int64
	Actor   string
	Expires int64
	Revoked int64 // 0 = not
	Client  *dispatch.ClientHello
}

// Works says whether the key may be used.
func (k *Key) Works(now int64) bool { return k.Revoked == 0 && now < k.Expires }

// Job is a record of a placed job. It is never changed once stored: a change
// makes a new one.
type Job struct {
	N     int64 // order of submission, from 1
	ID    string
	Owner string // relay's ID or a key's hash
	State dispatch.State
	// Revision moves with every change that a producer can see.
	Revision  uint64
	Node      string
	Placement dispatch.Placement
	Cancel    wire.CancelMode

	Submitted int64 // Unix seconds; the others 0 until they are
	Accepted  int64
	Finished  int64
	Settled   int64

	Result    *wire.JobResult
	OutputLen int64 // as stored, once finished
	Stage     string
	Guest     *wire.GuestSize

	What
	TraceLimit int64
	ImageKey   string // of the images that its node builds; "" = none

	// The egress rules that it was placed under, and their generation; nil where
	// the hub had none to enforce.
	Rules    []string `json:",omitempty"`
	DryRules []string `json:",omitempty"`
	RulesGen uint64   `json:",omitempty"`
	// Reported says that its result came with an egress report.
	Reported bool `json:",omitempty"`
}

// What is what a job is, for people.
type What struct {
	Instance  string `json:"instance"` // name of its GitLab
	URL       string `json:"url"`      // of its GitLab
	Project   int64  `json:"project_id"`
	Path      string `json:"project_path"`
	Ref       string `json:"ref,omitempty"`
	Tag       bool   `json:"tag,omitempty"`
	Protected bool   `json:"protected,omitempty"`
	Name      string `json:"name"`
	Stage     string `json:"job_stage,omitempty"`
	GitLabJob int64  `json:"gitlab_job"`
	Pipeline  int64  `json:"pipeline,omitempty"`
	SHA       string `json:"sha,omitempty"`
	Runner    string `json:"runner,omitempty"`
}

// View is what a producer sees.
func (j *Job) View(outputLen int64) *dispatch.JobView {
	return &dispatch.JobView{ID: j.ID, Revision: j.Revision, State: j.State, Node: j.Node, Stage: j.Stage, OutputLen: outputLen, Cancel: j.Cancel, Result: j.Result}
}

// Outcome is success, or the failure's word; "" before the job has ended.
func (j *Job) Outcome() string {
	switch {
	case j.Result == nil:
		return ""
	case j.Result.Failure == "":
		return "success"
	}
	return j.Result.Failure
}

// Request is what a create with a request_id was answered.
type Request struct {
	Owner string
	ID    string
	Body  string // sha256 of the request's body
	At    int64
	// One of these:
	Grant   json.RawMessage // a dispatch.ReservationGrant
	Job     string
	Refusal json.RawMessage // a refused, with its status
}

// Spec is a job's redacted spec, compressed.
type Spec struct {
	N    int64  // of the job
	Dict uint32 // 0 = none
	Data []byte
}

// Tail is the end of a settled job's output, compressed.
type Tail struct {
	N      int64 // of the job
	Failed bool  // lives as long as the record; else it is one of a cache
	Size   int64 // of the output that it is the end of
	Start  int64 // offset of its first byte
	Data   []byte
}

// TailSize is a Tail without its data.
type TailSize struct {
	N     int64
	Bytes int64
}

// Dict is a zstd dictionary.
type Dict struct {
	ID   uint32
	Data []byte
}

// ImageUse says when a node last had a job with the images of a key.
type ImageUse struct {
	Key, Node string
	At        int64
}

// LoadedJobs is what a hub holds in memory of placed jobs.
type LoadedJobs struct {
	Relays   []*Relay
	Dropped  []Revoked // removed relays
	Servers  []Server
	Projects []Project
	Keys     []Key
	Jobs     []*Job     // not settled, by N
	Tails    []TailSize // of the cache, oldest first
	Images   []ImageUse // of jobs finished within a day
	Dict     Dict       // the newest
	Rules    []EgressRule
	Specs    int64 // how many are stored
	LastJob  int64 // N of the newest record
	// Settings are what operators set on the running hub.
	Settings map[string]string
}

// JobBatch is the part of a Batch that is of placed jobs.
type JobBatch struct {
	Relays       []*Relay
	DropRelays   []Revoked
	Servers      []Server
	DropServers  []string // by URL; the projects of its instance go, too
	Projects     []Project
	DropProjects []ProjectKey
	DropInstance []string // projects of an instance
	Keys         []Key
	DropKeys     []string // by hash
	Jobs         []*Job
	DropJobs     []int64 // by N, with all that is theirs
	Specs        []Spec
	DropSpecs    int64 // of jobs settled, or else finished, before it; 0 = none
	Dicts        []Dict
	Tails        []Tail
	DropTails    []int64
	Egress       []JobEgress // replaces one of a lower revision
	Rules        []EgressRule
	DropRules    []string // by name
	Requests     []Request
	DropRequests int64 // made before it; 0 = none
	Settings     map[string]string
}

// Empty says whether there is nothing to store.
func (b *JobBatch) Empty() bool {
	return len(b.Relays)+len(b.DropRelays)+len(b.Servers)+len(b.DropServers)+len(b.Projects)+len(b.DropProjects)+len(b.DropInstance)+
		len(b.Keys)+len(b.DropKeys)+len(b.Jobs)+len(b.DropJobs)+len(b.Specs)+len(b.Dicts)+len(b.Tails)+len(b.DropTails)+
		len(b.Egress)+len(b.Rules)+len(b.DropRules)+len(b.Requests)+len(b.Settings) == 0 && b.DropSpecs == 0 && b.DropRequests == 0
}

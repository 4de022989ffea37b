package hubadmin

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/policy"
)

// Routes of placed jobs. {node} is a relay's or a job's.
var (
	Relays      = Route{"GET", "/v1/relays"}
	RelayShow   = Route{"GET", "/v1/relays/{node}"}
	RelayRemove = Route{"DELETE", "/v1/relays/{node}"}
	GitLabs     = Route{"GET", "/v1/gitlabs"}
	GitLabSet   = Route{"POST", "/v1/gitlabs"}
	Projects    = Route{"GET", "/v1/projects"}
	ProjectSet  = Route{"POST", "/v1/projects"}
	Keys        = Route{"GET", "/v1/keys"}
	KeyCreate   = Route{"POST", "/v1/keys"}
	KeyRevoke   = Route{"DELETE", "/v1/keys"}
	Jobs        = Route{"GET", "/v1/jobs"}
	JobShow     = Route{"GET", "/v1/jobs/{node}"}
	JobOutput   = Route{"GET", "/v1/jobs/{node}/output"}
	JobCancel   = Route{"POST", "/v1/jobs/{node}/cancel"}
)

// Relay is a vk-gitlab as it is listed.
type Relay struct {
	ID        string                 `json:"id"`
	Name      string                 `json:"name"`
	Connected bool                   `json:"connected"`
	LastSeen  int64                  `json:"last_seen,omitempty"`
	Enrolled  int64                  `json:"enrolled_at"`
	Server    string                 `json:"server,omitempty"` // URL that it is bound to
	Status    dispatch.ServerStatus  `json:"status"`
	Inventory *dispatch.Inventory    `json:"inventory,omitempty"`
	Heartbeat *dispatch.Heartbeat    `json:"heartbeat,omitempty"`
	States    []dispatch.RunnerState `json:"states,omitempty"`
}

// RelayList is all relays.
type RelayList struct {
	Relays []Relay `json:"relays"`
}

// Instance is a GitLab server that was approved, or rejected (Name "").
type Instance struct {
	Name   string `json:"name,omitempty"`
	URL    string `json:"url"`
	At     int64  `json:"at"`
	Actor  string `json:"actor"`
	Relays int    `json:"relays"`
}

// PendingServer is one that nobody decided on.
type PendingServer struct {
	URL    string   `json:"url"`
	Key    string   `json:"key_sha256,omitempty"`
	Relays []string `json:"relays"`
}

// GitLabList is all servers.
type GitLabList struct {
	Instances []Instance      `json:"instances"`
	Rejected  []Instance      `json:"rejected"`
	Pending   []PendingServer `json:"pending"`
	Projects  []Project       `json:"pending_projects"`
}

// GitLabRequest decides on a server. Action: approve, reject, forget (by URL),
// remove (by Name).
type GitLabRequest struct {
	Action string `json:"action"`
	URL    string `json:"url,omitempty"`
	Name   string `json:"name,omitempty"`
}

// Project is one of an instance's.
type Project struct {
	Instance string            `json:"instance"`
	ID       int64             `json:"id"`
	Path     string            `json:"path,omitempty"`
	State    dispatch.Approval `json:"state"`
	FirstJob int64             `json:"first_job,omitempty"`
	FirstRef string            `json:"first_job_name,omitempty"`
	Refused  int64             `json:"refused"`
	At       int64             `json:"at"`
	Actor    string            `json:"actor"`
}

// ProjectOf converts.
func ProjectOf(p hub.Project) Project {
	return Project{p.Instance, p.ID, p.Path, p.State, p.FirstJob, p.FirstRef, p.Refused, p.At, p.Actor}
}

// ProjectList is projects.
type ProjectList struct {
	Projects []Project `json:"projects"`
}

// ProjectRequest decides on projects. Action: approve, reject, forget.
type ProjectRequest struct {
	Action   string `json:"action"`
	Instance string `json:"instance"`
	Projects []struct {
		ID   int64  `json:"id"`
		Path string `json:"path,omitempty"`
	} `json:"projects"`
}

// Key is an API key, without its text.
type Key struct {
	Name    string                `json:"name"`
	Prefix  string                `json:"prefix"`
	Scopes  []string              `json:"scopes"`
	Pools   []string              `json:"pools"`
	Max     wire.Envelope         `json:"max"`
	Created int64                 `json:"created_at"`
	Actor   string                `json:"actor"`
	Expires int64                 `json:"expires_at"`
	Revoked int64                 `json:"revoked_at,omitempty"`
	Works   bool                  `json:"works"`
	Client  *dispatch.ClientHello `json:"client,omitempty"`
}

// KeyList is all keys.
type KeyList struct {
	Keys []Key `json:"keys"`
}

// KeyRequest makes a key.
type KeyRequest struct {
	Name    string        `json:"name"`
	Scopes  []string      `json:"scopes,omitempty"`
	Pools   []string      `json:"pools"`
	Max     wire.Envelope `json:"max"`
	TTLSecs int64         `json:"ttl_secs"`
}

// KeyReply holds its text, once.
type KeyReply struct {
	Key string `json:"key"`
}

// KeyRevoked says how many keys that no longer worked were removed; 0 = a
// working one was revoked.
type KeyRevoked struct {
	Removed int `json:"removed"`
}

// Job is a record as it is listed.
type Job struct {
	ID        string             `json:"id"`
	State     dispatch.State     `json:"state"`
	Outcome   string             `json:"outcome,omitempty"` // success, or the failure
	Owner     string             `json:"owner"`             // relay ID, key NAME
	Node      string             `json:"node,omitempty"`
	NodeName  string             `json:"node_name,omitempty"`
	Placement dispatch.Placement `json:"placement"`
	Stage     string             `json:"stage,omitempty"`
	Cancel    wire.CancelMode    `json:"cancel,omitempty"`
	Submitted int64              `json:"submitted_at"`
	Accepted  int64              `json:"accepted_at,omitempty"`
	Finished  int64              `json:"finished_at,omitempty"`
	Settled   int64              `json:"settled_at,omitempty"`
	OutputLen int64              `json:"output_len"`
	Result    *wire.JobResult    `json:"result,omitempty"`
	Guest     *wire.GuestSize    `json:"guest,omitempty"`
	What      hub.What           `json:"job"`
	Rules     []string           `json:"egress_rules,omitempty"` // that it was placed under
	DryRules  []string           `json:"egress_dry_run,omitempty"`
	RulesGen  uint64             `json:"egress_generation,omitempty"`
	// Of one job alone:
	Egress *policy.Report  `json:"egress,omitempty"`
	Spec   json.RawMessage `json:"spec,omitempty"` // redacted
	End    *JobEnd         `json:"output_end,omitempty"`
}

// JobEnd is the end of a finished job's output, as the hub has it.
type JobEnd struct {
	Start int64  `json:"start"`
	Size  int64  `json:"size"`
	Data  []byte `json:"data"`
}

// JobList is jobs, newest first.
type JobList struct {
	Jobs []Job `json:"jobs"`
}

// JobPiece is a piece of a job's output.
type JobPiece struct {
	Offset   int64  `json:"offset"`
	Length   int64  `json:"length"`
	Complete bool   `json:"complete"`
	Data     []byte `json:"data"`
}

// TokenOf issues a token of a kind.
func (c *Client) TokenOf(ctx context.Context, kind string, ttlSecs int64) (string, error) {
	var r TokenReply
	err := c.Call(ctx, Token, "", nil, TokenRequest{TTLSecs: ttlSecs, Kind: kind}, &r)
	return r.Token, err
}

// Relays lists all relays.
func (c *Client) Relays(ctx context.Context) (*RelayList, error) {
	r := new(RelayList)
	return r, c.Call(ctx, Relays, "", nil, nil, r)
}

// Relay shows one.
func (c *Client) Relay(ctx context.Context, name string) (*Relay, error) {
	r := new(Relay)
	return r, c.Call(ctx, RelayShow, url.PathEscape(name), nil, nil, r)
}

// RemoveRelay unpins a relay's key.
func (c *Client) RemoveRelay(ctx context.Context, name string) (*Relay, error) {
	r := new(Relay)
	return r, c.Call(ctx, RelayRemove, url.PathEscape(name), nil, nil, r)
}

// GitLabs lists all servers.
func (c *Client) GitLabs(ctx context.Context) (*GitLabList, error) {
	r := new(GitLabList)
	return r, c.Call(ctx, GitLabs, "", nil, nil, r)
}

// SetGitLab decides on a server.
func (c *Client) SetGitLab(ctx context.Context, q GitLabRequest) error {
	return c.Call(ctx, GitLabSet, "", nil, q, nil)
}

// Projects lists projects: of one instance unless it is "".
func (c *Client) Projects(ctx context.Context, instance string, pending bool) (*ProjectList, error) {
	r, q := new(ProjectList), url.Values{"instance": {instance}}
	if pending {
		q.Set("state", string(dispatch.Pending))
	}
	return r, c.Call(ctx, Projects, "", q, nil, r)
}

// SetProjects decides on projects.
func (c *Client) SetProjects(ctx context.Context, action, instance string, refs []hub.ProjectRef) error {
	q := ProjectRequest{Action: action, Instance: instance}
	for _, p := range refs {
		q.Projects = append(q.Projects, struct {
			ID   int64  `json:"id"`
			Path string `json:"path,omitempty"`
		}{p.ID, p.Path})
	}
	return c.Call(ctx, ProjectSet, "", nil, q, nil)
}

// Keys lists all keys.
func (c *Client) Keys(ctx context.Context) (*KeyList, error) {
	r := new(KeyList)
	return r, c.Call(ctx, Keys, "", nil, nil, r)
}

// CreateKey makes one.
func (c *Client) CreateKey(ctx context.Context, q KeyRequest) (string, error) {
	var r KeyReply
	err := c.Call(ctx, KeyCreate, "", nil, q, &r)
	return r.Key, err
}

// RevokeKey revokes the working key of a name, or removes those that are not.
func (c *Client) RevokeKey(ctx context.Context, name string) (*KeyRevoked, error) {
	r := new(KeyRevoked)
	return r, c.Call(ctx, KeyRevoke, "", url.Values{"name": {name}}, nil, r)
}

// Jobs lists jobs by a query of the filters' names and values.
func (c *Client) Jobs(ctx context.Context, filters url.Values) (*JobList, error) {
	r := new(JobList)
	return r, c.Call(ctx, Jobs, "", filters, nil, r)
}

// Job shows one.
func (c *Client) Job(ctx context.Context, id string) (*Job, error) {
	r := new(Job)
	return r, c.Call(ctx, JobShow, url.PathEscape(id), nil, nil, r)
}

// Output reads a piece of a job's output, of one that is settled what is kept.
// wait is for how many seconds it may be held until there is more.
func (c *Client) Output(ctx context.Context, id string, offset int64, wait int) (*JobPiece, error) {
	r := new(JobPiece)
	return r, c.Call(ctx, JobOutput, url.PathEscape(id), url.Values{"offset": {strconv.FormatInt(offset, 10)}, "wait": {strconv.Itoa(wait)}}, nil, r)
}

// CancelJobRequest is a cancel of an operator's. Force ends the job on the hub
// without its node's word.
type CancelJobRequest struct {
	dispatch.CancelRequest
	Force bool `json:"force,omitempty"`
}

// EndJob ends a job by force.
func (c *Client) EndJob(ctx context.Context, id string) (*Job, error) {
	r := new(Job)
	q := CancelJobRequest{CancelRequest: dispatch.CancelRequest{Mode: wire.CancelImmediate}, Force: true}
	return r, c.Call(ctx, JobCancel, url.PathEscape(id), nil, q, r)
}

// Cancel stops a job.
func (c *Client) Cancel(ctx context.Context, id string, mode wire.CancelMode) (*Job, error) {
	r := new(Job)
	return r, c.Call(ctx, JobCancel, url.PathEscape(id), nil, dispatch.CancelRequest{Mode: mode}, r)
}

// Package hubadmin is what vk-hub's commands and the running hub say to each
// other on <data_dir>/admin.sock: HTTP with JSON bodies, one route an
// operation (Routes), and a client. Errors carry a fault's kind, text and
// hint.
//
// The socket is the hub's user's and root's; every operation is recorded in
// the audit log as "uid N", the caller's.
package hubadmin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
)

// MaxReply is the most bytes of an answer (fleet-reference: "the admin
// socket's 16 MiB reply").
const MaxReply = 16 << 20

// Route is an operation.
type Route struct{ Method, Path string }

// Routes. {node} is an ID, 8 digits of one or a hostname.
var (
	Token     = Route{"POST", "/v1/token"}
	Nodes     = Route{"GET", "/v1/nodes"}
	NodeShow  = Route{"GET", "/v1/nodes/{node}"}
	Remove    = Route{"DELETE", "/v1/nodes/{node}"}
	Policy    = Route{"POST", "/v1/nodes/{node}/policy"}
	Commands  = Route{"POST", "/v1/nodes/{node}/commands"}
	Pools     = Route{"POST", "/v1/nodes/{node}/pools"}
	Recover   = Route{"POST", "/v1/nodes/{node}/recover"}
	Workloads = Route{"GET", "/v1/workloads"}
	Audit     = Route{"GET", "/v1/audit"}
	Status    = Route{"GET", "/v1/status"}
	Backup    = Route{"POST", "/v1/backup"}
)

// TokenRequest asks for an enrollment token.
type TokenRequest struct {
	TTLSecs int64  `json:"ttl_secs"`
	Kind    string `json:"kind,omitempty"` // "" = a node's, gitlab a relay's
}

// TokenReply holds it.
type TokenReply struct {
	Token string `json:"token"`
}

// PolicyRequest changes a node's desired state; nil leaves a field.
type PolicyRequest struct {
	Ceiling *int  `json:"ceiling,omitempty"` // 0 = none
	Stop    *bool `json:"stop,omitempty"`
}

// CommandRequest issues a command.
type CommandRequest struct {
	Op wire.Op `json:"op"`
}

// PoolsRequest sets a node's pools.
type PoolsRequest struct {
	Pools []string `json:"pools"`
}

// RecoverRequest resolves a recovery conflict: Adopt, or else replace by the
// hub's policy with a change.
type RecoverRequest struct {
	Adopt   bool  `json:"adopt,omitempty"`
	Ceiling *int  `json:"ceiling,omitempty"`
	Stop    *bool `json:"stop,omitempty"`
}

// BackupRequest names a file on the hub's host, by an absolute path.
type BackupRequest struct {
	File string `json:"file"`
}

// Node is a node as it is listed. Desired is what the hub asks, Reported what
// the node says.
type Node struct {
	ID          string        `json:"id"`
	Name        string        `json:"name"`
	Reach       hub.Reach     `json:"reach"`
	LastSeen    int64         `json:"last_seen,omitempty"`
	Enrolled    int64         `json:"enrolled_at"`
	Version     int           `json:"protocol,omitempty"`
	MonitorOnly bool          `json:"monitor_only,omitempty"`
	Sync        string        `json:"sync"`
	Pending     int           `json:"pending_commands,omitempty"`
	Pools       []string      `json:"pools,omitempty"`
	PlacesNot   string        `json:"places_not,omitempty"` // why it is given no placed jobs, "" = it may be
	Desired     wire.Desired  `json:"desired"`
	Reported    *wire.State   `json:"reported,omitempty"`
	Conflict    *hub.Conflict `json:"conflict,omitempty"`
	VMs         int           `json:"vms"`
	Omitted     int           `json:"vms_omitted,omitempty"`
	// Left out of lists of many nodes:
	Inventory *wire.Inventory `json:"inventory,omitempty"`
	Heartbeat *wire.Heartbeat `json:"heartbeat,omitempty"`
	Commands  []Command       `json:"commands,omitempty"` // of one node, newest first
}

// Command is a command and what became of it.
type Command struct {
	ID      string       `json:"id"`
	Node    string       `json:"node"`
	Op      wire.Op      `json:"op"`
	Actor   string       `json:"actor"`
	Issued  int64        `json:"issued_at"`
	Expires int64        `json:"expires_at"`
	Outcome wire.Outcome `json:"outcome,omitempty"`
	Message string       `json:"message,omitempty"`
	Acked   int64        `json:"acked_at,omitempty"`
}

// CommandOf converts.
func CommandOf(c hub.Command) Command {
	return Command{c.ID, c.Node, c.Op, c.Actor, c.Issued, c.Expires, c.Outcome, c.Message, c.Acked}
}

// NodeList is all nodes.
type NodeList struct {
	Nodes []Node `json:"nodes"`
}

// NodeWorkloads is a node's VMs; List is nil when all nodes' would be too
// large for an answer.
type NodeWorkloads struct {
	Node      string          `json:"node"`
	Name      string          `json:"name"`
	Connected bool            `json:"connected"`
	LastSeen  int64           `json:"last_seen,omitempty"`
	Count     int             `json:"count"`
	Omitted   int             `json:"omitted,omitempty"`
	List      []wire.Workload `json:"vms"`
	// Memory is each VM's host memory in bytes, by its ID.
	Memory map[string]int64 `json:"memory_bytes,omitempty"`
}

// WorkloadList is several nodes' VMs.
type WorkloadList struct {
	Nodes []NodeWorkloads `json:"nodes"`
}

// AuditReply is audit lines, oldest first.
type AuditReply struct {
	Lines []hub.AuditLine `json:"lines"`
}

// StatusReply is the hub on one screen.
type StatusReply struct {
	Hub           string         `json:"hub"`
	Version       string         `json:"version"`
	Addr          string         `json:"addr"`
	TLS           bool           `json:"tls"`
	Metrics       string         `json:"metrics_addr,omitempty"`
	Started       int64          `json:"started_at"`
	HeartbeatSecs int            `json:"heartbeat_secs"`
	Sick          string         `json:"sick,omitempty"` // why nothing can be stored
	Database      string         `json:"database"`
	DatabaseBytes int64          `json:"database_bytes"`
	LogBytes      int64          `json:"log_bytes"`
	Nodes         int            `json:"nodes"`
	Reach         map[string]int `json:"reach"`
	States        map[string]int `json:"states"`
	Stopped       int            `json:"stopped"` // nodes whose acquisition the hub has stopped
	Conflicts     []string       `json:"conflicts"`
	NotInSync     int            `json:"not_in_sync"`
	Pending       int            `json:"pending_commands"`
	VMs           int            `json:"vms"`
	Running       int            `json:"jobs_running"`
	Waiting       int            `json:"jobs_waiting"`
	Tokens        int            `json:"tokens"` // unspent
	Unauthed      int            `json:"unauthenticated"`
	Messages      uint64         `json:"messages"`
	StoreErrors   uint64         `json:"store_errors"`
}

// Failure is the body of an error.
type Failure struct {
	Kind    fault.Kind `json:"kind"`
	Message string     `json:"message"`
	Hint    string     `json:"hint,omitempty"`
}

// Client reaches a running hub.
type Client struct {
	Socket string
	http   *http.Client
}

// Dial makes a client of the hub whose admin socket that is. It connects with
// the first call.
func Dial(socket string) *Client {
	return &Client{socket, &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return fsx.DialUnix(socket) }}}}
}

// Call performs an operation. node is put in the path where the route has one;
// in (nil = no body) and out (nil = no answer wanted) are JSON.
func (c *Client) Call(ctx context.Context, r Route, node string, query url.Values, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	u := url.URL{Scheme: "http", Host: "hub", Path: r.pathFor(node), RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, r.Method, u.String(), body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, MaxReply+1))
	if err != nil {
		return fault.New(fault.Unavailable, "the hub broke off its answer").Because(err)
	}
	if len(data) > MaxReply {
		return fault.Newf(fault.System, "the hub's answer has more than %d bytes", MaxReply)
	}
	if resp.StatusCode != http.StatusOK {
		return failure(resp.StatusCode, data)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

func (r Route) pathFor(node string) string {
	const at = "{node}"
	for i := range r.Path {
		if len(r.Path) >= i+len(at) && r.Path[i:i+len(at)] == at {
			return r.Path[:i] + node + r.Path[i+len(at):]
		}
	}
	return r.Path
}

func (c *Client) unreachable(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fault.Newf(fault.Unavailable, "no hub runs here: nobody listens at %s", c.Socket).
			Hint("start it with vk-hub serve, as the same user and with the same --config")
	case errors.Is(err, fs.ErrPermission):
		return fault.Newf(fault.Denied, "%s is not open to this user", c.Socket).Hint("run this as the hub's user, or as root")
	}
	return fault.New(fault.Unavailable, "reaching the hub").Because(err)
}

// Token issues a token.
func (c *Client) Token(ctx context.Context, ttl time.Duration) (string, error) {
	var r TokenReply
	err := c.Call(ctx, Token, "", nil, TokenRequest{TTLSecs: int64(ttl / time.Second)}, &r)
	return r.Token, err
}

// Nodes lists all nodes.
func (c *Client) Nodes(ctx context.Context) (*NodeList, error) {
	r := new(NodeList)
	return r, c.Call(ctx, Nodes, "", nil, nil, r)
}

// Node shows one.
func (c *Client) Node(ctx context.Context, name string) (*Node, error) {
	r := new(Node)
	return r, c.Call(ctx, NodeShow, name, nil, nil, r)
}

// SetPolicy changes a node's desired state.
func (c *Client) SetPolicy(ctx context.Context, name string, p PolicyRequest) (*Node, error) {
	r := new(Node)
	return r, c.Call(ctx, Policy, name, nil, p, r)
}

// Issue issues a command.
func (c *Client) Issue(ctx context.Context, name string, op wire.Op) (*Command, error) {
	r := new(Command)
	return r, c.Call(ctx, Commands, name, nil, CommandRequest{op}, r)
}

// SetPools sets a node's pools.
func (c *Client) SetPools(ctx context.Context, name string, pools []string) (*Node, error) {
	r := new(Node)
	return r, c.Call(ctx, Pools, name, nil, PoolsRequest{pools}, r)
}

// Recover resolves a recovery conflict.
func (c *Client) Recover(ctx context.Context, name string, q RecoverRequest) (*Node, error) {
	r := new(Node)
	return r, c.Call(ctx, Recover, name, nil, q, r)
}

// Remove revokes a node.
func (c *Client) Remove(ctx context.Context, name string) (*Node, error) {
	r := new(Node)
	return r, c.Call(ctx, Remove, name, nil, nil, r)
}

// Workloads lists a node's VMs, or all nodes' for "".
func (c *Client) Workloads(ctx context.Context, node string) (*WorkloadList, error) {
	r := new(WorkloadList)
	return r, c.Call(ctx, Workloads, "", url.Values{"node": {node}}, nil, r)
}

// Audit reads the newest lines, of a node unless it is "".
func (c *Client) Audit(ctx context.Context, node string, limit int) (*AuditReply, error) {
	r := new(AuditReply)
	return r, c.Call(ctx, Audit, "", url.Values{"node": {node}, "limit": {strconv.Itoa(limit)}}, nil, r)
}

// Status asks how the hub is.
func (c *Client) Status(ctx context.Context) (*StatusReply, error) {
	r := new(StatusReply)
	return r, c.Call(ctx, Status, "", nil, nil, r)
}

// Backup has the hub write a copy of its database.
func (c *Client) Backup(ctx context.Context, file string) error {
	return c.Call(ctx, Backup, "", nil, BackupRequest{file}, nil)
}

// String is METHOD PATH, as http.ServeMux wants it.
func (r Route) String() string { return fmt.Sprintf("%s %s", r.Method, r.Path) }

package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// Admin serves the admin socket: the hub's user's and root's.
type Admin struct {
	Hub *hub.Hub
	Log *slog.Logger
	// Backup writes a copy of the database.
	Backup func(ctx context.Context, file string) error
	// UI is ui_url, "" = the hub serves no web UI.
	UI string
	// Status fills in what the hub itself does not know.
	Status func(*hubadmin.StatusReply)

	readers atomic.Int64 // who follow events
}

// ListenAdmin listens at path, mode 0600. A socket that a hub left behind is
// replaced: the database's lock says that no other hub runs.
func ListenAdmin(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	old := unix.Umask(0o177)
	l, err := fsx.ListenUnix(path)
	unix.Umask(old)
	return l, err
}

type uidKey struct{}

// Serve answers until ctx ends.
func (a *Admin) Serve(ctx context.Context, l *net.UnixListener) error {
	mux := http.NewServeMux()
	for _, routes := range []map[hubadmin.Route]func(context.Context, *call) (any, error){a.routes(), a.jobRoutes(), a.egressRoutes(), a.peopleRoutes()} {
		for r, f := range routes {
			mux.HandleFunc(r.String(), a.handle(f))
		}
	}
	mux.HandleFunc(hubadmin.Events.String(), a.allowed(func(w http.ResponseWriter, r *http.Request, _ int) { a.events(w, r) }))
	s := &http.Server{Handler: mux, ReadHeaderTimeout: wire.HandshakeStep, ReadTimeout: time.Minute, ErrorLog: log.New(logWriter{a.Log}, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, uidKey{}, peer(c))
		}}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(l)
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serving the admin socket: %w", err)
}

// peer is the user at the other end, -1 when the kernel does not tell.
func peer(c net.Conn) int {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return -1
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return -1
	}
	uid := -1
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = int(cred.Uid)
		}
	})
	return uid
}

// call is a request: who makes it, and of which node.
type call struct {
	r     *http.Request
	actor string
	node  string
}

func (c *call) body(v any) error {
	b, err := io.ReadAll(io.LimitReader(c.r.Body, 1<<20))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return fault.New(fault.Usage, "the request cannot be read").Because(err)
	}
	return nil
}

func (a *Admin) handle(f func(context.Context, *call) (any, error)) http.HandlerFunc {
	return a.allowed(func(w http.ResponseWriter, r *http.Request, uid int) {
		v, err := f(r.Context(), &call{r, fmt.Sprintf("uid %d", uid), r.PathValue("node")})
		if err != nil {
			a.Log.Debug("admin request failed", logx.Path, r.URL.Path, logx.Err, err)
			fail(w, err)
			return
		}
		answer(w, http.StatusOK, v)
	})
}

func fail(w http.ResponseWriter, err error) {
	kind := fault.KindOf(err)
	answer(w, fault.Table[kind].HTTP, hubadmin.Failure{Kind: kind, Message: err.Error(), Hint: fault.HintOf(err)})
}

func (a *Admin) routes() map[hubadmin.Route]func(context.Context, *call) (any, error) {
	return map[hubadmin.Route]func(context.Context, *call) (any, error){
		hubadmin.Token:     a.token,
		hubadmin.Nodes:     a.nodes,
		hubadmin.NodeShow:  a.show,
		hubadmin.Remove:    a.remove,
		hubadmin.Policy:    a.policy,
		hubadmin.Commands:  a.issue,
		hubadmin.Pools:     a.pools,
		hubadmin.Recover:   a.recover,
		hubadmin.Workloads: a.workloads,
		hubadmin.Audit:     a.audit,
		hubadmin.Status:    a.status,
		hubadmin.Backup:    a.backup,
	}
}

func (a *Admin) token(ctx context.Context, c *call) (any, error) {
	var q hubadmin.TokenRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	if q.TTLSecs < 0 || q.TTLSecs > hub.MaxTokenTTL {
		q.TTLSecs = hub.MaxTokenTTL + 1 // no overflow; the hub refuses it
	}
	t, err := a.Hub.CreateTokenOf(ctx, c.actor, q.Kind, time.Duration(q.TTLSecs)*time.Second)
	return hubadmin.TokenReply{Token: t}, err
}

func (a *Admin) nodes(context.Context, *call) (any, error) {
	list := hubadmin.NodeList{Nodes: []hubadmin.Node{}}
	for _, n := range a.Hub.Snapshot().Sorted() {
		list.Nodes = append(list.Nodes, hubadmin.NodeOf(a.Hub, n, false))
	}
	return list, nil
}

func (a *Admin) show(ctx context.Context, c *call) (any, error) {
	n, err := a.Hub.Snapshot().Find(c.node)
	if err != nil {
		return nil, err
	}
	v := hubadmin.NodeOf(a.Hub, n, true)
	list, err := a.Hub.Store().Commands(ctx, n.ID, 50)
	for _, c := range list {
		v.Commands = append(v.Commands, hubadmin.CommandOf(c))
	}
	return v, err
}

// one answers with a node after a change.
func (a *Admin) one(n *hub.Node, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return hubadmin.NodeOf(a.Hub, n, true), nil
}

func (a *Admin) remove(ctx context.Context, c *call) (any, error) {
	n, err := a.Hub.Snapshot().Find(c.node)
	if err != nil {
		return nil, err
	}
	_, err = a.Hub.Remove(ctx, c.actor, n.ID)
	return a.one(n, err)
}

func (a *Admin) policy(ctx context.Context, c *call) (any, error) {
	var q hubadmin.PolicyRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	return a.one(a.Hub.SetPolicy(ctx, c.actor, c.node, hub.PolicyChange{Ceiling: q.Ceiling, Stop: q.Stop}))
}

func (a *Admin) issue(ctx context.Context, c *call) (any, error) {
	var q hubadmin.CommandRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	cmd, err := a.Hub.Issue(ctx, c.actor, c.node, q.Op)
	if err != nil {
		return nil, err
	}
	return hubadmin.CommandOf(*cmd), nil
}

func (a *Admin) pools(ctx context.Context, c *call) (any, error) {
	var q hubadmin.PoolsRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	return a.one(a.Hub.SetPools(ctx, c.actor, c.node, q.Pools))
}

func (a *Admin) recover(ctx context.Context, c *call) (any, error) {
	var q hubadmin.RecoverRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	if q.Adopt {
		return a.one(a.Hub.Adopt(ctx, c.actor, c.node))
	}
	return a.one(a.Hub.Replace(ctx, c.actor, c.node, hub.PolicyChange{Ceiling: q.Ceiling, Stop: q.Stop}))
}

func (a *Admin) audit(ctx context.Context, c *call) (any, error) {
	q := hub.AuditQuery{Limit: 50}
	if s := c.r.URL.Query().Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > hub.AuditKept {
			return nil, fault.Newf(fault.Usage, "limit %q is not between 1 and %d", wire.Clean(s, 40), hub.AuditKept)
		}
		q.Limit = n
	}
	if name := c.r.URL.Query().Get("node"); name != "" {
		n, err := a.Hub.Snapshot().Find(name)
		switch {
		case err == nil:
			q.Node = n.ID
		case wire.IsHex(name, wire.IDLen):
			q.Node = name // a removed one's lines are kept
		default:
			return nil, err
		}
	}
	lines, err := a.Hub.Store().Audit(ctx, q)
	if lines == nil {
		lines = []hub.AuditLine{}
	}
	return hubadmin.AuditReply{Lines: lines}, err
}

func (a *Admin) backup(ctx context.Context, c *call) (any, error) {
	var q hubadmin.BackupRequest
	if err := c.body(&q); err != nil {
		return nil, err
	}
	if !filepath.IsAbs(q.File) {
		return nil, fault.Newf(fault.Usage, "%q is not an absolute path", wire.Clean(q.File, 200))
	}
	if err := a.Backup(ctx, q.File); err != nil {
		return nil, err
	}
	a.Log.Info("backup written", logx.Path, q.File, "actor", c.actor)
	return struct{}{}, nil
}

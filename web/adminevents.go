package web

import (
	"net/http"
	"os"
	"slices"

	"virtkit/core/fault"
	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/fleet/wire"
	"virtkit/web/sse"
)

// events answers with what happens, as it happens.
func (a *Admin) events(w http.ResponseWriter, r *http.Request) {
	nodes, kinds := r.URL.Query()["node"], r.URL.Query()["kind"]
	snap := a.Hub.Snapshot()
	for i, name := range nodes {
		switch n, err := snap.Find(name); {
		case err == nil:
			nodes[i] = n.ID
		case wire.IsHex(name, wire.IDLen): // a removed one
		default:
			fail(w, err)
			return
		}
	}
	for _, k := range kinds {
		if !slices.Contains(hub.EventKinds, k) {
			fail(w, fault.Newf(fault.Usage, "%q is no kind of event", wire.Clean(k, 40)).Hint("kinds: %s", hub.EventKindsText()))
			return
		}
	}
	s := &sse.Stream{Feed: a.Hub.Feed(), Snapshot: func() any { return a.now() }, Readers: &a.readers}
	if len(nodes) > 0 || len(kinds) > 0 {
		s.Keep = func(e *hub.Event) bool {
			return (len(nodes) == 0 || slices.Contains(nodes, e.Node)) && (len(kinds) == 0 || slices.Contains(kinds, e.Kind))
		}
	}
	s.ServeHTTP(w, r)
}

// now is what events change.
func (a *Admin) now() *hubadmin.FleetNow {
	f := &hubadmin.FleetNow{Nodes: []hubadmin.NodeNow{}, Jobs: []hubadmin.JobNow{}}
	for _, n := range a.Hub.Snapshot().Sorted() {
		v := hubadmin.NodeNow{ID: n.ID, Name: n.Name, Reach: n.Reach(), Sync: n.Sync()}
		if n.State != nil {
			v.State = string(n.State.Node)
		}
		f.Nodes = append(f.Nodes, v)
	}
	for _, j := range a.Hub.Unsettled() {
		f.Jobs = append(f.Jobs, hubadmin.JobNow{ID: j.ID, Node: j.Node, Path: j.Path, Name: j.What.Name, Step: j.Step()})
	}
	return f
}

// allowed lets the hub's user and root in.
func (a *Admin) allowed(f func(http.ResponseWriter, *http.Request, int)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		uid, _ := r.Context().Value(uidKey{}).(int)
		if uid != 0 && uid != os.Getuid() {
			fail(w, fault.Newf(fault.Denied, "uid %d may not use the admin socket", uid))
			return
		}
		f(w, r, uid)
	}
}

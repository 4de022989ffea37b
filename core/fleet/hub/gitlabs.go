package hub

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/wire"
	"virtkit/core/lazyre"
)

// GitLab servers and their projects: what an operator has decided on. A server
// that a relay reports and nobody decided on is pending, as a project is of
// which a job was refused.

var instanceName = lazyre.New(`^[a-z0-9]([a-z0-9._-]{0,62})$`)

// serverStatus is how the hub holds a relay's server.
func (s *Snapshot) serverStatus(relay string) dispatch.ServerStatus {
	r := s.Relays[relay]
	if r == nil || r.Server == "" {
		return dispatch.ServerStatus{Status: dispatch.Pending, Message: "the relay has not said yet which GitLab it serves"}
	}
	if r.Rebound() {
		return dispatch.ServerStatus{Status: dispatch.Rebound, Bound: r.Server, Message: "this relay is bound to " + r.Server + ": to serve another GitLab, enroll it again with vk-gitlab join --replace"}
	}
	v, ok := s.Servers[r.Server]
	switch {
	case !ok:
		return dispatch.ServerStatus{Status: dispatch.Pending, Bound: r.Server, Message: "an operator has to approve it: vk-hub gitlabs approve " + r.Server + " --name NAME"}
	case v.Name == "":
		return dispatch.ServerStatus{Status: dispatch.Rejected, Bound: r.Server, Message: "an operator has rejected it"}
	}
	return dispatch.ServerStatus{Status: dispatch.Approved, Name: v.Name, Bound: r.Server}
}

// Instance finds a server by its instance's name.
func (s *Snapshot) Instance(name string) (Server, bool) {
	for _, v := range s.Servers {
		if v.Name == name && name != "" {
			return v, true
		}
	}
	return Server{}, false
}

// PendingServer is one that relays report and nobody decided on.
type PendingServer struct {
	URL    string
	Key    string // sha256 of its certificate's public key, as reported
	Relays []string
}

// PendingServers lists them by URL.
func (s *Snapshot) PendingServers() []PendingServer {
	by := map[string]*PendingServer{}
	for _, r := range s.RelayList() {
		if r.Server == "" || r.Inventory == nil || r.Rebound() {
			continue
		}
		if _, decided := s.Servers[r.Server]; decided {
			continue
		}
		k := r.Server + " " + r.Inventory.ServerKey // two keys of one URL are told apart
		if by[k] == nil {
			by[k] = &PendingServer{URL: r.Server, Key: r.Inventory.ServerKey}
		}
		by[k].Relays = append(by[k].Relays, r.ID)
	}
	var out []PendingServer
	for _, k := range slices.Sorted(maps.Keys(by)) {
		out = append(out, *by[k])
	}
	return out
}

func noInstance(name string) error {
	return fault.Newf(fault.NotFound, "no GitLab instance %q", wire.Clean(name, 80)).Hint("vk-hub gitlabs lists them")
}

func badURL(err error) error {
	return fault.New(fault.Usage, "naming a GitLab server").Because(err)
}

// ApproveServer makes a server's jobs welcome, under an instance's name.
func (h *Hub) ApproveServer(ctx context.Context, actor, rawURL, name string) (v Server, err error) {
	url, err := dispatch.ServerURL(rawURL)
	if err != nil {
		return v, badURL(err)
	}
	if !instanceName.MatchString(name) {
		return v, fault.Newf(fault.Usage, "%q is no name of an instance: 1 to 63 of a-z, 0-9, dot, dash and underscore, beginning with a letter or a digit", wire.Clean(name, 80))
	}
	err = h.do(ctx, func(t *tx) error {
		if other, ok := t.s.Instance(name); ok && other.URL != url {
			return fault.Newf(fault.Conflict, "instance %s is %s already", name, other.URL).Hint("choose another name")
		}
		old, known := t.s.Servers[url]
		switch {
		case old.Name == name:
			v = old
			return nil
		case old.Name != "":
			return fault.Newf(fault.Conflict, "%s is instance %s already", url, old.Name)
		case !known && len(t.s.Servers) >= MaxServers:
			return fault.Newf(fault.Busy, "%d GitLab servers are known already", len(t.s.Servers))
		}
		v = Server{URL: url, Name: name, At: t.unix(), Actor: actor}
		t.server(v)
		t.audit("", actor, "GitLab server approved", url+" as "+name)
		return nil
	})
	return v, err
}

func (t *tx) server(v Server) {
	t.touched++
	own(&t.s.Servers, &t.ownServers)
	t.s.Servers[v.URL] = v
	t.b.DropServers = slices.DeleteFunc(t.b.DropServers, func(u string) bool { return u == v.URL })
	t.b.Servers = append(t.b.Servers, v)
	t.event("", "server", v.URL)
}

// RejectServer refuses a server that is no instance.
func (h *Hub) RejectServer(ctx context.Context, actor, rawURL string) error {
	url, err := dispatch.ServerURL(rawURL)
	if err != nil {
		return badURL(err)
	}
	return h.do(ctx, func(t *tx) error {
		old, known := t.s.Servers[url]
		switch {
		case old.Name != "":
			return fault.Newf(fault.Conflict, "%s is instance %s", url, old.Name).Hint("vk-hub gitlabs remove %s", old.Name)
		case known:
			return nil
		case len(t.s.Servers) >= MaxServers:
			return fault.Newf(fault.Busy, "%d GitLab servers are known already", len(t.s.Servers))
		}
		t.server(Server{URL: url, At: t.unix(), Actor: actor})
		t.audit("", actor, "GitLab server rejected", url)
		return nil
	})
}

// ForgetServer drops a rejection.
func (h *Hub) ForgetServer(ctx context.Context, actor, rawURL string) error {
	url, err := dispatch.ServerURL(rawURL)
	if err != nil {
		return badURL(err)
	}
	return h.do(ctx, func(t *tx) error {
		old, known := t.s.Servers[url]
		switch {
		case !known:
			return fault.Newf(fault.NotFound, "%s was not rejected", url)
		case old.Name != "":
			return fault.Newf(fault.Conflict, "%s is instance %s", url, old.Name).Hint("vk-hub gitlabs remove %s", old.Name)
		}
		t.dropServer(url)
		t.audit("", actor, "GitLab server forgotten", url)
		return nil
	})
}

func (t *tx) dropServer(url string) {
	t.touched++
	own(&t.s.Servers, &t.ownServers)
	delete(t.s.Servers, url)
	t.b.Servers = slices.DeleteFunc(t.b.Servers, func(v Server) bool { return v.URL == url })
	t.b.DropServers = append(t.b.DropServers, url)
	t.event("", "server", url)
}

// RemoveInstance takes an instance back, with what was decided on its projects.
// It is refused while a relay is bound to it.
func (h *Hub) RemoveInstance(ctx context.Context, actor, name string) error {
	return h.do(ctx, func(t *tx) error {
		v, ok := t.s.Instance(name)
		if !ok {
			return noInstance(name)
		}
		for _, r := range t.s.RelayList() {
			if r.Server == v.URL {
				return fault.Newf(fault.Conflict, "relay %s is bound to %s", r.ID, name).Hint("vk-hub relays remove %s first, or reject its projects", r.ID[:8])
			}
		}
		t.dropServer(v.URL)
		own(&t.s.Projects, &t.ownProjects)
		maps.DeleteFunc(t.s.Projects, func(k ProjectKey, _ Project) bool { return k.Instance == name })
		t.b.Projects = slices.DeleteFunc(t.b.Projects, func(p Project) bool { return p.Instance == name })
		t.b.DropInstance = append(t.b.DropInstance, name)
		t.audit("", actor, "GitLab server removed", v.URL+", instance "+name)
		return nil
	})
}

// ProjectList lists projects by instance, then ID: of one instance unless it
// is "", and in one state unless that is.
func (s *Snapshot) ProjectList(instance string, state dispatch.Approval) []Project {
	var out []Project
	for _, p := range s.Projects {
		if (instance == "" || p.Instance == instance) && (state == "" || p.State == state) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b Project) int {
		return cmp.Or(strings.Compare(a.Instance, b.Instance), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// ProjectRef names a project, and its path unless that is "".
type ProjectRef struct {
	ID   int64
	Path string
}

// DecideProjects approves or rejects projects, whether jobs of them were seen
// or not.
func (h *Hub) DecideProjects(ctx context.Context, actor, instance string, refs []ProjectRef, state dispatch.Approval) error {
	return h.do(ctx, func(t *tx) error {
		if _, ok := t.s.Instance(instance); !ok {
			return noInstance(instance)
		}
		for _, r := range refs {
			if r.ID < 1 {
				return fault.Newf(fault.Usage, "%d is no project's ID", r.ID)
			}
		}
		if len(t.s.ProjectList(instance, ""))+len(refs) > MaxProjects {
			return fault.Newf(fault.Busy, "instance %s has too many projects", instance)
		}
		for _, r := range refs {
			p := t.s.Projects[ProjectKey{instance, r.ID}]
			if p.State == state && (r.Path == "" || r.Path == p.Path) {
				continue
			}
			p.Instance, p.ID, p.State, p.At, p.Actor = instance, r.ID, state, t.unix(), actor
			if r.Path != "" {
				p.Path = wire.Clean(r.Path, wire.MaxText)
			}
			t.project(p)
			t.audit("", actor, "project "+string(state), fmt.Sprintf("%s %d %s", instance, p.ID, p.Path))
		}
		return nil
	})
}

func (t *tx) project(p Project) {
	t.touched++
	own(&t.s.Projects, &t.ownProjects)
	k := ProjectKey{p.Instance, p.ID}
	t.s.Projects[k] = p
	t.b.DropProjects = slices.DeleteFunc(t.b.DropProjects, func(o ProjectKey) bool { return o == k })
	t.b.Projects = append(t.b.Projects, p)
	t.event("", "project", p.Instance)
}

// ForgetProjects drops what is known of projects.
func (h *Hub) ForgetProjects(ctx context.Context, actor, instance string, ids []int64) error {
	return h.do(ctx, func(t *tx) error {
		for _, id := range ids {
			if _, ok := t.s.Projects[ProjectKey{instance, id}]; !ok {
				return fault.Newf(fault.NotFound, "no project %d of instance %q", id, wire.Clean(instance, 80)).Hint("vk-hub gitlabs projects lists them")
			}
		}
		for _, id := range ids {
			k := ProjectKey{instance, id}
			p := t.s.Projects[k]
			t.touched++
			own(&t.s.Projects, &t.ownProjects)
			delete(t.s.Projects, k)
			t.b.Projects = slices.DeleteFunc(t.b.Projects, func(o Project) bool { return o.Instance == instance && o.ID == id })
			t.b.DropProjects = append(t.b.DropProjects, k)
			t.audit("", actor, "project forgotten", fmt.Sprintf("%s %d %s", instance, id, p.Path))
		}
		return nil
	})
}

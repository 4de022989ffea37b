package hubtest

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"virtkit/core/fleet/hub"
)

// jobs is the part of Memory that is of placed jobs.
type jobs struct {
	relays   map[string]*hub.Relay
	dropped  map[string]hub.Revoked
	servers  map[string]hub.Server
	projects map[hub.ProjectKey]hub.Project
	keys     map[string]hub.Key
	jobs     map[int64]*hub.Job
	specs    map[int64]hub.Spec
	tails    map[int64]hub.Tail
	kept     []int64 // tails in order
	dicts    map[uint32]hub.Dict
	requests map[string]hub.Request
	settings map[string]string
	egress   map[int64]hub.JobEgress
	rules    map[string]hub.EgressRule
}

func newJobs() jobs {
	return jobs{map[string]*hub.Relay{}, map[string]hub.Revoked{}, map[string]hub.Server{}, map[hub.ProjectKey]hub.Project{}, map[string]hub.Key{}, map[int64]*hub.Job{},
		map[int64]hub.Spec{}, map[int64]hub.Tail{}, nil, map[uint32]hub.Dict{}, map[string]hub.Request{}, map[string]string{},
		map[int64]hub.JobEgress{}, map[string]hub.EgressRule{}}
}

func (m *jobs) copy() jobs {
	return jobs{maps.Clone(m.relays), maps.Clone(m.dropped), maps.Clone(m.servers), maps.Clone(m.projects), maps.Clone(m.keys), maps.Clone(m.jobs), maps.Clone(m.specs), maps.Clone(m.tails),
		slices.Clone(m.kept), maps.Clone(m.dicts), maps.Clone(m.requests), maps.Clone(m.settings), maps.Clone(m.egress), maps.Clone(m.rules)}
}

func (m *jobs) load(l *hub.LoadedJobs) {
	for _, r := range m.relays {
		l.Relays = append(l.Relays, clone(r))
	}
	l.Dropped = slices.Collect(maps.Values(m.dropped))
	l.Servers = slices.Collect(maps.Values(m.servers))
	l.Projects = slices.Collect(maps.Values(m.projects))
	l.Settings = maps.Clone(m.settings)
	l.Rules = slices.Collect(maps.Values(m.rules))
	for _, k := range m.keys {
		l.Keys = append(l.Keys, clone(k))
	}
	used := map[[2]string]int64{}
	for _, n := range slices.Sorted(maps.Keys(m.jobs)) {
		j := m.jobs[n]
		l.LastJob = n
		if j.Settled == 0 {
			l.Jobs = append(l.Jobs, clone(j))
		}
		if j.ImageKey != "" && j.Node != "" && j.Finished > time.Now().Unix()-24*3600 {
			used[[2]string{j.ImageKey, j.Node}] = max(j.Finished, used[[2]string{j.ImageKey, j.Node}])
		}
	}
	for k, at := range used {
		l.Images = append(l.Images, hub.ImageUse{Key: k[0], Node: k[1], At: at})
	}
	for _, n := range m.kept {
		if t := m.tails[n]; !t.Failed {
			l.Tails = append(l.Tails, hub.TailSize{N: n, Bytes: int64(len(t.Data))})
		}
	}
	for id, d := range m.dicts {
		if id >= l.Dict.ID {
			l.Dict = d
		}
	}
	l.Specs = int64(len(m.specs))
}

func (m *jobs) apply(b *hub.JobBatch) {
	for _, r := range b.Relays {
		m.relays[r.ID] = clone(r)
	}
	for _, r := range b.DropRelays {
		delete(m.relays, r.Node)
		m.dropped[r.Node] = r
	}
	for _, s := range b.Servers {
		m.servers[s.URL] = s
	}
	for _, u := range b.DropServers {
		delete(m.servers, u)
	}
	for _, p := range b.Projects {
		m.projects[hub.ProjectKey{Instance: p.Instance, ID: p.ID}] = p
	}
	for _, k := range b.DropProjects {
		delete(m.projects, k)
	}
	for _, name := range b.DropInstance {
		maps.DeleteFunc(m.projects, func(k hub.ProjectKey, _ hub.Project) bool { return k.Instance == name })
	}
	for _, k := range b.Keys {
		m.keys[k.Hash] = clone(k)
	}
	for _, h := range b.DropKeys {
		delete(m.keys, h)
	}
	for _, j := range b.Jobs {
		m.jobs[j.N] = clone(j)
	}
	for _, n := range b.DropJobs {
		delete(m.jobs, n)
		delete(m.specs, n)
		m.dropTail(n)
		delete(m.egress, n)
	}
	for _, e := range b.Egress {
		if e.Revision >= m.egress[e.N].Revision {
			m.egress[e.N] = e
		}
	}
	for _, r := range b.Rules {
		m.rules[r.Name] = r
	}
	for _, name := range b.DropRules {
		delete(m.rules, name)
	}
	for _, s := range b.Specs {
		m.specs[s.N] = s
	}
	for n := range m.specs {
		if j := m.jobs[n]; j != nil && j.Finished > 0 && cmp.Or(j.Settled, j.Finished) < b.DropSpecs {
			delete(m.specs, n)
		}
	}
	for _, d := range b.Dicts {
		m.dicts[d.ID] = d
	}
	for _, t := range b.Tails {
		m.dropTail(t.N)
		m.tails[t.N] = t
		m.kept = append(m.kept, t.N)
	}
	for _, n := range b.DropTails {
		m.dropTail(n)
	}
	for _, r := range b.Requests {
		m.requests[r.Owner+" "+r.ID] = r
	}
	maps.DeleteFunc(m.requests, func(_ string, r hub.Request) bool { return r.At < b.DropRequests })
	maps.Copy(m.settings, b.Settings)
}

func (m *jobs) dropTail(n int64) {
	delete(m.tails, n)
	m.kept = slices.DeleteFunc(m.kept, func(k int64) bool { return k == n })
}

// Job is hub.Store's.
func (m *Memory) Job(_ context.Context, id string) (*hub.Job, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, j := range m.jobs.jobs {
		if j.ID == id {
			return clone(j), nil
		}
	}
	return nil, nil
}

// Jobs is hub.Store's.
func (m *Memory) Jobs(_ context.Context, q hub.JobQuery) (out []*hub.Job, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Sorted(maps.Keys(m.jobs.jobs))
	slices.Reverse(all)
	is := func(want, have string) bool { return want == "" || want == have }
	for _, n := range all {
		j := m.jobs.jobs[n]
		below, tree := strings.CutSuffix(q.Project, "/**")
		if len(out) >= q.Limit || q.Events && (j.Result == nil || len(j.Result.Events) == 0) || (q.Before > 0 && n >= q.Before) || j.Submitted < q.Since || !strings.HasPrefix(j.ID, q.ID) ||
			tree && !strings.HasPrefix(j.Path, below+"/") || !tree && !is(q.Project, j.Path) ||
			!is(q.Owner, j.Owner) || !is(q.Instance, j.Instance) || !is(q.Ref, j.Ref) || !is(q.Name, j.Name) ||
			!is(string(q.State), string(j.State)) || !is(q.Failure, j.Outcome()) || !is(q.Node, j.Node) || !is(q.Pool, j.Placement.Pool) {
			continue
		}
		out = append(out, clone(j))
	}
	return out, nil
}

// JobsOf is hub.Store's.
func (m *Memory) JobsOf(_ context.Context, ns []int64) (out []*hub.Job, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ns = slices.Sorted(slices.Values(ns))
	for _, n := range slices.Backward(ns) {
		if j := m.jobs.jobs[n]; j != nil {
			out = append(out, clone(j))
		}
	}
	return out, nil
}

// History is hub.Store's.
func (m *Memory) History(_ context.Context, after int64, limit int) (out []hub.JobRow, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(m.jobs.jobs)) {
		if n > after && len(out) < limit {
			out = append(out, m.jobs.jobs[n].Row())
		}
	}
	return out, nil
}

// Request is hub.Store's.
func (m *Memory) Request(_ context.Context, owner, id string) (*hub.Request, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.requests[owner+" "+id]
	if !ok {
		return nil, nil
	}
	return &r, nil
}

// Requests is hub.Store's.
func (m *Memory) Requests(_ context.Context, each func(owner, id string)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.requests {
		each(r.Owner, r.ID)
	}
	return nil
}

// Spec is hub.Store's.
func (m *Memory) Spec(_ context.Context, n int64) (*hub.Spec, []byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.specs[n]
	if !ok {
		return nil, nil, nil
	}
	return &s, m.dicts[s.Dict].Data, nil
}

// Specs is hub.Store's.
func (m *Memory) Specs(_ context.Context, n int, bytes int64) (out []hub.Spec, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Sorted(maps.Keys(m.specs))
	slices.Reverse(all)
	for _, k := range all {
		if bytes -= int64(len(m.specs[k].Data)); len(out) >= n || bytes < 0 {
			break
		}
		out = append(out, m.specs[k])
	}
	return out, nil
}

// Dict is hub.Store's.
func (m *Memory) Dict(_ context.Context, id uint32) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dicts[id].Data, nil
}

// Tail is hub.Store's.
func (m *Memory) Tail(_ context.Context, n int64) (*hub.Tail, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t, ok := m.tails[n]
	if !ok {
		return nil, nil
	}
	return &t, nil
}

// Egress is hub.Store's.
func (m *Memory) Egress(_ context.Context, n int64) (*hub.JobEgress, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.egress[n]
	if !ok {
		return nil, nil
	}
	return &e, nil
}

// Old is hub.Store's.
func (m *Memory) Old(_ context.Context, keep int, unsettled int64, limit int) (out []*hub.Job, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Sorted(maps.Keys(m.jobs.jobs))
	for _, n := range all[:max(0, len(all)-keep)] {
		if j := m.jobs.jobs[n]; len(out) < limit && j.Finished > 0 && (j.Settled > 0 || j.Finished < unsettled) {
			out = append(out, clone(j))
		}
	}
	return out, nil
}

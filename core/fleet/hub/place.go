package hub

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/outstore"
	"virtkit/core/fleet/wire"
)

// Placement. What a node has room for is its last heartbeat less what the hub
// asked of it since; the order is by load, then room, then ID (gitlab-dispatch,
// fleet-reference: Placement, Order, The ceiling, Image affinity).
//
// A claim is made under placer.mu before a node is asked, and taken back when
// the change that it belongs to is not stored: the sum of what nodes were asked
// never passes their room as the hub knows it, however many ask at once.

// JobOptions are of placed jobs; zero fields are the spec's.
type JobOptions struct {
	Outputs   *outstore.Store // nil: this hub takes no jobs
	LostAfter time.Duration   // past the unreachable threshold; 5 minutes
	History   int             // records kept; DefaultHistory

	KeptFailure int64 // bytes of a failed job's output; -1 = none, 0 = 256 KiB
	Kept        int64 // of other jobs'; -1 = none, 0 = 1 MiB
	KeptTotal   int64 // of all of these, as stored; -1 = none, 0 = 1 GiB

	// EgressRules has placed jobs held to the hub's egress rules, on nodes that
	// enforce them alone, and those of nodes' own gitlab-runners to the Fallback.
	EgressRules bool

	AffinityMaxLoad  float64 // -1 = affinity off, 0 = 0.7
	AffinityMaxExtra float64 // -1 = none above the least, 0 = 0.25
}

func (o *JobOptions) fill() {
	def := func(p *int64, v int64) {
		switch *p {
		case 0:
			*p = v
		case -1:
			*p = 0
		}
	}
	o.LostAfter, o.History = cmp.Or(o.LostAfter, 5*time.Minute), cmp.Or(o.History, DefaultHistory)
	def(&o.KeptFailure, 256<<10)
	def(&o.Kept, 1<<20)
	def(&o.KeptTotal, 1<<30)
	o.AffinityMaxLoad, o.AffinityMaxExtra = max(0, cmp.Or(o.AffinityMaxLoad, 0.7)), max(0, cmp.Or(o.AffinityMaxExtra, 0.25))
}

const (
	maxFits       = 1024            // envelopes of a node
	maxPlacings   = 1024            // placements whose capacity is remembered
	refusedPause  = 2 * time.Second // before a node that refused is asked again
	offerStep     = 5 * time.Second // for an offer's answer
	renewStep     = 10 * time.Second
	capacityPause = 100 * time.Millisecond // between two counts for one who waits
	leaseGrace    = 30 * time.Second       // past a lease, before the hub ends it without the node's word
	recentLoad    = time.Minute            // that a load average of 1 minute may not show yet
	imageIdle     = 30 * time.Minute
	imageIdleMax  = 24 * time.Hour
)

// placer is what placement holds in memory.
type placer struct {
	h   *Hub
	o   JobOptions
	out *outstore.Store

	mu     sync.RWMutex
	jobs   map[string]*Job     // not settled, as stored
	live   map[string]*liveJob // not finished
	queue  []string            // queued, oldest first
	lastN  int64
	spots  map[string]*spot
	res    map[string]*reservation
	gone   map[string]string // ended reservations → owner
	rev    uint64
	moved  chan struct{} // closed when rev moves
	fits   map[string]*fitsAt
	watch  map[string]chan struct{} // by what is waited for
	flight map[string]chan struct{} // creates under way
	orders map[string]*order        // by placement
	log    []*spot                  // what changed since orders looked; see changed

	kept  kept
	index index
	asked asked
}

// fitsAt is a placement's last count.
type fitsAt struct {
	rev  uint64
	fits int
	used time.Time
}

// claim is what a node was asked for.
type claim struct {
	env      wire.Envelope
	answered bool
	beat     uint64 // spot.beats when it was answered
}

// spot is a node as placement sees it.
type spot struct {
	p    *placer
	id   string
	sess *Session // nil = away
	held bool     // said what it holds, in this session
	down time.Time

	ok      bool     // may be given work as far as its reports go
	pools   []string // few: looked through faster than a map
	labels  []string
	cpus    int
	cap     int // 0 = none
	idle    time.Duration
	images  map[string]time.Time
	beats   uint64
	mem     int64
	disk    int64
	hasDisk bool
	load1   float64
	hasLoad bool

	res     map[string]*reservation
	work    map[string]*liveJob
	foreign map[string]bool // jobs that it holds and the hub has given up

	placed          int // sums of the three, by sum
	vcpus           int
	askMem, askDisk int64
}

// liveJob is what a record does not hold of a job that has not ended.
type liveJob struct {
	id      string
	spec    []byte // nil once a node accepted it
	place   dispatch.Placement
	image   string
	limit   int64 // of its stored output
	placeBy time.Time
	res     string // its reservation, "" = none
	refused map[string]time.Time

	spot     *spot // where it was sent
	claim    claim
	accepted time.Time
}

// reservation is an envelope set aside, or offered.
type reservation struct {
	id    string
	owner string
	spot  *spot
	claim claim
	end   time.Time
	reply chan wire.Answer     // of capacity 1
	lease chan wire.LeaseState // of capacity 1, while a renewal waits
}

func newPlacer(h *Hub, l *LoadedJobs) (*placer, error) {
	o := h.o.Jobs
	o.fill()
	p := &placer{h: h, o: o, out: o.Outputs, jobs: map[string]*Job{}, live: map[string]*liveJob{}, lastN: l.LastJob, spots: map[string]*spot{}, res: map[string]*reservation{},
		gone: map[string]string{}, rev: uint64(time.Now().UnixMilli()), moved: make(chan struct{}), fits: map[string]*fitsAt{}, watch: map[string]chan struct{}{}, flight: map[string]chan struct{}{}, orders: map[string]*order{}}
	if err := p.kept.load(l); err != nil {
		return nil, err
	}
	for _, j := range l.Jobs {
		p.jobs[j.ID] = j
		if j.State == dispatch.Finished {
			continue
		}
		// Queued and starting ones are ended by restartTx.
		v := &liveJob{id: j.ID, place: j.Placement, image: j.ImageKey, limit: outputLimit(j.TraceLimit), accepted: time.Now().Add(-recentLoad)}
		p.live[j.ID] = v
		if j.State == dispatch.Running {
			s := p.spot(j.Node)
			v.spot, v.claim = s, claim{env: j.Placement.Envelope, answered: true}
			s.work[j.ID] = v
			s.sum()
		}
	}
	for _, u := range l.Images {
		p.spot(u.Node).images[u.Key] = time.Now().Add(-h.o.Now().Sub(time.Unix(u.At, 0)))
	}
	return p, nil
}

// spot finds a node's, made when it is not there. p.mu is held, or p is new.
func (p *placer) spot(node string) *spot {
	s := p.spots[node]
	if s == nil {
		s = &spot{p: p, id: node, down: time.Now(), images: map[string]time.Time{}, res: map[string]*reservation{}, work: map[string]*liveJob{}, foreign: map[string]bool{}}
		p.spots[node] = s
	}
	return s
}

// bump says that what fits may have changed. p.mu is held.
func (p *placer) bump() {
	p.rev++
	close(p.moved)
	p.moved = make(chan struct{})
	if len(p.queue) > 0 {
		p.h.wakePlacing()
	}
}

func (h *Hub) wakePlacing() {
	select {
	case h.work <- struct{}{}:
	default:
	}
}

// refresh takes over what the snapshot has of a node.
func (p *placer) refresh(node string) {
	n := p.h.Snapshot().Nodes[node]
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.spot(node)
	defer p.changed(s)
	if n == nil { // removed: its jobs are ended by everySecondTx
		s.ok = false
		p.bump()
		return
	}
	s.pools, s.labels, s.cpus, s.cap, s.idle, s.ok = n.Pools, nil, 0, n.Desired.Policy.Ceiling, imageIdle, p.h.PlacesNot(n) == ""
	if v := n.Inventory; v != nil {
		s.labels, s.cpus = v.Labels, v.CPUs
	}
	if st := n.State; st != nil {
		limit := 0
		switch {
		case st.Placed != nil:
			limit = st.Placed.Limit
			if st.Placed.ImageCacheIdleSecs > 0 {
				s.idle = min(time.Duration(st.Placed.ImageCacheIdleSecs)*time.Second, imageIdleMax)
			}
		case st.Concurrency != nil:
			limit = st.Concurrency.LocalCeiling
		}
		if limit > 0 && (s.cap == 0 || limit < s.cap) {
			s.cap = limit
		}
	}
	p.bump()
}

// PlacesNot says why the hub places nothing on a node, as far as the node's
// reports go, "" when it may.
func (h *Hub) PlacesNot(n *Node) string {
	why := n.placesNot()
	if why == "" && h.o.Jobs.EgressRules && (n.Inventory == nil || !slices.Contains(n.Inventory.Features, wire.FeatureEgressRules)) {
		return "its vk or its [net] mode does not enforce the hub's egress rules"
	}
	return why
}

func (n *Node) placesNot() string {
	st := n.State
	switch {
	case n.Version < wire.VersionJobs:
		return "its vk takes no placed jobs (protocol version 3)"
	case n.Conflict != nil:
		return "it is in a recovery conflict"
	case st == nil:
		return "it has not reported its state"
	case st.Placed != nil && st.Placed.Runner != "":
		return "it runs a gitlab-runner of its own: " + st.Placed.Runner
	case st.Node != wire.Ready:
		return "it is " + string(st.Node)
	case n.Desired.Policy.Stop || st.Acquisition != wire.Taking:
		return "its acquisition is stopped"
	}
	return ""
}

// attach begins a node's session: nothing is placed before its held.
func (p *placer) attach(sess *Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sess.live.up.Load() != sess {
		return // a newer one has attached meanwhile
	}
	s := p.spot(sess.node)
	s.sess, s.held, s.beats, s.mem, s.disk, s.hasDisk, s.hasLoad = sess, false, s.beats+1, 0, 0, false, false
	p.changed(s)
}

// detach ends a node's session, and with it its reservations.
func (p *placer) detach(sess *Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.spots[sess.node]
	if s == nil || s.sess != sess {
		return
	}
	s.sess, s.held, s.down = nil, false, sess.began.Add(time.Duration(sess.heard.Load()))
	for _, r := range s.res {
		p.drop(r)
	}
	p.changed(s)
	p.bump()
}

// drop ends a reservation, and tells who waits for it. p.mu is held.
func (p *placer) drop(r *reservation) {
	delete(p.res, r.id)
	delete(r.spot.res, r.id)
	r.spot.sum()
	if len(p.gone) > 1<<16 {
		clear(p.gone) // they read as gone still, of whomever
	}
	p.gone[r.id] = r.owner
	select {
	case r.reply <- wire.Answer{State: "lost"}:
	default:
	}
	select {
	case r.lease <- wire.LeaseState{State: "gone"}:
	default:
	}
}

// beat takes a heartbeat.
func (p *placer) beat(node string, m *wire.Heartbeat) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.spot(node)
	s.beats++
	s.mem = m.MemAvailable
	if m.Admission.Budget > 0 {
		s.mem = m.Admission.Budget - m.Admission.Committed
	}
	s.disk, s.hasDisk = 0, false
	for _, f := range m.Filesystems {
		if f.Role == wire.RoleJobs {
			s.disk, s.hasDisk = max(s.disk, f.Free), true
		}
	}
	s.load1, s.hasLoad = 0, m.Load1 != nil
	if m.Load1 != nil {
		s.load1 = *m.Load1
	}
	s.sum()
	p.bump()
}

// sum adds up what the node was asked for.
func (s *spot) sum() {
	defer s.p.changed(s)
	s.placed, s.vcpus, s.askMem, s.askDisk = len(s.res)+len(s.work)+len(s.foreign), 0, 0, 0
	add := func(c *claim) {
		s.vcpus += c.env.CPUs
		if !c.answered || c.beat == s.beats {
			s.askMem += c.env.Memory
			s.askDisk += c.env.Disk
		}
	}
	for _, r := range s.res {
		add(&r.claim)
	}
	for _, l := range s.work {
		add(&l.claim)
	}
}

// takes says whether the node may be given work of a placement at all.
func (s *spot) takes(p *dispatch.Placement) bool {
	if s.sess == nil || !s.held || !s.ok || !slices.Contains(s.pools, p.Pool) || s.cpus < p.Envelope.CPUs {
		return false
	}
	for _, l := range p.Labels {
		if !slices.Contains(s.labels, l) {
			return false
		}
	}
	return true
}

// room is how many envelopes the node has room for.
func (s *spot) room(e *wire.Envelope) int {
	n := int64(maxFits)
	if e.Memory > 0 {
		n = min(n, (s.mem-s.askMem)/e.Memory)
	}
	if e.Disk > 0 {
		if !s.hasDisk {
			return 0
		}
		n = min(n, (s.disk-s.askDisk)/e.Disk)
	}
	if s.cap > 0 {
		n = min(n, int64(s.cap-s.placed))
	}
	return int(max(0, n))
}

func (s *spot) load(room int) float64 {
	l := float64(s.placed) / float64(s.placed+room)
	cpus := float64(max(1, s.cpus))
	l = max(l, float64(s.vcpus)/cpus)
	if s.hasLoad {
		l = max(l, s.load1/cpus)
	}
	return l
}

// fitsNow counts a placement's envelopes. p.mu is held.
func (p *placer) fitsNow(pl *dispatch.Placement) (n int) {
	for _, s := range p.spots {
		if s.takes(pl) {
			n += s.room(&pl.Envelope)
		}
	}
	return n
}

// warm is the node that a job with an image of its own is best started on,
// since it has it; nil when there is none, or all are busy. p.mu is held.
func (p *placer) warm(l *liveJob, now time.Time) *spot {
	if l.image == "" || p.o.AffinityMaxLoad == 0 {
		return nil
	}
	least, has := 0.0, false
	var list []*spot
	for _, s := range p.spots {
		if !s.takes(&l.place) || l.refuses(s, now) || s.room(&l.place.Envelope) == 0 && s.res[l.res] == nil || !s.hasLoad {
			continue
		}
		if v := s.lightness(now); !has || v < least {
			least, has = v, true
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *spot) int {
		ra, rb := a.room(&l.place.Envelope), b.room(&l.place.Envelope)
		return cmp.Or(cmp.Compare(a.load(max(1, ra)), b.load(max(1, rb))), cmp.Compare(rb, ra), strings.Compare(a.id, b.id))
	})
	for _, s := range list {
		v := s.lightness(now)
		if s.keeps(l.image, now) && v+float64(l.place.Envelope.CPUs)/float64(max(1, s.cpus)) < p.o.AffinityMaxLoad && v <= least+p.o.AffinityMaxExtra {
			return s
		}
	}
	return nil
}

// lightness is the load of a node for image affinity, per CPU.
func (s *spot) lightness(now time.Time) float64 {
	v := s.load1
	for _, l := range s.work {
		if l.accepted.IsZero() || now.Sub(l.accepted) < recentLoad {
			v += float64(l.claim.env.CPUs)
		}
	}
	return v / float64(max(1, s.cpus))
}

// keeps says whether the node still has the images of a key.
func (s *spot) keeps(key string, now time.Time) bool {
	for _, l := range s.work {
		if l.image == key && !l.accepted.IsZero() {
			return true
		}
	}
	at, ok := s.images[key]
	return ok && now.Sub(at) < s.idle
}

func (l *liveJob) refuses(s *spot, now time.Time) bool {
	at, ok := l.refused[s.id]
	return ok && now.Sub(at) < refusedPause
}

// watching is closed when what is told.
func (p *placer) watching(what string) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	ch := p.watch[what]
	if ch == nil {
		ch = make(chan struct{})
		p.watch[what] = ch
	}
	return ch
}

// told wakes who waits for something. p.mu is held.
func (p *placer) told(what string) {
	if ch := p.watch[what]; ch != nil {
		close(ch)
		delete(p.watch, what)
	}
}

// tellOutput wakes who waits for a job's output.
func (p *placer) tellOutput(job string) {
	p.mu.Lock()
	p.told("output " + job)
	p.mu.Unlock()
}

// forgetOld drops placements whose capacity nobody asked for lately. p.mu is
// held.
func (p *placer) forgetOld(now time.Time) {
	if len(p.fits) > maxPlacings {
		maps.DeleteFunc(p.fits, func(_ string, f *fitsAt) bool { return now.Sub(f.used) > time.Minute })
		if len(p.fits) > maxPlacings {
			clear(p.fits)
		}
	}
}

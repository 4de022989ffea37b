package policy

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Outcome says what became of what a guest wanted.
type Outcome string

// The outcomes. A contact that the node's dry-run would block is a would-block
// alone; one that a hub's rule in dry-run would block is observed as well.
const (
	Blocked    Outcome = "blocked"
	WouldBlock Outcome = "would_block" // carried; a dry-run would not have
	Observed   Outcome = "observed"    // carried; for DNS a lookup, which proves no connection
)

// Destination is where something went: a name, an IPv4 address and port (port
// 0 for an echo), or text that is neither and so never becomes an entry of a
// list. Exactly one is set.
type Destination struct {
	Domain string
	Addr   netip.AddrPort
	Text   string
}

// DestinationOf is a flow's or a question's destination, cleaned.
func DestinationOf(f Flow) Destination {
	if f.Proto != DNS {
		return Destination{Addr: netip.AddrPortFrom(f.Dst.Addr().Unmap(), f.Dst.Port())}
	}
	if n, err := ParseName(CanonicalName(f.Name)); err == nil {
		return Destination{Domain: n}
	}
	return Destination{Text: CleanName(f.Name)}
}

// String is the destination as traces show it.
func (d Destination) String() string {
	switch {
	case d.Domain != "":
		return d.Domain
	case !d.Addr.IsValid():
		return d.Text
	case d.Addr.Port() == 0:
		return d.Addr.Addr().String()
	}
	return d.Addr.String()
}

// Entry is what one VM did with one destination, added up.
type Entry struct {
	Outcome Outcome   `json:"outcome"`
	Proto   Proto     `json:"proto"`
	Dest    string    `json:"dest"`              // Destination.String
	Kind    DestKind  `json:"kind"`              // what Dest is
	Service string    `json:"service,omitempty"` // whose VM it is; "" = the job's
	Layer   string    `json:"layer,omitempty"`   // that decided, unless observed
	Rule    string    `json:"rule,omitempty"`    // the hub's rule in dry-run
	Asked   string    `json:"asked,omitempty"`   // the name a flow asked for, where it is not one that opened the address
	Opened  string    `json:"opened,omitempty"`
	Reason  string    `json:"reason,omitempty"` // at first sight
	First   time.Time `json:"first"`
	Last    time.Time `json:"last"`
	Stage   string    `json:"stage,omitempty"` // at first sight, when known
	Count   uint64    `json:"count"`
}

// DestKind says what a destination is.
type DestKind string

// The kinds of destinations.
const (
	KindDomain DestKind = "domain"
	KindIP     DestKind = "ip"
	KindText   DestKind = "text"
)

func (d Destination) kind() DestKind {
	switch {
	case d.Domain != "":
		return KindDomain
	case d.Addr.IsValid():
		return KindIP
	}
	return KindText
}

type entryKey struct {
	outcome Outcome
	proto   Proto
	dest    string
	service string
	layer   string
	rule    string
	asked   string
}

func (e *Entry) key() entryKey {
	return entryKey{e.Outcome, e.Proto, e.Dest, e.Service, e.Layer, e.Rule, e.Asked}
}

// maxLog bounds what a Recorder keeps of denials, and as much of contacts, in
// bytes as entrySize counts them.
const maxLog = 8 << 20

// entrySize is what an entry costs: its strings, and the rest of it with its
// place in the map.
func entrySize(e *Entry) int {
	return 400 + len(e.Dest)*2 + len(e.Service) + len(e.Rule) + len(e.Asked)*2 + len(e.Opened) + len(e.Reason) + len(e.Stage)
}

// Counts are events by outcome.
type Counts struct {
	Blocked    uint64 `json:"blocked,omitempty"`
	WouldBlock uint64 `json:"would_block,omitempty"`
	Observed   uint64 `json:"observed,omitempty"`
}

func (c *Counts) of(o Outcome) *uint64 {
	switch o {
	case Blocked:
		return &c.Blocked
	case WouldBlock:
		return &c.WouldBlock
	}
	return &c.Observed
}

func (c Counts) minus(o Counts) Counts {
	return Counts{c.Blocked - o.Blocked, c.WouldBlock - o.WouldBlock, c.Observed - o.Observed}
}

func (c Counts) any() bool { return c != Counts{} }

// Recorder adds up what a phase's guests did. Denials (blocked and
// would-block) and contacts (observed) are kept up to 8 MiB each; what comes
// after that and is new is only counted. Safe for concurrent use.
type Recorder struct {
	phase Phase

	mu       sync.Mutex
	stage    string
	entries  map[entryKey]*Entry
	order    []*Entry // by first sight
	denials  int      // bytes
	contacts int
	uncount  Counts
	revision uint64
}

// NewRecorder is an empty record of a phase.
func NewRecorder(p Phase) *Recorder {
	return &Recorder{phase: p, entries: map[entryKey]*Entry{}}
}

// SetStage names the stage that runs from now on.
func (r *Recorder) SetStage(stage string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stage = CleanText(stage, maxVM)
}

// again adds one event of a kind that is known; false when it is not, and then
// nothing is added. It allocates nothing.
func (r *Recorder) again(k *entryKey, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.againLocked(k, now)
}

func (r *Recorder) againLocked(k *entryKey, now time.Time) bool {
	old := r.entries[*k]
	if old == nil {
		return false
	}
	r.revision++
	old.Count++
	if now.After(old.Last) {
		old.Last = now
	}
	return true
}

// add adds one event. e carries key and reason.
func (r *Recorder) add(e Entry, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := e.key()
	if r.againLocked(&k, now) {
		return
	}
	r.revision++
	e.First, e.Last, e.Stage, e.Count = now, now, r.stage, 1
	size, used := entrySize(&e), &r.denials
	if e.Outcome == Observed {
		used = &r.contacts
	}
	if *used+size > maxLog {
		*r.uncount.of(e.Outcome)++
		return
	}
	*used += size
	r.entries[k] = &e
	r.order = append(r.order, &e)
}

// Judged records a flow or question of a service's VM, or with "" of the
// job's, and what was decided. quiet leaves out a contact that is no news: a flow to
// an address behind which there is a lookup.
func (r *Recorder) Judged(service string, f Flow, j Judgement, quiet bool, now time.Time) {
	if j.Allow && len(j.Would) == 0 {
		if quiet {
			return
		}
		// Most questions are for names that were asked for before, which are in the
		// record as they are compared: a name that is not so is not found here.
		if f.Proto == DNS && r.again(&entryKey{outcome: Observed, proto: DNS, dest: CanonicalName(f.Name), service: CleanText(service, maxVM)}, now) {
			return
		}
	}
	d := DestinationOf(f)
	e := Entry{Proto: f.Proto, Dest: d.String(), Kind: d.kind(), Service: CleanText(service, maxVM)}
	if !j.Allow {
		e.Outcome, e.Layer, e.Reason = Blocked, j.Layer, CleanText(j.Reason, 2*maxText)
		r.add(e, now)
		return
	}
	byNode := false
	for _, w := range j.Would {
		x := e
		x.Outcome, x.Layer, x.Rule, x.Reason = WouldBlock, w.Layer, CleanText(w.Rule, maxText), CleanText(w.Reason, 2*maxText)
		byNode = byNode || w.Rule == ""
		r.add(x, now)
	}
	if !quiet && !byNode {
		e.Outcome = Observed
		r.add(e, now)
	}
}

// Asked records that a flow asked for a name that is not one of those that
// opened its address, and what was decided about that.
func (r *Recorder) Asked(service string, f Flow, openedBy []string, asked string, j Judgement, now time.Time) {
	d := DestinationOf(f)
	e := Entry{Outcome: Observed, Proto: f.Proto, Dest: d.String(), Kind: d.kind(), Service: CleanText(service, maxVM), Asked: CleanName(asked)}
	if len(openedBy) > 0 {
		e.Opened = CleanName(openedBy[0])
	}
	if !j.Allow {
		e.Outcome, e.Layer, e.Reason = Blocked, j.Layer, CleanText(j.Reason, 2*maxText)
	} else if len(j.Would) > 0 {
		w := j.Would[0]
		e.Outcome, e.Layer, e.Rule, e.Reason = WouldBlock, w.Layer, CleanText(w.Rule, maxText), CleanText(w.Reason, 2*maxText)
	}
	r.add(e, now)
}

// Record is a Recorder's state at one time, by first sight. As JSON it carries
// a record from the switch's process to the one that writes the trace.
type Record struct {
	Phase    Phase   `json:"phase"`
	Revision uint64  `json:"revision"` // events so far
	Entries  []Entry `json:"entries"`
	// Uncounted are the events that were only counted, past the log's bound.
	Uncounted Counts `json:"uncounted,omitzero"`
}

// Snapshot is the record so far.
func (r *Recorder) Snapshot() Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Record{Phase: r.phase, Revision: r.revision, Uncounted: r.uncount, Entries: make([]Entry, len(r.order))}
	for i, e := range r.order {
		s.Entries[i] = *e
	}
	return s
}

// Since is what was added after an earlier snapshot of the same Recorder:
// entries with the counts of that time alone.
func (s Record) Since(earlier Record) Record {
	had := make(map[entryKey]uint64, len(earlier.Entries))
	for i := range earlier.Entries {
		had[earlier.Entries[i].key()] = earlier.Entries[i].Count
	}
	out := Record{Phase: s.Phase, Revision: s.Revision, Uncounted: s.Uncounted.minus(earlier.Uncounted)}
	for _, e := range s.Entries {
		if n := e.Count - had[e.key()]; n > 0 {
			e.Count = n
			out.Entries = append(out.Entries, e)
		}
	}
	return out
}

// ContactedNames are the names that were looked up and carried, sorted: what
// the job's standing list gains from this run.
func (s Record) ContactedNames() []string {
	var out []string
	for _, e := range s.Entries {
		if e.Proto == DNS && e.Outcome != Blocked {
			out = append(out, e.Dest)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

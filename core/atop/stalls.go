package atop

// When a process counts as stalled.
const (
	StallAfter   = 300 // seconds in the same wait channels
	stallCPU     = 10  // percent of a processor, below which it does no work
	maxTracked   = 1 << 16
	StackThreads = 256 // threads of a process whose stacks are recorded
)

// Stalls finds processes of several threads that have done some work and then
// stay in the same set of wait channels, with next to no processor time and no
// disk I/O. Guest and host apply it to the same samples. Which channels there
// are counts, not how many threads wait in each: a thread that is caught
// running is in none, so as many channels may be missing as threads ran.
type Stalls struct {
	tracks map[ProcKey]*track
	waits  map[int]Recorded // as last recorded, by pid
	round  int
}

// ProcKey tells a process from a later one of the same number.
type ProcKey struct {
	PID   int
	Start int64
}

// Key of a process.
func (p *Proc) Key() ProcKey { return ProcKey{p.PID, p.Start} }

// Stalled is one stall of a process.
type Stalled struct {
	Key      ProcKey
	Title    string
	Threads  int
	Since    int64 // epoch of the sample from which on it stood still
	Until    int64 // of the last one
	Running  int   // threads, at the last one
	Channels []Channel
	First    bool // it was there in the first sample: the job did not start it
	New      bool // it became a stall with this sample, its first
}

type track struct {
	worked  bool
	first   bool
	since   int64
	set     []string // channels of the window
	round   int
	stalled bool // has been one
}

// NewStalls returns one that knows of no process.
func NewStalls() *Stalls {
	return &Stalls{tracks: map[ProcKey]*track{}, waits: map[int]Recorded{}}
}

// Recorded are the wait channels of a process and the epoch of the sample that
// told of them.
type Recorded struct {
	At       int64
	Channels []Channel
}

// Waits are the threads of a process by wait channel as last recorded; nil
// channels when nothing is.
func (t *Stalls) Waits(pid int) Recorded { return t.waits[pid] }

// Add takes the next sample and calls f for every process that is stalled with
// it. s.Waits may be what changed alone.
func (t *Stalls) Add(s *Sample, f func(Stalled)) {
	if s.Reset {
		clear(t.tracks)
		clear(t.waits)
	}
	t.round++
	for i := range s.Waits {
		if w := &s.Waits[i]; len(w.Channels) > 0 && len(t.waits) < maxTracked {
			t.waits[w.PID] = Recorded{s.Epoch, w.Channels}
		} else {
			delete(t.waits, w.PID)
		}
	}
	for i := range s.Procs {
		p := &s.Procs[i]
		if p.Ended() || p.Threads < 2 || p.PID == 1 { // 1 is the recorder itself
			continue
		}
		k := p.Key()
		tr := t.tracks[k]
		if tr == nil {
			if len(t.tracks) >= maxTracked {
				continue
			}
			tr = &track{since: s.Epoch, first: s.Reset}
			t.tracks[k] = tr
		}
		tr.round = t.round
		if t.still(tr, p, s) && s.Epoch-tr.since >= StallAfter {
			f(Stalled{Key: k, Title: p.Title(), Threads: p.Threads, Since: tr.since, Until: s.Epoch,
				Running: p.Running, Channels: t.waits[p.PID].Channels, First: tr.first, New: !tr.stalled})
			tr.stalled = true
		}
	}
	for k, tr := range t.tracks {
		if tr.round != t.round {
			delete(t.tracks, k)
		}
	}
	if len(t.waits) > len(t.tracks) {
		t.forget(s)
	}
}

// forget drops the channels of processes that are gone.
func (t *Stalls) forget(s *Sample) {
	alive := make(map[int]bool, len(s.Procs))
	for i := range s.Procs {
		if p := &s.Procs[i]; !p.Ended() && p.Threads > 1 {
			alive[p.PID] = true
		}
	}
	for pid := range t.waits {
		if !alive[pid] {
			delete(t.waits, pid)
		}
	}
}

// still says whether the process has stood still since tr.since, after some
// work; else its window begins anew with this sample.
func (t *Stalls) still(tr *track, p *Proc, s *Sample) bool {
	used := p.User + p.Sys
	if used > 0 {
		tr.worked = true
	}
	busy := p.RSect+p.WSect > 0
	if !s.Reset && p.Hertz > 0 && s.Interval > 0 && used*100 >= stallCPU*p.Hertz*s.Interval {
		busy = true
	}
	now := t.waits[p.PID].Channels
	if !busy && !s.Reset && tr.set != nil && sameSet(tr.set, now, p.Running) {
		return tr.worked
	}
	tr.since, tr.set = s.Epoch, tr.set[:0]
	if tr.set == nil {
		tr.set = []string{}
	}
	for _, c := range now {
		tr.set = append(tr.set, c.Name)
	}
	return false
}

// sameSet says whether the channels of now are those of set, of which as many
// may be missing as threads were running.
func sameSet(set []string, now []Channel, running int) bool {
	missing := len(set)
	for _, c := range now {
		found := false
		for _, n := range set {
			if n == c.Name {
				found = true
				break
			}
		}
		if !found {
			return false
		}
		missing--
	}
	return missing <= running && len(set) > 0
}

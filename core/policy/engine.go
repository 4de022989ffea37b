package policy

import (
	"net/netip"
	"slices"
	"time"
)

// An Engine is all that a switch may ask a Decider to be.
var (
	_ Opener     = (*Engine)(nil)
	_ Witness    = (*Engine)(nil)
	_ Asker      = (*Engine)(nil)
	_ Questioner = (*Engine)(nil)
)

// Engine is a phase's policy at work: the Decider and Opener of a switch. It
// holds a Stack for each VM, the addresses their lookups opened, and the
// record. Safe for concurrent use.
type Engine struct {
	jobPort  string
	job      *Stack
	services map[string]*Stack
	opened   *OpenedTable
	record   *Recorder
	now      func() time.Time
	strict   bool
}

// EngineConfig is what an Engine needs.
type EngineConfig struct {
	Policy  *Policy
	JobPort string           // name of the job's own port on the switch; others are services
	Record  *Recorder        // nil = a new one
	Now     func() time.Time // nil = time.Now
	// Strict has flows held to the name they ask for; see Engine.Asked.
	Strict bool
}

// NewEngine makes an Engine.
func NewEngine(c EngineConfig) *Engine {
	e := &Engine{jobPort: c.JobPort, job: c.Policy.Stack(""), services: map[string]*Stack{},
		opened: NewOpenedTable(), record: c.Record, now: c.Now, strict: c.Strict}
	for _, s := range c.Policy.Services {
		e.services[s.VM] = c.Policy.Stack(s.VM)
	}
	if e.record == nil {
		e.record = NewRecorder(c.Policy.Phase)
	}
	if e.now == nil {
		e.now = time.Now
	}
	return e
}

// Recorder is where the engine records.
func (e *Engine) Recorder() *Recorder { return e.record }

func (e *Engine) stack(port string) *Stack {
	if port == e.jobPort {
		return e.job // whatever a service is called
	}
	if s := e.services[port]; s != nil {
		return s
	}
	return e.job
}

func (e *Engine) vm(port string) string {
	if port == e.jobPort {
		return ""
	}
	return port
}

// Decide decides and records.
func (e *Engine) Decide(f Flow) Verdict {
	if f.Proto != DNS {
		return e.decideIP(f)
	}
	now := e.now()
	j := e.stack(f.Port).Name(f.Name)
	e.record.Judged(e.vm(f.Port), f, j, false, now)
	return j.Verdict
}

// decideIP is apart because its frame is large: each question is decided in a
// goroutine of its own, whose stack would have to grow for it.
//
//go:noinline
func (e *Engine) decideIP(f Flow) Verdict {
	now := e.now()
	var room [maxOpeners]string
	openers := e.opened.Openers(f.Port, f.Dst.Addr(), now, room[:0])
	j := e.stack(f.Port).IP(f, openers)
	e.record.Judged(e.vm(f.Port), f, j, len(openers) > 0, now)
	return j.Verdict
}

// Unreadable decides over a question of a port that cannot be read or rebuilt,
// and records it.
func (e *Engine) Unreadable(port string) Verdict {
	j := e.stack(port).Unreadable()
	e.record.Judged(e.vm(port), Flow{Port: port, Proto: DNS, Name: UnreadableName}, j, j.Allow, e.now())
	return j.Verdict
}

// Opened opens what the answer to an allowed question gave, under the name of
// the question.
func (e *Engine) Opened(port string, names []string, addrs []netip.Addr, ttl time.Duration) {
	if len(names) > 0 {
		e.opened.Open(port, names[0], addrs, ttl, e.now())
	}
}

// Denied records what the switch refused on its own, before any layer was
// asked: the host's addresses and those that are nobody's.
func (e *Engine) Denied(f Flow, v Verdict) {
	e.record.Judged(e.vm(f.Port), f, Judgement{Verdict: v}, false, e.now())
}

// Listens wants the name that a flow asks for where a lookup opened its
// address: only then is it the name, and not the address, that was allowed.
func (e *Engine) Listens(f Flow) bool {
	var room [maxOpeners]string
	return len(e.opened.Openers(f.Port, f.Dst.Addr(), e.now(), room[:0])) > 0
}

// Asked decides over the name that an allowed flow asks for, read from its TLS
// hello or its Host line, when that is known. A name among those that opened
// the address is no news. Any other is recorded; it is refused only when the
// engine is strict, the layers do not allow it, and they do not list the
// address itself.
func (e *Engine) Asked(f Flow, asked string) Verdict {
	now := e.now()
	var room [maxOpeners]string
	openers := e.opened.Openers(f.Port, f.Dst.Addr(), now, room[:0])
	if slices.Contains(openers, CanonicalName(asked)) {
		return Verdict{Allow: true}
	}
	j := e.stack(f.Port).Asked(f, openers, asked)
	if !e.strict {
		// Nothing holds the flow to its name; the record says that it asked.
		j = Judgement{Verdict: Verdict{Allow: true}}
	}
	e.record.Asked(e.vm(f.Port), f, openers, asked, j, now)
	return j.Verdict
}

package policy

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"time"
)

// Bounds of a report.
const (
	reportDenials  = 512
	reportContacts = 512
	reportRefusals = 512
	reportBytes    = 256 << 10
	// reportFrame is kept back for all that is not an entry: at most 32 rule
	// names of 256 bytes, escaped, and two phases.
	reportFrame = 64 << 10
)

// Coverage says how much of a phase a report tells.
type Coverage string

// The coverages. Unavailable is a phase that ran unrecorded; a phase that did
// not run is not in the report.
const (
	Complete    Coverage = "complete"
	Partial     Coverage = "partial"
	Unavailable Coverage = "unavailable"
)

// Report is what a node tells its hub of a placed job's egress: cumulative, so
// that of two the one with the higher revision replaces the other.
type Report struct {
	Revision uint64 `json:"revision"`
	// Rules are the hub's rules the job ran under, DryRunRules those that only
	// report.
	Rules       []string      `json:"rules"`
	DryRunRules []string      `json:"dry_run_rules,omitempty"`
	Blocked     []ReportEntry `json:"blocked"`
	WouldBlock  []ReportEntry `json:"would_block"`
	Observed    []ReportEntry `json:"observed"`
	Refusals    []Refusal     `json:"refusals,omitempty"`
	// RefusalsOmitted is how many more refusals there were than are listed.
	RefusalsOmitted int          `json:"refusals_omitted,omitempty"`
	Run             *ReportPhase `json:"run,omitempty"`
	Build           *ReportPhase `json:"build,omitempty"`
}

// ReportPhase is what a report says of a phase as a whole.
type ReportPhase struct {
	Coverage Coverage `json:"coverage"`
	// Cap is the fingerprint of the node's cap the phase was held to.
	Cap string `json:"cap,omitempty"`
	// OmittedEntries are entries left out for the report's bounds,
	// OmittedEvents the attempts in them and those that were only counted.
	OmittedEntries Counts `json:"omitted_entries,omitzero"`
	OmittedEvents  Counts `json:"omitted_events,omitzero"`
	// Sent and Received are bytes between the job and the outside, when known.
	Sent     *uint64 `json:"sent,omitempty"`
	Received *uint64 `json:"received,omitempty"`
}

// ReportEntry is one destination in a report.
type ReportEntry struct {
	Protocol    Proto             `json:"protocol"` // dns, tcp, udp; icmp for echo
	Destination ReportDestination `json:"destination"`
	Phase       Phase             `json:"phase"`
	Service     string            `json:"service,omitempty"` // whose VM it is; "" = the job's
	FirstSeen   time.Time         `json:"first_seen"`
	LastSeen    time.Time         `json:"last_seen"`
	Stage       string            `json:"stage,omitempty"`
	Count       uint64            `json:"count"`
	Layer       string            `json:"layer,omitempty"` // of a denial
	Rule        string            `json:"rule,omitempty"`  // the hub's, in dry-run
	Asked       string            `json:"asked,omitempty"` // name the flow asked for
}

// ReportDestination is typed: a domain, an address and port, or text that is
// neither and never seeds an entry.
type ReportDestination struct {
	Domain string `json:"domain,omitempty"`
	IP     string `json:"ip,omitempty"`
	Port   uint16 `json:"port,omitempty"`
	Text   string `json:"text,omitempty"`
}

// PhaseInput is what a report is built of, for a phase that ran.
type PhaseInput struct {
	Record   Record
	Cap      string  // ReportCap(…).Fingerprint
	Sent     *uint64 // nil = not measured
	Received *uint64
	// Coverage overrides what the record says: Partial for a phase whose switch
	// or driver was lost, Unavailable for one nobody recorded. "" = by the
	// record.
	Coverage Coverage
}

// ReportInput is what a report is built of. Revision is the sender's count of
// the job's reports: each that differs (Report.Same) takes the next, and the
// one with the result the highest.
type ReportInput struct {
	Revision   uint64
	Hub        *HubEgress
	Refusals   []Refusal
	Run, Build *PhaseInput // nil = the phase did not run
}

// BuildReport makes the report: at most 512 denials, 512 contacts and 256 KiB.
// Entries are taken by first sight, each at the size it may grow to, so that
// one that a report had is in every later one.
func BuildReport(in ReportInput) Report {
	r := Report{Revision: in.Revision, Rules: []string{}, Blocked: []ReportEntry{}, WouldBlock: []ReportEntry{}, Observed: []ReportEntry{}}
	if in.Hub != nil {
		for _, n := range in.Hub.Rules {
			r.Rules = append(r.Rules, CleanText(n, maxText))
		}
		for _, n := range in.Hub.dryNames() {
			r.DryRunRules = append(r.DryRunRules, CleanText(n, maxText))
		}
	}
	room := reportBytes - reportFrame
	for _, f := range in.Refusals {
		n := jsonSize(f)
		if len(r.Refusals) == reportRefusals || n > room {
			r.RefusalsOmitted++
			continue
		}
		room -= n
		r.Refusals = append(r.Refusals, f)
	}
	r.Run, r.Build = in.Run.phase(), in.Build.phase()
	type seen struct {
		e     *Entry
		phase Phase
		of    *ReportPhase
	}
	var all []seen
	for _, p := range []struct {
		in  *PhaseInput
		out *ReportPhase
		ph  Phase
	}{{in.Build, r.Build, Build}, {in.Run, r.Run, Run}} {
		if p.in == nil {
			continue
		}
		for i := range p.in.Record.Entries {
			all = append(all, seen{&p.in.Record.Entries[i], p.ph, p.out})
		}
	}
	slices.SortStableFunc(all, func(a, b seen) int { return a.e.First.Compare(b.e.First) })
	denials, contacts := 0, 0
	for _, s := range all {
		used, most := &denials, reportDenials
		if s.e.Outcome == Observed {
			used, most = &contacts, reportContacts
		}
		x := s.e.report(s.phase)
		n := grownSize(x)
		if *used == most || n > room {
			*s.of.OmittedEntries.of(s.e.Outcome)++
			*s.of.OmittedEvents.of(s.e.Outcome) += s.e.Count
			continue
		}
		*used++
		room -= n
		switch s.e.Outcome {
		case Blocked:
			r.Blocked = append(r.Blocked, x)
		case WouldBlock:
			r.WouldBlock = append(r.WouldBlock, x)
		default:
			r.Observed = append(r.Observed, x)
		}
	}
	r.Run.settle()
	r.Build.settle()
	return r
}

// Same says whether two reports differ in nothing but their revision.
func (r Report) Same(o Report) bool {
	r.Revision, o.Revision = 0, 0
	return reflect.DeepEqual(r, o)
}

// PartialReport is a report whose sender is gone: the next revision, with
// phases that are partial at best. nil when there is none that can be read.
func PartialReport(report []byte) []byte {
	var r Report
	if len(report) == 0 || json.Unmarshal(report, &r) != nil {
		return nil
	}
	r.Revision++
	for _, p := range []*ReportPhase{r.Run, r.Build} {
		if p != nil && p.Coverage == Complete {
			p.Coverage = Partial
		}
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil
	}
	return b
}

func (p *PhaseInput) phase() *ReportPhase {
	if p == nil {
		return nil
	}
	return &ReportPhase{Coverage: p.Coverage, Cap: p.Cap, Sent: p.Sent, Received: p.Received, OmittedEvents: p.Record.Uncounted}
}

// settle makes what a phase left out known in its coverage.
func (p *ReportPhase) settle() {
	if p == nil || p.Coverage != "" {
		return
	}
	p.Coverage = Complete
	if p.OmittedEvents.any() || p.OmittedEntries.any() {
		p.Coverage = Partial
	}
}

func (e *Entry) report(p Phase) ReportEntry {
	x := ReportEntry{Protocol: e.Proto, Phase: p, Service: e.Service, Stage: e.Stage, Count: e.Count, Rule: e.Rule, Asked: e.Asked,
		FirstSeen: e.First.UTC().Truncate(time.Millisecond), LastSeen: e.Last.UTC().Truncate(time.Millisecond)}
	if e.Outcome != Observed {
		x.Layer = ReportLayer(e.Layer)
	}
	switch e.Kind {
	case KindDomain:
		x.Destination.Domain = e.Dest
	case KindIP:
		if ap, err := netip.ParseAddrPort(e.Dest); err == nil {
			x.Destination.IP, x.Destination.Port = ap.Addr().String(), ap.Port()
		} else {
			x.Destination.IP = e.Dest
		}
	default:
		x.Destination.Text = e.Dest
	}
	return x
}

// ReportLayer is a layer in the report's words: those that are no rule's, such
// as the switch's own guard of the host, are unknown to it.
func ReportLayer(layer string) string {
	switch layer {
	case LayerNodeCap, LayerHub, LayerJob, LayerService:
		return layer
	}
	return LayerUnknown
}

// grownSize is an entry's size in JSON at the largest count and time.
func grownSize(e ReportEntry) int {
	e.Count = ^uint64(0)
	e.LastSeen = time.Date(9999, 12, 31, 23, 59, 59, 999e6, time.UTC)
	return jsonSize(e)
}

func jsonSize(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return reportBytes + 1 // cannot be sent, so it does not fit
	}
	return len(b) + 1 // and its comma
}

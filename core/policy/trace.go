package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Bounds of the trace's blocks, in lines.
const (
	traceLines = 50
	auditLines = 1000
)

// LayerLines are the lines that tell a job under a hub's rules which rules
// they are, and each phase's lists layer by layer. Without a hub layer there
// are none. build may be nil, for a job that builds nothing.
func LayerLines(run, build *Policy) []string {
	if run.Hub == nil {
		return nil
	}
	head := "virtkit: egress under the hub's rules: " + orNone(cleanList(run.Hub.Rules))
	if d := run.Hub.dryNames(); len(d) > 0 {
		head += " (dry-run, not enforced: " + cleanList(d) + ")"
	}
	out := []string{head, run.layerLine()}
	if build != nil {
		out = append(out, build.layerLine())
	}
	return out
}

func (p *Policy) layerLine() string { return "virtkit:   " + string(p.Phase) + ": " + p.Words() }

// Words are the policy's layers in order with their lists.
func (p *Policy) Words() string {
	dry := ""
	if p.dryRun() {
		dry = " (dry-run, not enforced)"
	}
	parts := []string{"node cap" + dry + " " + p.Cap.words("unrestricted")}
	if p.Hub != nil {
		parts = append(parts, "hub "+p.Hub.Lists(p.Phase).words("unrestricted"))
	}
	parts = append(parts, "job "+p.Job.words("not narrowed"))
	for _, s := range p.Services {
		if s.Restricted() && p.Phase != Build {
			parts = append(parts, "service "+CleanText(s.VM, maxVM)+" "+s.words(""))
		}
	}
	return strings.Join(parts, "; ")
}

func (l Lists) words(unrestricted string) string {
	if !l.Restricted() {
		return unrestricted
	}
	ips := make([]string, len(l.IPs))
	for i, r := range l.IPs {
		ips[i] = r.String()
	}
	return "names " + joinSome(l.Names) + ", ips " + joinSome(ips)
}

func joinSome(l []string) string {
	if n := len(l) - maxShown; n > 0 {
		return strings.Join(l[:maxShown], " ") + " and " + strconv.Itoa(n) + " more"
	}
	return orNone(strings.Join(l, " "))
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// DenialLines are the blocks of a stage's denials, each under what decided
// them; delta is the stage's part of the record (Record.Since). hubRules are
// the names of the hub's enforced rules. What a hub's rule in dry-run would
// block in the build phase is reported to the hub alone.
func DenialLines(delta Record, hubRules []string) []string {
	blocks := []struct {
		head string
		is   func(e *Entry) bool
	}{
		{"egress blocked by the allowlist", func(e *Entry) bool {
			return e.Outcome == Blocked && (e.Layer == LayerNodeCap || e.Layer == LayerJob || e.Layer == LayerService)
		}},
		{"egress blocked by the hub's egress rules (" + orNone(cleanList(hubRules)) + ")", func(e *Entry) bool {
			return e.Outcome == Blocked && e.Layer == LayerHub
		}},
		{"egress blocked by the switch (addresses of the host, and those that are nobody's)", func(e *Entry) bool {
			return e.Outcome == Blocked && !slices.Contains([]string{LayerNodeCap, LayerHub, LayerJob, LayerService}, e.Layer)
		}},
		{"egress the allowlist would block (dry-run, not enforced)", func(e *Entry) bool {
			return e.Outcome == WouldBlock && e.Rule == ""
		}},
	}
	var out []string
	for _, b := range blocks {
		out = append(out, block(b.head, delta.pick(b.is))...)
	}
	if delta.Phase != Build {
		var rules []string
		for _, e := range delta.Entries {
			if e.Outcome == WouldBlock && e.Rule != "" {
				rules = addOnce(rules, e.Rule)
			}
		}
		for _, rule := range rules {
			out = append(out, block("egress the hub's dry-run rule "+rule+" would block (not enforced)",
				delta.pick(func(e *Entry) bool { return e.Outcome == WouldBlock && e.Rule == rule }))...)
		}
	}
	if n := delta.Uncounted.Blocked + delta.Uncounted.WouldBlock; n > 0 {
		out = append(out, fmt.Sprintf("virtkit: egress: %s more blocked or that would be, only counted: the log is full", number64(n)))
	}
	return out
}

// AuditLines is the audit of a phase: what it looked up, and the addresses it
// went to without a lookup behind them; job, if it is not "", is what people
// call the job or guest by, to have lists made of that.
func AuditLines(r Record, job string) []string {
	what := "this run"
	if r.Phase == Build {
		what = "this build"
	}
	l := r.pick(func(e *Entry) bool { return e.Outcome == Observed })
	if len(l) == 0 && r.Uncounted.Observed == 0 {
		return []string{"virtkit: egress audit: " + what + " contacted nothing"}
	}
	slices.SortStableFunc(l, func(a, b *Entry) int {
		if (a.Proto == DNS) != (b.Proto == DNS) {
			if a.Proto == DNS {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Dest, b.Dest)
	})
	out := blockOf("egress audit: what "+what+" contacted", l, auditLines)
	if n := r.Uncounted.Observed; n > 0 {
		out = append(out, "virtkit:   and "+number64(n)+" more contacts, only counted: the log is full")
	}
	if job != "" {
		out = append(out, "virtkit: egress audit: for allowlists of it run on the host: vk egress suggest "+CleanText(job, maxText))
	}
	return out
}

func (s Record) pick(is func(*Entry) bool) []*Entry {
	var out []*Entry
	for i := range s.Entries {
		if is(&s.Entries[i]) {
			out = append(out, &s.Entries[i])
		}
	}
	return out
}

func block(head string, l []*Entry) []string { return blockOf(head, l, traceLines) }

func blockOf(head string, l []*Entry, most int) []string {
	if len(l) == 0 {
		return nil
	}
	out := []string{"virtkit: " + head + ":"}
	for i, e := range l {
		if i == most {
			return append(out, fmt.Sprintf("virtkit:   and %d more", len(l)-most))
		}
		out = append(out, "virtkit:   "+e.line())
	}
	return out
}

// line is protocol, target and count, and then what explains them.
func (e *Entry) line() string {
	s := string(e.Proto) + " " + e.Dest + " (" + times(e.Count) + ")"
	if e.Service != "" {
		s += " from service " + e.Service
	}
	switch {
	case e.Outcome != Observed:
		// The heading has said already that it is the hub's rules.
		if reason := e.Reason; reason != "" && (e.Layer != LayerHub || !strings.HasSuffix(reason, ")")) {
			s += ": " + reason
		}
	case e.Asked != "" && e.Opened != "":
		s += ": asked for " + e.Asked + ", opened by " + e.Opened
	case e.Asked != "":
		s += ": asked for " + e.Asked + ", no lookup behind it"
	case e.Proto != DNS:
		s += ": no lookup behind it"
	}
	return s
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return number64(n) + " times"
}

func number64(n uint64) string { return strconv.FormatUint(n, 10) }

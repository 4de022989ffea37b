package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Suggestion is a list of entries that would allow what a job did, made from
// the record of its runs. Names are proposed as they were looked up and never
// widened to a suffix of several: what else is below a name is not known here.
type Suggestion struct {
	Phase Phase
	Names []Suggested
	IPs   []Suggested
	// Left are destinations that make no entry: text that is no name, reverse
	// lookups (an entry would let data out in the names queried), single
	// labels, names asked for on another name's address.
	Left []Suggested
	// Refused are destinations that only ever were blocked: not proposed, since
	// refusing may be what the policy is for.
	Refused []Suggested
}

// Suggested is one entry, and the evidence for it.
type Suggested struct {
	Entry string // canonical, as ParseName or ParseIP reads it
	Count uint64
	VMs   []string // that wanted it: services, "" = the job's
	Proto []Proto
	// Standing says that earlier runs looked it up, and this one did not.
	Standing bool
	// Still is why the policy would refuse it as it is, "" if it would not.
	Still string
	Layer string // that would
}

// Suggest proposes entries from a record and the job's standing list, and says
// of each what the policy would refuse were all of it enforced. policy may be
// nil.
func Suggest(r Record, standing []string, policy *Policy) Suggestion {
	s := Suggestion{Phase: r.Phase}
	names, ips, left, refused := pile{}, pile{}, pile{}, pile{}
	carried := map[string]bool{}
	for _, e := range r.Entries {
		if e.Outcome != Blocked {
			carried[string(e.Proto)+" "+e.Dest] = true
		}
	}
	for i := range r.Entries {
		e := &r.Entries[i]
		entry, isName, ok := e.entry()
		switch {
		case e.Asked != "":
			// The address has a name behind it, or a contact of its own; whether
			// the name asked for should be allowed is for people to say.
			left.add(CleanName(e.Asked)+" (asked for at "+e.Dest+")", e)
		case e.Outcome == WouldBlock && e.Rule != "":
			// The same event is observed, or would-blocked by the node, too.
		case e.Outcome == Blocked && !carried[string(e.Proto)+" "+e.Dest]:
			refused.add(entry, e)
		case e.Outcome == Blocked:
		case !ok:
			left.add(entry, e)
		case isName:
			names.add(entry, e)
		default:
			ips.add(entry, e)
		}
	}
	for _, n := range standing {
		if _, ok := names[n]; ok || refused[n] != nil {
			continue
		}
		switch _, err := ParseName(n); {
		case err != nil || !proposable(n):
			left.standing(n)
		default:
			names.standing(n)
		}
	}
	s.Names, s.IPs, s.Left, s.Refused = names.sorted(), ips.sorted(), left.sorted(), refused.sorted()
	if policy != nil {
		s.judge(policy)
	}
	return s
}

// entry is what would allow e; ok is false when nothing should.
func (e *Entry) entry() (entry string, isName, ok bool) {
	switch e.Kind {
	case KindDomain:
		return e.Dest, true, proposable(e.Dest)
	case KindText:
		return e.Dest, true, false
	}
	if a, err := netip.ParseAddr(e.Dest); err == nil {
		return netip.PrefixFrom(a, a.BitLen()).String(), false, a.Is4()
	}
	ap, err := netip.ParseAddrPort(e.Dest)
	if err != nil {
		return e.Dest, false, false
	}
	return netip.PrefixFrom(ap.Addr(), ap.Addr().BitLen()).String() + fmt.Sprintf(":%d", ap.Port()), false, ap.Addr().Is4()
}

// proposable says whether a name makes an entry. A single label does not: as
// a suffix it would be all of a top-level domain, while a guest that asks for
// one mostly means a machine of its own network.
func proposable(n string) bool {
	return strings.Contains(n, ".") && !isReverse(n)
}

func isReverse(n string) bool {
	return n == "arpa" || strings.HasSuffix(n, ".in-addr.arpa") || strings.HasSuffix(n, ".ip6.arpa") || n == "in-addr.arpa" || n == "ip6.arpa"
}

type pile map[string]*Suggested

func (p pile) add(entry string, e *Entry) {
	x := p[entry]
	if x == nil {
		x = &Suggested{Entry: entry}
		p[entry] = x
	}
	x.Count += e.Count
	x.VMs = addOnce(x.VMs, e.Service)
	x.Proto = addOnce(x.Proto, e.Proto)
	if x.Layer == "" && e.Outcome != Observed {
		x.Layer, x.Still = e.Layer, e.Reason
	}
}

func (p pile) standing(name string) { p[name] = &Suggested{Entry: name, Standing: true} }

func (p pile) sorted() []Suggested {
	out := make([]Suggested, 0, len(p))
	for _, x := range p {
		slices.Sort(x.VMs)
		slices.Sort(x.Proto)
		out = append(out, *x)
	}
	slices.SortFunc(out, func(a, b Suggested) int { return cmp.Compare(a.Entry, b.Entry) })
	return out
}

// judge asks the policy, all of it enforced, about each proposed entry.
func (s *Suggestion) judge(policy *Policy) {
	p := *policy
	p.DryRun = false
	ask := func(x *Suggested, by func(*Stack) Judgement) {
		x.Still, x.Layer = "", ""
		vms := x.VMs
		if len(vms) == 0 {
			vms = []string{""}
		}
		for _, vm := range vms {
			if j := by(p.Stack(vm)); !j.Allow {
				x.Still, x.Layer = j.Reason, j.Layer
				return
			}
		}
	}
	for i := range s.Names {
		x := &s.Names[i]
		ask(x, func(k *Stack) Judgement { return k.Name(x.Entry) })
	}
	for i := range s.IPs {
		x := &s.IPs[i]
		rule, err := ParseIP(x.Entry)
		if err != nil {
			continue
		}
		ask(x, func(k *Stack) Judgement {
			return k.IP(Flow{Proto: x.Proto[0], Dst: netip.AddrPortFrom(rule.Net.Addr(), rule.Port)}, nil)
		})
	}
}

// TOML is the suggestion as a section of the node's configuration.
func (s Suggestion) TOML() string {
	var b strings.Builder
	if s.Phase == Build {
		b.WriteString("[egress.build]\n")
	} else {
		b.WriteString("[egress]\n")
	}
	list := func(d Dimension, l []Suggested) {
		if len(l) == 0 {
			fmt.Fprintf(&b, "%s = []\n", d)
			return
		}
		w := width(l) + len(`"",`)
		fmt.Fprintf(&b, "%s = [\n", d)
		for _, x := range l {
			fmt.Fprintf(&b, "  %-*s # %s\n", w, `"`+x.Entry+`",`, x.evidence())
		}
		b.WriteString("]\n")
	}
	list(DimName, s.Names)
	list(DimIP, s.IPs)
	s.notes(&b, "")
	return b.String()
}

// YAML is the suggestion as variables of a job.
func (s Suggestion) YAML() string {
	var b strings.Builder
	b.WriteString("variables:\n")
	list := func(d Dimension, l []Suggested) {
		if len(l) == 0 {
			return // the other variable set, a missing one allows none
		}
		w := width(l)
		fmt.Fprintf(&b, "  %s: |\n", s.Phase.Variable(d))
		for _, x := range l {
			fmt.Fprintf(&b, "    %-*s  # %s\n", w, x.Entry, x.evidence())
		}
	}
	list(DimName, s.Names)
	list(DimIP, s.IPs)
	if len(s.Names)+len(s.IPs) == 0 {
		b.Reset()
		if len(s.Left)+len(s.Refused) == 0 {
			return "# nothing was contacted: there is nothing to allow\n"
		}
		b.WriteString("# there is nothing to propose\n")
		s.notes(&b, "")
		return b.String()
	}
	s.notes(&b, "  ")
	return b.String()
}

func (s Suggestion) notes(b *strings.Builder, indent string) {
	some := func(head string, l []Suggested) {
		if len(l) == 0 {
			return
		}
		fmt.Fprintf(b, "%s# %s:\n", indent, head)
		for _, x := range l {
			fmt.Fprintf(b, "%s#   %s  %s\n", indent, x.Entry, x.evidence())
		}
	}
	some("left out, as no entry should allow it", s.Left)
	some("blocked, and not proposed", s.Refused)
}

func width(l []Suggested) int {
	w := 0
	for _, x := range l {
		w = max(w, len(x.Entry))
	}
	return w
}

// evidence says why an entry is there.
func (x Suggested) evidence() string {
	s := "in an earlier run"
	if !x.Standing {
		protos := make([]string, len(x.Proto))
		for i, p := range x.Proto {
			protos[i] = string(p)
		}
		s = strings.Join(protos, ", ") + ", " + times(x.Count)
	}
	var from []string
	for _, vm := range x.VMs {
		if vm != "" {
			from = append(from, vm)
		}
	}
	if len(from) > 0 {
		s += ", from " + strings.Join(from, ", ")
	}
	if x.Still != "" {
		s += "; refused now: " + x.Still
	}
	return s
}

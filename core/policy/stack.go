package policy

import (
	"net/netip"
	"slices"
	"strings"
)

// Stack is the policy of one VM in one phase: its layers, asked in turn and
// never merged. It is immutable and safe for concurrent use.
//
// Enforced are the hub's layer always, and the other three unless the node's
// dry-run is on. What is not enforced, and each rule the hub has in dry-run,
// is evaluated beside, over what the enforced layers let through.
type Stack struct {
	cap, hub, job, service *Layer

	dryRun     bool
	candidates []*Layer
	enforced   []*Layer // those that restrict something
	all        []*Layer // likewise, were the node's dry-run off
}

// StackConfig is what a Stack is made of; every part may be missing.
type StackConfig struct {
	Cap, Hub, Job, Service *Layer
	// DryRun is the node's dry-run: the cap, the job's and the service's lists
	// report and block nothing. The hub's layer is enforced all the same.
	DryRun bool
	// Candidates are the hub's rules in dry-run, each as the layer the job
	// would have were it enforced.
	Candidates []*Layer
}

// NewStack makes a Stack.
func NewStack(c StackConfig) *Stack {
	s := &Stack{cap: c.Cap, hub: c.Hub, job: c.Job, service: c.Service, dryRun: c.DryRun}
	for _, y := range c.Candidates {
		if y.Restricted() {
			s.candidates = append(s.candidates, y)
		}
	}
	for _, y := range []*Layer{c.Cap, c.Hub, c.Job, c.Service} {
		if !y.Restricted() {
			continue
		}
		s.all = append(s.all, y)
		if y == c.Hub || !c.DryRun {
			s.enforced = append(s.enforced, y)
		}
	}
	return s
}

// Restricted says whether anything is enforced.
func (s *Stack) Restricted() bool { return len(s.enforced) > 0 }

// Would is what a layer that is not enforced refuses of what is carried.
type Would struct {
	Layer  string
	Rule   string // the hub's rule in dry-run; "" = the node's dry-run
	Reason string
}

// Judgement is the verdict of the enforced layers, and beside it what those
// not enforced say. Would is empty when the verdict is no.
type Judgement struct {
	Verdict
	Would []Would
}

func deny(y *Layer, reason string) Verdict {
	return Verdict{Layer: y.Kind, Reason: reason}
}

// Name decides over a question for a name, in any case and with or without
// its final dot, whatever the type: reverse lookups are names too.
func (s *Stack) Name(q string) Judgement {
	q = CanonicalName(q)
	if y := refusesName(s.enforced, q); y != nil {
		return Judgement{Verdict: deny(y, y.outside(DimName))}
	}
	j := Judgement{Verdict: Verdict{Allow: true}}
	if s.dryRun {
		if y := refusesName(s.all, q); y != nil {
			j.Would = append(j.Would, Would{Layer: y.Kind, Reason: y.outside(DimName)})
		}
	}
	for _, y := range s.candidates {
		if !y.AllowsName(q) {
			j.Would = append(j.Would, candidate(y, y.outside(DimName)))
		}
	}
	return j
}

// Unreadable decides over a question that cannot be read or rebuilt: only
// where nothing is enforced may it be passed on as it is. Denied means
// REFUSED (or NOTIMP for an update or notify), not NXDOMAIN.
func (s *Stack) Unreadable() Judgement {
	if len(s.enforced) > 0 {
		return Judgement{Verdict: deny(s.enforced[0], "a query that cannot be read is refused under an allowlist")}
	}
	j := Judgement{Verdict: Verdict{Allow: true}}
	if len(s.all) > 0 {
		j.Would = append(j.Would, Would{Layer: s.all[0].Kind, Reason: "a query that cannot be read is refused under an allowlist"})
	}
	for _, y := range s.candidates {
		j.Would = append(j.Would, candidate(y, "a query that cannot be read is refused under an allowlist"))
	}
	return j
}

// candidate names the rule of a layer the hub has in dry-run.
func candidate(y *Layer, reason string) Would {
	return Would{Layer: LayerHub, Rule: strings.Join(y.Rules, ", "), Reason: reason}
}

func refusesName(layers []*Layer, q string) *Layer {
	for _, y := range layers {
		if !y.AllowsName(q) {
			return y
		}
	}
	return nil
}

// maxOpeners is how many names one address of one VM is opened by at most.
const maxOpeners = 64

const dnsPort = 53

// IP decides over a flow to an address. openedBy are the names, canonical,
// whose lookup by this VM opened it and is still in force; of more than 64 the
// first 64 count.
func (s *Stack) IP(f Flow, openedBy []string) Judgement {
	if len(openedBy) > maxOpeners {
		openedBy = openedBy[:maxOpeners]
	}
	usable := openedBy
	if f.Dst.Port() == dnsPort {
		usable = nil
	}
	if y := refusesIP(s.enforced, f.Dst, usable); y != nil {
		return Judgement{Verdict: deny(y, ipReason(y, f.Dst, usable, openedBy))}
	}
	j := Judgement{Verdict: Verdict{Allow: true}}
	if s.dryRun {
		if y := refusesIP(s.all, f.Dst, usable); y != nil {
			j.Would = append(j.Would, Would{Layer: y.Kind, Reason: ipReason(y, f.Dst, usable, openedBy)})
		}
	}
	for _, y := range s.candidates {
		if refusesIP([]*Layer{y}, f.Dst, usable) != nil {
			j.Would = append(j.Would, candidate(y, ipReason(y, f.Dst, usable, openedBy)))
		}
	}
	return j
}

func ipReason(y *Layer, dst netip.AddrPort, usable, openedBy []string) string {
	switch {
	case len(usable) > 0 && !y.AllowsIP(dst):
		return y.outside(DimIP) + ", and no name it allows opened the address"
	case len(usable) > 0:
		return y.outside(DimName)
	case len(openedBy) > 0:
		return y.outside(DimIP) + ": a name opens every port but 53"
	}
	return y.outside(DimIP)
}

// refusesIP is the first layer that refuses a destination. A layer is passed
// by its allow_ip list, or by a name that opened the address and that this
// layer and those before it allow: a name one of them refuses would not have
// been resolved. When a layer lacks only names that an earlier one refused,
// the earlier one decided.
func refusesIP(layers []*Layer, dst netip.AddrPort, openers []string) *Layer {
	alive := ^uint64(0) >> (maxOpeners - len(openers)) // none: all 64 bits go
	var emptied *Layer
	for _, y := range layers {
		var own, next uint64
		for i, n := range openers {
			if y.AllowsName(n) {
				own |= 1 << i
			}
		}
		next = alive & own
		if next == 0 && !y.AllowsIP(dst) {
			if own != 0 && emptied != nil {
				return emptied
			}
			return y
		}
		if next == 0 && alive != 0 {
			emptied = y
		}
		alive = next
	}
	return nil
}

// Asked decides, under strict_names, over what a flow that IP allowed asks
// for: the server name of its TLS hello or the Host of its request. The name
// has to be one that every layer allows, unless the layer's allow_ip list has
// the destination anyway. It also says, in Would, what would be refused.
func (s *Stack) Asked(f Flow, openedBy []string, asked string) Judgement {
	asked = CanonicalName(asked)
	why := "it asks for " + CleanName(asked)
	if len(openedBy) > 0 && !slices.Contains(openedBy, asked) {
		why += " on an address that " + openedBy[0] + " opened"
	}
	refuses := func(layers []*Layer) *Layer {
		for _, y := range layers {
			if !y.AllowsName(asked) && !y.AllowsIP(f.Dst) {
				return y
			}
		}
		return nil
	}
	if y := refuses(s.enforced); y != nil {
		return Judgement{Verdict: deny(y, y.outside(DimName)+": "+why)}
	}
	j := Judgement{Verdict: Verdict{Allow: true}}
	if s.dryRun {
		if y := refuses(s.all); y != nil {
			j.Would = append(j.Would, Would{Layer: y.Kind, Reason: y.outside(DimName) + ": " + why})
		}
	}
	for _, y := range s.candidates {
		if refuses([]*Layer{y}) != nil {
			j.Would = append(j.Would, candidate(y, y.outside(DimName)+": "+why))
		}
	}
	return j
}

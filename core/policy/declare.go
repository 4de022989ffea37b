package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"virtkit/core/fault"
)

// ParseCap reads a phase's lists of the configuration. A nil list is absent.
// The places are FILE:LINE of each key.
func ParseCap(p Phase, names, ips []string, namePlace, ipPlace string) (Lists, []*EntryError) {
	return parseLists(names, ips,
		Source{Key: p.CapKey(DimName), Place: namePlace},
		Source{Key: p.CapKey(DimIP), Place: ipPlace})
}

// ParseFlags reads the lists of vk run's flags; restrict is --egress-restrict,
// which makes both lists present.
func ParseFlags(names, ips []string, restrict bool) (Lists, []*EntryError) {
	l, bad := parseLists(names, ips, Source{Key: "--allow-name"}, Source{Key: "--allow-ip"})
	if restrict && l.Names == nil {
		l.Names = []string{}
	}
	if restrict && l.IPs == nil {
		l.IPs = []IPRule{}
	}
	return l, bad
}

// ParseVariables reads a phase's lists of a job's variables, or with vm of a
// service's own. A variable without any entry is as one that is not set for a
// job, and denies its dimension for a service.
func ParseVariables(p Phase, vm string, lookup func(name string) (value string, set bool)) (Lists, []*EntryError) {
	entries := func(d Dimension) []string {
		value, set := lookup(p.Variable(d))
		if !set {
			return nil
		}
		l := SplitList(value)
		if l == nil && vm != "" {
			return []string{}
		}
		return l
	}
	return parseLists(entries(DimName), entries(DimIP),
		Source{Key: p.Variable(DimName), VM: vm}, Source{Key: p.Variable(DimIP), VM: vm})
}

func parseLists(names, ips []string, nameSrc, ipSrc Source) (l Lists, bad []*EntryError) {
	if names != nil {
		l.Names, bad = ParseNames(nameSrc, names)
	}
	if ips != nil {
		var more []*EntryError
		l.IPs, more = ParseIPs(ipSrc, ips)
		bad = append(bad, more...)
	}
	return l, bad
}

// AuditOn says whether a phase is audited: the configuration says so, or the
// job's MICROVM_EGRESS_AUDIT (MICROVM_BUILD_EGRESS_AUDIT) does.
func AuditOn(p Phase, configured bool, lookup func(string) (string, bool)) (bool, error) {
	v, _ := lookup(p.AuditVariable())
	asked, err := ParseSwitch(p.AuditVariable(), v)
	return configured || asked, err
}

// DryRunVariable turns a job's dry-run on.
const DryRunVariable = "MICROVM_EGRESS_DRY_RUN"

// DryRunOn says whether the run phase only reports. A job may ask for it when
// the node has no run-phase list of its own; where it has, warning says that
// the request was not followed.
func DryRunOn(configured bool, cap Lists, lookup func(string) (string, bool)) (on bool, warning string, err error) {
	v, _ := lookup(DryRunVariable)
	asked, err := ParseSwitch(DryRunVariable, v)
	switch {
	case err != nil || configured || !asked:
		return configured, "", err
	case cap.Restricted():
		return false, "virtkit: warning: " + DryRunVariable + ": not followed, as the node's [egress] sets a list of its own, which only its dry_run suspends", nil
	}
	return true, "", nil
}

// Bounds of a hub's layer.
const (
	maxHubRules   = 32
	maxHubEntries = 256
)

// HubEgress is what a hub sends with a job's start: the layer its rules make,
// and each rule in dry-run as the layer the job would have were it enforced.
// As the Fallback in a node's desired state it has the same form.
type HubEgress struct {
	Rules  []string     `json:"rules"`
	Run    Lists        `json:"run"`
	Build  Lists        `json:"build"`
	DryRun []HubDryRule `json:"dry_run,omitempty"`
}

// UnmarshalJSON wants both phases, in each rule too: one left out would be one
// left unrestricted.
func (h *HubEgress) UnmarshalJSON(b []byte) error {
	type plain HubEgress
	if err := bothPhases(b); err != nil {
		return err
	}
	return json.Unmarshal(b, (*plain)(h))
}

// UnmarshalJSON is as HubEgress's.
func (r *HubDryRule) UnmarshalJSON(b []byte) error {
	type plain HubDryRule
	if err := bothPhases(b); err != nil {
		return err
	}
	return json.Unmarshal(b, (*plain)(r))
}

// ParseHubEgress reads and checks a hub's layer.
func ParseHubEgress(b []byte) (*HubEgress, error) {
	var h HubEgress
	if err := json.Unmarshal(b, &h); err != nil {
		return nil, err
	}
	return &h, h.Check()
}

func bothPhases(b []byte) error {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return err
	}
	for _, p := range []Phase{Run, Build} {
		if _, has := keys[string(p)]; !has {
			return fmt.Errorf("the hub's egress rules: no %s phase", p)
		}
	}
	return nil
}

// HubDryRule is a rule that the hub has in dry-run.
type HubDryRule struct {
	Rule  string `json:"rule"`
	Run   Lists  `json:"run"`
	Build Lists  `json:"build"`
}

// Lists are the enforced lists of a phase; those of a nil HubEgress restrict
// nothing.
func (h *HubEgress) Lists(p Phase) Lists {
	switch {
	case h == nil:
		return Lists{}
	case p == Build:
		return h.Build
	}
	return h.Run
}

// Lists are the rule's lists of a phase.
func (r HubDryRule) Lists(p Phase) Lists {
	if p == Build {
		return r.Build
	}
	return r.Run
}

// Restricts says whether the enforced rules restrict a phase.
func (h *HubEgress) Restricts(p Phase) bool { return h.Lists(p).Restricted() }

// Check refuses a layer past its bounds: 32 rules, 256 entries a list. A job
// whose layer cannot be held as sent does not run.
func (h *HubEgress) Check() error {
	if h == nil {
		return nil
	}
	if n := len(h.Rules) + len(h.DryRun); n > maxHubRules {
		return fmt.Errorf("the hub's egress rules: %d rules, at most %d", n, maxHubRules)
	}
	lists := []Lists{h.Run, h.Build}
	for _, r := range h.DryRun {
		lists = append(lists, r.Run, r.Build)
	}
	for _, l := range lists {
		if n := max(len(l.Names), len(l.IPs)); n > maxHubEntries {
			return fmt.Errorf("the hub's egress rules: %d entries in a list, at most %d", n, maxHubEntries)
		}
	}
	for _, r := range append(slices.Clone(h.Rules), h.dryNames()...) {
		if r == "" || len(r) > maxText {
			return errors.New("the hub's egress rules: a rule without a name, or with one past 256 bytes")
		}
	}
	return nil
}

func (h *HubEgress) dryNames() []string {
	var out []string
	for _, r := range h.DryRun {
		out = append(out, r.Rule)
	}
	return out
}

// CheckMode refuses a job whose run phase the hub's rules restrict under a
// [net] mode that has no switch to enforce them. "none" has no network to
// restrict.
func (h *HubEgress) CheckMode(netMode string) error {
	if !h.Restricts(Run) || netMode == "switch" || netMode == "none" {
		return nil
	}
	return fault.Newf(fault.Denied, "the hub's egress rules (%s) cannot be enforced under [net] mode %q", cleanList(h.Rules), netMode).
		Hint(`set [net] mode = "switch" on this node`)
}

// CheckWindowsBuild refuses to build a Windows image under rules that restrict
// the build phase, since its steps cannot be held to them.
func (h *HubEgress) CheckWindowsBuild() error {
	if !h.Restricts(Build) {
		return nil
	}
	return fault.Newf(fault.Denied, "a Windows image does not build under the hub's egress rules (%s), which its steps cannot be held to", cleanList(h.Rules)).
		Hint("use an image that is built already, or have the rules leave this job's build unrestricted")
}

// Service is a service's own lists.
type Service struct {
	VM string // its name, which is its port's on the switch
	Lists
}

// wireService keeps the VM beside the lists, whose own JSON would else be all
// of a Service's.
type wireService struct {
	VM    string `json:"vm"`
	Lists Lists  `json:"lists"`
}

// MarshalJSON writes VM and lists.
func (s Service) MarshalJSON() ([]byte, error) {
	return json.Marshal(wireService{VM: s.VM, Lists: s.Lists})
}

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Service) UnmarshalJSON(b []byte) error {
	var w wireService
	err := json.Unmarshal(b, &w)
	s.VM, s.Lists = w.VM, w.Lists
	return err
}

// Policy is all that decides over one phase of a job. As JSON it goes from the
// call that reads a job's variables to the switch's process and to the record
// that is kept of the job.
type Policy struct {
	Phase    Phase      `json:"phase"`
	Cap      Lists      `json:"cap"`
	Hub      *HubEgress `json:"hub,omitempty"` // nil = no hub has a say
	Job      Lists      `json:"job"`
	Flags    bool       `json:"flags,omitempty"`    // Job are the lists of vk run's flags
	Services []Service  `json:"services,omitempty"` // run phase only
	DryRun   bool       `json:"dry_run,omitempty"`  // run phase only; see DryRunOn
}

func (p *Policy) dryRun() bool { return p.DryRun && p.Phase != Build }

func (p *Policy) jobLayer() *Layer {
	if p.Flags {
		return FlagLists(p.Job)
	}
	return JobLists(p.Phase, p.Job)
}

func (p *Policy) hubLayer() *Layer {
	if p.Hub == nil {
		return nil
	}
	return HubRules(p.Hub.Rules, p.Hub.Lists(p.Phase))
}

// Stack is the policy of a VM: that of a service by its name, else the job's.
func (p *Policy) Stack(vm string) *Stack {
	c := StackConfig{Cap: NodeCap(p.Phase, p.Cap), Hub: p.hubLayer(), Job: p.jobLayer(), DryRun: p.dryRun()}
	if p.Hub != nil {
		for _, r := range p.Hub.DryRun {
			c.Candidates = append(c.Candidates, HubRules([]string{r.Rule}, r.Lists(p.Phase)))
		}
	}
	for _, s := range p.Services {
		if s.VM == vm && p.Phase != Build {
			c.Service = ServiceLists(s.VM, s.Lists)
		}
	}
	return NewStack(c)
}

// RefusalReason says what is wrong with a declared entry.
type RefusalReason string

// The reasons.
const (
	InvalidEntry RefusalReason = "invalid_entry" // fails the job
	Unreachable  RefusalReason = "unreachable"   // kept; a layer above leaves nothing of it
)

// Refusal is an entry of a job's or a service's variable found at fault before
// anything ran.
type Refusal struct {
	Variable  string        `json:"variable"`
	Entry     string        `json:"entry"`
	Dimension Dimension     `json:"dimension"`
	Phase     Phase         `json:"phase"`
	Service   string        `json:"service,omitempty"` // whose variable it is; "" = the job's
	Layer     string        `json:"layer,omitempty"`   // the layer it falls outside
	Reason    RefusalReason `json:"reason"`

	text string // the warning, for an unreachable one
}

// Warning is the trace's line about an unreachable entry.
func (r Refusal) Warning() string { return r.text }

// Invalid is the refusals of a job's and its services' invalid entries; those
// of the configuration are not the job's and are left out.
func Invalid(p Phase, bad []*EntryError) []Refusal {
	var out []Refusal
	for _, e := range bad {
		if e.Source.Place == "" && e.Source.Key == p.Variable(e.Dim) {
			out = append(out, Refusal{Variable: e.Source.Key, Entry: CleanText(e.Entry, maxText), Dimension: e.Dim,
				Phase: p, Service: CleanText(e.Source.VM, maxVM), Reason: InvalidEntry})
		}
	}
	return out
}

// Unreachable lists the job's and the services' entries that a layer above
// leaves nothing of, once for each such layer: a name that no listed name is
// under or over, a range that no listed range overlaps.
func (p *Policy) Unreachable() []Refusal {
	above := []*Layer{NodeCap(p.Phase, p.Cap), p.hubLayer()}
	out := p.unreachable("", p.Job, above)
	if p.Phase == Build {
		return out
	}
	above = append(above, p.jobLayer())
	for _, s := range p.Services {
		out = append(out, p.unreachable(s.VM, s.Lists, above)...)
	}
	return out
}

func (p *Policy) unreachable(vm string, l Lists, above []*Layer) (out []Refusal) {
	add := func(d Dimension, entry, effect string, y *Layer) {
		r := Refusal{Variable: p.Phase.Variable(d), Entry: entry, Dimension: d, Phase: p.Phase, Service: CleanText(vm, maxVM), Layer: y.Kind, Reason: Unreachable}
		if p.Flags && vm == "" {
			r.Variable = p.jobLayer().Key(d)
		}
		src := Source{Key: r.Variable, VM: CleanText(vm, maxVM)}
		if p.dryRun() && y.Kind != LayerHub {
			effect = "which only reports (dry-run): once enforced, " + effect
		}
		r.text = fmt.Sprintf("virtkit: warning: %s %s: %s, %s", src, entry, y.outside(d), effect)
		out = append(out, r)
	}
	for _, n := range l.Names {
		for _, y := range above {
			if y.Restricted() && !y.touchesName(n) {
				add(DimName, n, "its lookups will be refused", y)
			}
		}
	}
	for _, ip := range l.IPs {
		for _, y := range above {
			if !y.Restricted() || slices.ContainsFunc(y.Lists.IPs, ip.overlaps) {
				continue
			}
			effect := "reachable only as an address of a name it allows"
			if len(y.Lists.Names) == 0 {
				effect = "nothing of it is reachable"
			}
			add(DimIP, ip.String(), effect, y)
		}
	}
	return out
}

// touchesName says whether a listed name is n, above it or below it.
func (y *Layer) touchesName(n string) bool {
	if y.AllowsName(n) {
		return true
	}
	below := newLayer(LayerUnknown, Lists{Names: []string{n}})
	return slices.ContainsFunc(y.Lists.Names, below.AllowsName)
}

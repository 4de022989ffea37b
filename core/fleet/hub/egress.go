package hub

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
	"virtkit/core/lazyre"
	"virtkit/core/policy"
)

// Egress rules say what the jobs of a project may reach. For a placed job those
// that select it make one layer, which goes to its node with its start: the
// enforced ones added up, or the Fallback where none selects it, or nothing at
// all; and for each rule in dry-run the layer that the job would have were it
// enforced (fleet-design, Job egress from the hub; fleet-reference, Egress
// rules). An empty policy.Lists is a phase that the rule leaves unrestricted.

// Limits of the rules.
const (
	MaxRules       = 128
	maxRuleList    = 256 // entries
	FallbackRule   = "default"
	ModeEnforce    = "enforce"
	ModeDryRun     = "dry-run"
	ruleGenSetting = "egress_generation"
)

var ruleName = lazyre.New(`^[a-z0-9]([a-z0-9._-]{0,62})$`)

// EgressRule is one. It is stored and shown as it is.
type EgressRule struct {
	Name    string       `json:"name"`
	Subject string       `json:"subject,omitempty"` // terms; "" = the Fallback's
	Mode    string       `json:"mode"`
	Run     policy.Lists `json:"run"`
	Build   policy.Lists `json:"build"`
	Version int          `json:"version"`
	At      int64        `json:"at"`
	Actor   string       `json:"actor"`
}

// Claims are what a job is to the rules. Without Instance it is one that no
// relay brought, which the Fallback alone is for.
type Claims struct {
	Instance  string
	Project   int64
	Path      string
	Ref       string
	Protected bool
}

func claimsOf(j *Job) Claims { return Claims{j.Instance, j.What.Project, j.Path, j.Ref, j.Protected} }

// subject is what a rule selects by; zero fields select all.
type subject struct {
	instance, projects, ref string
	project                 int64
	protected, unprotected  bool
}

// parseSubject reads comma-separated terms, and returns them as they are shown.
func parseSubject(text string) (s subject, shown string, err error) {
	bad := func(format string, a ...any) (subject, string, error) {
		return s, "", fault.New(fault.Usage, "the subject: "+fmt.Sprintf(format, a...)).
			Hint("terms are *, gitlab NAME, projects GLOB, project-id N, ref GLOB, protected and unprotected, with commas between them")
	}
	var terms []string
	seen := map[string]bool{}
	for t := range strings.SplitSeq(text, ",") {
		word, arg, _ := strings.Cut(strings.TrimSpace(t), " ")
		arg = strings.Trim(strings.TrimSpace(arg), `"`)
		if seen[word] {
			return bad("%s is there twice", wire.Clean(word, 40))
		}
		seen[word] = true
		takes := word == "gitlab" || word == "projects" || word == "project-id" || word == "ref"
		if takes != (arg != "") || len(arg) > wire.MaxText || arg != wire.Clean(arg, wire.MaxText) {
			return bad("%q is no term", wire.Clean(strings.TrimSpace(t), 80))
		}
		switch word {
		case "*":
		case "gitlab":
			s.instance = arg
		case "projects":
			s.projects = arg
		case "project-id":
			if s.project, err = strconv.ParseInt(arg, 10, 64); err != nil || s.project <= 0 {
				return bad("project-id %q is no number", arg)
			}
		case "ref":
			s.ref = arg
		case "protected":
			s.protected = true
		case "unprotected":
			s.unprotected = true
		default:
			return bad("%q is no term", wire.Clean(strings.TrimSpace(t), 80))
		}
		terms = append(terms, strings.TrimSpace(word+" "+arg))
	}
	switch {
	case (s.projects != "" || s.project != 0) && s.instance == "":
		return bad("projects and project-id need gitlab, whose projects they are")
	case s.ref != "" && !s.protected:
		// Whoever can push can name a branch as they like.
		return bad("ref needs protected")
	case s.protected && s.unprotected:
		return bad("protected and unprotected select no job together")
	case seen["*"] && len(terms) > 1:
		return bad("* stands alone")
	}
	return s, strings.Join(terms, ", "), nil
}

func (s *subject) selects(c *Claims) bool {
	return c.Instance != "" && (s.instance == "" || s.instance == c.Instance) && (s.projects == "" || glob(s.projects, c.Path)) &&
		(s.project == 0 || s.project == c.Project) && (s.ref == "" || glob(s.ref, c.Ref)) &&
		!(s.protected && !c.Protected) && !(s.unprotected && c.Protected)
}

// glob matches: ** anything, * and ? no slash. It takes len(pattern) times len(s)
// steps at most, whatever the pattern.
func glob(pattern, s string) bool {
	reach := make([]bool, len(s)+1) // of what is before i of s, by the pattern so far
	reach[0] = true
	for pattern != "" {
		c := pattern[0]
		switch {
		case strings.HasPrefix(pattern, "**"):
			pattern = strings.TrimLeft(pattern, "*")
			for i := 1; i < len(reach); i++ {
				reach[i] = reach[i] || reach[i-1]
			}
			continue
		case c == '*':
			for i := 1; i < len(reach); i++ {
				reach[i] = reach[i] || reach[i-1] && s[i-1] != '/'
			}
		default:
			for i := len(s); i > 0; i-- {
				reach[i] = reach[i-1] && (c == s[i-1] || c == '?' && s[i-1] != '/')
			}
			reach[0] = false
		}
		pattern = pattern[1:]
	}
	return reach[len(s)]
}

// join adds up what rules allow in a phase: unrestricted absorbs the rest.
func join(list []policy.Lists) policy.Lists {
	out := policy.Lists{Names: []string{}, IPs: []policy.IPRule{}}
	for _, l := range list {
		if !l.Restricted() {
			return policy.Lists{}
		}
		for _, n := range l.Names {
			if !slices.Contains(out.Names, n) {
				out.Names = append(out.Names, n)
			}
		}
		for _, r := range l.IPs {
			if !slices.Contains(out.IPs, r) {
				out.IPs = append(out.IPs, r)
			}
		}
	}
	return out
}

func joined(rules []EgressRule) (run, build policy.Lists) {
	var r, b []policy.Lists
	for _, x := range rules {
		r, b = append(r, x.Run), append(b, x.Build)
	}
	return join(r), join(b)
}

// Layer is what the rules make for a job.
func (s *Snapshot) Layer(c Claims) *policy.HubEgress {
	var enforced, dry []EgressRule
	for _, r := range s.RuleList() {
		if r.Name == FallbackRule {
			continue
		}
		sub, _, err := parseSubject(r.Subject)
		if err != nil || !sub.selects(&c) {
			continue // a subject of a later version's selects nothing here
		}
		if r.Mode == ModeEnforce {
			enforced = append(enforced, r)
		} else {
			dry = append(dry, r)
		}
	}
	h := &policy.HubEgress{Rules: []string{}}
	made := enforced
	fallback, has := s.Rules[FallbackRule]
	if len(enforced) == 0 && has && fallback.Mode == ModeEnforce {
		made = []EgressRule{fallback}
	}
	for _, r := range made {
		h.Rules = append(h.Rules, r.Name)
	}
	h.Run, h.Build = joined(made)
	for _, r := range dry {
		d := policy.HubDryRule{Rule: r.Name}
		d.Run, d.Build = joined(append(slices.Clone(enforced), r))
		h.DryRun = append(h.DryRun, d)
	}
	if len(enforced) == 0 && has && fallback.Mode != ModeEnforce {
		h.DryRun = append(h.DryRun, policy.HubDryRule{Rule: FallbackRule, Run: fallback.Run, Build: fallback.Build})
	}
	return h
}

// PackLayer is a layer as a start carries it; one past the bounds of a start is
// an error.
func PackLayer(h *policy.HubEgress) ([]byte, error) {
	if err := h.Check(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(h)
	if err == nil && len(b) > wire.MaxLayer {
		err = fmt.Errorf("the hub's egress rules: %d bytes, at most %d", len(b), wire.MaxLayer)
	}
	return b, err
}

// RuleGeneration moves with every change of the rules.
func (s *Snapshot) RuleGeneration() uint64 {
	n, _ := strconv.ParseUint(s.Settings[ruleGenSetting], 10, 64)
	return n
}

// RuleList is all rules by name, the Fallback last.
func (s *Snapshot) RuleList() []EgressRule {
	list := slices.Collect(maps.Values(s.Rules))
	slices.SortFunc(list, func(a, b EgressRule) int {
		if (a.Name == FallbackRule) != (b.Name == FallbackRule) {
			if a.Name == FallbackRule {
				return 1
			}
			return -1
		}
		return strings.Compare(a.Name, b.Name)
	})
	return list
}

// EgressRulesOn says whether placed jobs are held to the rules.
func (h *Hub) EgressRulesOn() bool { return h.jobs.o.EgressRules }

// RuleWarnings say what of the rules is not what somebody may believe.
func (h *Hub) RuleWarnings() (out []string) {
	s := h.Snapshot()
	f, has := s.Rules[FallbackRule]
	switch {
	case !h.EgressRulesOn() && len(s.Rules) > 0:
		out = append(out, "[jobs] egress_rules is off in hub.toml: the rules restrict nothing")
	case h.EgressRulesOn() && (!has || f.Mode != ModeEnforce):
		out = append(out, "no enforced Fallback (rule default): a job that no rule selects reaches nothing")
	}
	return out
}

// RuleChange is a change of a rule; what is nil stays as it is.
type RuleChange struct {
	Name    string        `json:"name"`
	Subject *string       `json:"subject,omitempty"`
	Run     *policy.Lists `json:"run,omitempty"`
	Build   *policy.Lists `json:"build,omitempty"`
	Mode    *string       `json:"mode,omitempty"`
	// Known refuses a rule that is not there, instead of adding it.
	Known bool `json:"known,omitempty"`
}

// SetRule adds a rule or changes one.
func (h *Hub) SetRule(ctx context.Context, actor string, q RuleChange) (out EgressRule, err error) {
	if !ruleName.MatchString(q.Name) {
		return out, fault.Newf(fault.Usage, "%q is no name of a rule: 1 to 63 small letters, digits, dots, dashes and underscores", wire.Clean(q.Name, 80))
	}
	if q.Mode != nil && *q.Mode != ModeEnforce && *q.Mode != ModeDryRun {
		return out, fault.Newf(fault.Usage, "%q is no mode: enforce and dry-run are", wire.Clean(*q.Mode, 40))
	}
	for _, l := range []*policy.Lists{q.Run, q.Build} {
		if err := checkRuleLists(l); err != nil {
			return out, err
		}
	}
	err = h.do(ctx, func(t *tx) error {
		r, old := t.s.Rules[q.Name]
		fallback := q.Name == FallbackRule
		switch {
		case !old && q.Known:
			return noRule(q.Name)
		case !old && len(t.s.Rules) >= MaxRules:
			return fault.Newf(fault.Busy, "the hub holds %d rules already", len(t.s.Rules))
		case fallback && q.Subject != nil:
			return fault.New(fault.Usage, "default is the Fallback, for the jobs that no other rule selects: it takes no subject")
		case !old && !fallback && q.Subject == nil:
			return fault.New(fault.Usage, "a new rule needs a subject").Hint(`such as --subject "gitlab NAME, projects group/**, protected"`)
		case !old && (q.Run == nil || q.Build == nil):
			return fault.New(fault.Usage, "a new rule chooses both phases").Hint("--run and --build unrestricted, none, or destinations")
		case !old && fallback && q.Mode == nil:
			return fault.New(fault.Usage, "the Fallback's mode is chosen when it is added").Hint("--mode enforce or --mode dry-run")
		}
		if !old {
			r = EgressRule{Name: q.Name, Mode: ModeDryRun}
		}
		if q.Subject != nil {
			_, shown, err := parseSubject(*q.Subject)
			if err != nil {
				return err
			}
			r.Subject = shown
		}
		if q.Run != nil {
			r.Run = *q.Run
		}
		if q.Build != nil {
			r.Build = *q.Build
		}
		if q.Mode != nil {
			r.Mode = *q.Mode
		}
		r.Version, r.At, r.Actor = r.Version+1, t.unix(), actor
		t.rule(r)
		t.audit("", actor, "egress rule set", r.words())
		t.event("", "egress", r.Name+" set")
		out = r
		return fallbacksTx(t)
	})
	return out, err
}

// DropRule removes a rule.
func (h *Hub) DropRule(ctx context.Context, actor, name string) error {
	return h.do(ctx, func(t *tx) error {
		r, ok := t.s.Rules[name]
		if !ok {
			return noRule(name)
		}
		t.touched++
		own(&t.s.Rules, &t.ownRules)
		delete(t.s.Rules, name)
		t.b.Rules = slices.DeleteFunc(t.b.Rules, func(o EgressRule) bool { return o.Name == name })
		t.b.DropRules = append(t.b.DropRules, name)
		t.nextRules()
		t.audit("", actor, "egress rule deleted", r.words())
		t.event("", "egress", name+" deleted")
		return fallbacksTx(t)
	})
}

func noRule(name string) error {
	return fault.Newf(fault.NotFound, "no egress rule %q", wire.Clean(name, 80)).Hint("vk-hub egress lists them")
}

func checkRuleLists(l *policy.Lists) error {
	if l == nil {
		return nil
	}
	if n := max(len(l.Names), len(l.IPs)); n > maxRuleList {
		return fault.Newf(fault.Usage, "%d entries in a list, at most %d are allowed", n, maxRuleList)
	}
	for i, n := range l.Names {
		if slices.Contains(l.Names[:i], n) {
			return fault.Newf(fault.Usage, "%s is there twice", n)
		}
	}
	for i, r := range l.IPs {
		if slices.Contains(l.IPs[:i], r) {
			return fault.Newf(fault.Usage, "%s is there twice", r)
		}
	}
	if l.Restricted() { // an unlisted dimension allows none
		if l.Names == nil {
			l.Names = []string{}
		}
		if l.IPs == nil {
			l.IPs = []policy.IPRule{}
		}
	}
	return nil
}

func (t *tx) rule(r EgressRule) {
	t.touched++
	own(&t.s.Rules, &t.ownRules)
	t.s.Rules[r.Name] = r
	t.b.Rules = append(t.b.Rules, r)
	t.nextRules()
}

// nextRules moves the rules' generation on.
func (t *tx) nextRules() {
	own(&t.s.Settings, &t.ownSettings)
	n := strconv.FormatUint(t.s.RuleGeneration()+1, 10)
	t.s.Settings[ruleGenSetting] = n
	if t.b.Settings == nil {
		t.b.Settings = map[string]string{}
	}
	t.b.Settings[ruleGenSetting] = n
	t.b.Durable = true
}

func (r *EgressRule) words() string {
	sub := r.Subject
	if sub == "" {
		sub = "the Fallback"
	}
	return fmt.Sprintf("egress %s: %s (%s, version %d); run %s; build %s", r.Name, sub, r.Mode, r.Version, ListsWords(r.Run), ListsWords(r.Build))
}

// ListsWords says what a phase of a rule allows.
func ListsWords(l policy.Lists) string {
	if !l.Restricted() {
		return "unrestricted"
	}
	if len(l.Names)+len(l.IPs) == 0 {
		return "none"
	}
	ips := make([]string, len(l.IPs))
	for i, r := range l.IPs {
		ips[i] = r.String()
	}
	return fmt.Sprintf("names [%s], ips [%s]", strings.Join(l.Names, ", "), strings.Join(ips, ", "))
}

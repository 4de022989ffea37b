package policy_test

import (
	"slices"
	"strings"
	"testing"

	"virtkit/core/policy"
)

// What a hub may send is refused past its bounds, and not at them.
func TestHubBounds(t *testing.T) {
	names := func(n int) []string { return slices.Repeat([]string{"a.test"}, n) }
	rules := func(n int) (out []policy.HubDryRule) {
		for range n {
			out = append(out, policy.HubDryRule{Rule: "r"})
		}
		return out
	}
	for what, c := range map[string]struct {
		h    policy.HubEgress
		want string
	}{
		"all rules":        {policy.HubEgress{Rules: names(20), DryRun: rules(12)}, ""},
		"a rule too many":  {policy.HubEgress{Rules: names(20), DryRun: rules(13)}, "33 rules, at most 32"},
		"all entries":      {policy.HubEgress{Run: policy.Lists{Names: names(256)}, Build: policy.Lists{IPs: make([]policy.IPRule, 256)}}, ""},
		"a name too many":  {policy.HubEgress{Run: policy.Lists{Names: names(257)}}, "257 entries in a list, at most 256"},
		"a net too many":   {policy.HubEgress{Build: policy.Lists{IPs: make([]policy.IPRule, 257)}}, "257 entries"},
		"within a dry run": {policy.HubEgress{DryRun: []policy.HubDryRule{{Rule: "r", Run: policy.Lists{Names: names(257)}}}}, "257 entries"},
		"a long name":      {policy.HubEgress{Rules: []string{strings.Repeat("r", 256)}}, ""},
		"one too long":     {policy.HubEgress{Rules: []string{strings.Repeat("r", 257)}}, "past 256 bytes"},
		"no name":          {policy.HubEgress{DryRun: []policy.HubDryRule{{}}}, "without a name"},
	} {
		err := c.h.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
	}
	for _, b := range []string{`{"rules":`, `[]`, `{"rules":[],"run":{"names":"a.test"},"build":{}}`, `{"rules":[],"run":{"ips":[1]},"build":{}}`, `{"rules":[],"run":{}}`} {
		if h, err := policy.ParseHubEgress([]byte(b)); err == nil {
			t.Errorf("%s: read as %+v", b, h)
		}
	}
}

// A stack without a layer that holds something enforces nothing, and one with a
// dry-run node does only what its hub says.
func TestStackRestricted(t *testing.T) {
	held, free := policy.FlagLists(policy.Lists{Names: []string{"a.test"}}), policy.FlagLists(policy.Lists{})
	for what, c := range map[string]struct {
		c    policy.StackConfig
		want bool
	}{
		"nothing":           {policy.StackConfig{}, false},
		"lists that do not": {policy.StackConfig{Cap: free, Job: free}, false},
		"the job's":         {policy.StackConfig{Job: held}, true},
		"a dry-run node's":  {policy.StackConfig{Cap: held, Job: held, DryRun: true}, false},
		"its hub's":         {policy.StackConfig{Hub: held, DryRun: true}, true},
		"a candidate":       {policy.StackConfig{Candidates: []*policy.Layer{held}}, false},
	} {
		if got := policy.NewStack(c.c).Restricted(); got != c.want {
			t.Errorf("%s: Restricted() = %v", what, got)
		}
	}
}

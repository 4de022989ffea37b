package policy

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Bounds of a standing list.
const (
	standingShown    = 200  // names of a policy in the trace's line
	standingNames    = 2000 // names kept for a policy
	standingPolicies = 8    // policies kept for a job, the latest used
	standingVersion  = 1
)

// Standing is what a job's guests have looked up in its runs so far: a list
// for each policy it ran under, since what it reached while it could reach
// anything says nothing about the job under an allowlist. It is a job's file
// under <state_dir>/sites/.
type Standing struct {
	Version  int          `json:"version"`
	Policies []PolicySeen `json:"policies"`
}

// PolicySeen is the list of one policy.
type PolicySeen struct {
	Policy string    `json:"policy"` // Policy.Fingerprint; "" = unrestricted
	Used   time.Time `json:"used"`   // by its latest run
	Names  []string  `json:"names"`  // sorted
	// More says that names past the bound were left out.
	More bool `json:"more,omitempty"`
}

// DecodeStanding reads a file. An empty one is an empty list; one of a later
// version is an error.
func DecodeStanding(b []byte) (*Standing, error) {
	s := &Standing{Version: standingVersion}
	if len(b) == 0 {
		return s, nil
	}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("reading the list of contacted names: %w", err)
	}
	if s.Version != standingVersion {
		return nil, fmt.Errorf("the list of contacted names is of version %d, this virtkit reads %d", s.Version, standingVersion)
	}
	return s, nil
}

// Encode is the file's content.
func (s *Standing) Encode() ([]byte, error) {
	b, err := json.MarshalIndent(s, "", " ")
	return append(b, '\n'), err
}

// Add adds a run's names under a policy and says whether any was new.
func (s *Standing) Add(policy string, names []string, now time.Time) bool {
	i := slices.IndexFunc(s.Policies, func(p PolicySeen) bool { return p.Policy == policy })
	if i < 0 {
		s.Policies = append(s.Policies, PolicySeen{Policy: policy})
		i = len(s.Policies) - 1
	}
	p := &s.Policies[i]
	p.Used = now.UTC().Truncate(time.Second)
	grown := false
	for _, n := range names {
		n = CleanName(n)
		at, found := slices.BinarySearch(p.Names, n)
		switch {
		case found:
		case len(p.Names) >= standingNames:
			p.More = true
		default:
			p.Names = slices.Insert(p.Names, at, n)
			grown = true
		}
	}
	slices.SortStableFunc(s.Policies, func(a, b PolicySeen) int { return b.Used.Compare(a.Used) })
	if len(s.Policies) > standingPolicies {
		s.Policies = s.Policies[:standingPolicies]
	}
	return grown
}

// Names is the list of a policy.
func (s *Standing) Names(policy string) []string {
	for _, p := range s.Policies {
		if p.Policy == policy {
			return p.Names
		}
	}
	return nil
}

// Line is the trace's line for a policy.
func (s *Standing) Line(policy string) string {
	under := "unrestricted egress"
	if policy != "" {
		under = "egress policy " + policy
	}
	var seen PolicySeen
	for _, p := range s.Policies {
		if p.Policy == policy {
			seen = p
		}
	}
	list := orNone(strings.Join(seen.Names[:min(len(seen.Names), standingShown)], ", "))
	if n := len(seen.Names) - standingShown; n > 0 {
		least := ""
		if seen.More {
			least = "at least "
		}
		list += fmt.Sprintf(", and %s%d more not shown", least, n)
	}
	return "virtkit: names this job has contacted under " + under + ": " + list
}

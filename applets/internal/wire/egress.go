package wire

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	"virtkit/core/policy"
	"virtkit/core/runner"
	"virtkit/core/supervise"
)

// engine is what decides on a guest's switch; nil where all is allowed.
func engine(s supervise.Spec) *policy.Engine {
	e := s.Net.Egress
	if e == nil {
		return nil
	}
	// The job's own port is named as it is plugged: by the host name.
	return policy.NewEngine(policy.EngineConfig{Policy: &e.Policy, JobPort: s.Hostname, Strict: e.StrictNames})
}

// EgressSettings are [egress] and [egress.build] as jobs are held to them.
func (h *Host) EgressSettings() runner.Egress {
	c := &h.Conf.Egress
	return runner.Egress{
		Run: c.Lists(policy.Run), Build: c.Build.Lists(policy.Build),
		Audit: c.Audit, BuildAudit: c.Build.Audit, DryRun: c.DryRun, StrictNames: c.StrictNames,
	}
}

// FallbackFile is where, below the state directory, the node keeps the rules
// that its hub last sent for the jobs of the node's own gitlab-runner
// (policy.HubEgress), across the hub's outages. No file: there are none.
const FallbackFile = "node/" + node.FallbackFile

// Fallback reads FallbackFile. Rules that cannot be read are rules that cannot
// be enforced: no job runs.
func (h *Host) Fallback() (*policy.HubEgress, error) {
	path := filepath.Join(h.StateDir, FallbackFile)
	e, err := readLayer(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Newf(fault.System, "the hub's egress rules in %s cannot be read", path).Because(err).
			Hint("the hub sends them again when this node connects; without a hub, remove the file")
	}
	return e, nil
}

func readLayer(path string) (*policy.HubEgress, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return policy.ParseHubEgress(b)
}

// PlacedRules is runner.Hub of a placed job: the rules came with its start, and
// the fallback is none of it. Path is the file of a job with rules.
type PlacedRules struct{ Path string }

// Fallback is runner.Hub's.
func (p PlacedRules) Fallback() (*policy.HubEgress, error) {
	if p.Path == "" {
		return nil, nil
	}
	e, err := readLayer(p.Path)
	if err != nil {
		return nil, fault.New(fault.System, "the hub's egress rules for this job cannot be read").Because(err)
	}
	return e, nil
}

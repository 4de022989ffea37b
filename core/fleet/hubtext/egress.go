package hubtext

import (
	"fmt"

	"github.com/docker/go-units"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/hubadmin"
	"virtkit/core/policy"
)

// most is how many lines of a kind `vk-hub jobs show` has.
const most = 10

// egressRows tell of a job's egress report; row prints a key and a value.
func egressRows(j *hubadmin.Job, row func(k, format string, args ...any)) {
	if len(j.Rules)+len(j.DryRules) > 0 || j.RulesGen > 0 {
		dry := ""
		if len(j.DryRules) > 0 {
			dry = fmt.Sprintf("; in dry-run %v", j.DryRules)
		}
		row("egress rules", "%v, generation %d%s", j.Rules, j.RulesGen, dry)
	}
	if j.Node == "" && j.Accepted == 0 {
		return
	}
	r := j.Egress
	if r == nil {
		if j.State == dispatch.Finished {
			row("network", "reporting unavailable")
		} else {
			row("network", "nothing reported so far")
		}
		return
	}
	soFar := ""
	if j.State != dispatch.Finished {
		soFar = ", so far"
	}
	row("network", "%d refused entries, %d destinations blocked, %d would be, %d reached%s", len(r.Refusals)+r.RefusalsOmitted, len(r.Blocked), len(r.WouldBlock), len(r.Observed), soFar)
	for i, f := range r.Refusals {
		if i == most {
			row("", "… %d more", len(r.Refusals)+r.RefusalsOmitted-most)
			break
		}
		layer := f.Layer
		if layer == "" {
			layer = "not valid"
		}
		row("refused", "%s %s%s: %s, %s", f.Variable, f.Entry, ofService(f.Service), f.Reason, layer)
	}
	for _, l := range []struct {
		name string
		list []policy.ReportEntry
	}{{"blocked", r.Blocked}, {"would block", r.WouldBlock}} {
		for i := range l.list {
			if i == most {
				row("", "… %d more", len(l.list)-most)
				break
			}
			e := &l.list[i]
			row(l.name, "%s %s%s, %s phase, %d times: %s", e.Protocol, destination(e.Destination), ofService(e.Service), e.Phase, e.Count, setting(j, e))
		}
	}
	coverage := func(name string, p *policy.ReportPhase) {
		if p == nil {
			return
		}
		text := string(p.Coverage)
		if n := p.OmittedEntries; n != (policy.Counts{}) {
			text += fmt.Sprintf(", %d destinations left out", n.Blocked+n.WouldBlock+n.Observed)
		}
		if p.Sent != nil && p.Received != nil {
			text += fmt.Sprintf(", sent %s, received %s", units.BytesSize(float64(*p.Sent)), units.BytesSize(float64(*p.Received)))
		}
		row("coverage", "%s phase: %s", name, text)
	}
	coverage("run", r.Run)
	coverage("build", r.Build)
}

func ofService(name string) string {
	if name == "" {
		return ""
	}
	return " of service " + name
}

func destination(d policy.ReportDestination) string {
	switch {
	case d.Domain != "":
		return d.Domain
	case d.Port != 0:
		return fmt.Sprintf("%s:%d", d.IP, d.Port)
	case d.IP != "":
		return d.IP
	}
	return d.Text
}

// setting is the layer that decided, and what to look at.
func setting(j *hubadmin.Job, e *policy.ReportEntry) string {
	dim := policy.DimIP
	if e.Protocol == policy.DNS {
		dim = policy.DimName
	}
	switch e.Layer {
	case policy.LayerNodeCap:
		return "the node's cap, " + e.Phase.CapKey(dim) + " of its configuration"
	case policy.LayerHub:
		if e.Rule != "" {
			return "the hub's rule " + e.Rule + ", in dry-run"
		}
		return fmt.Sprintf("the hub's rules %v", j.Rules)
	case policy.LayerJob:
		return "the job, its variable " + e.Phase.Variable(dim)
	case policy.LayerService:
		return "the service, its variable " + e.Phase.Variable(dim)
	}
	return "unknown"
}

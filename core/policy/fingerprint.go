package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Fingerprint names what the policy enforces: 16 hexadecimal digits, or "" for
// a policy that restricts nothing. Order and repetition of entries and the
// names of the hub's rules do not matter, and neither does what only reports:
// a job under dry-run reaches what a job without lists does.
func (p *Policy) Fingerprint() string {
	h := sha256.New()
	restricted := false
	add := func(layer string, l Lists) {
		if l.Restricted() {
			restricted = true
			writeLists(h, layer, l)
		}
	}
	if !p.dryRun() {
		add(LayerNodeCap, p.Cap)
	}
	add(LayerHub, p.Hub.Lists(p.Phase))
	if !p.dryRun() {
		add(LayerJob, p.Job)
		services := slices.Clone(p.Services)
		slices.SortFunc(services, func(a, b Service) int { return strings.Compare(a.VM, b.VM) })
		for _, s := range services {
			add(LayerService+" "+s.VM, s.Lists)
		}
	}
	if !restricted {
		return ""
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// CapReport is a phase's cap as a node holds jobs to it, for its inventory.
type CapReport struct {
	Fingerprint string `json:"fingerprint"`
	Lists       *Lists `json:"lists,omitempty"` // nil = too large to show
	TooLarge    bool   `json:"too_large,omitempty"`
	DryRun      bool   `json:"dry_run,omitempty"`
}

// maxShown is how many entries of a list a node's inventory shows.
const maxShown = 256

// ReportCap normalizes a cap: entries sorted. Its fingerprint tells one cap
// from another, an unrestricted and a dry-run one too.
func ReportCap(l Lists, dryRun bool) CapReport {
	h := sha256.New()
	writeLists(h, fmt.Sprintf("cap dry-run=%v", dryRun), l)
	r := CapReport{Fingerprint: hex.EncodeToString(h.Sum(nil)[:8]), DryRun: dryRun}
	if len(l.Names) > maxShown || len(l.IPs) > maxShown {
		r.TooLarge = true
		return r
	}
	n := normalized(l)
	r.Lists = &n
	return r
}

// Caps are a node's caps as it holds jobs to them.
type Caps struct {
	Run   CapReport `json:"run"`
	Build CapReport `json:"build"`
}

// ReportCaps is what a node says of its caps in its inventory. The run phase's
// is [egress] under [net] mode "switch"; without a network ("none") it allows
// nothing, and over a tap or a pool's device nothing is enforced. The build
// phase's is [egress.build] whatever the mode.
func ReportCaps(netMode string, run Lists, dryRun bool, build Lists) Caps {
	switch netMode {
	case "switch":
	case "none":
		run, dryRun = Lists{Names: []string{}, IPs: []IPRule{}}, false
	default:
		run, dryRun = Lists{}, false
	}
	return Caps{Run: ReportCap(run, dryRun), Build: ReportCap(build, false)}
}

func normalized(l Lists) Lists {
	l.Names = slices.Clone(l.Names)
	slices.Sort(l.Names)
	l.Names = slices.Compact(l.Names)
	l.IPs = slices.Clone(l.IPs)
	slices.SortFunc(l.IPs, compareIP)
	l.IPs = slices.Compact(l.IPs)
	return l
}

func compareIP(a, b IPRule) int {
	if c := a.Net.Addr().Compare(b.Net.Addr()); c != 0 {
		return c
	}
	if c := a.Net.Bits() - b.Net.Bits(); c != 0 {
		return c
	}
	return int(a.Port) - int(b.Port)
}

// writeLists writes a form in which no two different lists are alike. An
// absent list beside a present one allows nothing, as an empty one does.
func writeLists(w io.Writer, layer string, l Lists) {
	n := normalized(l)
	fmt.Fprintf(w, "%q restricted=%v\n", layer, l.Restricted())
	for _, s := range n.Names {
		fmt.Fprintf(w, "name %q\n", s)
	}
	for _, r := range n.IPs {
		fmt.Fprintf(w, "ip %s\n", r)
	}
}

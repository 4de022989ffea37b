package vkcmd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"

	"virtkit/applets/internal/wire"
	"virtkit/core/admit"
	"virtkit/core/fault"
	"virtkit/core/fleet/node"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/version"
	"virtkit/ledger"
)

// nodeParts makes the host and the runner of a node. A host that runs a
// gitlab-runner of its own is refused until core/fleet/nodehost is wired.
func (a *app) nodeParts(ctx context.Context, h *wire.Host, _ *slog.Logger) (nodeParts, error) {
	if m := h.Conf.Node.Runner; m != "" && m != string(fleet.RunnerNone) {
		return nodeParts{}, fault.Newf(fault.Usage, "[node] runner = %q is not supported by this build", m).Hint(`set [node] runner = "none"`)
	}
	host := &ledgerHost{h: h}
	for _, f := range a.gateChecks(ctx, h) {
		host.checks = append(host.checks, fleet.Check{Name: f.Name, OK: f.Verdict != checkFail, Text: f.Text})
	}
	return nodeParts{host: host, runner: newNoRunner()}, nil
}

// ledgerHost is a node.Host that knows what this host's ledger holds.
type ledgerHost struct {
	h      *wire.Host
	checks []fleet.Check
}

// Inventory is node.Host's.
func (l *ledgerHost) Inventory(context.Context) (*fleet.Inventory, error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	total, err := admit.HostMemory(admit.MemInfo, "MemTotal")
	return &fleet.Inventory{Hostname: name, CPUs: runtime.NumCPU(), RAM: total, VK: version.Version, Labels: l.h.Conf.Node.Labels, Checks: l.checks}, err
}

// Heartbeat is node.Host's.
func (l *ledgerHost) Heartbeat(ctx context.Context) (*fleet.Heartbeat, error) {
	claims, err := l.claims(ctx)
	if err != nil {
		return nil, err
	}
	b := &fleet.Heartbeat{}
	for _, c := range claims {
		b.Admission.Committed += c.Granted.MemMiB << 20
		if c.Waiting {
			b.Admission.Waiting++
		} else {
			b.Admission.Running++
		}
	}
	budget, err := l.h.Budget()
	b.Admission.Budget = budget << 20
	if free, ferr := admit.HostMemory(admit.MemInfo, "MemAvailable"); ferr == nil {
		b.MemAvailable = free
	}
	return b, err
}

func (l *ledgerHost) claims(ctx context.Context) ([]ledger.ClaimInfo, error) {
	gate, err := l.h.Gate()
	if err != nil {
		return nil, err
	}
	claims, problems, err := gate.Claims(ctx)
	if err != nil {
		return nil, err
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("reading the admission ledger: %w", problems[0])
	}
	return claims, nil
}

// Workloads is node.Host's.
func (l *ledgerHost) Workloads(context.Context) ([]fleet.Workload, int, error) { return nil, 0, nil }

// Drain is node.Host's.
func (l *ledgerHost) Drain(ctx context.Context) (fleet.Drain, error) {
	d := fleet.Drain{RunnerExited: true}
	claims, err := l.claims(ctx)
	if err != nil {
		return d, err
	}
	jobs, problems, err := l.h.Jobs.List(ctx)
	if err != nil {
		return d, err
	}
	if len(problems) > 0 {
		return d, problems[0]
	}
	for _, j := range jobs {
		if j.Kind == "gitlab" && j.Live() {
			d.Jobs++
		}
	}
	d.AdmissionIdle = len(claims) == 0
	return d, nil
}

// Concurrency is node.Host's: there is no runner whose number could be set.
func (l *ledgerHost) Concurrency(_ context.Context, hubCeiling int, _ bool) fleet.Concurrency {
	return fleet.Concurrency{HubCeiling: hubCeiling, LocalCeiling: l.h.Conf.Executor.Schedule.MaxConcurrency}
}

// noRunner is the node.Runner of a host without one.
type noRunner struct {
	changed chan struct{}
	status  chan node.RunnerStatus // holds the one that is current
}

func newNoRunner() *noRunner {
	r := &noRunner{changed: make(chan struct{}, 1), status: make(chan node.RunnerStatus, 1)}
	r.status <- node.RunnerStatus{Acquisition: fleet.Stopped}
	return r
}

func (r *noRunner) Mode() fleet.RunnerMode        { return fleet.RunnerNone }
func (r *noRunner) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (r *noRunner) Changed() <-chan struct{}      { return r.changed }
func (r *noRunner) Abandon()                      {}
func (r *noRunner) Status() node.RunnerStatus     { s := <-r.status; r.status <- s; return s }
func (r *noRunner) SetAcquire(take bool) {
	s := <-r.status
	s.Acquisition = fleet.Stopped
	if take {
		s.Acquisition = fleet.Taking
	}
	r.status <- s
}

package wire

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"virtkit/core/admit"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/nodehost"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
	"virtkit/core/policy"
	"virtkit/core/supervise"
	"virtkit/core/tune"
	"virtkit/core/version"
	"virtkit/ledger"
	"virtkit/vmm/boot"
)

// NodeOptions are what a node is made of beside its host.
type NodeOptions struct {
	Log *slog.Logger
	// Checks are the findings of vk check that gate enrollment; they are asked for
	// at each inventory, and kept for a while.
	Checks func(ctx context.Context) []wire.Check
	// Registry takes the node's metrics; nil = none are kept.
	Registry prometheus.Registerer
}

// Node is this host as the node's loop takes it.
type Node struct {
	Host      node.Host
	Runner    node.Runner
	Jobs      func() (node.Jobs, error) // what the hub places here; the node's lock is to be held
	Detection nodehost.Detection
	Warnings  []string // to be said once, at the start
}

// checksKept is how long the findings of vk check hold: they start programs.
const checksKept = 10 * time.Minute

// Node joins this host to the node's loop. It is an error when the mode is none
// and a runner with the vk executor was found.
func (h *Host) Node(ctx context.Context, o NodeOptions) (*Node, error) {
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	look := h.Look(os.Getuid())
	d, err := nodehost.DetectMode(look)
	if err != nil {
		return nil, err
	}
	if err := d.Refuse(); err != nil {
		return nil, err
	}
	n := &Node{Detection: d, Warnings: d.Warnings(h.Conf.File, h.StateDir)}
	own := d.OwnRunner(look)
	n.Jobs = func() (node.Jobs, error) { return h.nodeJobs(own, o.Log) }
	if own != "" {
		n.Warnings = append(n.Warnings, "placed jobs are refused: this host runs its own gitlab-runner: "+own)
	}
	ci := nodehost.CICheck{StateDir: h.StateDir, User: look.User, Found: d.Found, Mode: d.Mode}
	if ev, err := ci.Evidence(); err != nil {
		n.Warnings = append(n.Warnings, fmt.Sprintf("the user of this host's CI jobs is not known: %v", err))
	} else if len(ev) > 0 {
		n.Warnings = append(n.Warnings, ci.MismatchText(ev))
	}
	explain := func(err error) error {
		if ev, everr := ci.Evidence(); everr == nil && len(ev) > 0 {
			return errors.New(ci.MismatchText(ev))
		}
		return err
	}
	config := d.ConfigOf(look)
	var status func() nodehost.ManagedStatus
	if d.Mode == nodehost.ModeManaged {
		r, err := nodehost.NewManagedRunner(nodehost.ManagedOptions{
			StateDir: h.StateDir, Gate: []string{h.Env.Exe, "node", "runner-exec", "--"},
			Program: cmp.Or(h.Conf.Node.GitlabRunner, "gitlab-runner"), Config: config, Env: h.Env.Environ(),
			Log: o.Log.With(logx.Comp, "runner"),
		})
		if err != nil {
			return nil, err
		}
		n.Runner, status = r, r.Managed().Status
	} else {
		n.Runner = nodehost.NewOtherRunner(d)
	}
	var metrics *nodehost.Metrics
	if o.Registry != nil {
		metrics = nodehost.NewMetrics(o.Registry, version.Version, status)
	}
	n.Host = nodehost.Join(nodehost.NodeOptions{
		Host: h.nodeHost(o, d, config), Runner: n.Runner, Tuner: h.tuner(o, d, config, explain), LocalCeiling: h.Conf.Executor.Schedule.MaxConcurrency, Metrics: metrics, Explain: explain, Log: o.Log,
	})
	return n, nil
}

// Look is what the detection of this host's runner goes by, for a node that runs
// as that user.
func (h *Host) Look(uid int) nodehost.Look {
	u := nodehost.Root("").UserOf(uid)
	if uid == os.Getuid() {
		u.Home = cmp.Or(u.Home, Home(h.Env))
	}
	return nodehost.Look{Configured: h.Conf.Node.Runner, RunnerConfig: h.Conf.Node.RunnerConfig, User: u, Exe: h.Env.Exe}
}

// tuner sets the runner's concurrency; nil on a host without one.
func (h *Host) tuner(o NodeOptions, d nodehost.Detection, config string, explain func(error) error) *nodehost.Tuner {
	if d.Mode == nodehost.ModeNone {
		return nil
	}
	set := config
	if d.Mode == nodehost.ModeExternal {
		set = h.Conf.Node.RunnerConfig // what was found is reported, not written
	}
	log := o.Log.With(logx.Comp, "tune")
	return nodehost.NewTuner(nodehost.TunerOptions{
		StateDir: h.StateDir, LocalCeiling: h.Conf.Executor.Schedule.MaxConcurrency, RunnerConfig: set, Explain: explain, Log: log,
		Input: func(ctx context.Context) (tune.Input, error) {
			return h.TuneInput(ctx, admit.MemInfo, func(format string, a ...any) { log.Debug(fmt.Sprintf(format, a...)) })
		},
	})
}

func (h *Host) nodeHost(o NodeOptions, d nodehost.Detection, config string) *nodehost.Host {
	no := h.workloadOptions()
	no.Version, no.Exe, no.ConfigHash = version.Version, "/proc/self/exe", ConfigHash(h)
	no.JobsSpeed, no.CheckoutsSpeed, no.Labels = h.Conf.Node.JobsSpeed, h.Conf.Node.CheckoutsSpeed, h.Conf.Node.Labels
	no.Features = features(h.Conf.Net.Mode)
	e := h.EgressSettings()
	if b, err := json.Marshal(policy.ReportCaps(h.Conf.Net.Mode, e.Run, e.DryRun, e.Build)); err == nil {
		no.Egress = b
	}
	no.Log = o.Log
	if o.Checks != nil {
		no.Checks = kept(checksKept, o.Checks)
	}
	no.Kernel = func(context.Context) string {
		k, err := boot.Find(h.StateDir, h.Conf.VMM.Kernel)
		if err != nil {
			return ""
		}
		return k.Version
	}
	if config != "" {
		no.RunnerConfig = func() string { return config }
		program := cmp.Or(h.Conf.Node.GitlabRunner, "gitlab-runner")
		if d.Mode == nodehost.ModeExternal && d.Found != nil {
			program = d.Found.Program
		}
		no.RunnerVersion = kept(checksKept, func(ctx context.Context) string { return runnerVersion(ctx, program) })
	}
	return nodehost.New(no)
}

// workloadOptions are those of a Host that is asked for its workloads alone.
func (h *Host) workloadOptions() nodehost.Options {
	return nodehost.Options{
		StateDir: h.StateDir, Jobs: h.Jobs.Dir(), Checkouts: cmp.Or(h.Conf.Executor.CheckoutDir, filepath.Join(h.StateDir, "checkouts")),
		Ledger: &nodeLedger{h: h}, MemEvery: h.Conf.Node.WorkloadMem,
	}
}

// Workloads is this host as far as its workloads go, their memory measured each
// memEvery; 0 = the configuration's.
func (h *Host) Workloads(memEvery time.Duration) *nodehost.Host {
	o := h.workloadOptions()
	o.MemEvery = cmp.Or(memEvery, o.MemEvery)
	return nodehost.New(o)
}

// ConfigHash is the sha256 of the effective configuration, so that hosts which
// should have the same one can be compared.
func ConfigHash(h *Host) string {
	sum := sha256.Sum256([]byte(h.Conf.Dump(false)))
	return hex.EncodeToString(sum[:])
}

// kept keeps an answer that is dear for a while.
func kept[T any](d time.Duration, ask func(context.Context) T) func(context.Context) T {
	var mu sync.Mutex
	var at time.Time
	var last T
	return func(ctx context.Context) T {
		mu.Lock()
		defer mu.Unlock()
		if at.IsZero() || time.Since(at) >= d {
			last = ask(ctx)
			if ctx.Err() == nil {
				at = time.Now()
			}
		}
		return last
	}
}

// runnerVersion is the number that gitlab-runner's program gives; "" when it
// gives none within some seconds.
func runnerVersion(ctx context.Context, program string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	for l := range strings.SplitSeq(string(out[:min(len(out), 4096)]), "\n") {
		if v, ok := strings.CutPrefix(strings.TrimSpace(l), "Version:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// nodeLedger is the ledger as a node's host takes it.
type nodeLedger struct {
	h *Host

	mu   sync.Mutex
	gate *ledger.Admissions // one ask after another: it is not for several goroutines
}

// Claims implements nodehost.Ledger.
func (l *nodeLedger) Claims(ctx context.Context) ([]nodehost.Claim, []error, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gate == nil {
		g, err := l.h.Gate()
		if err != nil {
			return nil, nil, err
		}
		l.gate = g
	}
	claims, problems, err := l.gate.Claims(ctx)
	out := make([]nodehost.Claim, 0, len(claims))
	for _, c := range claims {
		out = append(out, nodehost.Claim{ID: c.ID, Waiting: c.Waiting, Granted: c.Granted, Want: c.Want})
	}
	return out, problems, err
}

// Guests implements nodehost.Ledger.
func (l *nodeLedger) Guests(ctx context.Context) ([]nodehost.Guest, []error, error) {
	jobs, problems, err := l.h.Jobs.List(ctx)
	out := make([]nodehost.Guest, 0, len(jobs))
	for _, j := range jobs {
		g := nodehost.Guest{
			ID: j.ID, Name: j.Name, Kind: j.Kind, Phase: supervise.Phase(j.Status), Live: j.Status != ledger.Dead && supervise.Locked(j.Dir), PID: j.PID,
			Image: j.Image, Created: j.Created, Since: j.Since, CPUs: j.CPUs, MemMiB: j.MemMiB, Dir: j.Dir,
		}
		if st, err := supervise.ReadState(j.Dir); err == nil && st.PID == j.PID {
			g.Start = st.Start
		}
		if spec, err := supervise.ReadSpec(j.Dir); err == nil {
			for _, s := range spec.Services {
				g.MemMiB += s.Spec.MemMiB
			}
		}
		out = append(out, g)
	}
	return out, problems, err
}

// Budget implements nodehost.Ledger.
func (l *nodeLedger) Budget() (int64, error) { return l.h.Budget() }

// features are what a node of a [net] mode does for jobs. Over a tap or a pool's
// device nothing holds them to a hub's rules; without a network they are held.
func features(mode string) []string {
	if mode != "switch" && mode != "none" {
		return []string{wire.FeatureEgressReports}
	}
	return []string{wire.FeatureEgressRules, wire.FeatureEgressReports, wire.FeatureEgressFallback}
}

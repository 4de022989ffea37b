package vkcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/applets/internal/wire"
	"virtkit/core/conf"
	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/guestclient"
	"virtkit/core/guestwire"
	"virtkit/core/image"
	"virtkit/core/runner"
	"virtkit/core/supervise"
	"virtkit/core/version"
	"virtkit/ledger"
)

// runner makes the job's runner from the host's configuration. Whatever is
// wrong with that is this host's fault and not the job's.
func (c *call) runner(trace io.Writer) (*runner.Runner, error) {
	h, err := c.a.host()
	if err != nil {
		if k := fault.KindOf(err); k == fault.JobFailed {
			return nil, fault.New(fault.System, "opening this host's state").Because(err)
		}
		return nil, err
	}
	if err := h.CheckNet(supervise.NetSpec{Mode: h.Conf.Net.Mode}); err != nil {
		return nil, fault.New(fault.System, "").Hint("%s", fault.HintOf(err)).Because(err)
	}
	gate, err := h.Gate()
	if err != nil {
		return nil, err
	}
	r := &runner.Runner{
		Gate: gate, History: h.History, Tools: hostTools(h),
		Images:   &jobImages{h: h},
		Machines: &jobMachines{h},
		Hub:      h,
		Sites:    h.Egress,

		Recordings: h.Recordings(),
		Set:        gitlabSettings(h),
		Trace:      trace,
		Parent:     parentProcess(),
	}
	if c.drv.Env(execdrv.EnvJobServer) != "" {
		r.Hub = wire.PlacedRules{Path: c.drv.Env(execdrv.EnvEgressLayer)}
	}
	if h.Conf.Executor.HostCheckout {
		if r.Checkouts, err = h.Checkouts(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// recordInterval is 0 where guests are not recorded.
func recordInterval(e conf.Executor) time.Duration {
	if !e.Atop {
		return 0
	}
	return e.AtopInterval
}

func parentProcess() supervise.Owner {
	pid := os.Getppid()
	start, err := fsx.ProcStart(pid)
	if err != nil || pid <= 1 {
		return supervise.Owner{}
	}
	return supervise.Owner{PID: pid, Start: start}
}

func gitlabSettings(h *wire.Host) runner.Settings {
	vm, cf := h.Conf.Executor.VM, h.Conf
	hostname, _ := os.Hostname()
	net := supervise.NetSpec{Mode: cf.Net.Mode}
	if net.Mode == "switch" {
		net.Loopback = cf.Net.HostLoopback
	}
	budget, budgetErr := h.Budget()
	return runner.Settings{
		FromHistory: cf.Executor.Schedule.FromHistory, DiskDefault: cf.Executor.Schedule.DiskDefault, BudgetErr: budgetErr,
		Limits: execdrv.Limits{
			BudgetMiB: int(budget),
			CPUs:      vm.CPUs, MaxCPUs: vm.MaxCPUs,
			MemMiB: int(vm.Mem >> 20), MaxMemMiB: int(vm.MaxMem >> 20),
			Image: image.DefaultRef,
		},
		User: vm.User, Hostname: vm.Hostname, HostName: hostname,
		BuildsDir: cf.Executor.BuildsDir, CacheDir: cf.Executor.CacheDir,
		Upper: cf.VMM.Disk, Nested: vm.Nested, Shares: jobShares(cf), Reclaim: vm.Reclaim, Balloon: vm.Balloon, DAX: askedDAX(cf), Kernel: cf.VMM.Kernel, Accel: cf.VMM.Accel, Net: net,
		CheckoutLayer: h.CheckoutLayer,
		Egress:        h.EgressSettings(),
		ServiceWait:   cf.Executor.ServicesTimeout, GuestServiceExec: cf.Executor.GuestServiceExec,
		BootLimit: cf.VMM.BootTimeout, HangLimit: cf.VMM.HangTimeout,
		Version: version.Version,

		RecordInterval: recordInterval(cf.Executor),
	}
}

// jobShares are [executor.share], outer directories before those inside them.
func jobShares(cf *conf.Config) []supervise.Share {
	var out []supervise.Share
	for _, at := range slices.Sorted(maps.Keys(cf.Executor.Share)) {
		out = append(out, supervise.Share{Source: cf.Executor.Share[at], Target: at, ReadOnly: true})
	}
	return out
}

// askedDAX is a window that the configuration asks for by itself: the default
// asks for nothing that anybody would miss.
func askedDAX(c *conf.Config) string {
	if c.Origin("executor.vm.dax").Source == conf.FromDefault || c.Executor.VM.DAX == "off" {
		return ""
	}
	return c.Executor.VM.DAX
}

// jobImages is the host's store for runner.
type jobImages struct {
	h *wire.Host

	mu   sync.Mutex
	held []*image.Image // for the life of this process
}

func (i *jobImages) Check(ref string) error {
	s, err := i.h.Store()
	if err != nil {
		return err
	}
	_, err = s.Parse(ref)
	return err
}

func (i *jobImages) Resolve(ctx context.Context, q runner.ImageQuery, progress func(string)) (runner.Image, error) {
	s, err := i.h.Store()
	if err != nil {
		return runner.Image{}, err
	}
	ref, err := s.Parse(q.Ref)
	if err != nil {
		return runner.Image{}, err
	}
	auth := i.h.Auth()
	auth.DockerAuthConfig = q.AuthConfig
	for _, c := range q.Credentials {
		if c.Type == "registry" {
			auth.Job = append(auth.Job, image.Credential{Registry: c.URL, Username: c.Username, Password: c.Password})
		}
	}
	policies, err := jobPullPolicies(q.PullPolicies)
	if err != nil {
		return runner.Image{}, err
	}
	fetched := int64(0)
	var img *image.Image
	g, gctx := errgroup.WithContext(ctx)
	resolve := func(p image.Policy) (*image.Image, error) {
		return s.Resolve(gctx, ref, image.ResolveOptions{Auth: auth, Platform: q.Platform, Policy: p, Progress: func(p image.Progress) {
			fetched = max(fetched, p.AllDone)
			if p.Text != "" && p.Stage != "done" {
				progress(p.Text)
			}
		}})
	}
	g.Go(func() error {
		var err error
		for n, p := range policies {
			if img, err = resolve(p); err == nil || gctx.Err() != nil || n == len(policies)-1 {
				return err
			}
			progress(fmt.Sprintf("pull policy %s: %v; trying %s", p, err, policies[n+1]))
		}
		return err
	})
	if q.Service == "" {
		g.Go(func() error {
			// The supervisor finds it again; here it is fetched when there is none.
			_, err := i.h.Kernel(gctx, "", progress)
			return err
		})
	}
	err = g.Wait()
	if err != nil {
		img.Close()
		return runner.Image{}, err
	}
	// The hold lives as long as this process, so that `vk gc` cannot take the
	// image before the supervisor has its own.
	i.mu.Lock()
	i.held = append(i.held, img)
	i.mu.Unlock()
	from := "cached"
	if fetched > 0 {
		from = fmt.Sprintf("fetched %.0f MB", float64(fetched)/1e6)
	}
	return runner.Image{
		Root: wire.RootOf(img), Env: img.Config.Env, User: img.Config.User, Workdir: img.Config.WorkingDir,
		Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, Volumes: img.Config.Volumes, Ports: tcpPorts(img.Config.ExposedPorts), From: from,
	}, nil
}

// tcpPorts picks the TCP ports of an image's ("80/tcp"), sorted.
func tcpPorts(exposed []string) []int {
	var out []int
	for _, e := range exposed {
		port, proto, _ := strings.Cut(e, "/")
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 && (proto == "" || proto == "tcp") {
			out = append(out, int(n))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// jobPullPolicies are the job's pull_policy, tried one after the other.
func jobPullPolicies(words []string) ([]image.Policy, error) {
	if len(words) == 0 {
		return []image.Policy{image.Always}, nil
	}
	var out []image.Policy
	for _, w := range words {
		switch p := image.Policy(w); p {
		case image.Always, image.IfNotPresent, image.Never:
			out = append(out, p)
		default:
			return nil, fault.Newf(fault.JobFailed, "image:pull_policy is %q, expected always, if-not-present or never", w)
		}
	}
	return out, nil
}

// jobMachines is the host's job directories and supervisors for runner.
type jobMachines struct{ h *wire.Host }

func (m *jobMachines) Dir(id string) string { return filepath.Join(m.h.Jobs.Dir(), id) }

func (m *jobMachines) Reserve(ctx context.Context, s supervise.Spec) (runner.Slot, error) {
	r, err := m.h.Jobs.Reserve(ctx, s)
	if err != nil {
		return nil, err
	}
	return &jobSlot{m.h, r}, nil
}

func (m *jobMachines) Find(_ context.Context, id string) (runner.Guest, error) {
	c, err := supervise.Dial(m.Dir(id))
	if err != nil {
		return nil, err
	}
	return newJobGuest(c), nil
}

// Remove kills the supervisor if there is one, which ends all it owns, then
// removes the directory. Between a launcher that is dying and the supervisor
// that it leaves, the directory may look owned by nobody or by somebody
// unreachable for a moment: that is tried again until ctx ends.
func (m *jobMachines) Remove(ctx context.Context, id string) error {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		c, err := supervise.Dial(m.Dir(id))
		if err == nil {
			_, err = c.Kill(ctx)
		}
		if err != nil && !errors.Is(err, supervise.ErrSupervisorGone) && !errors.Is(err, fs.ErrNotExist) && ctx.Err() != nil {
			return err
		}
		err = m.h.Jobs.Remove(ctx, id)
		if err == nil || fault.KindOf(err) != fault.Conflict {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// Reap removes the directories of jobs whose guest has ended and whose runner
// will not come back for them. Living guests end by themselves with their
// runner or at their deadline.
func (m *jobMachines) Reap(ctx context.Context) []string {
	var out []string
	jobs, _, err := m.h.Jobs.List(ctx)
	if err != nil {
		return []string{"looking for forgotten jobs: " + err.Error()}
	}
	for _, j := range jobs {
		if j.Kind != "gitlab" || live(j) || !forgotten(j, time.Now()) {
			continue
		}
		if err := m.h.Jobs.Remove(ctx, j.ID); err == nil {
			out = append(out, "removed "+j.ID+", whose runner never cleaned it up")
		} else if fault.KindOf(err) != fault.Conflict {
			out = append(out, "removing "+j.ID+": "+err.Error())
		}
	}
	if s, err := m.h.Jobs.Sweep(ctx, ledger.SweepOptions{}); err == nil {
		for _, id := range s.Removed {
			out = append(out, "removed "+id+", left by a crash")
		}
	}
	if m.h.Conf.Net.Mode == "tap" || m.h.Conf.Net.Mode == "pool" {
		gone, err := m.h.SweepNet(ctx, false)
		for _, g := range gone {
			out = append(out, "removed "+g+", left by a crash")
		}
		if err != nil {
			out = append(out, err.Error())
		}
	}
	return out
}

// forgotten tells whether an ended job's cleanup will never come: its runner
// is gone, or its time is long over.
func forgotten(j ledger.Job, now time.Time) bool {
	rec, err := runner.ReadRecord(j.Dir)
	if err != nil {
		return now.Sub(j.Created) > 24*time.Hour
	}
	if rec.Runner.PID != 0 {
		if start, err := fsx.ProcStart(rec.Runner.PID); err != nil || start != rec.Runner.Start {
			return true
		}
	}
	return !rec.Deadline.IsZero() && now.After(rec.Deadline)
}

type jobSlot struct {
	h *wire.Host
	r *ledger.Reservation
}

func (s *jobSlot) Launch(ctx context.Context, hold *os.File, progress func(supervise.State)) (runner.Guest, error) {
	c, err := s.h.Launch(ctx, s.r, progress, hold)
	if err != nil {
		return nil, err
	}
	return newJobGuest(c), nil
}

func (s *jobSlot) Release() error { return s.r.Release() }

type jobGuest struct {
	c *supervise.Client
	g *guestclient.Client
}

func newJobGuest(c *supervise.Client) *jobGuest {
	return &jobGuest{c, guestclient.FromOpener(c.Opener())}
}

// State is the supervisor's word; of one that is gone, its last, which lacks an
// Exit when it was killed.
func (g *jobGuest) State(ctx context.Context) (supervise.State, error) {
	st, err := g.c.State(ctx)
	if err == nil {
		return st, nil
	}
	if last, rerr := supervise.ReadState(g.c.Dir()); rerr == nil {
		st = last
	}
	if st.Exit != nil {
		return st, nil
	}
	return st, err
}

func (g *jobGuest) Exec(ctx context.Context, r guestwire.ExecRequest, s runner.Stdio, control <-chan guestwire.ExecControl) (guestwire.ExecEvent, error) {
	res, err := g.g.Exec(ctx, r, guestclient.Stdio{In: s.In, Out: s.Out, Err: s.Err}, control)
	ev := guestwire.ExecEvent{PID: res.PID, Exited: err == nil, Code: res.Code, Signal: res.Signal, OOM: res.OOM, Err: res.Err}
	return ev, err
}

func (g *jobGuest) Begin(ctx context.Context) (supervise.State, error) { return g.c.Begin(ctx) }

func (g *jobGuest) Sample(ctx context.Context) error { return g.c.Sample(ctx) }

func (g *jobGuest) Egress(ctx context.Context, stage string) (supervise.EgressRecord, error) {
	return g.c.Egress(ctx, stage)
}

func (g *jobGuest) Usage(ctx context.Context) (supervise.Usage, error) { return g.c.Usage(ctx) }

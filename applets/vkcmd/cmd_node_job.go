package vkcmd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"virtkit/applets/internal/cliutil"
	"virtkit/applets/internal/wire"
	"virtkit/core/cijob"
	"virtkit/core/fault"
	"virtkit/core/fleet/jobdir"
	fleet "virtkit/core/fleet/wire"
	"virtkit/core/fsx"
	"virtkit/core/policy"
	"virtkit/core/runner"
	"virtkit/core/supervise"
	"virtkit/core/version"
)

// newNodeJob is the driver of one placed job. Only vk node run starts it.
func newNodeJob(a *app) *cli.Command {
	var cleanup bool
	return cliutil.Exits(cliutil.Takes(&cli.Command{
		Name:      "job",
		Usage:     "run one placed job to its result; started by vk node run itself",
		ArgsUsage: "DIR",
		Hidden:    true,
		Description: "DIR is the job's directory in the node's journal. The job's lock and its claim in\n" +
			"the ledger come as descriptors, when " + cijob.EnvLock + " and\n" +
			cijob.EnvClaim + " tell their numbers.",
		Flags: []cli.Flag{cliutil.Bool(&cleanup, "cleanup", "only clean up after a driver that is gone")},
		Action: func(ctx context.Context, c *cli.Command) error {
			return a.nodeJob(ctx, c.Args().First(), cleanup)
		},
	}, cliutil.Arity{Min: 1, Max: 1}), cliutil.Status{Code: "0", Means: "the result is written, whatever it is"})
}

func (a *app) nodeJob(ctx context.Context, path string, cleanup bool) error {
	dir, err := jobdir.At(path)
	if err != nil {
		return fault.Newf(fault.NotFound, "%s is no job's directory", path).Because(err)
	}
	lock, err := jobLock(dir, a.env.Getenv)
	if err != nil {
		return err
	}
	defer lock.Close()
	claim, err := inherited(a.env.Getenv, cijob.EnvClaim)
	if err != nil {
		return err
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	o := cijob.Options{
		Dir: dir, Log: a.log(), Version: version.Version,
		Host: newPlacedHost(h, dir), Artifacts: h.Artifacts(), Caches: h.Caches(),
		Executor: &cijob.Commands{Argv: append(append([]string{a.env.Exe}, a.globalArgs()...), "gitlab"), Env: plainEnviron(a.env.Environ()), Work: dir.WorkPath(), Claim: claim},
	}
	if cleanup {
		if err := os.MkdirAll(dir.WorkPath(), 0o700); err != nil {
			return err
		}
		return cijob.CleanUp(ctx, o)
	}
	if _, err := dir.Work(); err != nil {
		return err
	}
	return cijob.Run(ctx, o)
}

// plainEnviron is an environment without what is for this process alone.
func plainEnviron(environ []string) []string {
	var out []string
	for _, kv := range environ {
		if !hasName(kv, cijob.EnvLock) && !hasName(kv, cijob.EnvClaim) {
			out = append(out, kv)
		}
	}
	return out
}

func hasName(kv, name string) bool { return len(kv) > len(name) && kv[:len(name)+1] == name+"=" }

// jobLock is the job's lock: the one that the node passed on, or one of its own
// when the driver was started by hand.
func jobLock(dir *jobdir.Dir, getenv func(string) string) (*fsx.Lock, error) {
	f, err := inherited(getenv, cijob.EnvLock)
	if err != nil {
		return nil, err
	}
	if f != nil {
		return fsx.HeldLock(f), nil
	}
	l, err := dir.Lock()
	if errors.Is(err, fsx.ErrLocked) {
		return nil, fault.Newf(fault.Conflict, "another driver runs job %s", dir.ID()).Because(err)
	}
	return l, err
}

// inherited is a descriptor whose number the environment tells; nil = none. No
// child is to inherit it in turn: it would keep the lock.
func inherited(getenv func(string) string, name string) (*os.File, error) {
	v := getenv(name)
	if v == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil || n < 3 {
		return nil, fault.Newf(fault.Usage, "%s is %q, expected the number of a descriptor", name, v)
	}
	if _, err := unix.FcntlInt(uintptr(n), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, fault.Newf(fault.Usage, "%s is %q, which is no open descriptor", name, v).Because(err)
	}
	return os.NewFile(uintptr(n), name), nil
}

// placedHost is what a driver asks this host of its job.
type placedHost struct {
	h  *wire.Host
	id func() (string, error) // the name of the job's guest

	egress os.FileInfo // of what Egress read last
}

var _ cijob.Host = (*placedHost)(nil)

func newPlacedHost(h *wire.Host, dir *jobdir.Dir) *placedHost {
	return &placedHost{h: h, id: sync.OnceValues(func() (string, error) {
		id, err := cijob.Identify(dir)
		return id.ID, err
	})}
}

func (p *placedHost) record() (string, runner.Record, error) {
	id, err := p.id()
	if err != nil {
		return "", runner.Record{}, err
	}
	rec, err := runner.ReadRecord(p.h.Jobs.Path(id))
	return id, rec, err
}

func (p *placedHost) guest(ctx context.Context) (runner.Guest, runner.Record, error) {
	id, rec, err := p.record()
	if err != nil {
		return nil, rec, err
	}
	g, err := (&jobMachines{p.h}).Find(ctx, id)
	return g, rec, err
}

// Guest is cijob.Host's.
func (p *placedHost) Guest(ctx context.Context) (cijob.Guest, string, error) {
	g, rec, err := p.guest(ctx)
	return g, rec.User, err
}

// Size is cijob.Host's.
func (p *placedHost) Size() *fleet.GuestSize {
	_, rec, err := p.record()
	if err != nil {
		return nil // prepare has not come so far
	}
	return &fleet.GuestSize{CPUs: rec.CPUs, MemMiB: int64(rec.MemMiB)}
}

// Usage is cijob.Host's.
func (p *placedHost) Usage(ctx context.Context) (*fleet.JobUsage, []fleet.JobEvent) {
	g, rec, err := p.guest(ctx)
	if err != nil {
		return nil, nil
	}
	var events []fleet.JobEvent
	out := &fleet.JobUsage{CPUs: rec.CPUs, MemMiB: int64(rec.MemMiB)}
	if u, err := g.Usage(ctx); err == nil {
		cpu, mem := u.CPU.Milliseconds(), u.Memory
		out.CPUMS, out.PeakMem = &cpu, &mem
		if u.Killed > 0 {
			e := fleet.JobEvent{Kind: "oom_kill", Count: int64(u.Killed)}
			if len(u.Victims) > 0 {
				e.First = u.Victims[0].Line()
			}
			events = append(events, e)
		}
	}
	return out, events
}

// Egress is cijob.Host's.
func (p *placedHost) Egress(ctx context.Context, now bool) (*policy.Report, bool) {
	id, err := p.id()
	if err != nil {
		return nil, false
	}
	dir := p.h.Jobs.Path(id)
	fi, err := os.Stat(filepath.Join(dir, supervise.EgressFile))
	if err != nil {
		return nil, false // no guest so far, or one that nobody holds to anything
	}
	if !now && p.egress != nil && os.SameFile(fi, p.egress) && fi.ModTime().Equal(p.egress.ModTime()) {
		return nil, true
	}
	var rec supervise.EgressRecord
	live := supervise.Locked(dir)
	if c, derr := supervise.Dial(dir); now && derr == nil {
		rec, err = c.Egress(ctx, "")
	} else {
		rec, err = supervise.ReadEgress(dir)
	}
	if err != nil {
		return nil, false
	}
	p.egress = fi
	r := egressReportOf(rec, live)
	return &r, false
}

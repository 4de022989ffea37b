package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"virtkit/core/execdrv"
	"virtkit/core/fault"
	"virtkit/core/supervise"
	"virtkit/core/ui"
)

// readServices learns what the job says of its services and refuses what can
// never work.
func (r *Runner) readServices(c *execdrv.Call, resp execdrv.Response) (execdrv.Services, error) {
	s, err := execdrv.ReadServices(c, resp, r.Set.Limits, r.Set.Hostname)
	if err != nil || len(s.All) == 0 {
		return s, err
	}
	if m := r.Set.Net.Mode; m != "switch" {
		return s, fault.Newf(fault.System, "services: they need the per-job LAN, which [net] mode = %q does not have", m).
			Hint(`set mode = "switch" in [net] of this runner's config.toml`)
	}
	for _, v := range s.All {
		if err := r.Images.Check(v.Image); err != nil {
			return s, fault.Newf(fault.JobFailed, "services: %s", v.Name).Because(err).Hint("%s", fault.HintOf(err))
		}
	}
	return s, nil
}

func serviceLists(s execdrv.Services) []ServiceLists {
	var out []ServiceLists
	for _, v := range s.All {
		out = append(out, ServiceLists{VM: v.Name, Lookup: v.Lookup})
	}
	return out
}

// resolveAll makes the images of the job and of its services ready, beside each
// other.
func (r *Runner) resolveAll(ctx context.Context, j *job) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.resolve(ctx, j) })
	j.serviceImages = make([]Image, len(j.services.All))
	for i, v := range j.services.All {
		g.Go(func() error {
			start := r.now()
			q := ImageQuery{
				Ref: v.Image, Platform: v.Platform, PullPolicies: v.PullPolicies, Service: v.Name,
				AuthConfig: j.call.Var("DOCKER_AUTH_CONFIG"), Credentials: j.resp.Credentials,
			}
			img, err := r.Images.Resolve(ctx, q, func(line string) { r.say("service %s: %s", v.Name, line) })
			if err != nil {
				return fmt.Errorf("service %s: %s: %w", v.Name, v.Image, err)
			}
			r.say("service %s: image %s (%s%s) in %s", v.Name, v.Image, shortDigest(img.Root.Digest), prefixed(", ", img.From), seconds(r.now().Sub(start)))
			j.serviceImages[i] = img
			return nil
		})
	}
	return g.Wait()
}

// servicesOf are the services' guests.
func (r *Runner) servicesOf(j *job) ([]supervise.Service, error) {
	var out []supervise.Service
	var errs []error
	for i, v := range j.services.All {
		img := j.serviceImages[i]
		argv, err := execdrv.ServiceArgv(v, img.Entrypoint, img.Cmd)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		user := v.User
		if user == "" {
			user = img.User
		}
		s := supervise.Service{
			Spec: supervise.Spec{
				ID: v.Name, Name: v.Name, Kind: supervise.ServiceKind, Created: r.now(), Hostname: v.Hostname,
				CPUs: v.CPUs, MemMiB: v.MemMiB, Image: img.Root, Upper: r.Set.Upper, Env: img.Env,
				Net:       supervise.NetSpec{Names: v.Names},
				Command:   &supervise.Command{Argv: argv, Env: v.Env, Dir: orSlash(img.Workdir), User: user},
				BootLimit: r.Set.BootLimit, HangLimit: r.Set.HangLimit, Kernel: r.Set.Kernel, Accel: r.Set.Accel,
				// A service has a balloon whatever the job's guest has.
				Reclaim: reclaimOf(r.Set.Reclaim, v.MemMiB),
			},
			Ports: v.Ports, Wait: r.Set.ServiceWait,
		}
		for _, d := range append([]string{orSlash(img.Workdir)}, img.Volumes...) {
			s.Spec.Dirs = append(s.Spec.Dirs, supervise.Dir{Path: d})
		}
		if s.Ports == nil {
			s.Ports = img.Ports
		}
		out = append(out, s)
	}
	return out, errors.Join(errs...)
}

func (r *Runner) serviceExec(j *job) supervise.ServiceExec {
	switch {
	case len(j.services.All) == 0:
		return supervise.ServiceExecNone
	case r.Set.GuestServiceExec:
		return supervise.ServiceExecOn
	}
	return supervise.ServiceExecRefused
}

// serviceRecords are what later calls and listings need to know.
func serviceRecords(services []supervise.Service) []ServiceRecord {
	var out []ServiceRecord
	for _, s := range services {
		out = append(out, ServiceRecord{Name: s.Spec.ID, Image: s.Spec.Image.Ref, Digest: s.Spec.Image.Digest, CPUs: s.Spec.CPUs, MemMiB: s.Spec.MemMiB})
	}
	return out
}

// startTeller tells in the trace how the job's guest and its services come up.
type startTeller struct {
	r       *Runner
	j       *job
	retried int // of the job's own guest
	waiting bool
	told    []toldService
}

// toldService is what was told of a service.
type toldService struct {
	started, ready bool
	retried        int
}

func (r *Runner) newStartTeller(j *job) *startTeller {
	return &startTeller{r: r, j: j, told: make([]toldService, len(j.services.All))}
}

// again tells of starts that were given up, beyond the first told ones, and
// returns how many were told now.
func (t *startTeller) again(what string, why []string, told int) int {
	for _, w := range why[min(told, len(why)):] {
		t.r.warn(what + " was booted again: " + ui.CleanLine(w))
	}
	return max(told, len(why))
}

// hear takes the supervisor's state at each change.
func (t *startTeller) hear(st supervise.State) {
	t.retried = t.again("the guest", st.Retried, t.retried)
	if w, ok := strings.CutPrefix(st.Stage, "waiting for services "); ok && !t.waiting {
		t.waiting = true
		t.r.say("waiting for services: %s", w)
	}
	for i, v := range st.Services {
		if i >= len(t.told) {
			return
		}
		told := &t.told[i]
		told.retried = t.again("service "+v.Name, v.Retried, told.retried)
		if v.Start > 0 && !told.started {
			told.started = true
			t.r.say("service %s: started in %s as %s", v.Name, seconds(v.Start), hostOf(v.Addr))
			if v.NUMA != "" {
				t.r.say("service %s: %s", v.Name, v.NUMA)
			}
		}
		switch {
		case !v.Waited || told.ready:
		case v.Exit != nil:
			told.ready = true // its end is told
		case len(v.Closed) > 0:
			told.ready = true
			line := fmt.Sprintf("service %s does not accept connections on %s after %s; the job goes on without waiting for it", v.Name, portsText(v.Closed), v.Limit)
			t.r.warn(line + t.r.logOf(t.r.Machines.Dir(t.j.id.ID), v.Name))
		default:
			told.ready = true
			t.r.say("service %s: accepts connections on %s after %s", v.Name, portsText(t.j.spec.Services[i].Ports), seconds(v.Ready))
		}
	}
	t.r.tellEnded(t.r.Machines.Dir(t.j.id.ID), st.Services)
}

func hostOf(addr string) string { a, _, _ := strings.Cut(addr, "/"); return a }

func portsText(ports []int) string {
	var out []string
	for _, p := range ports {
		out = append(out, strconv.Itoa(p))
	}
	return plural(len(ports), "port") + " " + strings.Join(out, ", ")
}

// endToldFile is made, in a service's directory, by who tells of its end: that is
// told once, by whichever call comes first.
const endToldFile = "end-told"

// tellEnded tells of services that have ended.
func (r *Runner) tellEnded(jobdir string, services []supervise.ServiceState) {
	for _, v := range services {
		if v.Exit == nil {
			continue
		}
		f, err := os.OpenFile(filepath.Join(supervise.ServiceDir(jobdir, v.Name), endToldFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		f.Close()
		r.warn("service " + v.Name + " has ended: " + exitText(v.Exit) + r.logOf(jobdir, v.Name) + consoleOf(v.Exit))
	}
}

func exitText(x *supervise.Exit) string {
	if x.Reason == supervise.ReasonExited && x.Code != nil {
		if x.Detail != "" {
			return fmt.Sprintf("exit code %d: %s", *x.Code, ui.CleanLine(x.Detail))
		}
		return fmt.Sprintf("exit code %d", *x.Code)
	}
	return x.Reason + prefixed(": ", ui.CleanLine(x.Detail))
}

func consoleOf(x *supervise.Exit) string {
	if len(x.Console) == 0 {
		return ""
	}
	return shown("; last lines of its console:", x.Console[max(0, len(x.Console)-logLines):])
}

// logLines is how many lines of a service's log the trace shows.
const logLines = 10

// logOf is the end of a service's log, for the trace.
func (r *Runner) logOf(jobdir, service string) string {
	lines, err := lastLines(filepath.Join(supervise.ServiceDir(jobdir, service), supervise.CommandFile), logLines)
	switch {
	case errors.Is(err, os.ErrNotExist), err == nil && len(lines) == 0:
		return "; its log is empty"
	case err != nil:
		return "; its log cannot be read: " + err.Error()
	}
	return shown("; last lines of its log:", lines)
}

func shown(head string, lines []string) string {
	for _, l := range lines {
		head += "\n  " + ui.CleanLine(l)
	}
	return head
}

// lastLines reads the end of a file, at most 8 KiB of it.
func lastLines(path string, n int) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	from := max(0, size-8<<10)
	b, err := io.ReadAll(io.NewSectionReader(f, from, size-from))
	if err != nil {
		return nil, err
	}
	lines := slices.DeleteFunc(strings.Split(string(b), "\n"), func(l string) bool { return strings.TrimSpace(l) == "" })
	return lines[max(0, len(lines)-n):], nil
}

// stateTime bounds asking for the services' states at a stage's start and end.
const stateTime = 5 * time.Second

// tellServices tells, at a stage's start and end, which services have ended
// since.
func (r *Runner) tellServices(ctx context.Context, g Guest, rec Record) {
	if len(rec.Services) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stateTime)
	defer cancel()
	// A guest that cannot tell is told of by what follows.
	if st, err := g.State(ctx); err == nil {
		r.tellEnded(r.Machines.Dir(rec.ID), st.Services)
	}
}

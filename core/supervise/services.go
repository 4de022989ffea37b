package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/logx"
)

// Services
//
// Each one is a guest with a supervisor process of its own, whose directory is
// <jobdir>/services/<name>, a job directory in all but its place. The job's
// supervisor makes its port on the switch, launches it beside its own guest's
// boot, and passes it nothing but that port (uplink.go). It ends when its
// command does, when the job's guest does, or when the job's supervisor is
// gone, whatever ended that: it watches that process and the uplink. Its
// directory stays as long as the job's.

// ServicesDir is the directory of a job's services in the job's.
const ServicesDir = "services"

// ServiceKind is Spec.Kind of a service.
const ServiceKind = "service"

// modePort is NetSpec.Mode of a service.
const modePort = "port"

// SlowWait is how many times as long as Service.Wait says an emulated service
// is waited for.
const SlowWait = 4

// dialPause are the pauses between two attempts at a port.
const (
	dialPause    = 50 * time.Millisecond
	dialPauseMax = 500 * time.Millisecond
)

// ServiceDir is the directory of one service of a job.
func ServiceDir(jobdir, name string) string { return filepath.Join(jobdir, ServicesDir, name) }

// service is one of Spec.Services while its job lives.
type service struct {
	n    int // in Spec.Services
	spec Service
	dir  string
	port Plugged

	env chan []string // its command's, from the launcher; holds one

	started chan struct{} // closed when its launch has ended
	client  *Client       // set before started is closed; nil when that failed
	err     error         // likewise
	settled chan struct{} // closed when there is nothing to wait for any more
	ended   chan struct{} // closed when its guest has ended, after the state tells so
}

// errServicesEnd ends launches and waits with the job.
var errServicesEnd = errors.New("the job's guest ends")

// makeServices prepares for Spec.Services; nothing is started yet.
func (s *supervisor) makeServices() {
	for n, v := range s.spec.Services {
		s.services = append(s.services, &service{
			n: n, spec: v, dir: ServiceDir(s.dir, v.Spec.ID), env: make(chan []string, 1),
			started: make(chan struct{}), settled: make(chan struct{}), ended: make(chan struct{}),
		})
		s.board.state.Services = append(s.board.state.Services, ServiceState{Name: v.Spec.ID, Phase: Starting})
	}
}

// startServices gives each service its port and launches it; it does not wait.
func (s *supervisor) startServices(ctx context.Context) error {
	if s.network == nil {
		return fault.Newf(fault.System, "services need the per-job LAN, and [net] mode is %q", s.spec.Net.Mode).Hint(`set [net] mode = "switch"`)
	}
	if len(s.d.Argv) == 0 {
		return errors.New("this program starts no services")
	}
	if err := os.Mkdir(filepath.Join(s.dir, ServicesDir), 0o700); err != nil {
		return err
	}
	// Not ctx, which ends with the boot.
	sctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.endServices = cancel
	for _, v := range s.services {
		var err error
		if v.port, err = s.network.Plug(ctx, v.spec.Spec.ID, v.spec.Spec.Net); err != nil {
			err = fmt.Errorf("service %s: %w", v.spec.Spec.ID, err)
			for _, rest := range s.services[v.n:] {
				close(rest.started)
			}
			return err
		}
		s.serviceState(v, func(st *ServiceState) { st.Addr = v.port.Guest().Addr })
		go s.runService(sctx, v)
	}
	return nil
}

// serviceState changes what the state tells of a service; f may be called more
// than once.
func (s *supervisor) serviceState(v *service, f func(*ServiceState)) {
	s.board.update(func(st *State) {
		all := slices.Clone(st.Services)
		f(&all[v.n])
		st.Services = all
	})
}

// runService launches a service, waits for its ports and follows it to its end.
func (s *supervisor) runService(ctx context.Context, v *service) {
	start := time.Now()
	var retried []string
	v.client, v.err = s.launchService(ctx, v, func(st State) { retried = st.Retried })
	close(v.started)
	if v.err != nil {
		s.serviceState(v, func(st *ServiceState) { st.Phase, st.Retried = Ended, retried })
		close(v.settled)
		return
	}
	up := time.Now()
	s.serviceState(v, func(st *ServiceState) { st.Phase, st.Start, st.Retried = Running, up.Sub(start), retried })
	go s.followService(ctx, v)
	s.awaitPorts(ctx, v, up)
	close(v.settled)
}

func (s *supervisor) launchService(ctx context.Context, v *service, progress func(State)) (*Client, error) {
	spec := v.spec.Spec
	spec.Kind, spec.Owner, spec.Keep = ServiceKind, Self(), true
	spec.Net.Mode = modePort
	if spec.Place == nil && s.d.Place != nil {
		// Here, where all of the job's guests are known.
		spec.Place = s.choosePlace(spec)
	}
	if spec.Command != nil && s.launcher != nil && s.launcher.conn != nil {
		select {
		case env := <-v.env:
			c := *spec.Command
			c.Env = env
			spec.Command = &c
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	ours, theirs, err := uplinkPair()
	if err != nil {
		return nil, err
	}
	go serveUplink(ours, v.port)
	defer theirs.Close()
	c, err := Launch(ctx, LaunchOptions{Dir: v.dir, Spec: spec, Argv: s.d.Argv, Env: s.d.Env, Progress: progress, Hold: s.hold, uplink: theirs})
	if err != nil {
		ours.Close()
		return nil, err
	}
	if spec.Place != nil {
		if is, err := c.State(ctx); err == nil {
			s.serviceState(v, func(st *ServiceState) { st.NUMA = is.NUMA })
		}
	}
	return c, nil
}

// followService waits for the end of a service's guest.
func (s *supervisor) followService(ctx context.Context, v *service) {
	defer close(v.ended)
	st, err := v.client.Wait(ctx, Ended, nil)
	if st.Exit == nil {
		if ctx.Err() != nil {
			return // the job ends, and the service with it
		}
		if st, _ = ReadState(v.dir); st.Exit == nil {
			st.Exit = &Exit{Reason: ReasonFailed, Detail: "its supervisor was killed"}
			if err != nil && !errors.Is(err, ErrSupervisorGone) {
				st.Exit.Detail = err.Error()
			}
		}
	}
	s.log.Info("a service ended", "service", v.spec.Spec.ID, "reason", st.Exit.Reason, "detail", st.Exit.Detail)
	v.port.Unplug()
	s.serviceState(v, func(w *ServiceState) { w.Phase, w.Exit = Ended, st.Exit })
}

// awaitPorts waits until every port accepts, the service has ended, or its time
// is over.
func (s *supervisor) awaitPorts(ctx context.Context, v *service, from time.Time) {
	limit := v.spec.Wait
	if len(v.spec.Ports) == 0 || limit <= 0 {
		return
	}
	if st, err := v.client.State(ctx); err == nil && st.Accel == "tcg" {
		limit *= SlowWait
	}
	ctx, cancel := context.WithDeadline(ctx, from.Add(limit))
	defer cancel()
	go func() {
		select {
		case <-v.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	host, _, _ := strings.Cut(v.port.Guest().Addr, "/")
	open := make([]bool, len(v.spec.Ports))
	var wg sync.WaitGroup
	for i, p := range v.spec.Ports {
		wg.Go(func() { open[i] = v.accepts(ctx, net.JoinHostPort(host, strconv.Itoa(p))) })
	}
	wg.Wait()
	var closed []int
	for i, p := range v.spec.Ports {
		if !open[i] {
			closed = append(closed, p)
		}
	}
	took := time.Since(from)
	s.serviceState(v, func(st *ServiceState) { st.Ready, st.Waited, st.Closed, st.Limit = took, true, closed, limit })
}

// accepts tries a port until it accepts. The agent of the service's own guest
// dials, at the guest's outer address: a program that listens on 127.0.0.1 alone
// is as good as not there.
func (v *service) accepts(ctx context.Context, addr string) bool {
	g := v.client.Guest()
	for pause := dialPause; ; pause = min(2*pause, dialPauseMax) {
		c, err := g.Dial(ctx, "tcp", addr)
		if err == nil {
			c.Close()
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// awaitServices returns when there is nothing more to wait for. A service that
// could not be started is an error; one that died or does not accept is not:
// the state tells of it, and the job goes on.
func (s *supervisor) awaitServices(ctx context.Context) error {
	if len(s.services) == 0 {
		return nil
	}
	s.d.Hook("services ready")
	ctx, cancel := s.current().with(ctx)
	defer cancel()
	var names []string
	for _, v := range s.services {
		select {
		case <-v.settled:
		default:
			names = append(names, v.spec.Spec.ID)
		}
	}
	if names != nil {
		s.board.stage("waiting for services " + strings.Join(names, ", "))
	}
	var errs []error
	for _, v := range s.services {
		select {
		case <-v.settled:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if v.err != nil {
			errs = append(errs, v.startFault())
		} else if x := s.board.get().Services[v.n].Exit; x != nil && x.Reason == ReasonExited && x.Detail != "" {
			errs = append(errs, fault.Newf(fault.JobFailed, "service %s: its command could not be started: %s", v.spec.Spec.ID, x.Detail).
				Hint("command: and entrypoint: of the service replace the image's"))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return &stepError{"services", errors.Join(errs...)}
}

func (v *service) startFault() error {
	f := fault.Newf(fault.KindOf(v.err), "service %s: %s", v.spec.Spec.ID, v.err.Error())
	if h := fault.HintOf(v.err); h != "" {
		f = f.Hint("%s", h)
	}
	return f
}

// stopServices ends all services, whatever state they are in, at once: who
// needed them is gone.
func (s *supervisor) stopServices() {
	if s.endServices == nil {
		return
	}
	s.endServices(errServicesEnd)
	var wg sync.WaitGroup
	for _, v := range s.services {
		wg.Go(func() {
			<-v.started
			if v.client == nil {
				return
			}
			ctx, cancel := contextFor(undoLimit)
			defer cancel()
			_, err := v.client.Kill(ctx)
			if err == nil {
				_, err = killService(ctx, v.dir)
			}
			if err != nil {
				s.log.Warn("ending a service", "service", v.spec.Spec.ID, logx.Err, err)
			}
		})
	}
	wg.Wait()
}

// serviceDirs lists the directories of a job's services.
func serviceDirs(jobdir string) []string {
	ents, err := os.ReadDir(filepath.Join(jobdir, ServicesDir))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range ents {
		if e.IsDir() {
			out = append(out, ServiceDir(jobdir, e.Name()))
		}
	}
	return out
}

// killService ends what lives of a service, whose job's supervisor is gone or
// wants it gone, and returns the processes it found. A supervisor that has not
// yet written who it is ends by itself, because its launcher is gone: it is
// waited for.
func killService(ctx context.Context, dir string) ([]int, error) {
	var found []int
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if _, err := os.Lstat(filepath.Join(dir, LockFile)); errors.Is(err, os.ErrNotExist) {
			return found, nil // being made or removed when its maker died
		}
		lock, err := fsx.TryLock(filepath.Join(dir, LockFile), false)
		if err != nil && !errors.Is(err, fsx.ErrLocked) {
			return found, err
		}
		pids, kerr := eachLeftover(dir, func(o Owner) (bool, error) { return o.Kill(ctx) })
		found = append(found, pids...)
		if err == nil {
			lock.Close()
			return found, kerr
		}
		select {
		case <-ctx.Done():
			return found, errors.Join(kerr, fmt.Errorf("waiting for the supervisor of service %s to end: %w", filepath.Base(dir), context.Cause(ctx)))
		case <-time.After(wait):
		}
	}
}

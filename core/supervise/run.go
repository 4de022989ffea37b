package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/logx"
	"virtkit/core/machine"
	"virtkit/core/numa"
)

// Deps are what the supervisor's process needs of the engines.
type Deps struct {
	// Driver boots the guest. Nil: NewDriver is asked once the spec is known,
	// as the step "driver".
	Driver machine.Driver
	// NewDriver chooses a driver for a spec and says which accelerator it
	// uses ("kvm", "tcg").
	NewDriver func(ctx context.Context, s Spec) (d machine.Driver, accel string, err error)
	// Kernel finds the kernel that s.Kernel asks for.
	Kernel func(ctx context.Context, s Spec) (machine.Kernel, error)
	// Place chooses a memory node for a guest, of which others were placed just
	// now; nil: none is chosen.
	Place func(s Spec, others []numa.Outstanding) (*numa.Placement, error)
	// Disk makes the writable layer at path with room for size bytes.
	Disk func(path string, size int64) error
	// NewNetwork makes the job's switch; not called when s.Net.Mode is
	// "none". dir is the job's directory.
	NewNetwork func(ctx context.Context, dir string, s Spec) (Network, error)
	// KeepEgress is given the record of a guest whose directory goes with it.
	// Nil drops it.
	KeepEgress func(EgressRecord) error
	// Argv and Env re-execute this program as the supervisor of a service, as
	// LaunchOptions has them. No Argv: a guest with services does not start.
	Argv, Env []string
	// Recordings makes place for what guests record of themselves. Nil: they
	// record nothing.
	Recordings Recordings
	// Templates keeps states of guests to start others from. Nil: all boot.
	Templates Templates
	// Log goes to sup.log. Nil discards.
	Log *slog.Logger
	// Hook, when set, is called before each step of the start with its name,
	// and as "ready", "ending" and "removing" later. For tests.
	Hook func(step string)
	// Times overrides the supervisor's own intervals; zero fields keep them.
	Times Times
	// ConsoleMax overrides the constant of that name.
	ConsoleMax int64
}

// Times are the supervisor's intervals.
type Times struct {
	Ping    time.Duration // between two heartbeats; default HangLimit/4 within 1 s to 10 s, 10 s without a limit
	Contact time.Duration // a first contact that stays silent is tried again after this; default 10 s
	Grace   time.Duration // of a stop that names none; default 5 s
	Power   time.Duration // from the agent's goodbye to power off, then the guest is killed; default 10 s
	Record  time.Duration // between two writes of egress.json while it changes; default 5 s
	Usage   time.Duration // that a guest gets to tell of its usage; default 10 s
	Life    time.Duration // a guest that stands still for so long while it starts, or is silent while it is on trial, is booted again; default BootLimit/3
}

// Defaults of a Spec that leaves them 0.
const (
	DefaultBootLimit = 2 * time.Minute
	defaultGrace     = 5 * time.Second
	defaultPower     = 10 * time.Second
	defaultContact   = 10 * time.Second
	defaultRecord    = 5 * time.Second
	defaultUsage     = 10 * time.Second
	// drainLimit bounds how long the output of a guest that is gone may take
	// to reach its readers.
	drainLimit = 10 * time.Second
	procLogMax = 1 << 20
)

// supervisor is one guest's life. Its fields below mu change while it runs;
// those above are set by steps that come before their readers.
type supervisor struct {
	dir   string
	spec  Spec
	d     Deps
	log   *slog.Logger
	board *board

	console   *boundedLog
	output    *boundedLog // of Spec.Command
	procLog   *limitWriter
	driver    machine.Driver
	kernel    machine.Kernel
	network   Network
	port      Plugged
	machineID string
	command   chan commandEnd
	launcher  *launcherPipe
	hold      []*os.File // as in LaunchOptions; never closed
	// commandEnv is Spec.Command's, from the launcher; nil until it is here.
	commandEnv []string

	placed    bool // Deps.Place was asked for the job's guest
	places    places
	cabled    bool         // the port's first descriptor was given away
	from      origin       // of the boot that is under way or was last
	noRestore bool         // a template was no good
	restoring atomic.Bool  // from.restored, for who watches the start
	answered  atomic.Bool  // the agent of this boot has
	timerKHz  int          // what this boot's kernel takes its timer's rate for; 0 = unknown
	trial     atomic.Int32 // onTrial and so on

	end      context.CancelCauseFunc // ends the guest; the first cause wins
	killOnce sync.Once
	kill     chan struct{} // closed: no more grace

	clients  clients
	egress   egressKeeper
	upper    highWater
	recorder *recorder // nil: nothing is recorded

	services     []*service
	endServices  context.CancelCauseFunc // nil until they are started
	uplink       *uplink                 // of a service; else nil
	serviceExecs limiter

	mu    sync.Mutex
	guest *guest // nil before the first boot and between boots
}

// ending is the cause with which a guest's life is ended.
type ending struct {
	reason string
	detail string
	grace  time.Duration // 0 = the default
}

func (e *ending) Error() string {
	if e.detail == "" {
		return e.reason
	}
	return e.reason + ": " + e.detail
}

// step is one step of a start.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func() // may be nil; called also when do failed or was never reached again
}

// stepError names the step that failed.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// Run is the body of the supervisor's process: it runs the guest that
// <jobdir>/spec.json describes to its end and removes the directory unless
// Spec.Keep says otherwise (a start that fails never keeps it when Launch
// waits for it). It returns nil when the guest ended as it was asked to, else
// what is also in State.Exit. SIGTERM and SIGINT, and the end of ctx, stop the
// guest in order; a second signal kills it.
func Run(ctx context.Context, jobdir string, d Deps) error {
	if d.Log == nil {
		d.Log = logx.Discard()
	}
	dir, err := filepath.Abs(jobdir)
	if err != nil {
		return fmt.Errorf("finding %s: %w", jobdir, err)
	}
	in, err := inherit(dir)
	if err != nil {
		return err
	}
	var s *supervisor
	defer func() {
		in.lock.Close()
		if s != nil && in.launcher.conn == nil { // else the process's end does it
			s.clients.release()
			s.recorder.release()
		}
	}()
	spec, err := ReadSpec(dir)
	if err != nil {
		in.launcher.fail(err)
		return err
	}
	s = newSupervisor(dir, spec, d)
	s.launcher, s.uplink, s.hold = in.launcher, in.uplink, in.hold
	s.makeServices()
	life, end := context.WithCancelCause(context.WithoutCancel(ctx))
	s.end = end
	defer end(nil)
	stopSignals := s.watchSignals(ctx)
	defer stopSignals()
	s.watchOwner(life)
	s.watchDeadline(life)
	s.watchUplink(life)
	in.launcher.attach(life, s)

	exit, ready := s.live(life, in.launcher)
	return s.finish(exit, ready, in)
}

func newSupervisor(dir string, spec Spec, d Deps) *supervisor {
	if spec.BootLimit <= 0 {
		spec.BootLimit = DefaultBootLimit
	}
	def := func(v *time.Duration, to time.Duration) {
		if *v <= 0 {
			*v = to
		}
	}
	def(&d.Times.Contact, defaultContact)
	def(&d.Times.Grace, defaultGrace)
	def(&d.Times.Power, defaultPower)
	def(&d.Times.Record, defaultRecord)
	def(&d.Times.Usage, defaultUsage)
	def(&d.Times.Life, spec.BootLimit/lifePart)
	ping := 10 * time.Second
	if spec.HangLimit > 0 {
		ping = min(max(spec.HangLimit/4, time.Second), ping)
	}
	def(&d.Times.Ping, ping)
	if d.Hook == nil {
		d.Hook = func(string) {}
	}
	start, _ := fsx.ProcStart(os.Getpid())
	now := time.Now()
	s := &supervisor{
		dir: dir, spec: spec, d: d, log: d.Log.With(logx.VM, spec.Name),
		console: newBoundedLog(filepath.Join(dir, ConsoleFile), d.ConsoleMax),
		output:  newBoundedLog(filepath.Join(dir, CommandFile), d.ConsoleMax),
		procLog: &limitWriter{w: os.Stderr, left: procLogMax},
		kill:    make(chan struct{}),
		clients: clients{asked: make(chan struct{}, 16)},
		command: make(chan commandEnd, 1),
	}
	if spec.Trial && spec.Command == nil {
		s.trial.Store(onTrial)
	}
	s.places.add(spec.Place, spec.MemMiB)
	s.board = newBoard(filepath.Join(dir, StateFile), s.log, State{
		ID: spec.ID, Name: spec.Name, Kind: spec.Kind, Phase: Starting, Stage: "starting",
		Since: now, Created: spec.Created, PID: os.Getpid(), Start: start,
		Image: spec.Image.Ref, Digest: spec.Image.Digest, CPUs: spec.CPUs, MemMiB: spec.MemMiB,
		Accel: spec.Accel, Kernel: spec.Kernel,
	})
	return s
}

// live runs the guest until it has to end and takes everything down again. It
// returns why, and whether the guest had been ready.
func (s *supervisor) live(ctx context.Context, l *launcherPipe) (exit Exit, ready bool) {
	s.board.update(func(*State) {})
	var undo []func()
	defer func() {
		for _, u := range undo {
			defer u() // backwards
		}
	}()
	start := time.Now()
	bctx, cancel := context.WithTimeoutCause(ctx, s.spec.BootLimit, &ending{reason: ReasonBootTimeout})
	err := s.runSteps(bctx, s.prepareSteps(), &undo)
	if err == nil {
		err = s.bootReady(bctx, &undo)
	}
	cancel()
	if err == nil {
		err = s.awaitServices(ctx)
	}
	if err != nil {
		return s.failedStart(err, time.Since(start)), false
	}
	s.board.update(func(st *State) {
		st.Phase, st.Stage, st.BootMS, st.Boots = Running, "running", time.Since(start).Milliseconds(), 1
	})
	s.d.Hook("ready")
	l.ready(s.board.get())
	tctx, stop := context.WithCancel(ctx)
	defer stop()
	go trim(tctx, &s.clients.came)
	go s.egress.follow(tctx, s.d.Times.Record)
	return s.watch(ctx), true
}

// runSteps does the steps in order, timing each one.
func (s *supervisor) runSteps(ctx context.Context, steps []step, undo *[]func()) error {
	for _, st := range steps {
		s.d.Hook(st.name)
		s.board.stage(st.name)
		t := time.Now()
		if st.undo != nil {
			*undo = append(*undo, st.undo)
		}
		err := context.Cause(ctx)
		if err == nil {
			err = st.do(ctx)
		}
		if err != nil {
			if c := context.Cause(ctx); c != nil && !errors.Is(err, c) {
				err = fmt.Errorf("%w: %w", c, err)
			}
			return &stepError{st.name, err}
		}
		took := time.Since(t)
		s.board.took(st.name, took)
		s.log.Debug("step done", "step", st.name, "took", took)
	}
	return nil
}

// failedStart words the end of a guest that was never ready.
func (s *supervisor) failedStart(err error, took time.Duration) Exit {
	x := Exit{Reason: ReasonFailed, Detail: err.Error(), Kind: string(fault.KindOf(err)), Hint: fault.HintOf(err)}
	if se, ok := errors.AsType[*stepError](err); ok {
		x.Step = se.step
	}
	var gone *guestGone
	e, asked := errors.AsType[*ending](err)
	switch {
	case asked && e.reason == ReasonBootTimeout:
		x.Reason = ReasonBootTimeout
		x.Detail = fmt.Sprintf("not ready after %v; stage reached: %s; %v", took.Round(10*time.Millisecond), s.board.get().Stage, err)
	case asked:
		x = Exit{Reason: e.reason, Detail: e.detail, Step: x.Step}
	case errors.As(err, &gone):
		x.Reason = string(gone.exit.Reason)
		x.Detail = fmt.Sprintf("the guest ended while starting (stage %q)", s.board.get().Stage)
		if gone.exit.Detail != "" {
			x.Detail += ": " + gone.exit.Detail
		}
	}
	return x
}

// finish publishes the end, waits until it was told, and removes the
// directory.
func (s *supervisor) finish(exit Exit, ready bool, in *inherited) error {
	s.d.Hook("ending")
	if !exit.Asked() {
		exit.Console = s.console.Tail()
	}
	s.board.update(func(st *State) {
		st.Phase, st.Stage, st.VMMPID, st.VMMStart, st.Exit = Ended, "ended", 0, 0, &exit
	})
	if n, err := s.console.Lost(); err != nil {
		s.log.Warn("part of the console is lost", "bytes", n, logx.Err, err)
	}
	s.log.Info("ended", "reason", exit.Reason, "detail", exit.Detail)
	s.console.Close()
	s.output.Close()
	in.launcher.ended(s.board.get())
	if ready && (!exit.Asked() || exit.Reason == string(machine.PowerOff)) {
		s.clients.linger()
	}
	s.clients.told(2 * time.Second)
	s.clients.stopListening()

	s.d.Hook("removing")
	keep := s.spec.Keep && (ready || !in.launcher.waiting())
	if err := s.clean(keep); err != nil {
		s.log.Warn("leaving files behind", logx.Path, s.dir, logx.Err, err)
	}
	if exit.Asked() {
		return nil
	}
	return fault.Newf(fault.System, "guest %s ended: %s: %s", s.spec.Name, exit.Reason, exit.Detail)
}

// clean removes the directory, or, to be kept, all of it but what people read.
func (s *supervisor) clean(keep bool) error {
	if !keep {
		s.keepEgress()
		return RemoveJobDir(s.dir)
	}
	for _, f := range []string{SocketFile, UpperFile, CheckoutFile, vmmDir} {
		if err := fsx.RemoveTree(filepath.Join(s.dir, f)); err != nil {
			return err
		}
	}
	s.board.saveAgain()
	return nil
}

// RemoveJobDir moves the directory out of the way first, so that its name is
// either whole or free, then removes it. Its lock must be held.
func RemoveJobDir(dir string) error {
	dead := filepath.Join(filepath.Dir(dir), DeadPrefix+filepath.Base(dir)+"-"+randomHex(4))
	if err := os.Rename(dir, dead); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("removing %s: %w", dir, err)
	}
	return fsx.RemoveTree(dead)
}

func (s *supervisor) watchSignals(ctx context.Context) func() {
	sig := make(chan os.Signal, 4)
	signal.Notify(sig, unix.SIGTERM, unix.SIGINT)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-ctx.Done():
				s.end(&ending{reason: ReasonStopped, detail: context.Cause(ctx).Error()})
				ctx = context.WithoutCancel(ctx)
			case got := <-sig:
				s.end(&ending{reason: ReasonStopped, detail: "signal: " + got.String()})
				select {
				case <-done:
					return
				case <-sig:
					s.killNow()
				}
			}
		}
	}()
	return func() { signal.Stop(sig); close(done) }
}

func (s *supervisor) watchOwner(ctx context.Context) {
	o := s.spec.Owner
	if o.PID == 0 {
		return
	}
	go func() {
		if o.Wait(ctx) == nil {
			s.orphaned()
			s.end(&ending{reason: ReasonOwnerGone, detail: fmt.Sprintf("process %d, which the guest was for, is gone", o.PID)})
		}
	}()
}

// watchUplink ends a service whose job's supervisor is gone.
func (s *supervisor) watchUplink(ctx context.Context) {
	if s.uplink == nil {
		return
	}
	go func() {
		select {
		case <-s.uplink.gone:
			s.orphaned()
			s.end(&ending{reason: ReasonOwnerGone, detail: errUplinkGone.Error()})
		case <-ctx.Done():
		}
	}()
}

// orphaned gives a service no grace: nobody is left who could use it.
func (s *supervisor) orphaned() {
	if s.spec.Kind == ServiceKind {
		s.killNow()
	}
}

func (s *supervisor) watchDeadline(ctx context.Context) {
	if s.spec.Deadline.IsZero() {
		return
	}
	t := time.AfterFunc(time.Until(s.spec.Deadline), func() {
		s.end(&ending{reason: ReasonDeadline, detail: "the deadline " + s.spec.Deadline.Format(time.RFC3339) + " passed"})
	})
	context.AfterFunc(ctx, func() { t.Stop() })
}

func (s *supervisor) killNow() { s.killOnce.Do(func() { close(s.kill) }) }

// current is the guest that runs, or nil.
func (s *supervisor) current() *guest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.guest
}

func (s *supervisor) setGuest(g *guest) {
	s.mu.Lock()
	s.guest = g
	s.mu.Unlock()
}

// listener is made by the step "socket".
func (s *supervisor) listen() (*net.UnixListener, error) {
	path := filepath.Join(s.dir, SocketFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := fsx.ListenUnix(path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

package nodehost

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/logx"
	"virtkit/core/supervise"
)

// Backoff of a runner that dies, reset by a run that lasted a minute.
const (
	minRestart = time.Second
	maxRestart = time.Minute
	goodRun    = time.Minute
)

// ManagedOptions are what a managed runner is made of.
type ManagedOptions struct {
	StateDir string
	// Gate begins the command line of this program's gate (see Gate); the
	// runner's follows.
	Gate []string
	// Program is gitlab-runner, by name or absolute path, Config its
	// config.toml.
	Program, Config string
	Env             []string
	Output          *os.File // of the runner; nil = this process's stderr
	Log             *slog.Logger
	Now             func() time.Time
	// Sleep waits between two starts; nil = a timer. It returns early when ctx
	// ends or wake is told.
	Sleep func(ctx context.Context, d time.Duration, wake <-chan struct{})
	// Changed is called after each change of Status, without a lock held.
	Changed func()
}

// ManagedStatus is what a managed runner is doing.
type ManagedStatus struct {
	PID      int  // 0 = none runs
	Adopted  bool // started by a node that was killed
	Quitting bool // told to end; its jobs are being waited for
	Wanted   bool // it is to take jobs
	Restarts int  // starts after the first, by this node
	Err      error
}

// Managed is a gitlab-runner that the node runs.
type Managed struct {
	o    ManagedOptions
	boot string
	wake chan struct{} // capacity 1: something is to be done

	mu       sync.Mutex
	st       ManagedStatus
	cur      runnerPID
	told     bool // Want was called: what was left running is let alone before
	looked   bool // Run knows whether a node before has left one running
	shutdown bool
}

// NewManaged makes one. Until Want is called no runner is started, and one that a
// node before has left is not told anything.
func NewManaged(o ManagedOptions) (*Managed, error) {
	boot, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("a managed runner: %w", err)
	}
	if o.Log == nil {
		o.Log = logx.Discard()
	}
	if o.Output == nil {
		o.Output = os.Stderr
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Sleep == nil {
		o.Sleep = sleep
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Managed{o: o, boot: boot, wake: make(chan struct{}, 1)}, nil
}

func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	case <-wake:
	}
}

// Status is what it is doing.
func (m *Managed) Status() ManagedStatus { m.mu.Lock(); defer m.mu.Unlock(); return m.st }

// Exited says whether no runner runs. Before Run has looked for one that a node
// before left, that is not known, and false.
func (m *Managed) Exited() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.looked && m.st.PID == 0
}

// Want says whether the runner is to take jobs. A runner that is not is told to
// quit, and none is started until it may again; gitlab-runner has no way back
// from that, so a runner that is wanted again meanwhile is followed by a new
// one.
func (m *Managed) Want(jobs bool) {
	m.change(func() { m.st.Wanted, m.told = jobs, true })
	m.poke()
}

// Shutdown tells the runner to quit and makes Run return once it has gone.
func (m *Managed) Shutdown() {
	m.mu.Lock()
	m.shutdown = true
	m.mu.Unlock()
	m.Want(false)
}

// Abandon sends the runner SIGTERM: it ends, and its jobs with it.
func (m *Managed) Abandon() error {
	m.mu.Lock()
	p := m.cur
	m.mu.Unlock()
	return m.signal(p, unix.SIGTERM)
}

func (m *Managed) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// change changes the status and tells of it when it is another.
func (m *Managed) change(f func()) {
	m.mu.Lock()
	before := m.st
	f()
	after := m.st
	m.mu.Unlock()
	if before != after {
		m.o.Changed()
	}
}

// Run runs the runner until ctx ends, which leaves it running for the next node
// to adopt, or Shutdown has made it quit. It adopts the one that a node before
// left.
func (m *Managed) Run(ctx context.Context) error {
	p, err := readPID(m.o.StateDir)
	if err != nil {
		return fault.New(fault.System, "looking for a runner that a node before has left").Because(err)
	}
	if p.alive(m.boot) {
		m.o.Log.Info("following the gitlab-runner that was left running", "pid", p.PID, "quitting", p.Quit)
		m.change(func() { m.looked, m.cur, m.st.PID, m.st.Adopted, m.st.Quitting = true, p, p.PID, true, p.Quit })
		if p.Quit {
			// The node before may have ended between saying so and doing it. A runner
			// that quits already minds another SIGQUIT not.
			if err := m.signal(p, unix.SIGQUIT); err != nil {
				m.o.Log.Warn("telling gitlab-runner to quit", logx.Err, err)
			}
		}
		_, err := m.follow(ctx, waitFor(ctx, p))
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		m.o.Log.Info("the gitlab-runner that was left running has ended", logx.Err, err)
	}
	if err := removePID(m.o.StateDir); err != nil {
		return err
	}
	m.mu.Lock()
	first := !m.looked
	m.looked = true
	m.mu.Unlock()
	if first {
		m.o.Changed() // a drain may wait for it
	}
	return m.loop(ctx)
}

// loop starts runners as they are wanted.
func (m *Managed) loop(ctx context.Context) error {
	var backoff time.Duration
	var due time.Time // of the next start
	for n := 0; ctx.Err() == nil; {
		m.mu.Lock()
		wanted, over := m.st.Wanted, m.shutdown
		m.mu.Unlock()
		if over {
			return nil
		}
		if !wanted {
			backoff, due = 0, time.Time{} // what died before was another time's
			select {
			case <-ctx.Done():
			case <-m.wake:
			}
			continue
		}
		if d := due.Sub(m.o.Now()); d > 0 {
			m.o.Sleep(ctx, d, m.wake)
			continue
		}
		if n++; n > 1 {
			m.change(func() { m.st.Restarts++ })
		}
		began := m.o.Now()
		quit, err := m.once(ctx)
		switch {
		case ctx.Err() != nil:
		case quit:
			backoff, due = 0, time.Time{}
			m.change(func() { m.st.Err = nil })
			m.o.Log.Info("gitlab-runner has quit", logx.Err, err)
		default:
			if err == nil {
				err = errors.New("gitlab-runner ended by itself with status 0")
			}
			backoff = nextRestart(backoff, m.o.Now().Sub(began))
			due = m.o.Now().Add(backoff)
			m.change(func() { m.st.Err = err })
			m.o.Log.Warn("gitlab-runner ended and is started again", logx.Err, err, "after", backoff)
		}
	}
	return context.Cause(ctx)
}

// nextRestart is how long to wait after a run, given the wait before it.
func nextRestart(before, ran time.Duration) time.Duration {
	if before == 0 || ran >= goodRun {
		return minRestart
	}
	return min(2*before, maxRestart)
}

// once starts a runner and follows it to its end. quit says that it was told to.
func (m *Managed) once(ctx context.Context) (quit bool, err error) {
	cmd, open, err := m.start()
	if err != nil {
		return false, err
	}
	ended := make(chan error, 1)
	owner, err := supervise.ProcessOwner(cmd.Process.Pid)
	if err == nil {
		p := runnerPID{PID: owner.PID, Start: owner.Start, BootID: m.boot, Since: m.o.Now().Unix()}
		if err = writePID(m.o.StateDir, p); err == nil {
			m.change(func() { m.cur, m.st.PID, m.st.Err = p, p.PID, nil })
			_, err = open.Write([]byte{1})
		}
	}
	open.Close() // without a word, the gate ends
	go func() { ended <- cmd.Wait() }()
	if err != nil {
		<-ended
		m.gone()
		return false, fmt.Errorf("keeping the runner's number: %w", err)
	}
	m.o.Log.Info("gitlab-runner is started", "pid", owner.PID, "config", m.o.Config)
	return m.follow(ctx, ended)
}

// gone forgets the runner.
func (m *Managed) gone() {
	m.change(func() { m.cur, m.st.PID, m.st.Adopted, m.st.Quitting = runnerPID{}, 0, false, false })
}

// start starts the gate of a runner, in a process group of its own: a signal
// that a terminal sends to the node's must not reach it. A word written to open
// lets it begin.
func (m *Managed) start() (cmd *exec.Cmd, open *os.File, err error) {
	program, err := exec.LookPath(m.o.Program)
	if err != nil {
		return nil, nil, fault.Newf(fault.System, "there is no program %s to run as gitlab-runner", m.o.Program).Because(err).
			Hint("install gitlab-runner, or name it as [node] gitlab_runner")
	}
	r, open, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	argv := append(append([]string{}, m.o.Gate...), program, "run", "--config", m.o.Config)
	cmd = exec.Command(argv[0], argv[1:]...)
	cmd.Env = m.o.Env
	cmd.Stdout, cmd.Stderr = m.o.Output, m.o.Output // a file: it outlives this process
	cmd.ExtraFiles = []*os.File{r}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		open.Close()
		return nil, nil, fmt.Errorf("starting gitlab-runner: %w", err)
	}
	return cmd, open, nil
}

// quitAgain is when a runner that could not be told to quit is told again.
const quitAgain = 5 * time.Second

// follow waits for the end of the runner, and tells it to quit once no jobs are
// wanted of it. ctx's end leaves it alone.
func (m *Managed) follow(ctx context.Context, ended <-chan error) (quit bool, err error) {
	for {
		var again <-chan time.Time
		m.mu.Lock()
		tell := m.told && !m.st.Wanted && !m.cur.Quit
		m.mu.Unlock()
		if tell {
			if err := m.quit(); err != nil {
				m.o.Log.Error("telling gitlab-runner to quit", logx.Err, err)
				m.change(func() { m.st.Err = err })
				again = time.After(quitAgain)
			}
		}
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case err := <-ended:
			if ctx.Err() != nil {
				return false, context.Cause(ctx)
			}
			m.mu.Lock()
			quit = m.cur.Quit
			m.mu.Unlock()
			// The record first: one that stays names a process that is gone.
			rerr := removePID(m.o.StateDir)
			m.gone()
			if err != nil {
				err = fmt.Errorf("gitlab-runner: %w", err)
			}
			return quit, errors.Join(err, rerr)
		case <-m.wake:
		case <-again:
		}
	}
}

// quit records that the runner is to quit, then tells it. A record that cannot be
// written does not keep it from being told.
func (m *Managed) quit() error {
	m.mu.Lock()
	p := m.cur
	m.mu.Unlock()
	p.Quit = true
	werr := writePID(m.o.StateDir, p)
	if err := m.signal(p, unix.SIGQUIT); err != nil {
		return errors.Join(werr, err)
	}
	m.change(func() { m.cur.Quit, m.st.Quitting = true, true })
	if werr != nil {
		m.o.Log.Error("keeping that gitlab-runner was told to quit", logx.Err, werr)
	}
	return nil
}

// signal sends a signal to the very process; none to one that is gone.
func (m *Managed) signal(p runnerPID, sig unix.Signal) error {
	if !p.alive(m.boot) {
		return nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err == unix.ESRCH {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	// Looked at after opening: the number cannot be reused while we hold it.
	if !p.alive(m.boot) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && err != unix.ESRCH {
		return fmt.Errorf("sending %v to process %d: %w", sig, p.PID, err)
	}
	return nil
}

// waitFor tells of the end of a process that is no child of this one.
func waitFor(ctx context.Context, p runnerPID) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- p.owner().Wait(ctx) }()
	return ended
}

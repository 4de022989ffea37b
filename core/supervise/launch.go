package supervise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/guestwire"
)

// LaunchOptions say how to start a supervisor.
type LaunchOptions struct {
	// Dir is the job's directory. It is made, unless Lock is given.
	Dir string
	// Lock is what Make (or ledger's Reserve) returned for Dir. Launch takes
	// it over and writes Spec anew.
	Lock *fsx.Lock
	Spec Spec
	// Argv re-executes this program as a supervisor; Dir is appended. Such as
	// {"/proc/self/exe", "supervise"}; Argv[0] must be a path.
	Argv []string
	// Env is added to the few variables that a supervisor inherits (see
	// InheritedEnv). It must hold no secret.
	Env []string
	// Hold are files that the supervisor keeps open for its life, and that the
	// VMMs of the job and its services keep open for theirs: locks that are to last
	// as long as what they stand for, the guests' memory above all. A supervisor
	// that is killed is gone before its VMM is. They stay the caller's to close.
	Hold []*os.File
	// Progress, when set, hears of each change of the state until the guest
	// runs.
	Progress func(State)
	// Hook, when set, is called before each step of the launch: "make",
	// "start", "wait", "adopt". For tests.
	Hook func(step string)

	uplink *os.File // of a service; the child gets a copy
}

// undoLimit bounds how long a supervisor may take to undo a launch before it
// is killed.
const undoLimit = 20 * time.Second

// Make makes a job's directory with its spec, all or nothing, and returns its
// lock, held. fs.ErrExist when dir exists; its parent must exist.
func Make(dir string, s Spec) (*fsx.Lock, error) {
	tmp := filepath.Join(filepath.Dir(dir), NewPrefix+randomHex(8))
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, fmt.Errorf("making %s: %w", dir, err)
	}
	lock, err := fsx.TryLock(filepath.Join(tmp, LockFile), false)
	if err == nil {
		err = writeJSON(filepath.Join(tmp, SpecFile), s, true)
	}
	if err == nil {
		// A directory in the way is replaced by rename only if it is empty,
		// and then belongs to nobody.
		err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
		if err == unix.EINVAL || err == unix.ENOSYS {
			if _, serr := os.Lstat(dir); serr == nil {
				err = fs.ErrExist
			} else {
				err = os.Rename(tmp, dir)
			}
		}
	}
	if err != nil {
		fsx.RemoveTree(tmp)
		lock.Close()
		return nil, fmt.Errorf("making %s: %w", dir, err)
	}
	return lock, nil
}

// Launch starts a supervisor in a session of its own and returns when its
// guest runs. When that fails, or ctx ends meanwhile, nothing is left and the
// error says what went wrong, at which step, with the console's last lines in
// its text and the next step as its hint.
func Launch(ctx context.Context, o LaunchOptions) (*Client, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		o.Lock.Close()
		return nil, err
	}
	if o.Hook == nil {
		o.Hook = func(string) {}
	}
	o.Hook("make")
	lock := o.Lock
	if lock == nil {
		if lock, err = Make(dir, o.Spec); err != nil {
			return nil, err
		}
	} else if err := writeJSON(filepath.Join(dir, SpecFile), o.Spec, true); err != nil {
		return nil, errors.Join(fmt.Errorf("writing the guest's spec: %w", err), discard(dir, lock))
	}
	o.Hook("start")
	l, err := start(dir, lock, o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting the guest's supervisor: %w", err), discard(dir, lock))
	}
	lock.Close() // the supervisor has it now
	defer l.pipe.Close()
	o.Hook("wait")
	if err := l.wait(ctx, o); err != nil {
		return nil, err
	}
	return &Client{dir: dir}, nil
}

// discard removes a directory whose lock is ours.
func discard(dir string, lock *fsx.Lock) error {
	defer lock.Close()
	return RemoveJobDir(dir)
}

// launched is a supervisor's process until it is adopted.
type launched struct {
	dir  string
	pid  int
	pipe *net.UnixConn
	done chan struct{} // closed when the process is gone
	err  error         // of its end
}

func start(dir string, lock *fsx.Lock, o LaunchOptions) (*launched, error) {
	if len(o.Argv) == 0 {
		return nil, errors.New("no program was named")
	}
	envs, err := environments(o.Spec)
	if err != nil {
		return nil, err
	}
	logf, err := os.OpenFile(filepath.Join(dir, LogFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer logf.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "supervisor"), os.NewFile(uintptr(fds[1]), "launcher")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(o.Argv[0], append(o.Argv[1:len(o.Argv):len(o.Argv)], dir)...)
	cmd.Dir = "/"
	cmd.Env = append(append(InheritedEnv(os.Environ()), o.Env...), launchedEnv+"=1")
	cmd.Stdout, cmd.Stderr = logf, logf
	cmd.ExtraFiles = []*os.File{lock.File(), theirs}
	if o.uplink != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, o.uplink)
		cmd.Env[len(cmd.Env)-1] = launchedEnv + "=" + withUplink
	}
	if len(o.Hold) > 0 {
		cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d-%d", holdEnv, 3+len(cmd.ExtraFiles), 2+len(cmd.ExtraFiles)+len(o.Hold)))
		cmd.ExtraFiles = append(cmd.ExtraFiles, o.Hold...)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, err
	}
	l := &launched{dir: dir, pid: cmd.Process.Pid, pipe: conn.(*net.UnixConn), done: make(chan struct{})}
	go func() {
		l.err = cmd.Wait()
		close(l.done)
	}()
	for _, e := range envs {
		// A supervisor that is gone already is told by wait.
		_ = guestwire.Send(l.pipe, e)
	}
	return l, nil
}

// environments are what the supervisor is told on its pipe before it is waited
// for: the environment of its command, and of its services'.
func environments(s Spec) ([]request, error) {
	var out []request
	add := func(service string, c *Command) error {
		if c == nil {
			return nil
		}
		n := 0
		for _, e := range c.Env {
			n += len(e) + 8
		}
		if n > guestwire.MaxFrame/2 {
			whose := "the command"
			if service != "" {
				whose = "service " + service
			}
			return fault.Newf(fault.Usage, "the environment of %s has %d bytes, at most %d can be given", whose, n, guestwire.MaxFrame/2)
		}
		out = append(out, request{Op: opEnv, Service: service, Env: c.Env})
		return nil
	}
	if err := add("", s.Command); err != nil {
		return nil, err
	}
	for _, v := range s.Services {
		if err := add(v.Spec.ID, v.Spec.Command); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// wait follows the start until the guest runs and adopts it; else it sees to
// it that nothing is left.
func (l *launched) wait(ctx context.Context, o LaunchOptions) error {
	stop := context.AfterFunc(ctx, func() { l.pipe.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var st State
	ran := false
	for {
		var a answer
		if err := guestwire.Recv(l.pipe, &a); err != nil {
			if ctx.Err() != nil {
				return errors.Join(context.Cause(ctx), l.undo())
			}
			log := lastLines(filepath.Join(l.dir, LogFile), 10)
			uerr := l.undo()
			return errors.Join(crashed(o.Spec, st, l.err, log), uerr)
		}
		if a.State != nil {
			st = *a.State
			if o.Progress != nil {
				o.Progress(st)
			}
		}
		switch {
		case a.Err != "":
			return errors.Join(a.fault(), l.undo())
		case st.Phase == Ended && ran && o.uplink != nil && st.Exit != nil && st.Exit.Reason == ReasonExited:
			return nil // a service that is over already: it was started, and its directory tells
		case st.Phase == Ended:
			return errors.Join(startError(o.Spec, st), l.undo())
		case a.Done:
			ran = true
			o.Hook("adopt")
			if ctx.Err() != nil {
				return errors.Join(context.Cause(ctx), l.undo())
			}
			if err := guestwire.Send(l.pipe, request{Op: opAdopt}); err != nil {
				continue // it ended just now: its last words come
			}
			return nil
		}
	}
}

// undo ends the supervisor and removes what it left.
func (l *launched) undo() error {
	l.pipe.Close() // an unadopted supervisor ends by that
	select {
	case <-l.done:
	case <-time.After(undoLimit):
		// Our own child, not waited for: the number is its.
		syscall.Kill(l.pid, syscall.SIGKILL)
		<-l.done
	}
	lock, err := TakeOver(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cleaning up %s: %w", l.dir, err)
	}
	ctx, cancel := contextFor(10 * time.Second)
	defer cancel()
	_, err = KillLeftover(ctx, l.dir)
	return errors.Join(err, discard(l.dir, lock))
}

// TakeOver takes the lock of a directory that its supervisor has left, waiting
// a moment for others who only look. fs.ErrNotExist when there is no such
// directory, fsx.ErrLocked when it is in use.
func TakeOver(dir string) (*fsx.Lock, error) {
	for wait := time.Millisecond; ; wait *= 2 {
		if _, err := os.Lstat(dir); err != nil {
			return nil, err
		}
		l, err := fsx.TryLock(filepath.Join(dir, LockFile), false)
		if !errors.Is(err, fsx.ErrLocked) || wait > 500*time.Millisecond {
			return l, err
		}
		time.Sleep(wait)
	}
}

// KillLeftover ends the processes that a directory's state names, and those of
// its services' states, told from later ones by their start times, and returns
// those it found. The directory's lock must be held, so that its supervisor is
// known to be gone; those of its services may be about to go.
func KillLeftover(ctx context.Context, dir string) ([]int, error) {
	found, err := eachLeftover(dir, func(o Owner) (bool, error) { return o.Kill(ctx) })
	for _, d := range serviceDirs(dir) {
		pids, kerr := killService(ctx, d)
		found, err = append(found, pids...), errors.Join(err, kerr)
	}
	return found, err
}

// Leftover returns those that KillLeftover would end.
func Leftover(_ context.Context, dir string) ([]int, error) {
	var found []int
	var errs []error
	for _, d := range append([]string{dir}, serviceDirs(dir)...) {
		pids, err := eachLeftover(d, func(o Owner) (bool, error) { return o.Alive(), nil })
		found, errs = append(found, pids...), append(errs, err)
	}
	return found, errors.Join(errs...)
}

func eachLeftover(dir string, f func(Owner) (bool, error)) ([]int, error) {
	st, err := ReadState(dir)
	if err != nil {
		return nil, nil // no state: no VMM was started
	}
	var found []int
	var errs []error
	for _, o := range []Owner{{PID: st.PID, Start: st.Start}, {PID: st.VMMPID, Start: st.VMMStart}} {
		if o.PID == os.Getpid() {
			continue
		}
		killed, err := f(o)
		if killed {
			found = append(found, o.PID)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return found, errors.Join(errs...)
}

func openExisting(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// startError words the end of a guest that never ran.
func startError(s Spec, st State) error {
	x := st.Exit
	if x == nil {
		x = &Exit{Reason: ReasonFailed, Detail: "no reason was given"}
	}
	kind := fault.Kind(x.Kind)
	if _, known := fault.Table[kind]; !known {
		kind = fault.System
	}
	hint := x.Hint
	var text string
	switch x.Reason {
	case ReasonBootTimeout:
		text = fmt.Sprintf("guest %s did not get ready in time: %s", s.Name, x.Detail)
		hint = or(hint, "`vk check` tests the kernel and the accelerator of this host; a slow host may need a longer [vmm] boot_timeout_secs")
	case ReasonStopped, ReasonOwnerGone, ReasonDeadline:
		kind = fault.Interrupted
		text = fmt.Sprintf("guest %s was ended while it started (%s)", s.Name, x.words())
	case ReasonFailed:
		// The step and the driver both say "boot"; this line has said it too.
		detail := strings.TrimPrefix(strings.TrimPrefix(x.Detail, "boot: "), "booting "+s.Hostname+": ")
		text = fmt.Sprintf("starting guest %s: %s", s.Name, detail)
	default:
		text = fmt.Sprintf("guest %s ended while it started: %s", s.Name, x.words())
		hint = or(hint, "`vk check` tests the kernel and the accelerator of this host")
	}
	e := fault.New(kind, text+consoleText(x.Console))
	if hint != "" {
		e = e.Hint("%s", hint)
	}
	return e
}

// consoleText is what a guest's console said last, to follow an error's text.
func consoleText(console []string) string {
	if len(console) == 0 {
		return ""
	}
	return "\nlast lines of its console:\n  | " + strings.Join(console, "\n  | ")
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// crashed words the end of a supervisor that said nothing.
func crashed(s Spec, st State, end error, log []string) error {
	at := "before its first step"
	if st.Stage != "" {
		at = "at " + st.Stage
	}
	text := fmt.Sprintf("the supervisor of guest %s ended %s", s.Name, at)
	if end != nil {
		text += ": " + end.Error()
	}
	if len(log) > 0 {
		text += "\nend of its log:\n  | " + strings.Join(log, "\n  | ")
	}
	return fault.New(fault.System, text)
}

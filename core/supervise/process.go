package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/core/fault"
	"virtkit/core/fsx"
	"virtkit/core/guestwire"
)

// launchedEnv tells a supervisor that descriptor 3 is its directory's lock,
// held, and 4 its launcher; with withUplink, 5 is its uplink.
const (
	launchedEnv = "VIRTKIT_SUPERVISE_FDS"
	withUplink  = "uplink"
)

// holdEnv tells it the first and the last of descriptors that it only keeps.
const holdEnv = "VIRTKIT_SUPERVISE_HOLD"

// Prefixes of names beside job directories.
const (
	NewPrefix  = ".new-"  // being made; its lock is held meanwhile
	DeadPrefix = ".dead-" // being removed
)

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// inherited is what the launcher left open for the supervisor.
type inherited struct {
	lock     *fsx.Lock
	launcher *launcherPipe
	uplink   *uplink // nil but for a service
	hold     []*os.File
}

// inherit takes over what Launch passed on, or takes the lock itself.
func inherit(dir string) (*inherited, error) {
	lockPath := dir + "/" + LockFile
	how := os.Getenv(launchedEnv)
	if how == "" {
		ctx, cancel := contextFor(2 * time.Second) // a sweep or list may hold it for a moment
		defer cancel()
		if _, err := os.Stat(dir); err != nil {
			return nil, err
		}
		l, err := fsx.AcquireLock(ctx, lockPath, false)
		if err != nil {
			return nil, fault.Newf(fault.Conflict, "%s has a supervisor already", dir).Because(err)
		}
		return &inherited{lock: l, launcher: &launcherPipe{}}, nil
	}
	os.Unsetenv(launchedEnv)
	unix.CloseOnExec(3)
	unix.CloseOnExec(4)
	hold, err := holdFiles(os.Getenv(holdEnv))
	if err != nil {
		return nil, err
	}
	os.Unsetenv(holdEnv)
	unix.Umask(0o077)
	var a, b unix.Stat_t
	if err := unix.Fstat(3, &a); err != nil {
		return nil, fmt.Errorf("looking at the inherited lock: %w", err)
	}
	if err := unix.Stat(lockPath, &b); err != nil || a.Ino != b.Ino || a.Dev != b.Dev {
		return nil, fmt.Errorf("the inherited lock is not %s", lockPath)
	}
	f := os.NewFile(4, "launcher")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("looking at the launcher's pipe: %w", err)
	}
	in := &inherited{lock: fsx.HeldLock(os.NewFile(3, lockPath)), launcher: &launcherPipe{conn: conn.(*net.UnixConn), env: make(chan []string, 1)}, hold: hold}
	if how == withUplink {
		unix.CloseOnExec(5)
		c, err := uplinkConn(os.NewFile(5, "uplink"))
		if err != nil {
			return nil, err
		}
		in.uplink = newUplink(c)
	}
	return in, nil
}

// holdFiles are the descriptors of holdEnv, which stay open until this process
// ends. Of its children only those have them that are given them.
func holdFiles(fds string) (hold []*os.File, err error) {
	if fds == "" {
		return nil, nil
	}
	var first, last int
	if n, err := fmt.Sscanf(fds, "%d-%d", &first, &last); n != 2 || err != nil || first < 5 || last < first {
		return nil, fmt.Errorf("%s is %q, expected the first and the last descriptor", holdEnv, fds)
	}
	for fd := first; fd <= last; fd++ {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, fmt.Errorf("keeping descriptor %d open: %w", fd, err)
		}
		hold = append(hold, os.NewFile(uintptr(fd), "held"))
	}
	return hold, nil
}

// launcherPipe is the supervisor's end of the connection to the process that
// started it. Until the guest is ready and the launcher has adopted it, the
// launcher's end ends the guest. A nil conn is a supervisor started by hand.
type launcherPipe struct {
	conn *net.UnixConn
	env  chan []string // of the guest's command, once; holds one

	mu      sync.Mutex
	adopted bool
	stopped chan struct{} // ends the sender; closed once
	sender  chan struct{} // closed when it ended
}

// attach begins to tell the launcher of the state and to watch for its end.
func (p *launcherPipe) attach(ctx context.Context, s *supervisor) {
	if p.conn == nil {
		return
	}
	p.stopped, p.sender = make(chan struct{}), make(chan struct{})
	go func() {
		var r request
		err := guestwire.Recv(p.conn, &r)
		for err == nil && r.Op == opEnv {
			s.takeEnv(r)
			r = request{}
			err = guestwire.Recv(p.conn, &r)
		}
		if err == nil && r.Op == opAdopt {
			p.mu.Lock()
			p.adopted = true
			p.mu.Unlock()
			return
		}
		s.end(&ending{reason: ReasonOwnerGone, detail: "the process that was starting the guest is gone"})
	}()
	go func() {
		defer close(p.sender)
		for {
			st, changed := s.board.snapshot()
			if st.Phase == Running || st.Phase == Ended {
				return // told by ready and ended, with Done
			}
			if tell(p.conn, answer{State: &st}, nil) != nil {
				return
			}
			select {
			case <-changed:
			case <-p.stopped:
				return
			}
		}
	}()
}

// takeEnv keeps the environment of the guest's command, or of a service's, until
// that is started; each comes once.
func (s *supervisor) takeEnv(r request) {
	ch := s.launcher.env
	if r.Service != "" {
		ch = nil
		for _, v := range s.services {
			if v.spec.Spec.ID == r.Service {
				ch = v.env
			}
		}
	}
	select {
	case ch <- r.Env:
	default:
	}
}

// waiting reports whether a launcher has not adopted the guest.
func (p *launcherPipe) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn != nil && !p.adopted
}

func (p *launcherPipe) last(st State) {
	if p.conn == nil {
		return
	}
	<-p.sender
	tell(p.conn, answer{State: &st, Done: true}, nil)
}

// ready tells that the guest runs.
func (p *launcherPipe) ready(st State) { p.last(st) }

// ended tells of the end, if the launcher still waits.
func (p *launcherPipe) ended(st State) {
	if p.waiting() {
		p.last(st)
	}
}

// fail tells of an end before there was a state.
func (p *launcherPipe) fail(err error) {
	if p.conn != nil {
		tell(p.conn, answer{}, err)
	}
}

// inheritedNames are the variables that a supervisor gets of its launcher's.
var inheritedNames = []string{
	"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR",
	"XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR",
	"VIRTKIT_CONFIG", "VIRTKIT_STATE_DIR", "VIRTKIT_ACCEL", "GOCOVERDIR",
}

// InheritedEnv picks from env what a supervisor needs: paths, language, and
// virtkit's own settings. A job's variables, which may be secret, stay out.
func InheritedEnv(env []string) []string {
	var out []string
	for _, n := range inheritedNames {
		for _, e := range env {
			if strings.HasPrefix(e, n+"=") {
				out = append(out, e)
			}
		}
	}
	return out
}

// lastLines is the end of a log, for an error: of a crash of this program its
// beginning, because the rest is addresses.
func lastLines(path string, n int) []string {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	buf := make([]byte, 64<<10)
	if st, err := f.Stat(); err == nil {
		m, _ := f.ReadAt(buf, max(0, st.Size()-int64(len(buf))))
		buf = buf[:m]
	}
	var lines []string
	for ln := range strings.SplitSeq(string(buf), "\n") {
		crash := strings.HasPrefix(ln, "panic: ") || strings.HasPrefix(ln, "fatal error: ")
		if ln = printable(ln); ln != "" {
			lines = append(lines, ln)
		}
		if crash {
			return lines[max(0, len(lines)-n):]
		}
	}
	return lines[max(0, len(lines)-n):]
}

// goneError says that a directory's supervisor has ended, with what the
// directory tells about why.
func goneError(dir string, cause error) error {
	err := fmt.Errorf("%w (%s)", ErrSupervisorGone, dir)
	st, rerr := ReadState(dir)
	switch {
	case errors.Is(rerr, os.ErrNotExist):
	case rerr != nil:
		err = fmt.Errorf("%w: %w", err, rerr)
	case st.Exit != nil:
		err = fmt.Errorf("%w: %s", err, st.Exit.words())
	default:
		why := "it was killed while the guest was " + string(st.Phase)
		if l := lastLines(dir+"/"+LogFile, 3); len(l) > 0 {
			why += "; its log ends with: " + strings.Join(l, " | ")
		}
		err = fmt.Errorf("%w: %s", err, why)
	}
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

func (e *Exit) words() string {
	if e.Detail == "" {
		return e.Reason
	}
	return e.Reason + ": " + e.Detail
}

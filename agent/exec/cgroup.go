package exec

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// group is a control group in which no program has started yet.
type group struct {
	dir string
	fd  int // of dir
}

// tidyAfter is how long after an exec's end its server tidies up, unless another
// begins before: then it does while that program runs, and neither host waits.
const tidyAfter = 20 * time.Millisecond

// SetCgroup changes Options.Cgroup for programs started from now on.
func (s *Server) SetCgroup(dir string) {
	s.mu.Lock()
	spare := s.spare
	s.opt.Cgroup, s.spare = dir, nil
	s.mu.Unlock()
	spare.remove()
}

// Cgroup is Options.Cgroup as it is now.
func (s *Server) Cgroup() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opt.Cgroup
}

// enterCgroup lets the program start in a control group of its own. Without
// one, kill goes by the session.
func (p *process) enterCgroup(sys *syscall.SysProcAttr) {
	s := p.srv
	s.mu.Lock()
	g, base := s.spare, s.opt.Cgroup
	s.spare = nil
	s.mu.Unlock()
	if base == "" {
		return
	}
	if g == nil {
		var err error
		if g, err = s.makeGroup(base); err != nil {
			s.opt.Logf("exec: control group: %v", err)
			return
		}
	}
	p.cgroup = g.dir
	p.child = append(p.child, g.fd)
	sys.UseCgroupFD, sys.CgroupFD = true, g.fd
}

// makeGroup makes a control group of a name that none had before.
func (s *Server) makeGroup(base string) (*group, error) {
	dir := filepath.Join(base, "exec-"+strconv.FormatUint(s.groups.Add(1), 10))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		os.Remove(dir)
		return nil, fmt.Errorf("opening %s: %w", dir, err)
	}
	return &group{dir, fd}, nil
}

func (g *group) remove() {
	if g != nil {
		unix.Close(g.fd)
		os.Remove(g.dir)
	}
}

// leaveCgroup lets the group be removed, soon or, when children live on in it,
// after a later exec.
func (p *process) leaveCgroup() {
	if p.cgroup == "" {
		return
	}
	s := p.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	s.linger = append(s.linger, p.cgroup)
	if s.later == nil {
		s.later = time.AfterFunc(tidyAfter, func() { s.opt.Guard("exec tidy", s.tidy) })
		return
	}
	s.later.Reset(tidyAfter)
}

// tidy removes what ended execs have left, and makes what the next one needs.
// The kernel's work is not done with mu held, for the pulse needs that.
func (s *Server) tidy() {
	s.tidying.Lock()
	defer s.tidying.Unlock()
	s.mu.Lock()
	if s.later != nil {
		s.later.Stop()
	}
	dirs := s.linger
	s.linger = nil
	s.mu.Unlock()
	var left []string
	for _, d := range dirs {
		if err := os.Remove(d); err != nil && !os.IsNotExist(err) {
			left = append(left, d)
		}
	}
	s.mu.Lock()
	s.linger = append(s.linger, left...)
	s.mu.Unlock()
	s.spareCgroup()
}

// spareCgroup makes the next program's group, and the pipe of its output.
func (s *Server) spareCgroup() {
	s.mu.Lock()
	base, there := s.opt.Cgroup, s.spare != nil
	s.mu.Unlock()
	if base == "" || there {
		return
	}
	g, err := s.makeGroup(base)
	if err != nil {
		return // the next exec meets it again, and tells
	}
	s.mu.Lock()
	if s.spare == nil && s.opt.Cgroup == base {
		s.spare, g = g, nil
	}
	wet := s.pipe == nil
	s.mu.Unlock()
	g.remove()
	if !wet {
		return
	}
	if ends, err := newPipe(false); err == nil {
		s.mu.Lock()
		s.pipe = ends // only tidy, of which there is one at a time, sets it
		s.mu.Unlock()
	}
}

// oomKills is how many processes of the group the kernel killed for memory.
func (p *process) oomKills() int64 {
	if p.cgroup == "" {
		return 0
	}
	b, err := os.ReadFile(p.cgroup + "/memory.events")
	if err != nil {
		return 0
	}
	return Field(b, "oom_kill")
}

// Field is the number after key in a "key value" list, or 0.
func Field(b []byte, key string) int64 {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if f := strings.Fields(sc.Text()); len(f) >= 2 && strings.TrimSuffix(f[0], ":") == key {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n
		}
	}
	return 0
}

// killSession sends SIGKILL to every process of a session, until none is
// found or new ones keep appearing.
func killSession(sid int) {
	for range 8 {
		found := false
		names, err := readDirNames("/proc")
		if err != nil {
			return
		}
		for _, name := range names {
			pid, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			if state, s := sessionOf(pid); s == sid && state != 'Z' && state != 'X' {
				found = true
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		if !found {
			return
		}
	}
}

// sessionOf reads fields 3 and 6 of /proc/PID/stat.
func sessionOf(pid int) (state byte, sid int) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 4 {
		return 0, 0
	}
	sid, _ = strconv.Atoi(f[3])
	return f[0][0], sid
}

func readDirNames(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// inRoot is path as seen from outside the root.
func inRoot(root, path string) string { return filepath.Join(root, path) }

package exec

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// SetCgroup changes Options.Cgroup for programs started from now on.
func (s *Server) SetCgroup(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opt.Cgroup = dir
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
	base := p.srv.Cgroup()
	if base == "" {
		return
	}
	dir := filepath.Join(base, p.req.ID)
	if err := os.Mkdir(dir, 0o755); err != nil {
		p.srv.opt.Logf("exec: control group: %v", err)
		return
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		p.srv.opt.Logf("exec: opening %s: %v", dir, err)
		os.Remove(dir)
		return
	}
	p.cgroup, p.cgroupFD = dir, fd
	sys.UseCgroupFD, sys.CgroupFD = true, fd
}

// leaveCgroup removes the group, now or, when children live on in it, at a
// later exec's end.
func (p *process) leaveCgroup() {
	s := p.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	dirs := s.linger
	if p.cgroup != "" {
		dirs = append(dirs, p.cgroup)
	}
	s.linger = nil
	for _, d := range dirs {
		if err := os.Remove(d); err != nil && !os.IsNotExist(err) {
			s.linger = append(s.linger, d)
		}
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

package agent

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"virtkit/agent/exec"
	"virtkit/core/guestwire"
)

// pulse reads the guest's state of this moment.
func (s *server) pulse() guestwire.Pong {
	p := guestwire.Pong{UptimeMS: uptimeMS(), UnixNano: time.Now().UnixNano(), Execs: s.execs.Running()}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		p.MemTotal = exec.Field(b, "MemTotal") << 10
		p.MemAvail = exec.Field(b, "MemAvailable") << 10
	}
	p.OOMKills = s.oomKills()
	if l := s.layer.Load(); l != nil {
		p.UpperUsed, p.UpperSize = l.see()
		return p
	}
	// statfs of an overlay is its writable layer's.
	var st unix.Statfs_t
	if unix.Statfs(s.opt.Root, &st) == nil {
		p.UpperSize = int64(st.Blocks) * st.Bsize
		p.UpperUsed = int64(st.Blocks-st.Bfree) * st.Bsize
	}
	return p
}

// setLayer makes the pulse tell of the work tree's layer instead of the root's:
// it is what a job fills first.
func (s *server) setLayer(l *layer) { s.layer.Store(l) }

// oomKills is since boot where the kernel counts that, else of execs.
func (s *server) oomKills() int64 {
	n := int64(0)
	if b, err := os.ReadFile("/proc/vmstat"); err == nil {
		n = exec.Field(b, "oom_kill")
	}
	if dir := s.execs.Cgroup(); dir != "" {
		if b, err := os.ReadFile(dir + "/memory.events"); err == nil {
			n = max(n, exec.Field(b, "oom_kill"))
		}
	}
	return n
}

func uptimeMS() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return ts.Nano() / 1e6
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Package atop is the recorder that runs in a guest: it reads /proc, hears of
// every task that ends (taskstats) and makes samples of core/atop of both. It
// keeps nothing but what the next sample is compared with; when one is taken
// is the host's to say.
//
// A recorder costs what it reads. A kernel thread is one file a sample; a
// process that has not run since the sample before is two; a thread of several
// that has not run is one.
//
// A process that ends is in the sample of its end with state E, with all of its
// life, or with what came after the sample that it was last seen in. A thread
// that ends is part of its process.
package atop

import (
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	format "virtkit/core/atop"
)

// hertz is USER_HZ, the unit of ticks in /proc: 100 on every architecture that
// guests have (sysconf(3), _SC_CLK_TCK).
const hertz = 100

// maxSeen bounds the living processes of one sample.
const maxSeen = 1 << 16

// Recorder takes samples. It is not safe for concurrent use.
type Recorder struct {
	root string // "/proc/"
	log  func(format string, a ...any)
	page int64

	exits  *exits
	stalls *format.Stalls

	last   time.Time // of the sample before; zero: the next one covers the boot
	bootAt int64     // epoch of the guest's start
	round  int
	sys    system
	procs  map[int]*process
	ended  map[int]bool // dead ones that may still be seen as zombies
	over   int64        // microseconds of ended processes that made no tick yet
	told   bool         // that some ends were lost
	buf    []byte
	out    format.Sample
}

// New returns a recorder of this machine. It begins to listen for ends at once;
// the first sample covers all since the boot. log hears of what is missing.
func New(log func(format string, a ...any)) *Recorder {
	r := &Recorder{
		root: "/proc/", log: log, page: int64(os.Getpagesize()), buf: make([]byte, 16<<10),
		stalls: format.NewStalls(), procs: map[int]*process{}, ended: map[int]bool{},
	}
	x, err := listen()
	if err != nil {
		log("atop: processes that end between two samples are not recorded: %v", err)
		return r
	}
	r.exits = x
	go x.run()
	return r
}

// Close ends the listening.
func (r *Recorder) Close() {
	if r.exits != nil {
		r.exits.close()
	}
}

// Sample takes a sample and appends its lines to dst.
func (r *Recorder) Sample(dst []byte) []byte {
	s := &r.out
	*s = format.Sample{CPUs: s.CPUs[:0], DSK: s.DSK[:0], NET: s.NET[:0], Procs: s.Procs[:0], Waits: s.Waits[:0], Stacks: s.Stacks[:0]}
	now := time.Now()
	s.Host, _ = os.Hostname()
	s.Epoch = now.Unix()
	if r.last.IsZero() {
		s.Reset = true
		up := uptime()
		s.Interval = int64(up.Seconds())
		r.bootAt = now.Add(-up).Unix()
	} else {
		s.Interval = max(1, int64(now.Sub(r.last).Round(time.Second).Seconds()))
	}
	r.last = now
	r.round++
	r.system(s)
	r.processes(s)
	r.stalls.Add(s, func(x format.Stalled) {
		if x.New {
			r.stacks(s, x.Key.PID)
		}
	})
	dst = format.AppendSample(dst, s)
	if cap(s.Procs) > 4096 && len(s.Procs) < 1024 { // a crowd has gone
		r.out, r.buf = format.Sample{}, make([]byte, 16<<10)
		debug.FreeOSMemory()
	}
	return dst
}

func uptime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// read returns a file of /proc, or nil. It is good until the next read.
func (r *Recorder) read(path string) []byte {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	n := 0
	for {
		if n == len(r.buf) {
			if n >= 4<<20 {
				return r.buf[:n]
			}
			r.buf = append(r.buf, make([]byte, n)...)
		}
		m, err := unix.Read(fd, r.buf[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil && n == 0 {
			return nil
		}
		if m <= 0 {
			return r.buf[:n]
		}
		n += m
	}
}

func (r *Recorder) file(name string) []byte { return r.read(r.root + name) }

func pidPath(root string, pid int, name string) string {
	return root + strconv.Itoa(pid) + "/" + name
}

// stacks records the kernel stacks of a process that stands still.
func (r *Recorder) stacks(s *format.Sample, pid int) {
	p := r.procs[pid]
	if p == nil {
		return
	}
	tids := r.tasks(pid)
	slices.Sort(tids)
	for _, tid := range tids[:min(len(tids), format.StackThreads)] {
		dir := pidPath(r.root, pid, "task/") + strconv.Itoa(tid)
		k := format.Stack{PID: pid, Name: p.name, TID: tid, WChan: channel(r.read(dir + "/wchan"))}
		k.Frames = frames(r.read(dir + "/stack"))
		s.Stacks = append(s.Stacks, k)
	}
}

// Package atop is the recorder that runs in a guest: it reads /proc, hears of
// every task that ends (taskstats) and makes samples of core/atop of both. It
// keeps nothing but what the next sample is compared with; when one is taken
// is the host's to say.
//
// A recorder costs what it reads. Files that every sample reads stay open, up to
// maxKept, so that a look at one is one system call. A process or thread that
// has not run since the sample before is one file; what may change all the same,
// the memory that the kernel took from an idle process, is looked at in every
// sixth sample. /proc is listed when something was forked.
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

// maxKept bounds the files that stay open: each costs the guest some KiB.
const maxKept = 512

// refresh is how many samples an idle process's memory is believed for.
const refresh = 6

// kept is a file that stays open between samples: its descriptor and one, 0
// when there is none. One of a process that has ended fails to be read, also
// when another has its number.
type kept int

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
	files  map[string]*kept // of the machine
	open   int              // files that are kept
	blind  bool             // the kernel does not tell who has run
	pids   []int            // of all processes
	forked bool             // something was, since they were listed
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
		stalls: format.NewStalls(), files: map[string]*kept{}, procs: map[int]*process{}, ended: map[int]bool{},
	}
	r.blind = r.read("/proc/self/", "schedstat") == nil
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
	for _, k := range r.files {
		r.drop(k)
	}
	for pid, p := range r.procs {
		r.forget(pid, p)
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

// read returns a file of /proc that is one record, or nil. It is good until the
// next read.
func (r *Recorder) read(dir, name string) []byte {
	var k kept
	return r.again(&k, false, dir, name)
}

// again is read of a file that k keeps open, if keep says so and few enough are.
func (r *Recorder) again(k *kept, keep bool, dir, name string) []byte {
	if *k > 0 {
		return r.whole(int(*k)-1, true)
	}
	fd, err := unix.Open(dir+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	b := r.whole(fd, true)
	if keep && b != nil && r.open < maxKept {
		r.open++
		*k = kept(fd + 1)
	} else {
		unix.Close(fd)
	}
	return b
}

// drop closes what is kept.
func (r *Recorder) drop(files ...*kept) {
	for _, k := range files {
		if *k > 0 {
			unix.Close(int(*k) - 1)
			r.open--
			*k = 0
		}
	}
}

// whole reads a file from its beginning. What is one record to the kernel comes
// in one piece: less than there is room for is the end.
func (r *Recorder) whole(fd int, one bool) []byte {
	n := 0
	for {
		if n == len(r.buf) {
			if n >= 4<<20 {
				return r.buf[:n]
			}
			r.buf = append(r.buf, make([]byte, n)...)
		}
		m, err := unix.Pread(fd, r.buf[n:], int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil && n == 0 {
			return nil
		}
		n += max(m, 0)
		if m <= 0 || one && n < len(r.buf) {
			return r.buf[:n]
		}
	}
}

// file reads one of the machine's.
func (r *Recorder) file(name string) []byte {
	k := r.files[name]
	if k == nil {
		fd, err := unix.Open(r.root+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil
		}
		r.open++
		k = new(kept(fd + 1))
		r.files[name] = k
	}
	one := name != "vmstat" && name != "diskstats" && name != "net/dev"
	return r.whole(int(*k)-1, one)
}

// stacks records the kernel stacks of a process that stands still.
func (r *Recorder) stacks(s *format.Sample, pid int) {
	p := r.procs[pid]
	if p == nil {
		return
	}
	tids := r.tasks(p.dir)
	slices.Sort(tids)
	for _, tid := range tids[:min(len(tids), format.StackThreads)] {
		dir := p.dir + "task/" + strconv.Itoa(tid) + "/"
		k := format.Stack{PID: pid, Name: p.name, TID: tid, WChan: channel(r.read(dir, "wchan"))}
		k.Frames = frames(r.read(dir, "stack"))
		s.Stacks = append(s.Stacks, k)
	}
}

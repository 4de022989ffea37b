package atop

import (
	"bytes"
	"os"
	"strconv"

	format "virtkit/core/atop"
)

// process is what is known of a living process: its counters at the sample
// before and what does not change while it does not run.
type process struct {
	dir     string // "/proc/PID/"
	round   int
	looked  int   // round in which more than its schedstat was read
	busy    bool  // it ran before that too
	settled bool  // where it waits was read once it had left its processor
	start   int64 // ticks since the boot
	kernel  bool
	name    string
	cmdline string
	cgroup  string
	ran     [3]int64 // schedstat: time, delay, turns
	last    format.Proc
	// Counters of format.Proc as they stood.
	user, sys, delay, blk int64
	minflt, majflt        int64
	rsect, wsect, csect   int64
	threads               map[int]*thread // nil of a process of one
	channels              []format.Channel
	written               bool // channels was recorded
	// Files.
	sched, stat, status, io, wchan kept
}

// thread is one of several of a process.
type thread struct {
	dir     string
	round   int
	busy    bool
	settled bool // as process's
	ran     [3]int64
	state   byte
	wchan   string
	delay   int64
	io      io
	counted bool // the kernel counts io

	schedF, statF, wchanF, ioF kept
}

// Flags in /proc/PID/stat: PF_KTHREAD, PF_EXITING.
const (
	kthread = 0x00200000
	exiting = 0x00000004
)

func (r *Recorder) processes(s *format.Sample) {
	var dead []*ended
	if r.exits != nil {
		var lost int64
		dead, lost = r.exits.take()
		if lost > 0 && !r.told {
			r.told = true
			r.log("atop: tasks end faster than they can be recorded: some are missing in the recording")
		}
	}
	for _, e := range dead {
		r.ending(s, e)
	}
	if r.forked {
		r.list()
	}
	alive := r.pids[:0]
	for _, pid := range r.pids {
		if r.process(s, pid) {
			alive = append(alive, pid)
		}
	}
	r.pids = alive
	for pid, p := range r.procs {
		if p.round != r.round {
			r.forget(pid, p)
		}
	}
	for pid := range r.ended {
		if _, err := os.Stat(r.root + strconv.Itoa(pid)); err != nil {
			delete(r.ended, pid)
		}
	}
	if r.exits != nil {
		r.exits.forget(func(pid int) bool { _, err := os.Stat(r.root + strconv.Itoa(pid)); return err == nil })
	}
}

// list takes down the processes that there are.
func (r *Recorder) list() {
	dir, err := os.Open(r.root)
	if err != nil {
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	r.pids = r.pids[:0]
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil && len(r.pids) < maxSeen {
			r.pids = append(r.pids, pid)
		}
	}
}

// forget lets go of a process.
func (r *Recorder) forget(pid int, p *process) {
	r.close(p)
	delete(r.procs, pid)
}

func (r *Recorder) close(p *process) {
	r.drop(&p.sched, &p.stat, &p.status, &p.io, &p.wchan)
	for _, t := range p.threads {
		r.closeThread(t)
	}
	p.threads = nil
}

func (r *Recorder) closeThread(t *thread) { r.drop(&t.schedF, &t.statF, &t.wchanF, &t.ioF) }

// ending records a process that has ended.
func (r *Recorder) ending(s *format.Sample, e *ended) {
	const us = 1e6 / hertz
	p := format.Proc{
		PID: e.pid, Name: e.name, State: 'E', UID: e.uid, GID: e.gid, EUID: e.uid, EGID: e.gid, SUID: e.uid, SGID: e.gid, FUID: e.uid, FGID: e.gid,
		Threads: e.threads, Start: e.start, PPID: e.ppid, Elapsed: e.elapsed / us, New: true,
		Hertz: hertz, Nice: e.nice, Policy: e.policy, Prio: 120 + e.nice, CPU: -1, PageSize: r.page,
		VSize: e.vsize, RSize: e.rss, IO: true,
	}
	if sig := e.status & 0x7f; e.status&0xff != 0 {
		p.Exit = int(sig) + 256
	} else {
		p.Exit = int(e.status >> 8 & 0xff)
	}
	user, sys := e.user, e.sys
	p.MinFlt, p.MajFlt, p.RunDelay = e.minflt, e.majflt, e.delay
	p.BlkDelay = e.blkDelay / (1e9 / hertz)
	p.RSect, p.WSect, p.CancelWSect = e.read/512, e.write/512, e.undid/512
	p.VGrow, p.RGrow = p.VSize, p.RSize
	if o := r.procs[e.pid]; o != nil {
		p.New = false
		p.Start = o.last.Start
		user, sys = user-o.user*us, sys-o.sys*us
		p.MinFlt, p.MajFlt, p.RunDelay = p.MinFlt-o.minflt, p.MajFlt-o.majflt, p.RunDelay-o.delay
		p.BlkDelay -= o.blk
		p.RSect, p.WSect, p.CancelWSect = p.RSect-o.rsect, p.WSect-o.wsect, p.CancelWSect-o.csect
		p.VGrow, p.RGrow = p.VSize-o.last.VSize, p.RSize-o.last.RSize
		r.forget(e.pid, o)
	}
	for _, v := range []*int64{&user, &sys, &p.MinFlt, &p.MajFlt, &p.RunDelay, &p.BlkDelay, &p.RSect, &p.WSect, &p.CancelWSect} {
		*v = max(0, *v)
	}
	p.User, p.Sys = r.ticks(user+sys, user)
	p.Reads, p.Writes = p.RSect, p.WSect
	r.ended[e.pid] = true
	s.Procs = append(s.Procs, p)
}

// ticks are microseconds in ticks, of which a part is user's. What is left over
// goes to the next process, so that a thousand short ones do not cost nothing.
func (r *Recorder) ticks(total, user int64) (u, s int64) {
	const us = 1e6 / hertz
	if total == 0 {
		return 0, 0
	}
	r.over += total
	t := r.over / us
	r.over %= us
	u = (user*t + total/2) / total
	return u, t - u
}

// process records a living one, and reports whether it is there.
func (r *Recorder) process(s *format.Sample, pid int) bool {
	o := r.procs[pid]
	var ran [3]int64
	if o != nil {
		b := r.ran(o)
		if ran = schedstat(b); b == nil && !r.blind { // gone; another may have its number
			r.forget(pid, o)
			o = nil
		} else if o.still(ran, r.round) {
			o.round = r.round
			o.last = unchanged(&o.last)
			s.Procs = append(s.Procs, o.last)
			return true
		}
	}
	if o == nil {
		o = &process{dir: r.root + strconv.Itoa(pid) + "/"}
		ran = schedstat(r.ran(o))
	}
	ok := r.look(s, pid, o, ran)
	if r.procs[pid] != o {
		r.close(o)
	}
	return ok
}

// ran is what the kernel tells of a process's turns, nil when it is gone.
func (r *Recorder) ran(o *process) []byte { return r.again(&o.sched, true, o.dir, "schedstat") }

// still reports whether all that is known of a process of one thread holds
// when it has had no turn since.
func (o *process) still(ran [3]int64, round int) bool {
	return o.threads == nil && o.last.Threads == 1 && ran[2] > 0 && ran == o.ran && o.last.State != 'R' && o.settled && (o.kernel || round-o.looked < refresh)
}

// unchanged is a process that has done nothing since p.
func unchanged(p *format.Proc) format.Proc {
	q := *p
	q.New = false
	q.User, q.Sys, q.RunDelay, q.BlkDelay = 0, 0, 0, 0
	q.MinFlt, q.MajFlt, q.VGrow, q.RGrow = 0, 0, 0, 0
	q.Reads, q.RSect, q.Writes, q.WSect, q.CancelWSect = 0, 0, 0, 0, 0
	return q
}

// look reads what there is of a process. ran, what the kernel told of its turns,
// is from before: what it has done since is in the next sample.
func (r *Recorder) look(s *format.Sample, pid int, o *process, ran [3]int64) bool {
	known := r.procs[pid] == o
	busy := ran != o.ran
	b := r.again(&o.stat, o.busy, o.dir, "stat")
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return false // gone
	}
	var f [42][]byte
	name := b[open+1 : end]
	if fields(b[end+1:], f[:]) < 40 {
		return false
	}
	state := f[0][0]
	if r.ended[pid] {
		// The kernel tells of an end before it is over: for a moment it still runs.
		if state == 'Z' || state == 'X' || num(f[6])&exiting != 0 {
			return true
		}
		delete(r.ended, pid) // another one of that number
	}
	start := num(f[19])
	fresh := o.start != start || !known
	if fresh {
		if known { // it had been gone, and its files are another's
			r.close(o)
			*o = process{dir: o.dir}
		}
		o.start, o.kernel = start, num(f[6])&kthread != 0
		r.procs[pid] = o
	}
	o.looked, o.busy = r.round, busy && known
	o.round = r.round
	if o.name != string(name[:min(len(name), format.MaxName)]) {
		o.name, o.cmdline = string(name[:min(len(name), format.MaxName)]), "" // it has run another program
		if !o.kernel {
			fresh = true
		}
	}
	p := format.Proc{
		PID: pid, Name: o.name, State: state, PPID: int(num(f[1])), Threads: int(num(f[17])), Start: r.bootAt + start/hertz,
		New: o.last.Hertz == 0, Hertz: hertz, Nice: int(num(f[16])), Prio: int(num(f[15])) + 100, CPU: int(num(f[36])),
		RTPrio: int(num(f[37])), Policy: int(num(f[38])), PageSize: r.page, VSize: num(f[20]) / 1024, RSize: num(f[21]) * r.page / 1024,
	}
	user, sys, minflt, majflt, blk := num(f[11]), num(f[12]), num(f[7]), num(f[9]), num(f[39])
	p.User, p.Sys = since(user, o.user), since(sys, o.sys)
	// The clock that runtimes are told by jumps when a guest is restored from a
	// template, for whoever ran then: nothing used more than all processors did.
	if all, used := s.CPU.Used(), p.User+p.Sys; used > all && all > 0 {
		p.User = p.User * all / used
		p.Sys = all - p.User
	}
	p.MinFlt, p.MajFlt, p.BlkDelay = since(minflt, o.minflt), since(majflt, o.majflt), since(blk, o.blk)
	p.VGrow, p.RGrow = p.VSize-o.last.VSize, p.RSize-o.last.RSize
	o.user, o.sys, o.minflt, o.majflt, o.blk = user, sys, minflt, majflt, blk
	if o.kernel {
		p.IO = o.last.IO
		count(&p, state)
	} else {
		r.program(s, &p, o, fresh, ran)
	}
	// Who is about to sleep says so before it does, and waits nowhere yet; it need
	// not run again to be there.
	o.settled = p.WChan != "-" || !fresh && ran == o.ran
	o.ran = ran
	p.Cmdline, p.CGroup = o.cmdline, o.cgroup
	o.last = p
	s.Procs = append(s.Procs, p)
	return true
}

// count counts one thread by its state.
func count(p *format.Proc, state byte) {
	switch state {
	case 'R':
		p.Running++
	case 'S':
		p.Sleeping++
	case 'D', 'I':
		p.Blocked++
	}
}

// program reads what only a process of user space has. ran is what the kernel
// told of its turns before.
func (r *Recorder) program(s *format.Sample, p *format.Proc, o *process, fresh bool, ran [3]int64) {
	l := &o.last
	same := !fresh && p.State == l.State && p.RSize == l.RSize && p.Threads == l.Threads
	if same && p.Threads == 1 && o.threads == nil && ran[2] > 0 && ran == o.ran && l.State != 'R' && o.settled {
		asBefore(p, l)
		p.IO, p.WChan, p.Sleeping, p.Blocked = l.IO, l.WChan, l.Sleeping, l.Blocked
		return
	}
	if fresh || o.cmdline == "" {
		o.cmdline = cmdline(r.read(o.dir, "cmdline"))
		if c := r.read(o.dir, "cgroup"); bytes.HasPrefix(c, []byte("0::")) {
			o.cgroup = string(bytes.TrimSpace(c[3:]))
		}
	}
	if p.Threads > 1 {
		if idle := r.threads(s, p, o); idle && same {
			asBefore(p, l)
		} else {
			r.status(p, o)
		}
		return
	}
	r.status(p, o)
	if o.threads != nil {
		for _, t := range o.threads {
			r.closeThread(t)
		}
		o.threads = nil
		r.channels(s, p, o, nil)
	}
	count(p, p.State)
	if v, ok := taskIO(r.again(&o.io, o.busy, o.dir, "task/"+strconv.Itoa(p.PID)+"/io")); ok {
		r.setIO(p, o, v)
	}
	p.RunDelay = since(ran[1], o.delay)
	o.delay = ran[1]
	if p.State != 'R' {
		p.WChan = channel(r.again(&o.wchan, o.busy, o.dir, "wchan"))
	}
}

// asBefore takes over what only a process that runs can change.
func asBefore(p, l *format.Proc) {
	p.UID, p.GID, p.EUID, p.EGID, p.SUID, p.SGID, p.FUID, p.FGID = l.UID, l.GID, l.EUID, l.EGID, l.SUID, l.SGID, l.FUID, l.FGID
	p.VExec, p.VLibs, p.VData, p.VStack, p.VSwap, p.VLock = l.VExec, l.VLibs, l.VData, l.VStack, l.VSwap, l.VLock
}

func schedstat(b []byte) (v [3]int64) {
	var f [3][]byte
	for i := range fields(b, f[:]) {
		v[i] = num(f[i])
	}
	return v
}

func cmdline(b []byte) string {
	b = bytes.TrimRight(b, "\x00 \n")
	return string(bytes.ReplaceAll(b[:min(len(b), format.MaxCmdline)], []byte{0}, []byte{' '}))
}

func (r *Recorder) status(p *format.Proc, o *process) {
	pairs(r.again(&o.status, o.busy, o.dir, "status"), func(name, v []byte) {
		switch string(name) {
		case "Uid", "Gid":
			var f [4][]byte
			fields(v, f[:])
			if name[0] == 'U' {
				p.UID, p.EUID, p.SUID, p.FUID = int(num(f[0])), int(num(f[1])), int(num(f[2])), int(num(f[3]))
			} else {
				p.GID, p.EGID, p.SGID, p.FGID = int(num(f[0])), int(num(f[1])), int(num(f[2])), int(num(f[3]))
			}
		case "VmData":
			p.VData = num(v)
		case "VmStk":
			p.VStack = num(v)
		case "VmExe":
			p.VExec = num(v)
		case "VmLib":
			p.VLibs = num(v)
		case "VmSwap":
			p.VSwap = num(v)
		case "VmLck":
			p.VLock = num(v)
		}
	})
}

// io is the disk I/O of one thread, in bytes. What /proc tells of the whole
// process holds that of its children too once it has waited for them: a shell
// would have read all that its programs did, again.
type io struct{ read, wrote, undid int64 }

func taskIO(b []byte) (v io, ok bool) {
	if b == nil {
		return v, false
	}
	pairs(b, func(name, rest []byte) {
		switch string(name) {
		case "read_bytes":
			v.read = num(rest)
		case "write_bytes":
			v.wrote = num(rest)
		case "cancelled_write_bytes":
			v.undid = num(rest)
		}
	})
	return v, true
}

// setIO makes the counters of what all threads of a process did, those that
// have ended included.
func (r *Recorder) setIO(p *format.Proc, o *process, all io) {
	if r.exits != nil {
		d := r.exits.dead(p.PID)
		all.read, all.wrote, all.undid = all.read+d.read, all.wrote+d.wrote, all.undid+d.undid
	}
	p.IO = true
	read, wrote, undid := all.read/512, all.wrote/512, all.undid/512
	p.RSect, p.WSect, p.CancelWSect = since(read, o.rsect), since(wrote, o.wsect), since(undid, o.csect)
	p.Reads, p.Writes = p.RSect, p.WSect
	o.rsect, o.wsect, o.csect = read, wrote, undid
}

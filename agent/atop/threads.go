package atop

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"strings"

	format "virtkit/core/atop"
)

// maxThreads bounds the threads of one process that are looked at.
const maxThreads = 1 << 14

// tasks are the threads of a process.
func (r *Recorder) tasks(pid int) []int {
	dir, err := os.Open(pidPath(r.root, pid, "task"))
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(maxThreads)
	out := make([]int, 0, len(names))
	for _, n := range names {
		if tid, err := strconv.Atoi(n); err == nil {
			out = append(out, tid)
		}
	}
	return out
}

// threads looks at each thread of a process of several. What has not run since
// the sample before is where it was.
func (r *Recorder) threads(s *format.Sample, dir string, p *format.Proc, o *process) {
	if o.threads == nil {
		o.threads = map[int]*thread{}
	}
	delay := int64(0)
	var all io
	counted := false
	waits := map[string]int{}
	for _, tid := range r.tasks(p.PID) {
		base := dir + "task/" + strconv.Itoa(tid)
		ran := schedstat(r.read(base + "/schedstat"))
		t := o.threads[tid]
		if t == nil {
			t = &thread{state: 'R'}
			o.threads[tid] = t
		}
		t.round = r.round
		if ran[2] == 0 || ran != t.ran || t.state == 'R' {
			t.ran = ran
			b := r.read(base + "/stat")
			i := bytes.LastIndexByte(b, ')')
			if i < 0 || i+2 >= len(b) {
				continue // gone
			}
			if t.state = b[i+2]; t.state != 'R' {
				t.wchan = channel(r.read(base + "/wchan"))
			}
			t.io, t.counted = r.taskIO(base + "/io")
		}
		if t.counted {
			counted = true
			all.read, all.wrote, all.undid = all.read+t.io.read, all.wrote+t.io.wrote, all.undid+t.io.undid
		}
		delay += since(ran[1], t.delay)
		t.delay = ran[1]
		count(p, t.state)
		if t.state != 'R' {
			waits[t.wchan]++
		}
		if tid == p.PID && t.state != 'R' {
			p.WChan = t.wchan
		}
	}
	for tid, t := range o.threads {
		if t.round != r.round {
			delete(o.threads, tid)
		}
	}
	if counted {
		r.setIO(p, o, all)
	}
	p.RunDelay = delay
	o.delay += delay
	now := make([]format.Channel, 0, len(waits))
	for name, n := range waits {
		now = append(now, format.Channel{Name: name, Threads: n})
	}
	slices.SortFunc(now, func(a, b format.Channel) int { return strings.Compare(a.Name, b.Name) })
	r.channels(s, p, o, now)
}

// channels records where the threads of a process wait, when that has changed.
func (r *Recorder) channels(s *format.Sample, p *format.Proc, o *process, now []format.Channel) {
	if o.written && slices.Equal(now, o.channels) || !o.written && len(now) == 0 {
		return
	}
	o.channels, o.written = now, len(now) > 0
	s.Waits = append(s.Waits, format.Waits{PID: p.PID, Name: p.Name, Channels: now})
}

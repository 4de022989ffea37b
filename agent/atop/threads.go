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
func (r *Recorder) tasks(of string) []int {
	dir, err := os.Open(of + "task")
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

// threads looks at each thread of a process of several, and reports whether none
// has run since the sample before: those are where they were.
func (r *Recorder) threads(s *format.Sample, p *format.Proc, o *process) (idle bool) {
	idle = o.threads != nil
	if o.threads == nil {
		o.threads = map[int]*thread{}
	}
	if r.forked || len(o.threads) != p.Threads {
		for _, tid := range r.tasks(o.dir) {
			t := o.threads[tid]
			if t == nil {
				t = &thread{dir: o.dir + "task/" + strconv.Itoa(tid) + "/", state: 'R'}
				o.threads[tid] = t
			}
			t.round = r.round
		}
		for tid, t := range o.threads {
			if t.round != r.round {
				r.closeThread(t)
				delete(o.threads, tid)
			}
		}
	}
	delay := int64(0)
	var all io
	counted := false
	waits := map[string]int{}
	for tid, t := range o.threads {
		b := r.again(&t.schedF, true, t.dir, "schedstat")
		if b == nil && !r.blind { // gone; another may have its number
			r.closeThread(t)
			b = r.again(&t.schedF, true, t.dir, "schedstat")
		}
		ran := schedstat(b)
		if ran[2] == 0 || ran != t.ran || t.state == 'R' || !t.settled {
			idle = false
			b := r.again(&t.statF, t.busy, t.dir, "stat")
			i := bytes.LastIndexByte(b, ')')
			if i < 0 || i+2 >= len(b) {
				r.closeThread(t)
				delete(o.threads, tid)
				continue // gone
			}
			t.busy = t.ran[2] > 0
			same := ran == t.ran
			t.ran = ran
			if t.state = b[i+2]; t.state != 'R' {
				t.wchan = channel(r.again(&t.wchanF, t.busy, t.dir, "wchan"))
			}
			t.settled = t.wchan != "-" || same
			t.io, t.counted = taskIO(r.again(&t.ioF, t.busy, t.dir, "io"))
		} else {
			t.busy = false
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
	return idle
}

// channels records where the threads of a process wait, when that has changed.
func (r *Recorder) channels(s *format.Sample, p *format.Proc, o *process, now []format.Channel) {
	if o.written && slices.Equal(now, o.channels) || !o.written && len(now) == 0 {
		return
	}
	o.channels, o.written = now, len(now) > 0
	s.Waits = append(s.Waits, format.Waits{PID: p.PID, Name: p.Name, Channels: now})
}

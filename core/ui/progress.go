package ui

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Update is the state of a task as printers see it.
type Update struct {
	Title   string
	Step    string
	Done    int64 // bytes; of Total, or of an unknown whole when that is 0
	Total   int64
	Elapsed time.Duration
	State   string // "running", "done" or "failed"
	Err     error
}

// Progress prints the progress of tasks. The Terminal calls it with its lock
// held, so implementations write to its writers directly.
type Progress interface {
	// Changed is called when a task begins, enters a step or ends.
	Changed(u Update)
	// Tick is called every Interval while there are running tasks.
	Tick(all []Update)
	// Hide takes away what Tick drew, because something else is printed.
	Hide()
	// Interval is the time between ticks; 0 = none.
	Interval() time.Duration
}

// Task is one long piece of work. Its methods may be called from several
// goroutines, and do nothing on a nil Task.
type Task struct {
	t     *Terminal
	u     Update
	begin time.Time
}

// Progress begins a task. Done must be called on it. Work of less than a
// moment prints nothing.
func (t *Terminal) Progress(title string) *Task {
	k := &Task{t: t, begin: time.Now(), u: Update{Title: CleanLine(title), State: "running"}}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tasks = append(t.tasks, k)
	t.progress.Changed(k.u)
	if d := t.progress.Interval(); t.stop == nil && d > 0 {
		t.stop = make(chan struct{})
		go t.tick(d, t.stop)
	}
	return k
}

func (t *Terminal) tick(d time.Duration, stop <-chan struct{}) {
	tk := time.NewTicker(d)
	defer tk.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tk.C:
		}
		t.mu.Lock()
		all := make([]Update, len(t.tasks))
		for i, k := range t.tasks {
			k.u.Elapsed = time.Since(k.begin)
			all[i] = k.u
		}
		if len(all) > 0 {
			t.progress.Tick(all)
		}
		t.mu.Unlock()
	}
}

// Step names what the task does now.
func (k *Task) Step(name string) {
	if k == nil {
		return
	}
	k.t.mu.Lock()
	defer k.t.mu.Unlock()
	if k.u.State != "running" || k.u.Step == CleanLine(name) {
		return
	}
	k.u.Step, k.u.Done, k.u.Total = CleanLine(name), 0, 0
	k.u.Elapsed = time.Since(k.begin)
	k.t.progress.Changed(k.u)
}

// Bytes tells how much of the step is done; total 0 = not known. It is cheap.
func (k *Task) Bytes(done, total int64) {
	if k == nil {
		return
	}
	k.t.mu.Lock()
	k.u.Done, k.u.Total = done, total
	k.t.mu.Unlock()
}

// Done ends the task. A second call does nothing.
func (k *Task) Done(err error) {
	if k == nil {
		return
	}
	t := k.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.u.State != "running" {
		return
	}
	k.u.State, k.u.Err, k.u.Elapsed = "done", err, time.Since(k.begin)
	if err != nil {
		k.u.State = "failed"
	}
	t.tasks = slices.DeleteFunc(t.tasks, func(o *Task) bool { return o == k })
	t.progress.Changed(k.u)
	if len(t.tasks) == 0 && t.stop != nil {
		close(t.stop)
		t.stop = nil
	}
}

// text is u in one line.
func (u Update) text() string {
	var b strings.Builder
	b.WriteString(u.Title)
	if u.Step != "" {
		b.WriteString(": " + u.Step)
	}
	switch {
	case u.Total > 0:
		fmt.Fprintf(&b, " %s of %s (%d%%)", Size(u.Done), Size(u.Total), min(100, int64(float64(u.Done)/float64(u.Total)*100)))
	case u.Done > 0:
		b.WriteString(" " + Size(u.Done))
	}
	b.WriteString(" " + Duration(u.Elapsed))
	return b.String()
}

func (u Update) closing() string {
	if u.State == "failed" {
		return u.Title + ": failed after " + Duration(u.Elapsed)
	}
	return u.Title + ": done in " + Duration(u.Elapsed)
}

type silent struct{}

func (silent) Changed(Update)          {}
func (silent) Tick([]Update)           {}
func (silent) Hide()                   {}
func (silent) Interval() time.Duration { return 0 }

// lineProgress prints a line every few seconds, for logs.
type lineProgress struct {
	t     *Terminal
	shown map[string]bool // titles that were printed
}

const lineEvery = 5 * time.Second

func (p *lineProgress) Interval() time.Duration { return lineEvery }
func (p *lineProgress) Hide()                   {}

func (p *lineProgress) Tick(all []Update) {
	if p.shown == nil {
		p.shown = map[string]bool{}
	}
	for _, u := range all {
		p.shown[u.Title] = true
		fmt.Fprintf(p.t.stderr, "%s: %s\n", p.t.opts.Name, u.text())
	}
}

func (p *lineProgress) Changed(u Update) {
	if u.State != "running" && p.shown[u.Title] {
		delete(p.shown, u.Title)
		fmt.Fprintf(p.t.stderr, "%s: %s\n", p.t.opts.Name, u.closing())
	}
}

// liveProgress redraws the last line of a terminal.
type liveProgress struct {
	t     *Terminal
	drawn bool
}

const (
	liveEvery = 200 * time.Millisecond
	liveWorth = time.Second // a task this long leaves a line behind
)

func (p *liveProgress) Interval() time.Duration { return liveEvery }

func (p *liveProgress) Hide() {
	if p.drawn {
		p.drawn = false
		io.WriteString(p.t.stderr, "\r\x1b[K")
	}
}

func (p *liveProgress) Tick(all []Update) {
	parts := make([]string, len(all))
	for i, u := range all {
		parts[i] = u.text()
	}
	line := Truncate(p.t.opts.Name+": "+strings.Join(parts, " · "), p.t.Width()-1)
	io.WriteString(p.t.stderr, "\r\x1b[K"+p.t.Paint(Dim, line))
	p.drawn = true
}

func (p *liveProgress) Changed(u Update) {
	if u.State == "running" {
		return
	}
	p.Hide()
	if u.Elapsed >= liveWorth {
		fmt.Fprintf(p.t.stderr, "%s: %s\n", p.t.opts.Name, u.closing())
	}
}

// jsonProgress prints every change as an event on stdout.
type jsonProgress struct{ t *Terminal }

type progressEvent struct {
	Title     string `json:"title"`
	State     string `json:"state"`
	Step      string `json:"step,omitempty"`
	Done      int64  `json:"done_bytes,omitempty"`
	Total     int64  `json:"total_bytes,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
	Error     string `json:"error,omitempty"`
}

func (p *jsonProgress) Interval() time.Duration { return lineEvery }
func (p *jsonProgress) Hide()                   {}

func (p *jsonProgress) Tick(all []Update) {
	for _, u := range all {
		p.Changed(u)
	}
}

func (p *jsonProgress) Changed(u Update) {
	e := progressEvent{u.Title, u.State, u.Step, u.Done, u.Total, u.Elapsed.Milliseconds(), ""}
	if u.Err != nil {
		e.Error = u.Err.Error()
	}
	if b, err := encodeObject("type", "progress", e); err == nil {
		p.t.stdout.Write(append(b, '\n'))
	}
}

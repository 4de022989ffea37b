package vkcmd

import (
	"sync"

	"virtkit/core/image"
	"virtkit/core/supervise"
	"virtkit/core/ui"
)

// progress shows how long work goes on: a live line on a terminal, a line
// every few seconds elsewhere. Nothing is begun before the first report, so
// that work which turns out to be none prints nothing.
type progress struct {
	a     *app
	title string

	mu     sync.Mutex
	task   *ui.Task
	closed bool
}

func (a *app) progress(title string) *progress { return &progress{a: a, title: title} }

func (p *progress) begun() *ui.Task {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.task == nil && !p.closed {
		p.task = p.a.terminal().Progress(p.title)
	}
	return p.task
}

// Line names what is done now.
func (p *progress) Line(s string) {
	p.begun().Step(s)
	if p.a.g.verbose {
		p.a.terminal().Notef("%s", s)
	}
}

// Image reports what becomes of an image.
func (p *progress) Image(e image.Progress) {
	if e.Text != "" {
		p.Line(e.Text)
	}
	switch {
	case e.AllTotal > 0 || e.AllDone > 0:
		p.begun().Bytes(e.AllDone, e.AllTotal)
	case e.Layer == "" && e.Done > 0:
		p.begun().Bytes(e.Done, e.Total)
	}
}

// Done ends the display. Safe to call twice.
func (p *progress) Done(err error) {
	p.mu.Lock()
	t := p.task
	p.closed = true
	p.mu.Unlock()
	t.Done(err)
}

// bootProgress warns of starts of a guest that came to nothing, and shows how it
// comes up when somebody wants to know.
func (a *app) bootProgress() func(supervise.State) {
	last, retried := "", 0
	return func(s supervise.State) {
		if a.g.verbose && s.Stage != last {
			last = s.Stage
			a.say("%s: %s", s.Phase, s.Stage)
		}
		for ; retried < len(s.Retried); retried++ {
			a.warn("the guest was booted again: %s", ui.CleanLine(s.Retried[retried]))
		}
	}
}

package image

import (
	"sync"
	"time"
)

// progress delivers events one at a time and keeps the counts.
type progress struct {
	mu    sync.Mutex
	f     func(Progress)
	done  int64
	total int64
	last  map[string]time.Time
}

func newProgress(f func(Progress)) *progress {
	return &progress{f: f, last: map[string]time.Time{}}
}

func (p *progress) say(stage, text string) {
	if p == nil || p.f == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.f(Progress{Stage: stage, Text: text, AllDone: p.done, AllTotal: p.total})
}

// note is say for the functions that want a func(string).
func (p *progress) note(stage string) func(string) { return func(text string) { p.say(stage, text) } }

// begin sets the size of the whole and starts counting anew.
func (p *progress) begin(total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.total = 0, total
}

// counter counts bytes of one layer ("" = the whole is one thing). Events are
// at most ten a second a layer, and one when it is complete.
func (p *progress) counter(stage, layer string, total int64) func(int64) {
	var done int64
	return func(n int64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		done += n
		p.done += n
		if p.f == nil || done < total && time.Since(p.last[layer]) < 100*time.Millisecond {
			return
		}
		p.last[layer] = time.Now()
		p.f(Progress{Stage: stage, Layer: layer, Done: done, Total: total, AllDone: p.done, AllTotal: p.total})
	}
}

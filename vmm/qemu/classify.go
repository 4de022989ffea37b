package qemu

import (
	"bytes"
	"strings"
	"sync"

	"virtkit/core/machine"
)

// panicMark begins the line by which Linux says that it is lost.
const panicMark = "Kernel panic - not syncing: "

// panicWindow is how far back from the console's end, in bytes, a panic line
// still explains the end: the kernel prints registers and a stack after it.
const panicWindow = 64 << 10

// maxConsoleLine is as much of a line as is looked at.
const maxConsoleLine = 512

// panicWatch looks for the panic line in console bytes. Guests write what they
// like, so it holds one bounded line and no more.
type panicWatch struct {
	mu    sync.Mutex
	line  []byte
	total int64
	at    int64
	found string
}

func (w *panicWatch) Write(p []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		part := p
		if i >= 0 {
			part = p[:i]
		}
		if room := maxConsoleLine - len(w.line); room > 0 {
			w.line = append(w.line, part[:min(room, len(part))]...)
		}
		if i < 0 {
			w.total += int64(len(p))
			return
		}
		w.total += int64(i + 1)
		w.endLineLocked()
		p = p[i+1:]
	}
}

func (w *panicWatch) endLineLocked() {
	if i := bytes.Index(w.line, []byte(panicMark)); i >= 0 {
		w.found, w.at = printable(w.line[i:]), w.total
	}
	w.line = w.line[:0]
}

// last is the panic line, if there was one near the console's end.
func (w *panicWatch) last() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.line) > 0 {
		w.endLineLocked()
	}
	if w.total-w.at > panicWindow {
		return ""
	}
	return w.found
}

// printable is b as one line of text that cannot steer a terminal.
func printable(b []byte) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return -1
		}
		return r
	}, strings.ToValidUTF8(string(b), "\uFFFD")))
}

// ending is what was seen of a guest's end.
type ending struct {
	stuck    string // why the driver ended a guest that could not go on
	shutdown string // reason of QEMU's first SHUTDOWN event, "" = none came
	panicked string // panic line near the console's end
	killed   bool   // Kill was called before QEMU ended
	status   string // how the process ended, in words
	words    string // the last of what QEMU printed
}

// classify gives the reason and the text for people.
func (e ending) classify() (machine.Reason, string) {
	if e.stuck != "" {
		return machine.Crashed, e.stuck
	}
	switch e.shutdown {
	case "guest-shutdown":
		return machine.PowerOff, ""
	case "guest-panic":
		if e.panicked == "" {
			return machine.Panic, "the guest's kernel panicked"
		}
		return machine.Panic, e.panicked
	case "guest-reset":
		if e.panicked != "" { // panic=-1 makes the kernel reset at once
			return machine.Panic, e.panicked
		}
		return machine.Reboot, ""
	}
	if e.killed {
		return machine.Killed, ""
	}
	detail := "QEMU ended: " + e.status
	if e.shutdown == "host-signal" {
		detail = "QEMU was told to end by a signal from the host"
	}
	if e.words != "" {
		detail += ": " + e.words
	}
	return machine.Crashed, detail
}

// tail keeps the last bytes written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 4096

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if len(t.buf) > tailSize {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-tailSize:]...)
	}
	return len(p), nil
}

// lines is the last three lines as one, fit for people.
func (t *tail) lines() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for l := range strings.Lines(string(t.buf)) {
		if l = printable([]byte(l)); l != "" {
			out = append(out, l)
		}
	}
	return strings.Join(out[max(0, len(out)-3):], "; ")
}

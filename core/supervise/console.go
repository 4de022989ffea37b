package supervise

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unicode/utf8"
)

// Files of a job directory.
const (
	LockFile       = "lock"
	SpecFile       = "spec.json"
	StateFile      = "state.json"
	SocketFile     = "sup.sock"
	LogFile        = "sup.log"
	ConsoleFile    = "console.log"
	ConsoleOldFile = "console.log.1"
	CommandFile    = "command.log" // output of Spec.Command, kept as the console is
	UpperFile      = "upper.img"
	CheckoutFile   = "checkout.img"
	vmmDir         = "vmm" // the driver's
)

// ConsoleMax bounds console.log and console.log.1 each, in bytes.
const ConsoleMax = 8 << 20

const (
	tailBytes = 16 << 10 // of the console, kept in memory for Exit.Console
	tailLines = 40
	tailWidth = 400 // bytes of a line, in Exit.Console
)

// boundedLog keeps the beginning and the end of an endless text in two files:
// <path>.1, the first max bytes, written once; and <path>, which is replaced
// when it grows over max by a file that begins with a line telling how much
// is missing, followed by the last max/8 bytes. So a flood is written once and
// an eighth, and never holds more than 2×max of disk. When the disk is full,
// bytes are counted and dropped: the guest goes on.
type boundedLog struct {
	path string
	max  int64

	mu      sync.Mutex
	f       *os.File
	size    int64 // of f
	marks   int64 // of it, ours
	head    bool  // <path>.1 exists
	dropped int64 // bytes missing before f's first or, failed, next byte
	failed  bool  // the last write failed; a mark is due
	err     error // the first failure
	tail    []byte
	pos     int // next byte in tail once that is full
	total   int64
}

// Total is how many bytes were written so far, kept or not.
func (l *boundedLog) Total() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.total
}

func newBoundedLog(path string, max int64) *boundedLog {
	if max <= 0 {
		max = ConsoleMax
	}
	return &boundedLog{path: path, max: max}
}

func dropMark(n int64) string { return fmt.Sprintf("[... %d bytes dropped ...]\n", n) }

// Write never fails: what cannot be kept is counted.
func (l *boundedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remember(p)
	l.total += int64(len(p))
	for rest := p; len(rest) > 0; {
		if l.size >= l.max {
			if err := l.rotateLocked(); err != nil {
				l.lostLocked(int64(len(rest)), err)
				break
			}
		}
		n := min(int64(len(rest)), l.max-l.size)
		w, err := l.appendLocked(rest[:n])
		if err != nil {
			l.lostLocked(int64(len(rest)-w), err)
			break
		}
		rest = rest[n:]
	}
	return len(p), nil
}

func (l *boundedLog) lostLocked(n int64, err error) {
	l.dropped += n
	l.failed = true
	if l.err == nil {
		l.err = err
	}
}

// appendLocked writes p to the current file, after the mark of an earlier
// failure; it returns how much of p was written.
func (l *boundedLog) appendLocked(p []byte) (int, error) {
	if l.f == nil {
		f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return 0, err
		}
		l.f = f
	}
	if l.failed {
		n, err := l.f.WriteString("\n" + dropMark(l.dropped))
		l.size += int64(n)
		l.marks += int64(n)
		if err != nil {
			return 0, err
		}
		l.failed = false
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return n, err
}

// rotateLocked makes room in the current file.
func (l *boundedLog) rotateLocked() error {
	if !l.head {
		if err := os.Rename(l.path, l.path+".1"); err != nil {
			return err
		}
		l.head = true
		l.f.Close()
		l.f, l.size, l.marks = nil, 0, 0
		return nil
	}
	keep := l.max / 8
	dropped := l.dropped + max(0, l.size-l.marks-keep)
	mark := dropMark(dropped)
	tmp := filepath.Join(filepath.Dir(l.path), "."+filepath.Base(l.path)+".new")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	old, err := os.Open(l.path)
	if err == nil {
		defer old.Close()
		_, err = f.WriteString(mark)
	}
	if err == nil {
		_, err = io.Copy(f, io.NewSectionReader(old, l.size-keep, keep))
	}
	if err == nil {
		err = os.Rename(tmp, l.path)
	}
	if err != nil {
		f.Close()
		os.Remove(tmp)
		return err
	}
	l.f.Close()
	l.f, l.size, l.marks, l.dropped = f, int64(len(mark))+keep, int64(len(mark)), dropped
	return nil
}

// remember keeps p's end for Tail.
func (l *boundedLog) remember(p []byte) {
	if len(p) >= tailBytes {
		p = p[len(p)-tailBytes:]
	}
	if n := min(len(p), tailBytes-len(l.tail)); n > 0 {
		l.tail = append(l.tail, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(l.tail[l.pos:], p)
		p = p[n:]
		l.pos = (l.pos + n) % tailBytes
	}
}

// Tail is the last lines written, made printable.
func (l *boundedLog) Tail() []string {
	l.mu.Lock()
	b := make([]byte, 0, len(l.tail))
	if len(l.tail) == tailBytes {
		b = append(append(b, l.tail[l.pos:]...), l.tail[:l.pos]...)
	} else {
		b = append(b, l.tail...)
	}
	l.mu.Unlock()
	b = bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n"))
	var lines []string
	for ln := range strings.SplitSeq(string(b), "\n") {
		if ln = printable(ln); ln != "" {
			lines = append(lines, ln)
		}
	}
	if len(lines) > tailLines {
		lines = lines[len(lines)-tailLines:]
	}
	return lines
}

// printable removes terminal control sequences and control characters, and
// bounds the length: the console is the guest's, a terminal the user's.
func printable(s string) string {
	var b strings.Builder
	for i := 0; i < len(s) && b.Len() < tailWidth; {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == 0x1b:
			i += escapeLen(s[i:])
			continue
		case r == '\t':
			b.WriteByte(' ')
		case r == utf8.RuneError && n == 1, r < 0x20, r >= 0x7f && r < 0xa0:
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return strings.TrimRight(b.String(), " ")
}

// escapeLen is the length of the escape sequence that s begins with.
func escapeLen(s string) int {
	if len(s) < 2 {
		return len(s)
	}
	switch s[1] {
	case '[':
		for i := 2; i < len(s); i++ {
			if s[i] >= 0x40 && s[i] <= 0x7e {
				return i + 1
			}
		}
		return len(s)
	case ']':
		for i := 2; i < len(s); i++ {
			if s[i] == 0x07 {
				return i + 1
			}
		}
		return len(s)
	}
	return 2
}

// Lost is how many bytes a failing disk cost, and its first error.
func (l *boundedLog) Lost() (dropped int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped, l.err
}

// Close closes the file; later writes open it anew.
func (l *boundedLog) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	return f.Close()
}

// limitWriter passes on the first left bytes and drops the rest, for what the
// VMM's process prints.
type limitWriter struct {
	mu   sync.Mutex
	w    io.Writer
	left int64
}

func (l *limitWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left > 0 {
		n := min(int64(len(p)), l.left)
		l.left -= n
		l.w.Write(p[:n]) // a full disk must not end the VMM's writer
		if l.left == 0 {
			io.WriteString(l.w, "\n[the VMM prints too much: the rest is dropped]\n")
		}
	}
	return len(p), nil
}

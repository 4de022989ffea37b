// Package trace turns what a job prints into what GitLab stores, as
// gitlab-runner does it: secrets masked, lines stamped, bytes that are no
// UTF-8 replaced, the whole cut at a limit (vectors/README.md 6; the streams
// of fleet-reference.txt, "Output").
//
// Each stream of a job (a stage's stdout, its stderr, the node's own lines)
// has its own stages, in this order:
//
//	phrases   masked values, longest first, across writes
//	params    ?private_token=… and the like
//	tokens    glpat-… and the like
//	stamps    unless the job sets FF_TIMESTAMPS to false
//
// and all streams share the end: invalid UTF-8, the limit, the sums.
//
// # Invariants
//
// No byte of a masked value that came on one stream is written, wherever the
// writes that carried it were cut. Memory does not grow with the output: a
// stream holds back less than the secrets that can overlap there are long, and
// 8 KiB of a line.
package trace

import (
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"
	"time"
	"unicode/utf8"
)

// Kind tells a program's two outputs apart.
type Kind byte

// The kinds.
const (
	Stdout Kind = 'O'
	Stderr Kind = 'E'
)

// Numbers of streams.
const (
	Executor = 0 // the node's own lines and `vk gitlab prepare`
	Work     = 1 // `vk gitlab run`
)

// DefaultLimit is the trace's limit in bytes when the job sets none.
const DefaultLimit = 4 << 20

// Options of a Trace.
type Options struct {
	Secrets    []string         // masked whole; empty ones are ignored
	Prefixes   []string         // of tokens, beside DefaultTokenPrefixes
	FewTokens  bool             // of DefaultTokenPrefixes, the first alone
	Timestamps bool             // stamp every line
	Limit      int64            // bytes of output; 0 = DefaultLimit
	Clock      func() time.Time // nil = time.Now
}

// Trace writes the streams of one job to one writer. It is safe for
// concurrent use.
type Trace struct {
	w        io.Writer
	opt      Options
	secrets  *automaton
	prefixes *automaton

	mu    sync.Mutex
	carry []byte // the beginning of a character
	clean []byte
	size  int64
	crc   uint32
	cut   bool
	err   error
}

// New returns a Trace that writes to w, which sees one Write at a time.
func New(w io.Writer, o Options) *Trace {
	if o.Limit == 0 {
		o.Limit = DefaultLimit
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	t := &Trace{w: w, opt: o}
	t.secrets = newAutomaton(toBytes(o.Secrets))
	own := DefaultTokenPrefixes
	if o.FewTokens {
		own = own[:1]
	}
	t.prefixes = newAutomaton(toBytes(slices.Concat(own, o.Prefixes)))
	return t
}

func toBytes(list []string) [][]byte {
	out := make([][]byte, len(list))
	for i, s := range list {
		out[i] = []byte(s)
	}
	return out
}

// Stream is one source of output. Each belongs to one goroutine at a time.
type Stream struct {
	t     *Trace
	first next
	done  bool
}

// Stream opens a stream. Close ends it: what it held back comes out.
func (t *Trace) Stream(id uint8, kind Kind) *Stream {
	var n next = plain{t.write}
	if t.opt.Timestamps {
		n = newStamps(id, kind, t.opt.Clock, t.write)
	}
	n = &tokens{a: t.prefixes, next: n}
	n = &params{next: n}
	if t.secrets != nil {
		n = &phrases{a: t.secrets, next: n}
	}
	return &Stream{t: t, first: n}
}

// Write never writes less than all; its error is the writer's first one.
func (s *Stream) Write(p []byte) (int, error) {
	if s.done {
		return 0, fmt.Errorf("trace: write to a closed stream")
	}
	if len(p) > 0 {
		s.first.put(p, false)
	}
	return len(p), s.t.Err()
}

// Close lets out what was held back. Closing again does nothing.
func (s *Stream) Close() error {
	if !s.done {
		s.done = true
		s.first.close()
	}
	return s.t.Err()
}

// Err is the writer's first error.
func (t *Trace) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Close ends the output after the last stream was closed: a character that was
// begun and never ended is replaced.
func (t *Trace) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clean = t.clean[:0]
	for range t.carry {
		t.clean = append(t.clean, replacement...)
	}
	t.carry = t.carry[:0]
	t.emit(t.clean)
	return t.err
}

// Sum is what GitLab is told of the output: its bytes, the notice of the limit
// included, and their CRC-32 (IEEE).
func (t *Trace) Sum() (size int64, crc uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.size, t.crc
}

// Cut tells whether the limit was passed.
func (t *Trace) Cut() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.cut
}

const replacement = "\uFFFD"

// write is where the streams meet.
func (t *Trace) write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cut || t.err != nil {
		return
	}
	if len(t.carry) == 0 && utf8.Valid(p) {
		t.emit(p)
		return
	}
	if len(t.carry) > 0 {
		p = append(t.carry, p...)
		t.carry = nil
	}
	t.clean = t.clean[:0]
	for len(p) > 0 {
		r, n := utf8.DecodeRune(p)
		if r == utf8.RuneError && n == 1 {
			if !utf8.FullRune(p) {
				t.carry = append(t.carry[:0], p...)
				break
			}
			t.clean = append(t.clean, replacement...)
		} else {
			t.clean = append(t.clean, p[:n]...)
		}
		p = p[n:]
	}
	t.emit(t.clean)
}

// emit writes valid UTF-8 as far as the limit allows.
func (t *Trace) emit(p []byte) {
	if len(p) == 0 || t.cut || t.err != nil {
		return
	}
	if room := t.opt.Limit - t.size; int64(len(p)) > room {
		n := int(room)
		for n > 0 && !utf8.RuneStart(p[n]) {
			n--
		}
		t.cut = true
		notice := fmt.Sprintf("\n\x1b[33;1mJob's log exceeded limit of %d bytes.\n"+
			"Job execution will continue but no more output will be collected.\x1b[0;m\n", t.opt.Limit)
		p = append(slices.Clip(p[:n]), notice...)
	}
	n, err := t.w.Write(p)
	t.size += int64(n)
	t.crc = crc32.Update(t.crc, crc32.IEEETable, p[:n])
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	t.err = err
}

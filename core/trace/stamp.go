package trace

import (
	"bytes"
	"time"
)

// stamps puts a time and the name of its stream before each line:
//
//	2026-11-29T16:11:26.516857Z 01O text
//	2026-11-29T16:11:26.516857Z 01O+more of the same line
//
// A line is stamped when its first byte comes; lines that come together have
// one time. A write that has a carriage
// return and no newline after it (a progress bar, a section's marker) ends a
// line of the trace, and so does more than stampLimit without a newline; the
// next one then continues it.
type stamps struct {
	out   func([]byte)
	clock func() time.Time
	head  []byte    // the part that does not change, its last byte the mark
	line  []byte    // begun and not ended, with its stamp
	buf   []byte    // of one put
	now   time.Time // of this put, once it was asked for
	sec   int64     // of the time in text
	text  [26]byte
}

// stampLimit is how many bytes of a line, its stamp included, wait for its end.
const stampLimit = 8 << 10

func newStamps(id uint8, kind Kind, clock func() time.Time, out func([]byte)) *stamps {
	const hex = "0123456789abcdef"
	return &stamps{out: out, clock: clock, head: []byte{'Z', ' ', hex[id>>4], hex[id&15], byte(kind), ' '}, sec: -1 << 62}
}

func (s *stamps) put(p []byte, _ bool) {
	s.buf = s.buf[:0]
	s.now = time.Time{} // the lines of one put came together
	for {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			break
		}
		s.begin()
		s.buf = append(s.buf, p[:i+1]...)
		p = p[i+1:]
	}
	switch {
	case len(p) == 0:
	case bytes.IndexByte(p, '\r') >= 0:
		s.part(p)
	case len(s.line)+len(p) > stampLimit:
		s.part(p)
	default:
		if len(s.line) == 0 {
			s.line = s.stamp(s.line)
		}
		s.line = append(s.line, p...)
	}
	if len(s.buf) > 0 {
		s.out(s.buf)
	}
}

// begin moves the line that was begun to the output, or begins one.
func (s *stamps) begin() {
	if len(s.line) > 0 {
		s.buf = append(s.buf, s.line...)
		s.line = s.line[:0]
		return
	}
	s.buf = s.stamp(s.buf)
}

// part ends a line of the trace that is none of the job's.
func (s *stamps) part(p []byte) {
	s.begin()
	s.buf = append(s.buf, p...)
	s.buf = append(s.buf, '\n')
	s.head[len(s.head)-1] = '+'
}

func (s *stamps) stamp(to []byte) []byte {
	if s.now.IsZero() {
		s.now = s.clock().UTC()
		if sec := s.now.Unix(); sec != s.sec {
			s.sec = sec
			s.now.AppendFormat(s.text[:0], "2006-01-02T15:04:05.")
		}
		micro := s.now.Nanosecond() / 1000
		for i, div := len(s.text)-6, 100000; div > 0; i, div = i+1, div/10 {
			s.text[i] = byte('0' + micro/div%10)
		}
	}
	to = append(to, s.text[:]...)
	to = append(to, s.head...)
	s.head[len(s.head)-1] = ' '
	return to
}

func (s *stamps) close() {
	if len(s.line) > 0 {
		s.out(append(s.line, '\n'))
		s.line = nil
	}
}

// plain is the end of the stages when nothing is stamped.
type plain struct{ out func([]byte) }

func (p plain) put(b []byte, _ bool) { p.out(b) }
func (p plain) close()               {}

package agent

import (
	"errors"
	"net"

	"virtkit/agent/atop"
)

// record makes the recorder of this guest, which listens from now on.
func (s *server) record() {
	s.recording.Lock()
	defer s.recording.Unlock()
	if s.recorder == nil {
		s.recorder = atop.New(func(format string, a ...any) { s.logf(format, a...) })
	}
}

// sample answers with one sample. It is whole in memory before the first byte
// goes out: a host that reads slowly must not stretch it.
func (s *server) sample(st net.Conn) {
	s.recording.Lock()
	if s.recorder == nil {
		s.recording.Unlock()
		reply(st, errors.New("this guest keeps no recording"))
		return
	}
	buf := s.sampled
	s.sampled = nil // another one that comes meanwhile makes its own
	b := s.recorder.Sample(buf[:0])
	s.recording.Unlock()
	reply(st, nil)
	st.Write(b)
	if cap(b) <= 1<<20 {
		s.recording.Lock()
		s.sampled = b
		s.recording.Unlock()
	}
}

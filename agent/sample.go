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
	b := s.recorder.Sample(nil)
	s.recording.Unlock()
	reply(st, nil)
	st.Write(b)
}

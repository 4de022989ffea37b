package nodejobs

import (
	"context"
	"encoding/base64"
	"maps"
	"slices"
	"time"

	"virtkit/core/failpoint"
	"virtkit/core/fleet/jobdir"
	"virtkit/core/fleet/node"
	"virtkit/core/fleet/wire"
	"virtkit/core/logx"
)

// Session is one session's view of the jobs.
type Session struct {
	j     *Jobs
	token chan struct{}

	// Below are Jobs.mu's.
	queue []wire.Message  // to be sent as they are
	ready map[string]bool // jobs whose output may be sent: the hub's offset is known
	sent  map[string]int64
	told  map[string]wire.StateOfJob
	at    map[string]time.Time    // when a result was sent last
	seen  map[string]jobdir.Stamp // the egress report that was sent last, by placed.told
	turn  string                  // the job whose output was sent last
	buf   []byte
}

var _ node.JobSession = (*Session)(nil)

// Open implements node.Jobs.
func (j *Jobs) Open() node.JobSession {
	s := &Session{
		j: j, token: make(chan struct{}, 1), buf: make([]byte, wire.MaxOutput),
		ready: map[string]bool{}, sent: map[string]int64{}, told: map[string]wire.StateOfJob{}, at: map[string]time.Time{}, seen: map[string]jobdir.Stamp{},
	}
	j.mu.Lock()
	j.session = s
	j.mu.Unlock()
	s.wake()
	return s
}

func (s *Session) wake() {
	select {
	case s.token <- struct{}{}:
	default:
	}
}

// Ready implements node.JobSession.
func (s *Session) Ready() <-chan struct{} { return s.token }

// More implements node.JobSession.
func (s *Session) More() { s.wake() }

// Close implements node.JobSession.
func (s *Session) Close() {
	s.j.mu.Lock()
	defer s.j.mu.Unlock()
	if s.j.session == s {
		s.j.session = nil
	}
}

// Held implements node.JobSession.
func (s *Session) Held() *wire.Held {
	s.j.mu.Lock()
	defer s.j.mu.Unlock()
	h := &wire.Held{Reservations: wire.IDs{}, Jobs: wire.IDs{}}
	h.Reservations = append(h.Reservations, slices.Sorted(maps.Keys(s.j.reservations))...)
	h.Jobs = append(h.Jobs, slices.Sorted(maps.Keys(s.j.jobs))...)
	return h
}

// Handle implements node.JobSession.
func (s *Session) Handle(ctx context.Context, m wire.Message) wire.Message {
	defer s.wake()
	switch m := m.(type) {
	case *wire.Offer:
		return s.j.offer(ctx, m)
	case *wire.Renew:
		return s.j.renew(m)
	case *wire.GiveBack:
		return s.j.giveBack(m)
	case *wire.Start:
		return s.j.start(ctx, m)
	case *wire.Cancel:
		return s.j.cancel(m)
	case *wire.OutputAck:
		s.ack(m)
	case *wire.JobRecorded:
		s.j.recorded(m)
	}
	return nil
}

// ack takes the hub's word on what it has stored. The first in a session says
// where to send from; so does one that is behind what was sent and acked, from a
// hub that lost something.
func (s *Session) ack(m *wire.OutputAck) {
	s.j.mu.Lock()
	defer s.j.mu.Unlock()
	p := s.j.jobs[m.Job]
	if p == nil {
		return
	}
	if !s.ready[m.Job] || m.Offset < p.acked || m.Offset > s.sent[m.Job] {
		s.sent[m.Job] = m.Offset
	}
	s.ready[m.Job] = true
	p.acked = m.Offset
}

// Next implements node.JobSession.
func (s *Session) Next() wire.Message {
	s.j.mu.Lock()
	defer s.j.mu.Unlock()
	if s.j.session != s {
		return nil
	}
	if len(s.queue) > 0 {
		m := s.queue[0]
		s.queue = s.queue[1:]
		return m
	}
	// Each job in its turn.
	ids := slices.Sorted(maps.Keys(s.j.jobs))
	at, _ := slices.BinarySearch(ids, s.turn+"\x00")
	for i := range ids {
		id := ids[(at+i)%len(ids)]
		if m := s.of(s.j.jobs[id]); m != nil {
			s.turn = id
			return m
		}
	}
	return nil
}

// of is what there is to say of a job: where it is, then its output, then how
// it ended.
func (s *Session) of(p *placed) wire.Message {
	if p.result == nil && p.stage.Stage != "" {
		if st := p.stateLocked(); !same(s.told[p.id], st.State) {
			s.told[p.id] = st.State
			return st
		}
	}
	if !s.ready[p.id] {
		return nil
	}
	if p.result == nil && len(p.egress) > 0 && s.seen[p.id] != p.told {
		s.seen[p.id] = p.told
		return &wire.EgressReport{Job: p.id, Report: p.egress}
	}
	if from := s.sent[p.id]; from < p.length && from < p.acked+Window {
		n := min(int64(len(s.buf)), p.length-from, p.acked+Window-from)
		got, err := p.dir.ReadOutput(s.buf[:n], from)
		if err != nil {
			s.j.Log.Error("a job's output cannot be read", logx.Job, p.id, logx.Err, err)
			return nil
		}
		if got > 0 {
			s.sent[p.id] = from + int64(got)
			return &wire.Output{Job: p.id, Offset: from, Data: base64.StdEncoding.EncodeToString(s.buf[:got])}
		}
	}
	if p.result == nil || p.acked < p.length {
		return nil
	}
	if last, ok := s.at[p.id]; ok && s.j.Now().Sub(last) < ResultEvery {
		return nil
	}
	s.at[p.id] = s.j.Now()
	failpoint.At(failpoint.ResultSending)
	r := *p.result
	// A power loss may have taken what the hub had stored.
	r.OutputLen = max(r.OutputLen, p.acked)
	return &wire.Result{Job: p.id, Result: r}
}

func same(a, b wire.StateOfJob) bool {
	if (a.Guest == nil) != (b.Guest == nil) || a.Guest != nil && *a.Guest != *b.Guest {
		return false
	}
	return a.State == b.State && a.Stage == b.Stage && a.Activity == b.Activity
}

package dnsd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Limits of a socket to a resolver. Questions that are put within a moment
// share one, as opening one costs more than asking; yet it is used for few and
// not for long, because its port is half of what an answer that is made up
// would have to guess.
const (
	socketQuestions = 32
	socketAge       = time.Second
)

// resolver is one that is asked over UDP.
type resolver struct {
	to netip.AddrPort

	mu  sync.Mutex
	cur *socket // nil = the next question opens one
}

// socket is a UDP socket with a random port that is connected to a resolver.
type socket struct {
	r *resolver
	c *net.UDPConn
	t *time.Timer // retires it

	// Under the resolver's lock.
	left    int // questions that it still takes
	waiting map[uint16]*waiter
}

// waiter is a question that waits for its answer.
type waiter struct {
	query []byte
	match matcher
	got   chan []byte // nil is that there comes none
}

var errNoAnswer = errors.New("the resolver cannot be reached")

// ask puts a query, whose identifier it chooses, and waits for the answer.
func (r *resolver) ask(ctx context.Context, query []byte, match matcher) ([]byte, error) {
	w := &waiter{query: query, match: match, got: make(chan []byte, 1)}
	s, err := r.enter(w)
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", r.to, err)
	}
	if _, err := s.c.Write(query); err != nil {
		s.leave(w)
		return nil, fmt.Errorf("asking %s: %w", r.to, err)
	}
	select {
	case b := <-w.got:
		if b == nil {
			return nil, fmt.Errorf("asking %s: %w", r.to, errNoAnswer)
		}
		return b, nil
	case <-ctx.Done():
		s.leave(w)
		return nil, fmt.Errorf("asking %s: %w", r.to, context.Cause(ctx))
	}
}

// enter finds a socket for a question, and an identifier that no other there has.
func (r *resolver) enter(w *waiter) (*socket, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.cur
	if s == nil {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(r.to))
		if err != nil {
			return nil, err
		}
		s = &socket{r: r, c: c, left: socketQuestions, waiting: make(map[uint16]*waiter, socketQuestions)}
		s.t = time.AfterFunc(socketAge, s.retire)
		r.cur = s
		go s.read()
	}
	id := uint16(rand.Uint32())
	for s.waiting[id] != nil {
		id++
	}
	binary.BigEndian.PutUint16(w.query, id)
	s.waiting[id] = w
	if s.left--; s.left == 0 {
		r.cur = nil // those that wait end it
	}
	return s, nil
}

// leave is said of a question that is not waited for any more.
func (s *socket) leave(w *waiter) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if id := binary.BigEndian.Uint16(w.query); s.waiting[id] == w {
		delete(s.waiting, id)
		s.endLocked()
	}
}

// retire lets it have no more questions.
func (s *socket) retire() {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if s.r.cur == s {
		s.r.cur = nil
	}
	s.endLocked()
}

// endLocked closes it when it is retired and nothing waits for it.
func (s *socket) endLocked() {
	if s.r.cur != s && len(s.waiting) == 0 {
		s.t.Stop()
		s.c.Close()
	}
}

// read hands answers to those who wait for them.
func (s *socket) read() {
	buf := bufPool.Get().(*[]byte)
	defer bufPool.Put(buf)
	for {
		n, err := s.c.Read(*buf)
		if err != nil { // such as that nobody listens there: of one as of all
			s.fail()
			return
		}
		if n < 12 {
			continue
		}
		b := (*buf)[:n]
		s.r.mu.Lock()
		if w := s.waiting[binary.BigEndian.Uint16(b)]; w != nil && w.match(b, w.query) {
			delete(s.waiting, binary.BigEndian.Uint16(b))
			w.got <- bytes.Clone(b)
			s.endLocked()
		}
		s.r.mu.Unlock()
	}
}

func (s *socket) fail() {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if s.r.cur == s {
		s.r.cur = nil
	}
	for id, w := range s.waiting {
		delete(s.waiting, id)
		w.got <- nil
	}
	s.endLocked()
}

// close closes it at once, when it has one that nobody waits for.
func (r *resolver) close() {
	r.mu.Lock()
	s := r.cur
	r.mu.Unlock()
	if s != nil {
		s.retire()
	}
}

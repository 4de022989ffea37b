package dnsd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"

	"virtkit/core/logx"
)

// rounds is how often each resolver is asked before the client is told that
// none answered. With one resolver and the default timeout this ends just
// before a client's own five seconds.
const rounds = 2

// forward passes a question on, rebuilt, and its answer back.
func (s *Server) forward(ctx context.Context, cl Client, qu *question, stream bool) []byte {
	query, err := qu.rebuild()
	if err != nil {
		return qu.reply(dns.RcodeRefused).pack(stream)
	}
	if resp := s.ask(ctx, cl, query, answers, stream, false); resp != nil {
		return s.pass(cl, qu, resp, stream)
	}
	return qu.reply(dns.RcodeServerFailure).pack(stream)
}

// relay passes a message on as it is but for its identifier, and its answer back.
func (s *Server) relay(ctx context.Context, cl Client, q []byte, stream bool) []byte {
	query := bytes.Clone(q)
	binary.BigEndian.PutUint16(query, uint16(rand.Uint32()))
	resp := s.ask(ctx, cl, query, replies, stream, stream)
	if resp == nil {
		return header(q, dns.RcodeServerFailure)
	}
	copy(resp, q[:2])
	return resp
}

// ask asks the resolvers in turn, beginning with the one that answered last. A
// resolver that refuses or fails is remembered, and its answer is given when no
// other does better. Nil is that none answered.
func (s *Server) ask(ctx context.Context, cl Client, query []byte, match matcher, whole, tcp bool) []byte {
	ctx, cancel := context.WithTimeout(ctx, rounds*s.cfg.Timeout+s.cfg.Timeout/4)
	defer cancel()
	var second []byte
	var last error
	n := len(s.cfg.Upstreams)
	start := int(s.best.Load())
	for try := 0; try < rounds*n && ctx.Err() == nil; try++ {
		i := (start + try) % n
		resp, err := s.exchange(ctx, s.resolvers[i], query, match, whole, tcp)
		if err != nil {
			last = err
			continue
		}
		cl.Forwarded(len(query), len(resp))
		switch resp[3] & 15 {
		case dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented:
			if second == nil {
				second = resp
			}
			if try < n-1 {
				continue
			}
			return second
		}
		s.best.Store(int32(i))
		return resp
	}
	if second == nil && (ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded)) {
		s.warn(last)
	}
	return second
}

// warn logs, at most every ten seconds, that guests get no answers.
func (s *Server) warn(err error) {
	now := time.Now().Unix()
	if was := s.warned.Load(); now-was < 10 || !s.warned.CompareAndSwap(was, now) {
		return
	}
	s.log.Warn("no resolver of the host answers; guests' questions fail", "resolvers", fmt.Sprint(s.cfg.Upstreams), logx.Err, err)
}

// bufPool holds room for one answer of any size.
var bufPool = sync.Pool{New: func() any { b := make([]byte, dns.MaxMsgSize); return &b }}

// rebuild writes the question anew.
func (qu *question) rebuild() ([]byte, error) {
	m := new(dns.Msg)
	m.Id = uint16(rand.Uint32())
	m.RecursionDesired, m.CheckingDisabled = qu.msg.RecursionDesired, qu.msg.CheckingDisabled
	m.AuthenticatedData = qu.msg.AuthenticatedData
	if qu.edns {
		m.SetEdns0(uint16(min(qu.size, dns.MaxMsgSize-1)), qu.do)
	}
	b, err := m.Pack() // without the question, which is put in as it came
	if err != nil {
		return nil, fmt.Errorf("writing the question for %s: %w", qu.q.Name, err)
	}
	out := make([]byte, 0, len(b)+len(qu.raw))
	out = append(append(append(out, b[:12]...), qu.raw...), b[12:]...)
	binary.BigEndian.PutUint16(out[4:], 1)
	return out, nil
}

// matcher tells whether an answer belongs to a query.
type matcher func(resp, query []byte) bool

// exchange asks one resolver over UDP, and over TCP when the answer was cut and
// the client itself uses TCP, and so can take it whole; with tcp at once.
func (s *Server) exchange(ctx context.Context, r *resolver, query []byte, match matcher, whole, tcp bool) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if tcp {
		return askTCP(ctx, r.to, query, match)
	}
	resp, err := r.ask(ctx, query, match)
	if err != nil {
		return nil, err
	}
	if whole && resp[2]&0x02 != 0 {
		return askTCP(ctx, r.to, query, match)
	}
	return resp, nil
}

func askTCP(ctx context.Context, to netip.AddrPort, query []byte, match matcher) ([]byte, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, fmt.Errorf("asking %s over TCP: %w", to, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)); err != nil {
		return nil, fmt.Errorf("asking %s over TCP: %w", to, err)
	}
	var l [2]byte
	if _, err := io.ReadFull(c, l[:]); err != nil {
		return nil, fmt.Errorf("asking %s over TCP: %w", to, err)
	}
	resp := make([]byte, binary.BigEndian.Uint16(l[:]))
	if _, err := io.ReadFull(c, resp); err != nil {
		return nil, fmt.Errorf("asking %s over TCP: %w", to, err)
	}
	if !match(resp, query) {
		return nil, fmt.Errorf("asking %s over TCP: the answer is to another question", to)
	}
	return resp, nil
}

// replies tells whether resp may belong to query, whatever they are about.
func replies(resp, query []byte) bool {
	return len(resp) >= 12 && resp[0] == query[0] && resp[1] == query[1] && resp[2]&0x80 != 0 && (resp[2]^query[2])&0x78 == 0
}

// answers tells whether resp belongs to query: same identifier, and the same
// question (the name's case aside) unless it is an error that repeats none.
func answers(resp, query []byte) bool {
	if !replies(resp, query) {
		return false
	}
	if binary.BigEndian.Uint16(resp[4:]) == 0 {
		return resp[3]&15 != dns.RcodeSuccess && resp[3]&15 != dns.RcodeNameError
	}
	end := questionEnd(query)
	return end > 0 && len(resp) >= end && binary.BigEndian.Uint16(resp[4:]) == 1 &&
		sameName(resp[12:end-4], query[12:end-4]) && bytes.Equal(resp[end-4:end], query[end-4:end])
}

// sameName compares names as they are in messages, folding ASCII's letters
// alone. Lengths of labels are below them.
func sameName(a, b []byte) bool {
	lower := func(c byte) byte {
		if c >= 'A' && c <= 'Z' {
			return c + 'a' - 'A'
		}
		return c
	}
	for i := range a {
		if lower(a[i]) != lower(b[i]) {
			return false
		}
	}
	return len(a) == len(b)
}

// pass makes a resolver's answer the client's.
func (s *Server) pass(cl Client, qu *question, resp []byte, stream bool) []byte {
	if binary.BigEndian.Uint16(resp[4:]) == 0 {
		return qu.reply(int(resp[3] & 15)).pack(stream)
	}
	binary.BigEndian.PutUint16(resp, qu.id)
	copy(resp[12:], qu.raw) // the client's own case, whatever came back
	tell := cl.WantsAnswers()
	if tell {
		a, err := opened(qu, resp)
		if err != nil {
			// Not known what it says: a guest that used it would be refused
			// without anyone knowing why.
			return qu.reply(dns.RcodeServerFailure).pack(stream)
		}
		if len(a.Addrs) > 0 {
			cl.Answered(a)
		}
	}
	if stream || len(resp) <= qu.size {
		return resp
	}
	m := new(dns.Msg)
	if err := m.Unpack(resp); err != nil {
		r := qu.reply(dns.RcodeSuccess)
		r.m.Truncated = true // it may have it whole over TCP
		return r.pack(stream)
	}
	m.Compress = true
	m.Truncate(qu.size)
	b, err := m.Pack()
	if err != nil {
		return qu.reply(dns.RcodeServerFailure).pack(stream)
	}
	return b
}

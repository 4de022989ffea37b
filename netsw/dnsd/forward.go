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
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"virtkit/core/logx"
)

// rounds is how often each resolver is asked before the client is told that
// none answered. With one resolver and the default timeout this ends just
// before a client's own five seconds.
const rounds = 2

// forward asks the resolvers in turn, beginning with the one that answered
// last. A resolver that refuses or fails is remembered, and its answer is given
// when no other does better.
func (s *Server) forward(ctx context.Context, cl Client, qu *question, stream bool) []byte {
	query, err := qu.rebuild()
	if err != nil {
		return qu.reply(dns.RcodeRefused).pack(stream)
	}
	ctx, cancel := context.WithTimeout(ctx, rounds*s.cfg.Timeout+s.cfg.Timeout/4)
	defer cancel()
	var second []byte
	var last error
	n := len(s.cfg.Upstreams)
	start := int(s.best.Load())
	for try := 0; try < rounds*n && ctx.Err() == nil; try++ {
		i := (start + try) % n
		resp, err := s.exchange(ctx, s.cfg.Upstreams[i], query, stream)
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
			return s.pass(cl, qu, second, stream)
		}
		s.best.Store(int32(i))
		return s.pass(cl, qu, resp, stream)
	}
	if second != nil {
		return s.pass(cl, qu, second, stream)
	}
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		s.warn(last)
	}
	return qu.reply(dns.RcodeServerFailure).pack(stream)
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

// exchange asks one resolver over UDP, and over TCP when the answer was cut
// and the client itself uses TCP.
func (s *Server) exchange(ctx context.Context, to netip.AddrPort, query []byte, stream bool) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	resp, err := askUDP(ctx, to, query)
	if err != nil {
		return nil, err
	}
	if stream && resp[2]&0x02 != 0 {
		return askTCP(ctx, to, query)
	}
	return resp, nil
}

func askUDP(ctx context.Context, to netip.AddrPort, query []byte) ([]byte, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", to, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if _, err := c.Write(query); err != nil {
		return nil, fmt.Errorf("asking %s: %w", to, err)
	}
	buf := bufPool.Get().(*[]byte)
	defer bufPool.Put(buf)
	for {
		n, err := c.Read(*buf)
		if err != nil {
			return nil, fmt.Errorf("asking %s: %w", to, err)
		}
		if answers((*buf)[:n], query) {
			return bytes.Clone((*buf)[:n]), nil
		}
	}
}

func askTCP(ctx context.Context, to netip.AddrPort, query []byte) ([]byte, error) {
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
	if !answers(resp, query) {
		return nil, fmt.Errorf("asking %s over TCP: the answer is to another question", to)
	}
	return resp, nil
}

// answers tells whether resp belongs to query: same identifier, and the same
// question (case aside) unless it is an error that repeats none.
func answers(resp, query []byte) bool {
	if len(resp) < 12 || resp[0] != query[0] || resp[1] != query[1] || resp[2]&0x80 == 0 {
		return false
	}
	if binary.BigEndian.Uint16(resp[4:]) == 0 {
		return resp[3]&15 != dns.RcodeSuccess && resp[3]&15 != dns.RcodeNameError
	}
	end := questionEnd(query)
	return end > 0 && len(resp) >= end && binary.BigEndian.Uint16(resp[4:]) == 1 &&
		bytes.EqualFold(resp[12:end], query[12:end])
}

// pass makes a resolver's answer the client's.
func (s *Server) pass(cl Client, qu *question, resp []byte, stream bool) []byte {
	if binary.BigEndian.Uint16(resp[4:]) == 0 {
		return qu.reply(int(resp[3] & 15)).pack(stream)
	}
	binary.BigEndian.PutUint16(resp, qu.id)
	copy(resp[12:], qu.raw) // the client's own case, whatever came back
	tooLong := !stream && len(resp) > qu.size
	if !tooLong && !cl.WantsAnswers() {
		return resp
	}
	m := new(dns.Msg)
	if err := m.Unpack(resp); err != nil {
		// Nothing is known of what it says: nothing of it may be used.
		return qu.reply(dns.RcodeServerFailure).pack(stream)
	}
	if cl.WantsAnswers() {
		if a := opened(qu, m); len(a.Addrs) > 0 {
			cl.Answered(a)
		}
	}
	if !tooLong {
		return resp
	}
	m.Compress = true
	m.Truncate(qu.size)
	b, err := m.Pack()
	if err != nil {
		return qu.reply(dns.RcodeServerFailure).pack(stream)
	}
	return b
}

// opened lists the addresses of an answer, through its CNAMEs.
func opened(qu *question, m *dns.Msg) Answer {
	a := Answer{Names: []string{strings.TrimSuffix(qu.q.Name, ".")}}
	ttl := uint32(1 << 31)
	at := strings.ToLower(qu.q.Name)
	for _, rr := range m.Answer {
		if strings.ToLower(rr.Header().Name) != at {
			continue
		}
		switch rr := rr.(type) {
		case *dns.CNAME:
			at = strings.ToLower(rr.Target)
			a.Names = append(a.Names, strings.TrimSuffix(rr.Target, "."))
		case *dns.A:
			if ip, ok := netip.AddrFromSlice(rr.A.To4()); ok {
				a.Addrs = append(a.Addrs, ip)
			}
		default:
			continue
		}
		ttl = min(ttl, rr.Header().Ttl)
	}
	a.TTL = time.Duration(ttl) * time.Second
	return a
}

// Package dnsd is the DNS server at the gateway's address. It answers the
// job's own names itself and passes every other question on to the host's
// resolvers.
//
// A question that is passed on is rebuilt: what goes upstream is its name (the
// case kept), type and class, the RD, AD and CD flags, and a bare EDNS record.
// The identifier is another, so that nobody who knows the guest's can answer in
// the resolver's place. Nothing else that a guest writes leaves the host this way.
// What cannot be rebuilt is answered REFUSED (NOTIMP for updates and
// notifications), unless the client may send what it likes; zone transfers are
// refused in any case, because their answers are streams. Answers are passed back
// as they came but for the identifier, and cut, with TC set, to what the client
// said it takes.
package dnsd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"virtkit/core/logx"
)

// Limits.
const (
	maxOpen    = 256              // questions over UDP being answered
	maxStreams = 64               // TCP connections
	maxPiped   = 8                // questions of one connection being answered
	maxMessage = 8 << 10          // bytes of a question over TCP
	streamIdle = 10 * time.Second // without a question on a TCP connection
	localTTL   = 30               // seconds, of the job's own names
	minSize    = 512              // UDP answer without EDNS
)

// Config says whom a server asks.
type Config struct {
	Upstreams []netip.AddrPort
	Job       Job
	Log       *slog.Logger // nil = none
	// Timeout is one attempt's at one resolver; 0 = 2 s. Each is tried twice.
	Timeout time.Duration
}

// Job is the network a server serves. Its methods are called from many
// goroutines and must not block.
type Job interface {
	// Enter begins a question of the guest with this address; not ok drops it.
	Enter(client netip.Addr) (Client, bool)
	// Connect begins a TCP connection of that guest, and leave ends it; not ok
	// closes it.
	Connect(client netip.Addr) (leave func(), ok bool)
	// Lookup finds a guest by a name without final dot, in any case.
	Lookup(name string) (netip.Addr, bool)
	// Reverse names an address; ok says whether it is of the job's network,
	// and "" that nobody has it.
	Reverse(a netip.Addr) (name string, ok bool)
}

// Client is a guest during one question.
type Client interface {
	Leave()
	// Allow decides over a name (as written, without final dot) before
	// anything is sent upstream.
	Allow(name string, qtype uint16) bool
	// Unreadable decides over a question that cannot be read or rebuilt: whether
	// it is passed on as it is.
	Unreadable() bool
	// Forwarded counts the bytes of a question that went upstream and of its answer.
	Forwarded(sent, received int)
	// WantsAnswers says whether Answered is to be called.
	WantsAnswers() bool
	// Answered tells of the addresses that the guest is about to learn.
	Answered(Answer)
}

// Answer is what a question was answered with.
type Answer struct {
	Names []string // asked for, then the CNAMEs followed
	Addrs []netip.Addr
	TTL   time.Duration // the lowest
}

// Server answers questions.
type Server struct {
	cfg       Config
	log       *slog.Logger
	open      chan struct{}
	streams   chan struct{}
	resolvers []*resolver

	best   atomic.Int32 // index of the resolver that answered last
	warned atomic.Int64 // when "no resolver answers" was logged, Unix seconds
}

// New makes a server.
func New(cfg Config) *Server {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 2 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = logx.Discard()
	}
	s := &Server{cfg: cfg, log: cfg.Log, open: make(chan struct{}, maxOpen), streams: make(chan struct{}, maxStreams)}
	for _, to := range cfg.Upstreams {
		s.resolvers = append(s.resolvers, &resolver{to: to})
	}
	return s
}

// Close closes what is kept for the next question. Those being answered end by
// their contexts.
func (s *Server) Close() {
	for _, r := range s.resolvers {
		r.close()
	}
}

// ServePacket answers datagrams until pc is closed.
func (s *Server) ServePacket(ctx context.Context, pc net.PacketConn) {
	var wg sync.WaitGroup
	defer wg.Wait()
	buf := make([]byte, 4096) // a question is far smaller
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
				return
			}
			continue
		}
		if work := s.Packet(addrOf(from), buf[:n], func(r []byte) { _, _ = pc.WriteTo(r, from) }); work != nil {
			wg.Go(func() { work(ctx) })
		}
	}
}

// Packet takes a datagram, which it copies. The work that it returns makes the
// answer, if one is due, and gives it to reply; nil is that too much is open
// already, and the guest's resolver has to ask again.
func (s *Server) Packet(from netip.Addr, q []byte, reply func([]byte)) (work func(context.Context)) {
	select {
	case s.open <- struct{}{}:
	default:
		return nil
	}
	q = bytes.Clone(q)
	return func(ctx context.Context) {
		defer func() { <-s.open }()
		if r := s.answer(ctx, from, q, false); r != nil {
			reply(r)
		}
	}
}

// ServeStream answers connections until ln is closed.
func (s *Server) ServeStream(ctx context.Context, ln net.Listener) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		select {
		case s.streams <- struct{}{}:
		default:
			c.Close()
			continue
		}
		leave, ok := s.cfg.Job.Connect(addrOf(c.RemoteAddr()))
		if !ok {
			<-s.streams
			c.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-s.streams }()
			defer leave()
			s.stream(ctx, c)
		})
	}
}

// stream answers one connection's questions, several at once, in any order.
func (s *Server) stream(ctx context.Context, c net.Conn) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		piped = make(chan struct{}, maxPiped)
	)
	defer wg.Wait()
	for {
		_ = c.SetReadDeadline(time.Now().Add(streamIdle))
		var l [2]byte
		if _, err := io.ReadFull(c, l[:]); err != nil {
			return
		}
		if binary.BigEndian.Uint16(l[:]) > maxMessage {
			return
		}
		q := make([]byte, binary.BigEndian.Uint16(l[:]))
		if _, err := io.ReadFull(c, q); err != nil {
			return
		}
		piped <- struct{}{} // not reading on is how a stream is told to wait
		wg.Go(func() {
			defer func() { <-piped }()
			r := s.answer(ctx, addrOf(c.RemoteAddr()), q, true)
			if r == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			_ = c.SetWriteDeadline(time.Now().Add(streamIdle))
			_, _ = c.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(r)), uint16(len(r))), r...))
		})
	}
}

// answer is the reply to one message, or nil when none is due.
func (s *Server) answer(ctx context.Context, from netip.Addr, q []byte, stream bool) []byte {
	cl, ok := s.cfg.Job.Enter(from)
	if !ok {
		if !stream || !asks(q) {
			return nil
		}
		return header(q, dns.RcodeServerFailure) // silence would stop the stream's other questions too
	}
	defer cl.Leave()
	qu, odd := parse(q)
	if qu == nil {
		if odd.told && cl.Unreadable() && odd.relay {
			return s.relay(ctx, cl, q, stream)
		}
		return odd.reply
	}
	if r := s.local(qu); r != nil {
		return r.pack(stream)
	}
	name := strings.TrimSuffix(qu.q.Name, ".")
	if !cl.Allow(name, qu.q.Qtype) {
		return qu.reply(dns.RcodeNameError).pack(stream)
	}
	return s.forward(ctx, cl, qu, stream)
}

// question is a client's, taken apart.
type question struct {
	id   uint16
	q    dns.Question
	raw  []byte // the question section as sent
	msg  *dns.Msg
	edns bool
	do   bool
	size int // of a UDP answer that the client takes
}

// oddity is a message that is not a question which can be rebuilt.
type oddity struct {
	reply []byte // nil = none is due
	told  bool   // it is one that a guest wants passed on
	relay bool   // and that can be, as it is
}

// asks tells queries from answers and from what has no header.
func asks(b []byte) bool { return len(b) >= 12 && b[2]&0x80 == 0 }

// parse takes a message apart.
func parse(b []byte) (*question, oddity) {
	if !asks(b) {
		return nil, oddity{}
	}
	refused := oddity{header(b, dns.RcodeRefused), true, true}
	switch b[2] >> 3 & 15 {
	case dns.OpcodeQuery:
	case dns.OpcodeUpdate, dns.OpcodeNotify:
		return nil, oddity{header(b, dns.RcodeNotImplemented), true, true}
	default:
		return nil, refused
	}
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil || len(m.Question) != 1 {
		return nil, refused
	}
	// Records that the header has and the message has not are passed over by Unpack.
	if binary.BigEndian.Uint32(b[6:]) != 0 || len(m.Extra) != int(binary.BigEndian.Uint16(b[10:])) {
		return nil, refused
	}
	qu := &question{id: m.Id, q: m.Question[0], msg: m, size: minSize}
	for _, rr := range m.Extra {
		opt, ok := rr.(*dns.OPT)
		if !ok || qu.edns { // a signature, say: it does not survive
			return nil, refused
		}
		qu.edns, qu.do = true, opt.Do()
		qu.size = max(minSize, int(opt.UDPSize()))
		if opt.Version() != 0 {
			return nil, oddity{reply: qu.reply(dns.RcodeBadVers).pack(false)}
		}
	}
	switch qu.q.Qtype {
	case dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB:
		return nil, oddity{reply: refused.reply, told: true}
	}
	end := questionEnd(b)
	if qu.q.Qclass != dns.ClassINET || end < 0 {
		return nil, refused
	}
	qu.raw = b[12:end]
	return qu, oddity{}
}

// questionEnd is where the first question ends; -1 when its name is
// compressed, which a first name cannot be.
func questionEnd(b []byte) int {
	for i := 12; i < len(b); {
		l := int(b[i])
		switch {
		case l == 0:
			if i+5 > len(b) {
				return -1
			}
			return i + 5
		case l > 63:
			return -1
		}
		i += 1 + l
	}
	return -1
}

// header is an answer of nothing but a header.
func header(b []byte, rcode int) []byte {
	r := make([]byte, 12)
	copy(r, b[:2])
	r[2] = 0x80 | b[2]&0x79 // opcode and RD are kept
	r[3] = byte(rcode)
	return r
}

// reply is an answer being made.
type reply struct {
	qu *question
	m  *dns.Msg
}

func (qu *question) reply(rcode int) *reply {
	m := new(dns.Msg)
	m.Id, m.Response, m.Rcode = qu.id, true, rcode
	m.RecursionDesired, m.CheckingDisabled = qu.msg.RecursionDesired, qu.msg.CheckingDisabled
	m.RecursionAvailable = true
	m.Question = qu.msg.Question
	if qu.edns {
		m.SetEdns0(4096, qu.do)
	}
	return &reply{qu, m}
}

// pack writes it, cut to the client's size on UDP.
func (r *reply) pack(stream bool) []byte {
	size := dns.MaxMsgSize
	if !stream {
		size = r.qu.size
	}
	r.m.Truncate(size)
	b, err := r.m.Pack()
	if err != nil {
		return nil
	}
	return b
}

// local answers what is the job's own; nil for the rest.
func (s *Server) local(qu *question) *reply {
	hdr := dns.RR_Header{Name: qu.q.Name, Class: dns.ClassINET, Ttl: localTTL}
	if a, ok := reverseAddr(qu.q.Name); ok {
		name, ours := s.cfg.Job.Reverse(a)
		if !ours {
			return nil
		}
		if name == "" {
			return authoritative(qu.reply(dns.RcodeNameError))
		}
		r := authoritative(qu.reply(dns.RcodeSuccess))
		if qu.q.Qtype == dns.TypePTR || qu.q.Qtype == dns.TypeANY {
			hdr.Rrtype = dns.TypePTR
			r.m.Answer = []dns.RR{&dns.PTR{Hdr: hdr, Ptr: dns.Fqdn(name)}}
		}
		return r
	}
	a, ok := s.cfg.Job.Lookup(strings.TrimSuffix(qu.q.Name, "."))
	if !ok {
		return nil
	}
	r := authoritative(qu.reply(dns.RcodeSuccess))
	if qu.q.Qtype == dns.TypeA || qu.q.Qtype == dns.TypeANY {
		hdr.Rrtype = dns.TypeA
		r.m.Answer = []dns.RR{&dns.A{Hdr: hdr, A: a.AsSlice()}}
	}
	return r
}

func authoritative(r *reply) *reply { r.m.Authoritative = true; return r }

// reverseAddr reads d.c.b.a.in-addr.arpa.
func reverseAddr(name string) (netip.Addr, bool) {
	n, ok := strings.CutSuffix(strings.ToLower(name), ".in-addr.arpa.")
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(n)
	if err != nil || !a.Is4() {
		return netip.Addr{}, false
	}
	b := a.As4()
	return netip.AddrFrom4([4]byte{b[3], b[2], b[1], b[0]}), true
}

func addrOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

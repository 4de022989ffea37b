package dnsd_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"

	"virtkit/core/logx"
	"virtkit/netsw/dnsd"
)

const limit = time.Minute

// listenBoth listens on one port for UDP and TCP. TCP chooses: its ports are the
// scarce ones, because connections that have ended keep theirs for a while.
func listenBoth(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		pc, err := net.ListenPacket("udp", ln.Addr().String())
		if err == nil {
			return pc, ln
		}
		ln.Close()
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// upstream is a resolver that answers by handle, over UDP and TCP.
func upstream(t *testing.T, handle func(w dns.ResponseWriter, q *dns.Msg, tcp bool)) netip.AddrPort {
	t.Helper()
	pc, ln := listenBoth(t)
	for _, s := range []*dns.Server{{PacketConn: pc}, {Listener: ln}} {
		tcp := s.Listener != nil
		up := make(chan struct{})
		s.NotifyStartedFunc = func() { close(up) }
		s.MsgAcceptFunc = func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { handle(w, q, tcp) })
		go func() { _ = s.ActivateAndServe() }()
		<-up
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// job is a network with two guests and a policy of one name.
type job struct {
	mu       sync.Mutex
	sent     int
	answered []dnsd.Answer
	wants    bool
	relays   bool
	last     string // name asked about
	open     int    // questions
	most     int    // of them at one time
}

func (j *job) Enter(netip.Addr) (dnsd.Client, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.open++
	j.most = max(j.most, j.open)
	return client{j}, true
}

func (j *job) Lookup(name string) (netip.Addr, bool) {
	if strings.EqualFold(name, "db") {
		return netip.MustParseAddr("10.0.0.3"), true
	}
	return netip.Addr{}, false
}

func (j *job) Reverse(a netip.Addr) (string, bool) {
	if a.String() == "10.0.0.3" {
		return "db", true
	}
	return "", netip.MustParsePrefix("10.0.0.0/24").Contains(a)
}

func (j *job) Connect(netip.Addr) (func(), bool) { return func() {}, true }

// asked is the name that Allow was last asked about.
func (j *job) asked() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

type client struct{ j *job }

func (c client) Leave() {
	c.j.mu.Lock()
	defer c.j.mu.Unlock()
	c.j.open--
}
func (c client) Allow(name string, qtype uint16) bool {
	c.j.mu.Lock()
	defer c.j.mu.Unlock()
	c.j.last = name
	return !strings.EqualFold(name, "denied.test")
}
func (c client) Unreadable() bool { return c.j.relays }
func (c client) Forwarded(sent, received int) {
	c.j.mu.Lock()
	defer c.j.mu.Unlock()
	c.j.sent += sent
}
func (c client) WantsAnswers() bool { return c.j.wants }
func (c client) Answered(a dnsd.Answer) {
	c.j.mu.Lock()
	defer c.j.mu.Unlock()
	c.j.answered = append(c.j.answered, a)
}

// server runs a server under test on the host's loopback. It waits for its
// resolvers as long as they may take.
func server(t *testing.T, j *job, ups ...netip.AddrPort) string {
	t.Helper()
	return serverThatWaits(t, limit, j, ups...)
}

// serverThatWaits is server with how long it waits for a resolver.
func serverThatWaits(t *testing.T, timeout time.Duration, j *job, ups ...netip.AddrPort) string {
	t.Helper()
	pc, ln := listenBoth(t)
	s := dnsd.New(dnsd.Config{Upstreams: ups, Job: j, Log: logx.ForTest(t), Timeout: timeout})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.ServePacket(ctx, pc) })
	wg.Go(func() { s.ServeStream(ctx, ln) })
	t.Cleanup(func() {
		cancel()
		pc.Close()
		ln.Close()
		wg.Wait()
	})
	return pc.LocalAddr().String()
}

func ask(t *testing.T, network, to string, q *dns.Msg) *dns.Msg {
	t.Helper()
	c := dns.Client{Net: network, Timeout: limit, UDPSize: 65535}
	r, _, err := c.Exchange(q, to)
	if err != nil {
		t.Fatalf("asking %v: %v", q.Question, err)
	}
	return r
}

func question(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	return m
}

func addA(m *dns.Msg, name, ip string, ttl uint32) {
	m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: net.ParseIP(ip)})
}

func TestForwardKeepsWhatTheClientSaid(t *testing.T) {
	got := make(chan *dns.Msg, 1)
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		got <- q
		r := new(dns.Msg).SetReply(q)
		r.Question[0].Name = strings.ToLower(q.Question[0].Name)
		r.AuthenticatedData = true
		addA(r, r.Question[0].Name, "192.0.2.7", 300)
		_ = w.WriteMsg(r)
	})
	to := server(t, new(job), up)
	q := question("WwW.eXample.TEST.", dns.TypeA)
	q.CheckingDisabled, q.AuthenticatedData = true, true
	q.SetEdns0(1400, true)
	opt := q.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"})
	r := ask(t, "udp", to, q)
	if r.Id != q.Id || r.Question[0].Name != "WwW.eXample.TEST." || len(r.Answer) != 1 || !r.AuthenticatedData {
		t.Errorf("answer = %v, want the id, the case and the flags kept", r)
	}
	u := <-got
	if u.Id == q.Id || !u.RecursionDesired || !u.CheckingDisabled || !u.AuthenticatedData || u.Question[0].Name != q.Question[0].Name {
		t.Errorf("upstream got %v", u)
	}
	o := u.IsEdns0()
	if o == nil || o.UDPSize() != 1400 || !o.Do() || len(o.Option) != 0 {
		t.Errorf("upstream got EDNS %v, want size and DO kept and no options", o)
	}
	got <- nil
	q = question("plain.test.", dns.TypeTXT)
	<-got
	ask(t, "udp", to, q)
	if u = <-got; u.IsEdns0() != nil {
		t.Error("EDNS was added to a question without")
	}
}

func TestLocalNames(t *testing.T) {
	j := new(job)
	to := server(t, j, netip.MustParseAddrPort("127.0.0.1:9"))
	for i, c := range []struct {
		name  string
		qtype uint16
		rcode int
		want  string
	}{
		{"DB.", dns.TypeA, dns.RcodeSuccess, "10.0.0.3"},
		{"db.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"db.", dns.TypeHTTPS, dns.RcodeSuccess, ""},
		{"3.0.0.10.in-addr.ARPA.", dns.TypePTR, dns.RcodeSuccess, "db."},
		{"4.0.0.10.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"denied.test.", dns.TypeA, dns.RcodeNameError, ""},
	} {
		q := question(c.name, c.qtype)
		q.RecursionDesired, q.CheckingDisabled = i%2 == 0, i%3 == 0
		if i%2 == 1 {
			q.SetEdns0(1232, i%3 == 0)
		}
		r := ask(t, "udp", to, q)
		// An answer of the switch's own is one to this question (RFC 1035, 4.1.1;
		// RFC 6891, 6.1.1: a record in the answer if, and only if, one was asked with).
		if o := r.IsEdns0(); !r.RecursionAvailable || r.RecursionDesired != q.RecursionDesired || r.CheckingDisabled != q.CheckingDisabled ||
			(o != nil) != (i%2 == 1) || o != nil && o.Do() != (i%3 == 0) {
			t.Errorf("%s: flags and EDNS of the answer are not of the question:\n%v\n%v", c.name, q, r)
		}
		got := ""
		if len(r.Answer) == 1 {
			switch rr := r.Answer[0].(type) {
			case *dns.A:
				got = rr.A.String()
			case *dns.PTR:
				got = rr.Ptr
			}
		}
		if r.Rcode != c.rcode || got != c.want || r.Question[0].Name != c.name {
			t.Errorf("%s %s = %s %q, want %s %q", c.name, dns.TypeToString[c.qtype], dns.RcodeToString[r.Rcode], got, dns.RcodeToString[c.rcode], c.want)
		}
	}
	if j.sent != 0 {
		t.Errorf("%d bytes went upstream", j.sent)
	}
}

func TestWhatCannotBeRebuilt(t *testing.T) {
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) { t.Errorf("upstream got %v", q) })
	to := server(t, new(job), up)
	update := new(dns.Msg).SetUpdate("example.test.")
	notify := new(dns.Msg).SetNotify("example.test.")
	two := question("a.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	iquery, status := question("a.test.", dns.TypeA), question("a.test.", dns.TypeA)
	iquery.Opcode, status.Opcode = dns.OpcodeIQuery, dns.OpcodeStatus
	signed := question("a.test.", dns.TypeA)
	signed.SetTsig("key.", dns.HmacSHA256, 300, 1)
	answered := question("a.test.", dns.TypeA)
	addA(answered, "a.test.", "192.0.2.1", 1)
	chaos := question("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	extra := question("a.test.", dns.TypeA)
	extra.Extra = []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: "secret.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"data"}}}
	vers := question("a.test.", dns.TypeA)
	vers.SetEdns0(1232, false)
	vers.IsEdns0().SetVersion(1)
	for what, c := range map[string]struct {
		q     *dns.Msg
		rcode int
	}{
		"update": {update, dns.RcodeNotImplemented}, "notify": {notify, dns.RcodeNotImplemented},
		"two questions": {two, dns.RcodeRefused}, "chaos": {chaos, dns.RcodeRefused}, "records with it": {extra, dns.RcodeRefused},
		"inverse query": {iquery, dns.RcodeRefused}, "status": {status, dns.RcodeRefused}, "a signature": {signed, dns.RcodeRefused},
		"an answer in it": {answered, dns.RcodeRefused}, "IXFR": {question("example.test.", dns.TypeIXFR), dns.RcodeRefused},
		"transfer": {question("example.test.", dns.TypeAXFR), dns.RcodeRefused}, "EDNS 1": {vers, dns.RcodeBadVers},
	} {
		b, err := c.q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		r := new(dns.Msg)
		if err := r.Unpack(raw(t, to, b)); err != nil || r.Rcode != c.rcode || r.Id != c.q.Id {
			t.Errorf("%s: %s, want %s", what, dns.RcodeToString[r.Rcode], dns.RcodeToString[c.rcode])
		}
	}
}

func TestTruncation(t *testing.T) {
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, tcp bool) {
		r := new(dns.Msg).SetReply(q)
		if strings.HasPrefix(q.Question[0].Name, "cut") && !tcp {
			r.Truncated = true
			_ = w.WriteMsg(r)
			return
		}
		for i := range 100 { // 1.6 kB at least, whatever the size asked for
			addA(r, q.Question[0].Name, fmt.Sprintf("192.0.2.%d", i), 60)
		}
		r.Compress = true
		_ = w.WriteMsg(r)
	})
	to := server(t, new(job), up)
	r := ask(t, "udp", to, question("big.test.", dns.TypeA))
	r.Compress = true // as it was sent
	if !r.Truncated || r.Len() > 512 || len(r.Answer) == 0 {
		t.Errorf("plain UDP: TC %v, %d bytes, %d records, want cut to 512", r.Truncated, r.Len(), len(r.Answer))
	}
	q := question("big.test.", dns.TypeA)
	q.SetEdns0(4096, false)
	if r = ask(t, "udp", to, q); r.Truncated || len(r.Answer) != 100 {
		t.Errorf("EDNS 4096: TC %v, %d records, want all", r.Truncated, len(r.Answer))
	}
	if r = ask(t, "udp", to, question("cut.test.", dns.TypeA)); !r.Truncated {
		t.Error("upstream's TC was lost")
	}
	if r = ask(t, "tcp", to, question("cut.test.", dns.TypeA)); r.Truncated || len(r.Answer) != 100 {
		t.Errorf("over TCP: TC %v, %d records, want the whole from upstream's TCP", r.Truncated, len(r.Answer))
	}
}

func TestResolversFail(t *testing.T) {
	dead := netip.MustParseAddrPort("127.0.0.1:9")
	silent := upstream(t, func(dns.ResponseWriter, *dns.Msg, bool) {})
	broken := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		_ = w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeServerFailure))
	})
	wrong := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		r := new(dns.Msg).SetReply(q)
		r.Question[0].Name = "other.test."
		addA(r, "other.test.", "192.0.2.66", 1)
		_ = w.WriteMsg(r)
	})
	good := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		r := new(dns.Msg).SetReply(q)
		addA(r, q.Question[0].Name, "192.0.2.1", 1)
		_ = w.WriteMsg(r)
	})
	// Silence takes all of the timeout; the good one must not need it.
	const short, long = 100 * time.Millisecond, 3 * time.Second
	for _, c := range []struct {
		what    string
		ups     []netip.AddrPort
		rcode   int
		timeout time.Duration
	}{
		{"closed", []netip.AddrPort{dead}, dns.RcodeServerFailure, limit},
		{"silent", []netip.AddrPort{silent}, dns.RcodeServerFailure, short},
		{"answers another question", []netip.AddrPort{wrong}, dns.RcodeServerFailure, short},
		{"fails", []netip.AddrPort{broken}, dns.RcodeServerFailure, limit},
		{"closed, then good", []netip.AddrPort{dead, good}, dns.RcodeSuccess, limit},
		{"silent, then good", []netip.AddrPort{silent, good}, dns.RcodeSuccess, long},
		{"failing, then good", []netip.AddrPort{broken, good}, dns.RcodeSuccess, limit},
	} {
		r := ask(t, "udp", serverThatWaits(t, c.timeout, new(job), c.ups...), question("a.test.", dns.TypeA))
		if r.Rcode != c.rcode {
			t.Errorf("%s: %s, want %s", c.what, dns.RcodeToString[r.Rcode], dns.RcodeToString[c.rcode])
		}
	}
}

func TestAnswersAreTold(t *testing.T) {
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		r := new(dns.Msg).SetReply(q)
		r.Answer = append(r.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 40}, Target: "cdn.test."})
		addA(r, "cdn.test.", "192.0.2.1", 30)
		addA(r, "cdn.test.", "192.0.2.2", 90)
		addA(r, "unasked.test.", "192.0.2.3", 90)
		_ = w.WriteMsg(r)
	})
	j := &job{wants: true}
	ask(t, "udp", server(t, j, up), question("www.test.", dns.TypeA))
	want := []dnsd.Answer{{
		Names: []string{"www.test", "cdn.test"}, TTL: 30 * time.Second,
		Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
	}}
	j.mu.Lock()
	defer j.mu.Unlock()
	if d := cmp.Diff(want, j.answered, cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Errorf("answers told (-want +got):\n%s", d)
	}
}

// Questions of one connection are answered whole, whatever their order, and only
// so many at once.
func TestPipelining(t *testing.T) {
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, _ bool) {
		r := new(dns.Msg).SetReply(q)
		addA(r, q.Question[0].Name, "192.0.2.1", 1)
		_ = w.WriteMsg(r)
	})
	j := new(job)
	c, err := net.Dial("tcp", server(t, j, up))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	const n = 100
	go func() {
		for i := range n {
			q := question(fmt.Sprintf("n%d.test.", i), dns.TypeA)
			q.Id = uint16(i)
			b, _ := q.Pack()
			_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
		}
	}()
	seen := make(map[uint16]bool)
	for range n {
		var l [2]byte
		if _, err := io.ReadFull(c, l[:]); err != nil {
			t.Fatalf("after %d answers: %v", len(seen), err)
		}
		b := make([]byte, binary.BigEndian.Uint16(l[:]))
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		m := new(dns.Msg)
		if err := m.Unpack(b); err != nil || m.Question[0].Name != fmt.Sprintf("n%d.test.", m.Id) {
			t.Fatalf("answer %v, %v", m, err)
		}
		seen[m.Id] = true
	}
	if len(seen) != n {
		t.Errorf("%d different answers, want %d", len(seen), n)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.most > dnsd.MaxPiped {
		t.Errorf("%d questions were being answered at once, want at most %d", j.most, dnsd.MaxPiped)
	}
}

// An answer over TCP is believed only if it is the question's: same identifier,
// same name.
func TestAnswersOverTCP(t *testing.T) {
	for what, spoil := range map[string]func(r *dns.Msg){
		"as it is":           func(*dns.Msg) {},
		"another identifier": func(r *dns.Msg) { r.Id ^= 0x55 },
		"another name":       func(r *dns.Msg) { r.Question[0].Name = "b.test." },
		"a question":         func(r *dns.Msg) { r.Response = false },
	} {
		t.Run(what, func(t *testing.T) {
			up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg, tcp bool) {
				r := new(dns.Msg).SetReply(q)
				if r.Truncated = !tcp; tcp {
					addA(r, "a.test.", "192.0.2.7", 60)
					spoil(r)
				}
				_ = w.WriteMsg(r)
			})
			j := &job{wants: true}
			r := ask(t, "tcp", server(t, j, up), question("a.test.", dns.TypeA))
			good := what == "as it is"
			if (r.Rcode == dns.RcodeSuccess) != good || len(j.answered) > 0 != good {
				t.Errorf("%v, told of %v", r, j.answered)
			}
		})
	}
}
